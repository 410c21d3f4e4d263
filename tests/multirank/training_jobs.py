"""A training job that torch can arrange in every way, with losses that do not depend on the arrangement."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .layouts import mesh_of

__all__ = ["ROWS", "Job", "Net", "arrange", "arrangements", "close", "train", "whole_state"]

ROWS = 8


class Net(nn.Module):
    """Uneven on purpose: 14 hidden units are 4, 4, 4 and 2 over four ranks, and 7 per tensor-parallel rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 14)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(14, 6, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.down(self.up(self.norm(x)).relu())


@dataclasses.dataclass
class Job:
    """A model in some arrangement, its optimizer and scheduler, and which rows of a batch this rank has."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    part: int = 0
    parts: int = 1

    @property
    def given(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self.model, self.optimizer


def arrangements(world: int) -> list[str]:
    return {1: ["plain"], 2: ["plain", "ddp", "fsdp", "tp"], 4: ["plain", "ddp", "fsdp", "hsdp", "fsdp tp"]}[world]


def arrange(name: str, world: int, *, seed: int = 0, meta: bool = False) -> Job:
    """A fresh job."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model: nn.Module = Net().double()
    part, parts = 0, 1
    match name:
        case "ddp":
            model = DistributedDataParallel(model)
            part, parts = dist.get_rank(), world
        case "fsdp":
            fully_shard(model.up, mesh=mesh_of(world))
            fully_shard(model, mesh=mesh_of(world))
            part, parts = dist.get_rank(), world
        case "hsdp":
            fully_shard(model, mesh=mesh_of(2, 2))
            part, parts = dist.get_rank(), world
        case "tp":
            _tensor_parallel(model, mesh_of(world))
        case "fsdp tp":
            mesh = mesh_of(2, 2)
            _tensor_parallel(model, mesh["b"])
            fully_shard(model, mesh=mesh["a"])
            part, parts = mesh.get_local_rank("a"), 2
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=20)
    return Job(model, optimizer, scheduler, part, parts)


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; under foreach, DTensors on two meshes do not mix."""
    named = list(model.named_parameters())
    decayed = [p for name, p in named if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in named if not (name.endswith("weight") and "norm" not in name)]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "role": "plain"}],
        foreach=False,
    )


def train(job: Job, first: int, steps: int) -> list[float]:
    """The losses of the global batch at steps first, first + 1, ..."""
    losses: list[float] = []
    for step in range(first, first + steps):
        x = torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        share = ROWS // job.parts
        rows = slice(job.part * share, (job.part + 1) * share)
        job.optimizer.zero_grad()
        loss = (job.model(x[rows]) - x[rows, :6]).square().mean()
        loss.backward()
        job.optimizer.step()
        job.scheduler.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def whole_state(job: Job) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer, whole, by torch's own gathering; every rank must ask."""
    found: dict[str, torch.Tensor] = {}
    model = job.model.module if isinstance(job.model, DistributedDataParallel) else job.model
    for name, parameter in model.named_parameters():
        found[name] = _whole(parameter)
        for moment, value in job.optimizer.state[parameter].items():
            found[f"{name}:{moment}"] = _whole(value)
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def close(found: list[float], expected: list[float], what: str) -> None:
    """The same losses, but for the order in which sums were made (float64)."""
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= 1e-10 * abs(b), f"{what}: {found} instead of {expected}"


def put_losses(path: Path, losses: list[float]) -> None:
    path.write_text(json.dumps(losses))


def get_losses(path: Path) -> list[float]:
    return json.loads(path.read_text())
