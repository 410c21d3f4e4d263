"""Stores without conditional writes: the first save finds out, and with `conditional=False` the last writer wins."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.elsewhere import elsewhere
from tests.helpers.far_s3 import FarS3
from tests.helpers.s3 import ONCE, array, wait_for_late_requests
from treeckpt._io.storage import object_store

_buckets = itertools.count()


@pytest.fixture
def url() -> str:
    """A path in a bucket that no other test uses: what is known of a bucket is known to the process."""
    return f"s3://bucket-{next(_buckets)}/run/step"


def files(store: tc.ObjectStore) -> list[str]:
    wait_for_late_requests()
    return [name for name in store.sizes() if not name.startswith("timings")]


@pytest.mark.parametrize("manner", ["ignored", "refused"])
@pytest.mark.parametrize("size", [0, 1])
def test_the_first_save_says_that_the_store_has_no_conditional_writes(
    server: FarS3, url: str, manner: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "SINGLE_PUT_LIMIT", 1 << 18)
    # what is sent beside the look is sent before the answer to that
    server.set(conditional=manner, client=os.getpid())
    store, tree = server.store(url), {"w": array(size), "n": 1}
    for _ in range(2):
        expected = r"^s3://bucket-\d+: expected a store with conditional writes \(If-None-Match\), found one"
        with pytest.raises(tc.StoreError, match=expected) as caught:
            tc.save(store, tree)
        assert manner[:5] in str(caught.value) and "conditional=False" in caught.value.hint
        assert files(store) == [], "neither a record nor a shard"
    sent = [row for row in server.log() if "shard" in row["path"] and row["method"] != "DELETE"]
    assert all(row["path"].endswith("?uploads=") for row in sent), "no byte of the arrays is sent"
    assert len(sent) == 2 * size, "each upload that is begun is ended again"
    server.set(client=0)


def test_what_is_known_of_a_bucket_costs_one_request_for_each_process(server: FarS3, url: str) -> None:
    def probes(**options: Any) -> int:
        server.set(conditional="honoured")
        tc.save(f"{url}_{next(_buckets)}" if not options else url, {"n": 1}, **options)
        return len([row for row in server.log() if row["condition"] and "progress" in row["path"]])

    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        assert [probes() for _ in range(3)] == [1, 0, 0]
        tc.save(url, {"n": 0})
        assert [probes(overwrite=True) for _ in range(3)] == [1, 0, 0]
    assert files(server.store(url)) == ["index.json", *[n for n in files(server.store(url)) if n.startswith("shard")]]


def test_a_fault_at_the_look_is_no_answer(server: FarS3, url: str) -> None:
    for kind in ("503", "lost", "500"):
        server.set(conditional="honoured", rules=[{"match": "^PUT .*progress", "do": kind, "times": 3}])
        tc.save(server.store(f"{url}-{kind}"), {"n": 1})
        assert tc.load(server.store(f"{url}-{kind}")) == {"n": 1}


def test_a_store_that_cannot_replace_one_version_takes_new_checkpoints_only(server: FarS3, url: str) -> None:
    server.set(conditional="honoured", matching="ignored")
    store = server.store(url)
    tc.save(store, {"n": 1})
    with pytest.raises(tc.StoreError, match=r"conditional writes \(If-Match\), found one that ignores them"):
        tc.save(store, {"n": 2}, overwrite=True)
    with pytest.raises(tc.CheckpointExists):
        tc.save(store, {"n": 2})
    assert tc.load(store) == {"n": 1}


@pytest.mark.parametrize("manner", ["ignored", "refused"])
def test_without_conditions_a_path_that_is_taken_is_still_refused(server: FarS3, url: str, manner: str) -> None:
    server.set(conditional=manner)
    store, tree = server.store(url, conditional=False), {"w": np.arange(9.0)}
    tc.save(store, tree)
    with pytest.raises(tc.CheckpointExists):
        tc.save(store, {"n": 2})
    tc.save(store, {"n": 3}, overwrite=True)
    assert tc.load(store) == {"n": 3} and len(files(store)) == 2
    with tc.Manager(tc.ObjectRun(f"{url}s", **server.options(conditional=False)), background=False) as manager:
        for step in range(3):
            manager.save(step, {"n": step})
        assert manager.restore() == {"n": 2}
    assert not [row for row in server.log() if row["condition"]], "no condition is sent"


def test_without_conditions_the_last_of_two_saves_at_one_moment_wins(
    server: FarS3, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set(conditional="ignored")
    store = server.store(url, conditional=False)
    bucket: Any = store._bucket
    check = bucket._check_present

    def outrun(key: str, replace: Any) -> None:
        check(key, replace)
        if key.endswith("index.json"):
            monkeypatch.setattr(bucket, "_check_present", check)
            elsewhere(tc.save, server.store(url, conditional=False), {"by": "the faster"})

    monkeypatch.setattr(bucket, "_check_present", outrun)
    tc.save(store, {"by": "the slower"})
    assert tc.load(store) == {"by": "the slower"} and tc.verify(store).ok


def test_without_conditions_a_swap_replaces_only_what_it_has_read(server: FarS3, url: str) -> None:
    server.set(conditional="ignored")
    store = server.store(url, conditional=False)
    store.publish("index.json", b"old", replace=False)

    def holds(found: bytes) -> bool:
        store.publish("index.json", b"another", replace=True)
        return True

    with pytest.raises(tc.CheckpointExists):
        store.compare_and_swap("index.json", b"new", holds=holds, limit=99)
    assert store.read("index.json", limit=99) == b"another"
    store.compare_and_swap("index.json", b"new", holds=lambda found: found == b"another", limit=99)
    store.delete("index.json")
    store.compare_and_swap("index.json", b"anew", holds=lambda found: False, limit=99)
    assert store.read("index.json", limit=99) == b"anew"


def test_the_environment_says_it_for_the_command_line(server: FarS3, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.set(conditional="refused")
    for name, value in (server.environment() | {"AWS_CONDITIONAL_PUT": "disabled"}).items():
        monkeypatch.setenv(name, value)
    tc.save(url, {"n": 1})
    assert tc.load(url) == {"n": 1}
    with pytest.raises(tc.StoreError, match="conditional writes"):
        tc.save(server.store(f"{url}2", conditional=True, **ONCE), {"n": 1})


def test_a_writer_process_is_told_too(server: FarS3, url: str) -> None:
    server.set(conditional="ignored")
    for conditional in (True, False):
        run = tc.ObjectRun(url, **server.options(conditional=conditional))
        with tc.Manager(run, background=True) as manager:
            pending = manager.save(1, {"w": np.arange(9.0)})
            if conditional:
                with pytest.raises(tc.StoreError, match="ignores them"):
                    pending.result()
            else:
                assert pending.result() is not None


def test_an_option_that_is_neither_true_nor_false_is_refused(url: str) -> None:
    for path in (url, "memory://run"):
        with pytest.raises(tc.StoreError, match="expected conditional=True or conditional=False, found 'no'"):
            tc.ObjectStore(path, conditional="no")


def test_a_file_system_without_an_exclusive_mode_is_written_without_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise NotImplementedError
        real(self, path, value)

    real = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(tc.StoreError, match="conditional=False"):
        tc.save(tc.ObjectStore("memory://conditional/refused"), {"w": np.arange(9)})
    store = tc.ObjectStore("memory://conditional/taken", conditional=False)
    tc.save(store, {"n": 1})
    with pytest.raises(tc.CheckpointExists):
        tc.save(store, {"n": 2})
    assert tc.load(store) == {"n": 1}


def test_the_version_of_a_file_that_is_longer_than_the_limit_admits_a_write_and_a_deletion() -> None:
    pytest.importorskip("fsspec")
    store = tc.ObjectStore("memory://conditional/longer")
    store.publish("index.json", b"0123456789", replace=False)
    data, version = store.read_version("index.json", limit=3)
    assert data == b"0123"
    store.publish("index.json", b"new", replace=version)
    with pytest.raises(tc.CheckpointExists):
        store.publish("index.json", b"late", replace=version)
    store.publish("index.json", b"9876543210", replace=True)
    _, old = store.read_version("index.json", limit=3)
    store.publish("index.json", b"98765 and more", replace=True)
    with pytest.raises(tc.CheckpointExists):
        store.delete("index.json", version=old)
    _, version = store.read_version("index.json", limit=3)
    store.delete("index.json", version=version)
    assert store.sizes() == {}
