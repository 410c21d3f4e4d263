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


def test_of_two_saves_to_one_path_one_is_committed(far: FarS3) -> None:
    store = far.store()
    tc.save(store, {"n": 1})
    with pytest.raises(tc.CheckpointExists):
        tc.save(store, {"n": 2})
    assert tc.load(store) == {"n": 1}
