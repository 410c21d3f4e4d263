"""Bars of the dashboard that concern what arrays hold: verification, statistics and what changed most."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.samples import write_checkpoint
from treeckpt._bench.raw_limits import RawLimits
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.open import open_store
from treeckpt._loading.verify import LeafMoments, verify_checkpoint

Serving = Callable[[Path, Path], AbstractContextManager[Any]]
"""Starts a server of a run with a cache directory."""


def measure_contents(serving: Serving, table: Any, folder: Path, size: Any, browser: Any) -> None:
    """Measures a verification with and without statistics, in pairs with a raw read."""
    run = folder / "contents"
    numbers = np.random.default_rng(0).standard_normal(4 << 20).astype(np.float32)
    tree = {f"layers.{n}.weight": numbers for n in range(size.contents // numbers.nbytes)}
    index = write_checkpoint(run / "step_00000001", tree, step=1, world=2, layouts=lambda path, array: None)
    raw = RawLimits(folder / "raw", size.contents)
    raw.measure("W")
    times: dict[str, list[float]] = {"raw": [], "verified": [], "statistics": [], "job": []}
    with serving(run, folder / "cache") as server:
        at = f"checkpoints/{server.checkpoint()}/verify"
        for _ in range(5):  # one after the other, so that a slow moment hits all of them
            times["raw"].append(index.nbytes / raw.measure("R"))
            times["verified"].append(_read_all(run / "step_00000001", statistics=False))
            times["statistics"].append(_read_all(run / "step_00000001", statistics=True))
            _drop_pages(run / "step_00000001")
            found = server.json(f"{at}?action=start")
            while found["running"]:
                time.sleep(0.05)
                found = server.json(at)
            times["job"].append(found["checkpoint"]["verification"]["seconds"])
    raw.remove()
    median = {name: statistics.median(all_of) for name, all_of in times.items()}
    name = f"{index.nbytes / 1e9:,.2g} GB"
    table.add(f"verify job of {name}, over a raw read", 111, "%", lambda: 100 * median["job"] / median["raw"])
    table.add("statistics of all arrays, over a verified read", 150, "%",
              lambda: 100 * median["statistics"] / median["verified"])  # fmt: skip


def _drop_pages(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(path: Path, *, statistics: bool) -> float:
    """Seconds of a verification."""
    _drop_pages(path)
    checkpoint = Checkpoint(open_store(path))
    report = verify_checkpoint(checkpoint, moments=LeafMoments(checkpoint.index) if statistics else None)
    assert report.ok, report
    return report.seconds


def measure_changes(serving: Serving, table: Any, folder: Path, size: Any, browser: Any) -> None:
    """Measures the ranking of many arrays, and their differences, once they are known."""
    run, numbers = folder / "changed", np.random.default_rng(0).standard_normal((size.changed, 16)).astype(np.float32)
    for step in (1, 2):
        tree = {
            f"layers.{n // 8}.part{n % 8}": row * (1 + (step - 1) * n / size.changed) for n, row in enumerate(numbers)
        }
        write_checkpoint(run / f"step_{step:08d}", tree, step=step, world=1, layouts=lambda path, array: None)
    with serving(run, folder / "cache") as server:
        while not server.json("runs")["runs"][0]["scan"]["complete"]:
            time.sleep(0.1)
        b, a = (row["id"] for row in server.json("runs")["runs"][0]["checkpoints"])
        ask = f"diff/changes?a={a}&b={b}"
        server.json(ask)
        found = server.json(f"{ask}&action=start")
        while found["running"]:
            time.sleep(0.1)
            found = server.json(ask)
        assert found["changed"] == size.changed - 1, found["error"]
        asks = [f"api/v1/{ask}{more}" for more in ("", "&by=layer", "&q=part3", "&start=500")] * 5
        table.add(f"{size.changed:,} arrays by relative change, warm: p95", 1000, "ms", lambda: server.p95(asks))
        diffs = [f"api/v1/diff?a={a}&b={b}&start={n}" for n in (0, 100, 200)]
        server.p95(diffs)
        table.add("differences of the same, warm: p95", 1000, "ms", lambda: server.p95(diffs))
