"""The save plan of one rank: its files, and the entries of each.

`plan_save` puts the entries in the order of `core.planning.stream_order`, whose `assign_offsets` gives every rank's
offsets at once, for the index.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..sharding.region import Region
from ..sharding.write_assignment import ArrayLeaf, Assignment, writes_of
from .stream_order import ORDER_CLASSES, order_class, single_writer_arrays

__all__ = ["FilePlan", "PlannedEntry", "SavePlan", "plan_save"]


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
