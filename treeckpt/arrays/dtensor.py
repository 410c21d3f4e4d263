"""Translates the mesh and placements of a DTensor into a layout of `core.sharding`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from ..core.sharding.int_runs import encode_runs
from ..core.sharding.placements import Mesh, MeshLayout, Placement, Replicate, Shard, StridedShard, local_shape
from ..errors import LayoutError


def is_dtensor(leaf: object) -> bool:
    """Returns whether a tensor is a DTensor; does not import torch.distributed."""
    return type(leaf).__name__ == "DTensor" and type(leaf).__module__.startswith("torch.distributed")


def is_sharded_tensor(leaf: object) -> bool:
    """Returns whether a tensor is torch.distributed's ShardedTensor, which supports hardly any operator."""
    return type(leaf).__name__ == "ShardedTensor"


def local_of(leaf: Any, path: str, rank: int) -> tuple[MeshLayout, torch.Tensor]:
    """Returns the layout of a DTensor and its local tensor.

    Raises:
        LayoutError: partial sums, placements of another kind, or a local tensor of another shape than they give.
    """
    layout = layout_of(leaf, path)
    local = part_of(leaf)
    shape = local_shape(layout, tuple(leaf.shape), rank)
    if shape is not None and tuple(local.shape) != shape and math.prod(shape) + local.numel() > 0:
        raise LayoutError(
            path,
            expected=f"a local tensor of shape {shape}, by its placements {tuple(leaf.placements)}",
            found=f"{tuple(local.shape)}",
            hint="Save the pieces with tc.Sharded, which takes any offset and shape",
        )
    return layout, local


def part_of(leaf: Any) -> torch.Tensor:
    """Returns the local tensor of a DTensor: a plain one, which shows its memory, where its class adds no storage."""
    local = leaf._local_tensor.detach()
    if type(local) is torch.Tensor:
        return local
    if hasattr(local, "wait"):
        return local.wait()
    own_storage = type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # pyright: ignore
    return local if own_storage else local.as_subclass(torch.Tensor)


def layout_of(leaf: Any, path: str) -> MeshLayout:
    """Returns the layout of a DTensor.

    Raises:
        LayoutError: partial sums.
    """
    return MeshLayout(_mesh(leaf.device_mesh), tuple(_placement(p, path, leaf.ndim) for p in leaf.placements))


@lru_cache(maxsize=64)
def _mesh(mesh: Any) -> Mesh:
    names = tuple(str(name) for name in mesh.mesh_dim_names or ())
    return Mesh(tuple(mesh.mesh.shape), encode_runs(mesh.mesh.cpu().flatten().numpy()), names)


def _placement(placement: Any, path: str, ndim: int) -> Placement:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        raise LayoutError(
            path,
            expected="placements that hold values",
            found=f"{placement}: each rank holds a partial sum",
            hint="Redistribute it to Replicate or Shard first",
        )
    dim = placement.dim % ndim if ndim else placement.dim
    factor = getattr(placement, "split_factor", None)
    return Shard(dim) if factor is None else StridedShard(dim, int(factor))
