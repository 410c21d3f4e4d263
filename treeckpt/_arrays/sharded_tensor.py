"""The adapter of torch.distributed's ShardedTensor.

Its metadata lists offset, sizes and rank of each shard, so every rank knows the whole layout without messages; shards
may be of any shape, several on a rank or none. The shards are plain tensors, for the torch adapter. No operator of the
ShardedTensor is called, because it has next to none. It can be saved and be a target of load; without `like` its array
comes back as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from .._core.sharding.placements import BoxLayout
from .._core.sharding.region import Region
from .._core.tree.spec import ArraySpec
from ..errors import LayoutError
from . import torch as plain
from .base import Allocate, ArraySource, ArrayTarget, SourcePiece, TargetPiece


def _region(shard: Any) -> Region:
    return Region(tuple(map(int, shard.shard_offsets)), tuple(map(int, shard.shard_sizes)))


def _layout(leaf: Any, path: str) -> BoxLayout:
    pieces: list[tuple[int, Region]] = []
    for shard in leaf.metadata().shards_metadata:
        rank = shard.placement.rank() if shard.placement is not None else None
        if rank is None:
            raise LayoutError(
                path,
                expected="shards that are placed on ranks",
                found=f"{_region(shard)} placed on {shard.placement}",
                hint="Save the pieces with tc.Sharded",
            )
        pieces.append((rank, _region(shard)))
    return BoxLayout(tuple(pieces))


def _spec(leaf: Any) -> ArraySpec:
    metadata = leaf.metadata()
    properties = metadata.tensor_properties
    dtype = plain.dtype_name(properties.dtype)
    return ArraySpec(tuple(map(int, metadata.size)), dtype, requires_grad=properties.requires_grad)


def _shards(leaf: Any, path: str) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yields the region and the tensor of each of this rank's shards."""
    for shard in leaf.local_shards():
        region, found = _region(shard.metadata), tuple(shard.tensor.shape)
        if found != region.shape:
            raise LayoutError(path, expected=f"a shard of shape {region.shape}", found=f"a tensor of shape {found}")
        yield region, shard.tensor


def with_shards(leaf: Any, tensors: Sequence[Any]) -> Any:
    """Returns a ShardedTensor of the same layout with other tensors for this rank's shards."""
    from torch.distributed._shard.sharded_tensor.shard import Shard

    shards = [Shard(tensor, shard.metadata) for tensor, shard in zip(tensors, leaf.local_shards(), strict=True)]
    return type(leaf)._init_from_local_shards_and_global_metadata(
        shards, leaf.metadata(), process_group=leaf._process_group, sharding_spec=leaf.sharding_spec()
    )


def source(leaf: Any, path: str, rank: int) -> ArraySource:
    """Describes a ShardedTensor to save."""
    pieces = [
        SourcePiece(region, plain.source(tensor, path, rank).pieces[0].data) for region, tensor in _shards(leaf, path)
    ]
    return ArraySource(_spec(leaf), _layout(leaf, path), pieces)


def abstract(leaf: Any, path: str, rank: int) -> ArraySpec:
    """Returns the spec of the whole array, with the regions that this rank holds."""
    return msgspec.structs.replace(_spec(leaf), regions=tuple(region for region, _ in _shards(leaf, path)))


def target(leaf: Any, path: str, rank: int) -> ArrayTarget:
    """Describes a ShardedTensor to fill in place."""
    pieces = [
        TargetPiece(region, plain.target(tensor, path, rank).pieces[0].data) for region, tensor in _shards(leaf, path)
    ]
    return ArrayTarget(_spec(leaf), leaf, pieces)


def like(leaf: Any, path: str, rank: int, device: str | None, *, allocate: Allocate | None = None) -> ArrayTarget:
    """Creates a ShardedTensor of the same layout; its shards are on `device`, by default on that of the leaf's."""
    new = [plain.like(tensor, path, rank, device, allocate=allocate).leaf for _, tensor in _shards(leaf, path)]
    return target(with_shards(leaf, new), path, rank)


def mark_written(leaves: Sequence[Any]) -> None:
    """Tells torch that this rank's shards were written to."""
    plain.mark_written([shard.tensor for leaf in leaves for shard in leaf.local_shards()])
