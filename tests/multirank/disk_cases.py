"""Ranks of two hosts, each of which has its own disk at one path: what is saved, and what stands on which disk."""

from __future__ import annotations

import shutil
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

from .registry import Case, Phases, Rank

PHASES: Phases = {"two disks": (4, {})}


def enter(rank: int, world: int, directory: Path) -> None:
    """Gives the rank the disk of its host."""
    enter_host(host_of(rank, world), directory)


def case(function: Case) -> Case:
    PHASES["two disks"][1][function.__name__.replace("_", " ")] = function
    return function


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
        assert kinds == sorted(["index", "timings", "shard", "shard", *("sidecar" for _ in files)]), kinds
        assert {shard[1] for name in found if (shard := parse_shard_name(name))} == ranks
    whole = together(here, path)
    loaded, expected = tc.load(whole), tree(here.rank, seed)
    assert torch.equal(loaded["own"].value, expected["own"].value)
    assert torch.equal(loaded["every"], expected["every"]) and loaded["step"] == seed
    report = tc.verify(whole)
    assert report.ok, report
    for name in files:
        assert tc.read_file(whole, name) == b"{}"


@case
def each_disk_gets_the_index_and_the_shards_of_its_ranks(here: Rank) -> None:
    path = place(here, "plain")
    report = tc.save(path, tree(here.rank), files={"config.json": b"{}"} if here.rank == 0 else None)
    assert [disk.host for disk in report.disks] == ["host0", "host1"]
    check_saved(here, path, files=("config.json",))


@case
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


@case
def an_overwritten_checkpoint_goes_from_both_disks(here: Rank) -> None:
    path = place(here, "overwritten")
    for seed in (1, 2, 3):
        tc.save(path, tree(here.rank, seed), overwrite=True)
        check_saved(here, path, seed=seed)


@case
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


@case
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


@case
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


@case
def the_interface_of_torch_saves_to_both_disks(here: Rank) -> None:
    path = place(here, "dcp")
    treeckpt.dcp.save({"every": torch.arange(64), "step": 5}, checkpoint_id=path)
    first, second = seen_by_hosts(here, path)
    assert first[INDEX_NAME] == second[INDEX_NAME] and len(tc.inspect(together(here, path)).disks) == 2
    treeckpt.dcp.async_save({"every": torch.arange(64), "step": 6}, checkpoint_id=path).result()
    assert tc.load(together(here, path))["step"] == 6
