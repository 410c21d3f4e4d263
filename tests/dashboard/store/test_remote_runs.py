"""Runs in object stores: the first page waits for a few requests in a row, whatever the number of checkpoints."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.helpers.background import until
from tests.helpers.far_s3 import FarS3, far_s3_server, lists, put_many, rounds
from tests.helpers.large import write_many
from tests.helpers.s3 import BUCKET
from treeckpt._io.storage.object_store import ObjectRun
from treeckpt._io.storage.store import Store
from treeckpt._runs.discovery import scan
from treeckpt_dashboard.runs.model import runs_page
from treeckpt_dashboard.store.cache import Cache
from treeckpt_dashboard.store.library import Library
from treeckpt_dashboard.store.watch import ENOUGH, DirectoryState, RunWatcher
from treeckpt_dashboard.web.app import create_app

COUNT = 130


@pytest.fixture(scope="module")
def server() -> Iterator[FarS3]:
    with far_s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def url(server: FarS3) -> str:
    return put_many(server, COUNT)


def opened(server: FarS3, url: str, cache: Path) -> Library:
    """A dashboard, and a server that has forgotten what was requested before."""
    server.set(client=os.getpid(), rules=[])
    return Library([ObjectRun(url, **server.options())], cache=Cache(cache))


def test_the_first_page_needs_a_few_rounds_and_the_whole_run_one_listing_more(
    server: FarS3, url: str, tmp_path: Path
) -> None:
    library = opened(server, url, tmp_path)
    watch = library.watches[library.runs[0].id]
    watch.refresh(wait=300)
    log = server.log()
    newest = {row["path"].split("/")[-2] for row in log if "index.json" in row["path"]}
    assert len(newest) == COUNT == len(watch.infos) and watch.infos[0].status == "complete"
    assert len(lists(log)) == 1 + ENOUGH + 1, "names, the directories of the first page, and a page of all objects"
    assert len(log) == 1 + ENOUGH + 1 + 2 * COUNT, "and an index and timings for each checkpoint"
    assert max(row["busy"] for row in log) >= 32
    assert rounds(log) <= 40, "where one after the other would be more than 300"
    page = [row for row in log if any(f"step_{COUNT * 100 - n * 100:08d}" in row["path"] for n in range(ENOUGH))]
    assert rounds(page) <= 16, "none of them waits for the other checkpoints"


def test_what_was_read_once_costs_one_listing(server: FarS3, url: str, tmp_path: Path) -> None:
    library = opened(server, url, tmp_path)
    run = library.runs[0]
    library.watches[run.id].refresh(wait=300)
    library.watches[run.id]._fresh_until = None
    server.set(client=0)
    library.checkpoints(run, wait=300)
    assert [len(lists(log)) for log in [server.log()] if len(lists(log)) == len(log)] == [1], "a page of all objects"
    library.close()
    again = opened(server, url, tmp_path)
    again.watches[run.id].refresh(wait=300)
    log = server.log()
    assert len(lists(log)) == len(log) == 1 + ENOUGH + 1, "a new program reads no index again"
    assert rounds(log) <= 12


def test_a_page_shows_what_is_known_while_the_rest_is_read(server: FarS3, url: str, tmp_path: Path) -> None:
    library, gate = opened(server, url, tmp_path), threading.Event()
    [run] = library.runs

    def look(folder: Store) -> DirectoryState:
        if folder.name <= f"step_{(COUNT - ENOUGH) * 100:08d}":
            gate.wait(300)
        return library.inspect_directory(run, folder)

    library.watches[run.id] = RunWatcher(run.store, look)
    assert until(lambda: len(runs_page(library).runs[0].checkpoints) == ENOUGH)
    part = runs_page(library).runs[0]
    assert (part.scan.complete, part.scan.seen, part.scan.total) == (False, ENOUGH, COUNT)
    assert part.newest_step == COUNT * 100
    gate.set()
    library.watches[run.id].refresh(wait=300)
    assert runs_page(library).runs[0].scan.complete


def test_a_store_that_refuses_later_is_said_to(server: FarS3, url: str, tmp_path: Path) -> None:
    library = opened(server, url, tmp_path)
    watch = library.watches[library.runs[0].id]
    server.set(rules=[{"match": "list-type", "do": "500", "times": 1000}])
    library.runs[0].store._bucket._store = library.runs[0].store._bucket._once.get()  # type: ignore[attr-defined]
    watch.refresh(wait=300)
    part = runs_page(library).runs[0]
    assert part.checkpoints == [] and not part.scan.complete
    assert part.scan.problem is not None and url in part.scan.problem
    server.set(rules=[])
    watch._fresh_until = None
    watch.refresh(wait=300)
    part = runs_page(library).runs[0]
    assert part.total == COUNT and part.scan.problem is None


def test_a_store_that_is_down_is_said_to_be_and_nothing_is_said_to_be_missing(
    server: FarS3, url: str, tmp_path: Path, monkeypatch
) -> None:
    server.set(client=0, rules=[])
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    app = create_app([url], cache=tmp_path / "cache")
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    [run] = app.state.library.runs
    watch = app.state.library.watches[run.id]
    watch.refresh(wait=300)
    checkpoint = client.get("/api/v1/runs").json()["runs"][0]["checkpoints"][0]["id"]
    assert "treeckpt_scan_complete{" in (text := client.get("/metrics").text) and re.search("scan_complete.* 1\n", text)
    server.set(rules=[{"match": "list-type", "do": "500", "times": 1000}])
    for at in ("", "/files"):
        answer = client.get(f"/api/v1/checkpoints/{checkpoint}{at}")
        assert answer.status_code == 502 and url in answer.json()["error"], answer.text
        page = client.get(f"/checkpoints/{checkpoint}{at}")
        assert page.status_code == 502 and "The store cannot be read" in page.text and "Not found" not in page.text
    watch._fresh_until = None
    watch.refresh(wait=300)
    assert re.search("scan_complete.* 0\n", client.get("/metrics").text)
    assert "cannot be read now" in client.get(f"/runs/{run.id}").text
    assert until(lambda: watch._running is None), "no request of it comes into the log of the next test"
    server.set(rules=[])


def test_a_list_of_a_run_reads_many_indexes_at_a_time(server: FarS3, url: str) -> None:
    server.set(client=os.getpid(), rules=[])
    told: list[tuple[int, int]] = []
    found = scan(ObjectRun(url, **server.options()), on_read=lambda done, total: told.append((done, total)))
    assert [info.step for info in found] == list(range(COUNT * 100, 0, -100))
    assert told == [(n, COUNT) for n in range(1, COUNT + 1)]
    # a page of the test before may still look for failed saves
    log = [request for request in server.log() if ".failures" not in request["path"]]
    assert len(log) == 1 + 2 * COUNT and rounds(log) <= 40


def test_runs_in_a_folder_of_a_bucket_are_found_and_new_ones_appear(server: FarS3, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("treeckpt_dashboard.store.library.LOOK_SECONDS", 0.05)
    server.set(client=0, rules=[])
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    files = [path for path in write_many(tmp_path / "run", 1).rglob("*") if path.is_file()]
    url = server.url()
    key = url.removeprefix(f"s3://{BUCKET}/")

    def put(name: str) -> None:
        for file in files:
            server.put(f"{key}/{name}/{file.relative_to(tmp_path / 'run')}", file.read_bytes())

    put("first")
    library = Library([url], cache=Cache(tmp_path / "cache"))
    assert until(lambda: [run.name for run in library.runs] == ["first"])
    put("second")
    assert until(lambda: [run.name for run in library.runs] == ["first", "second"])
    [run, _] = runs_page(library).runs
    library.watches[run.id].refresh(wait=300)
    assert runs_page(library).runs[0].complete == 1 and runs_page(library).runs[0].path == f"{url}/first"
