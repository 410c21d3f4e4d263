"""Plain moments of parameters that are spread over ranks: codes, block scales and sums of each rank's own part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import treeckpt as tc
from tests.helpers import wrapped_moments
from tests.helpers.layout_cases import device_mesh
from tests.helpers.world import errors_of, on_ranks
from tests.helpers.wrapped_moments import coded
from tests.training.jobs import same_tensors
from treeckpt import training
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh

ROWS, TINY = 8, 2


class Net(nn.Module):
    """A square weight and a bias of two elements, spread over a mesh, or plain."""

    def __init__(self, rank: int, shape: tuple[int, ...] | None, placements: Any, side: int = ROWS) -> None:
        super().__init__()
        shapes, rng = {"weight": (side, side), "bias": (TINY,), "free": (3,)}, torch.Generator().manual_seed(0)
        whole = {name: torch.randn(one, generator=rng) for name, one in shapes.items()}
        for name, tensor in whole.items():
            if shape is not None and name != "free":
                tensor = spread(
                    tensor, shape, placements if name == "weight" else (*placements[:-1], TorchShard(0)), rank
                )
            self.register_parameter(name, nn.Parameter(tensor))


def spread(tensor: torch.Tensor, shape: tuple[int, ...], placements: Any, rank: int) -> DTensor:
    """A tensor as the rank of a mesh holds it."""
    mesh = device_mesh(Mesh(shape, encode_runs(range(int(np.prod(shape)))), ()))
    local = tensor
    for at, size, placement in zip(np.unravel_index(rank, shape), shape, placements, strict=True):
        if isinstance(placement, TorchShard):
            parts = local.chunk(size, placement.dim)
            local = parts[int(at)] if at < len(parts) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class Codes(torch.optim.Optimizer):
    """Keeps 8-bit codes, scales and sums of the local part of each parameter, as optimizers do that know no DTensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def fill(self, seed: int) -> None:
        """Gives each parameter a state that depends on the seed."""
        for position, p in enumerate(q for group in self.param_groups for q in group["params"]):
            rng = torch.Generator().manual_seed(seed + position)
            local = p.to_local() if isinstance(p, DTensor) else p
            codes = torch.randint(0, 255, (local.numel(),), generator=rng, dtype=torch.uint8)
            self.state[p] = {
                "step": torch.tensor(float(seed % 1000)),
                "codes": codes,
                "absmax": torch.rand(1 + local.numel() // 16, generator=rng),
                "sums": {"rows": torch.rand(local.shape[:1], generator=rng), "history": [torch.rand(3, generator=rng)]},
                "exp_avg": torch.zeros_like(p.detach()) + 0.5,
                "whole": torch.full(p.shape, 7.0),
                "calls": 3,
            }


def job(rank: int, shape: tuple[int, ...] | None, placements: Any, *, seed: int | None, side: int = ROWS) -> Any:
    model = Net(rank, shape, placements, side)
    optimizer = Codes(model.parameters())
    if seed is not None:
        optimizer.fill(seed)
    return model, optimizer


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return value.to_local().clone() if isinstance(value, DTensor) else copy.deepcopy(value)

    return [plain(optimizer.state.get(p, {})) for p in model.parameters()]


FSDP = ((2,), (TorchShard(0),))
COLUMNS = ((2,), (TorchShard(1),))
UNEVEN = ((3,), (TorchShard(0),))
HSDP = ((2, 2), (TorchReplicate(), TorchShard(0)))


def save(path: Path, layout: Any, *, side: int = ROWS) -> list[Any]:
    """Saves a job in which each rank has its own moments; returns the states of the ranks."""
    shape, placements = layout

    def act(comm: Any) -> Any:
        model, optimizer = job(comm.rank, shape, placements, seed=1000 * (comm.rank + 1), side=side)
        for p in model.parameters():
            optimizer.state[p]["step"] = torch.tensor(5.0)
            if p is model.free:
                optimizer.state[p] = {"codes": torch.ones(3, dtype=torch.uint8), "step": torch.tensor(5.0)}
        tc.save(path, training.state(model, optimizer, rng=False), comm=comm)
        return states(model, optimizer)

    outcomes = on_ranks(int(np.prod(shape)), act)
    assert not any(one.error for one in outcomes), outcomes
    return [one.value for one in outcomes]


@pytest.mark.parametrize("side", [ROWS, 600], ids=["small", "large"])
@pytest.mark.parametrize("seed", [None, 7], ids=["fresh", "live"])
@pytest.mark.parametrize("layout", [FSDP, UNEVEN, COLUMNS, HSDP], ids=["rows", "uneven", "columns", "hsdp"])
def test_each_rank_gets_its_own_moments_back(tmp_path: Path, layout: Any, seed: int | None, side: int) -> None:
    saved = save(tmp_path / "c", layout, side=side)

    def act(comm: Any) -> Any:
        model, optimizer = job(comm.rank, *layout, seed=seed, side=side)
        if seed is not None:
            optimizer.state[model.free] = {"codes": torch.zeros(3, dtype=torch.uint8), "step": torch.tensor(0.0)}
        training.restore(tmp_path / "c", model, optimizer, rng=False, comm=comm)
        return states(model, optimizer)

    for rank, outcome in enumerate(on_ranks(int(np.prod(layout[0])), act)):
        assert outcome.error is None, outcome.error
        assert same_tensors(outcome.value, saved[rank]), rank


def test_a_number_and_what_has_the_whole_shape_are_replicas_and_the_rest_is_per_rank() -> None:
    model, optimizer = job(1, *FSDP, seed=1)
    tree = training.state(model, optimizer)["optimizer"]
    own = {name for name, moment in tree["weight"].items() if type(moment) is tc.PerRank}
    assert own == {"codes", "absmax"}
    assert type(tree["weight"]["sums"]["rows"]) is type(tree["weight"]["sums"]["history"][0]) is tc.PerRank
    assert isinstance(tree["weight"]["exp_avg"], DTensor) and tree["weight"]["calls"] == 3
    assert tree["bias"]["codes"].value.shape == (1,), "as that of the weight is"
    assert not any(type(moment) is tc.PerRank for moment in tree["free"].values()), "no part of anything"
    for placements in ((TorchReplicate(),), (TorchShard(0),)):
        shape = (2,) if isinstance(placements[0], TorchReplicate) else (1,)
        model = nn.ParameterList([nn.Parameter(spread(torch.randn(4, 4), shape, placements, 0))])
        optimizer = Codes(model.parameters())
        optimizer.fill(0)
        tree = training.state(model, optimizer)["optimizer"]
        assert not any(type(moment) is tc.PerRank for moment in tree["0"].values()), placements


def test_numbers_of_each_rank_that_differ_are_refused(tmp_path: Path) -> None:
    def act(comm: Any) -> None:
        model, optimizer = job(comm.rank, *FSDP, seed=comm.rank)
        tc.save(tmp_path / "c", training.state(model, optimizer, rng=False), comm=comm)

    for error in errors_of(on_ranks(2, act)):
        assert isinstance(error, tc.MismatchError) and error.path == "optimizer/weight/step", error


Job = Callable[[int], Any]


def refused(path: Path, world: int, make: Job, match: str) -> None:
    """Restores on as many ranks, which is refused by name before anything changes."""

    def act(comm: Any) -> None:
        model, optimizer = make(comm.rank)
        before = states(model, optimizer), [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        with pytest.raises(tc.MismatchError, match=match) as caught:
            training.restore(path, model, optimizer, rng=False, comm=comm)
        assert "optimizer=None" in caught.value.hint
        assert same_tensors(states(model, optimizer), before[0])
        assert not any((p.to_local() if isinstance(p, DTensor) else p).any() for p in model.parameters())
        training.restore(path, model, rng=False, comm=comm)

    for error in errors_of(on_ranks(world, act)):
        assert error is None, error


@pytest.mark.parametrize("seed", [None, 3], ids=["fresh", "live"])
def test_another_layout_or_number_of_ranks_is_refused_by_name(tmp_path: Path, seed: int | None) -> None:
    save(tmp_path / "c", FSDP)
    others = {
        "columns": (2, lambda rank: job(rank, *COLUMNS, seed=seed)),
        "plain": (2, lambda rank: job(rank, None, (), seed=seed)),
        "alone": (1, lambda rank: job(rank, None, (), seed=seed)),
        "four": (4, lambda rank: job(rank, (4,), (TorchShard(0),), seed=seed)),
        "replicated rows": (4, lambda rank: job(rank, *HSDP, seed=seed)),
        "one": (1, lambda rank: job(rank, (1,), (TorchShard(0),), seed=seed)),
    }
    for world, make in others.values():
        refused(tmp_path / "c", world, make, r"optimizer/(weight|bias)/absmax: expected a moment of the part")


@pytest.mark.parametrize("seed", [None, 3], ids=["fresh", "live"])
@pytest.mark.parametrize("layout", [(None, ()), ((1,), (TorchShard(0),))], ids=["plain", "mesh of one"])
def test_moments_of_whole_parameters_are_refused_where_ranks_hold_parts(
    tmp_path: Path, layout: Any, seed: int | None
) -> None:
    model, optimizer = job(0, *layout, seed=1)
    tc.save(tmp_path / "c", training.state(model, optimizer, rng=False), comm="alone")
    refused(tmp_path / "c", 2, lambda rank: job(rank, *FSDP, seed=seed), r"optimizer/weight/(codes|absmax)")
    fresh = job(0, *layout, seed=None)
    training.restore(tmp_path / "c", *fresh, rng=False, comm="alone")
    assert same_tensors(states(*fresh), states(model, optimizer)), "as they were saved"


def test_a_tree_in_memory_gives_each_rank_its_own_back() -> None:
    def act(comm: Any) -> None:
        model, optimizer = job(comm.rank, *FSDP, seed=1000 * (comm.rank + 1))
        tree = training.state(model, optimizer, rng=False)
        other = job(comm.rank, *FSDP, seed=None)
        training.restore(tree, *other, rng=False, comm=comm)
        assert same_tensors(states(*other), states(model, optimizer))
        with pytest.raises(tc.MismatchError, match="optimizer/weight/absmax"):
            training.restore(tree, *job(comm.rank, *COLUMNS, seed=None), rng=False, comm=comm)

    for error in errors_of(on_ranks(2, act)):
        assert error is None, error


def test_moments_of_a_part_that_are_made_of_other_tensors_are_each_rank_s_own_too(tmp_path: Path) -> None:
    """A plain tensor subclass that wraps codes and scales, beside a DTensor."""

    def moment(rank: int) -> Any:
        made: Any = coded(torch.zeros(ROWS // 2, ROWS))
        made.put(torch.randn(ROWS // 2, ROWS, generator=torch.Generator().manual_seed(rank)))
        return made

    def act(comm: Any) -> None:
        model, optimizer = job(comm.rank, *FSDP, seed=None)
        optimizer.state[model.weight] = {"m": moment(comm.rank), "step": torch.tensor(1.0)}
        tree = training.state(model, optimizer, rng=False)
        assert type(tree["optimizer"]["weight"]["m"]) is tc.PerRank
        tc.save(tmp_path / "c", tree, comm=comm)
        for seed in (None, 5):
            model, optimizer = job(comm.rank, *FSDP, seed=None)
            if seed is not None:
                optimizer.state[model.weight] = {"m": moment(seed), "step": torch.tensor(0.0)}
            training.restore(tmp_path / "c", model, optimizer, rng=False, comm=comm)
            found = optimizer.state[model.weight]["m"]
            assert type(found) is wrapped_moments.Codes and torch.equal(found.float_(), moment(comm.rank).float_())
        with pytest.raises(tc.MismatchError, match="optimizer/weight/m: expected a moment of the part"):
            training.restore(tmp_path / "c", *job(comm.rank, *COLUMNS, seed=None), rng=False, comm=comm)

    for error in errors_of(on_ranks(2, act)):
        assert error is None, error
