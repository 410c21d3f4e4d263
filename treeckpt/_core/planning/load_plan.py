"""The arithmetic of reads: what lies close together is joined, and what is too long or too sparse is cut.

`_loading.plan` makes the reads of a load with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ..sharding.region import ByteRuns, Region, byte_runs, c_strides, coalesce

READ_LIMIT = 8 << 20
"""The largest number of bytes of one read (a single row that is longer excepted)."""
READ_GAP = 64 << 10
"""The unneeded bytes between two needed ones that cost less to read than a second request does."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A region that was written, and where: in `rank`'s stream of data bytes, from `start` on."""

    region: Region
    rank: int
    start: int


class ContiguousRead(msgspec.Struct, frozen=True):
    """A range of one rank's stream that is read into memory of its own, and the numbers of the chunks in it."""

    rank: int
    start: int
    stop: int
    members: tuple[int, ...]


def plan_contiguous_reads(
    chunks: Sequence[tuple[int, int, int]],
    *,
    gap: int = READ_GAP,
    limit: int | None = None,
) -> list[ContiguousRead]:
    """Plans reads that hold whole chunks, given as (rank, start, nbytes). Neighbours are joined into one read.

    Args:
        gap: unneeded bytes between needed ones, up to which they are read and not skipped.
        limit: bytes of one read, at most, unless one chunk is longer; None for any size.
    """
    by_rank: dict[int, list[int]] = {}
    for i, (rank, _, _) in enumerate(chunks):
        by_rank.setdefault(rank, []).append(i)
    reads: list[ContiguousRead] = []
    for rank in sorted(by_rank):
        order = sorted(by_rank[rank], key=lambda i: chunks[i][1])
        starts = np.array([chunks[i][1] for i in order], np.int64)
        stops = starts + np.array([chunks[i][2] for i in order], np.int64)
        bounds, members = coalesce(starts, stops, gap)
        first = np.searchsorted(members, np.arange(len(bounds) + 1)).tolist()
        for k, (low, high) in enumerate(bounds.tolist()):
            inside = tuple(order[first[k] : first[k + 1]])
            reads += [ContiguousRead(rank, low, high, inside)] if limit is None else _split(inside, chunks, limit)
    return reads


def _split(members: Sequence[int], chunks: Sequence[tuple[int, int, int]], limit: int) -> Iterable[ContiguousRead]:
    """Yields reads of at most `limit` bytes that hold chunks of one rank, which are ordered by start."""
    inside: list[int] = []
    first = reach = 0
    for member in members:
        rank, start, nbytes = chunks[member]
        if inside and max(start + nbytes, reach) - first > limit:
            yield ContiguousRead(rank, first, reach, tuple(inside))
            inside = []
        if not inside:
            first = reach = start
        inside.append(member)
        reach = max(reach, start + nbytes)
    if inside:
        yield ContiguousRead(chunks[inside[0]][0], first, reach, tuple(inside))


def split_at_multiples(start: int, stop: int, origin: int, step: int) -> Iterable[tuple[int, int]]:
    """Yields the pieces of `start:stop`, cut at every multiple of `step` from `origin` on."""
    while start < stop:
        high = min(start + step - (start - origin) % step, stop)
        yield start, high
        start = high


def bounded_span_boxes(box: Region, outer: Region, itemsize: int, *, limit: int, gap: int) -> Iterable[Region]:
    """Yields boxes that together are `box`, each of which spans at most `limit` bytes of a buffer that holds `outer`.

    Between two runs of bytes of one box lie at most `gap` bytes that are not of it.
    """
    runs = byte_runs(box, outer, itemsize)
    first, last = runs.span
    dense = _widest_gap(runs) <= gap
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None or (dense and last - first <= limit):
        yield box
        return
    stride = c_strides(outer.shape, itemsize)[dim]
    rows = max(1, limit // stride) if dense or stride <= gap else 1
    # two parts at least, or the recursion would not end
    rows = min(rows, -(-box.shape[dim] // 2))
    for low in range(0, box.shape[dim], rows):
        part = box.replace_dim(dim, box.offset[dim] + low, min(rows, box.shape[dim] - low))
        yield from bounded_span_boxes(part, outer, itemsize, limit=limit, gap=gap)


def _widest_gap(runs: ByteRuns) -> int:
    """Returns the largest number of bytes between one run and the next."""
    widest, reach = 0, runs.length
    for n, step in zip(reversed(runs.counts), reversed(runs.steps), strict=True):
        widest = max(widest, step - reach)
        reach += (n - 1) * step
    return widest
