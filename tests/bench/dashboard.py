"""Measures the speed of the dashboard against its bars: `python -m tests.bench.dashboard [--small]`.

A real server in a process of its own, asked over HTTP and drawn by a headless Chromium, over runs that
`tests.helpers.large` writes: ten thousand checkpoints, a million leaves, the spans of thousands of ranks, a sparse
tensor of 100 GB. Each bar is printed beside its figure. Files go to a temporary directory; a bar whose page is not
there says so.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from tests.bench.dashboard_contents import measure_changes, measure_contents
from tests.helpers.large import (
    PHASES,
    spans_of_ranks,
    write_large_checkpoint,
    write_many,
    write_spans,
    write_sparse,
    write_timed,
)
from tests.helpers.samples import gpt_state, write_checkpoint

__all__ = ["main"]

_STATIC = Path(__file__).parents[2] / "dashboard" / "static"


@dataclass(frozen=True)
class Size:
    """How much there is to show."""

    checkpoints: int = 10_000
    leaves: int = 1_000_000
    heat_ranks: int = 4096
    heat_phases: int = 500
    ranks: int = 16_384
    treemap: int = 100_000
    tensor: int = 100 << 30
    asks: int = 60
    trends: int = 10_000
    trend_ranks: int = 64
    contents: int = 1_500 << 20
    changed: int = 100_000


SMALL = Size(300, 20_000, 256, 20, 512, 2_000, 1 << 30, 10, 300, 8, 32 << 20, 2_000)


@dataclass
class Table:
    """The bars that were measured."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, name: str, bar: float, unit: str, measure: Callable[[], float]) -> None:
        """Measures and prints one bar."""
        try:
            value = measure()
            row = (name, f"{value:,.0f} {unit}", f"{bar:,g} {unit}", "ok" if value <= bar else "MISSED")
        except Exception as error:  # the others are still worth measuring
            row = (name, f"{type(error).__name__}: {error}".splitlines()[0][:60], f"{bar:,g} {unit}", "not measured")
        self.rows.append(row)
        print(f"{row[0]:<58} {row[1]:>14}   bar {row[2]:>10}   {row[3]}", flush=True)


# the server ----------------------------------------------------------------------------------------------------------


class Server:
    """`treeckpt dashboard` in a process of its own."""

    def __init__(self, runs: Sequence[Path], cache: Path) -> None:
        command = [sys.executable, "-m", "treeckpt", "dashboard", *runs, "--port", "0", "--cache", cache]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def get(self, path: str) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def json(self, path: str):
        """The answer of the API, waited for while an index is read."""
        while True:
            status, body = self.get(f"api/v1/{path}")
            if status != 202:
                assert status == 200, f"{path}: {status}"
                return json.loads(body)
            time.sleep(0.05)

    def p95(self, paths: list[str]) -> float:
        """Milliseconds within which 95 of 100 of these are answered."""
        times: list[float] = []
        for path in paths:
            start = time.perf_counter()
            status, _ = self.get(path)
            assert status == 200, f"{path}: {status}"
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.quantiles(times, n=20)[-1]

    def checkpoint(self) -> str:
        """The id of the newest checkpoint, once there is one to see."""
        while not (found := self.json("runs")["runs"][0]["checkpoints"]):
            time.sleep(0.05)
        return found[0]["id"]

    def memory(self) -> float:
        """The most megabytes that the server's process ever held."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1e3


@contextmanager
def serving(run: Path, cache: Path, *more: Path) -> Iterator[Server]:
    """A server of one run or more, ended afterwards."""
    server = Server([run, *more], cache)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(20)


# the browser ---------------------------------------------------------------------------------------------------------


class Browser:
    """A headless Chromium."""

    def __init__(self, playwright) -> None:
        names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
        program = next(filter(None, map(shutil.which, names)), None)
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-precise-memory-info"]
        self._browser = playwright.chromium.launch(executable_path=program, args=arguments)
        self.page = self._browser.new_page(viewport={"width": 1280, "height": 900})

    def first_paint(self, address: str) -> float:
        """Milliseconds from the start of the navigation to the first contents on the screen."""
        self.page.goto(address)
        script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
        end = time.monotonic() + 30
        while (value := self.page.evaluate(script)) is None:
            assert time.monotonic() < end, "nothing is painted"
            self.page.wait_for_timeout(20)
        return value

    def redrawn(self, address: str, canvas: str, button: str = "") -> float:
        """Milliseconds in which a picture is laid out and drawn to its last point.

        Without a button that has it drawn, all pictures of the page are.
        The time of fetching the data is the server's, and is measured apart.
        """
        self.page.goto(address)
        picture = self.page.locator(canvas).first
        before, calm = None, 0
        while calm < 3:  # until it has its data
            self.page.wait_for_timeout(100)
            now = picture.evaluate(_FINGERPRINT)
            calm = calm + 1 if now == before and now[0] > 1 else 0
            before = now
        return _median(lambda: picture.evaluate(_REDRAW, button))

    def heap(self) -> float:
        """Megabytes that the scripts of the page hold."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable")
        session.send("HeapProfiler.collectGarbage")
        found = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        session.detach()
        return found["JSHeapUsedSize"] / 1e6

    def close(self) -> None:
        """Ends it."""
        self._browser.close()


_FINGERPRINT = """(canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let sum = 0; const seen = new Set();
    for (let at = 0; at < data.length; at += 52) {
        sum = (sum * 31 + data[at]) % 1000003;
        if (seen.size < 9) seen.add(data[at]);
    }
    return [seen.size, sum];
}"""


# a pressed button draws its picture anew, and a change of the colour scheme all of a page; reading a point waits for it
_REDRAW = """(canvas, button) => {
    const start = performance.now();
    if (button) document.querySelector(`${button}[aria-pressed=false]`).click();
    else document.dispatchEvent(new Event("theme"));
    canvas.getContext("2d").getImageData(0, 0, 1, 1);
    return performance.now() - start;
}"""


# the bars ------------------------------------------------------------------------------------------------------------


def _usable(server: Server) -> float:
    """Milliseconds from the start to a page of checkpoints."""
    while True:
        status, body = server.get("")
        if status == 200 and body.count(b"data-id=") >= 100:
            return (time.perf_counter() - server.started) * 1e3
        time.sleep(0.02)


def _settled(server: Server) -> None:
    while not all(run["scan"]["complete"] for run in server.json("runs")["runs"]):
        time.sleep(0.1)


def _runs(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    run = write_many(folder / "many", size.checkpoints)
    with serving(run, folder / "cache") as server:
        table.add(f"{size.checkpoints:,} checkpoints, cold: start to usable", 3000, "ms", lambda: _usable(server))
        _settled(server)
    time.sleep(0.2)
    with serving(run, folder / "cache") as server:
        table.add("the same, warm: start to the first 200", 1000, "ms", lambda: _first(server))
        _settled(server)
        run_id = server.json("runs")["runs"][0]["id"]
        table.add("runs page: first paint", 300, "ms", lambda: _median(lambda: browser.first_paint(server.address)))
        asks = [f"api/v1/runs/{run_id}?start={n * 100}" for n in range(size.asks)]
        sorts = [f"api/v1/runs/{run_id}?sort={s}&q=step&keep=last:3" for s in ("newest", "-time", "bytes")] * 20
        table.add("runs API: p95", 50, "ms", lambda: server.p95(asks + sorts))
        table.add("a new save shows after", 3000, "ms", lambda: _new_save(server, run, browser))


def _first(server: Server) -> float:
    assert server.get("")[0] == 200
    return (time.perf_counter() - server.started) * 1e3


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(5))


def _new_save(server: Server, run: Path, browser: Browser) -> float:
    browser.page.goto(server.address)
    browser.page.wait_for_timeout(2500)
    write_checkpoint(run / "step_99999999", gpt_state(layers=1), step=99_999_999)
    start = time.perf_counter()
    browser.page.get_by_role("link", name="step 99,999,999").wait_for(timeout=20_000)
    return (time.perf_counter() - start) * 1e3


def _leaves(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    write_large_checkpoint(folder / "large" / "step_00000001", leaves=size.leaves)
    name = f"{size.leaves:,} leaves"
    with serving(folder / "large", folder / "cache") as server:
        at = f"checkpoints/{server.checkpoint()}"
        start = time.perf_counter()
        table.add(f"{name}, never seen: shell painted", 500, "ms", lambda: browser.first_paint(server.address + at))
        table.add("the same: tree there after", 10_000, "ms", lambda: _tree(browser, start))
        table.add(f"{name}, indexed: first paint", 300, "ms",
                  lambda: _median(lambda: browser.first_paint(server.address + at)))  # fmt: skip
        pick = random.Random(1)
        states = size.leaves // 4
        nodes = ["", "0", "1", "1.0", *(f"1.0.{pick.randrange(states)}" for _ in range(size.asks))]
        starts = [f"api/v1/{at}/tree?node=1.0&start={pick.randrange(states)}" for _ in range(size.asks)]
        table.add("expand a node: p95", 100, "ms",
                  lambda: server.p95([f"api/v1/{at}/tree?node={node}" for node in nodes] + starts))  # fmt: skip
        table.add("search: p95", 250, "ms", lambda: server.p95([f"api/v1/{at}/search?q={q}" for q in _questions(pick)]))
        boxes = f"api/v1/{at}/treemap?count={size.treemap}"
        table.add(f"treemap of {name}: answer", 500, "ms", lambda: server.p95([boxes] * 3))
        browser.page.goto(server.address + at)
        browser.page.get_by_role("treeitem").first.wait_for(timeout=20_000)
        table.add(f"{name}: memory of the server", 400, "MB", server.memory)
        table.add(f"{name}: heap of the page's scripts", 60, "MB", browser.heap)


def _treemap(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    # three of five leaves are weights, which are large enough to be boxes
    write_large_checkpoint(folder / "boxes" / "step_00000001", leaves=size.treemap * 5 // 3)
    with serving(folder / "boxes", folder / "cache") as server:
        at = f"checkpoints/{server.checkpoint()}"
        ask = f"api/v1/{at}/treemap?by=dtype&count={size.treemap}"
        found = len(server.json(ask.removeprefix("api/v1/"))["names"])
        table.add(f"treemap of {found:,} boxes: answer", 500, "ms", lambda: server.p95([ask] * 3))
        more = f"&count={size.treemap}"
        browser.page.route("**/treemap?*", lambda route: route.continue_(url=route.request.url + more))
        try:
            table.add("the same, laid out and drawn", 500, "ms",
                      lambda: browser.redrawn(f"{server.address}{at}?map=dtype", "#treemap-canvas"))  # fmt: skip
        finally:
            browser.page.unroute("**/treemap?*")


def _tree(browser: Browser, start: float) -> float:
    browser.page.get_by_role("treeitem").first.wait_for(timeout=120_000)
    return (time.perf_counter() - start) * 1e3


def _questions(pick: random.Random) -> list[str]:
    words = ["nothing", "exp_avg", "qkv%20weight", "step", "norm", "model%20optimizer", "e%20a%20o"]
    return words * 4 + [f"layers.{pick.randrange(40_000)}.%20qkv" for _ in range(12)]


def _timings(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    many = [f"phase {n}" for n in range(size.heat_phases - 1)]
    for ranks, phases, name, bar, canvas, button in (
        (
            size.heat_ranks,
            many,
            f"heat map of {size.heat_ranks:,} ranks x {size.heat_phases}",
            100,
            "#heat-canvas",
            "[data-scale]",
        ),
        (size.ranks, PHASES, f"waterfall of {size.ranks:,} ranks x 12", 300, "#waterfall-canvas", ""),
    ):
        run = folder / f"spans-{ranks}-{bar}"
        write_spans(run / "step_00000001", world=ranks, phases=phases)
        with serving(run, folder / "cache") as server:
            at = f"checkpoints/{server.checkpoint()}/timing"
            server.get(at)
            table.add(name + ", drawn", bar, "ms", partial(browser.redrawn, server.address + at, canvas, button))


def _trends(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    kinds = [tuple(spans_of_ranks(size.trend_ranks, slow=rank)) for rank in range(20)]
    run = write_timed(folder / "trends", size.trends, lambda n: kinds[n % len(kinds)])
    name = f"trends of {size.trends:,} saves x {size.trend_ranks}"
    with serving(run, folder / "cache") as server:
        table.add(f"{name}, nothing read: first page", 1000, "ms", lambda: browser.first_paint(_trends_of(server)))
        _settled(server)
    time.sleep(0.2)
    with serving(run, folder / "cache") as server:
        at = _trends_of(server).removeprefix(server.address)
        _settled(server)
        pages = [at, f"api/v1/{at}", f"api/v1/{at}/bins"]
        table.add(f"{name}, reduced: first page and data", 1000, "ms", lambda: _answered(server, pages))
        assert server.json(f"{at}/bins")["saves"] == size.trends, "every save was reduced"
        views = [f"api/v1/{at}/bins?low={n * size.trends // 40}" for n in range(20)]
        table.add("the same, warm: p95 of each page", 100, "ms", lambda: server.p95(pages * 7))
        table.add("the same, another range of steps: p95", 100, "ms", lambda: server.p95(views))
        table.add("the same: first paint", 300, "ms", lambda: _median(lambda: browser.first_paint(server.address + at)))
        table.add("the same: memory of the server", 400, "MB", server.memory)


def _six_runs(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    spans = tuple(spans_of_ranks(size.trend_ranks))
    run = write_timed(folder / "six" / "run0", size.trends, lambda n: spans)
    copies = [folder / "six" / f"run{n}" for n in range(1, 6)]
    for copy in copies:
        shutil.copytree(run, copy, copy_function=os.link)
    with serving(run, folder / "cache", *copies) as server:
        _settled(server)
        runs = server.json("runs")["runs"]
        assert len(runs) == 6
        for run in runs:
            assert server.json(f"runs/{run['id']}/trends/bins")["saves"] == size.trends
        table.add(
            f"six runs of {size.trends:,} saves x {size.trend_ranks}: memory of the server", 400, "MB", server.memory
        )


def _trends_of(server: Server) -> str:
    return f"{server.address}runs/{server.json('runs')['runs'][0]['id']}/trends"


def _answered(server: Server, paths: list[str]) -> float:
    """Milliseconds until all of these are answered, one after the other."""
    start = time.perf_counter()
    for path in paths:
        assert server.get(path)[0] == 200, path
    return (time.perf_counter() - start) * 1e3


def _peek(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    write_sparse(folder / "sparse" / "step_00000001", nbytes=size.tensor)
    with serving(folder / "sparse", folder / "cache") as server:
        at = f"api/v1/checkpoints/{server.checkpoint()}/leaves/0/peek"
        rows = size.tensor // 4096
        pick = random.Random(1)
        asks = [f"{at}?top={pick.randrange(rows - 256)}&rows=256&columns=1024" for _ in range(12)]
        name = f"peek 1 MiB of a sparse tensor of {size.tensor >> 30} GiB"
        table.add(f"{name}: p95", 150, "ms", lambda: server.p95(asks))
        table.add("the same: bytes read over bytes shown", 4, "x", lambda: _read_share(server, asks[0]))


def _read_share(server: Server, ask: str) -> float:
    found = server.json(ask.removeprefix("api/v1/"))
    assert found["nbytes"] == 1 << 20, "a slice of 1 MiB was asked for"
    return found["read"] / found["nbytes"]


def _weights(table: Table, folder: Path, size: Size, browser: Browser) -> None:
    kilobytes = {path: len(gzip.compress(path.read_bytes())) / 1e3 for path in _STATIC.rglob("*") if path.is_file()}
    fetched = sum(n for path, n in kilobytes.items() if path.suffix in (".js", ".css", ".svg"))
    table.add("all scripts and styles, compressed", 200, "kB", lambda: fetched)
    run = write_many(folder / "few", 200)
    with serving(run, folder / "cache") as server:
        asked: list[str] = []
        browser.page.on("response", lambda response: asked.append(response.url))
        browser.page.goto(server.address, wait_until="networkidle")
        paths = {urlsplit(url).path.lstrip("/") for url in asked if url.startswith(server.address)}
        weight = sum(len(gzip.compress(server.get(path)[1])) for path in paths if not path.startswith("api/")) / 1e3
        table.add("the first page with 100 checkpoints, compressed", 60, "kB", lambda: weight)


PARTS = {
    "weights": _weights,
    "runs": _runs,
    "leaves": _leaves,
    "treemap": _treemap,
    "timings": _timings,
    "trends": _trends,
    "six": _six_runs,
    "peek": _peek,
    "contents": partial(measure_contents, serving),
    "changes": partial(measure_changes, serving),
}


def main(arguments: list[str] | None = None) -> Table:
    """Measures every bar and prints it beside its figure."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dashboard", description=__doc__)
    parser.add_argument("--small", action="store_true", help="with little data: whether it runs, not how fast it is")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="these parts alone")
    parser.add_argument("--folder", type=Path, help="where the data goes (default: a temporary directory)")
    options = parser.parse_args(arguments)
    from playwright.sync_api import sync_playwright

    table, size = Table(), SMALL if options.small else Size()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, numpy {np.__version__}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name, sync_playwright() as playwright:
        browser, folder = Browser(playwright), Path(name)
        try:
            for part in options.only or PARTS:
                PARTS[part](table, folder, size, browser)
        finally:
            browser.close()
    return table


if __name__ == "__main__":
    main()
