"""The lock on an index: saves wait for deletions and repairs, which give up beside a save; an index is never lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from tests.crash.disks import remount, small_disk
from tests.helpers.background import until
from tests.helpers.s3 import ONCE, QUICK, S3
from tests.helpers.stopped import stopping
from treeckpt._core.format.files import PIN_NAME, Owner, Progress, damaged_name, deleted_name, lock_name, step_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.process import this_process
from treeckpt._io.storage import deletions, kept_files, obstore
from treeckpt._io.storage.checkpoint import read_index
from treeckpt._io.storage.deletions import (
    file_facts,
    held_locks,
    hold_for_repair,
    hold_lock,
    index_state,
    restore_index,
    take_index,
)
from treeckpt._io.storage.kept_files import LAPSE, Claim, ProgressRecorder, hold_lease
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.object_store import ObjectStore
from treeckpt._io.storage.published_index import replace_index
from treeckpt._io.storage.store import MemoryStore, Store
from treeckpt._io.storage.wrapped_store import WrappedStore
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

ENDED = msgspec.structs.replace(this_process(), started=this_process().started + 1)
ELSEWHERE = Owner("another host", 1, "another boot", 1)
PARENT = msgspec.structs.replace(
    this_process(),
    pid=os.getppid(),
    started=int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]),
)
"""A process that runs."""


def write_lock(path: Path, owner: Owner, age: float = 0.0, kind: Any = "deleting") -> Path:
    file = path / lock_name(kind, "0" * 16)
    file.write_bytes(msgspec.json.encode(Claim(owner, time.time_ns() - int(age * 1e9))))
    return file


def test_a_save_is_committed_once_the_lock_is_gone(tmp_path: Path) -> None:
    with hold_lock(LocalStore(tmp_path), "deleting"):
        saving = threading.Thread(target=tc.save, args=(tmp_path, {"n": 1}), daemon=True)
        saving.start()
        saving.join(0.2)
        assert saving.is_alive() and INDEX_NAME not in os.listdir(tmp_path)
    saving.join(60)
    assert tc.load(tmp_path) == {"n": 1}


def test_a_save_beside_an_endless_deletion_fails_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "LOCK_WAIT_SECONDS", 0.05)
    file = write_lock(tmp_path, ELSEWHERE)
    with pytest.raises(tc.CheckpointError, match=f"process 1 on another host deletes it.*delete {file.name}"):
        tc.save(tmp_path, {"n": 1})
    assert {name.partition(".")[0] for name in os.listdir(tmp_path)} == {"deleting", "timings"}


@pytest.mark.parametrize(
    ("owner", "age"),
    [(ENDED, 0.0), (ELSEWHERE, LAPSE + 1), (PARENT, LAPSE + 1)],
    ids=["ended", "old on another host", "old and running"],
)
def test_a_lock_whose_process_has_ended_or_that_is_old_holds_nobody_up(
    tmp_path: Path, owner: Owner, age: float
) -> None:
    path = tmp_path / step_name(1)
    path.mkdir()
    file = write_lock(path, owner, age)
    tc.save(path, {"n": 1}, step=1)
    RunDirectory(tmp_path).clean([])
    assert not file.exists() and tc.load(path) == {"n": 1}


def test_the_young_lock_of_a_process_that_runs_is_held(tmp_path: Path) -> None:
    file = write_lock(tmp_path, PARENT)
    assert held_locks(LocalStore(tmp_path), os.listdir(tmp_path)) == {file.name: PARENT}


def test_a_lock_whose_deletion_fails_is_deleted_later(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        with hold_lock(LocalStore(disk), "deleting") as name:
            remount(disk, writable=False)
        assert os.listdir(disk) == [name] and not held_locks(LocalStore(disk), [name])
        remount(disk, writable=True)
        assert until(lambda: not os.listdir(disk))


class _InterruptedStore(WrappedStore):
    """Is interrupted when a file has just been published."""

    def publish(self, name: str, data: bytes, **options: Any) -> None:
        super().publish(name, data, **options)
        raise KeyboardInterrupt


def test_a_lock_or_lease_in_whose_writing_an_interrupt_comes_is_deleted() -> None:
    store = MemoryStore()
    tc.save(store, {"n": 1})
    saved = store.sizes()
    for held in (hold_lock(_InterruptedStore(store), "deleting"), hold_lease(_InterruptedStore(store))):
        with pytest.raises(KeyboardInterrupt), held:
            pass
        assert until(lambda: store.sizes() == saved)


@pytest.mark.parametrize("answer", ["503", "403"])
def test_what_cannot_be_read_is_held_and_alive(s3: S3, answer: str) -> None:
    store, now = s3.store(**ONCE), time.time_ns()
    record = ProgressRecorder(store, Progress("a" * 16, 0, 1, 1, "write", 0, 1, now, now))
    with hold_lock(store, "deleting") as name:
        s3.rules({"match": "GET .*deleting", "do": answer, "times": 99})
        assert held_locks(store, store.sizes()) == {name: None}
    s3.rules()
    record.begin()
    try:
        s3.rules({"match": "GET .*progress", "do": answer, "times": 99})
        with pytest.raises(tc.CheckpointError, match=f"save {'a' * 16} is under way"), hold_for_repair(store):
            pass
        (fact,) = file_facts(store, now, committed=None)
        assert fact.alive is True
    finally:
        s3.rules()
        record.end()


def test_an_index_that_cannot_be_read_this_time_is_not_replaced(s3: S3) -> None:
    store = s3.store(**ONCE)
    tc.save(store, {"n": 1})
    s3.rules({"match": "GET .*index.json", "do": "503", "times": 99})
    with pytest.raises(tc.StoreError):
        tc.rebuild_index(store, replace=True)
    s3.rules()
    assert tc.load(store) == {"n": 1} and not any(name.endswith(".damaged") for name in store.sizes())


def test_a_lock_that_a_power_loss_left_empty_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / lock_name("repairing", "1" * 16)).touch()
    tc.save(tmp_path, {"n": 1})
    assert tc.load(tmp_path) == {"n": 1}


def test_a_deletion_gives_up_beside_a_save_and_a_repair(tmp_path: Path) -> None:
    for step in (1, 2):
        tc.save(tmp_path / step_name(step), {"n": step}, step=step)
    path = tmp_path / step_name(1)
    with hold_lock(LocalStore(path), "repairing"):
        assert "being repaired" in RunDirectory(tmp_path).clean([Last(1)]).left[0].why
    now = time.time_ns()
    record = ProgressRecorder(LocalStore(path), Progress("a" * 16, 0, 1, 1, "write", 0, 1, now, now))
    record.begin()
    try:
        with pytest.raises(tc.CheckpointError, match="another save may be writing"):
            RunDirectory(tmp_path).delete(1)
    finally:
        record.end()
    RunDirectory(tmp_path).delete(1)
    assert os.listdir(tmp_path) == [step_name(2)]


def test_a_repair_gives_up_beside_a_save_and_a_deletion(tmp_path: Path) -> None:
    tc.save(tmp_path, {"n": 1})
    before = sorted(os.listdir(tmp_path))
    now = time.time_ns()
    record = ProgressRecorder(LocalStore(tmp_path), Progress("a" * 16, 0, 1, None, "write", 0, 1, now, now))
    record.begin()
    with pytest.raises(tc.CheckpointError, match=f"save {'a' * 16} is under way"):
        tc.rebuild_index(tmp_path, replace=True)
    record.end()
    with (
        hold_lock(LocalStore(tmp_path), "deleting"),
        pytest.raises(tc.CheckpointError, match=f"process {os.getpid()} on .* deletes it"),
    ):
        tc.rebuild_index(tmp_path, replace=True)
    assert sorted(os.listdir(tmp_path)) == before
    assert tc.rebuild_index(tmp_path, replace=True) == tc.inspect(tmp_path)


def test_an_index_that_was_saved_since_the_look_is_not_replaced(tmp_path: Path) -> None:
    tc.save(tmp_path, {"n": 1})
    store = LocalStore(tmp_path)
    before, old = index_state(store), read_index(store)
    tc.save(tmp_path, {"n": 2}, overwrite=True)
    with pytest.raises(tc.CheckpointError, match="another save was committed meanwhile"):
        replace_index(store, before, old)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(tc.CheckpointError, match="meanwhile"):  # its shards are gone
        replace_index(store, None, old)
    assert INDEX_NAME not in os.listdir(tmp_path)


@pytest.mark.parametrize("url", ["s3", "memory"])
def test_an_object_that_was_replaced_since_the_look_is_not_deleted(request: pytest.FixtureRequest, url: str) -> None:
    store = (
        request.getfixturevalue("s3").store() if url == "s3" else tc.ObjectStore(f"memory://bucket/{time.time_ns()}")
    )
    store.publish("index.json", b"old", replace=True)

    def replaced_after_the_look(found: bytes) -> bool:
        store.publish("index.json", b"new", replace=True)
        return found == b"old"

    with pytest.raises(tc.CheckpointExists):
        take_index(store, "aside", holds=replaced_after_the_look)
    assert store.read("index.json", limit=99) == b"new"
    with pytest.raises(tc.CheckpointExists):
        take_index(store, "aside", holds=lambda found: found == b"old")
    take_index(store, "aside", holds=lambda found: True)
    with pytest.raises(FileNotFoundError):
        take_index(store, "aside", holds=lambda found: True)


@pytest.mark.parametrize("fault", ["503", "500", "cut", "lost"])
def test_a_failed_deletion_on_condition_is_repeated_and_never_sent_without(
    s3: S3, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore, "PAUSE", 1e-3)
    store = s3.store(**QUICK)
    for times, gone in ((1, True), (99, fault == "lost")):
        store.publish("index.json", b"old", replace=True)
        s3.rules({"match": "DELETE", "do": fault, "times": times})
        if gone and times == 1:
            take_index(store, "aside", holds=lambda found: True)
        else:
            with pytest.raises(tc.StoreError):
                take_index(store, "aside", holds=lambda found: True)
        log = s3.log()
        s3.rules()
        assert ("index.json" not in store.sizes()) is gone
        sent = [row for row in log if row["method"] == "DELETE"]
        assert len(sent) > 1 and all(row["condition"] for row in sent)


def test_a_store_that_refuses_a_deletion_on_condition_is_asked_without(s3: S3) -> None:
    store = s3.store()
    store.publish("index.json", b"old", replace=True)
    s3.rules({"match": "DELETE", "do": "403"})
    take_index(store, "aside", holds=lambda found: True)
    assert "index.json" not in store.sizes()
    assert [bool(row["condition"]) for row in s3.log() if row["method"] == "DELETE"] == [True, False]


@pytest.mark.parametrize("by", ["a clean-up", "a save", "a reader"])
@pytest.mark.parametrize("pinned", [False, True], ids=["of another save", "pinned"])
def test_an_index_that_a_killed_deletion_has_taken_wrongly_is_back(tmp_path: Path, by: str, pinned: bool) -> None:
    """A deletion of another save was stopped for longer than its lock counts, or the save was pinned meanwhile.

    It was killed before it could look.
    """
    path = tmp_path / step_name(1)
    save_id = tc.save(path, {"n": 1}, step=1).save_id
    if pinned:
        RunDirectory(tmp_path).pin(1)
    (path / INDEX_NAME).rename(path / deleted_name(save_id if pinned else "d" * 16, "e" * 16))
    if by == "a clean-up":
        RunDirectory(tmp_path).clean([], grace=0)
        RunDirectory(tmp_path).clean([], grace=0)
    elif by == "a save":
        with pytest.raises(tc.CheckpointExists):
            tc.save(path, {"n": 2}, step=1)
    assert tc.load(path) == {"n": 1} and tc.verify(path).ok
    if by != "a reader":
        assert INDEX_NAME in os.listdir(path) and not any(name.startswith("deleted") for name in os.listdir(path))


def test_an_index_that_was_taken_away_is_not_back_once_its_deletion_has_decided(tmp_path: Path) -> None:
    path = tmp_path / step_name(1)
    save_id = tc.save(path, {"n": 1}, step=1).save_id
    RunDirectory(tmp_path).pin(1)
    (path / INDEX_NAME).rename(path / deleted_name(save_id))
    assert "pinned, though it has no index" in RunDirectory(tmp_path).clean([], grace=0).left[0].why
    with pytest.raises(tc.CheckpointNotFound):
        tc.load(path)


@pytest.fixture(params=["s3", "memory"])
def object_run(request: pytest.FixtureRequest) -> tc.ObjectRun:
    """A run with a step in an object store, that has conditional writes, or looks before it writes."""
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        run = tc.ObjectRun(s3.url(), **s3.options())
    else:
        run = tc.ObjectRun(f"memory://bucket/{time.time_ns()}")
    tc.save(run.folder(step_name(1)), {"n": 1}, step=1)
    return run


def pin(folder: Store) -> None:
    folder.publish(PIN_NAME, b"{}", replace=True)


def delete_and_then(run: tc.ObjectRun, act: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletes the step; `act` is called once the index is taken away."""

    def take(store: Store, aside: str, *, holds: Callable[[bytes], bool] | None) -> None:
        take_index(store, aside, holds=holds)
        act(store)

    with monkeypatch.context() as patch:
        patch.setattr("treeckpt._runs.removal.take_index", take)
        RunDirectory(run).delete(1)


@pytest.mark.parametrize("by", ["a clean-up", "a save", "a reader"])
def test_of_an_object_store_an_index_that_was_taken_for_a_pin_is_back_after_a_kill(
    object_run: tc.ObjectRun, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin_and_kill(store: Store) -> None:
        pin(store)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delete_and_then(object_run, pin_and_kill, monkeypatch)
    folder = object_run.folder(step_name(1))
    if by == "a clean-up":
        RunDirectory(object_run).clean([], grace=0)
    elif by == "a save":
        with pytest.raises(tc.CheckpointExists):
            tc.save(folder, {"n": 2}, step=1)
    assert tc.load(folder) == {"n": 1} and tc.verify(folder).ok
    if by != "a reader":
        assert INDEX_NAME in folder.entries() and not any(name.startswith("deleted") for name in folder.entries())


def test_of_an_object_store_an_index_that_others_put_back_stays(
    object_run: tc.ObjectRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion has looked for a pin, and was stopped; a pin comes, and a save finds no lock."""
    folder, look = object_run.folder(step_name(1)), ObjectStore.listed

    def put_back(store: Store) -> None:
        def listed(self: ObjectStore) -> Store:
            found = look(self)
            monkeypatch.setattr(ObjectStore, "listed", look)
            pin(folder)
            assert restore_index(folder)
            return found

        monkeypatch.setattr(ObjectStore, "listed", listed)

    with pytest.raises(tc.CheckpointError, match="pinned meanwhile"):
        delete_and_then(object_run, put_back, monkeypatch)
    assert tc.load(folder) == {"n": 1} and tc.verify(folder).ok
    assert not any(name.startswith("deleted") for name in folder.entries())


def test_of_an_object_store_no_index_is_put_back_once_its_deletion_has_decided(
    object_run: tc.ObjectRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = object_run.folder(step_name(1))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("treeckpt._runs.removal.has_readers", killed)
        RunDirectory(object_run).delete(1)
    pin(folder)
    assert not restore_index(folder) and INDEX_NAME not in folder.entries()
    with pytest.raises(tc.CheckpointNotFound):
        tc.load(folder)


def test_no_index_is_published_for_shards_that_went_with_a_lock_that_was_listed(tmp_path: Path) -> None:
    class Listed(LocalStore):
        """Behind its first listing under the repair's lock a clean-up ends, which held a lock."""

        def sizes(self) -> dict[str, int]:
            found = super().sizes()
            if other in found and any(name.startswith("repairing") for name in found):
                for name in (other, index.file_list[0].name):
                    (self.directory / name).unlink()
            return found

    tc.save(tmp_path, {"n": 1})
    index, other = tc.inspect(tmp_path), lock_name("deleting", "e" * 16)
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / other).touch()
    with pytest.raises(tc.CheckpointError, match="meanwhile"):
        replace_index(Listed(tmp_path), None, index)
    assert INDEX_NAME not in os.listdir(tmp_path)


def test_a_deletion_that_was_stopped_between_its_look_and_its_rename_puts_the_index_back(tmp_path: Path) -> None:
    class Stopped(LocalStore):
        """Meanwhile another process saves the step, and does not see the lock: it has lapsed."""

        def rename(self, name: str, target: str, *, replace: bool) -> None:
            if not replace:
                super().rename(name, target, replace=False)
                return
            for lock in self.directory.glob("deleting*"):
                lock.unlink()
            tc.save(self.directory, {"n": 10}, step=1, overwrite=True)
            super().rename(name, target, replace=True)

    for step in (1, 2):
        tc.save(tmp_path / step_name(step), {"n": step}, step=step)
    run = RunDirectory(tmp_path)
    folder = Stopped(tmp_path / step_name(1))
    run.store.folder = lambda name: folder if name == step_name(1) else LocalStore(tmp_path / name)  # pyright: ignore
    report = run.clean([Last(1)])
    assert [left.why for left in report.left] == ["another save has been committed there meanwhile"]
    assert tc.load(tmp_path / step_name(1)) == {"n": 10} and tc.verify(tmp_path / step_name(1)).ok


def test_an_index_is_made_again_for_the_save_that_was_committed_not_for_a_later_dead_one(tmp_path: Path) -> None:
    committed = tc.save(tmp_path / "at", {"n": 1})
    dead = tc.save(tmp_path / "other", {"n": 2})
    for shard in (tmp_path / "other").glob("shard*"):
        shard.rename(tmp_path / "at" / shard.name)
    assert tc.rebuild_index(tmp_path / "at", replace=True).save_id == committed.save_id != dead.save_id
    assert tc.load(tmp_path / "at") == {"n": 1}


def test_a_directory_in_which_a_repair_was_killed_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / step_name(1)
    tc.save(path, {"n": 1}, step=1)
    (path / INDEX_NAME).rename(path / damaged_name(INDEX_NAME, "e" * 16))
    assert "repair it again" in RunDirectory(tmp_path).clean([], grace=0).left[0].why
    assert tc.verify(path, repair=True).ok and tc.load(path) == {"n": 1}


@pytest.mark.parametrize("before", ["nothing", "another save", "another save, whose shards go too"])
@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_save_that_was_stopped_for_so_long_that_its_shards_are_gone_is_not_committed(
    place: str, before: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has replaced is there again."""

    def clean_up(store: Store) -> None:
        for name in store.sizes():
            if name.startswith("shard") and (before.endswith("too") or replaced not in name):
                store.delete(name)

    stopped = stopping(ObjectStore if place == "s3" else LocalStore, clean_up)
    if place == "s3":
        s3: S3 = request.getfixturevalue("s3")
        store = stopped(s3.url(), **s3.options())
    else:
        store = stopped(tmp_path)
    replaced = "none"
    if before != "nothing":
        # by a store of its own, in which nobody is stopped
        replaced = tc.save(s3.store(store.url) if place == "s3" else tmp_path, {"n": 0}).save_id
    monkeypatch.setattr(kept_files, "LAPSE", 0.0)
    with pytest.raises(tc.CheckpointError, match="took this process for an ended one"):
        tc.save(store, {"n": 1}, overwrite=True)
    if before == "another save":
        assert tc.load(store) == {"n": 0} and tc.verify(store).ok
    else:
        assert INDEX_NAME not in store.sizes()


@pytest.mark.parametrize("repair", [False, True])
def test_an_index_that_is_made_again_is_taken_back_where_its_shards_went_meanwhile(
    repair: bool, tmp_path: Path
) -> None:
    def clean_up(store: Store) -> None:
        for name in store.sizes():
            if name.startswith("shard"):
                store.delete(name)

    tc.save(tmp_path, {"n": 1})
    (tmp_path / INDEX_NAME).unlink()
    store = stopping(LocalStore, clean_up)(tmp_path)
    with pytest.raises(tc.CheckpointError, match="took this process for an ended one"):
        tc.verify(store, repair=True) if repair else tc.rebuild_index(store)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(("index", "deleted"))]
