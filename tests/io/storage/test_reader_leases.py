"""A reader's lease: which process holds it, and whether that process may still read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from treeckpt._core.format.files import lease_name
from treeckpt._io.process import this_process
from treeckpt._io.storage import deletions, kept_files
from treeckpt._io.storage.kept_files import has_readers, hold_lease, read_lease
from treeckpt._io.storage.store import Store
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

NAME = lease_name("0" * 16)


@pytest.fixture(params=["local", "s3", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """The folder of a checkpoint, on a disk and in buckets."""
    run = request.getfixturevalue("s3").url() if request.param == "s3" else f"{tmp_path}/run"
    run = f"memory://{run}" if request.param == "memory" else run
    with tc.Manager(run, background=False) as manager:
        manager.save(1, {"n": 1})
    return RunDirectory(run).folder(1)


def test_a_lease_of_this_process_is_held_until_its_reader_ends(folder: Store) -> None:
    with hold_lease(folder):
        [name] = [name for name in folder.entries() if name.startswith("lease.")]
        assert read_lease(folder, name) == (this_process(), True) and has_readers(folder, time.time_ns())
    assert not has_readers(folder, time.time_ns()), "whether its file is deleted by now or not"


def test_a_lease_that_is_being_deleted_is_no_leftover(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease in a bucket is deleted by a thread, for which neither a reader nor a clean-up waits."""
    asked, deleted = threading.Event(), threading.Event()
    delete = kept_files.KeptFile._delete

    def late(self: kept_files.KeptFile, pauses: Iterable[float]) -> bool:
        asked.set()
        if folder.url.startswith(("s3:", "memory:")):
            deleted.wait(60)
        return delete(self, pauses)

    with monkeypatch.context() as patch:
        patch.setattr(kept_files.KeptFile, "_delete", late)
        with hold_lease(folder):
            pass
        assert asked.wait(60)
    report = RunDirectory(folder.url.rpartition("/")[0]).clean([Last(1)])
    deleted.set()
    assert not report.removed and not report.left


def test_a_lease_deleted_since_it_was_listed_is_neither_held_nor_a_leftover(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish(NAME, msgspec.json.encode(this_process()), replace=True)
    run = RunDirectory(folder.url.rpartition("/")[0])
    read = deletions.read_lease

    def deleted(store: Store, name: str) -> Any:
        store.delete(name)
        return read(store, name)

    for module in (deletions, kept_files):
        monkeypatch.setattr(module, "read_lease", deleted)
    assert not run.clean([Last(1)]).removed
    folder.publish(NAME, msgspec.json.encode(this_process()), replace=True)
    assert not has_readers(folder, time.time_ns())


def test_a_lease_that_names_no_process_may_be_held(folder: Store) -> None:
    folder.publish(NAME, b"{", replace=True)
    assert read_lease(folder, NAME) == (None, None) and has_readers(folder, time.time_ns())
