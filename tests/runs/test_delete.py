"""`Manager.delete` and `treeckpt.delete`: one checkpoint goes, as the clean-up deletes, unless something holds it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import treeckpt as tc
from tests.helpers.memory_run import MemoryRun
from tests.helpers.world import errors_of, on_ranks
from treeckpt._core.format.files import Progress, deleted_name, encode_progress, progress_name, step_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.process import this_process
from treeckpt._io.storage.kept_files import KeptFile
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import MemoryStore
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last


def test_a_step_is_deleted_on_request_and_the_others_stay(tmp_path: Path) -> None:
    with tc.Manager(tmp_path, keep=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"v": step})
        manager.wait()
        manager.delete(2)
        assert manager.steps() == [1, 3] and not (tmp_path / step_name(2)).exists()
        manager.delete(3)
        assert manager.latest() == 1
        with pytest.raises(tc.CheckpointNotFound, match="step_00000002"):
            manager.delete(2)
        manager.save(4, {"v": 4})
        manager.wait()
        assert manager.restore()["v"] == 4


def test_what_is_pinned_or_read_is_refused_and_stays(tmp_path: Path) -> None:
    with tc.Manager(tmp_path, keep=None, background=False) as manager:
        manager.save(1, {"v": 1}, pin=True)
        with pytest.raises(tc.CheckpointError, match=r"that nothing holds, found it is pinned\. Unpin it first"):
            manager.delete(1)
        manager.unpin(1)
        with manager.reading(1), pytest.raises(tc.CheckpointError, match="found it is being read"):
            manager.delete(1)
        assert manager.restore()["v"] == 1
        manager.delete(1)
        assert manager.steps() == []


def test_a_step_that_another_process_deletes_at_the_same_moment_is_deleted(tmp_path: Path) -> None:
    with tc.Manager(tmp_path, keep=None, background=False) as manager:
        manager.save(1, {"v": 1})

        @contextlib.contextmanager
        def overtaken(name: str) -> Iterator[bool]:
            shutil.rmtree(tmp_path / name)
            yield True

        manager.directory.delete(1, claim=overtaken)
        assert manager.steps() == [] and not (tmp_path / step_name(1)).exists()


def test_all_ranks_delete_one_step_or_raise(tmp_path: Path) -> None:
    with tc.Manager(tmp_path, keep=None, background=False) as manager:
        manager.save(1, {"v": 1})
        manager.save(2, {"v": 2})
    assert errors_of(on_ranks(2, lambda comm: tc.Manager(tmp_path, comm=comm).delete(2))) == [None, None]
    found = on_ranks(2, lambda comm: tc.Manager(tmp_path, comm=comm).delete(2))
    assert all("step_00000002" in str(one.error) for one in found)
    assert tc.Manager(tmp_path).steps() == [1]


@pytest.mark.parametrize("calls", range(1, 6))
def test_a_deletion_that_is_cut_short_is_finished_by_the_next_clean_up(
    tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tc.Manager(tmp_path, keep=None, background=False) as manager:
        manager.save(1, {"v": 1})
        manager.save(2, {"v": 2})
    delete, left = LocalStore.delete, [calls]

    def cut_short(self: LocalStore, name: str) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise KeyboardInterrupt
        delete(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", cut_short)
        with contextlib.suppress(KeyboardInterrupt):
            tc.Manager(tmp_path).delete(2)
    manager = tc.Manager(tmp_path, keep=None)
    assert manager.steps() in ([1], [1, 2])
    assert manager.steps() == [1] or tc.verify(tmp_path / step_name(2)).ok
    manager.clean()
    whole = (tmp_path / step_name(2) / "index.json").exists()
    assert whole or not (tmp_path / step_name(2)).exists()


def test_a_deletion_that_is_interrupted_behind_the_index_is_finished_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, real = MemoryRun(), MemoryStore.delete

    def delete(store: MemoryStore, name: str, **options: Any) -> None:
        real(store, name, **options)
        if name == INDEX_NAME:
            raise KeyboardInterrupt

    with tc.Manager(run, keep=None, background=False) as manager:
        for step in (1, 2):
            manager.save(step, {"v": step})
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(MemoryStore, "delete", delete)
            manager.delete(1)
        manager.clean()
        assert run.folder(step_name(1)).sizes() == {} and manager.steps() == [2]


def test_a_pinned_step_whose_deletion_was_killed_comes_back_in_a_store_that_knows_no_conditions() -> None:
    """As a store of one's own is, which neither renames files nor writes on condition of a version."""
    run = MemoryRun()
    for step in (1, 2):
        tc.save(run.folder(step_name(step)), {"n": step}, step=step)
    folder = run.folder(step_name(1))
    save_id = tc.inspect(folder).save_id
    aside = deleted_name(save_id, "0" * 16)
    folder.publish(aside, folder.read("index.json", limit=1 << 20), replace=False)
    RunDirectory(run).put_pin(RunDirectory(run).folder(1))
    folder.delete("index.json")
    assert tc.load(folder) == {"n": 1}, "readers take the index from the other name"
    report = RunDirectory(run).clean([Last(1)], grace=0)
    assert not report.failed and tc.load(folder) == {"n": 1}
    assert folder.entry("index.json") is not None and folder.entry(aside) is None


def test_a_checkpoint_that_no_manager_saved_is_deleted_by_its_path(tmp_path: Path) -> None:
    for path in (tmp_path / "by hand", tc.MemoryStore()):
        tc.save(path, {"v": 1}, files={"config.json": b"{}"})
        tc.delete(path)
        assert not tc.exists(path)
        with pytest.raises(tc.CheckpointNotFound):
            tc.delete(path)
    assert not any(tmp_path.iterdir()), "not even an empty directory stays"


def test_what_holds_a_checkpoint_keeps_it_from_a_deletion_by_path(tmp_path: Path) -> None:
    with tc.Manager(tmp_path, keep=None, background=False) as manager:
        manager.save(1, {"v": 1}, pin=True)
        path = manager.path(1)
        for force in (False, True):
            with pytest.raises(tc.CheckpointError, match=r"found it is pinned\. Unpin it first"):
                tc.delete(path, force=force)
        manager.unpin(1)
        with manager.reading(1), pytest.raises(tc.CheckpointError, match="found it is being read"):
            tc.delete(path)
        kept = KeptFile(LocalStore(path), progress_name(0, "0" * 16), lambda: progress_of_a_save("0" * 16))
        kept.write()
        try:
            with pytest.raises(tc.CheckpointError, match="another save may be writing there"):
                tc.delete(path)
        finally:
            kept.end()
        assert tc.verify(path).ok
        tc.delete(path)
        assert manager.steps() == []


def progress_of_a_save(save_id: str) -> bytes:
    """The record of a save of this process that has just begun."""
    now = time.time_ns()
    return encode_progress(Progress(save_id, 0, 1, 1, "write", 0, 9, now, now, alive_ns=now, owner=this_process()))


def test_damage_and_what_was_never_finished_go_by_force_alone_and_files_of_others_stay(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"v": torch.ones(9)})
    (tmp_path / "a" / "mine.txt").write_text("mine")
    [shard] = (tmp_path / "a").glob("shard-*")
    shard.unlink()
    with pytest.raises(tc.CheckpointError, match="force=True deletes it all the same"):
        tc.delete(tmp_path / "a")
    tc.delete(tmp_path / "a", force=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine.txt"]
    tc.save(tmp_path / "b", {"v": torch.ones(9)})
    (tmp_path / "b" / INDEX_NAME).unlink()
    with pytest.raises(tc.CheckpointNotFound, match="force=True deletes it all the same"):
        tc.delete(tmp_path / "b")
    tc.delete(tmp_path / "b", force=True)
    assert not (tmp_path / "b").exists()
    for force in (False, True):
        with pytest.raises(tc.CheckpointNotFound):
            tc.delete(tmp_path / "a", force=force)
    assert (tmp_path / "a" / "mine.txt").read_text() == "mine"


def test_a_link_goes_by_force_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"v": 1})
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(tc.CheckpointError, match="symbolic link"):
        tc.delete(tmp_path / "link")
    tc.delete(tmp_path / "link", force=True)
    assert tc.exists(tmp_path / "a") and not (tmp_path / "link").is_symlink()


def test_failed_saves_of_a_run_stay_known_after_a_deletion_by_path(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with tc.Manager(tmp_path, keep=None, background=False) as manager:
        manager.save(1, {"v": 1})
        path = tmp_path / step_name(1)
        killed = msgspec.structs.replace(this_process(), started=1)
        record = Progress("0" * 16, 0, 1, 1, "write", 0, 9, 1, 1, owner=killed)
        (path / progress_name(0, "0" * 16)).write_bytes(encode_progress(record))
        tc.delete(path)
    assert [failure.save_id for failure in run.failures.read()[0]] == ["0" * 16]
