"""One model under every parallelism that torch has, by torch's own wrappers: what its state dict is on one rank."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import treeckpt as tc

from .layouts import distribute, mesh_of

__all__ = ["MODELS_OF_DIFFERENT_KEYS", "NOT_ON_META", "Model", "build_model", "models_of"]

MODELS_OF_DIFFERENT_KEYS = ("stages model", "experts", "sharded experts", "zero")
"""Under these ranks hold different keys."""
NOT_ON_META = ("ddp", "sharded tensor")
EXPERTS = 8


class Model(nn.Module):
    """Even and uneven parts: 13 outputs, 24 hidden units, eight experts; a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(24, 16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.norm = nn.BatchNorm1d(16)
        self.odd = nn.Linear(16, 13)
        self.experts = nn.ModuleList(nn.Linear(16, 5) for _ in range(EXPERTS))


def _model(fill: int | None, device: str) -> Model:
    """The same weights on every rank, or one byte everywhere."""
    return copy.deepcopy(_prototype(fill, device))


@functools.cache
def _prototype(fill: int | None, device: str) -> Model:
    generator = torch.Generator().manual_seed(3)
    with torch.device("meta"):
        model = Model()
    if device == "meta":
        return model
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            raw = tensor.data.view(-1).view(torch.uint8)
            raw.copy_(
                torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8) if fill is None else fill
            )
    return model


def models_of(world: int) -> list[str]:
    """The layouts of the model that exist on a world of this size."""
    if world == 1:
        return ["model", "zero", "blocks"]
    every = [
        "model",
        "ddp",
        "fsdp",
        "fsdp columns",
        "tp",
        "stages model",
        "experts",
        "zero",
        "blocks",
        "sharded tensor",
    ]
    return every + (["fsdp hsdp", "fsdp on tp", "sharded experts"] if world % 2 == 0 else [])


def build_model(layout: str, rank: int, world: int, *, fill: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """The state dict of one rank under a layout."""
    model = _model(fill, device)
    match layout:
        case "model":
            return dict(model.state_dict())
        case "ddp":
            return dict(nn.parallel.DistributedDataParallel(model).module.state_dict())
        case "fsdp" | "fsdp columns" | "fsdp hsdp" | "tp" | "fsdp on tp":
            return dict(_wrapped(layout, model, world).state_dict())
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    match layout:
        case "stages model":
            return {name: tensor for n, (name, tensor) in enumerate(state.items()) if n % world == rank}
        case "experts":
            return {name: t for name, t in state.items() if _expert(name) in (None, *range(rank, EXPERTS, world))}
        case "sharded experts":
            return _sharded_experts(state, rank, world)
        case "zero":
            return _zero(state, rank, world)
        case "blocks":
            return {name: _blocks(tensor, rank, world) for name, tensor in state.items()}
        case "sharded tensor":
            return {name: _sharded_tensor(tensor, rank, world) for name, tensor in state.items()}
    raise ValueError(layout)


def _wrapped(layout: str, model: Model, world: int) -> nn.Module:
    if layout == "fsdp columns":
        return fully_shard(model, mesh=mesh_of(world), shard_placement_fn=lambda p: _last_dim(p, world))
    if layout in ("fsdp", "fsdp hsdp"):
        mesh = mesh_of(world) if layout == "fsdp" else mesh_of(2, world // 2)
        fully_shard(model.up, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    mesh = mesh_of(world) if layout == "tp" else mesh_of(2, world // 2)["b"]
    plan = {"wte": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel()}
    parallelize_module(model, mesh, plan)  # pyright: ignore[reportArgumentType]
    return model if layout == "tp" else fully_shard(model, mesh=mesh_of(2, world // 2)["a"])


def _last_dim(parameter: nn.Parameter, world: int) -> Shard:
    """Other dimensions than the first must be even."""
    return Shard(parameter.ndim - 1 if parameter.shape[-1] % world == 0 else 0)


def _expert(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("experts.") else None


def _sharded_experts(state: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, Any]:
    """Each expert cut over one pair of ranks, which alone have it."""
    meshes = [mesh_of(2, first=2 * pair) for pair in range(world // 2)]
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        expert = _expert(name)
        if expert is None:
            found[name] = tensor
        elif expert % (world // 2) == rank // 2:
            found[name] = distribute(tensor, meshes[rank // 2], (Shard(0),))
    return found


def _zero(state: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, Any]:
    """All parameters in one long row, cut into equal ranges: each rank's part of each parameter is a flat range."""
    total = sum(tensor.numel() for tensor in state.values())
    low, high = total * rank // world, total * (rank + 1) // world
    found: dict[str, Any] = {}
    at = 0
    for name, tensor in state.items():
        start, stop = (min(max(edge - at, 0), tensor.numel()) for edge in (low, high))
        if start < stop:
            found[name] = tc.Sharded(tensor.reshape(-1)[start:stop].clone(), tuple(tensor.shape), start)
        at += tensor.numel()
    return found


def _blocks(tensor: torch.Tensor, rank: int, world: int) -> Any:
    """Blocks of two rows dealt out in turn: several pieces a rank, or none."""
    if not tensor.ndim:
        return tensor
    starts = range(2 * rank, len(tensor), 2 * world)
    pieces = [tensor[start : start + 2].clone() for start in starts]
    offsets = [(start, *(0,) * (tensor.ndim - 1)) for start in starts]
    if not pieces:
        pieces, offsets = [tensor.reshape(-1)[:0].clone()], [0]  # pyright: ignore[reportAssignmentType]
    return tc.Sharded(pieces, tuple(tensor.shape), offsets)


def _sharded_tensor(tensor: torch.Tensor, rank: int, world: int) -> Any:
    """Shards of rows, the later ranks first; the last rank has two, or none."""
    if not tensor.ndim or not dist.is_initialized():
        return tensor
    cuts = [len(tensor) * n // (world + 1) for n in range(world + 2)]
    owners = [world - 1, *reversed(range(world))]
    shards = [
        ShardMetadata([low, *(0,) * (tensor.ndim - 1)], [high - low, *tensor.shape[1:]], f"rank:{owner}/cpu")
        for low, high, owner in zip(cuts[:-1], cuts[1:], owners, strict=True)
        if low < high
    ]
    mine = [LocalShard(tensor[_rows(s)].clone(), s) for s, o in zip(shards, _ranks(shards), strict=True) if o == rank]
    metadata = ShardedTensorMetadata(shards, tensor.shape, TensorProperties(dtype=tensor.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def _rows(shard: ShardMetadata) -> slice:
    return slice(shard.shard_offsets[0], shard.shard_offsets[0] + shard.shard_sizes[0])


def _ranks(shards: list[ShardMetadata]) -> list[int]:
    return [shard.placement.rank() for shard in shards if shard.placement is not None]  # pyright: ignore[reportReturnType]
