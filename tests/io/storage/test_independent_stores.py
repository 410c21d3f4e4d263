"""Servers of other makers than moto's: what a store must do for checkpoints, on SeaweedFS (S3) and Azurite (Azure).

They run where `make test-stores` has installed them. rclone's S3 server ignores conditions, and answers a range with
status 200, which obstore takes for a fault: it stands for stores that can be saved into only with `conditional=False`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers import other_stores
from tests.helpers.elsewhere import elsewhere
from tests.helpers.s3 import array, same, wait_for_late_requests
from treeckpt._runs import discovery
from treeckpt._saving import shard_writer

_numbers = itertools.count()
Place = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module", params=["seaweedfs", "azurite"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with getattr(other_stores, request.param)(tmp_path_factory.mktemp(request.param)) as place:
        yield place


@pytest.fixture
def place(bucket: Place) -> Place:
    """A path that no other test uses, and the options."""
    return f"{bucket[0]}/{next(_numbers)}/run", bucket[1]


def test_a_checkpoint_comes_back_whole_and_in_parts(place: Place) -> None:
    url, options = place
    store, tree = tc.ObjectStore(url, **options), {"w": array(20), "b": np.arange(10.0)}
    tc.save(store, tree)
    assert same(store, tree) and tc.verify(store).ok
    piece = tc.Sharded(np.zeros(100, tree["w"].dtype), tree["w"].shape, (1_000_000,))
    assert np.array_equal(tc.load(store, {"w": piece, "b": ...})["w"].local, tree["w"][1_000_000:1_000_100])


def test_a_path_that_is_taken_is_overwritten_only_when_told(place: Place) -> None:
    store = tc.ObjectStore(place[0], **place[1])
    tc.save(store, {"n": 1})
    with pytest.raises(tc.CheckpointExists):
        tc.save(store, {"n": 2})
    tc.save(store, {"n": 3}, overwrite=True)
    wait_for_late_requests()
    assert tc.load(store) == {"n": 3} and len(store.sizes()) == 3, "index, shard and timings"


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_saves_at_one_moment_one_wins(place: Place, overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = tc.ObjectStore(place[0], **place[1]), shard_writer.publish_index
    if overwrite:
        tc.save(store, {"by": "first"})

    def outrun(*arguments: Any) -> None:
        monkeypatch.setattr(shard_writer, "publish_index", real)
        elsewhere(tc.save, store, {"by": "the faster"}, overwrite=overwrite)
        real(*arguments)

    monkeypatch.setattr(shard_writer, "publish_index", outrun)
    with pytest.raises(tc.CheckpointExists, match="written meanwhile by another save"):
        tc.save(store, {"by": "the slower"}, overwrite=overwrite)
    assert tc.load(store) == {"by": "the faster"} and tc.verify(store).ok


def test_a_manager_keeps_what_its_policy_keeps(place: Place) -> None:
    url, options = place
    with tc.Manager(tc.ObjectRun(url, **options), keep=tc.policy.Last(2)) as manager:
        for step in range(5):
            manager.save(step, {"n": step, "w": array(1)}).result()
    with tc.Manager(tc.ObjectRun(url, **options)) as manager:
        assert manager.restore()["n"] == 4
        found = {info.name: info.status for info in discovery.scan(tc.ObjectRun(url, **options))}
    assert {name for name, status in found.items() if status == "complete"} == {"step_00000003", "step_00000004"}


def test_a_long_run_is_listed_by_pages(place: Place) -> None:
    run = tc.ObjectRun(place[0], **place[1])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: run.folder(f"step_{n:08}").publish("index.json", b"x", replace=True), range(1010)))
    assert run.names() == [folder.name for folder in run.folders()] == [f"step_{n:08}" for n in range(1010)]


def test_a_server_that_ignores_conditions_is_found_out(tmp_path: Any) -> None:
    with other_stores.rclone(tmp_path) as (url, options):
        with pytest.raises(tc.StoreError, match="found one that ignores them"):
            tc.save(tc.ObjectStore(f"{url}/a", **options), {"n": 1})
        store = tc.ObjectStore(f"{url}/b", **options, conditional=False)
        tc.save(store, {"n": 1})
        assert tc.load(store) == {"n": 1}
