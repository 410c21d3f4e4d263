"""The save plan: the order of each rank's entries, so where every chunk of every rank starts, and a rank's files.

First come the entries whose bytes fill whole pages, then whole cache lines, then by descending alignment, so that
without holes everything is aligned as far as possible; within a class, the order is that of the leaves. `plan_save`
cuts the entries of one rank into files; `assign_offsets` finds all ranks' offsets at once, for the index.
`_core.sharding.write_assignment` decides which rank writes what.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..sharding.int_runs import decode_runs
from ..sharding.region import Region
from ..sharding.write_assignment import ArrayLeaf, Assignment, BoxOwners, Owners, owners_of, single_writer, writes_of

PAGE_SIZE = 4096
CACHE_LINE = 64
ORDER_CLASSES = 7
"""The number of classes: pages, cache lines, then alignments 16, 8, 4, 2, 1."""


def order_class(nbytes: int, align: int) -> int:
    """Returns the number of the class of an entry, by its bytes and the alignment of its elements."""
    if nbytes % PAGE_SIZE == 0:
        return 0
    if nbytes % CACHE_LINE == 0:
        return 1
    return 7 - min(align & -align, 16).bit_length()


def order_classes(nbytes: np.ndarray, align: int) -> np.ndarray:
    """As `order_class`, of entries with one alignment: int64[n]."""
    unaligned = order_class(1, align)
    return np.where(nbytes % PAGE_SIZE == 0, 0, np.where(nbytes % CACHE_LINE == 0, 1, unaligned))


class SingleWriterArray(msgspec.Struct, frozen=True, gc=False):
    """An array that one rank writes whole: by far the most common kind, handled without numpy."""

    rank: int
    order: int
    nbytes: int
    region: Region


def single_writer_arrays(
    leaves: Sequence[ArrayLeaf], assignments: Sequence[Assignment]
) -> list[SingleWriterArray | None]:
    """Returns a `SingleWriterArray` for each array that one rank writes whole, None for any other.

    Arrays with equal descriptions share one object. Layouts are compared as objects, by `id`: most leaves share one,
    and hashing it would take longer than all the rest.
    """
    known: dict[tuple[object, ...], SingleWriterArray | None] = {}
    found: list[SingleWriterArray | None] = []
    for leaf, assignment in zip(leaves, assignments, strict=True):
        if leaf.per_rank is not None or isinstance(assignment, BoxOwners) or assignment.cuts:
            found.append(None)
            continue
        replica = assignment.writers[0]
        key = (leaf.shape, leaf.itemsize, leaf.align, replica, id(leaf.layout))
        if key not in known:
            rank, nbytes = single_writer(leaf.layout, replica), leaf.nbytes
            order = order_class(nbytes, leaf.align or leaf.itemsize)
            region = Region.whole(leaf.shape)
            known[key] = SingleWriterArray(rank, order, nbytes, region) if rank is not None else None
        found.append(known[key])
    return found


# one rank -------------------------------------------------------------------------------------------------------------


class PlannedEntry(msgspec.Struct, frozen=True, gc=False):
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
    writes: tuple[PlannedEntry, ...]


class SavePlan(msgspec.Struct, frozen=True):
    """All files that one rank writes."""

    rank: int
    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def plan_save(
    leaves: Sequence[ArrayLeaf], assignments: Sequence[Assignment], rank: int, *, max_shard_bytes: int = 1 << 62
) -> SavePlan:
    """Plans what `rank` writes: entries by alignment, in files of at most `max_shard_bytes`.

    An entry that is larger than `max_shard_bytes` stands alone in its file.
    """
    classes: list[list[tuple[int, Region, int]]] = [[] for _ in range(ORDER_CLASSES)]
    for i, (leaf, single) in enumerate(zip(leaves, single_writer_arrays(leaves, assignments), strict=True)):
        if single is not None:
            if single.rank == rank:
                classes[single.order].append((i, single.region, single.nbytes))
            continue
        for region in writes_of(leaf, assignments[i], rank):
            nbytes = region.size * leaf.itemsize
            classes[order_class(nbytes, leaf.align or leaf.itemsize)].append((i, region, nbytes))
    files: list[FilePlan] = []
    writes: list[PlannedEntry] = []
    stream = at = 0
    for i, region, nbytes in (entry for entries in classes for entry in entries):
        if writes and at + nbytes > max_shard_bytes:
            files.append(FilePlan(len(files), stream, at, tuple(writes)))
            stream, at, writes = stream + at, 0, []
        writes.append(PlannedEntry(i, region, at, nbytes))
        at += nbytes
    if writes or not files:
        files.append(FilePlan(len(files), stream, at, tuple(writes)))
    return SavePlan(rank, tuple(files))


# all ranks ------------------------------------------------------------------------------------------------------------


class ShardedArray(msgspec.Struct, frozen=True):
    """An array of several chunks, or one of each rank. Of each chunk: its writer, its order class, its bytes."""

    ranks: np.ndarray
    owners: Owners
    orders: np.ndarray
    sizes: np.ndarray


class ChunkOffsets(msgspec.Struct, frozen=True):
    """The chunks of one array: their writers, and where each starts in its writer's stream of data bytes.

    For a leaf that each rank has of its own: one number per rank, in the order of the ranks.
    """

    owners: Owners
    starts: np.ndarray


class SingleChunkOffset(msgspec.Struct, frozen=True, gc=False):
    """The chunk of an array that is one chunk: its writer, and where it starts in that rank's stream of data bytes."""

    rank: int
    start: int


def assign_offsets(
    leaves: Sequence[ArrayLeaf], assignments: Sequence[Assignment], world: int
) -> tuple[list[ChunkOffsets | SingleChunkOffset], np.ndarray]:
    """Returns the offsets that every rank's `plan_save` gives to its chunks, without building those plans.

    Two passes over the leaves, vectorised over ranks: the first sums bytes per rank and order class, the second assigns
    offsets.

    Returns:
        (the chunks of each array, bytes that each rank writes: int64[world]).
    """
    singles = single_writer_arrays(leaves, assignments)
    arrays = [
        one or _sharded_array(leaf, assignment)
        for one, leaf, assignment in zip(singles, leaves, assignments, strict=True)
    ]
    # Python integers for arrays with a single writer: numpy on one element costs ten times as much
    sums = [[0] * world for _ in range(ORDER_CLASSES)]
    totals = np.zeros((ORDER_CLASSES, world), np.int64)
    for array in arrays:
        if isinstance(array, SingleWriterArray):
            sums[array.order][array.rank] += array.nbytes
        else:
            np.add.at(totals, (array.orders, array.ranks), array.sizes)
    totals += np.array(sums, np.int64)
    offsets = np.cumsum(totals, axis=0) - totals
    # within a class of a rank, all chunks follow the order of the leaves: a mixture of both kinds is counted in numpy
    if None in singles:
        return _assign_mixed_offsets(arrays, offsets), totals.sum(0)
    free = offsets.tolist()
    assigned: list[ChunkOffsets | SingleChunkOffset] = []
    for array in arrays:
        assert isinstance(array, SingleWriterArray), "there are no others"
        starts = free[array.order]
        assigned.append(SingleChunkOffset(array.rank, starts[array.rank]))
        starts[array.rank] += array.nbytes
    return assigned, totals.sum(0)


def _assign_mixed_offsets(
    arrays: Sequence[SingleWriterArray | ShardedArray], free: np.ndarray
) -> list[ChunkOffsets | SingleChunkOffset]:
    """Assigns offsets from `free[order class, rank]`, the first free offsets, which it advances."""
    assigned: list[ChunkOffsets | SingleChunkOffset] = []
    for array in arrays:
        if isinstance(array, SingleWriterArray):
            assigned.append(SingleChunkOffset(array.rank, int(free[array.order, array.rank])))
            free[array.order, array.rank] += array.nbytes
        else:
            assigned.append(ChunkOffsets(array.owners, _allocate(free, array)))
    return assigned


def _allocate(free: np.ndarray, array: ShardedArray) -> np.ndarray:
    """Returns offsets for the chunks of one array; a rank's second chunk in a class comes after its first."""
    slots = array.orders * free.shape[1] + array.ranks
    flat = free.reshape(-1)
    if np.bincount(array.ranks).max(initial=0) <= 1:
        starts = flat[slots]
        flat[slots] += array.sizes
        return starts
    order = np.argsort(slots, kind="stable")
    starts = np.empty(len(slots), np.int64)
    starts[order] = flat[slots[order]] + _bytes_before(slots[order], array.sizes[order])
    np.add.at(flat, slots, array.sizes)
    return starts


def _sharded_array(leaf: ArrayLeaf, assignment: Assignment) -> ShardedArray:
    if leaf.per_rank is not None:
        ranks = decode_runs(leaf.per_rank)
        sizes = np.full(len(ranks), leaf.nbytes, np.int64)
        owners: Owners = BoxOwners(())
    else:
        owners = owners_of(leaf, assignment)
        if isinstance(owners, BoxOwners):
            ranks = np.array([rank for rank, _ in owners.pieces], np.int64)
            sizes = np.array([region.size for _, region in owners.pieces], np.int64) * leaf.itemsize
        else:
            ranks = owners.ranks
            sizes = np.full(1, leaf.itemsize, np.int64)
            for first, last in zip(owners.starts, owners.stops, strict=True):
                sizes = (sizes[:, None] * (last - first)).reshape(-1)
    return ShardedArray(ranks, owners, order_classes(sizes, leaf.align or leaf.itemsize), sizes)


def stream_offsets(ranks: np.ndarray, classes: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Returns where entries, in the order of the leaves, start in their rank's stream of data bytes: int64[n]."""
    order = np.lexsort((classes, ranks))
    starts = np.empty(len(ranks), np.int64)
    starts[order] = _bytes_before(ranks[order], nbytes[order])
    return starts


def _bytes_before(groups: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the sum of the sizes before each entry in its group; the entries of a group are neighbours."""
    before = np.cumsum(sizes) - sizes
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    return before - np.repeat(before[first], np.diff(np.append(first, len(groups))))
