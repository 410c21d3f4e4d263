"""The interface of hfai.checkpoint under real ranks: hfai-dist_ckpt, by lines.

Here what a program does that has put `from treeckpt.training import load, save` in the place of `hfai.checkpoint`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import treeckpt as tc
from tests.helpers.hfai_parts import write_part
from treeckpt import training
from treeckpt.training import load, save

from .layouts import bits, mesh_of
from .registry import Case, Rank
from .training_jobs import Net, arrange, train, whole_state

__all__ = ["FOUR", "TWO"]


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(14, 28), nn.BatchNorm1d(28), nn.Linear(28, 2))


def _job(seed: int, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(_net(seed))
    return model, kind(model.parameters(), lr=0.01)  # pyright: ignore[reportCallIssue]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 14)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def the_example_of_hfai_goes_on_under_ddp(here: Rank) -> None:
    """hfai-dist_ckpt, lines 23-37: every line of the example, with `state` where it says `ckpt`."""
    library: Any = importlib.import_module("pytorch_optimizer") if find_spec("pytorch_optimizer") else None
    for kind in (torch.optim.Adam, torch.optim.SGD, *([library.Lion] if library else [])):
        path = here.directory / f"{kind.__name__} latest.pt"
        model, optimizer = _job(1, kind)
        _train(model, optimizer, here.rank, range(3))
        others = {"epoch": 2, "step": 7 + 1}
        save(path, model, optimizer, others=others)
        expected = _train(model, optimizer, here.rank, range(3, 6))
        model, optimizer = _job(2, kind)
        state = load(path, map_location="cpu")
        epoch, step = state["epoch"], state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert (epoch, step) == (2, 8) and list(state["model"]) == list(model.state_dict())
        assert _train(model, optimizer, here.rank, range(3, 6)) == expected


def a_job_goes_on_from_the_parts_that_hfai_left(here: Rank) -> None:
    """hfai-dist_ckpt, lines 54-65 and 102-133: each rank has written its own part, with the names of DDP."""
    path = here.directory / "hfai latest.pt"
    model, optimizer = _job(1)
    _train(model, optimizer, here.rank, range(3))
    states = {"model": [model.state_dict()], "optimizer": [optimizer.state_dict()]}
    write_part(path, states, {"epoch": 2}, here.rank, here.world)
    dist.barrier()
    expected = _train(model, optimizer, here.rank, range(3, 5))
    for restore in (False, True):
        model, optimizer = _job(2)
        if restore:
            assert not training.restore(path, model, optimizer, rng=False).missing
        else:
            state = load(path, map_location="cpu")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            assert state["epoch"] == 2
        assert _train(model, optimizer, here.rank, range(3, 5)) == expected
    save(path, model, optimizer, {"epoch": 3})
    assert load(path)["epoch"] == 3, "a new checkpoint counts, hfai's parts lie beside it"


def what_ranks_have_otherwise_is_that_of_rank_0_where_it_is_said(here: Rank) -> None:
    """hfai-dist_ckpt, lines 38-39, 59-61 and 215-219: buffers, others and param groups."""
    path, model = here.directory / "differing", _net(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 + here.rank)
    model[1].running_mean.fill_(here.rank)  # pyright: ignore[reportCallIssue, reportIndexIssue, reportAttributeAccessIssue]
    others = {"loss": 0.25, "tensor": torch.ones(3)} if here.rank == 0 else {"loss": 0.75}
    for named, model_here, optimizer_here, others_here in (
        ("others", _net(1), None, others),
        ("hyper-parameters", _net(1), optimizer, {}),
        ("buffers", model, None, {}),
    ):
        try:
            save(path, model_here, optimizer_here, others_here)
        except ValueError as error:
            assert isinstance(error, tc.MismatchError) and 'replicas="rank0"' in str(error), (named, error)
        else:
            raise AssertionError(named)
    save(path, model, optimizer, others, replicas="rank0")
    state = load(path)
    assert state["loss"] == 0.25 and state["tensor"].tolist() == [1, 1, 1]
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert state["model"]["1.running_mean"].tolist() == [0] * 28
    save(path, model, optimizer, {"seed": tc.PerRank(here.rank), "loss": others["loss"]}, replicas="rank0")
    state = load(path, model, optimizer)
    assert (state["seed"], state["loss"], optimizer.param_groups[0]["lr"]) == (here.rank, 0.25, 0.5)
    nested = {"rank": {"seed": tc.PerRank(here.rank), "loss": others["loss"]}, "loss": others["loss"]}
    save(path, model, optimizer, nested, replicas="rank0")
    state = load(path)
    assert (state["rank"]["seed"].value, state["rank"]["loss"], state["loss"]) == (here.rank, 0.25, 0.25)
    parameters = list(model.parameters())
    groups = [parameters] if here.rank == 0 else [parameters[:1], parameters[1:]]
    several = torch.optim.Adam([{"params": own, "lr": 0.1 + here.rank} for own in groups])
    save(path, model, several, replicas="rank0")
    assert [group["lr"] for group in load(path)["optimizer"]["param_groups"]] == [0.1]
    try:
        save(path, _net(here.rank), None)
    except tc.MismatchError as error:
        assert "rank0" not in str(error), "parameters are compared then too"
    else:
        raise AssertionError("they differ")


def parameters_outside_of_the_models_may_differ_too(here: Rank) -> None:
    """hfai-dist_ckpt, lines 187-192: the optimizer's state is saved, whosever its parameters are."""
    path = here.directory / "outside"

    def job(seed: int) -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model = DistributedDataParallel(_net(seed))
        scale = nn.Parameter(torch.full((2,), float(seed)))
        return model, scale, torch.optim.Adam([*model.parameters(), scale], lr=0.01)

    model, scale, optimizer = job(1)
    torch.manual_seed(here.rank)
    (model(torch.randn(8, 14)) * scale).sum().backward()
    optimizer.step()  # nothing makes the scale the same on both ranks
    try:
        save(path, model, optimizer)
    except tc.MismatchError as error:
        assert "outside" in str(error)
    else:
        raise AssertionError("they differ")
    save(path, model, optimizer, replicas="rank0")
    fresh, other, theirs = job(2)
    load(path, fresh, theirs)
    dist.broadcast_object_list(first := [scale.tolist(), optimizer.state[scale]["exp_avg"].tolist()], 0)
    assert [other.tolist(), theirs.state[other]["exp_avg"].tolist()] == first
    theirs.load_state_dict(load(path)["optimizer"])


def an_optimizer_that_is_split_over_ranks_is_filled_in_place(here: Rank) -> None:
    """hfai-dist_ckpt, lines 187-192, without a call that brings the parts together."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    def job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(_net(seed))
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    model, optimizer = job(1)
    _train(model, optimizer, here.rank, range(3))
    save(here.directory / "split", model, optimizer)
    expected = _train(model, optimizer, here.rank, range(3, 5))
    model, optimizer = job(2)
    state = load(here.directory / "split", model, optimizer)
    assert len(state["optimizer"]["state"]) < len(load(here.directory / "split")["optimizer"]["state"]) == 6
    assert _train(model, optimizer, here.rank, range(3, 5)) == expected


def sparse_buffers_are_saved_by_each_of_two_ranks(here: Rank) -> None:
    """hfai-dist_ckpt, lines 142 and 151: what is not strided is saved as a whole."""

    def make(factor: float) -> nn.Module:
        model = _net(1)
        model.register_buffer("coo", (factor * torch.eye(4)).to_sparse())
        model.register_buffer("csr", (factor * torch.eye(4)).to_sparse_csr())
        return model

    model, fresh = make(2.0), make(1.0)
    save(here.directory / "sparse", model)
    fresh.load_state_dict(load(here.directory / "sparse")["model"])
    assert all(torch.equal(fresh.get_buffer(name).to_dense(), 2 * torch.eye(4)) for name in ("coo", "csr"))
    states: dict[str, list[Any]] = {"model": [model.state_dict()], "optimizer": []}
    write_part(here.directory / "sparse parts", states, {}, here.rank, here.world)
    dist.barrier()
    for fill in (True, False):
        fresh = make(1.0)
        state = load(here.directory / "sparse parts", *((fresh,) if fill else ()))
        fresh.load_state_dict(state["model"])
        assert all(torch.equal(fresh.get_buffer(name).to_dense(), 2 * torch.eye(4)) for name in ("coo", "csr"))


def a_group_of_ranks_saves_in_the_shape_of_hfai(here: Rank) -> None:
    """hfai-dist_ckpt, lines 45 and 51-53."""
    job = arrange("ddp", 2)
    train(job, 0, 1)
    training.save(here.directory / "hfai", job.model, job.optimizer, {"epoch": 2, "own": tc.PerRank(here.rank)})
    fresh = arrange("plain", 2, seed=7)
    found = training.load(here.directory / "hfai", fresh.model, fresh.optimizer)
    assert (found["epoch"], found["own"]) == (2, here.rank)
    expected, state = whole_state(job), whole_state(fresh)
    assert all(bits(state[name]) == bits(expected[name]) for name in expected)
    group = dist.new_group([1])
    if here.rank == 1:
        training.save(here.directory / "one", Net(), None, {"epoch": 5}, group)
        assert training.load(here.directory / "one", group=group)["epoch"] == 5
    dist.barrier()
    assert mesh_of(2).size() == 2


def two_ranks_that_are_not_the_first_save_again_and_again_in_the_shape_of_hfai(here: Rank) -> None:
    group = dist.new_group([1, 3])
    if here.rank in (1, 3):
        for epoch in range(3):
            others = {"epoch": epoch, "own": tc.PerRank((here.rank, epoch))}
            report = training.save(here.directory / "hfai pair", Net(), None, others, group)
            assert report.world == 2
            found = training.load(here.directory / "hfai pair", Net(), group=group)
            assert (found["epoch"], found["own"]) == (epoch, (here.rank, epoch))
    dist.barrier()


TWO: tuple[Case, ...] = (
    the_example_of_hfai_goes_on_under_ddp,
    a_job_goes_on_from_the_parts_that_hfai_left,
    what_ranks_have_otherwise_is_that_of_rank_0_where_it_is_said,
    parameters_outside_of_the_models_may_differ_too,
    an_optimizer_that_is_split_over_ranks_is_filled_in_place,
    sparse_buffers_are_saved_by_each_of_two_ranks,
    a_group_of_ranks_saves_in_the_shape_of_hfai,
)
FOUR: tuple[Case, ...] = (two_ranks_that_are_not_the_first_save_again_and_again_in_the_shape_of_hfai,)
