"""Real training states: FSDP2 on tensor parallelism and hybrid FSDP, into other parallelisms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import treeckpt as tc
from treeckpt._core.sharding.placements import MeshLayout

from .layouts import bits, mesh_of
from .registry import Rank, case

__all__ = ["mlp", "oracle_of"]


# real training states -------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Uneven on purpose: 14 hidden units are 7 per tensor-parallel rank, and 4 and 3 per data-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 14)
        self.norm = nn.LayerNorm(14)
        self.down = nn.Linear(14, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def mlp() -> Net:
    torch.manual_seed(1)
    return Net()


def _tensor_parallel(model: Net, mesh: Any) -> Net:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _trained(model: nn.Module, steps: int = 2) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 10), step + 1.0)).square().sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def oracle_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a training state, whole."""
    found = {f"model/{name}": _whole(tensor) for name, tensor in state["model"].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {f"optimizer/{number}/{name}": _whole(tensor) for name, tensor in moments.items()}
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert bits(found[name]) == bits(tensor), name


@case("four")
def fsdp_on_tensor_parallel_is_saved(here: Rank) -> None:
    mesh = mesh_of(2, 2)
    model = _tensor_parallel(mlp(), mesh["b"])
    fully_shard(model, mesh=mesh["a"])
    state = _trained(model)
    oracle = oracle_of(state)
    if here.rank == 0:
        torch.save(oracle, here.directory / "fsdp tp.pt")
    path = here.directory / "fsdp tp state"
    tc.save(path, state)
    _same_state(oracle_of(tc.load(path, state)), oracle)
    names = {layout.mesh.names for layout in tc.inspect(path).layouts if isinstance(layout, MeshLayout)}
    assert names == {("a", "b"), ("replicas", "a"), ()}, "the index names mesh dimensions; () is of plain replicas"


@case("four")
def hybrid_fsdp_is_saved(here: Rank) -> None:
    model = mlp()
    fully_shard(model.up, mesh=mesh_of(2, 2))
    fully_shard(model, mesh=mesh_of(2, 2))
    state = _trained(model)
    oracle = oracle_of(state)
    if here.rank == 0:
        torch.save(oracle, here.directory / "hsdp.pt")
    path = here.directory / "hsdp state"
    tc.save(path, state)
    _same_state(oracle_of(tc.load(path, state)), oracle)


@case("two")
def fsdp_states_load_into_tensor_parallel_ones(here: Rank) -> None:
    for name in ("fsdp tp", "hsdp"):
        oracle = torch.load(here.directory / f"{name}.pt")
        state = _trained(_tensor_parallel(mlp(), mesh_of(2)), steps=1)
        loaded = tc.load(here.directory / f"{name} state", state)
        assert loaded["model"]["up.weight"].placements == (Shard(0),)
        assert loaded["model"]["down.weight"].placements == (Shard(1),)
        _same_state(oracle_of(loaded), oracle)
        tc.load_into(here.directory / f"{name} state", state)
        _same_state(oracle_of(state), oracle)


@case("two")
def fsdp_states_load_into_a_deferred_module(here: Rank) -> None:
    oracle = torch.load(here.directory / "fsdp tp.pt")
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=mesh_of(2))
    loaded = tc.load(here.directory / "fsdp tp state", {"model": model.state_dict(), "optimizer": ...}, strict=False)
    model.load_state_dict(loaded["model"], assign=True)
    assert all(not parameter.is_meta for parameter in model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    found = {f"model/{name}": _whole(tensor) for name, tensor in model.state_dict().items()}
    _same_state(found, {name: tensor for name, tensor in oracle.items() if name.startswith("model/")})
    model(torch.ones(3, 10)).sum().backward()
