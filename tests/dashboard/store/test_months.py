"""A server that runs for months keeps nothing of runs and checkpoints that are gone, and no file open."""

import gc
import shutil
import weakref

from starlette.testclient import TestClient

from tests.helpers.background import files_open, until
from tests.helpers.large import write_many
from tests.helpers.samples import write_checkpoint, write_mixed_run
from treeckpt._io.storage.open import open_run
from treeckpt._io.storage.shared_files import read_shared
from treeckpt_dashboard.store.cache import Cache
from treeckpt_dashboard.store.library import Library
from treeckpt_dashboard.web.app import create_app


def test_all_that_is_known_of_a_run_goes_with_it(tmp_path):
    for name in ("goes", "stays"):
        write_many(tmp_path / "runs" / name, 4)
    now = [0.0]
    app = create_app([tmp_path / "runs"], cache=tmp_path / "cache")
    client, library = TestClient(app, base_url="http://127.0.0.1:8265"), app.state.library
    library._clock = lambda: now[0]
    runs = {run["name"]: run["id"] for run in client.get("/api/v1/runs").json()["runs"]}
    for run_id in runs.values():
        for page in ("trends", "trends/bins", "failures"):
            assert client.get(f"/api/v1/runs/{run_id}/{page}").status_code == 200
    watch = weakref.ref(library.watches[runs["goes"]])
    shutil.rmtree(tmp_path / "runs" / "goes")
    now[0] = 1e9

    def forgotten():
        names = [run["name"] for run in client.get("/api/v1/runs").json()["runs"]]
        gc.collect()
        return names == ["stays"] and list(library.watches) == [runs["stays"]] and watch() is None

    assert until(forgotten)
    for service in app.state.services.values():
        for kept in ("_kept", "_known", "_lists", "_reduced", "_inside"):
            assert len(vars(service).get(kept, ())) <= 1, f"{service}.{kept}"
    assert client.get(f"/api/v1/runs/{runs['goes']}").status_code == 404


def test_a_request_that_goes_on_with_a_run_that_is_gone_keeps_nothing(tmp_path):
    for name in ("goes", "stays"):
        write_many(tmp_path / "runs" / name, 1)
    library = Library([tmp_path / "runs"], cache=Cache(tmp_path / "cache"))
    goes, stays = library.runs
    shutil.rmtree(tmp_path / "runs" / "goes")
    library._look_for_runs([run for run, _ in library._given])
    assert library.checkpoints(goes, wait=300) == [] and len(library.checkpoints(stays, wait=300)) == 1
    assert list(library.watches) == [stays.id]
    for kept in (library._lists, library._unread, library._reduced):
        assert kept.keys() <= {stays.id}


def test_ids_of_checkpoints_that_are_gone_are_forgotten(tmp_path):
    """Those that are there are found by their ids all the time."""
    run = write_many(tmp_path / "run", 1200)
    library = Library([run], cache=Cache(tmp_path / "cache"))
    [found] = library.runs
    old, _ = library.checkpoints(found, wait=300)[-1]
    assert len(library._directories) == 1200
    for path in run.iterdir():
        shutil.rmtree(path)
    write_checkpoint(run / "step_00999999", step=999_999)
    library.watches[found.id]._fresh_until = None
    [(new, _)] = library.checkpoints(found, wait=300)
    assert library.checkpoint(new).id == new and set(library._directories) == {new}
    assert old not in library._directories


def test_shards_are_closed_once_they_are_looked_at(tmp_path):
    """An open file keeps its bytes on the disk after it was deleted."""
    run = write_mixed_run(tmp_path / "run")
    store = open_run(str(run))
    folders = [store.folder(name) for name in store.names()]
    for folder in folders:
        read_shared(folder)
    assert files_open(run) == []


def test_pages_leave_no_file_of_a_run_open(tmp_path):
    run = write_mixed_run(tmp_path / "run")
    gc.disable()
    try:
        with TestClient(create_app([run], cache=tmp_path / "cache"), base_url="http://127.0.0.1:8265") as client:
            [found] = client.get("/api/v1/runs").json()["runs"]
            ids = [one["id"] for one in found["checkpoints"] if one["readable"]]
            assert len(ids) > 1
            pages = [f"checkpoints/{one}{page}" for one in ids for page in ("", "/files", "/timing", "/leaves/0/peek")]
            for page in ("usage?keep=last:1", "live", f"runs/{found['id']}", *pages):
                assert client.get(f"/api/v1/{page}").status_code in (200, 404), page
                assert until(lambda: not files_open(run)), page
    finally:
        gc.enable()
    gc.collect()
    assert until(lambda: files_open(tmp_path / "cache") == [])
