"""`Manager.delete`: one step goes, as the clean-up deletes, unless something holds it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.helpers.memory_run import MemoryRun
from tests.helpers.world import errors_of, on_ranks
from treeckpt._core.format.files import deleted_name, step_name
from treeckpt._core.format.index import INDEX_NAME
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
