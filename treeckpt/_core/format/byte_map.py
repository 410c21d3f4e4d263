"""Maps bytes of shards to leaves and regions to ranks: the inverse of `Index.chunks_of`."""

from __future__ import annotations

import msgspec
import numpy as np

from ...errors import LayoutError
from ..planning.load_plan import Chunk
from ..sharding.dtypes import dtype_of
from ..sharding.int_runs import decode_runs, length_of
from ..sharding.placements import MeshLayout, held_by, mesh_ranks
from ..sharding.region import Region, intersect
from .chunks import chunks_in, count_chunks
from .records import AliasRecord, ArrayRecord, File, Index, Leaf, PerRankArrays


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Bytes `start:stop` of a file (header included), and the region of a leaf that they hold."""

    leaf: int
    region: Region
    start: int
    stop: int


class ChunkLocation(msgspec.Struct, frozen=True):
    """A chunk, and the file and bytes that hold it."""

    region: Region
    rank: int
    """The rank that wrote it."""
    file: File
    start: int
    """First byte in the file, header included."""
    stop: int


def locate_chunks(index: Index, leaf: Leaf, region: Region | None = None) -> list[ChunkLocation]:
    """Returns the chunks of a leaf with their bytes; for a leaf under `PerRank`, one chunk of each rank.

    Args:
        region: keeps only the chunks that share an element with it.

    Raises:
        FormatError: the index names bytes that are in no file.
    """
    leaf = index.entries[leaf.record.of] if isinstance(leaf.record, AliasRecord) else leaf
    if leaf.stored is None:
        return []
    ranks = decode_runs(leaf.ranks or ()).tolist() if isinstance(leaf.record, PerRankArrays) else [None]
    itemsize = dtype_of(leaf.stored.dtype).itemsize
    found: list[ChunkLocation] = []
    for rank in ranks:
        for chunk in index.chunks_of(leaf, region, rank=rank):
            nbytes = chunk.region.size * itemsize
            file, start = index.locate(chunk.rank, chunk.start, chunk.start + nbytes, leaf.path)
            found.append(ChunkLocation(chunk.region, chunk.rank, file, start, start + nbytes))
    return found


def extents_in_file(index: Index, file: File, *, empty: bool = False, most: int | None = None) -> list[Extent]:
    """Returns the extents of a shard by offset.

    Args:
        empty: whether arrays without elements are included.
        most: the number of extents, checked after each leaf, above which the shard is refused.

    Raises:
        LayoutError: there are more than `most`.
    """
    found: list[Extent] = []
    shift = file.header - file.stream
    low, high = file.stream, file.stream + file.nbytes
    for leaf in index.entries:
        if leaf.stored is None:
            continue
        itemsize = dtype_of(leaf.stored.dtype).itemsize
        for chunk in _chunks_of_rank(leaf, leaf.stored.shape, file.rank):
            stop = chunk.start + chunk.region.size * itemsize
            if low <= chunk.start and stop <= high and (empty or chunk.start < stop):
                found.append(Extent(leaf.number, chunk.region, chunk.start + shift, stop + shift))
        if most is not None and len(found) > most:
            raise LayoutError(file.name, expected=f"a shard of at most {most} chunks", found="more")
    found.sort(key=lambda extent: extent.start)
    return found


def _chunks_of_rank(leaf: Leaf, shape: tuple[int, ...], rank: int) -> list[Chunk]:
    """Returns the chunks of a leaf that `rank` wrote."""
    record = leaf.record
    if isinstance(record, PerRankArrays):
        position = np.flatnonzero(decode_runs(leaf.ranks or ()) == rank)
        starts = decode_runs(record.start)
        return [Chunk(Region.whole(shape), rank, int(starts[at])) for at in position.tolist() if at < len(starts)]
    return chunks_in(record.chunks, shape, rank=rank) if isinstance(record, ArrayRecord) else []


def chunk_count(leaf: Leaf) -> int:
    """Counts the chunks of a leaf without building them."""
    if isinstance(leaf.record, PerRankArrays):
        return length_of(leaf.ranks or ())
    return count_chunks(leaf.record.chunks) if isinstance(leaf.record, ArrayRecord) else 0


def layout_of(index: Index, leaf: Leaf) -> MeshLayout | None:
    """Returns the mesh and placements of an array; None for arrays of explicit pieces, and for other leaves."""
    record = leaf.record
    if not isinstance(record, ArrayRecord) or not 0 <= record.layout < len(index.layouts):
        return None
    layout = index.layouts[record.layout]
    return layout if isinstance(layout, MeshLayout) else None


def holders_of(layout: MeshLayout, shape: tuple[int, ...], region: Region) -> list[int]:
    """Returns the ranks that held all of a region when it was saved, in one piece or several, in the mesh's order."""
    holders: list[int] = []
    for rank in mesh_ranks(layout.mesh).tolist():
        parts = (intersect(held.region, region) for held in held_by(layout, shape, rank))  # disjoint
        if sum(part.size for part in parts if part is not None) == region.size:
            holders.append(rank)
    return holders
