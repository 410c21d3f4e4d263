"""Checkpoints on an S3 server that is far away, busy or faulty: what comes back is right, or an error of ours."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.bench.s3_server import LOOK_SECONDS, LOOKS, is_asleep
from tests.helpers.background import until
from tests.helpers.elsewhere import elsewhere
from tests.helpers.far_s3 import FarS3, far_s3_server
from tests.helpers.request_times import EqualTimes, LateTimes
from tests.helpers.s3 import MIB, QUICK, array, same
from tests.helpers.world import LONG
from treeckpt._io.storage import kept_files, object_store, obstore, requests_in_flight
from treeckpt._io.storage.requests_in_flight import RequestDepth
from treeckpt._io.storage.wrapped_store import CountingStore
from treeckpt._loading import read_batch
from treeckpt._runs import discovery
from treeckpt._runs.restore import Restorer
from treeckpt._saving import shard_files

NEAR: dict[str, Any] = {
    "latency": 0.0,
    "client": 0,
    "rate": 0.0,
    "page": 1000,
    "busy_above": 0,
    "trouble": 0.0,
    "rules": [],
}


@pytest.fixture
def far(server: FarS3) -> FarS3:
    server.set(**NEAR)
    return server


@pytest.fixture
def tree() -> dict[str, Any]:
    return {"w": array(24), "b": np.arange(10.0)}


def test_a_checkpoint_comes_back_over_a_slow_link(far: FarS3, tree: dict[str, Any]) -> None:
    store = far.store()
    far.set(latency=0.02, rate=200e6)
    tc.save(store, tree)
    assert [row["status"] for row in far.log() if "partNumber" in row["path"]] == [200] * 3, "parts of 8 MiB"
    far.set(latency=0.02, rate=200e6)
    assert same(store, tree)
    read = sum(row["sent"] for row in far.gets(".safetensors"))
    assert read <= 24 * MIB + (1 << 18), "every byte once, and the fronts of headers"


def test_a_load_keeps_many_requests_of_8_mib_in_flight(far: FarS3) -> None:
    tree = {"w": array(100)}
    store = far.store()
    tc.save(store, tree)
    for load in (lambda: tc.load(store), lambda: tc.load_into(store, {"w": np.empty_like(tree["w"])})):
        far.set(**STAGED)
        load()
        reads = [row for row in far.gets(".safetensors") if row["sent"] > MIB]
        assert len(reads) <= 100 / 8 + 2
        assert max(row["busy"] for row in reads) >= len(reads) - 1, "all at the same time"


def test_a_load_with_a_progress_bar_is_as_parallel_and_counts_every_byte(far: FarS3) -> None:
    store, counted = far.store(), list[int]()
    tc.save(store, {"w": array(100)})
    far.set(**STAGED)
    tc.load(CountingStore(store, counted.append))
    assert sum(counted) >= 100 * MIB
    assert max(row["busy"] for row in far.gets(".safetensors")) >= 12


def stages(
    rows: list[dict[str, Any]], *, names: Sequence[str] = ("lease", "index", "list-type", "safetensors")
) -> list[list[str]]:
    """Requests by their method and what they ask for, in the stages in which they were answered."""
    found: dict[int, list[str]] = {}
    for row in rows:
        what = next(n for n in (*names, "") if n in row["path"])
        what += ", header" if row["range"].startswith("bytes=0-") else ""
        found.setdefault(row["stage"], []).append(f"{row['method']} {what}")
    return [found[stage] for stage in sorted(found)]


LATENCY = 0.25
"""Seconds that something else than the answer is to take less than."""
STAGED = {"client": os.getpid()}
"""Settings by which the requests that this process has sent are answered once it waits for all of them."""


@pytest.fixture
def parts(far: FarS3) -> tuple[tc.ObjectStore, dict[str, Any]]:
    """A checkpoint in 4 shards of 10 MiB and a few small arrays."""
    store, tree = far.store(), {**{f"w{n}": array(10) for n in range(4)}, "b": np.arange(10.0)}
    tc.save(store, tree, max_shard_bytes=10 * MIB)
    return store, tree


def test_after_one_request_for_the_index_all_headers_and_data_are_requested_at_once(
    far: FarS3, parts: tuple[tc.ObjectStore, dict[str, Any]]
) -> None:
    store, tree = parts
    for load in (tc.load, lambda store: tc.load_into(store, {name: np.empty_like(w) for name, w in tree.items()})):
        far.set(**STAGED)
        load(store)
        first, second, *more = stages(far.log())
        assert first == ["GET index"] and not more
        shards = {row["path"] for row in far.gets(".safetensors")}
        assert second.count("GET safetensors, header") == len(shards) > 3
        assert set(second) == {"GET safetensors, header", "GET safetensors"}


def test_a_load_sends_few_requests_and_reads_little_more_than_what_it_wants(
    far: FarS3, parts: tuple[tc.ObjectStore, dict[str, Any]]
) -> None:
    store, tree = parts
    wanted = sum(w.nbytes for w in tree.values())
    far.set(latency=0.01)
    assert same(store, tree)
    shards = len({row["path"] for row in far.gets(".safetensors")})
    assert shards > 3 and len(far.log()) <= 1.1 * wanted / (8 * MIB) + 4 * shards
    assert sum(row["sent"] for row in far.gets(".safetensors")) <= 1.02 * wanted


@pytest.fixture
def run(far: FarS3) -> tc.ObjectRun:
    """A run of two steps of 20 MiB."""
    run = tc.ObjectRun(far.url(), **far.options())
    with tc.Manager(run, comm="alone", background=False) as manager:
        manager.save(1, {"w": array(20)})
        manager.save(2, {"w": array(20)})
    return run


def test_a_restore_waits_only_for_a_listing_the_indexes_and_the_data(far: FarS3, run: tc.ObjectRun) -> None:
    far.set(**STAGED)
    with tc.Manager(run, comm="alone", background=False) as manager:
        manager.restore()
    log = ended_log(far)
    assert [sorted(set(stage)) for stage in stages(log)] == [
        ["GET list-type"],
        ["GET index"],
        ["GET safetensors", "GET safetensors, header", "PUT lease"],
        ["DELETE lease"],  # it is held until all is read
    ]
    put, deleted = (row for row in log if "lease" in row["path"])
    assert put["path"] == deleted["path"] and deleted["status"] == 204


def test_nobody_waits_for_the_end_of_a_lease(far: FarS3, run: tc.ObjectRun) -> None:
    far.set(rules=[{"match": "^DELETE .*lease", "do": "hold"}])
    with tc.Manager(run, comm="alone", background=False) as manager:
        manager.restore()
    far.release()
    assert [row["do"] for row in ended_log(far) if row["method"] == "DELETE"] == ["hold"]


def test_a_restore_after_latest_waits_only_for_a_listing_and_the_data(far: FarS3, run: tc.ObjectRun) -> None:
    with tc.Manager(run, comm="alone", background=False) as manager:
        assert manager.latest() == 2
        far.set(**STAGED)
        assert np.array_equal(manager.restore()["w"], array(20))
    assert [sorted(set(stage)) for stage in stages(ended_log(far))] == [
        ["GET list-type"],
        ["GET safetensors", "GET safetensors, header", "PUT lease"],
        ["DELETE lease"],
    ]


def test_a_step_that_is_saved_again_after_latest_is_restored_as_it_is_now(far: FarS3, run: tc.ObjectRun) -> None:
    with tc.Manager(run, comm="alone", background=False) as manager:
        assert manager.latest() == 2
        tc.save(run.folder("step_00000002"), {"w": array(20) + 1}, step=2, overwrite=True)
        assert np.array_equal(manager.restore()["w"], array(20) + 1)


def ended_log(far: FarS3) -> list[dict[str, Any]]:
    """The requests so far, when all have been answered, a DELETE among them."""
    log: list[dict[str, Any]] = []
    while not any(row["method"] == "DELETE" for row in log) or not all("ended" in row for row in log):
        log = far.log()
    return log


def test_a_process_that_has_restored_ends_when_its_lease_is_deleted(far: FarS3, run: tc.ObjectRun) -> None:
    far.set(latency=LATENCY)
    code = f"import treeckpt as tc; tc.Manager(tc.ObjectRun({run.url!r}, **{far.options()!r}), comm='alone').restore()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [row["status"] for row in far.log() if row["method"] == "DELETE" and "lease" in row["path"]] == [204]


def test_a_step_can_be_deleted_as_soon_as_it_is_restored(far: FarS3, run: tc.ObjectRun) -> None:
    far.set(rules=[{"match": "^DELETE .*lease", "do": "slow", "seconds": 1.0}])
    with tc.Manager(run, comm="alone", background=False) as manager:
        manager.restore(step=1)
        manager.delete(1)
        assert manager.steps() == [2]


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_step_that_vanishes_before_its_lease_is_written_is_not_restored(
    far: FarS3, run: tc.ObjectRun, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    writer, real = tc.Manager(run, comm="alone", background=False, keep=None), Restorer._lease

    def lease(self: Restorer, step: int | None) -> Any:
        monkeypatch.setattr(Restorer, "_lease", real)
        if what == "replaced":
            elsewhere(writer.save, 2, {"w": array(20) + 1})
        else:
            writer.delete(2)
        return real(self, step)

    monkeypatch.setattr(Restorer, "_lease", lease)
    with tc.Manager(run, comm="alone", background=False) as manager:
        restored = manager.restore()
        assert manager.count == (2 if what == "replaced" else 1)
    assert np.array_equal(restored["w"], array(20) + (what == "replaced"))


@pytest.mark.parametrize("fault", ["gone", "short", "long", "other"])
def test_a_shard_that_is_not_as_saved_is_named_before_a_target_is_written(
    far: FarS3, parts: tuple[tc.ObjectStore, dict[str, Any]], fault: str
) -> None:
    store, tree = parts
    (name, *_, last) = sorted({row["path"].partition("?")[0] for row in far.log() if ".safetensors" in row["path"]})
    data = far.request("GET", last)
    if fault == "gone":
        far.request("DELETE", last)
    else:
        new = {"short": data[:-1], "long": data + b"x", "other": far.request("GET", name)}[fault]
        far.request("PUT", last, new)
    target = {name: np.zeros_like(w) for name, w in tree.items()}
    with pytest.raises(tc.CorruptError, match=last.rpartition("/")[2]) as caught:
        tc.load_into(store, target)
    assert "The target was not changed" in str(caught.value)
    assert not any(w.any() for w in target.values())
    with pytest.raises(tc.CorruptError, match=last.rpartition("/")[2]):
        tc.load(store)


def test_blocks_of_another_size_are_compared_too(far: FarS3, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tree = far.store(), {"w": array(3), "b": np.arange(10.0)}
    tc.save(store, tree)
    monkeypatch.setattr(read_batch, "BLOCK", 64 << 10)  # what reads are planned for
    assert same(store, tree)
    target = {name: np.zeros_like(w) for name, w in tree.items()}
    tc.load_into(store, target)
    assert all(np.array_equal(target[name], tree[name]) for name in tree)


def test_regions_that_are_not_contiguous_are_put_together_from_what_arrives(far: FarS3) -> None:
    store, w = far.store(), np.arange(2048 * 2048, dtype=np.float32).reshape(2048, 2048)
    tc.save(store, {"w": w})
    whole = np.zeros((2048, 4096), np.float32)
    tc.load_into(store, {"w": whole[:, ::2]})
    assert np.array_equal(whole[:, ::2], w) and not whole[:, 1::2].any()


CHILD = """
import sys
import numpy as np
import treeckpt as tc

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

url, endpoint, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = tc.ObjectStore(url, endpoint=endpoint, access_key_id="key", secret_access_key="secret", region="us-east-1")
target = {"w": np.ones(nbytes // 8, np.int64)}
tc.inspect(store)
before = peak()
tc.load_into(store, target)
print(peak() - before)
"""


def test_a_load_takes_less_memory_beside_its_target_than_it_may(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"w": array(128)})
    far.set(latency=0.05)
    child = [sys.executable, "-c", CHILD, store.url, far.options()["endpoint"], str(128 * MIB)]
    taken = int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    assert taken < 64 * MIB, f"{taken} bytes: half of what was in flight, an eighth of the default"


def test_memory_limits_what_is_in_flight(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"w": array(64)})
    far.set(latency=0.05)
    tc.load(store, read=tc.ReadOptions(memory=16 * MIB))
    assert max(row["busy"] for row in far.gets(".safetensors")) <= 2


def test_a_run_is_listed_by_pages(far: FarS3) -> None:
    far.set(page=3)
    run = far.url()
    for step in range(5):
        tc.save(far.store(f"{run}/step_{step:08}"), {"n": step})
    listed = tc.ObjectRun(run, **far.options())
    assert listed.names() == [f"step_{step:08}" for step in range(5)]
    assert [len(folder.entries()) for folder in listed.folders()] == [3] * 5, "shard, timings, index"


@pytest.mark.parametrize("kind", ["503", "429", "500", "reset", "lost", "stall"])
def test_a_read_that_fails_for_a_moment_is_repeated(far: FarS3, tree: dict[str, Any], kind: str) -> None:
    store = far.store(**QUICK)
    tc.save(store, tree)
    far.set(rules=[{"match": "^GET .*safetensors bytes", "do": kind, "times": 2, "seconds": 0.2}])
    assert same(store, tree)


@pytest.mark.parametrize("kind", ["flipped", "shifted", "short", "whole"])
def test_other_bytes_than_those_of_the_range_are_an_error(far: FarS3, tree: dict[str, Any], kind: str) -> None:
    store = far.store(**QUICK)
    tc.save(store, tree)
    far.set(rules=[{"match": "^GET .*safetensors bytes=[1-9]", "do": kind, "times": 1000}])
    with pytest.raises(tc.TreeckptError, match="changed bytes" if kind == "flipped" else "proxy and the endpoint"):
        tc.load(store)


def test_a_range_is_what_the_object_has_of_it_under_any_name(far: FarS3) -> None:
    bucket, _ = object_store.open_bucket("s3://bucket", far.options())
    key = "a b/c@é+d%2F=&?.bin"
    bucket.put(key, b"0123456789", replace=True)
    for start, nbytes, expected in [(2, 5, b"23456"), (8, 300, b"89"), (300, 10, b"")]:
        found = bucket.fetch(key, start, nbytes)
        assert (found.size, b"".join(map(bytes, found.pieces))) == (10, expected)
    with pytest.raises(FileNotFoundError):
        bucket.fetch("none", 0, 10)


def test_nobody_at_the_endpoint_is_an_error_after_which_the_same_request_may_succeed(far: FarS3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    bucket, _ = object_store.open_bucket("s3://bucket", far.options(endpoint=f"http://127.0.0.1:{port}"))
    with pytest.raises(tc.StoreError, match="error sending request") as raised:
        bucket.fetch("k", 0, 10)
    assert bucket.judge(raised.value).temporary


def test_a_busy_store_slows_a_load_down_and_does_not_fail_it(
    far: FarS3, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tc.ObjectStore, "request_nbytes", 3 * MIB)
    store = far.store(**QUICK)
    tc.save(store, tree)
    meet = {"match": "safetensors bytes=[1-9]", "do": "meet", "times": 2, "count": 3, "seconds": LONG}
    far.set(busy_above=2, rules=[meet])
    assert same(store, tree)
    assert any(row["status"] == 503 for row in far.log())


def refused(rows: list[dict[str, Any]]) -> int:
    """The requests that the store has throttled."""
    return sum(row["status"] == 503 for row in rows)


def test_a_store_that_throttles_is_sent_half_as_many_reads_until_it_carries_them(
    far: FarS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tc.ObjectStore, "request_nbytes", MIB // 4)
    # all that a stage has refused is sent again in the next one, and nothing is sent for being slow
    monkeypatch.setattr(requests_in_flight, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(requests_in_flight, "MIN_SLOW_SECONDS", 10 * LONG)
    store, tree = far.store(), {"w": array(40)}
    tc.save(store, tree)
    store._fetcher.depth = RequestDepth(64)  # pyright: ignore
    far.set(busy_above=8, **STAGED)
    assert same(store, tree)
    reads = [row for row in far.log() if "safetensors" in row["path"]]
    # in three stages the depth falls from 64 to 8; of the 64 reads in flight each stage lets 8 through
    end = min(row["stage"] for row in reads) + 3 + 64 // 8
    first, last = [r for r in reads if r["stage"] < end], [r for r in reads if r["stage"] >= end]
    assert len(last) > 40 and refused(first) >= 64 - 8 + 32 - 8 + 16 - 8 and refused(last) < refused(first) / 3
    assert max(row["busy"] for row in last) <= 16 and store._fetcher.depth.depth <= 16  # pyright: ignore


def test_a_store_that_throttles_is_sent_fewer_parts_though_their_refusals_are_hidden(
    far: FarS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a part that was refused takes as long as another one, and a pause of 0.1 s
    monkeypatch.setattr(requests_in_flight, "LATE_SECONDS", 0.1)
    monkeypatch.setattr(requests_in_flight, "LATE_FACTOR", 1.0)
    monkeypatch.setattr(obstore, "PART", 5 * MIB)
    pauses = {"max_retries": 100, "backoff": {"base": 2}}  # which hardly grow
    store, tree = far.store(retry_config=pauses), {"w": array(100)}
    window = store._bucket._window  # pyright: ignore
    tc.save(store, tree)  # how long a part takes that is not refused
    window.depth = RequestDepth(16)
    most: list[int] = []
    for _ in range(2):
        far.set(busy_above=4, **STAGED)
        tc.save(store, tree, overwrite=True)
        log = far.log()
        assert refused(log)
        most.append(max(row["busy"] for row in log))
    assert window.depth.depth < 16 and most[1] < most[0]
    far.set(**NEAR)
    assert same(store, tree)


@pytest.fixture
def in_80(far: FarS3, monkeypatch: pytest.MonkeyPatch) -> tuple[tc.ObjectStore, dict[str, Any]]:
    """A checkpoint whose data takes 80 requests."""
    monkeypatch.setattr(tc.ObjectStore, "request_nbytes", MIB // 4)
    store, tree = far.store(), {"w": array(20)}
    tc.save(store, tree)
    return store, tree


def data_ranges(far: FarS3) -> list[str]:
    """What was asked for of the data, in the order of the requests."""
    return [row["range"] for row in far.log() if "safetensors" in row["path"]]


def test_requests_of_a_slow_tail_are_sent_again_once_and_nobody_waits_for_them(
    far: FarS3, in_80: tuple[tc.ObjectStore, dict[str, Any]]
) -> None:
    store, tree = in_80
    store._fetcher.times = times = LateTimes()  # pyright: ignore
    assert same(store, tree)
    # so a load that stands still for a moment sends no other one again
    times.ended, times.least = 0, times.ended - 2
    far.set(rules=[{"match": "safetensors bytes=[1-9]", "do": "hold", "times": 2}])
    assert same(store, tree)
    held = [row for row in far.log_now() if row["do"] == "hold"]
    far.release()
    assert len(held) == 2 and not any("ended" in row for row in held)
    asked = data_ranges(far)
    assert [asked.count(row["range"]) for row in held] == [2, 2]
    assert sum(row["sent"] for row in far.gets(".safetensors") if row["do"] != "hold") <= 1.02 * tree["w"].nbytes


def test_where_all_requests_take_as_long_none_is_sent_twice(
    far: FarS3, in_80: tuple[tc.ObjectStore, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tree = in_80
    store._fetcher.depth = RequestDepth(20, most=20)  # pyright: ignore
    clock = EqualTimes(store._fetcher, monkeypatch)  # pyright: ignore
    far.set()
    assert same(store, tree)
    assert clock.now >= 1000 + 4 * 0.5, "four behind each other"
    asked = data_ranges(far)
    assert len(asked) == len(set(asked)) > 80
    assert sum(row["sent"] for row in far.gets(".safetensors")) <= 1.02 * tree["w"].nbytes


def test_a_lost_index_is_made_again_from_headers_that_are_all_requested_at_once(
    far: FarS3, parts: tuple[tc.ObjectStore, dict[str, Any]]
) -> None:
    store, tree = parts
    index = tc.inspect(store)
    store.delete("index.json")
    far.set(**STAGED)
    assert tc.rebuild_index(store) == index
    assert sum("GET safetensors, header" in stage for stage in stages(far.log())) == 1
    assert same(store, tree)


def test_the_files_of_a_step_are_deleted_all_at_once_its_index_first_and_its_mark_last(far: FarS3) -> None:
    run = tc.ObjectRun(far.url(), **far.options())
    with tc.Manager(run, comm="alone", background=False, max_shard_bytes=MIB) as manager:
        manager.save(1, {f"w{n}": array(1) for n in range(8)})
        far.set(**STAGED)
        manager.delete(1)
    found = stages(far.log(), names=("index", "deleted", "deleting"))
    deleted = [stage for stage in found if stage[0].startswith("DELETE")]
    expected = [{"DELETE index"}, {"DELETE deleting"}, {"DELETE "}, {"DELETE deleted"}]
    assert [set(stage) for stage in deleted] == expected, "the lock goes before the files that no save can meet"
    assert len(deleted[2]) >= 8, "shards and timings"


def test_a_save_that_overwrites_deletes_what_it_replaces_all_at_once(
    far: FarS3, parts: tuple[tc.ObjectStore, dict[str, Any]]
) -> None:
    store, tree = parts
    far.set(**STAGED)
    tc.save(store, tree, overwrite=True)
    deleted = [stage.count("DELETE safetensors") for stage in stages(far.log(), names=("safetensors",))]
    assert [count for count in deleted if count] == [5]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves count as quick ones, whose record is not renewed: the thread that does so waits for the answer."""
    monkeypatch.setattr(kept_files, "FIRST_RENEWAL_SECONDS", 100 * LONG)


def test_a_save_sends_all_parts_at_once_and_asks_for_nothing_else(far: FarS3, quick: None) -> None:
    store = far.store()
    far.set(**STAGED)
    tc.save(store, {"w": array(100)})
    shard = [row for row in far.log() if "shard" in row["path"]]
    parts = [row for row in shard if "partNumber" in row["path"]]
    assert len(parts) == 13 and len(shard) == 13 + 2, "the beginning of the upload, its parts, its end"
    assert max(row["busy"] for row in parts) >= 13


def test_a_save_waits_for_no_answer_that_another_request_does_not_need(far: FarS3, quick: None) -> None:
    tc.save(far.store(), {"n": 1})  # whether the store has conditional writes is found out once
    store = far.store()
    far.set(**STAGED)
    tc.save(store, {"w": array(20)})
    late = [thread for thread in threading.enumerate() if thread.name == "treeckpt-late"]
    assert len(late) == 2, "it returns when the index is published"
    names = ("list-type", "nobody", "progress", "uploads", "partNumber", "uploadId", "timings", "index")
    found = [set(stage) for stage in stages(far.log(), names=names)]
    for stage in found[1:-1]:
        stage.discard("PUT progress")  # is sent again when some time has passed, beside what is sent then
    assert [sorted(stage) for stage in found] == [
        ["GET list-type", "HEAD nobody", "POST uploads", "PUT progress"],
        ["GET list-type", "PUT partNumber"],  # the second listing, of a save whose record can be seen: for locks
        ["POST uploadId"],
        ["PUT index", "PUT timings"],
        ["DELETE progress", "GET timings"],
        ["PUT timings"],
    ]


def test_what_is_sent_late_does_not_bring_back_a_checkpoint_that_is_deleted_at_once(far: FarS3) -> None:
    store = far.store()
    far.set(latency=LATENCY)
    tc.save(store, {"w": array(20)})
    for name in store.sizes():
        store.delete(name)
    far.set()
    assert store.sizes() == {}


def test_a_save_that_fails_before_the_look_is_answered_leaves_nothing(
    far: FarS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(parts: list[memoryview]) -> int:
        raise OSError(5, "unreadable memory")

    store = far.store()
    with monkeypatch.context() as patch:
        patch.setattr(shard_files, "hash_parts", fail)
        far.set(rules=[{"match": "list-type", "do": "slow", "times": 1, "seconds": LATENCY}])
        with pytest.raises(tc.CheckpointError, match="unreadable memory"):
            tc.save(store, {"w": array(20)})
    far.set()
    assert [name for name in store.sizes() if not name.startswith("timings")] == [], "no record without a save"

    tc.save(store, {"w": array(20)}, overwrite=True)
    far.set()
    before = store.sizes()
    with monkeypatch.context() as patch:
        patch.setattr(shard_files, "hash_parts", fail)
        far.set(rules=[{"match": "list-type", "do": "slow", "times": 1, "seconds": LATENCY}])
        with pytest.raises(tc.CheckpointExists):
            tc.save(store, {"w": array(20)})
    far.set()
    assert store.sizes() == before, "not even timings with the error"


def test_a_save_does_not_wait_for_its_timings(far: FarS3) -> None:
    store = far.store()
    far.set(rules=[{"match": "^PUT .*timings", "do": "hold"}])
    tc.save(store, {"w": array(1)})
    rows = far.log_now()
    far.release()
    assert not any("timings" in row["path"] and "ended" in row for row in rows)
    assert any("index.json" in row["path"] and "ended" in row for row in rows)
    assert [row["status"] for row in far.log() if row["method"] == "PUT" and "timings" in row["path"]] == [200, 200]


def test_the_record_of_a_committed_save_is_no_save_under_way(far: FarS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in far.environment().items():
        monkeypatch.setenv(name, value)
    run = far.url()
    far.set(rules=[{"match": "^DELETE .*progress", "do": "slow", "times": 9, "seconds": 2.0}])
    tc.save(f"{run}/step_00000001", {"w": array(1)}, step=1)
    [found] = discovery.scan(tc.ObjectRun(run, **far.options()))
    assert (found.status, found.saving) == ("complete", ())


LATE_CHILD = """
import os, signal, sys, threading, time
import numpy as np, treeckpt as tc
from treeckpt._io import process
case, url = sys.argv[1:]
tree = {f"w{i}": np.arange((20 if case == "interrupted, one shard" else 8) << 17) for i in range(4)}
if case.startswith("interrupted"):
    def interrupt(*_):
        print("signalled", flush=True)
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, interrupt)
    try:
        tc.save(url, tree, max_shard_bytes=None if "one" in case else 8 << 20)
    except KeyboardInterrupt:
        print("interrupted")
        time.sleep(1)
elif case == "stalled":
    process.MAX_WAIT_SECONDS = 1.5
    tc.save(url, tree)
    print("saved")
else:
    tc.save(url, tree)
    if os.fork() == 0:
        try:
            tc.load(url)
        except tc.StoreError as error:
            print(error, flush=True)
        os._exit(0)
    print("child", os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run_child(far: FarS3, case: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LATE_CHILD, case, url]
    environment = {**os.environ, **far.environment()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def interrupt_child(far: FarS3, case: str, url: str, where: str) -> None:
    """Runs a child that is interrupted while a request waits for its answer, which comes once the child waits for it.

    Args:
        where: a regex for such a request, as of a rule.
    """
    far.set(rules=[{"match": where, "do": "hold", "times": 9}])
    command = [sys.executable, "-c", LATE_CHILD, case, url]
    environment = {**os.environ, **far.environment()}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert until(lambda: any(row.get("do") == "hold" for row in far.log_now()))
        child.send_signal(signal.SIGINT)
        lines = child.stdout.readline()
        looks = 0
        while looks < LOOKS:
            time.sleep(LOOK_SECONDS)
            looks = looks + 1 if is_asleep(child.pid) else 0
        far.release()
        more, errors = child.communicate(timeout=300)
    assert (child.returncode, lines + more) == (0, "signalled\ninterrupted\n"), errors


def test_an_interrupt_before_the_look_is_answered_sends_nothing_of_any_shard(far: FarS3) -> None:
    url = far.url()
    interrupt_child(far, "interrupted, four shards", url, "list-type")
    assert sum(row.get("received", 0) for row in far.log() if "shard" in row["path"]) < 1 << 20
    assert far.store(url).sizes() == {}


def test_an_interrupt_while_an_upload_ends_leaves_no_shard(far: FarS3) -> None:
    url = far.url()
    interrupt_child(far, "interrupted, one shard", url, "^POST .*uploadId")
    assert [name for name in far.store(url).sizes() if not name.startswith("timings")] == []


def test_the_end_of_a_process_waits_for_late_requests_for_a_while_and_says_so(far: FarS3) -> None:
    url = far.url()
    far.set(rules=[{"match": "^DELETE .*progress", "do": "slow", "times": 9, "seconds": 100.0}])
    begin = time.monotonic()
    done = run_child(far, "stalled", url)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
    assert f"waiting for the last requests to {url}" in done.stderr and time.monotonic() - begin < 100
    far.set()
    assert tc.load(far.store(url), select="w0")["w0"][-1] == (1 << 20) - 1


def test_a_fork_of_a_process_that_used_the_store_is_told_to_be_spawned(far: FarS3) -> None:
    done = run_child(far, "forked", far.url())
    assert done.returncode == 0 and done.stdout.endswith("child 0\n"), done.stderr
    assert "expected a process that was not forked after it had used an object store" in done.stdout
    assert "spawn" in done.stdout


def test_a_refused_save_of_one_rank_has_sent_no_byte_and_leaves_no_upload(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"w": array(20)})
    far.set(**STAGED)
    before = store.sizes()
    with pytest.raises(tc.CheckpointExists, match="expected no checkpoint, found one") as caught:
        tc.save(store, {"w": array(20)})
    assert "overwrite=True" in caught.value.hint
    changes = [row for row in far.log() if row["method"] in ("PUT", "POST", "DELETE")]
    of_record = [row["method"] for row in changes if "progress" in row["path"]]
    assert of_record == ["PUT", "DELETE"], "it is sent beside the listing"
    others = [row for row in changes if "progress" not in row["path"]]
    assert [(row["method"], "uploads=" in row["path"], "uploadId=" in row["path"]) for row in others] == [
        ("POST", True, False),
        ("DELETE", False, True),
    ]
    assert store.sizes() == before


def test_a_small_shard_is_sent_by_one_request(far: FarS3, tree: dict[str, Any]) -> None:
    store = far.store()
    far.set()
    tc.save(store, {"b": tree["b"]})
    assert [row["method"] for row in far.log() if "shard" in row["path"]] == ["PUT"]


@pytest.mark.parametrize("background", [False, True])
def test_several_shards_are_sent_at_the_same_time(far: FarS3, background: bool) -> None:
    store, tree = far.store(), {f"w{n}": array(20) for n in range(4)}
    # of a store that is so far away more parts are in flight than of a near one
    far.set(
        latency=0.2, rules=[{"match": "^PUT .*partNumber", "do": "meet", "times": 12, "count": 10, "seconds": LONG}]
    )
    if background:
        tc.save_async(store, tree, max_shard_bytes=20 * MIB).result()
    else:
        tc.save(store, tree, max_shard_bytes=20 * MIB)
    parts = [row for row in far.log() if "partNumber" in row["path"]]
    assert len(parts) == 12 and max(row["busy"] for row in parts) >= 10
    assert same(store, tree)


@pytest.mark.parametrize("kind", ["503", "500", "lost"])
def test_of_an_upload_only_the_part_that_failed_is_sent_again(far: FarS3, tree: dict[str, Any], kind: str) -> None:
    store = far.store(**QUICK)
    far.set(rules=[{"match": "^PUT .*partNumber=2", "do": kind}])
    tc.save(store, tree)
    log = far.log()
    numbers = [int(row["path"].partition("partNumber=")[2].partition("&")[0]) for row in log if "part" in row["path"]]
    assert sorted(numbers) == [1, 2, 2, 3]
    assert same(store, tree)


def test_an_upload_that_fails_is_aborted_and_holds_no_place(far: FarS3, tree: dict[str, Any]) -> None:
    store = far.store(retry_config={"max_retries": 0})
    far.set(rules=[{"match": "^PUT .*partNumber=2", "do": "500", "times": 99}])
    with pytest.raises(tc.StoreError, match="500") as kept:
        tc.save(store, tree)
    assert store._bucket._window.in_flight == 0  # pyright: ignore
    assert [row["status"] for row in far.log() if row["method"] == "DELETE" and "uploadId" in row["path"]] == [204]
    far.set(**NEAR)
    assert store.sizes().keys() == {name for name in store.sizes() if name.startswith("timings")} and kept


def test_bytes_are_signed_where_nothing_else_protects_them(far: FarS3) -> None:
    plain, secure = far.store(), tc.ObjectStore(far.url(), **far.options(endpoint="https://127.0.0.1:1"))
    configs = [store._bucket._store.config for store in (plain, secure)]  # pyright: ignore
    assert ["unsigned_payload" in config for config in configs] == [False, True]


def test_of_two_saves_to_one_path_one_is_committed(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"n": 1})
    with pytest.raises(tc.CheckpointExists):
        tc.save(store, {"n": 2})
    assert tc.load(store) == {"n": 1}


def test_verify_keeps_many_requests_in_flight_and_finds_what_was_changed(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"w": array(100)})
    far.set(**STAGED)
    assert tc.verify(store).ok
    assert max(row["busy"] for row in far.gets(".safetensors")) >= 12
    far.set(client=0, rules=[{"match": "^GET .*safetensors bytes=[1-9]", "do": "flipped", "times": 1}])
    [problem] = tc.verify(store).problems
    assert "they differ from their checksum" in problem.text and problem.leaves == ("w",)


def test_verify_ends_where_connections_are_cut_and_the_server_is_busy() -> None:
    with far_s3_server() as far:  # the other one is still busy with requests of tests before, which take a minute
        store = far.store()
        tc.save(store, {"w": array(50)})
        far.set(busy_above=3, **STAGED, rules=[{"match": "^GET .*safetensors", "do": "reset", "times": 3}])
        assert tc.verify(store).ok
        log = far.log()
    assert sum(row["do"] == "reset" for row in log) == 3 and any(row["status"] == 503 for row in log)


def test_verify_names_a_shard_that_was_cut_short(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"w": array(1)})
    [name] = (name for name in store.sizes() if name.endswith(".safetensors"))
    data = store.read(name, limit=2 * MIB)
    far.put(f"{store.url.partition('bucket/')[2]}/{name}", data[:-100_000])
    first, last = tc.verify(store).problems
    assert "they differ from their checksum" in first.text and "the file ends at byte" in last.text
