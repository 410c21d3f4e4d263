"""Where the elements of a distributed tensor lie: by mesh and placements of a DTensor, or as the tensor says itself.

A tensor may have the methods by which torch.distributed.checkpoint asks for its chunks (`__create_chunk_list__`,
`__get_tensor_shard__`, `__create_write_items__`), as `LocalShardsWrapper` does. It is asked then, as is a DTensor's
local tensor that has them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import msgspec
import torch

from .._core.sharding.int_runs import encode_runs
from .._core.sharding.placements import Mesh, MeshLayout, Placement, Replicate, Shard, StridedShard, local_shape
from .._core.sharding.region import Region
from ..errors import LayoutError, MismatchError, TreeError


def is_dtensor(leaf: object) -> bool:
    """Returns whether a tensor is a DTensor, or of a subclass; does not import torch.distributed."""
    return is_dtensor_class(type(leaf))


@lru_cache(maxsize=1024)
def is_dtensor_class(kind: type) -> bool:
    """Returns whether a class is DTensor, or a subclass of it."""
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed") for base in kind.__mro__)


def is_partial(leaf: Any) -> bool:
    """Returns whether a leaf is a DTensor of which ranks hold partial sums."""
    return is_dtensor(leaf) and any(placement.is_partial() for placement in leaf.placements)


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
    # two empty shapes may differ: there is nothing to write
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
    return _plain(leaf._local_tensor)


def _plain(local: Any) -> torch.Tensor:
    local = local.detach()
    if type(local) is torch.Tensor:
        return local
    # the result of a collective that may be under way
    if hasattr(local, "wait"):
        return local.wait()
    # a class that answers to operators by itself may keep its elements elsewhere than in its storage
    own_storage = type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # pyright: ignore
    return local if own_storage else local.as_subclass(torch.Tensor)


def layout_of(leaf: Any, path: str) -> MeshLayout:
    """Returns the layout of a DTensor: its mesh dimensions in the order in which they cut the array.

    Raises:
        LayoutError: partial sums.
    """
    placements = [_placement(p, path, leaf.ndim) for p in leaf.placements]
    order = list(range(len(placements)))
    for entry in getattr(leaf._spec, "shard_order", None) or ():  # from left to right, unless it says otherwise
        for position, dim in zip(sorted(entry.mesh_dims), entry.mesh_dims, strict=True):
            order[position] = dim
    return MeshLayout(_mesh(leaf.device_mesh, tuple(order)), tuple(placements[dim] for dim in order))


@lru_cache(maxsize=64)
def _mesh(mesh: Any, order: tuple[int, ...]) -> Mesh:
    """Returns a mesh with its dimensions in another order."""
    ranks = mesh.mesh.cpu().permute(order)
    names = [str(name) for name in mesh.mesh_dim_names or ()]
    named = tuple(names[dim] for dim in order) if names else ()
    return Mesh(tuple(ranks.shape), encode_runs(ranks.flatten().numpy()), named)


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
    # only a strided shard has one, whose class is private to torch
    factor = getattr(placement, "split_factor", None)
    return Shard(dim) if factor is None else StridedShard(dim, int(factor))


class DescribedTensor(msgspec.Struct, frozen=True, gc=False):
    """What a tensor says that it holds on this rank."""

    shape: tuple[int, ...]
    """The shape of the whole array."""
    chunks: tuple[tuple[Region, torch.Tensor], ...]
    """The chunks that have elements, each with its memory."""


def describing(leaf: Any) -> Any:
    """Returns what says where the elements of a leaf lie: the leaf, or its local tensor; None if neither does.

    What a subclass inherits of DTensor does not count: it takes each shard for one box, which strided ones are not.
    """
    for owner in (leaf, leaf._local_tensor) if is_dtensor(leaf) else (leaf,):
        ask = getattr(owner, "__create_chunk_list__", None)
        inherited = getattr(ask, "__qualname__", "").startswith("DTensor.")
        if ask is not None and not inherited and hasattr(owner, "__get_tensor_shard__"):
            return owner
    return None


def same_dtensor(leaf: Any, local: torch.Tensor) -> Any:
    """Returns a tensor of the class, layout and attributes of a DTensor with another local tensor."""
    made = type(leaf)(local, leaf._spec, requires_grad=False)  # from_local loses the shape of a scalar off the mesh
    for name, value in getattr(leaf, "__dict__", {}).items():
        vars(made).setdefault(name, value)
    return made


def described(leaf: Any, path: str) -> DescribedTensor | None:
    """Returns what a tensor holds that says so itself; None for any other.

    Raises:
        LayoutError: partial sums; a chunk outside of the array, or of another shape than its tensor.
    """
    owner = describing(leaf)
    if owner is None:
        return None
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if is_dtensor(leaf):
        layout_of(leaf, path)  # refuses partial sums
    items = owner.__create_write_items__(path, leaf) if hasattr(owner, "__create_write_items__") else ()
    shape = tuple(items[0].tensor_data.size if items else leaf.shape)
    chunks: list[tuple[Region, torch.Tensor]] = []
    for number, chunk in enumerate(owner.__create_chunk_list__()):
        region = Region(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
        if not region.size:
            continue
        tensor = _plain(owner.__get_tensor_shard__(MetadataIndex(path, chunk.offsets, number)))
        found = tuple(tensor.shape)
        if len(region.shape) != len(shape) or not region.within(Region.whole(shape)) or found != region.shape:
            raise LayoutError(
                path,
                expected=f"chunks inside shape {shape}, each of the shape of its tensor",
                found=f"offset {region.offset}, shape {region.shape} for a tensor of shape {found}",
                hint=f"{type(owner).__name__}.__create_chunk_list__ says so; save the pieces with tc.Sharded",
            )
        chunks.append((region, tensor))
    return DescribedTensor(shape, tuple(chunks))


def like_described(leaf: Any, device: torch.device | None, path: str) -> Any:
    """Returns a tensor that holds the same chunks as one that describes itself, in memory of its own.

    Raises:
        TreeError: a copy of it shares memory, or does not hold the same.
    """
    owner, old = describing(leaf), described(leaf, path)
    assert old is not None, "called for tensors that describe themselves"
    if any(tensor.is_meta for _, tensor in old.chunks):
        raise MismatchError(
            path,
            expected="a tensor with memory: one that describes its chunks is made by a copy",
            found=f"a {type(owner).__name__} on the meta device",
            hint="Make it on a device, and fill it with load_into",
        )
    copied = leaf._local_tensor if is_dtensor(leaf) else leaf
    with torch.no_grad():
        made = copied.clone()
        made = made if device is None or made.device == device else made.to(device)
    for name, value in getattr(copied, "__dict__", {}).items():  # which functions of torch leave out
        vars(made).setdefault(name, value)
    if is_dtensor(leaf):
        made = same_dtensor(leaf, made)
    new = described(made, path)
    regions = [region for region, _ in old.chunks]
    shared = {tensor.data_ptr() for _, tensor in old.chunks} & {t.data_ptr() for _, t in (new.chunks if new else ())}
    if new is None or new.shape != old.shape or [region for region, _ in new.chunks] != regions or shared:
        raise TreeError(
            path,
            expected=f"a {type(owner).__name__} of which a copy holds the same chunks in memory of its own",
            found="one that shares memory" if shared else "other chunks",
            hint="Fill it in place with load_into",
        )
    return made
