"""The records of an index: one for each leaf and each file, and look-ups of leaves, chunks and bytes.

Leaves are in the order of the tree's structure. No file name is stored: names follow from the save id, so that none can
point to another file. The start of a chunk in its rank's stream of data bytes determines which of the rank's files
holds it.

The chunks of an array are stored as one chunk, a grid of cuts, or a list of boxes, with columns of writing ranks and of
starts that are run-length coded. Only `encode_chunks` chooses the form, the smallest one, so that a plan and the
headers of the shards give equal records. `chunks_in` finds the chunks of a region, or of a rank, without expanding the
others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ...errors import FormatError, MismatchError
from ..html import el, facts, joined, table
from ..planning.load_plan import Chunk
from ..planning.rank_trees import GlobalTree, LeafSpec
from ..planning.save_plan import BoxOwners, ChunkOffsets, GridOwners, SingleChunkOffset, grid_of
from ..sharding.int_runs import Runs, decode_runs, encode_runs, length_of, value_at
from ..sharding.placements import Layout, MeshLayout, Replicate
from ..sharding.region import Region
from ..text import bytes_text, count_text, shape_text
from ..tree.spec import BLOB_KINDS, ArraySpec, StridedView, TableSpec
from ..tree.structure import Structure, paths_of, tables_of
from ..tree.value_codec import Value, decode_value
from .files import Sidecar
from .lineage import Lineage
from .references import Home, References, SharedFile
from .shard_header import parse_shard_name, shard_name


class WholeChunk(msgspec.Struct, frozen=True, tag="w", array_like=True, gc=False):
    """One chunk that holds the whole array."""

    rank: int
    start: int


class GridChunks(msgspec.Struct, frozen=True, tag="g", array_like=True):
    """A grid: `cuts[d]` are the borders along dimension d, with 0 and the size; columns are in row-major order."""

    cuts: tuple[Runs, ...]
    rank: Runs
    start: Runs


class BoxChunks(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """A list of boxes: one column for each dimension of the offsets and of the shapes."""

    offset: tuple[Runs, ...]
    shape: tuple[Runs, ...]
    rank: Runs
    start: Runs


class NoChunks(msgspec.Struct, frozen=True, tag="n", array_like=True):
    """Not placed yet: in the manifest, which the coordinator's shard holds."""


class DeferredChunks(NoChunks, frozen=True):
    """Chunks whose places are found when they are first asked for; in memory only, never in a file."""

    find: Any = None
    """Takes a region, or None for all; returns the chunks that share an element with it."""
    count: int = 0


Chunks = WholeChunk | GridChunks | BoxChunks | NoChunks


def chunks_in(
    chunks: Chunks, shape: tuple[int, ...], region: Region | None = None, *, rank: int | None = None
) -> list[Chunk]:
    """Returns the chunks of an array of `shape`.

    Args:
        region: keeps only the chunks that share an element with it.
        rank: keeps only the chunks that this rank wrote; used without `region`.
    """
    if isinstance(chunks, WholeChunk):
        wanted = rank is None or rank == chunks.rank
        return [Chunk(Region.whole(shape), chunks.rank, chunks.start)] if wanted else []
    if isinstance(chunks, DeferredChunks):
        return [chunk for chunk in chunks.find(region) if rank in (None, chunk.rank)]
    if isinstance(chunks, NoChunks):
        return []
    written = None if rank is None else np.flatnonzero(decode_runs(chunks.rank) == rank)
    if written is not None and not len(written):
        return []
    if isinstance(chunks, GridChunks):
        return _grid_chunks(chunks, region, written)
    return _box_chunks(chunks, region, written)


def count_chunks(chunks: Chunks) -> int:
    """Counts the chunks of an array without building them."""
    if isinstance(chunks, WholeChunk):
        return 1
    if isinstance(chunks, GridChunks):
        return math.prod(length_of(cut) - 1 for cut in chunks.cuts)
    if isinstance(chunks, DeferredChunks):
        return chunks.count
    return length_of(chunks.rank) if isinstance(chunks, BoxChunks) else 0


def _grid_chunks(chunks: GridChunks, region: Region | None, cells: np.ndarray | None) -> list[Chunk]:
    """Returns the chunks of the given cells, or of those that share an element with `region`."""
    cuts = [decode_runs(c) for c in chunks.cuts]
    counts = [len(c) - 1 for c in cuts]
    if cells is None:
        cells = np.zeros(1, np.int64)
        for d, cut in enumerate(cuts):
            first, last = 0, counts[d]
            if region is not None:
                first = max(int(np.searchsorted(cut, region.offset[d], side="right")) - 1, 0)
                last = min(int(np.searchsorted(cut, region.offset[d] + region.shape[d], side="left")), last)
            cells = (cells[:, None] * counts[d] + np.arange(first, last)).reshape(-1)
    total = math.prod(counts)
    ranks, starts = _lookup(chunks.rank, cells, total), _lookup(chunks.start, cells, total)
    bounds = [c.tolist() for c in cuts]
    boxes: list[Chunk] = []
    for cell, rank, start in zip(cells.tolist(), ranks, starts, strict=True):
        offset: list[int] = []
        shape: list[int] = []
        for d in reversed(range(len(cuts))):
            cell, i = divmod(cell, counts[d])
            offset.append(bounds[d][i])
            shape.append(bounds[d][i + 1] - bounds[d][i])
        boxes.append(Chunk(Region(tuple(reversed(offset)), tuple(reversed(shape))), rank, start))
    return boxes


def _lookup(runs: Runs, cells: np.ndarray, total: int) -> list[int]:
    # single lookups take about (8 + runs) steps each, expanding the column about one step for each number
    if len(cells) * (8 + len(runs)) < total:
        return [value_at(runs, cell) for cell in cells.tolist()]
    return decode_runs(runs)[cells].tolist()


def _box_chunks(chunks: BoxChunks, region: Region | None, rows: np.ndarray | None) -> list[Chunk]:
    """Returns the chunks of the given rows, or of those that share an element with `region`."""
    ranks, starts = decode_runs(chunks.rank), decode_runs(chunks.start)
    offsets = np.stack([decode_runs(c) for c in chunks.offset], 1) if chunks.offset else np.empty((len(ranks), 0), int)
    shapes = np.stack([decode_runs(c) for c in chunks.shape], 1) if chunks.shape else offsets
    keep = np.arange(len(ranks)) if rows is None else rows
    if region is not None:
        low, high = np.array(region.offset), np.array(region.stop)
        keep = np.flatnonzero(((offsets < high) & (offsets + shapes > low)).all(1))
    columns = (column[keep].tolist() for column in (offsets, shapes, ranks, starts))
    return [Chunk(Region(tuple(o), tuple(s)), r, a) for o, s, r, a in zip(*columns, strict=True)]


def encode_chunks(shape: tuple[int, ...], placed: ChunkOffsets | SingleChunkOffset) -> Chunks:
    """Encodes an array's chunks: as one chunk, as a grid where the regions form one, else as boxes."""
    if isinstance(placed, SingleChunkOffset):
        return WholeChunk(placed.rank, placed.start)
    owners, starts = placed.owners, placed.starts
    if isinstance(owners, BoxOwners):
        pieces = owners.pieces
        if len(pieces) == 1 and pieces[0][1].is_whole(shape):
            return WholeChunk(pieces[0][0], int(starts[0]))
        offsets = np.array([region.offset for _, region in pieces], np.int64)
        shapes = np.array([region.shape for _, region in pieces], np.int64)
        return encode_boxes(shape, offsets, shapes, np.array([rank for rank, _ in pieces], np.int64), starts)
    return _encode_grid(shape, owners, starts)


def encode_boxes(
    shape: tuple[int, ...], offsets: np.ndarray, shapes: np.ndarray, ranks: np.ndarray, starts: np.ndarray
) -> Chunks:
    """Encodes disjoint boxes, sorted by offset: as a grid where they form one.

    Args:
        offsets, shapes: int64[n, ndim].
        ranks, starts: int64[n].
    """
    grid = grid_of(shape, offsets, offsets + shapes) if shape and len(offsets) else None
    if grid is not None:
        return _encode_grid(shape, GridOwners(tuple(grid[0]), tuple(grid[1]), ranks), starts)
    return BoxChunks(
        tuple(encode_runs(column) for column in offsets.T),
        tuple(encode_runs(column) for column in shapes.T),
        encode_runs(ranks),
        encode_runs(starts),
    )


def _encode_grid(shape: tuple[int, ...], owners: GridOwners, starts: np.ndarray) -> Chunks:
    if len(owners.ranks) == 1:
        return WholeChunk(int(owners.ranks[0]), int(starts[0]))
    cuts = tuple(encode_runs(np.append(first, size)) for first, size in zip(owners.starts, shape, strict=True))
    return GridChunks(cuts, encode_runs(owners.ranks), encode_runs(starts))


NOTEBOOK_ROWS = 12
"""Arrays that the index shows in a notebook."""


class ArrayRecord(msgspec.Struct, frozen=True, tag="a", array_like=True, gc=False):
    """An array: the numbers of its spec and its layout (-1 for explicit pieces), and its chunks."""

    spec: int
    layout: int
    chunks: Chunks


class AliasRecord(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """A leaf that shares the storage of the leaf with number `of`: the same array, or a view of it."""

    spec: int
    of: int
    view: StridedView | None = None


class ValueRecord(msgspec.Struct, frozen=True, tag="v", array_like=True, gc=False):
    """A Python value."""

    value: Value


class PerRankArrays(msgspec.Struct, frozen=True, tag="pa", array_like=True):
    """One array of the same spec for each rank of the leaf's group."""

    spec: int
    start: Runs


class PerRankValues(msgspec.Struct, frozen=True, tag="pv", array_like=True):
    """One value for each rank of the leaf's group."""

    values: tuple[Value, ...]


class BlobRecord(ArrayRecord, frozen=True, tag="x", gc=False):
    """A long text or bytes: a value whose bytes are stored as those of an array. The kind of its spec is its type."""


class PerRankBlobs(PerRankArrays, frozen=True, tag="px"):
    """One blob of the same spec for each rank of the leaf's group."""


LeafRecord = ArrayRecord | AliasRecord | ValueRecord | PerRankArrays | PerRankValues | BlobRecord | PerRankBlobs


def specs_of(record: LeafRecord, specs: Sequence[ArraySpec]) -> tuple[ArraySpec | None, ArraySpec | None]:
    """Returns the spec of the array that a leaf is, and that of the bytes that are stored of it; None for none."""
    if isinstance(record, (ValueRecord, PerRankValues)):
        return None, None
    stored = specs[record.spec]
    return (None if isinstance(record, (BlobRecord, PerRankBlobs)) else stored), stored


class FileTable(msgspec.Struct, frozen=True):
    """One row for each shard, sorted by rank and part, as columns."""

    rank: Runs = ()
    part: Runs = ()
    stream: Runs = ()
    """The start of each file in its rank's stream of data bytes."""
    nbytes: Runs = ()
    """Bytes of the data area of each file."""
    header: Runs = ()
    """Bytes before the data area of each file."""


class File(msgspec.Struct, frozen=True):
    """One row of the file table, with its name."""

    name: str
    rank: int
    part: int
    stream: int
    nbytes: int
    header: int
    directory: str = ""
    """The directory of the run in which it lies, where that is not the checkpoint's own; see `references`."""


class Disk(msgspec.Struct, frozen=True, array_like=True):
    """One of several disks that have the same path on different hosts, each with the files of the ranks that saw it.

    Attributes:
        host: the name of the host of its lowest rank.
        ranks: the ranks that wrote there, rising, as runs.
        leader: the lowest rank, which publishes the index there.
    """

    host: str
    ranks: Runs

    @property
    def leader(self) -> int:
        """The lowest rank."""
        return value_at(self.ranks, 0)


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A leaf of the index with its path. `ranks` is set under `PerRank`, where the path contains `~rank*`."""

    number: int
    path: str
    record: LeafRecord
    ranks: Runs | None
    spec: ArraySpec | None
    """The spec of an array; None for values, blobs among them."""
    stored: ArraySpec | None
    """The spec of the bytes in shards: that of an array, of a blob uint8[n], and None for other values."""

    @property
    def as_array(self) -> Leaf:
        """The leaf by whose spec the stored bytes are read as those of an array: of a blob as uint8[n]."""
        return self if self.spec is self.stored else msgspec.structs.replace(self, spec=self.stored)

    @property
    def nbytes(self) -> int:
        """Stored bytes, under `PerRank` of all ranks' arrays; 0 for values that are in the index, and for aliases."""
        if self.stored is None or isinstance(self.record, AliasRecord):
            return 0
        return self.stored.nbytes * (length_of(self.ranks or ()) if isinstance(self.record, PerRankArrays) else 1)


def _copies(layout: Layout) -> int:
    """Returns the number of replicas of each region."""
    if not isinstance(layout, MeshLayout):
        return 1
    pairs = zip(layout.mesh.shape, layout.placements, strict=False)
    return math.prod(size for size, placement in pairs if isinstance(placement, Replicate))


class IndexCounts(msgspec.Struct, frozen=True):
    """Numbers of entries of an index, counted without expanding it: a run of a few bytes can stand for millions."""

    files: int
    most: int
    """The largest number of chunks of one array, or of ranks of one leaf under `PerRank`."""
    total: int
    """The sum over all leaves, without arrays of one chunk and values, which are not coded as runs."""


# `dict` gives room for the cached properties
class Index(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, omit_defaults=True):
    """All metadata of a checkpoint: what is known without opening a shard.

    >>> index = tc.inspect("run/step_00000100")
    >>> [leaf] = index.by_path["model/weight"]
    >>> leaf.spec.shape, leaf.spec.dtype, index.world, index.nbytes
    ((2, 4), 'float32', 1, 40)
    >>> [chunk] = index.chunks_of(leaf)
    >>> file, at = index.locate(chunk.rank, chunk.start, chunk.start + leaf.nbytes, leaf.path)

    Attributes:
        save_id: the random id of the save.
        step: of training.
        created_ns: Unix time at which the save began, in nanoseconds, by the coordinator's clock.
        world: number of ranks that saved.
        structure: the containers of the tree.
        specs: shapes and dtypes, to which leaves refer by number.
        layouts: of arrays over ranks, to which leaves refer by number.
        leaves: a record for each leaf, in the tree's order; `entries` has them with their paths.
        files: the shards; `file_list` has them one by one.
        metadata: metadata of the user.
        lineage: set for a checkpoint that a manager saved.
        sidecars: files that were saved with it; `treeckpt.read_file` reads one.
        disks: of a node-local checkpoint, whose shards lie at one path on the private disks of several hosts: the disks
            in the order of their lowest ranks. Each has the same index and all sidecar files. Empty for any other.
        references: of an incremental save: which of the shards lie in the directories of other checkpoints of the run.
    """

    save_id: str
    step: int | None
    created_ns: int
    world: int
    structure: Structure
    specs: tuple[ArraySpec, ...]
    layouts: tuple[Layout, ...]
    leaves: tuple[LeafRecord, ...]
    files: FileTable
    metadata: dict[str, Value]
    lineage: Lineage | None = None
    sidecars: tuple[Sidecar, ...] = ()
    disks: tuple[Disk, ...] = ()
    references: References | None = None

    @property
    def file_kind(self) -> str:
        """What one of its files is, in messages."""
        return "shard"

    @property
    def custom_metadata(self) -> dict[str, Any]:
        """What `save` was given as `custom_metadata`, as plain values."""
        return {key: decode_value(value, f"custom_metadata/{key}") for key, value in self.metadata.items()}

    @cached_property
    def paths(self) -> list[tuple[str, Runs | None]]:
        """The path of each leaf in the tree's order; under `PerRank` with the ranks that it stands for."""
        return paths_of(self.structure)

    @cached_property
    def entries(self) -> tuple[Leaf, ...]:
        """Every leaf with its path, in the tree's order."""
        leaves: list[Leaf] = []
        for number, ((path, ranks), record) in enumerate(zip(self.paths, self.leaves, strict=True)):
            leaves.append(Leaf(number, path, record, ranks, *specs_of(record, self.specs)))
        return tuple(leaves)

    @cached_property
    def by_path(self) -> dict[str, tuple[Leaf, ...]]:
        """Leaves by path; several only under `PerRank`, one for each group of ranks."""
        leaves_of: dict[str, tuple[Leaf, ...]] = {}
        groups: dict[str, list[Leaf]] = {}
        for leaf in self.entries:
            leaves_of[leaf.path] = (leaf,)
            if leaf.ranks is not None:
                groups.setdefault(leaf.path, []).append(leaf)
        leaves_of.update((path, tuple(leaves)) for path, leaves in groups.items())
        return leaves_of

    @cached_property
    def listed(self) -> IndexCounts:
        """The number of entries, counted without expanding them."""
        most = total = 0
        for record, (_, ranks) in zip(self.leaves, self.paths, strict=True):
            if ranks is None:
                if not isinstance(record, ArrayRecord) or type(record.chunks) is WholeChunk:
                    continue
                count = count_chunks(record.chunks)
            elif type(record) is PerRankValues:
                continue
            else:
                count = length_of(ranks)
            most, total = max(most, count), total + count
        return IndexCounts(length_of(self.files.rank), most, total)

    @cached_property
    def tables(self) -> dict[int, TableSpec]:
        """The spec of each keyed table, by the leaf number of its ids."""
        by_key = tables_of(self.structure)
        return {number: by_key[key] for number, key in enumerate(self.paths) if key in by_key} if by_key else {}

    @cached_property
    def offsets(self) -> frozenset[int]:
        """Numbers of the leaves that hold the offsets of tables' buckets, which are no part of the tree itself."""
        return frozenset(number + 1 for number in self.tables)  # they follow the ids

    @cached_property
    def file_list(self) -> tuple[File, ...]:
        """Every shard, by rank and part."""
        columns = [decode_runs(c).tolist() for c in msgspec.structs.astuple(self.files)]
        own, parts = self.save_id, columns[1]
        places = [(None, part) for part in parts] if self.references is None else self.references.places(parts)
        return tuple(
            File(
                shard_name(home.save_id if home else own, rank, self.world, there),
                rank,
                *row,
                directory=home.directory if home else "",
            )
            for (home, there), (rank, *row) in zip(places, zip(*columns, strict=True), strict=True)
        )

    @property
    def own_files(self) -> list[File]:
        """The shards in the checkpoint's own directory."""
        return [file for file in self.file_list if not file.directory]

    @cached_property
    def shared_names(self) -> dict[str, str]:
        """The directory of each shard that lies in that of another checkpoint of the run, by the shard's name."""
        if self.references is None or not self.references.homes:
            return {}
        return {file.name: file.directory for file in self.file_list if file.directory}

    def shared_of(self, rank: int) -> list[SharedFile]:
        """Returns the shards of a rank that lie in the directories of other checkpoints, in the order of its stream."""
        found: list[SharedFile] = []
        for file in self.files_of(rank) if self.shared_names else ():
            if file.directory and (named := parse_shard_name(file.name)) is not None:
                home = Home(file.directory, named[0])
                found.append(SharedFile(home, named[3], file.part, file.stream, file.nbytes, file.header))
        return found

    @cached_property
    def shared_with(self) -> dict[str, int]:
        """Bytes of the files of this checkpoint in the directory of each other checkpoint of the run, by its name."""
        found: dict[str, int] = {}
        for file in self.file_list if self.shared_names else ():
            if file.directory:
                found[file.directory] = found.get(file.directory, 0) + file.header + file.nbytes
        return dict(sorted(found.items()))

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the arrays that lie in the directories of other checkpoints of the run."""
        return sum(file.nbytes for file in self.file_list if file.directory) if self.shared_names else 0

    @cached_property
    def file_names(self) -> dict[str, File]:
        """Every shard by its name."""
        return {file.name: file for file in self.file_list}

    @cached_property
    def _files_by_rank(self) -> dict[int, list[File]]:
        by_rank: dict[int, list[File]] = {}
        for file in self.file_list:
            by_rank.setdefault(file.rank, []).append(file)
        return by_rank

    @property
    def nbytes(self) -> int:
        """Stored bytes of all arrays."""
        return sum(run[0] if len(run) == 1 else int(decode_runs((run,)).sum()) for run in self.files.nbytes)

    @property
    def held_nbytes(self) -> int:
        """Bytes of arrays that all ranks together held: replicas count on every rank.

        For explicit pieces it is not recorded which other ranks held them, so they count once.
        """
        sizes = [spec.nbytes for spec in self.specs]
        copies = [_copies(layout) for layout in self.layouts]
        total = 0
        for record in self.leaves:
            if isinstance(record, ArrayRecord):
                total += sizes[record.spec] * (copies[record.layout] if record.layout >= 0 else 1)
            elif isinstance(record, PerRankArrays):
                total += sizes[record.spec] * length_of(record.start)
        return total

    def _repr_html_(self) -> str:
        """Shows in a notebook the checkpoint's facts and its largest arrays."""
        stored = (leaf for leaf in self.entries if not isinstance(leaf.record, AliasRecord))
        arrays = [(leaf.path, leaf.spec) for leaf in stored if leaf.spec is not None]
        arrays.sort(key=lambda pair: -pair[1].nbytes)
        rows = [
            (path, spec.dtype, shape_text(spec.shape), bytes_text(spec.nbytes)) for path, spec in arrays[:NOTEBOOK_ROWS]
        ]
        more = len(arrays) - NOTEBOOK_ROWS
        about = [
            ("step", self.step),
            ("save id", self.save_id),
            ("ranks", self.world),
            ("leaves", len(self.leaves)),
            ("size", f"{bytes_text(self.nbytes)} in {count_text(len(self.file_list), self.file_kind)}"),
        ]
        rest = el("p", f"and {count_text(more, 'smaller array')}") if more > 0 else None
        return joined([facts(about), table(("path", "dtype", "shape", "size"), rows, right=("size",)), rest])

    def files_of(self, rank: int) -> Sequence[File]:
        """Returns the shards of one rank in the order of its stream."""
        return self._files_by_rank.get(rank, ())

    def disk_files(self, disk: Disk) -> list[File]:
        """Returns the shards that lie on one of the `disks`."""
        return [file for rank in decode_runs(disk.ranks).tolist() for file in self.files_of(rank)]

    def leader_files(self, leader: int) -> list[File]:
        """Returns the shards on the disk of a leader, which are all of its own where there is one disk."""
        return next((self.disk_files(disk) for disk in self.disks if disk.leader == leader), self.own_files)

    def disk_of(self, rank: int) -> Disk:
        """Returns the one of the `disks` of a node-local checkpoint on which a rank wrote."""
        return next(disk for disk in self.disks if rank in decode_runs(disk.ranks))

    def disks_elsewhere(self, present: Container[str]) -> tuple[Disk, ...]:
        """Returns those of the `disks` of which no shard is among the files with these names."""
        return tuple(d for d in self.disks if not any(file.name in present for file in self.disk_files(d)))

    def locate(self, rank: int, start: int, stop: int, path: str) -> tuple[File, int]:
        """Finds the file that holds bytes `start:stop` of a rank's stream, and their offset in it (header included).

        Raises:
            FormatError: no file holds these bytes.
        """
        files = self.files_of(rank)
        which = bisect_right(files, start, key=lambda file: file.stream) - 1
        # an empty file may start where its neighbour does
        if which >= 0 and start >= 0 and stop <= files[which].stream + files[which].nbytes and start <= stop:
            return files[which], files[which].header + start - files[which].stream
        raise FormatError(
            path,
            expected=f"bytes inside the files of rank {rank}",
            found=f"{start}:{stop}",
            hint="The index does not describe these shards; try treeckpt verify --repair",
        )

    def chunks_of(self, leaf: Leaf, region: Region | None = None, *, rank: int | None = None) -> list[Chunk]:
        """Returns the chunks of an array or a blob, or those that share an element with `region`.

        Args:
            rank: the rank whose array is meant, for a leaf under `PerRank`.
        """
        record, spec = leaf.record, leaf.stored
        if isinstance(record, AliasRecord):
            base = self.entries[record.of]
            # a region of a view is no region of its array
            return self.chunks_of(base, region if record.view is None else None, rank=rank)
        if spec is None:
            return []
        if isinstance(record, PerRankArrays):
            positions = np.flatnonzero(decode_runs(leaf.ranks or ()) == (-1 if rank is None else rank))
            if rank is None or not len(positions):
                raise MismatchError(
                    leaf.path,
                    expected="a rank that has an array of its own here",
                    found="no rank" if rank is None else f"rank {rank}",
                )
            return [Chunk(Region.whole(spec.shape), rank, value_at(record.start, int(positions[0])))]
        assert isinstance(record, ArrayRecord), "values have no spec"
        return chunks_in(record.chunks, spec.shape, region)


def file_table(rows: Iterable[tuple[int, int, int, int, int]]) -> FileTable:
    """Builds the table from rows (rank, part, stream, nbytes, header) in any order."""
    table = np.array(sorted(rows), np.int64).reshape(-1, 5)
    return FileTable(*(encode_runs(column) for column in table.T))


PerRankKey = tuple[str, int]
"""The (path with `~rank*`, rank) of what a rank has of its own."""


def build_index(
    tree: GlobalTree,
    placed: Mapping[int, ChunkOffsets | SingleChunkOffset] | None,
    files: FileTable,
    *,
    values: Mapping[str, Value],
    own_values: Mapping[PerRankKey, Value],
    save_id: str,
    step: int | None,
    created_ns: int,
    metadata: Mapping[str, Value],
    lineage: Lineage | None = None,
) -> Index:
    """Builds the index.

    Args:
        placed: the chunks of each array by leaf number; None gives the manifest, an index before placement.
        values: values of the leaves that ranks share, by path.
        own_values: values of the leaves under `PerRank`, by path and rank.
    """
    specs: dict[ArraySpec, int] = {}
    layouts: dict[MeshLayout, int] = {}
    numbers = {leaf.path: n for n, leaf in enumerate(tree.leaves) if leaf.per_rank is None}
    # most leaves share the same spec and layout objects: records are found by identity, without hashing
    blanks: dict[tuple[int, int], ArrayRecord] = {}
    records: list[LeafRecord] = []
    for n, leaf in enumerate(tree.leaves):
        if leaf.spec is None:
            records.append(_value_record(leaf, values, own_values))
        elif leaf.alias_of is not None:
            base = _alias_base(tree, numbers, n, leaf)
            records.append(AliasRecord(specs.setdefault(leaf.spec, len(specs)), base, leaf.view))
        elif leaf.per_rank is not None:
            own = placed[n] if placed is not None else None
            starts = encode_runs(own.starts) if isinstance(own, ChunkOffsets) else ()
            records.append(_record_type(leaf.spec)[1](specs.setdefault(leaf.spec, len(specs)), starts))
        else:
            blank = blanks.get((id(leaf.spec), id(leaf.layout)))
            if blank is None:
                mesh = leaf.layout if isinstance(leaf.layout, MeshLayout) else None
                layout = -1 if mesh is None else layouts.setdefault(mesh, len(layouts))
                blank = _record_type(leaf.spec)[0](specs.setdefault(leaf.spec, len(specs)), layout, NoChunks())
                blanks[id(leaf.spec), id(leaf.layout)] = blank
            if placed is not None:
                blank = type(blank)(blank.spec, blank.layout, encode_chunks(leaf.spec.shape, placed[n]))
            records.append(blank)
    return Index(
        save_id=save_id,
        step=step,
        created_ns=created_ns,
        world=tree.world,
        structure=tree.structure,
        specs=tuple(specs),
        layouts=tuple(layouts),
        leaves=tuple(records),
        files=files,
        metadata=dict(metadata),
        lineage=lineage,
    )


def _record_type(spec: ArraySpec) -> tuple[type[ArrayRecord], type[PerRankArrays]]:
    """Returns the classes of the records of what is stored by such a spec: of all ranks, and of each rank."""
    return (BlobRecord, PerRankBlobs) if spec.kind in BLOB_KINDS else (ArrayRecord, PerRankArrays)


def _value_record(leaf: LeafSpec, values: Mapping[str, Value], own_values: Mapping[PerRankKey, Value]) -> LeafRecord:
    if leaf.per_rank is None:
        return ValueRecord(values[leaf.path])
    ranks: list[int] = decode_runs(leaf.per_rank).tolist()
    return PerRankValues(tuple(own_values[leaf.path, rank] for rank in ranks))


def _alias_base(tree: GlobalTree, numbers: Mapping[str, int], number: int, leaf: LeafSpec) -> int:
    """Returns the number of the array whose storage a leaf shares; under `PerRank`, of the same group of ranks."""
    assert leaf.alias_of is not None, "called for aliases only"
    if leaf.per_rank is None:
        return numbers[leaf.alias_of]
    return min(
        (n for n, other in enumerate(tree.leaves) if other.path == leaf.alias_of and other.per_rank == leaf.per_rank),
        key=lambda n: abs(n - number),
    )
