"""The arrays that the ranks share, and the ways in which a test cuts them up, by torch's own splitting."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import treeckpt as tc

__all__ = [
    "DIFFERENT_KEYS",
    "bits",
    "build",
    "difference",
    "distribute",
    "forget_made",
    "full_arrays",
    "kept",
    "layouts_of",
    "locals_of",
    "mesh_of",
    "seeded",
]

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 12), torch.float32),
    "uneven": ((7, 5), torch.float32),
    "short": ((2, 3), torch.bfloat16),
    "large": ((96, 64), torch.float64),
    "cube": ((6, 7, 5), torch.int32),
    "vector": ((13,), torch.complex64),
    "bytes": ((16, 8), torch.float8_e4m3fn),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
    "one": ((1, 1), torch.int64),
}
DIFFERENT_KEYS = ("stages",)
"""Layouts under which ranks hold different keys."""


def full_arrays(*, fill: int | None = None, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The whole arrays, of random bytes or of one byte."""
    return {name: tensor.clone() for name, tensor in _originals(fill, device).items()}


@functools.cache
def _originals(fill: int | None, device: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for seed, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        nbytes = math.prod(shape) * dtype.itemsize
        data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        if fill is not None:
            data[:] = fill
        tensor = torch.from_numpy(data).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
        found[name] = tensor.to(device)
    return found


_MESHES: dict[tuple[int, ...], DeviceMesh] = {}
_KEPT: dict[tuple[Any, ...], dict[str, Any]] = {}


def forget_made() -> None:
    """Drops the meshes of a default process group that ends, and the trees over them."""
    _MESHES.clear()
    _KEPT.clear()


def kept(make: Callable[..., dict[str, Any]], layout: str, rank: int, world: int, **fill: Any) -> dict[str, Any]:
    """The tree that a function makes, made once in a phase, for what only reads it: to wrap a model takes 30 ms."""
    key = (make, layout, rank, world, *fill.items())
    if key not in _KEPT:
        _KEPT[key] = make(layout, rank, world, **fill)
    return _KEPT[key]


def mesh_of(*shape: int, first: int = 0) -> DeviceMesh:
    """A mesh of consecutive ranks; every rank must ask for it."""
    key = (first, *shape)
    if key not in _MESHES:
        ranks = torch.arange(first, first + math.prod(shape)).view(shape)
        _MESHES[key] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple("abcd"[: len(shape)]))
    return _MESHES[key]


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor, cut placement by placement with torch's own code."""
    if mesh.get_coordinate() is None:  # from_local would lose the shape of a scalar
        return distribute_tensor(full, mesh, placements, src_data_rank=None)
    local = full
    for dim, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            local = placement._shard_tensor(local, mesh, dim, src_data_rank=None)
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _dtensors(mesh: DeviceMesh, *placements: Callable[[int], Placement]) -> Callable[[torch.Tensor], DTensor]:
    def cut(full: torch.Tensor) -> DTensor:
        chosen = tuple(p(full.ndim) if full.ndim else Replicate() for p in placements)
        return distribute(full, mesh, chosen)

    return cut


def _rows(ndim: int) -> Placement:
    return Shard(0)


def _columns(ndim: int) -> Placement:
    return Shard(ndim - 1)


def _whole(ndim: int) -> Placement:
    return Replicate()


def _strided(factor: int) -> Callable[[int], Placement]:
    return lambda ndim: _StridedShard(0, split_factor=factor)


def _box(rank: int, world: int) -> Callable[[torch.Tensor], Any]:
    """Slabs of the last dimension of uneven, hand-made widths."""

    def cut(full: torch.Tensor) -> Any:
        if not full.numel() or not full.ndim:
            return full
        n = full.shape[-1]
        cuts = [0, *(max(0, n * k // world - k % 2) for k in range(1, world)), n]
        low, high = cuts[rank], cuts[rank + 1]
        return tc.Sharded(full[..., low:high], full.shape, (*(0,) * (full.ndim - 1), low))

    return cut


def _flat(rank: int, world: int) -> Callable[[torch.Tensor], Any]:
    """Flat ranges of any length, as ZeRO cuts parameters."""

    def cut(full: torch.Tensor) -> Any:
        n = full.numel()
        cuts = [0, *(max(0, n * k // world - 3 * (k % 2)) for k in range(1, world)), n]
        return tc.Sharded(full.reshape(-1)[cuts[rank] : cuts[rank + 1]], full.shape, cuts[rank])

    return cut


def layouts_of(world: int) -> list[str]:
    """The layouts that exist on a world of this size."""
    if world == 1:
        return ["plain", "flat", "pieces"]
    both = ["rows", "columns", "replicated", "strided", "plain", "pieces", "flat", "stages", "last ranks"]
    return both + (["grid", "double", "hsdp", "fsdp tp", "strided hsdp", "tp groups"] if world % 2 == 0 else [])


def build(layout: str, rank: int, world: int, **fill: Any) -> dict[str, Any]:
    """The tree of one rank under a layout."""
    full = full_arrays(**fill)
    if layout == "stages":
        return {name: tensor for n, (name, tensor) in enumerate(full.items()) if n % world == rank}
    cut = _cutter(layout, rank, world)
    return {name: cut(tensor) for name, tensor in full.items()}


def _cutter(layout: str, rank: int, world: int) -> Callable[[torch.Tensor], Any]:
    match layout:
        case "plain":
            return lambda full: full
        case "pieces":
            return _box(rank, world)
        case "flat":
            return _flat(rank, world)
        case "rows":
            return _dtensors(mesh_of(world), _rows)
        case "columns":
            return _dtensors(mesh_of(world), _columns)
        case "replicated":
            return _dtensors(mesh_of(world), _whole)
        case "strided":
            return _dtensors(mesh_of(world), _strided(2))
        case "last ranks":
            return _dtensors(mesh_of(world - 1, first=1), _rows)
    mesh = mesh_of(2, world // 2)
    match layout:
        case "grid":
            return _dtensors(mesh, _rows, _columns)
        case "double":
            return _dtensors(mesh, _rows, _rows)
        case "hsdp":
            return _dtensors(mesh, _whole, _rows)
        case "fsdp tp":
            return _dtensors(mesh, _strided(world // 2), _rows)
        case "strided hsdp":
            return _dtensors(mesh, _strided(3), _whole)
        case "tp groups":
            return _dtensors(mesh["b"], _rows)
    raise ValueError(layout)


def seeded() -> torch.Generator:
    """Gives every rank the same numbers."""
    return torch.Generator().manual_seed(0)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What makes two tensors the same to the last bit."""
    plain = tensor.detach().contiguous()
    data = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return plain.dtype, tuple(plain.shape) if plain.numel() else None, data


def difference(found: Any, expected: Any) -> str:
    """What tells two trees of one rank apart; empty if nothing does."""
    if list(found) != list(expected):
        return f"keys {list(found)} instead of {list(expected)}"
    return "; ".join(text for name in expected if (text := _leaf_difference(name, found[name], expected[name])))


def _leaf_difference(name: str, found: Any, expected: Any) -> str:
    if type(found) is not type(expected):
        return f"{name}: {type(found).__name__} instead of {type(expected).__name__}"
    if isinstance(found, tc.Sharded) and found.offset != expected.offset:
        return f"{name}: offset {found.offset} instead of {expected.offset}"
    if isinstance(found, DTensor):
        facts = [(leaf.placements, leaf.shape, leaf.requires_grad) for leaf in (found, expected)]
        if facts[0] != facts[1]:
            return f"{name}: {facts[0]} instead of {facts[1]}"
    if [bits(local) for local in locals_of(found)] != [bits(local) for local in locals_of(expected)]:
        return f"{name}: {found} instead of {expected}"
    return ""


def locals_of(leaf: Any) -> list[torch.Tensor]:
    """The plain tensors that one rank has of a leaf."""
    if isinstance(leaf, tc.Sharded):
        return list(leaf.locals)
    if isinstance(leaf, ShardedTensor):
        return [shard.tensor for shard in leaf.local_shards()]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf]
