"""Boxes in an array's index space, and the bytes they occupy in memory or in a file.

A `Region` is an offset and a shape, one integer per dimension. Resharding is the algebra of this module: intersect
what is wanted with what is stored, and turn each intersection into runs of bytes. A region without elements is
legal everywhere; it intersects nothing. A 0-dimensional region has one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

MAX_NDIM = 64
"""The largest number of dimensions of an array."""


class Region(msgspec.Struct, frozen=True, order=True, gc=False, array_like=True):
    """A half-open box: `offset[d] <= index[d] < offset[d] + shape[d]`.

    >>> tc.Region((1, 0), (2, 4)).slices()
    (slice(1, 3, None), slice(0, 4, None))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Returns the region that is all of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index past the box, per dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Returns whether the box is all of an array of this shape."""
        return self.shape == tuple(shape) and not any(self.offset)

    def within(self, outer: Region) -> bool:
        """Returns whether every index of the box lies in `outer`."""
        return all(
            a >= c and a + b <= c + d
            for a, b, c, d in zip(self.offset, self.shape, outer.offset, outer.shape, strict=True)
        )

    def relative_to(self, outer: Region) -> Region:
        """Returns the same box with its offset counted from the first corner of `outer`."""
        return Region(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def shifted(self, by: Sequence[int]) -> Region:
        """Returns the same box, moved by `by`."""
        return Region(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Returns the box as an index: `array[region.slices()]`."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def replace_dim(self, dim: int, start: int, count: int) -> Region:
        """Returns the same box with the range `start : start + count` in dimension `dim`."""
        return Region(
            (*self.offset[:dim], start, *self.offset[dim + 1 :]),
            (*self.shape[:dim], count, *self.shape[dim + 1 :]),
        )


def intersect(a: Region, b: Region) -> Region | None:
    """Returns the common box of two regions of one array, None when they share no element."""
    offset: list[int] = []
    shape: list[int] = []
    for o1, n1, o2, n2 in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        start = o1 if o1 > o2 else o2
        stop = min(o1 + n1, o2 + n2)
        if stop <= start:
            return None
        offset.append(start)
        shape.append(stop - start)
    return Region(tuple(offset), tuple(shape))


def any_overlap(regions: Sequence[Region]) -> bool:
    """Returns whether two regions share an element, by a sweep along the dimension with the most different offsets."""
    if len(regions) < 2 or not regions[0].shape:
        return len(regions) > 1
    dim = max(range(len(regions[0].shape)), key=lambda d: len({region.offset[d] for region in regions}))
    ordered = sorted(regions, key=lambda region: region.offset[dim])
    return any(others for _, others in earlier_overlaps(ordered, dim))


def earlier_overlaps(regions: Iterable[Region], dim: int = 0) -> Iterator[tuple[Region, list[Region]]]:
    """Yields each region with those before it that share an element with it.

    Args:
        regions: in rising order of their offsets along `dim`.
    """
    active: list[Region] = []
    for region in regions:
        active = [other for other in active if not other.shape or other.stop[dim] > region.offset[dim]]
        yield region, [other for other in active if intersect(region, other) is not None]
        active.append(region)


def subtract(a: Region, b: Region) -> tuple[Region, ...]:
    """Returns disjoint boxes that together are `a` without `b`; at most two per dimension."""
    common = intersect(a, b)
    if common is None:
        return (a,) if a.size else ()
    pieces: list[Region] = []
    rest = a
    for d, (start, count) in enumerate(zip(common.offset, common.shape, strict=True)):
        before = start - a.offset[d]
        after = a.offset[d] + a.shape[d] - (start + count)
        if before:
            pieces.append(rest.replace_dim(d, a.offset[d], before))
        if after:
            pieces.append(rest.replace_dim(d, start + count, after))
        rest = rest.replace_dim(d, start, count)
    return tuple(pieces)


def flat_regions(shape: Sequence[int], start: int, stop: int) -> tuple[Region, ...]:
    """Returns the elements `start <= i < stop` of an array in C order, as boxes in that same order.

    Exact for any range: per dimension a first and a last partial row around one box of full rows, so at most
    2 * ndim - 1 boxes. A ZeRO-style flat range of an n-D parameter is stored so, without gathering.
    """
    if start >= stop:
        return ()
    if not shape:
        return (Region((), ()),)
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _prepend_index(first, flat_regions(shape[1:], head, tail))
    pieces: list[Region] = []
    if head:
        pieces += _prepend_index(first, flat_regions(shape[1:], head, row))
        first += 1
    if last > first:
        pieces.append(Region((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if tail:
        pieces += _prepend_index(last, flat_regions(shape[1:], 0, tail))
    return tuple(pieces)


def _prepend_index(index: int, inner: Iterable[Region]) -> tuple[Region, ...]:
    return tuple(Region((index, *r.offset), (1, *r.shape)) for r in inner)


def max_boxes(shape: tuple[int, ...]) -> int:
    """Returns the largest number of boxes of one range of an array's elements."""
    return max(1, 2 * len(shape) - 1)


def flat_boxes(
    shape: tuple[int, ...], starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the boxes of many ranges `starts <= i < stops`, none empty, by range and then as in `flat_regions`.

    Returns:
        (the number of each box's range: int64[n], offsets: int64[n, ndim], shapes: int64[n, ndim]).
    """
    if not shape:
        nothing = np.empty((len(starts), 0), np.int64)
        return np.arange(len(starts)), nothing, nothing
    row = math.prod(shape[1:])
    first, head = np.divmod(starts, row)
    last, tail = np.divmod(stops, row)
    inside = first == last  # the range lies in one row
    opens, closes = (head > 0) & ~inside, (tail > 0) & ~inside
    full = (last - first - opens > 0) & ~inside
    parts = [
        _in_row(shape, first, head, np.where(inside, tail, row), inside | opens),
        _full_rows(shape, first + opens, last, full),
        _in_row(shape, last, np.zeros_like(tail), tail, closes),
    ]
    numbers, offsets, shapes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(numbers, kind="stable")  # the three parts of one range are in order already
    return numbers[order], offsets[order], shapes[order]


def _in_row(
    shape: tuple[int, ...], row: np.ndarray, low: np.ndarray, high: np.ndarray, which: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the boxes of elements `low <= i < high` of one row each, of the ranges where `which` is true."""
    picked = np.flatnonzero(which)
    if not len(picked):
        empty = np.empty((0, len(shape)), np.int64)
        return picked, empty, empty
    numbers, offsets, shapes = flat_boxes(shape[1:], low[picked], high[picked])
    rows = row[picked][numbers][:, None]
    return picked[numbers], np.hstack([rows, offsets]), np.hstack([np.ones_like(rows), shapes])


def _full_rows(
    shape: tuple[int, ...], first: np.ndarray, last: np.ndarray, which: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns one box of the full rows `first <= row < last` for each range where `which` is true."""
    picked = np.flatnonzero(which)
    offsets = np.zeros((len(picked), len(shape)), np.int64)
    shapes = np.tile(np.array(shape, np.int64), (len(picked), 1))
    offsets[:, 0], shapes[:, 0] = first[picked], (last - first)[picked]
    return picked, offsets, shapes


def tiles(box: Region, limit: int) -> Iterator[Region]:
    """Yields boxes of at most `limit` elements (at least 1) that, one after the other, are `box` in C order."""
    if box.size <= limit:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    # at least one row: a single row that is too long is cut by the recursion
    step = max(1, limit // (box.size // box.shape[dim]))
    stop = box.offset[dim] + box.shape[dim]
    for low in range(box.offset[dim], stop, step):
        yield from tiles(box.replace_dim(dim, low, min(step, stop - low)), limit)


class ByteRuns(msgspec.Struct, frozen=True):
    """Equal runs of bytes at regular steps: run i_0, i_1, ... starts at `first + sum(i_k * steps[k])`."""

    first: int
    length: int
    """The bytes of each run."""
    counts: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of runs."""
        return math.prod(self.counts)

    @property
    def span(self) -> tuple[int, int]:
        """The first byte of the runs, and one past the last."""
        if not self.count or not self.length:
            return self.first, self.first
        last = sum((n - 1) * s for n, s in zip(self.counts, self.steps, strict=True))
        return self.first, self.first + last + self.length

    def starts(self) -> np.ndarray:
        """Returns every run's first byte, int64[count], ascending."""
        starts = np.full(1, self.first, dtype=np.int64)
        for n, s in zip(self.counts, self.steps, strict=True):
            starts = (starts[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
        return starts


def byte_runs(inner: Region, outer: Region, itemsize: int) -> ByteRuns:
    """Returns where the bytes of `inner` lie in a buffer that holds `outer` in C order.

    Trailing dimensions that `inner` covers fully are merged into the run, so a block of full rows is one run.
    """
    length, dims = itemsize, len(outer.shape)
    stride = itemsize
    d = dims
    while d > 0:
        d -= 1
        length = inner.shape[d] * stride
        stride *= outer.shape[d]
        if inner.shape[d] != outer.shape[d]:
            break
    counts: list[int] = []
    steps: list[int] = []
    strides = c_strides(outer.shape, itemsize)
    first = sum((i - o) * s for i, o, s in zip(inner.offset, outer.offset, strides, strict=True))
    for k in range(d):
        if inner.shape[k] != 1:
            counts.append(inner.shape[k])
            steps.append(strides[k])
    return ByteRuns(first, length, tuple(counts), tuple(steps))


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the bytes from one element to the next along each dimension, in C order."""
    strides: list[int] = []
    stride = itemsize
    for n in reversed(shape):
        strides.append(stride)
        stride *= n
    return tuple(reversed(strides))


def strides_in(shape: Sequence[int], order: Sequence[int] | None, itemsize: int) -> tuple[int, ...]:
    """Returns the bytes from one element to the next along each dimension of a dense array.

    Args:
        order: the dimensions from the outermost to the innermost in memory; None for C order.
    """
    if order is None:
        # torch counts a dimension without elements as one of length 1
        return c_strides([max(n, 1) for n in shape], itemsize)
    strides = [0] * len(shape)
    stride = itemsize
    for d in reversed(order):
        strides[d] = stride
        stride *= max(shape[d], 1)
    return tuple(strides)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the dimensions of an array from the outermost to the innermost in memory.

    Dimensions of length 1 are placed where `strides_in` gives their strides again, if there is such a place. None for
    C order, an array without elements, and one that is not dense: with gaps, or elements in one place.

    Args:
        strides: in elements.
    """
    usual = c_strides(shape, 1)
    if tuple(strides) == usual or 0 in shape:
        return None
    order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] == 1, d)))
    dense = all(n == 1 or s == d for n, s, d in zip(shape, strides, strides_in(shape, order, 1), strict=True))
    return order if dense and order != tuple(range(len(shape))) else None


def is_c_order(shape: Sequence[int], order: Sequence[int] | None) -> bool:
    """Returns whether the elements of a dense array lie in C order: all dimensions longer than 1 do."""
    longer = [d for d in order or () if shape[d] > 1]
    return longer == sorted(longer)


def coalesce(starts: np.ndarray, stops: np.ndarray, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Merges ranges, sorted by start, that overlap or lie at most `gap` apart.

    Returns:
        (the merged ranges: int64[m, 2], for each given range the number of its merged range: int64[n]).
    """
    if len(starts) == 0:
        return np.empty((0, 2), np.int64), np.empty(0, np.int64)
    reach = np.maximum.accumulate(stops)
    opens = np.empty(len(starts), bool)
    opens[0] = True
    opens[1:] = starts[1:] > reach[:-1] + gap
    members = np.cumsum(opens) - 1
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(starts)) - 1
    return np.stack([starts[first], reach[last]], axis=1), members


def overlapping_groups(starts: Sequence[int], stops: Sequence[int]) -> list[list[int]]:
    """Returns groups of ranges, by number, that overlap directly or through others; each in the order of the starts."""
    if len(starts) < 2:
        return []
    lows = np.array(starts, np.int64)
    order = np.argsort(lows, kind="stable")
    # with this gap ranges that only touch stay apart
    _, members = coalesce(lows[order], np.array(stops, np.int64)[order], -1)
    sizes = np.bincount(members)
    ends = np.cumsum(sizes)
    return [order[ends[group] - sizes[group] : ends[group]].tolist() for group in np.flatnonzero(sizes > 1)]
