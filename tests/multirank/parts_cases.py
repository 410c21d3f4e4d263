"""Sharded tensors whose local tensors are made of others: saved by two ranks, loaded by two, and by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import treeckpt as tc
import treeckpt.dcp
from tests.helpers.wrapped_moments import CodedSGD, Codes
from treeckpt import dcp, training

from .layouts import mesh_of
from .registry import Rank, case

__all__: list[str] = []


class Alone(torch.Tensor):
    """Wraps one tensor of its shape, as float8 weights that are gathered in 8 bits do: it can be resharded."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Alone:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Alone:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            return cls(args[0].inner)
        raise NotImplementedError(func)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Alone({self.inner})"


def spread(local: torch.Tensor, world: int, shape: tuple[int, ...], placement: Any = None) -> DTensor:
    whole, strides = torch.Size(shape), (shape[1], 1)
    placements = (placement or Shard(0),)
    return DTensor.from_local(local, mesh_of(world), placements, run_check=False, shape=whole, stride=strides)


def rows(rank: int, world: int) -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4).chunk(world)[rank].clone()


def codes(rank: int, seed: int = 0) -> Codes:
    torch.manual_seed(10 * seed + rank)
    return Codes(torch.randint(-9, 9, (3, 4), dtype=torch.int8), torch.rand(3), True)


@case("two")
def both_kinds_come_back_in_the_same_layout(here: Rank) -> None:
    tree = {"codes": spread(codes(here.rank), 2, (6, 4)), "alone": spread(Alone(rows(here.rank, 2)), 2, (6, 4))}
    tc.save(here.directory / "coded parts", tree)
    for found in (
        tc.load(here.directory / "coded parts", like=tree),
        tc.load(here.directory / "coded parts", like=tc.abstract(tree)),
    ):
        assert isinstance(found["codes"], DTensor)
        assert found["codes"].placements == (Shard(0),)
        local: Any = found["codes"]._local_tensor
        assert torch.equal(local.codes, codes(here.rank).codes)
        assert torch.equal(local.scale, codes(here.rank).scale)
        assert torch.equal(found["alone"]._local_tensor.inner, rows(here.rank, 2))
    target: Any = {"codes": spread(codes(here.rank, 1), 2, (6, 4)), "alone": spread(Alone(rows(0, 2) * 0), 2, (6, 4))}
    live = target["codes"]._local_tensor.scale
    tc.load_into(here.directory / "coded parts", target)
    assert torch.equal(live, codes(here.rank).scale)
    assert torch.equal(target["alone"]._local_tensor.inner, rows(here.rank, 2))


@case("two")
def another_layout_is_refused_by_name(here: Rank) -> None:
    columns = Codes(torch.zeros(6, 2, dtype=torch.int8), torch.zeros(3), True)
    for strict in (True, False):
        with pytest.raises(tc.MismatchError, match=r"codes: expected the layout .*cannot be resharded"):
            tc.load_into(
                here.directory / "coded parts",
                {"codes": spread(columns, 2, (6, 4), Shard(1)), "alone": ...},
                strict=strict,
            )


@case("two")
def what_has_no_parts_of_a_rank_is_resharded(here: Rank) -> None:
    whole = spread(Alone(torch.zeros(6, 4)), 2, (6, 4), Replicate())
    tc.load_into(here.directory / "coded parts", {"alone": whole, "codes": ...})
    assert torch.equal(whole._local_tensor.inner, torch.arange(24.0).reshape(6, 4))  # pyright: ignore
    found = tc.load(here.directory / "coded parts")
    assert type(found["alone"]) is Alone
    assert torch.equal(found["alone"].inner, torch.arange(24.0).reshape(6, 4))
    assert torch.equal(found["codes"]["scale"].value, codes(here.rank).scale)


def _job(seed: int) -> tuple[nn.Module, CodedSGD]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    return model, CodedSGD(model.parameters())


def _train(model: nn.Module, optimizer: CodedSGD, rank: int, first: int, stop: int) -> None:
    for step in range(first, stop):
        torch.manual_seed(2 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()


@case("two")
def training_with_such_moments_goes_on(here: Rank) -> None:
    model, optimizer = _job(0)
    _train(model, optimizer, here.rank, 0, 4)
    tc.save(here.directory / "coded training", training.state(model, optimizer))
    jobs = [_job(1), _job(2)]
    _train(*jobs[1], here.rank, 0, 2)
    for other, fresh in jobs:
        training.restore(here.directory / "coded training", other, fresh)
        moment = next(iter(fresh.state.values()))["momentum"]
        assert isinstance(moment, DTensor)
        assert type(moment._local_tensor) is Codes
    _train(model, optimizer, here.rank, 4, 7)
    for other, fresh in jobs:
        _train(other, fresh, here.rank, 4, 7)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())


@case("two")
def a_state_dict_of_dcp_is_filled_in_place(here: Rank) -> None:
    path = str(here.directory / "parts dcp")
    treeckpt.dcp.save({"codes": spread(codes(here.rank), 2, (6, 4)), "step": 3}, checkpoint_id=path)
    target: Any = {"codes": spread(codes(here.rank, 1), 2, (6, 4)), "step": 0}
    live = target["codes"]
    treeckpt.dcp.load(target, checkpoint_id=path)
    assert target["codes"] is live
    assert torch.equal(live._local_tensor.codes, codes(here.rank).codes)
    assert torch.equal(live._local_tensor.scale, codes(here.rank).scale)
    columns = Codes(torch.zeros(6, 2, dtype=torch.int8), torch.zeros(3), True)
    other: Any = {"codes": spread(columns, 2, (6, 4), Shard(1)), "step": 0}
    with pytest.raises(CheckpointException, match="cannot be resharded"):
        treeckpt.dcp.load(other, checkpoint_id=path)
    assert other["step"] == 0
    assert not columns.scale.any()


class Sized(Codes):
    """Codes whose context is the shape of a rank's part, as of torchao's 4-bit moments."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], list(self.shape)


@case("two")
def contexts_that_differ_between_ranks_are_refused_by_name(here: Rank) -> None:
    rows = 3 - here.rank
    leaf = spread(Sized(torch.ones(rows, 4, dtype=torch.int8), torch.ones(rows), True), 2, (5, 4))
    with pytest.raises(tc.MismatchError, match=r"w: .*Sized, shape \(5, 4\), context .*3,4.*found .*context .*2,4"):
        tc.save(here.directory / "contexts", {"w": leaf})


class Tabled(Codes):
    """Codes with a table, in the place of the sign."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "signed"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Tabled:
        return cls(inner["codes"], inner["scale"], inner["signed"])


@case("two")
def parts_of_other_sizes_on_each_rank_come_back_in_a_fresh_optimizer(here: Rank) -> None:
    def job(*, whole: bool = False) -> tuple[Any, CodedSGD]:
        model: Any = nn.Linear(4, 5, bias=False)
        if not whole:
            fully_shard(model, mesh=mesh_of(2))
        return model, CodedSGD(model.parameters())

    rows = 3 - here.rank
    codes = torch.full((rows, 4), here.rank + 1, dtype=torch.int8)
    kept: Any = Tabled(codes, torch.rand(rows), torch.rand(7))  # pyright: ignore[reportArgumentType]
    model, optimizer = job()
    optimizer.state[model.weight] = {"step": 1, "momentum": spread(kept, 2, (5, 4))}
    tc.save(here.directory / "uneven", training.state(model, optimizer, rng=False))
    fresh, again = job()
    training.restore(here.directory / "uneven", fresh, again, rng=False)
    found = again.state[fresh.weight]["momentum"]._local_tensor
    assert type(found) is Tabled
    assert all(torch.equal(getattr(found, key), getattr(kept, key)) for key in ("codes", "scale", "signed"))
    whole, other = job(whole=True)
    with pytest.raises(tc.MismatchError, match=r"momentum: expected the layout of a whole tensor.*cannot be resharded"):
        training.restore(here.directory / "uneven", whole, other, rng=False)
    assert not other.state


@case("three")
def another_world_gets_what_can_be_resharded(here: Rank) -> None:
    target = spread(Alone(torch.zeros(2, 4)), 3, (6, 4))
    tc.load_into(here.directory / "coded parts", {"alone": target, "codes": ...})
    assert torch.equal(target._local_tensor.inner, rows(here.rank, 3))  # pyright: ignore
    codes = Codes(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2), True)
    with pytest.raises(tc.MismatchError, match="codes"):
        tc.load_into(here.directory / "coded parts", {"codes": spread(codes, 3, (6, 4)), "alone": ...})


@case("two")
def dcp_fills_them_in_place(here: Rank) -> None:
    dcp.save({"o": {"codes": spread(codes(here.rank), 2, (6, 4))}}, checkpoint_id=here.directory / "coded dcp")
    state: Any = {"o": {"codes": spread(codes(here.rank, 1), 2, (6, 4))}}
    live = state["o"]["codes"]
    dcp.load(state, checkpoint_id=here.directory / "coded dcp")
    assert state["o"]["codes"] is live
    assert torch.equal(live._local_tensor.codes, codes(here.rank).codes)
    assert torch.equal(live._local_tensor.scale, codes(here.rank).scale)
