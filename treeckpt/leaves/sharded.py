"""Explicit pieces: a local array together with where it stands in a global one, whatever cut it.

What Paddle calls local shape + global offset; and, with an integer offset, a ZeRO-style flat range of the global
array's elements in C order.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from ..core.errors import LayoutError
from ..core.layout import BoxLayout
from ..core.region import Region, flat_regions
from ..core.spec import ArraySpec
from .base import Adapter, Flat, Piece, Source, Take, Target, TargetPiece

__all__ = ["Sharded", "sharded_abstract", "sharded_like", "sharded_source", "sharded_target"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """One rank's piece of a global array.

    Args:
        local: the piece, any array that can be a leaf.
        global_shape: of the whole array.
        offset: where the piece starts: one integer per dimension, or, for a flat 1-D `local`, the position of its
            first element among all elements in C order.
    """

    __treeckpt_leaf__: ClassVar[bool] = True

    local: Any
    global_shape: tuple[int, ...]
    offset: int | tuple[int, ...]

    def __post_init__(self) -> None:
        offset, index = self.offset, operator.index
        object.__setattr__(self, "global_shape", tuple(map(index, self.global_shape)))
        object.__setattr__(self, "offset", tuple(map(index, offset)) if isinstance(offset, Sequence) else index(offset))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return self.global_shape

    @property
    def dtype(self) -> Any:
        return self.local.dtype


def _regions(leaf: Sharded, local: Sequence[int], path: str) -> tuple[Region, ...]:
    shape, offset = leaf.global_shape, leaf.offset
    whole = Region.whole(shape)
    if isinstance(offset, int):
        if len(local) == 1 and offset >= 0 and offset + local[0] <= math.prod(shape):
            return flat_regions(shape, offset, offset + local[0]) if whole.size else (whole,)
        expected = f"a 1-D piece inside {math.prod(shape)} elements"
    else:
        region = Region(offset, tuple(local))
        if len(region.offset) == len(local) == len(shape) and min(offset, default=0) >= 0 and region.within(whole):
            return (region,)
        expected = f"a piece inside shape {shape}"
    raise LayoutError(
        path,
        expected=expected,
        found=f"shape {tuple(local)} at offset {offset}",
        hint="Check the global shape and the offset given to tc.Sharded",
    )


def _spread(leaf: Sharded, data: Any, local: tuple[int, ...], path: str) -> list[tuple[Region, Any]]:
    regions = _regions(leaf, local, path)
    if not isinstance(leaf.offset, int):
        return [(regions[0], data)]
    at = 0
    spread: list[tuple[Region, Any]] = []
    for region in regions:
        spread.append((region, Flat(data, at, region.shape)))
        at += region.size
    return spread


def sharded_source(leaf: Sharded, path: str, rank: int, adapter: Adapter) -> Source:
    """Describes a piece that is to be saved.

    Raises:
        LayoutError: the piece does not lie inside the global shape, or `local` is distributed itself.
    """
    inner = adapter.source(leaf.local, path, rank)
    if inner is None or inner.layout is not None:
        raise LayoutError(path, expected="a plain array in Sharded", found=f"{type(leaf.local).__name__}")
    pieces = _spread(leaf, inner.pieces[0].data, inner.spec.shape, path)
    spec = msgspec.structs.replace(inner.spec, shape=leaf.global_shape)
    layout = BoxLayout(tuple((rank, region) for region, _ in pieces))
    return Source(spec, layout, [Piece(region, data) for region, data in pieces], inner.storage)


def sharded_abstract(leaf: Sharded, path: str, rank: int, adapter: Adapter) -> ArraySpec | None:
    """What the whole array is, and which regions of it the piece is."""
    inner = adapter.abstract(leaf.local, path, rank)
    if inner is None:
        return None
    return msgspec.structs.replace(inner, shape=leaf.global_shape, regions=_regions(leaf, inner.shape, path))


def _as_target(leaf: Sharded, inner: Target, path: str) -> Target:
    pieces = _spread(leaf, inner.pieces[0].data, inner.spec.shape, path)
    spec = msgspec.structs.replace(inner.spec, shape=leaf.global_shape)
    made = Sharded(inner.leaf, leaf.global_shape, leaf.offset)
    return Target(spec, made, [TargetPiece(region, data) for region, data in pieces])


def sharded_target(leaf: Sharded, path: str, rank: int, adapter: Adapter) -> Target | None:
    """Describes a piece that is to be filled in place."""
    inner = adapter.target(leaf.local, path, rank)
    return None if inner is None else _as_target(leaf, inner, path)


def sharded_like(
    leaf: Sharded, path: str, rank: int, device: str | None, adapter: Adapter, *, take: Take | None = None
) -> Target | None:
    """A new piece of the same shape and place."""
    inner = adapter.like(leaf.local, path, rank, device, take=take)
    return None if inner is None else _as_target(leaf, inner, path)
