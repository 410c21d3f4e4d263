"""Incremental saves of a manager: what its clean-ups keep, what a restart goes on with, what deletions leave."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import treeckpt as tc
from tests.helpers.adapted import FROZEN, NBYTES, Adapted, assert_same, data_nbytes, write_adapted
from treeckpt._cli.main import main
from treeckpt._core.format.files import deleted_name, parse_file_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import shard_name
from treeckpt._io.storage import shared_files
from treeckpt._io.storage.kept_files import hold_lease
from treeckpt._io.storage.shared_files import read_shared
from treeckpt._runs.removal import clean_checkpoint
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import All, Last, Steps

SHARED = FROZEN * NBYTES


def nbytes_of(run: Path) -> int:
    return sum(file.stat().st_size for file in run.rglob("shard-*"))


def named_files(run: Path) -> set[Path]:
    """The shards that the indexes of a run name."""
    indexes = {path.parent.name: tc.inspect(path.parent) for path in run.glob(f"*/{INDEX_NAME}")}
    return {run / (f.directory or name) / f.name for name, index in indexes.items() for f in index.file_list}


@pytest.mark.parametrize("background", [False, True])
def test_a_run_holds_what_is_frozen_once(tmp_path: Path, background: bool) -> None:
    state = Adapted()
    with tc.Manager(tmp_path, keep=2, incremental=True, background=background) as manager:
        for step in range(1, 7):
            tree = state.train()
            manager.save(step, tree)
    assert manager.steps() == [5, 6]
    assert_same(tmp_path / "step_00000006", tree)
    assert nbytes_of(tmp_path) < SHARED + 2 * FROZEN * 4000 + 4 * 4096
    assert set(tmp_path.rglob("shard-*")) == named_files(tmp_path)
    assert not (tmp_path / "step_00000001" / INDEX_NAME).exists()


def test_a_restart_shares_with_the_checkpoint_that_it_restored(tmp_path: Path) -> None:
    state = Adapted()
    with tc.Manager(tmp_path, incremental=True, background=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, state.train())
    with tc.Manager(tmp_path, incremental=True, background=False) as manager:
        manager.restore(step=2)
        report = manager.save(3, state.train())
        assert isinstance(report, tc.SaveReport) and report.shared_nbytes == SHARED


def test_one_of_so_many_saves_is_full(tmp_path: Path) -> None:
    state, shared = Adapted(), list[int]()
    with tc.Manager(tmp_path, keep=None, incremental=True, full_every=3, background=False) as manager:
        for step in range(1, 8):
            report = manager.save(step, state.train())
            assert isinstance(report, tc.SaveReport)
            shared.append(report.shared_nbytes)
    assert shared == [0, SHARED, SHARED, 0, SHARED, SHARED, 0]


def test_wrong_numbers_of_full_saves_are_refused(tmp_path: Path) -> None:
    for given in ({"full_every": 3}, {"full_every": 0, "incremental": True}):
        with pytest.raises(tc.TreeckptError, match="a number of saves, 1 or more, beside incremental=True"):
            tc.Manager(tmp_path, **given)


def test_a_deleted_checkpoint_leaves_what_others_share(tmp_path: Path) -> None:
    write_adapted(tmp_path, 3)
    before = tc.load(tmp_path / "step_00000003")
    with tc.Manager(tmp_path, keep=None) as manager:
        manager.delete(1)
        assert manager.steps() == [2, 3]
        assert data_nbytes(tmp_path / "step_00000001") >= SHARED
        assert torch.equal(tc.load(tmp_path / "step_00000003")["layer0"]["base"], before["layer0"]["base"])
        manager.delete(2)
        manager.clean()
        assert data_nbytes(tmp_path / "step_00000001") >= SHARED
        manager.delete(3)
        manager.clean()
    assert not (tmp_path / "step_00000001").exists()


def test_a_replaced_step_leaves_what_others_share(tmp_path: Path) -> None:
    state = write_adapted(tmp_path, 3)
    tc.save(tmp_path / "step_00000001", {"step": 0}, step=1, overwrite=True)
    assert tc.load(tmp_path / "step_00000001") == {"step": 0}
    assert torch.equal(tc.load(tmp_path / "step_00000003")["layer1"]["base"], state.frozen[1])
    with tc.Manager(tmp_path, keep=None) as manager:
        manager.clean()
        assert torch.equal(tc.load(tmp_path / "step_00000003")["layer1"]["base"], state.frozen[1])
        manager.delete(2)
        manager.delete(3)
        manager.clean()
    assert all(parse_file_name(file.name) is not None for file in (tmp_path / "step_00000001").iterdir())
    assert data_nbytes(tmp_path / "step_00000001") < 8192


@pytest.mark.parametrize("how", ["delete", "delete alone", "delete by force", "clean", "overwrite", "lost index"])
def test_what_a_kept_index_names_stays_where_the_mark_of_that_is_lost(tmp_path: Path, how: str) -> None:
    write_adapted(tmp_path, 3)
    [mark] = tmp_path.rglob("shared.*.json")
    mark.unlink()
    origin, before = tmp_path / "step_00000001", tc.load(tmp_path / "step_00000003")
    if how == "lost index":
        (origin / INDEX_NAME).unlink()
        RunDirectory(tmp_path).clean([All()], grace=0)
    elif how == "clean":
        RunDirectory(tmp_path).clean([Last(1)])
    elif how == "overwrite":
        tc.save(origin, {"step": 0}, step=1, overwrite=True)
    elif how == "delete alone":
        tc.delete(origin)
    else:
        RunDirectory(tmp_path).delete(1, force=how == "delete by force")
    for _ in range(2):
        assert tc.verify(tmp_path / "step_00000003").ok
        assert torch.equal(tc.load(tmp_path / "step_00000003")["layer0"]["base"], before["layer0"]["base"])
        RunDirectory(tmp_path).clean([Last(1), Steps((1,))], grace=0)
    RunDirectory(tmp_path).delete(3)
    RunDirectory(tmp_path).clean([Last(1)], grace=0)
    assert how == "overwrite" or not list(tmp_path.rglob("shard-*"))


def test_a_deletion_reads_other_indexes_only_where_they_may_name_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a size limit are not shared, as the index of their own save tells."""
    read = list[str]()
    monkeypatch.setattr(shared_files, "read_shared", lambda folder: read.append(folder.name) or read_shared(folder))
    for step in range(1, 5):
        tc.save(tmp_path / f"step_0000000{step}", {"w": torch.ones(9), "v": torch.ones(9)}, max_shard_bytes=36)
    assert len(list(tmp_path.glob("step_00000001/shard-*"))) == 2
    tc.delete(tmp_path / "step_00000001")
    RunDirectory(tmp_path).delete(2, force=True)
    assert not read and not (tmp_path / "step_00000001").exists() and not (tmp_path / "step_00000002").exists()


def test_where_an_index_cannot_be_read_nothing_goes_that_it_may_name(tmp_path: Path) -> None:
    write_adapted(tmp_path, 3)
    (tmp_path / "step_00000002" / INDEX_NAME).write_bytes(b"{}")
    tc.Manager(tmp_path, keep=None).delete(3)
    report = RunDirectory(tmp_path).clean([Last(1)])
    RunDirectory(tmp_path).delete(1, force=True)
    assert data_nbytes(tmp_path / "step_00000001") >= SHARED, report
    left = RunDirectory(tmp_path).clean([Last(1)], dry_run=True).left
    assert any("step_00000002, whose index cannot be read, may need them" in each.why for each in left)


def test_what_a_reader_of_a_deleted_checkpoint_shares_stays(tmp_path: Path) -> None:
    write_adapted(tmp_path, 3)
    folder = RunDirectory(tmp_path).folder(3)
    save_id = tc.inspect(tmp_path / "step_00000003").save_id
    manager = tc.Manager(tmp_path, keep=None)
    manager.delete(2)
    with hold_lease(folder):
        # as a deletion leaves it that has found the reader once the index was gone
        folder.rename(INDEX_NAME, deleted_name(save_id), replace=True)
        manager.clean()
        RunDirectory(tmp_path).delete(1, force=True)
        assert data_nbytes(tmp_path / "step_00000001") >= SHARED
    manager.clean()
    manager.clean()
    assert not list(tmp_path.rglob("shard-*"))


def test_a_checkpoint_that_has_lost_its_index_keeps_what_it_shares(tmp_path: Path) -> None:
    write_adapted(tmp_path, 3)
    (tmp_path / "step_00000003" / INDEX_NAME).unlink()
    manager = tc.Manager(tmp_path, keep=None)
    manager.delete(2)
    left = RunDirectory(tmp_path).clean([Last(1)], dry_run=True)
    manager.delete(1)
    assert tc.verify(tmp_path / "step_00000003", repair=True).ok, left
    manager.delete(3)
    manager.clean()
    assert not list(tmp_path.rglob("shard-*"))


def test_a_deleted_step_whose_files_others_share_is_not_made_again(tmp_path: Path) -> None:
    write_adapted(tmp_path, 3)
    tc.Manager(tmp_path, keep=None).delete(1)
    for again in (tc.rebuild_index, partial(tc.verify, repair=True)):
        with pytest.raises(tc.CheckpointNotFound, match="deleted; of its files those stay that other checkpoints"):
            again(tmp_path / "step_00000001")


@pytest.mark.parametrize("alone", [False, True])
def test_copies_stay_while_a_checkpoint_is_flattened_and_go_where_that_was_killed(tmp_path: Path, alone: bool) -> None:
    write_adapted(tmp_path, 3)
    path = tmp_path / "step_00000003"
    index = tc.inspect(path)
    [shared] = index.shared_of(0)
    [name] = index.shared_names
    copy = path / shard_name(index.save_id, 0, 1, shared.part)
    begun = path / f".{copy.name}.{'0' * 16}.tmp"

    def clean() -> None:
        if alone:
            clean_checkpoint(path, grace=0)
        else:
            RunDirectory(tmp_path).clean([All()], grace=0)

    with hold_lease(tc.LocalStore(path)):
        for file in (copy, begun):
            file.write_bytes((tmp_path / "step_00000001" / name).read_bytes())
        clean()
        assert copy.exists() and begun.exists()
    clean()
    assert not copy.exists() and not begun.exists()
    assert tc.verify(path).ok


def test_the_plan_of_a_clean_up_says_what_stays_and_for_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapted(tmp_path, 3)
    assert main(["gc", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1 shard of 3.6 MB stay: step_00000002 and step_00000003 share them" in shown


def test_values_of_a_leaf_are_shown_whose_file_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = write_adapted(tmp_path, 3)
    assert main(["show", str(tmp_path / "step_00000003"), "layer0/base", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["values"]
    assert shown["verified"] and shown["statistics"]["minimum"] == pytest.approx(float(state.frozen[0].min()), abs=2)


def test_what_is_left_of_a_deleted_step_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapted(tmp_path, 3)
    with tc.Manager(tmp_path, keep=None) as manager:
        manager.delete(1)
        assert manager.steps() == [2, 3] and manager.latest() == 3
    with pytest.raises(tc.CheckpointNotFound):
        tc.load(tmp_path / "step_00000001")
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step_00000001: deleted; the shards that other checkpoints share stay as long as these" in shown
    assert "repair" not in shown


def test_a_clean_up_says_that_nobody_shares_the_files_of_a_deleted_step_any_more(tmp_path: Path) -> None:
    write_adapted(tmp_path, 3)
    manager = tc.Manager(tmp_path, keep=None)
    for step in (1, 2):
        manager.delete(step)
    manager.delete(3)
    [removal] = manager.clean(dry_run=True).removed
    assert (removal.name, removal.what) == ("step_00000001", "leftovers")
    assert removal.reason == "no checkpoint shares the files of a deleted one now"
    assert removal.nbytes >= SHARED


def test_the_bytes_that_a_clean_up_frees_are_those_of_all_files(tmp_path: Path) -> None:
    for step in (1, 2):
        tc.save(tmp_path / f"step_0000000{step}", {"w": step}, files={"config.json": b"x" * 5000, "empty": b""})
    before = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    report = RunDirectory(tmp_path).clean([Last(1)])
    after = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert report.nbytes == before - after > 10_000
