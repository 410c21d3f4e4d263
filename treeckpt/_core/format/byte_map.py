"""Maps bytes of shards to leaves, regions to ranks, and damaged bytes to the leaves that they make unreadable.

The maps are the inverse of `Index.chunks_of`. A leaf is damaged when any byte is that its checksums cover: damage
counts by blocks, not by elements. Leaves that share storage with a damaged leaf are damaged too, and so are all columns
of a keyed table when one of them is, because its rows belong together.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ...errors import LayoutError, visible
from ..planning.load_plan import Chunk
from ..sharding.dtypes import dtype_of
from ..sharding.int_runs import Runs, decode_runs, length_of
from ..sharding.placements import MeshLayout, held_by, mesh_ranks
from ..sharding.region import Region, intersect
from ..text import bytes_text, count_text, ranks_text
from ..tree.spec import ArraySpec
from ..tree.structure import TABLE_KEYS
from .records import (
    AliasRecord,
    ArrayRecord,
    BoxChunks,
    Disk,
    File,
    GridChunks,
    Index,
    Leaf,
    NoChunks,
    PerRankArrays,
    WholeChunk,
    chunks_in,
    count_chunks,
)


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
    """The rank that wrote the chunk."""
    file: File
    start: int
    """The first byte of the chunk in the file, header included."""
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
    locations: list[ChunkLocation] = []
    for rank in ranks:
        for chunk in index.chunks_of(leaf, region, rank=rank):
            nbytes = chunk.region.size * itemsize
            file, start = index.locate(chunk.rank, chunk.start, chunk.start + nbytes, leaf.path)
            locations.append(ChunkLocation(chunk.region, chunk.rank, file, start, start + nbytes))
    return locations


def extents_in_file(index: Index, file: File, *, empty: bool = False, most: int | None = None) -> list[Extent]:
    """Returns the extents of a shard by offset.

    Args:
        empty: whether arrays without elements are included.
        most: the number of extents, checked after each leaf, above which the shard is refused.

    Raises:
        LayoutError: there are more than `most`.
    """
    extents: list[Extent] = []
    shift = file.header - file.stream
    low, high = file.stream, file.stream + file.nbytes
    for leaf in index.entries:
        if leaf.stored is None:
            continue
        itemsize = dtype_of(leaf.stored.dtype).itemsize
        for chunk in chunks_of_rank(leaf, leaf.stored.shape, file.rank):
            stop = chunk.start + chunk.region.size * itemsize
            if low <= chunk.start and stop <= high and (empty or chunk.start < stop):
                extents.append(Extent(leaf.number, chunk.region, chunk.start + shift, stop + shift))
        if most is not None and len(extents) > most:
            raise LayoutError(file.name, expected=f"a shard of at most {most} chunks", found="more")
    extents.sort(key=lambda extent: extent.start)
    return extents


def chunks_of_rank(leaf: Leaf, shape: tuple[int, ...], rank: int) -> list[Chunk]:
    """Returns the chunks of a leaf that `rank` wrote."""
    record = leaf.record
    if isinstance(record, PerRankArrays):
        position = np.flatnonzero(decode_runs(leaf.ranks or ()) == rank)
        starts = decode_runs(record.start)
        return [
            Chunk(Region.whole(shape), rank, int(starts[number]))
            for number in position.tolist()
            if number < len(starts)
        ]
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


class BadBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start:stop` of a file (header included) that are missing or changed, or could not be read."""

    file: str
    start: int
    stop: int
    why: str
    unread: str = ""
    """The name of the error by which they could not be read, as EIO: nothing is known of them. Else empty."""


class DamagedLeaf(msgspec.Struct, frozen=True, order=True):
    """A leaf that cannot be read, and the damaged bytes of a file that are the cause.

    Attributes:
        path: of the leaf.
        file: its name.
        start: first byte in the file, header included.
        stop: the byte after the last.
    """

    path: str
    file: str
    start: int
    stop: int

    def __str__(self) -> str:
        return visible(f"{self.path or '<root>'}: bytes {self.start}:{self.stop} of {self.file}")


BATCH_CHUNKS = 1 << 20
"""Chunks that are looked up at a time."""


class LeafChunks(NamedTuple):
    """A leaf's chunks as columns."""

    leaf: int
    rank: np.ndarray
    start: Runs
    """Start in the rank's stream."""
    nbytes: np.ndarray


def leaf_chunks(leaf: Leaf, known: dict[object, tuple[np.ndarray, np.ndarray]]) -> LeafChunks | None:
    """Returns the chunks of a leaf, None if it has none.

    Args:
        known: a cache by form of cut, because most leaves are cut as others are.
    """
    record, spec = leaf.record, leaf.stored
    if isinstance(record, PerRankArrays) and spec is not None:
        ranks = decode_runs(leaf.ranks or ())
        return LeafChunks(leaf.number, ranks, record.start, np.full(len(ranks), spec.nbytes, np.int64))
    if not isinstance(record, ArrayRecord) or spec is None or isinstance(record.chunks, NoChunks):
        return None
    chunks = record.chunks
    if isinstance(chunks, BoxChunks):
        return LeafChunks(leaf.number, *_chunk_columns(spec, chunks))
    key = record.spec, chunks.rank, chunks.cuts if isinstance(chunks, GridChunks) else ()
    if key not in known:
        ranks, _, sizes = _chunk_columns(spec, chunks)
        known[key] = ranks, sizes
    start = ((chunks.start,),) if isinstance(chunks, WholeChunk) else chunks.start
    return LeafChunks(leaf.number, known[key][0], start, known[key][1])


class ChunkColumns(NamedTuple):
    """The chunks of all leaves. Most leaves are cut and placed as others are: these have one form."""

    form: np.ndarray
    """Of each leaf the number of its form, int32; -1 without chunks."""
    start: np.ndarray
    """Of each leaf where its first chunk starts in the stream of its rank, int64."""
    ends: np.ndarray
    """Of each form where its chunks end in the columns that follow, int64."""
    rank: np.ndarray
    """Of each chunk of a form its rank, int64."""
    offset: np.ndarray
    """Of each chunk of a form its start in the stream of its rank, less that of the first chunk, int64."""
    nbytes: np.ndarray
    """Of each chunk of a form its bytes, int64."""


def chunk_columns(index: Index, limit: int) -> ChunkColumns | None:
    """Returns the chunks of all leaves; None if there are more than `limit`."""
    if index.listed.total > limit:
        return None
    known: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    forms: dict[tuple[int, int, Runs], tuple[int, LeafChunks]] = {}
    form, starts, count = array("i"), array("q"), 0
    for leaf in index.entries:
        chunks = leaf_chunks(leaf, known)
        if chunks is None or not len(chunks.rank):
            form.append(-1)
            starts.append(0)
            continue
        count += len(chunks.rank)
        if count > limit:
            return None
        first = chunks.start[0][0]
        after = tuple([(run[0] - first, *run[1:]) for run in chunks.start])
        # `known` and the forms keep the columns, and their ids
        number, _ = forms.setdefault((id(chunks.rank), id(chunks.nbytes), after), (len(forms), chunks))
        form.append(number)
        starts.append(first)
    columns = [(chunks.rank, decode_runs(after), chunks.nbytes) for (*_, after), (_, chunks) in forms.items()]
    ends = np.cumsum([len(column) for column, *_ in columns], dtype=np.int64)
    nothing = np.empty(0, np.int64)
    rank, offset, nbytes = (np.concatenate([nothing, *(column[at] for column in columns)]) for at in range(3))
    return ChunkColumns(np.array(form, np.int32), np.array(starts, np.int64), ends, rank, offset, nbytes)


def _chunk_columns(spec: ArraySpec, chunks: WholeChunk | GridChunks | BoxChunks) -> tuple[np.ndarray, Runs, np.ndarray]:
    """Returns (rank, start, bytes) of each chunk."""
    if isinstance(chunks, WholeChunk):
        return np.array([chunks.rank]), ((chunks.start,),), np.array([spec.nbytes])
    sizes = np.full(1, dtype_of(spec.dtype).itemsize)
    if isinstance(chunks, BoxChunks):
        sizes = sizes * np.prod([decode_runs(column) for column in chunks.shape], axis=0, dtype=np.int64)
    else:
        for cut in chunks.cuts:
            sizes = (sizes[:, None] * np.diff(decode_runs(cut))).reshape(-1)
    return decode_runs(chunks.rank), chunks.start, sizes


def leaves_in_range(index: Index, file: File, start: int, stop: int) -> list[int]:
    """Returns the numbers of the leaves in bytes `start:stop` of a file; all its leaves if its header is hit."""
    whole = start < file.header
    return [e.leaf for e in extents_in_file(index, file) if whole or (e.start < stop and e.stop > start)]


def disk_text(index: Index, disk: Disk) -> str:
    """Returns the host of one of the disks of a node-local checkpoint, and what was written there, as text."""
    files = index.disk_files(disk)
    leaves = {number for file in files for number in leaves_in_range(index, file, 0, file.header + file.nbytes)}
    nbytes = bytes_text(sum(file.header + file.nbytes for file in files))
    what = f"{nbytes} of {count_text(len(leaves), 'leaf', 'leaves')}"
    return f"the disk of host {visible(disk.host)}, with {ranks_text(disk.ranks)}: {what}"


def rank_path(path: str, rank: int) -> str:
    """Returns a path of the index as it stands in the shard of one rank."""
    return path.replace("~rank*", f"~rank{rank}")


def damaged_leaves(
    index: Index, bad: Iterable[BadBytes], *, rank: int | None = None
) -> dict[int, tuple[DamagedLeaf, ...]]:
    """Returns the damaged leaves with the bytes that are the cause, by leaf number.

    Args:
        rank: the rank whose state counts under `PerRank`; None counts that of all ranks.
    """
    damaged: dict[int, list[DamagedLeaf]] = {}
    bad = list(bad)
    for part, numbers in zip(bad, _leaves_hit(index, bad), strict=True):
        file = index.file_names[part.file]
        hit: list[int] = numbers.tolist()
        for number in hit:
            leaf = index.entries[number]
            if leaf.ranks is None or rank in (None, file.rank):
                path = leaf.path if rank is not None else rank_path(leaf.path, file.rank)
                damaged.setdefault(number, []).append(DamagedLeaf(path, part.file, part.start, part.stop))
    for first, others in _dependents(index, damaged):
        for other in others:
            new = [msgspec.structs.replace(d, path=index.entries[other].path) for d in damaged[first]]
            damaged[other] = sorted({*damaged.get(other, []), *new})
    return {number: tuple(damaged[number]) for number in sorted(damaged)}


def unreadable_leaves(index: Index, bad: Sequence[BadBytes]) -> list[np.ndarray]:
    """Returns the numbers of the damaged leaves of which each of these bytes are a cause, rising.

    It is what `damaged_leaves` finds, for a million leaves at a time.
    """
    hit = _leaves_hit(index, bad)
    pairs = _dependents(index, np.unique(np.concatenate(hit)).tolist()) if hit else []
    for at, numbers in enumerate(hit) if pairs else ():
        found = set(numbers.tolist())
        for first, others in pairs:
            found.update(others if first in found else ())
        hit[at] = np.array(sorted(found), np.int64)
    return hit


def _leaves_hit(index: Index, bad: Sequence[BadBytes]) -> list[np.ndarray]:
    """Returns the numbers of the leaves in each of these bytes, rising; all of a file's where its header is hit."""
    hit: list[list[np.ndarray]] = [[] for _ in bad]
    wanted: dict[int, list[tuple[int, int, int, File]]] = {}
    for number, part in enumerate(bad):
        file = index.file_names[part.file]
        shift, whole = file.stream - file.header, part.start < file.header
        low, high = (0, file.nbytes + file.header) if whole else (part.start, part.stop)
        wanted.setdefault(file.rank, []).append((low + shift, high + shift, number, file))
    for leaf, rank, start, stop in _chunk_batches(index, np.array(sorted(wanted), np.int64)) if wanted else ():
        for one, ranges in wanted.items():
            ours = np.flatnonzero(rank == one)
            ours = ours[np.argsort(start[ours], kind="stable")]
            starts, stops = start[ours], stop[ours]
            reach = np.maximum.accumulate(stops)
            for low, high, number, file in ranges:
                near = slice(int(np.searchsorted(reach, low, "right")), int(np.searchsorted(starts, high, "left")))
                inside = (starts[near] >= file.stream) & (stops[near] <= file.stream + file.nbytes)
                hit[number].append(leaf[ours[near][inside & (stops[near] > low)]])
    return [np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64) for parts in hit]


def _chunk_batches(index: Index, ranks: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (leaf, rank, start, stop) of the chunks that these ranks wrote, in their streams, without empty ones."""
    known: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    places: dict[int, np.ndarray] = {}  # of the cached columns, where these ranks are
    rows: list[tuple[np.ndarray, ...]] = []
    count = 0
    for entry in index.entries:
        chunks = leaf_chunks(entry, known)
        if chunks is None:
            continue
        if (at := places.get(id(chunks.rank))) is None:
            at = np.flatnonzero(np.isin(chunks.rank, ranks) & (chunks.nbytes > 0))
            if isinstance(entry.record, ArrayRecord) and not isinstance(entry.record.chunks, BoxChunks):
                places[id(chunks.rank)] = at  # `known` keeps the column, and its id
        if not len(at):
            continue
        start = decode_runs(chunks.start)
        at = at[at < len(start)]
        start = start[at]
        rows.append((np.full(len(at), chunks.leaf), chunks.rank[at], start, start + chunks.nbytes[at]))
        count += len(at)
        if count >= BATCH_CHUNKS:
            yield _columns(rows)
            rows, count = [], 0
    if rows:
        yield _columns(rows)


def _columns(rows: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    leaf, rank, start, stop = (np.concatenate(column) for column in zip(*rows, strict=True))
    return leaf, rank, start, stop


def _dependents(index: Index, damaged: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Returns for each damaged leaf those that are damaged with it."""
    known = set(damaged)
    pairs = [(number, columns) for columns in _table_leaves(index) for number in columns if number in known]
    # with the columns of tables: an alias of one that is damaged only with its table is damaged too
    reached = known | {number for _, columns in pairs for number in columns}
    aliases: dict[int, list[int]] = {}
    for leaf in index.entries:
        if isinstance(leaf.record, AliasRecord) and leaf.record.of in reached:
            aliases.setdefault(leaf.record.of, []).append(leaf.number)
    return pairs + list(aliases.items())


def _table_leaves(index: Index) -> list[list[int]]:
    """Returns the numbers of the leaves of each keyed table."""
    if not index.tables:
        return []
    numbers = {key: number for number, key in enumerate(index.paths)}
    tables: list[list[int]] = []
    for ids in index.tables:
        path, ranks = index.paths[ids]
        prefix = path.removesuffix(TABLE_KEYS[0])
        slots = prefix + TABLE_KEYS[2] + "/"
        columns = [numbers[prefix + key, ranks] for key in TABLE_KEYS[:2] if (prefix + key, ranks) in numbers]
        tables.append(columns + [n for (p, r), n in numbers.items() if r == ranks and p.startswith(slots)])
    return tables
