"""Any request of a load or save may meet a fault: then the bytes are right, or there is one error of ours.

Which requests of which phase meet which faults is drawn from a seed. A stall is longer than the time limit of a
request; here both are short, in a slow test they are as long as on a real network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.far_s3 import FarS3
from tests.helpers.s3 import array, same

FAULTS = ["503", "429", "500", "reset", "lost", "stall", "slow", "shifted", "short", "whole", "flipped"]
READS = {
    "listing": "^GET .*list-type",
    "index": "^GET .*index",
    "header": "^GET .*safetensors bytes=0-",
    "data": "^GET .*safetensors bytes=[1-9]",
    "any": "",
}
WRITES = {
    "record": "^PUT .*progress",
    "begin": r"^POST .*\?uploads",
    "part": "^PUT .*partNumber",
    "complete": "^POST .*uploadId",
    "publish": "^PUT .*index",
    "cleaning": "^(DELETE|HEAD) ",
    "any": "",
}
NO_FAULTS: dict[str, Any] = {"trouble": 0.0, "conditional": "honoured"}
LOADS = [range(20), pytest.param(range(20, 200), marks=pytest.mark.slow)]
SAVES = [range(10), pytest.param(range(10, 200), marks=pytest.mark.slow)]


def impatient(server: FarS3, url: str, timeout: str = "150ms") -> tc.ObjectStore:
    """A store that gives up soon."""
    retries = {"max_retries": 3, "backoff": {"init_backoff": timedelta(milliseconds=5)}}
    return server.store(url, retry_config=retries, client_options={"timeout": timeout})


def faults(seed: int, phases: dict[str, str], patience: int) -> dict[str, Any]:
    """The settings that a seed stands for; a stall takes longer than a request of an `impatient` store may."""
    draw = random.Random(seed)
    kinds = draw.sample(FAULTS, draw.randint(1, 3))
    where, trouble = phases[draw.choice(list(phases))], draw.choice([0.1, 0.3, 0.7, 1.0])
    return {"trouble": trouble, "kinds": kinds, "where": where, "seed": seed, "seconds": 0.2 * patience}


def assert_some_of_each(succeeds: Callable[[int, int], bool], seeds: range) -> None:
    """Of attempts with every seed some succeed and some fail.

    Where all fail, as all requests take longer than they may on a machine with much else to do, they are made once more
    with more patience.
    """
    for patience in (1, 4, 16, 64):
        ended = {succeeds(seed, patience) for seed in seeds}
        if True in ended:
            break
    assert ended == {True, False}, "some of each"


@pytest.mark.parametrize("seeds", LOADS, ids=str)
def test_a_load_among_faults_gives_right_bytes_or_one_error(server: FarS3, seeds: range) -> None:
    server.set(**NO_FAULTS)
    tree, url = {"w": array(3), "b": np.arange(300.0)}, server.url()
    tc.save(server.store(url), tree)

    def loads(seed: int, patience: int) -> bool:
        server.set(**faults(seed, READS, patience))
        try:
            loaded = tc.load(impatient(server, url, timeout=f"{150 * patience}ms"))
        except tc.TreeckptError:
            return False
        assert all(np.array_equal(loaded[key], tree[key]) for key in tree), seed
        return True

    assert_some_of_each(loads, seeds)
    server.set(**NO_FAULTS)


@pytest.mark.parametrize("seeds", SAVES, ids=str)
def test_a_save_among_faults_is_whole_or_says_so(server: FarS3, in_parts: None, seeds: range) -> None:
    def saves(seed: int, patience: int) -> bool:
        server.set(**NO_FAULTS)
        url, tree = server.url(), {"w": array(11), "n": np.arange(seed)}
        server.set(**faults(seed, WRITES, patience))
        error = None
        try:
            tc.save(impatient(server, url, timeout=f"{150 * patience}ms"), tree)
        except tc.TreeckptError as caught:
            error = caught
        server.set(**NO_FAULTS)
        store = server.store(url)
        if error is None or "index.json" in store.sizes():
            assert error is None or "may be in place" in str(error), (seed, error)
            assert same(store, tree), seed
        tc.save(store, {"n": -seed}, overwrite=True)
        assert same(store, {"n": -seed}), seed
        return error is None

    assert_some_of_each(saves, seeds)


@pytest.mark.parametrize("kind", ["slow", "lost", "reset", "stall", "503"])
def test_a_range_without_an_answer_is_asked_for_again(server: FarS3, kind: str) -> None:
    server.set(**NO_FAULTS)
    tree, url = {"w": array(20)}, server.url()
    tc.save(server.store(url), tree)
    # long ranges are those that are fetched, not those that obstore repeats
    server.set(rules=[{"match": r"safetensors bytes=[1-9]\d{6}", "do": kind, "times": 2, "seconds": 8.0}])
    assert same(impatient(server, url, timeout="2s"), tree)
    assert sum(row["do"] == kind for row in server.log()) == 2


def test_an_index_whose_answer_was_lost_is_published(server: FarS3) -> None:
    server.set(**NO_FAULTS)
    url = server.url()
    server.set(rules=[{"match": "^PUT .*index", "do": "lost", "times": 9}])
    tc.save(impatient(server, url, timeout="60s"), {"n": 1})  # the connection ends at once
    assert tc.load(server.store(url)) == {"n": 1}
    server.set(rules=[{"match": "^(PUT|GET) .*index", "do": "lost", "times": 99}])
    with pytest.raises(tc.StoreError, match="The new index may be in place"):
        tc.save(impatient(server, f"{url}2", timeout="60s"), {"n": 1})
    server.set()
    assert tc.load(server.store(f"{url}2")) == {"n": 1}


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_index_that_appears_after_its_save_has_failed_has_its_shards(server: FarS3, overwrite: bool) -> None:
    server.set(**NO_FAULTS)
    url = server.url()
    if overwrite:
        tc.save(server.store(url), {"n": 0})
    server.set(rules=[{"match": "^PUT .*index", "do": "slow", "times": 9, "seconds": 4.0}])
    with pytest.raises(tc.StoreError, match="The new index may be in place"):
        tc.save(impatient(server, url, timeout="1s"), {"w": array(1)}, overwrite=overwrite)
    assert until(lambda: any("ended" in row for row in server.log() if row["path"].endswith("index.json")), 60)
    assert until(lambda: all("ended" in row for row in server.log()), 60)
    assert same(server.store(url), {"w": array(1)})


def test_a_file_system_that_publishes_after_its_time_limit_has_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Any] = []

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if path.endswith("index.json"):
            late.append(lambda: real(self, path, value))
            raise TimeoutError
        real(self, path, value, mode=mode, **options)

    real = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    store, tree = tc.ObjectStore("memory://late/step"), {"w": np.arange(9.0)}
    with pytest.raises(tc.StoreError, match="The new index may be in place"):
        tc.save(store, tree)
    late[0]()
    assert same(store, tree)


@pytest.mark.slow
def test_a_stall_of_30_seconds_is_cut_off_and_the_request_repeated(server: FarS3) -> None:
    server.set(**NO_FAULTS)
    tree, url = {"w": array(3)}, server.url()
    tc.save(server.store(url), tree)
    server.set(rules=[{"match": "^GET .*safetensors bytes=[1-9]", "do": "stall", "seconds": 30.0}])
    assert same(impatient(server, url, timeout="2s"), tree)
    server.set(rules=[{"match": "^GET .*safetensors bytes=[1-9]", "do": "stall", "seconds": 30.0}])
    assert same(server.store(url), tree), "by a request that is repeated, or waits"
