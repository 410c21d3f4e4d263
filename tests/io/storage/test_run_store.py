"""Everything that works on a run works on one in an object store: writer process, manager, command line, dashboard."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import session
from tests.helpers.s3 import PAGE, QUICK, S3, array, same, wait_for_late_requests
from tests.helpers.world import assert_equal, small_tree, whole_tree
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._io.comm.comm import SoloComm
from treeckpt._io.storage.object_store import open_bucket
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_long_run_is_listed_by_pages(s3: S3, count: int) -> None:
    url = s3.url()
    bucket, key = open_bucket(url, s3.options(endpoint=f"http://127.0.0.1:{s3.port}"))
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda step: bucket.put(f"{key}/{step_name(step)}/index.json", b"{}", replace=True), range(count))
        )
    run = tc.ObjectRun(url)
    assert run.names() == [step_name(step) for step in range(count)]
    assert len(s3.log()) <= count // PAGE + 1
    s3.rules()
    folders = run.folders()
    assert [folder.name for folder in folders] == run.names()
    assert all(folder.entries()["index.json"].nbytes == 2 and folder.modified_ns() for folder in folders)
    assert len(s3.log()) <= 2 * (count // PAGE + 1), "not one for each checkpoint"


@pytest.mark.parametrize("given", ["environment", "options"])
def test_the_writer_process_uploads_without_torch(s3: S3, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    comm, tree, url = SoloComm(), {"w": array(17), "n": 3}, s3.url()
    if given == "options":
        for name in s3.environment():
            monkeypatch.delenv(name)
    store = url if given == "environment" else s3.store(url, **QUICK)
    try:
        report = tc.save_async(store, tree, comm=comm).result(60)
        assert session(comm).writer.alive
        modules = session(comm).writer.modules()
        assert "obstore" in modules and not {"torch", "fsspec"} & set(modules)
    finally:
        session(comm).writer.end()
    assert report.nbytes >= tree["w"].nbytes and same(store, tree)
    assert any("partNumber" in row["path"] for row in s3.log())


def test_a_store_that_no_other_process_can_open_is_written_by_a_thread() -> None:
    comm, url = SoloComm(), "memory://of/this/process"
    tc.save_async(url, {"n": 1}, comm=comm).result(60)
    assert session(comm).writer.pid is None and tc.load(url) == {"n": 1}
    assert pickle.loads(pickle.dumps(tc.ObjectStore(url))).url == url


def test_a_manager_saves_keeps_pins_restores_and_cleans_up(far_run: str) -> None:
    with tc.Manager(far_run, keep=2, background=False) as made:
        assert made.latest() is None
        for step in (1, 2, 3, 4):
            made.save(step, small_tree(0, 1, seed=step), pin=step == 1, metrics={"loss": step})
        assert made.steps() == [1, 3, 4] and made.latest(verify=True) == 4 and made.best("loss") == 1
        assert_equal(made.restore(step=3), whole_tree(seed=3))
        made.save(4, small_tree(0, 1, seed=9))
        assert_equal(made.restore(), whole_tree(seed=9))
        made.unpin(1)
        [removal] = made.clean().removed
        assert removal.name == step_name(1)
    assert tc.ObjectRun(far_run).names() == [step_name(3), step_name(4)]
    store = tc.ObjectStore(f"{far_run}/{step_name(4)}")
    wait_for_late_requests()
    kinds = sorted(name.partition(".")[0].partition("-")[0] for name in store.sizes())
    assert kinds == ["ended", "index", "shard", "timings"], "what was replaced is gone"
    tc.rebuild_index(f"{far_run}/{step_name(4)}", replace=True)
    assert tc.verify(store).ok


def test_a_reader_keeps_a_checkpoint_until_it_is_done(far_run: str) -> None:
    made = tc.Manager(far_run, keep=None, background=False)
    for step in (1, 2):
        made.save(step, {"step": step})
    with made.reading(1) as store:
        assert not RunDirectory(far_run).clean([Last(1)]).removed and tc.load(store) == {"step": 1}
    assert [r.name for r in RunDirectory(far_run).clean([Last(1)]).removed] == [step_name(1)]


def test_leftovers_of_crashed_saves_and_deletions_go(far_run: str) -> None:
    made = tc.Manager(far_run, keep=None, background=False)
    for step in (1, 2):
        made.save(step, {"w": np.arange(9)})
    tc.ObjectStore(f"{far_run}/{step_name(1)}").delete("index.json")
    assert made.steps() == [2] and not RunDirectory(far_run).clean([Last(5)]).removed, "it may be a save under way"
    later = RunDirectory(far_run, clock=lambda: time.time_ns() + 7200 * 10**9)
    assert [r.name for r in later.clean([Last(5)]).removed] == [step_name(1)]
    assert tc.ObjectRun(far_run).names() == [step_name(2)] and made.restore()["w"].sum() == 36


def test_a_deletion_goes_lock_mark_index_decision_shards_mark(s3: S3) -> None:
    url = s3.url()
    for step in (1, 2):
        tc.save(f"{url}/{step_name(step)}", {"w": np.arange(9)}, step=step)
    s3.rules()
    RunDirectory(url).clean([Last(1)])
    changes = [(row["method"], row["path"].rpartition("/")[2].partition(".")[0]) for row in s3.log()]
    changes = [change for change in changes if change[0] in ("PUT", "DELETE", "POST")]
    taken = [("PUT", "deleting"), ("PUT", "deleted"), ("DELETE", "index"), ("PUT", "deleted"), ("DELETE", "deleting")]
    assert changes[:5] == taken and changes[-1] == ("DELETE", "deleted")
    assert {name for _, name in changes[5:-1]} == {"shard-00000-of-00001", "timings", "deleted"}


def test_the_command_line_reads_and_cleans_runs(far_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        tc.save(f"{far_run}/{step_name(step)}", {"w": np.arange(9), "v": step}, step=step)
    first, second = (f"{far_run}/{step_name(step)}" for step in (1, 2))
    for command, text in (
        (["ls", far_run], step_name(2)),
        (["show", first], "int64"),
        (["verify", first], "intact"),
        (["diff", first, second], "1 leaf alike"),
        (["rebuild-index", first, "--replace"], "made again"),
        (["pin", far_run, "1"], f"{first} is pinned"),
        (["unpin", far_run, "1"], "no longer"),
        (["gc", far_run, "--keep-last", "1"], "1 removed"),
        (["ls", first.replace("00001", "00002")], step_name(2)),
    ):
        assert main(command) == 0
        assert text in capsys.readouterr().out, command
    assert main(["ls", f"{far_run}/nothing"]) == 2 and main(["gc", f"{far_run}/nothing"]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_the_dashboard_reads_runs(far_run: str) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from treeckpt_dashboard.web.app import create_app

    tc.save(f"{far_run}/{step_name(7)}", {"layer": {"w": np.arange(9)}}, step=7)
    client = testclient.TestClient(create_app([far_run]), base_url="http://127.0.0.1:8265")
    [found] = client.get("/api/v1/runs").json()["runs"]
    [row] = found["checkpoints"]
    assert (row["name"], row["status"], row["step"]) == (step_name(7), "complete", 7)
    assert "layer" in client.get(f"/api/v1/checkpoints/{row['id']}/tree").text
    assert client.get(f"/api/v1/checkpoints/{row['id']}/timing").status_code == 200


def test_the_dashboard_peeks_and_compares_checksums(far_run: str) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from treeckpt_dashboard.web.app import create_app

    place, matrix = f"{far_run}/{step_name(8)}", np.arange(1 << 20, dtype=np.float32).reshape(2048, 512)
    tc.save(place, {"w": matrix}, step=8)
    client = testclient.TestClient(create_app([far_run]), base_url="http://127.0.0.1:8265")
    [row] = client.get("/api/v1/runs").json()["runs"][0]["checkpoints"]
    at = f"/api/v1/checkpoints/{row['id']}"
    found = client.get(f"{at}/leaves/0/peek", params={"top": 100, "left": 8, "rows": 2, "columns": 3}).json()
    assert found["region"] == "[100:102, 8:11]" and found["verified"]
    assert [[float(text) for text in line] for line in found["values"]] == matrix[100:102, 8:11].tolist()
    assert found["read"] < matrix.nbytes / 4, "a range is read, not the object"
    assert client.get(f"{at}/files/0/checksums").json()["problem"] is None
    store = tc.ObjectStore(place)
    [shard] = [name for name in store.sizes() if name.startswith("shard")]
    data = bytearray(store.read(shard, limit=1 << 24))
    data[-1] ^= 1
    store.publish(shard, bytes(data), replace=True)
    answer = client.get(f"{at}/files/0/checksums").json()
    assert shard in answer["problem"] and answer["next"] is None
    broken = client.get(f"{at}/leaves/0/peek", params={"top": 2047, "rows": 1})
    assert broken.status_code == 404 and "checksum" in broken.json()["error"]
    assert client.get(f"{at}/leaves/0/peek", params={"top": 0, "rows": 1}).status_code == 200


def test_a_run_that_went_back_goes_on_from_what_was_saved_last(
    far_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tc.Manager(far_run, keep=None, background=False) as made:
        for step in (10, 20, 30, 40):
            made.save(step, {"step": step})
    with tc.Manager(far_run, keep=3) as made:
        made.restore(step=20)
        for step in (21, 22):
            made.save(step, {"step": step})
        made.wait()
        assert made.latest() == 22 and made.steps() == [20, 21, 22] and made.restore() == {"step": 22}
    with tc.Manager(far_run, keep=None, background=False) as made:
        made.save(21, {"step": "again"})
        assert made.latest() == 21 and tc.Manager(far_run).restore() == {"step": "again"}
    assert main(["ls", far_run]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step_")]
    assert [line.split()[0] for line in rows] == [step_name(step) for step in (21, 20, 22)]
    assert "abandoned branch" in rows[2]
