"""Saves in the background under torchrun: four trainings that go on with their collectives meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import treeckpt as tc
from tests.helpers.background import Hooked, writer_pid
from treeckpt._io.comm.comm import default_comm
from treeckpt.training._guard import guard

from .layouts import bits, build
from .registry import Rank, case
from .talk_cases import Collectives, sequence


def _tree(here: Rank, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    replica = torch.randn(900, 400, generator=generator)
    own = tc.PerRank({"rng": torch.full((5,), here.rank + seed)})
    return {"d": build("fsdp tp", here.rank, 4), "r": replica, "own": own, "step": seed}


def _check(path: Path, here: Rank, seed: int) -> None:
    found = tc.load(path, fallback=tc.Fallback(per_rank="take"))
    assert found["step"] == seed and torch.equal(found["r"], _tree(here, seed)["r"])
    assert found["own"].value["rng"].tolist() == [here.rank + seed] * 5
    for name, expected in build("plain", 0, 1).items():
        assert bits(found["d"][name]) == bits(expected), name
    assert tc.verify(path).ok


@case("background")
def saves_in_the_background_issue_no_collective(here: Rank) -> None:
    tc.prewarm(_tree(here, 0))
    path = here.directory / "background"
    target = Hooked(path, here.directory / f"background log {here.rank}", act="hold")
    with Collectives() as collectives:
        before = sequence()
        for seed, store in enumerate((path, path, target)):
            tree = _tree(here, seed)
            pending = tc.save_async(store, tree, overwrite=True)
            tree["r"].zero_()
            tree["own"].value["rng"].zero_()
            if seed == 2:
                assert not pending.done()
                target.release()
            report = pending.result(100)
            assert report is not None and report.staged_nbytes == report.nbytes
        assert sequence() == before and not collectives.found
    _check(path, here, 2)


@case("background")
def training_goes_on_with_collectives_of_its_own(here: Rank) -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        model(torch.ones(2, 300)).sum().backward()
        path = here.directory / f"training {step}"
        store = Hooked(path, here.directory / f"training log {here.rank} {step}", act="hold")
        tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        expected = model.weight.detach().clone()
        pending = tc.save_async(store, tree, background=tc.BackgroundOptions(staging="lazy" if step % 2 else "copy"))
        guard(optimizer, pending)
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)  # in the same order on all ranks, whatever the save is doing
        optimizer.step()
        optimizer.zero_grad()
        store.release()
        assert pending.result(100) is not None
        assert torch.equal(tc.load(path, select="model/weight")["model"]["weight"], expected)


@case("background")
def each_rank_has_a_writer_of_its_own(here: Rank) -> None:
    tc.save_async(here.directory / "own writers", _tree(here, 1)).result(100)
    pid = writer_pid(default_comm())
    assert os.getpgid(pid) != os.getpgid(0)
    pids: list[Any] = [None] * here.world
    dist.all_gather_object(pids, pid)
    assert len(set(pids)) == here.world


@case("background")
def replicas_stage_only_their_own_part(here: Rank) -> None:
    tree = {"w": torch.arange(4_000_000.0)}
    report = tc.save_async(here.directory / "parts", tree).result(100)
    assert report is not None and abs(report.staged_nbytes - 4_000_000) < 200_000, report.staged_nbytes
    assert torch.equal(tc.load(here.directory / "parts")["w"], tree["w"])


@case("background")
def one_rank_that_fails_fails_all_and_the_next_save_works(here: Rank) -> None:
    path = here.directory / "one fails"
    log = here.directory / f"one fails log {here.rank}"
    pending = tc.save_async(Hooked(path, log, 1 if here.rank == 2 else None, "kill"), _tree(here, 1))
    try:
        pending.result(100)
        raise AssertionError("rank 2 lost its writer")
    except tc.RankError as error:
        assert list(error.ranks) == [2] and "SIGKILL" in str(error)
    tc.save_async(path, _tree(here, 2)).result(100)
    _check(path, here, 2)
