"""Checkpoints on an S3 server that is far away, busy or faulty: what comes back is right, or an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.far_s3 import FarS3, far_s3_server
from tests.helpers.s3 import MIB, QUICK, array, same
from treeckpt.io.storage.counting_store import CountingStore

NEAR: dict[str, Any] = {"latency": 0.0, "rate": 0.0, "page": 1000, "busy_above": 0, "trouble": 0.0, "rules": []}


@pytest.fixture(scope="module")
def server() -> Iterator[FarS3]:
    with far_s3_server() as server:
        yield server


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
    assert [row["status"] for row in far.log() if "partNumber" in row["path"]] == [200] * 4, "parts of 8 MiB"
    far.set(latency=0.02, rate=200e6)
    assert same(store, tree)
    read = sum(row["sent"] for row in far.gets(".safetensors"))
    assert read <= 24 * MIB + (1 << 18), "every byte once, and the fronts of headers"


def test_a_load_keeps_many_requests_of_8_mib_in_flight(far: FarS3) -> None:
    tree = {"w": array(100)}
    store = far.store()
    tc.save(store, tree)
    for load in (lambda: tc.load(store), lambda: tc.load_into(store, {"w": np.empty_like(tree["w"])})):
        far.set(latency=0.2)
        load()
        reads = [row for row in far.gets(".safetensors") if row["sent"] > MIB]
        assert len(reads) <= 100 / 8 + 2
        assert max(row["busy"] for row in reads) >= len(reads) - 1, "all at the same time"


def test_a_load_with_a_progress_bar_is_as_parallel_and_counts_every_byte(far: FarS3) -> None:
    store, counted = far.store(), list[int]()
    tc.save(store, {"w": array(100)})
    far.set(latency=0.2)
    tc.load(CountingStore(store, counted.append))
    assert sum(counted) >= 100 * MIB
    assert max(row["busy"] for row in far.gets(".safetensors")) >= 12


def test_memory_limits_what_is_in_flight(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"w": array(64)})
    far.set(latency=0.05)
    tc.load(store, memory=16 * MIB)
    assert max(row["busy"] for row in far.gets(".safetensors")) <= 2


def test_a_run_is_listed_by_pages(far: FarS3) -> None:
    far.set(page=3)
    run = far.url()
    for step in range(5):
        tc.save(far.store(f"{run}/step_{step:08}"), {"n": step})
    listed = tc.ObjectRun(run, **far.options())
    assert listed.names() == [f"step_{step:08}" for step in range(5)]
    assert [len(folder.entries()) for folder in listed.folders()] == [3] * 5, "shard, timings, index"


@pytest.mark.parametrize("kind", ["503", "500", "reset", "lost"])
def test_a_read_that_fails_for_a_moment_is_repeated(far: FarS3, tree: dict[str, Any], kind: str) -> None:
    store = far.store(**QUICK)
    tc.save(store, tree)
    far.set(rules=[{"match": "^GET .*safetensors bytes", "do": kind, "times": 2}])
    assert same(store, tree)


@pytest.mark.parametrize("kind", ["flipped", "shifted"])
def test_other_bytes_than_those_of_the_range_are_an_error(far: FarS3, tree: dict[str, Any], kind: str) -> None:
    store = far.store(**QUICK)
    tc.save(store, tree)
    far.set(rules=[{"match": "^GET .*safetensors bytes=[1-9]", "do": kind, "times": 1000}])
    with pytest.raises(tc.TreeckptError):
        tc.load(store)


def test_a_busy_store_slows_a_load_down_and_does_not_fail_it(far: FarS3, tree: dict[str, Any]) -> None:
    store = far.store(**QUICK)
    tc.save(store, tree)
    far.set(busy_above=2, latency=0.005)
    assert same(store, tree)
    assert any(row["status"] == 503 for row in far.log())


def test_a_save_sends_all_parts_at_once_and_asks_for_nothing_else(far: FarS3) -> None:
    store = far.store()
    far.set(latency=0.3)
    tc.save(store, {"w": array(100)})
    shard = [row for row in far.log() if "shard" in row["path"]]
    parts = [row for row in shard if "partNumber" in row["path"]]
    assert len(parts) == 13 and len(shard) == 13 + 2, "the beginning of the upload, its parts, its end"
    assert max(row["busy"] for row in parts) >= 13


def test_a_small_shard_is_sent_by_one_request(far: FarS3, tree: dict[str, Any]) -> None:
    store = far.store()
    far.set()
    tc.save(store, {"b": tree["b"]})
    assert [row["method"] for row in far.log() if "shard" in row["path"]] == ["PUT"]


@pytest.mark.parametrize("background", [False, True])
def test_several_shards_are_sent_at_the_same_time(far: FarS3, background: bool) -> None:
    store, tree = far.store(), {f"w{n}": array(20) for n in range(4)}
    far.set(latency=0.3)
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
    far.set(rules=[{"match": "^PUT .*partNumber=3", "do": kind}])
    tc.save(store, tree)
    log = far.log()
    numbers = [int(row["path"].partition("partNumber=")[2].partition("&")[0]) for row in log if "part" in row["path"]]
    assert sorted(numbers) == [1, 2, 3, 3, 4]
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


def test_a_busy_store_slows_a_save_down_and_does_not_fail_it(far: FarS3) -> None:
    store, tree = far.store(**QUICK), {"w": array(100)}
    far.set(busy_above=4, latency=0.005)
    tc.save(store, tree)
    assert any(row["status"] == 503 for row in far.log())
    far.set(**NEAR)
    assert same(store, tree)


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
