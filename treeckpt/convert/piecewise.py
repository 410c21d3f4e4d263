"""Arrays in several pieces: boxes of one array, or flat ranges one after the other, put together box by box."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..arrays.base import raw_dtype
from ..arrays.lazy import LazyArray
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, any_overlap, intersect
from ..core.tree.spec import ArraySpec
from ..errors import CorruptError
from .files import elements_of, strided_array

__all__ = ["Open", "from_boxes", "from_ranges"]

Open = Callable[[], LazyArray]
"""Returns a piece when it is first read."""


def from_boxes(spec: ArraySpec, pieces: Sequence[tuple[Region, Open]], label: str) -> LazyArray:
    """One array of boxes of it.

    Raises:
        CorruptError: boxes that are missing, stand outside, or overlap.
    """
    whole, regions = Region.whole(spec.shape), [region for region, _ in pieces]
    misplaced = any(len(r.shape) != len(spec.shape) or not r.within(whole) for r in regions)
    full = [region for region in regions if region.size]
    if misplaced or sum(r.size for r in full) != whole.size or any_overlap(full):
        raise CorruptError(
            label,
            expected=f"pieces that make up shape {spec.shape}, each element once",
            found=f"{len(pieces)} pieces of {sum(r.size for r in full)} elements",
            hint="A file of another save may lie among these, or one is missing",
        )
    raw = raw_dtype(dtype_of(spec.dtype).itemsize)
    if len(pieces) == 1:
        return LazyArray(spec, lambda region: _opened(pieces[0], spec, label).read(region))

    def read(region: Region) -> np.ndarray:
        out = np.empty(region.shape, raw)
        for piece in pieces:
            if (common := intersect(piece[0], region)) is not None:
                data = _opened(piece, spec, label).read(common.relative_to(piece[0]))
                out[common.relative_to(region).slices()] = data
        return out

    return LazyArray(spec, read)


def _opened(piece: tuple[Region, Open], spec: ArraySpec, label: str) -> LazyArray:
    region, opened = piece
    lazy = opened()
    if lazy.spec.shape != region.shape or lazy.spec.dtype != spec.dtype:
        raise CorruptError(
            label,
            expected=f"a piece of shape {region.shape} of {spec.dtype}",
            found=f"one of shape {lazy.spec.shape} of {lazy.spec.dtype}",
            hint="The files are not of one save",
        )
    return lazy


def from_ranges(spec: ArraySpec, parts: Sequence[LazyArray], label: str) -> LazyArray:
    """One array of arrays that are, one after the other, its elements in C order.

    Raises:
        CorruptError: they have another number of elements.
    """
    sizes = [math.prod(part.spec.shape) for part in parts]
    total = sum(sizes)
    if total != math.prod(spec.shape):
        raise CorruptError(
            label,
            expected=f"{math.prod(spec.shape)} elements for shape {spec.shape}",
            found=f"{total} in {len(parts)} parts",
        )
    raw = raw_dtype(dtype_of(spec.dtype).itemsize)

    def flat(start: int, count: int) -> np.ndarray:
        out = np.empty(count, raw)
        at = 0
        for size, part in zip(sizes, parts, strict=True):
            low, high = max(start, at), min(start + count, at + size)
            if low < high:
                out[low - start : high - start] = elements_of(part)(low - at, high - low)
            at += size
        return out

    return strided_array(spec, flat, 0, None, None)
