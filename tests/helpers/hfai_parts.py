"""Checkpoints as hfai writes them: one PART file a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LARGE = 500
"""Bytes above which a tensor is split over the ranks; 256 MB in hfai."""


def write_parts(path: Path, states: dict[str, list[dict[str, Any]]], others: dict[str, Any], world: int) -> None:
    """A checkpoint of some models and optimizers, by their state dicts."""
    for rank in range(world):
        write_part(path, states, others, rank, world)


def write_part(
    path: Path, states: dict[str, list[dict[str, Any]]], others: dict[str, Any], rank: int, world: int
) -> None:
    """What one rank writes of a checkpoint."""
    path.mkdir(exist_ok=True)
    part: dict[str, Any] = {"__nshards__": world, "__version__": "2.0.0"}
    part["model"] = [model_part(state, rank, world) for state in states["model"]]
    part["optimizer"] = [optimizer_part(state, rank, world) for state in states["optimizer"]]
    torch.save(part | (others if rank == 0 else {}), path / f"PART_{rank:03d}.pt")


def size_of(tensor: torch.Tensor) -> int:
    """Bytes as if it was dense; tensors of other layouts are never split."""
    return tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else 0


def share_of_rank(tensor: torch.Tensor, rank: int, world: int) -> tuple[torch.Size, torch.Tensor]:
    return tensor.shape, tensor.view(-1).chunk(world)[rank].clone()


def state_of_rank(state: dict[Any, Any], rank: int, world: int) -> dict[Any, Any]:
    return dict(list(state.items())[rank::world])


def model_part(state: dict[str, torch.Tensor], rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    large = {name: share_of_rank(t, rank, world) for name, t in state.items() if size_of(t) > LARGE}
    return state_of_rank({name: t for name, t in state.items() if name not in large}, rank, world), large


def optimizer_part(state: dict[str, Any], rank: int, world: int) -> tuple[dict[str, Any], dict[Any, Any]]:
    large: dict[Any, Any] = {}
    small: dict[Any, Any] = {}
    for number, moments in state["state"].items():
        split = {name: t for name, t in moments.items() if isinstance(t, torch.Tensor) and size_of(t) > LARGE}
        large |= {(number, name): share_of_rank(t, rank, world) for name, t in split.items()}
        small[number] = {name: t for name, t in moments.items() if name not in split}
    return {**state, "state": state_of_rank(small, rank, world)}, large


def trained(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(17, 23), torch.nn.BatchNorm1d(23), torch.nn.Linear(23, 5))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(3, 17)).sum().backward()
    optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()
