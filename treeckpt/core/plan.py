"""What each rank writes where, and what a load reads from where. Pure data in, pure data out.

`plan_save` gives one rank's files; `place` gives every rank's offsets at once, for the index. Both put entries in one
order: first those whose bytes fill whole pages, then whole cache lines, then by descending alignment, so that without
holes everything is aligned as far as it can be. `plan_load` intersects what is wanted with what is stored, cuts the
intersections into tiles of bounded span, sorts them by file and offset, and joins neighbours into blocks, each read at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from .assign import ArrayLeaf, Boxes, Owners, Share, lone_writer, owners_of, writes_of
from .region import ByteRuns, Region, byte_runs, c_strides, coalesce, intersect
from .runs import decode_runs

__all__ = [
    "READ_LIMIT",
    "Block",
    "Chunk",
    "Copy",
    "FilePlan",
    "LoadPlan",
    "Placed",
    "Run",
    "SavePlan",
    "Want",
    "Write",
    "place",
    "plan_load",
    "plan_runs",
    "plan_save",
]

PAGE = 4096
LINE = 64
READ_LIMIT = 8 << 20
"""Bytes of one read, at most (a single row that is longer excepted)."""
READ_GAP = 64 << 10
"""Unneeded bytes between two needed ones that cost less to read than a second request does."""

_CLASSES = 7  # pages, lines, then alignments 16, 8, 4, 2, 1


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


def _order_class(nbytes: int, align: int) -> int:
    if nbytes % PAGE == 0:
        return 0
    if nbytes % LINE == 0:
        return 1
    return 7 - min(align & -align, 16).bit_length()


def plan_save(
    leaves: Sequence[ArrayLeaf], shares: Sequence[Share | Boxes], rank: int, *, max_shard_bytes: int = 1 << 62
) -> SavePlan:
    """What `rank` writes: entries by alignment, in files of at most `max_shard_bytes` (a larger entry alone)."""
    classes: list[list[tuple[int, Region, int]]] = [[] for _ in range(_CLASSES)]
    for i, (leaf, share) in enumerate(zip(leaves, shares, strict=True)):
        lone = _lone_piece(leaf, share)
        if lone is not None:
            if lone.rank == rank:
                classes[lone.order].append((i, Region.whole(leaf.shape), lone.nbytes))
            continue
        for region in writes_of(leaf, share, rank):
            nbytes = region.size * leaf.itemsize
            classes[_order_class(nbytes, leaf.align or leaf.itemsize)].append((i, region, nbytes))
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


class Placed(msgspec.Struct, frozen=True):
    """One array's chunks: who wrote them and where each starts in its writer's stream of data bytes.

    For a leaf that each rank has of its own: one number per rank, in the order of the ranks.
    """

    owners: Owners
    starts: np.ndarray


def place(leaves: Sequence[ArrayLeaf], shares: Sequence[Share | Boxes], world: int) -> tuple[list[Placed], np.ndarray]:
    """Where every rank's `plan_save` puts every chunk, without making those plans one by one.

    Two passes over the leaves, vectorised over ranks: the first sums bytes per rank and order class, the second hands
    out offsets.

    Returns:
        (the chunks of each array, bytes that each rank writes: int64[world]).
    """
    pieces = [_lone_piece(leaf, share) or _pieces(leaf, share) for leaf, share in zip(leaves, shares, strict=True)]
    # plain integers for the arrays that one rank writes whole: a vector of one costs ten times as much
    lone = [[0] * world for _ in range(_CLASSES)]
    totals = np.zeros((_CLASSES, world), np.int64)
    for piece in pieces:
        if isinstance(piece, _Lone):
            lone[piece.order][piece.rank] += piece.nbytes
        else:
            np.add.at(totals, (piece.orders, piece.ranks), piece.sizes)
    totals += np.array(lone, np.int64)
    # within a class of a rank, chunks follow the order of the leaves, lone or not: a mixture is counted in vectors
    if any(isinstance(piece, _Many) for piece in pieces):
        return _place_mixed(leaves, pieces, totals), totals.sum(0)
    at = (np.cumsum(totals, axis=0) - totals).tolist()
    placed: list[Placed] = []
    for leaf, piece in zip(leaves, pieces, strict=True):
        assert isinstance(piece, _Lone), "there are no others"
        start = at[piece.order][piece.rank]
        at[piece.order][piece.rank] = start + piece.nbytes
        placed.append(Placed(Boxes(((piece.rank, Region.whole(leaf.shape)),)), np.array([start], np.int64)))
    return placed, totals.sum(0)


def _place_mixed(leaves: Sequence[ArrayLeaf], pieces: Sequence[_Lone | _Many], totals: np.ndarray) -> list[Placed]:
    at = np.cumsum(totals, axis=0) - totals
    placed: list[Placed] = []
    for leaf, piece in zip(leaves, pieces, strict=True):
        if isinstance(piece, _Lone):
            start = int(at[piece.order, piece.rank])
            at[piece.order, piece.rank] += piece.nbytes
            placed.append(Placed(Boxes(((piece.rank, Region.whole(leaf.shape)),)), np.array([start], np.int64)))
        else:
            placed.append(Placed(piece.owners, _hand_out(at, piece.ranks, piece.orders, piece.sizes)))
    return placed


class _Lone(msgspec.Struct, frozen=True, gc=False):
    """An array that one rank writes whole: by far the most common kind, spared the vectors."""

    rank: int
    order: int
    nbytes: int


class _Many(msgspec.Struct, frozen=True):
    """Chunks of an array in row-major order: who writes each, its order class, its bytes."""

    ranks: np.ndarray
    owners: Owners
    orders: np.ndarray
    sizes: np.ndarray


def _lone_piece(leaf: ArrayLeaf, share: Share | Boxes) -> _Lone | None:
    if leaf.per_rank is not None or isinstance(share, Boxes) or share.cuts:
        return None
    if (rank := lone_writer(leaf.layout, share.writers[0])) is None:
        return None
    nbytes = leaf.nbytes
    return _Lone(rank, _order_class(nbytes, leaf.align or leaf.itemsize), nbytes)


def _hand_out(at: np.ndarray, ranks: np.ndarray, classes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Offsets for the chunks of one array; a rank's second chunk in a class comes after its first."""
    slots = classes * at.shape[1] + ranks
    flat = at.reshape(-1)
    if np.bincount(ranks).max(initial=0) <= 1:
        starts = flat[slots]
        flat[slots] += sizes
        return starts
    order = np.argsort(slots, kind="stable")
    sums = np.cumsum(sizes[order])
    before = sums - sizes[order]
    opens = np.flatnonzero(np.diff(slots[order], prepend=-1))
    lengths = np.diff(np.append(opens, len(slots)))
    within = before - np.repeat(before[opens], lengths)
    starts = np.empty(len(slots), np.int64)
    starts[order] = flat[slots[order]] + within
    np.add.at(flat, slots, sizes)
    return starts


def _pieces(leaf: ArrayLeaf, share: Share | Boxes) -> _Many:
    if leaf.per_rank is not None:
        ranks = decode_runs(leaf.per_rank)
        sizes = np.full(len(ranks), leaf.nbytes, np.int64)
        owners: Owners = Boxes(())
    else:
        owners = owners_of(leaf, share)
        if isinstance(owners, Boxes):
            ranks = np.array([rank for rank, _ in owners.pieces], np.int64)
            sizes = np.array([region.size for _, region in owners.pieces], np.int64) * leaf.itemsize
        else:
            ranks = owners.ranks
            sizes = np.full(1, leaf.itemsize, np.int64)
            for first, last in zip(owners.starts, owners.stops, strict=True):
                sizes = (sizes[:, None] * (last - first)).reshape(-1)
    loose = _order_class(1, leaf.align or leaf.itemsize)
    orders = np.where(sizes % PAGE == 0, 0, np.where(sizes % LINE == 0, 1, loose))
    return _Many(ranks, owners, orders, sizes)


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
    chunks: Sequence[tuple[int, int, int]], *, gap: int = READ_GAP, borders: dict[int, Sequence[int]] | None = None
) -> list[Run]:
    """Stretches that hold whole chunks, given as (rank, start, nbytes); neighbours are joined."""
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
                runs.append(Run(rank, low, high, inside))
    return runs


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
    by_rank: dict[int, list[Copy]] = {}
    for i, want in enumerate(wants):
        for chunk in want.chunks:
            common = chunk.region if chunk.region == want.region else intersect(chunk.region, want.region)
            if common is None or not common.size:
                continue
            copies = by_rank.setdefault(chunk.rank, [])
            for box in tiles(common, chunk.region, want.itemsize, limit=limit, gap=gap):
                first, last = byte_runs(box, chunk.region, want.itemsize).span
                copies.append(Copy(i, box, chunk.region, chunk.start + first, chunk.start + last))
    blocks: list[Block] = []
    for rank in sorted(by_rank):
        blocks += _blocks(rank, by_rank[rank], limit, gap, (borders or {}).get(rank, ()))
    return LoadPlan(tuple(blocks))


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


def _blocks(rank: int, copies: list[Copy], limit: int, gap: int, borders: Sequence[int]) -> list[Block]:
    copies.sort(key=lambda copy: copy.start)
    starts = np.array([copy.start for copy in copies], np.int64)
    stops = np.array([copy.stop for copy in copies], np.int64)
    _, members = coalesce(starts, stops, gap)
    file = np.searchsorted(np.asarray(borders, np.int64), starts, side="right") if len(borders) else members * 0
    groups, files = members.tolist(), file.tolist()
    blocks: list[Block] = []
    open_at, first, reach = 0, copies[0].start, copies[0].stop
    for i in range(1, len(copies) + 1):
        if i < len(copies):
            copy = copies[i]
            same = groups[i] == groups[open_at] and files[i] == files[open_at]
            if same and max(copy.stop, reach) - first <= limit:
                reach = max(reach, copy.stop)
                continue
        blocks.append(Block(rank, first, reach, tuple(copies[open_at:i])))
        if i < len(copies):
            open_at, first, reach = i, copies[i].start, copies[i].stop
    return blocks
