"""Explicit pieces: a local array together with where it stands in a global one, whatever cut it.

What Paddle calls local shape + global offset; and, with an integer offset, a ZeRO-style flat range of the global array's
elements in C order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from ..core.errors import LayoutError
from ..core.layout import BoxLayout
from ..core.region import Region, flat_regions
from .base import Adapter, HostArray, Piece, Source, Target, TargetPiece

__all__ = ["Sharded", "sharded_like", "sharded_source", "sharded_target"]


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

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return tuple(self.global_shape)

    @property
    def dtype(self) -> Any:
        return self.local.dtype


def _regions(leaf: Sharded, local: Sequence[int], path: str) -> tuple[Region, ...]:
    shape, offset = tuple(leaf.global_shape), leaf.offset
    whole = Region.whole(shape)
    if isinstance(offset, int):
        if len(local) == 1 and offset >= 0 and offset + local[0] <= math.prod(shape):
            return flat_regions(shape, offset, offset + local[0])
        expected = f"a 1-D piece inside {math.prod(shape)} elements"
    else:
        region = Region(tuple(offset), tuple(local))
        if len(region.offset) == len(local) == len(shape) and min(offset, default=0) >= 0 and region.within(whole):
            return (region,)
        expected = f"a piece inside shape {shape}"
    raise LayoutError(path, expected=expected, found=f"shape {tuple(local)} at offset {offset}")


class _Flat:
    """A stretch of a 1-D array seen as a box of the global one."""

    def __init__(self, data: Any, start: int, shape: tuple[int, ...]) -> None:
        self.data, self.start, self.shape = data, start, shape

    def _all(self) -> np.ndarray:
        stop = self.start + math.prod(self.shape)
        return self.data.read((slice(self.start, stop),)).reshape(self.shape)

    def read(self, box: tuple[slice, ...]) -> np.ndarray:
        return self._all()[box]

    def write(self, box: tuple[slice, ...], data: np.ndarray) -> None:
        whole = self._all()
        whole[box] = data
        if not isinstance(self.data, HostArray):  # what was read is a copy: put it back
            self.data.write((slice(self.start, self.start + whole.size),), whole.reshape(-1))


def _spread(leaf: Sharded, data: Any, local: tuple[int, ...], path: str) -> list[tuple[Region, Any]]:
    regions = _regions(leaf, local, path)
    if not isinstance(leaf.offset, int):
        return [(regions[0], data)]
    at = 0
    spread: list[tuple[Region, Any]] = []
    for region in regions:
        spread.append((region, _Flat(data, at, region.shape)))
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
    spec = msgspec.structs.replace(inner.spec, shape=tuple(leaf.global_shape))
    layout = BoxLayout(tuple((rank, region) for region, _ in pieces))
    return Source(spec, layout, [Piece(region, data) for region, data in pieces])


def _as_target(leaf: Sharded, inner: Target, path: str) -> Target:
    pieces = _spread(leaf, inner.pieces[0].data, inner.spec.shape, path)
    spec = msgspec.structs.replace(inner.spec, shape=tuple(leaf.global_shape))
    made = Sharded(inner.leaf, tuple(leaf.global_shape), leaf.offset)
    return Target(spec, made, [TargetPiece(region, data) for region, data in pieces])


def sharded_target(leaf: Sharded, path: str, rank: int, adapter: Adapter) -> Target | None:
    """Describes a piece that is to be filled in place."""
    inner = adapter.target(leaf.local, path, rank)
    return None if inner is None else _as_target(leaf, inner, path)


def sharded_like(leaf: Sharded, path: str, rank: int, device: str | None, adapter: Adapter) -> Target | None:
    """A new piece of the same shape and place."""
    inner = adapter.like(leaf.local, path, rank, device)
    return None if inner is None else _as_target(leaf, inner, path)
