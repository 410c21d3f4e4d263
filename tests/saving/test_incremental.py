"""Saves with `base`: what is unchanged is named where an earlier checkpoint has it, and reads as if it were there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.adapted import FROZEN, NBYTES, Adapted, assert_same, data_nbytes
from tests.helpers.stopped import stopping
from tests.helpers.world import errors_of, on_ranks
from treeckpt._arrays.base import LazyArray
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._io.comm.comm import thread_comms
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import Store
from treeckpt._loading.flatten import flatten_store
from treeckpt._runs.removal import clean_checkpoint
from treeckpt._saving.incremental import KnownFiles

Save = Callable[..., Any]


def save_in_process(path: Any, tree: Any, **options: Any) -> tc.SaveReport:
    report = tc.save_async(path, tree, **options).result()
    assert report is not None
    return report


def save_in_thread(path: Any, tree: Any, **options: Any) -> tc.SaveReport:
    return save_in_process(path, tree, background=tc.BackgroundOptions(writer="thread"), **options)


def save_lazily(path: Any, tree: Any, **options: Any) -> tc.SaveReport:
    return save_in_process(path, tree, background=tc.BackgroundOptions(staging="lazy"), **options)


@pytest.mark.parametrize("save", [tc.save, save_in_process, save_in_thread, save_lazily])
def test_frozen_parameters_are_written_once(tmp_path: Path, save: Save) -> None:
    state, reports = Adapted(), list[tc.SaveReport]()
    for step in range(5):
        tree = state.train()
        base = {"base": tmp_path / f"step_{step - 1}"} if step else {}
        reports.append(save(tmp_path / f"step_{step}", tree, **base))
        assert_same(tmp_path / f"step_{step}", tree)
        assert tc.verify(tmp_path / f"step_{step}").ok
    frozen, trained = FROZEN * NBYTES, FROZEN * 4000
    # the first save with a base puts them into files of their own
    assert [(report.nbytes, report.shared_nbytes) for report in reports] == [
        *[(frozen + trained, 0)] * 2,
        *[(trained, frozen)] * 3,
    ]
    assert data_nbytes(tmp_path / "step_4") < trained + 2 * 4096
    homes = tc.inspect(tmp_path / "step_4").references
    assert homes is not None and [home.directory for home in homes.homes] == ["step_1"]


@pytest.mark.parametrize("save", [tc.save, save_in_process, save_in_thread, save_lazily])
def test_what_is_unchanged_is_read_once_and_not_staged(tmp_path: Path, save: Save) -> None:
    data, read = np.arange(400_000, dtype=np.int64), list[int]()

    def lazily(region: Region) -> np.ndarray:
        part = data[region.slices()]
        read.append(part.nbytes)
        return part.view("<u8")

    leaf, changes = LazyArray(ArraySpec(data.shape, "int64", kind="numpy"), lazily), np.zeros(1000)
    for step in range(6):
        changes += 1
        read.clear()
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        report = save(tmp_path / f"{step}", {"changes": changes, "stays": leaf}, **base)
        shared = data.nbytes if step > 3 else 0
        assert report.shared_nbytes == shared and sum(read) == data.nbytes
        assert report.staged_nbytes == (0 if save is tc.save else changes.nbytes + data.nbytes - shared)
    np.testing.assert_array_equal(tc.load(tmp_path / "5")["stays"], data)


def test_what_stays_in_three_checkpoints_gets_files_of_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stays, changes = rng.standard_normal((4, 100_000)), rng.standard_normal((4, 100_000))
    shared: list[int] = []
    for step in range(6):
        changes = changes + 1
        tree = {str(i): {"changes": changes[i], "stays": stays[i]} for i in range(4)}
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        shared.append(tc.save(tmp_path / f"{step}", tree, **base).shared_nbytes)
        np.testing.assert_array_equal(tc.load(tmp_path / f"{step}")["3"]["changes"], changes[3])
    # compared from the save after the first one with a base on; a block is shared with a neighbour at most
    assert shared[:3] == [0, 0, 0] and shared[-1] >= 0.6 * stays.nbytes


def test_an_array_that_changes_is_written_again_and_the_others_are_not(tmp_path: Path) -> None:
    state = Adapted()
    for step in range(3):
        tc.save(tmp_path / f"{step}", state.train(), **({"base": tmp_path / f"{step - 1}"} if step else {}))
    with torch.no_grad():
        state.frozen[1][150_000] = 0.5
    tree = state.train()
    changed = tc.save(tmp_path / "3", tree, base=tmp_path / "2")
    assert_same(tmp_path / "3", tree)
    assert changed.shared_nbytes == 0  # all three have one file
    tree = state.train()
    apart = tc.save(tmp_path / "4", tree, base=tmp_path / "3")
    assert_same(tmp_path / "4", tree)
    after = tc.save(tmp_path / "5", state.train(), base=tmp_path / "4")
    assert apart.shared_nbytes == 0 and after.shared_nbytes == 2 * NBYTES
    with torch.no_grad():
        state.frozen[1][150_000] = 0.25
    once_more = tc.save(tmp_path / "6", state.train(), base=tmp_path / "5")
    assert once_more.shared_nbytes == 2 * NBYTES, "what has changed before is apart from what has stayed"


def test_a_restart_goes_on_with_the_files_of_the_checkpoint_before(tmp_path: Path) -> None:
    state = Adapted()
    for step in range(2):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        tc.save(tmp_path / f"{step}", state.train(), comm=thread_comms(1)[0], **base)
    comm = thread_comms(1)[0]
    assert comm.state.get(KnownFiles) is None
    tree = state.train()
    report = tc.save(tmp_path / "2", tree, base=tmp_path / "1", comm=comm)
    assert report.shared_nbytes == FROZEN * NBYTES
    assert_same(tmp_path / "2", tree)


def test_ranks_share_their_own_files_and_another_world_writes_all(tmp_path: Path) -> None:
    state = Adapted()

    def save(step: int, world: int) -> int:
        tree, base = state.train(), {"base": tmp_path / f"{step - 1}"} if step else {}
        outcomes = on_ranks(world, lambda comm: tc.save(tmp_path / f"{step}", tree, comm=comm, **base))
        assert all(outcome.error is None for outcome in outcomes), outcomes
        assert_same(tmp_path / f"{step}", tree)
        assert tc.verify(tmp_path / f"{step}").ok
        return sum(outcome.value.shared_nbytes for outcome in outcomes)

    shared = [save(step, 2) for step in range(4)]
    assert shared == [0, 0, FROZEN * NBYTES, FROZEN * NBYTES]
    assert save(4, 3) == 0
    assert save(5, 3) == FROZEN * NBYTES


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 3)])
def test_a_file_of_another_world_with_the_same_content_is_not_shared(tmp_path: Path, worlds: tuple[int, int]) -> None:
    """Its name has the number of ranks: the same part of an array on the same rank is another file."""
    frozen = torch.nn.Parameter(torch.arange(300_000.0), requires_grad=False)

    def save(comm: Any, step: int) -> Any:
        own = torch.nn.Parameter(frozen[: 300_000 * (not comm.rank)], requires_grad=False)
        whole = {"frozen": tc.Sharded(own, (300_000,), (300_000 * bool(comm.rank),))}
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        return tc.save(tmp_path / f"{step}", {**whole, "step": step}, comm=comm, **base)

    step = 0
    for world in worlds:
        comms = thread_comms(world)
        for number in range(3):
            outcomes = on_ranks(comms, partial(save, step=step))
            assert errors_of(outcomes) == [None] * world
            shared = sum(outcome.value.shared_nbytes for outcome in outcomes)
            assert number == 1 or shared == (1_200_000 if number else 0), (world, number)
            assert tc.verify(tmp_path / f"{step}").ok and torch.equal(tc.load(tmp_path / f"{step}")["frozen"], frozen)
            step += 1


def test_a_save_over_the_home_of_what_is_frozen_writes_it_again(tmp_path: Path) -> None:
    state, home, later = Adapted(), tmp_path / "1", tmp_path / "2"
    for path, base in ((tmp_path / "0", None), (home, tmp_path / "0"), (later, home)):
        tc.save(path, state.train(), **({} if base is None else {"base": base}))
    assert set(tc.inspect(later).shared_names.values()) == {"1"}
    tree = state.train()
    report = tc.save(home, tree, base=later, overwrite=True)
    assert report.shared_nbytes == 0 and tc.inspect(home).shared_names == {}
    tc.save(later, {"step": 0}, overwrite=True)  # the last one that has shared the files there
    tc.delete(later)
    for path in (tmp_path / "0", home):
        clean_checkpoint(path, grace=0)
    assert_same(home, tree)
    assert set(home.glob("shard-*")) == {home / file.name for file in tc.inspect(home).file_list}


def test_an_object_store_shares_files_too() -> None:
    state, run = Adapted(), "memory://incremental/run"
    for step in range(4):
        tree = state.train()
        base = {"base": f"{run}/step_{step - 1}"} if step else {}
        report = tc.save(f"{run}/step_{step}", tree, overwrite=True, **base)
        assert_same(f"{run}/step_{step}", tree)
    assert report.shared_nbytes == FROZEN * NBYTES
    assert tc.verify(f"{run}/step_3").ok


def test_a_store_of_one_checkpoint_alone_is_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "0", {"step": 1})
    with pytest.raises(tc.StoreError, match="Incremental saves need a path"):
        tc.save(tc.MemoryStore(), {"step": 1}, base=tmp_path / "0")


def test_a_base_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(tc.CheckpointNotFound, match="nothing at this path"):
        tc.save(tmp_path / "1", {"step": 1}, base=tmp_path / "0")
    assert not (tmp_path / "1" / INDEX_NAME).exists()


def test_a_base_that_is_not_beside_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Adapted()
    for step in range(3):
        tc.save(tmp_path / f"a/{step}", state.train(), **({"base": tmp_path / f"a/{step - 1}"} if step else {}))
    with pytest.raises(tc.CheckpointError, match="in another directory"):
        tc.save(tmp_path / "b/3", state.train(), base=tmp_path / "a/2")
    assert not list(tmp_path.glob("b/3/shard-*"))
    # by another path, and as a copy, it is beside
    monkeypatch.chdir(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for path, base in ((tmp_path / "a/4", Path("2")), (tmp_path / "link/5", tmp_path / "a/2"), (tmp_path / "c/3", "2")):
        report = tc.save(path, tree := state.train(), base=base)
        assert report.shared_nbytes == FROZEN * NBYTES and tc.verify(path).ok
        assert_same(path, tree)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("verified", ["home", "sharer"])
def test_nothing_is_shared_with_a_checkpoint_in_which_damage_was_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verified: str, restarted: bool
) -> None:
    state, comm = Adapted(), thread_comms(1)[0]
    with tc.Manager(tmp_path, keep=None, incremental=True, background=False, comm=comm) as manager:
        for step in range(1, 4):
            manager.save(step, state.train())
        [file] = [file for file in (tmp_path / "step_00000001").glob("shard-*") if file.stat().st_size > 1 << 20]
        data = bytearray(file.read_bytes())
        data[-5] ^= 255
        file.write_bytes(data)
        assert main(["verify", str(manager.path(1 if verified == "home" else 3))]) == 1
        if restarted:
            comm.state.remove(KnownFiles)
        for step in (4, 5):
            report = manager.save(step, tree := state.train())
            assert isinstance(report, tc.SaveReport) and bool(report.shared_nbytes) == (step == 5)
            assert tc.verify(manager.path(step)).ok
            assert_same(manager.path(step), tree)
    assert "in which a verification has found damage" in caplog.text


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The path of a checkpoint that shares files of `1`, and its tree."""
    state = Adapted()
    for step in range(3):
        tree = state.train()
        tc.save(tmp_path / f"{step}", tree, **({"base": tmp_path / f"{step - 1}"} if step else {}))
    return tmp_path / "2", tree


def test_a_checkpoint_that_is_copied_alone_names_the_one_that_it_needs(
    shared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, tree = shared
    shutil.copytree(path, tmp_path / "elsewhere" / "2")
    with pytest.raises(tc.CorruptError, match="Copy the directory 1 of the run beside this one too"):
        tc.load(tmp_path / "elsewhere" / "2")
    shutil.copytree(tmp_path / "1", tmp_path / "elsewhere" / "1")
    assert_same(tmp_path / "elsewhere" / "2", tree)


def test_changed_bytes_of_a_shared_file_are_found(shared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = shared
    [file] = (tmp_path / "1").glob("shard-00000.001-*")
    with file.open("r+b") as opened:
        opened.seek(-100, 2)
        opened.write(b"x")
    report = tc.verify(path)
    assert [problem.file for problem in report.problems] == [file.name]
    with pytest.raises(tc.CorruptError, match="checksum"):
        tc.load(path)


def test_a_lost_index_is_made_again_with_the_files_of_others(shared: tuple[Path, dict[str, Any]]) -> None:
    path, tree = shared
    before = tc.inspect(path)
    (path / INDEX_NAME).unlink()
    assert tc.verify(path, repair=True).ok
    assert_same(path, tree)
    assert tc.inspect(path).shared_names == before.shared_names


def test_a_damaged_header_is_made_again_beside_shared_files(shared: tuple[Path, dict[str, Any]]) -> None:
    path, tree = shared
    [file] = path.glob("shard-*")
    before = file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(300)
        opened.write(b"\0\0\0\0")
    assert tc.verify(path, repair=True).ok
    assert file.read_bytes() == before
    assert_same(path, tree)


def test_a_flattened_checkpoint_needs_no_other(shared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, tree = shared
    assert main(["flatten", str(path)]) == 0
    assert tc.inspect(path).shared_names == {}
    assert_same(path, tree)
    shutil.rmtree(tmp_path / "0")
    shutil.rmtree(tmp_path / "1")
    assert tc.verify(path).ok
    assert_same(path, tree)
    (path / INDEX_NAME).unlink()
    assert tc.verify(path, repair=True).ok
    assert_same(path, tree)
    report = tc.save(tmp_path / "3", tree, base=path)
    assert report.shared_nbytes == FROZEN * NBYTES
    assert main(["flatten", str(path)]) == 0, "there is nothing to do"


def test_a_checkpoint_whose_shared_file_is_damaged_is_not_flattened(
    shared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, _ = shared
    [file] = (tmp_path / "1").glob("shard-00000.001-*")
    with file.open("r+b") as opened:
        opened.seek(-100, 2)
        opened.write(b"x")
    before = sorted(path.iterdir())
    assert main(["flatten", str(path)]) == 1
    assert sorted(path.iterdir()) == before


def test_where_copies_go_as_an_index_is_published_that_names_them_the_one_before_is_back(
    shared: tuple[Path, dict[str, Any]],
) -> None:
    path, tree = shared
    before = (path / INDEX_NAME).read_bytes()

    def clean_up(store: Store) -> None:
        for name in store.sizes():
            if name.startswith("shard-00000.001"):
                store.delete(name)

    with pytest.raises(tc.CheckpointError, match="took this process for an ended one"):
        flatten_store(stopping(LocalStore, clean_up)(path))
    assert (path / INDEX_NAME).read_bytes() == before
    assert_same(path, tree)


def test_where_a_file_of_the_base_is_lost_all_is_written(
    shared: tuple[Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, tree = shared
    [file] = (tmp_path / "1").glob("shard-00000.001-*")
    file.unlink()
    report = tc.save(tmp_path / "3", tree, base=tmp_path / "2")
    assert report.shared_nbytes == 0 and "has lost files" in caplog.text
    assert_same(tmp_path / "3", tree)


def test_the_index_names_the_version_of_the_format_that_it_needs(shared: tuple[Path, dict[str, Any]]) -> None:
    path, _ = shared
    assert json.loads((path / INDEX_NAME).read_bytes())["version"] == 2


def test_a_tree_that_grows_goes_on_to_share_what_is_frozen(shared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, tree = shared
    larger = {**tree, "vocabulary": torch.zeros(10)}
    report = tc.save(tmp_path / "3", larger, base=tmp_path / "2")
    assert report.shared_nbytes == FROZEN * NBYTES and torch.equal(
        tc.load(tmp_path / "3")["vocabulary"], torch.zeros(10)
    )


def test_what_has_stayed_in_other_trees_says_nothing_about_these(tmp_path: Path) -> None:
    for step, name in enumerate("aaab"):
        base = {"base": tmp_path / f"{step - 1}"} if step else {}
        tc.save(tmp_path / f"{step}", {name: np.arange(100_000)}, **base)
    stayed = [tc.inspect(tmp_path / f"{step}").references for step in (2, 3)]
    assert [decode_runs(one.stayed).tolist() for one in stayed if one is not None] == [[2], [1]]
