"""What each rank writes where, and what a load reads from where. Pure data in, pure data out.

`plan_save` gives one rank's files; `place`, of `core.planning.stream_order`, gives every rank's offsets at once, for
the index. Both put entries in the one order of that module. `plan_load` intersects what is wanted with what is stored,
cuts the intersections into tiles of bounded span, sorts them by file and offset, and joins neighbours into blocks,
each read at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ..sharding.region import ByteRuns, Region, byte_runs, c_strides, coalesce, intersect
from ..sharding.write_assignment import ArrayLeaf, Boxes, Share, writes_of
from .stream_order import CLASSES, Placed, PlacedWhole, lone_pieces, order_class, place

__all__ = [
    "READ_GAP",
    "READ_LIMIT",
    "Block",
    "Chunk",
    "Copy",
    "FilePlan",
    "LoadPlan",
    "Placed",
    "PlacedWhole",
    "Run",
    "SavePlan",
    "Want",
    "Write",
    "cuts",
    "place",
    "plan_load",
    "plan_runs",
    "plan_save",
]

READ_LIMIT = 8 << 20
"""Bytes of one read, at most (a single row that is longer excepted)."""
READ_GAP = 64 << 10
"""Unneeded bytes between two needed ones that cost less to read than a second request does."""


class Write(msgspec.Struct, frozen=True, gc=False):
    """One entry of a shard: a region of a leaf, and where its bytes start in the file's data area."""

    leaf: int
    region: Region
    start: int
    nbytes: int


class FilePlan(msgspec.Struct, frozen=True):
    """One shard of a rank: its entries in order."""

    part: int
    stream: int
    """Where the file starts in the stream of all the rank's data bytes."""
    nbytes: int
    writes: tuple[Write, ...]


class SavePlan(msgspec.Struct, frozen=True):
    """All that one rank writes."""

    rank: int
    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def plan_save(
    leaves: Sequence[ArrayLeaf], shares: Sequence[Share | Boxes], rank: int, *, max_shard_bytes: int = 1 << 62
) -> SavePlan:
    """What `rank` writes: entries by alignment, in files of at most `max_shard_bytes` (a larger entry alone)."""
    classes: list[list[tuple[int, Region, int]]] = [[] for _ in range(CLASSES)]
    for i, (leaf, lone) in enumerate(zip(leaves, lone_pieces(leaves, shares), strict=True)):
        if lone is not None:
            if lone.rank == rank:
                classes[lone.order].append((i, lone.region, lone.nbytes))
            continue
        for region in writes_of(leaf, shares[i], rank):
            nbytes = region.size * leaf.itemsize
            classes[order_class(nbytes, leaf.align or leaf.itemsize)].append((i, region, nbytes))
    files: list[FilePlan] = []
    writes: list[Write] = []
    stream = at = 0
    for i, region, nbytes in (entry for group in classes for entry in group):
        if writes and at + nbytes > max_shard_bytes:
            files.append(FilePlan(len(files), stream, at, tuple(writes)))
            stream, at, writes = stream + at, 0, []
        writes.append(Write(i, region, at, nbytes))
        at += nbytes
    if writes or not files:
        files.append(FilePlan(len(files), stream, at, tuple(writes)))
    return SavePlan(rank, tuple(files))


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A region that was written, and where: `rank`'s stream of data bytes, from `start` on."""

    region: Region
    rank: int
    start: int


class Want(msgspec.Struct, frozen=True):
    """A region of a stored array that is to be read, with the chunks that hold (at least) it."""

    region: Region
    itemsize: int
    chunks: Sequence[Chunk]


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A box of a wanted array, inside one chunk: `box` of want number `want` lies in `chunk`, from `start` on."""

    want: int
    box: Region
    chunk: Region
    start: int
    """First byte of the box in the writer's stream."""
    stop: int
    """One past its last byte."""


class Block(msgspec.Struct, frozen=True):
    """Bytes of one rank's stream that are read together, and the boxes they hold."""

    rank: int
    start: int
    stop: int
    copies: tuple[Copy, ...]


class LoadPlan(msgspec.Struct, frozen=True):
    """All that a load reads, by file and offset."""

    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the blocks span."""
        return sum(block.stop - block.start for block in self.blocks)


class Run(msgspec.Struct, frozen=True):
    """A stretch of one rank's stream that is read into memory of its own, and the chunks that stay there."""

    rank: int
    start: int
    stop: int
    members: tuple[int, ...]


def plan_runs(
    chunks: Sequence[tuple[int, int, int]],
    *,
    gap: int = READ_GAP,
    borders: dict[int, Sequence[int]] | None = None,
    limit: int | None = None,
) -> list[Run]:
    """Joins ranges that lie close together in one file of a rank's stream.

    Args:
        chunks: each range as (rank, start, nbytes).
        gap: unneeded bytes that are rather read than skipped.
        borders: by rank, the stream offsets where a new file starts.
        limit: bytes of one run, at most, unless a single range is longer; None for any size.
    """
    by_rank: dict[int, list[int]] = {}
    for i, (rank, _, _) in enumerate(chunks):
        by_rank.setdefault(rank, []).append(i)
    runs: list[Run] = []
    for rank in sorted(by_rank):
        order = sorted(by_rank[rank], key=lambda i: chunks[i][1])
        starts = np.array([chunks[i][1] for i in order], np.int64)
        stops = starts + np.array([chunks[i][2] for i in order], np.int64)
        files = np.searchsorted(np.asarray((borders or {}).get(rank, ()), np.int64), starts, side="right")
        for file in np.unique(files).tolist():
            here = np.flatnonzero(files == file)
            bounds, members = coalesce(starts[here], stops[here], gap)
            first = np.searchsorted(members, np.arange(len(bounds) + 1)).tolist()
            for k, (low, high) in enumerate(bounds.tolist()):
                places: list[int] = here[first[k] : first[k + 1]].tolist()
                inside = tuple(order[i] for i in places)
                runs += [Run(rank, low, high, inside)] if limit is None else _split(rank, inside, chunks, limit)
    return runs


def _split(rank: int, members: Sequence[int], chunks: Sequence[tuple[int, int, int]], limit: int) -> Iterable[Run]:
    """Cuts a run between its members, so that none spans more than `limit` bytes; members are ordered by start."""
    inside: list[int] = []
    first = reach = 0
    for member in members:
        _, start, nbytes = chunks[member]
        if inside and max(start + nbytes, reach) - first > limit:
            yield Run(rank, first, reach, tuple(inside))
            inside = []
        if not inside:
            first = reach = start
        inside.append(member)
        reach = max(reach, start + nbytes)
    if inside:
        yield Run(rank, first, reach, tuple(inside))


def cuts(start: int, stop: int, origin: int, step: int) -> Iterable[tuple[int, int]]:
    """Cuts `start:stop` at every multiple of `step` from `origin` on."""
    while start < stop:
        high = min(start + step - (start - origin) % step, stop)
        yield start, high
        start = high


def plan_load(
    wants: Sequence[Want],
    *,
    limit: int = READ_LIMIT,
    gap: int = READ_GAP,
    borders: dict[int, Sequence[int]] | None = None,
) -> LoadPlan:
    """Reads that fill every want.

    Args:
        limit: bytes of one read, at most.
        gap: unneeded bytes that are rather read than skipped.
        borders: by rank, the stream offsets where a new file starts: no read crosses one.
    """
    copies: list[Copy] = []
    ranges: list[tuple[int, int, int]] = []
    for i, want in enumerate(wants):
        for chunk in want.chunks:
            common = chunk.region if chunk.region == want.region else intersect(chunk.region, want.region)
            if common is None or not common.size:
                continue
            for box in tiles(common, chunk.region, want.itemsize, limit=limit, gap=gap):
                first, last = byte_runs(box, chunk.region, want.itemsize).span
                copies.append(Copy(i, box, chunk.region, chunk.start + first, chunk.start + last))
                ranges.append((chunk.rank, chunk.start + first, last - first))
    runs = plan_runs(ranges, gap=gap, borders=borders, limit=limit)
    return LoadPlan(tuple(Block(r.rank, r.start, r.stop, tuple(copies[i] for i in r.members)) for r in runs))


def tiles(box: Region, outer: Region, itemsize: int, *, limit: int, gap: int) -> Iterable[Region]:
    """Cuts a box of a chunk into boxes that span at most `limit` bytes each and leave out at most `gap` at a time."""
    runs = byte_runs(box, outer, itemsize)
    first, last = runs.span
    dense = _widest_gap(runs) <= gap
    if dense and last - first <= limit:
        yield box
        return
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        yield box
        return
    stride = c_strides(outer.shape, itemsize)[dim]
    rows = max(1, limit // stride) if dense or stride <= gap else 1
    rows = min(rows, -(-box.shape[dim] // 2))
    for low in range(0, box.shape[dim], rows):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += low
        shape[dim] = min(rows, box.shape[dim] - low)
        yield from tiles(Region(tuple(offset), tuple(shape)), outer, itemsize, limit=limit, gap=gap)


def _widest_gap(runs: ByteRuns) -> int:
    """Bytes between one run and the next, at most."""
    widest, reach = 0, runs.length
    for n, step in zip(reversed(runs.counts), reversed(runs.steps), strict=True):
        widest = max(widest, step - reach)
        reach += (n - 1) * step
    return widest
