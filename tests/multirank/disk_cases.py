"""Ranks of two hosts, each of which has its own disk at one path: what is saved, and what stands on which disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import treeckpt as tc
import treeckpt.dcp
from tests.helpers.two_disks import LOCAL, enter_host, host_of
from treeckpt._core.format.files import parse_file_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import parse_shard_name
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._runs.run import RunDirectory

from .registry import Case, Phases, Rank

PHASES: Phases = {"saves": (4, {}), "loads": (4, {}), "three of four": (3, {}), "one host": (2, {})}
"""Of the phases of fewer ranks the first two are on the first host, and the third on the other one."""


def enter(rank: int, world: int, directory: Path) -> None:
    """Gives the rank the disk of its host."""
    enter_host(host_of(rank, world), directory)


def case(phase: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        PHASES[phase][1][function.__name__.replace("_", " ")] = function
        return function

    return register


def tree(rank: int, seed: int = 1) -> dict[str, Any]:
    """What a rank saves: a replicated array, and one of its own."""
    every = torch.arange(5000, dtype=torch.float32) * seed
    return {"step": seed, "every": every, "own": tc.PerRank(torch.full((300 + rank,), rank + 10 * seed))}


def place(here: Rank, name: str) -> Path:
    return here.directory / LOCAL / name


def listing(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()} if path.is_dir() else {}


def seen_by_hosts(here: Rank, path: Path) -> list[dict[str, bytes]]:
    """Returns the files of a directory as each host has them; both ranks of a host see the same."""
    dist.barrier()  # until each rank has removed its record
    heard: list[Any] = [None] * here.world
    dist.all_gather_object(heard, listing(path))
    assert heard[0] == heard[1] and heard[2] == heard[3]
    return [heard[0], heard[2]]


def together(here: Rank, path: Path) -> Path:
    """Puts the files of both disks into one directory, which each rank has for itself."""
    whole = here.directory / f"whole of rank {here.rank}" / path.name
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(parents=True)
    for files in seen_by_hosts(here, path):
        for name, data in files.items():
            (whole / name).write_bytes(data)
    return whole


def check_saved(here: Rank, path: Path, *, seed: int = 1, files: tuple[str, ...] = ()) -> None:
    """Fails where a checkpoint is not whole over both disks, or more than it stands on one of them."""
    first, second = seen_by_hosts(here, path)
    assert first[INDEX_NAME] == second[INDEX_NAME]
    index = tc.inspect(together(here, path))
    assert [(disk.host, decode_runs(disk.ranks).tolist()) for disk in index.disks] == [
        ("host0", [0, 1]),
        ("host1", [2, 3]),
    ]
    for found, ranks in ((first, {0, 1}), (second, {2, 3})):
        kinds = sorted(owned.kind if (owned := parse_file_name(name)) else name for name in found)
        assert kinds == sorted(["index", "timings", "shard", "shard", *("sidecar" for _ in files), *files]), kinds
        assert {shard[1] for name in found if (shard := parse_shard_name(name))} == ranks
    whole = together(here, path)
    loaded, expected = tc.load(whole), tree(here.rank, seed)
    assert torch.equal(loaded["own"].value, expected["own"].value)
    assert torch.equal(loaded["every"], expected["every"]) and loaded["step"] == seed
    report = tc.verify(whole)
    assert report.ok, report
    for name in files:
        assert tc.read_file(whole, name) == b"{}"


@case("saves")
def each_disk_gets_the_index_and_the_shards_of_its_ranks(here: Rank) -> None:
    path = place(here, "plain")
    report = tc.save(path, tree(here.rank), files={"config.json": b"{}"} if here.rank == 0 else None)
    assert [disk.host for disk in report.disks] == ["host0", "host1"]
    check_saved(here, path, files=("config.json",))


@case("saves")
def a_save_in_the_background_goes_to_both_disks(here: Rank) -> None:
    for writer in ("process", "thread"):
        path = place(here, f"background {writer}")
        for seed in (1, 2):
            pending = tc.save_async(
                path, tree(here.rank, seed), overwrite=seed > 1, background=tc.BackgroundOptions(writer=writer)
            )
            report = pending.result()
            assert report is not None and [disk.host for disk in report.disks] == ["host0", "host1"]
            check_saved(here, path, seed=seed)


@case("saves")
def an_overwritten_checkpoint_goes_from_both_disks(here: Rank) -> None:
    path = place(here, "overwritten")
    for seed in (1, 2, 3):
        tc.save(path, tree(here.rank, seed), overwrite=True)
        check_saved(here, path, seed=seed)


@case("saves")
def a_checkpoint_on_one_disk_alone_refuses_the_save_on_all(here: Rank) -> None:
    for host in (0, 1):
        path = place(here, f"refused {host}")
        if here.rank == 2 * host:
            tc.save(path, {"step": 7}, comm="alone")
        before = seen_by_hosts(here, path)
        with pytest.raises(tc.CheckpointExists, match=str(path)):
            tc.save(path, tree(here.rank))
        assert seen_by_hosts(here, path)[host] == before[host], "it stays as it was"
        assert not [name for name in seen_by_hosts(here, path)[1 - host] if not name.startswith("timings.")]
        tc.save(path, tree(here.rank), overwrite=True)
        check_saved(here, path)


@case("saves")
def a_leader_that_cannot_prepare_fails_the_save_on_all(here: Rank) -> None:
    path = place(here, "unready")
    tc.save(path, tree(here.rank))
    before = seen_by_hosts(here, path)
    if here.rank == 2:
        deleted = DeletesShard(path)
    with pytest.raises(tc.RankError, match="Something else deletes or changes files there") as raised:
        tc.save(deleted if here.rank == 2 else path, tree(here.rank, 2), overwrite=True)
    assert list(raised.value.ranks) == [2]
    for found, kept in zip(seen_by_hosts(here, path), before, strict=True):
        assert {name: data for name, data in found.items() if name in kept} == kept
        assert all(name.startswith("timings.") for name in found.keys() - kept.keys()), found.keys()
    tc.save(path, tree(here.rank, 3), overwrite=True)
    check_saved(here, path, seed=3)


class DeletesShard(tc.LocalStore):
    """The disk of a host on which another program deletes a new shard when all have written theirs."""

    def sizes(self) -> dict[str, int]:
        found = super().sizes()
        if shards := [name for name in found if name.startswith("shard-00003") and found.keys() & self._records(name)]:
            (self.directory / shards[0]).unlink()
        return super().sizes()

    def _records(self, shard: str) -> set[str]:
        return {f"progress-00002.{shard.split('.')[1]}.json"}


@case("saves")
def ranks_on_one_disk_are_told_that_shards_are_deleted(here: Rank) -> None:
    path = here.directory / "shared"
    with pytest.raises(tc.RankError, match="Something else deletes or changes files there"):
        tc.save(DeletesAll(path) if here.rank == 0 else path, tree(here.rank))
    dist.barrier()
    assert all(name.startswith("timings.") for name in listing(path))
    report = tc.save(path, tree(here.rank))
    assert report.disks == () and tc.inspect(path).disks == ()


class DeletesAll(tc.LocalStore):
    """A directory in which another program deletes the shards of other ranks before they are published."""

    def sizes(self) -> dict[str, int]:
        for shard in self.directory.glob("shard-0000[123]*"):
            shard.unlink()
        return super().sizes()


@case("saves")
def the_interface_of_torch_saves_to_both_disks(here: Rank) -> None:
    path = place(here, "saved by dcp")
    treeckpt.dcp.save({"every": torch.arange(64), "step": 5}, checkpoint_id=path)
    first, second = seen_by_hosts(here, path)
    assert first[INDEX_NAME] == second[INDEX_NAME] and len(tc.inspect(together(here, path)).disks) == 2
    treeckpt.dcp.async_save({"every": torch.arange(64), "step": 6}, checkpoint_id=path).result()
    assert tc.load(together(here, path))["step"] == 6


def steps_on(here: Rank, run: Path) -> list[list[str]]:
    """Returns which steps each host has an index of."""
    dist.barrier()
    heard: list[Any] = [None] * here.world
    own = sorted(each.name for each in run.iterdir() if (each / INDEX_NAME).exists()) if run.is_dir() else []
    dist.all_gather_object(heard, own)
    assert heard[0] == heard[1] and heard[2] == heard[3]
    return [heard[0], heard[2]]


def names(*steps: int) -> list[str]:
    return [f"step_{step:08d}" for step in steps]


@case("saves")
def a_manager_keeps_the_same_steps_on_both_disks(here: Rank) -> None:
    for background in (False, True):
        run = place(here, f"run {background}")
        losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.2}
        with tc.Manager(run, keep=[tc.policy.Last(2), tc.policy.Best("loss")], background=background) as manager:
            for step, loss in losses.items():
                manager.save(step, tree(here.rank, step), metrics={"loss": loss})
            manager.wait()
            assert steps_on(here, run) == [names(2, 4, 5)] * 2
            manager.pin(4)
            manager.save(6, tree(here.rank, 6))
            manager.save(7, tree(here.rank, 7), pin=True)
            manager.save(8, tree(here.rank, 8))
            manager.save(9, tree(here.rank, 9))
            manager.wait()
            assert steps_on(here, run) == [names(2, 4, 7, 8, 9)] * 2
            assert (run / names(4)[0] / "pinned.json").exists() and (run / names(7)[0] / "pinned.json").exists()
            manager.unpin(4)
            report = manager.clean()
            assert [removal.name for removal in report.removed] == names(4)
            with pytest.raises(tc.CheckpointError, match="pinned"):
                manager.delete(7)
            assert steps_on(here, run) == [names(2, 7, 8, 9)] * 2
            manager.delete(8)
            assert steps_on(here, run) == [names(2, 7, 9)] * 2
            check_saved(here, run / names(9)[0], seed=9)
            with pytest.raises(tc.CheckpointNotFound):
                manager.pin(8)


@case("saves")
def a_clean_up_by_one_host_leaves_what_it_shares_with_another(here: Rank) -> None:
    run = place(here, "saved alone")
    with tc.Manager(run, keep=None, background=False) as manager:
        for step in (1, 2):
            manager.save(step, tree(here.rank, step))
    if here.rank in (0, 2):
        report = RunDirectory(run).clean([tc.policy.Last(1)])
        assert not report.removed and "lies on the disks of several hosts" in report.left[0].why
    assert steps_on(here, run) == [names(1, 2)] * 2


@case("saves")
def the_best_step_of_a_lost_disk_does_not_push_out_one_that_both_have(here: Rank) -> None:
    run = place(here, "replaced host")
    keep = [tc.policy.Last(1), tc.policy.Best("loss")]
    with tc.Manager(run, keep=None, background=False) as manager:
        manager.save(1, tree(here.rank, 1), metrics={"loss": 0.1})
    dist.barrier()
    if here.rank == 2:
        shutil.rmtree(run / names(1)[0])
    dist.barrier()
    with tc.Manager(run, keep=keep, background=False) as manager:
        for step, loss in ((2, 0.2), (3, 0.3), (4, 0.4)):
            manager.save(step, tree(here.rank, step), metrics={"loss": loss})
        assert steps_on(here, run) == [names(1, 2, 4), names(2, 4)]
        manager.save(5, tree(here.rank, 5), metrics={"loss": 0.05})
        assert steps_on(here, run) == [names(5)] * 2, "what is left of step 1 is the best no more"


@case("saves")
def a_save_that_died_behind_its_commit_is_completed(here: Rank) -> None:
    for way in ("resume", "clean", "save"):
        run = place(here, f"completed by {way}")
        with tc.Manager(run, background=False) as manager:
            manager.save(1, {"model": tree(here.rank, 1)})
            manager.save(2, {"model": tree(here.rank, 2)})
        undo_publishing(here, run / names(2)[0], committed=True)
        assert steps_on(here, run) == [names(1, 2), names(1)]
        if here.rank == 2:
            report = RunDirectory(run).clean([tc.policy.Last(1)], grace=0.0)
            assert not report.removed and [left for left in report.left if "another host may have" in left.why]
        with tc.Manager(run, background=False) as manager:
            if way == "resume":
                assert manager.restore()["model"]["step"] == 2
            elif way == "clean":
                assert [text for text in manager.clean().completed if "host1" in text and "completed" in text]
            else:
                manager.save(3, {"model": tree(here.rank, 3)})
            assert steps_on(here, run) == [names(1, 2, 3)[: 3 if way == "save" else 2]] * 2
        first, second = seen_by_hosts(here, run / names(2)[0])
        assert first[INDEX_NAME] == second[INDEX_NAME] and not [name for name in second if "prepared" in name]


@case("saves")
def a_save_that_no_disk_has_committed_goes_from_all(here: Rank) -> None:
    run = place(here, "uncommitted")
    with tc.Manager(run, background=False) as manager:
        manager.save(1, tree(here.rank, 1))
        manager.save(2, tree(here.rank, 2))
        undo_publishing(here, run / names(2)[0], committed=False)
        [text] = manager.clean().completed
        assert "which no disk has committed" in text
        assert here.rank < 2 or not (run / names(2)[0]).exists()
        dist.barrier()
        assert manager.latest() == 1


def undo_publishing(here: Rank, path: Path, *, committed: bool) -> None:
    """Leaves what a job leaves that dies between its commit and the publication on the second disk, or before both."""
    dist.barrier()
    index = path / INDEX_NAME
    if here.rank == 2:
        index.rename(path / f"prepared.{tc.inspect(path).save_id}.json")
    if here.rank == 0 and not committed:
        index.unlink()
    dist.barrier()
