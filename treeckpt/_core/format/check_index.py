"""Checks that a decoded index is consistent, before anything is expanded or allocated because of it.

Every number that a reader uses as a size, a position or a rank is bounded here; columns are checked by their runs,
without expanding them. Two things are not checked: that listed boxes leave no gap (the save checks that), and that
files are as the table says (opening them checks that). `check_against_files` compares the number of entries that an
index lists with the files that exist, before the entries are expanded.
"""

from __future__ import annotations

import math

import numpy as np

from ...errors import CorruptError, FormatError, TreeckptError
from ..sharding.dtypes import dtype_of
from ..sharding.int_runs import Runs, check_runs, decode_runs, length_of, rises_strictly
from ..sharding.placements import BoxLayout, Layout, StridedShard, check_placements
from ..sharding.region import MAX_NDIM, is_c_order
from ..text import count_text
from ..tree.spec import BLOB_KINDS, ArraySpec
from .files import are_sound
from .records import (
    AliasRecord,
    ArrayRecord,
    BlobRecord,
    BoxChunks,
    GridChunks,
    Index,
    NoChunks,
    PerRankArrays,
    PerRankBlobs,
    PerRankValues,
    ValueRecord,
    WholeChunk,
)
from .shard_header import MAX_HEADER, MAX_NBYTES, MAX_WORLD, SAVE_ID, padded_nbytes

MAX_FILES = 1 << 20
"""Rows of the table of files, which are expanded when the checkpoint is read."""
MIN_ENTRY_NBYTES = 48
"""The least bytes that a chunk takes in the header of its shard."""
FREE_CHUNKS = 1 << 15
"""Chunks that may be built whatever files exist."""
FREE_VIEW_NBYTES = 64 << 20
"""Bytes that views, which show bytes repeatedly, may take as arrays of their own, whatever files exist."""
VIEW_TIMES = 16
"""Times the bytes of all files that such views may take beyond `FREE_VIEW_NBYTES`."""
FREE_FILES = 1 << 10
"""Files that may be listed whatever files exist."""
MAX_UNSEEN = 1 << 17
"""Files, or chunks of one array, up to which an index is read without comparing it with the sizes of the files."""
MAX_HOST = 255
"""Characters of the name of a host."""
MAX_ALIAS_RANKS = 1 << 22
"""Ranks of aliases, and of their arrays, that are compared one by one."""


def check_index(index: Index, name: str, *, manifest: bool = False) -> None:
    """Refuses an index that contradicts itself.

    Args:
        name: the file, for errors.
        manifest: whether chunks and files are still missing.

    Raises:
        FormatError: naming the file, or the leaf in it.
    """
    if not 0 < index.world <= MAX_WORLD or SAVE_ID.fullmatch(index.save_id) is None:
        raise FormatError(name, expected="a save id and a world", found=f"{index.save_id!r:.40}, {index.world}")
    if abs(index.created_ns) >= MAX_NBYTES:
        raise FormatError(name, expected="a time in nanoseconds", found="a number of more than 62 bits")
    if index.lineage is not None and not index.lineage.is_sound():
        raise FormatError(name, expected="a place in the run", found=f"{index.lineage!r:.80}")
    if index.sidecars and not are_sound(index.sidecars):
        raise FormatError(name, expected="names, sizes and checksums of sidecar files", found=f"{index.sidecars!r:.80}")
    _check_files(index, name, manifest)
    if index.disks:
        _check_disks(index, name)
    if index.references is not None and (wrong := index.references.problem(index.save_id, index.listed.files, name)):
        raise FormatError(name, expected="files in the directories of other checkpoints", found=wrong)
    for spec in index.specs:
        _check_spec(spec, name)
    for layout in index.layouts:
        _check_layout(layout, index, name)
    try:
        paths = index.paths
    except TreeckptError as error:
        raise FormatError(name, expected="a tree's structure", found=str(error)[:200]) from error
    if len(paths) != len(index.leaves):
        raise FormatError(name, expected=f"{len(paths)} leaves", found=f"{len(index.leaves)}")
    # only groups of ranks under `PerRank` have paths of equal text; then the pairs of path and ranks are compared
    if len({path for path, _ in paths}) != len(paths) and len(set(paths)) != len(paths):
        raise FormatError(name, expected="a path of its own for each leaf", found="two leaves that share one")
    compared = 0  # ranks of aliases
    fits: set[tuple[int, int, type]] = set()  # most leaves repeat a few pairs of spec and layout
    grids: dict[object, int] = {}  # and a few grids
    for (path, ranks), record in zip(paths, index.leaves, strict=True):
        if ranks is not None:
            check_runs(ranks, path=path, low=0, high=index.world)
        if isinstance(record, ArrayRecord):
            if ranks is not None or (record.spec, record.layout, type(record)) not in fits:
                _check_fit(index, path, ranks, record)
                fits.add((record.spec, record.layout, type(record)))
            _check_chunks(index, path, record, grids, manifest)
        elif type(record) is not ValueRecord or ranks is not None:
            _check_record(index, path, ranks, record, manifest)
            if isinstance(record, AliasRecord):
                compared += _check_alias(index, path, ranks, record, MAX_ALIAS_RANKS - compared)


def needs_file_sizes(index: Index, nbytes: int) -> bool:
    """Returns whether an index of `nbytes` bytes must be compared with the sizes of the files before it is expanded."""
    return max(index.listed.files, index.listed.most) > max(MAX_UNSEEN, nbytes)


def check_against_files(index: Index, sizes: dict[str, int], name: str) -> None:
    """Refuses an index that lists far more than the files of the checkpoint can hold, before any of it is expanded.

    Args:
        sizes: bytes of each file that exists.
        name: the checkpoint, for errors.

    Raises:
        CorruptError: it lists more shards, or chunks, than there can be.
    """
    # other disks may hold as much as this one, and each of them takes bytes of the index
    disks = max(len(index.disks), 1)
    listed, nbytes = index.listed, sum(sizes.values()) * disks
    if listed.files > max(FREE_FILES, 2 * len(sizes) * disks):
        raise CorruptError(
            name,
            expected=f"{listed.files} shards, as the index says",
            found=f"{len(sizes)} files",
            hint="Copy the other shards here too; if there are none, the index is not that of these shards",
        )
    if (listed.total - FREE_CHUNKS) * MIN_ENTRY_NBYTES > nbytes:
        raise CorruptError(
            name,
            expected=f"shards that hold {listed.total} chunks, as the index says",
            found=f"{nbytes} bytes in all files",
            hint="The index is not that of these shards; try treeckpt verify --repair",
            repairable=True,
        )


def check_claims(claimed: int, chunks: int, present: int, name: str) -> None:
    """Refuses arrays that take more bytes than there are, before memory is taken or a byte is written for them.

    Every load and every conversion, of whatever format, passes it.

    Args:
        claimed, chunks: bytes and chunks of the arrays, each that is stored once.
        present: bytes of the files that are there, and those by which views may repeat them.
        name: of an array and the checkpoint, for errors.

    Raises:
        CorruptError: there are fewer.
    """
    if claimed > present or (chunks - FREE_CHUNKS) * MIN_ENTRY_NBYTES > present:
        parts = f" in {count_text(chunks, 'chunk')}" if chunks else ""
        raise CorruptError(
            name,
            expected=f"files that hold {claimed} bytes of arrays{parts}, as the index or the header says",
            found=f"{present} bytes in all files",
            hint="They are cut off, or not of one checkpoint; of one of treeckpt, try treeckpt verify --repair",
        )


def _check_files(index: Index, name: str, manifest: bool) -> None:
    files = index.files
    rows = length_of(files.rank)
    highs = {
        "rank": index.world,
        "part": MAX_WORLD,
        "stream": MAX_NBYTES,
        "nbytes": MAX_NBYTES,
        "header": MAX_HEADER + 1,
    }
    for column, high in highs.items():
        check_runs(getattr(files, column), length=rows, path=name, low=0, high=high)
    if not rows and not manifest:
        raise FormatError(name, expected="a table of files", found="an empty one")
    if rows > MAX_FILES:
        raise FormatError(name, expected=f"at most {MAX_FILES} files", found=f"{rows}")
    # both are at most 2**24, so that the keys fit an int64
    keys = decode_runs(files.rank) * MAX_WORLD + decode_runs(files.part)
    if (np.diff(keys) <= 0).any():
        raise FormatError(name, expected="files by rank and part, each once", found="others")


def _check_disks(index: Index, name: str) -> None:
    """Refuses disks on which not every rank is once, or which are not in the order of their lowest ranks."""
    listed = sum(length_of(disk.ranks) for disk in index.disks)
    # every rank has a file: no more is expanded than the table of files has rows
    if len(index.disks) < 2 or not listed == index.world <= length_of(index.files.rank):
        found = f"{count_text(len(index.disks), 'disk')} with {count_text(listed, 'rank')}"
        raise FormatError(name, expected=f"several disks with all {index.world} ranks and their files", found=found)
    columns: list[np.ndarray] = []
    for disk in index.disks:
        check_runs(disk.ranks, path=name, low=0, high=index.world)
        columns.append(decode_runs(disk.ranks))
    leaders = [int(column[0]) if len(column) else -1 for column in columns]
    rising = all(len(column) and (np.diff(column) > 0).all() for column in columns)
    ranks = np.sort(np.concatenate(columns))
    if not rising or leaders != sorted(leaders) or (ranks != np.arange(index.world)).any():
        expected = "each rank on one disk, and the disks by their lowest ranks"
        raise FormatError(name, expected=expected, found=f"{index.disks!r:.80}")
    if any(len(disk.host) > MAX_HOST for disk in index.disks):
        raise FormatError(name, expected=f"names of hosts of at most {MAX_HOST} characters", found="a longer one")


def _check_spec(spec: ArraySpec, name: str) -> None:
    legal = len(spec.shape) <= MAX_NDIM and min(spec.shape, default=0) >= 0
    if not legal or padded_nbytes(spec.shape, dtype_of(spec.dtype).itemsize) >= MAX_NBYTES:
        raise FormatError(name, expected="a shape", found=f"{spec.shape!r:.80}")
    if spec.regions is not None:
        raise FormatError(name, expected="a spec of a whole array", found=f"regions {spec.regions!r:.80}")


def _check_layout(layout: Layout, index: Index, name: str) -> None:
    if isinstance(layout, BoxLayout):
        raise FormatError(name, expected="meshes and placements", found="listed pieces")
    mesh = layout.mesh
    if not mesh.shape or len(mesh.shape) > MAX_NDIM or min(mesh.shape) < 1:
        raise FormatError(name, expected="a mesh", found=f"shape {mesh.shape!r:.80}")
    if mesh.names and len(mesh.names) != len(mesh.shape):
        raise FormatError(name, expected=f"{len(mesh.shape)} names of mesh dimensions", found=f"{mesh.names!r:.80}")
    world, most = index.world, min(index.world, max(MAX_UNSEEN, length_of(index.files.rank)))  # every rank has a file
    if math.prod(mesh.shape) > most:
        raise FormatError(name, expected=f"a mesh of at most {most} ranks", found=f"shape {mesh.shape!r:.80}")
    check_runs(mesh.ranks, length=math.prod(mesh.shape), path=name, low=0, high=world)
    for placement in layout.placements:
        if isinstance(placement, StridedShard) and placement.factor > max(world, 1 << 16):
            raise FormatError(name, expected="a factor of the size of a mesh", found=f"{placement!r:.80}")


def _check_record(
    index: Index,
    path: str,
    ranks: Runs | None,
    record: ValueRecord | PerRankValues | AliasRecord | PerRankArrays,
    manifest: bool,
) -> None:
    if isinstance(record, ValueRecord):
        if ranks is not None:
            raise FormatError(path, expected="one value per rank", found="one for all")
        return
    if isinstance(record, PerRankValues):
        if ranks is None or len(record.values) != length_of(ranks):
            raise FormatError(path, expected="one value per rank", found=f"{len(record.values)}")
        return
    _check_number(index, path, record.spec)
    if isinstance(record, PerRankArrays):
        _check_kind(index, path, record)
        if ranks is None:
            raise FormatError(path, expected="a leaf under PerRank", found="another")
        if not manifest or record.start:
            check_runs(record.start, length=length_of(ranks), path=path, low=0, high=MAX_NBYTES)


def _check_number(index: Index, path: str, spec: int) -> None:
    if not 0 <= spec < len(index.specs):
        raise FormatError(path, expected=f"one of {len(index.specs)} specs", found=f"number {spec}")


def _check_kind(index: Index, path: str, record: ArrayRecord | PerRankArrays) -> None:
    """Refuses a record that is not that of a blob though its spec is, or the reverse."""
    spec, is_blob = index.specs[record.spec], isinstance(record, (BlobRecord, PerRankBlobs))
    if (spec.kind in BLOB_KINDS) != is_blob or (is_blob and (spec.dtype != "uint8" or len(spec.shape) != 1)):
        what = "bytes or text as uint8 of one dimension" if is_blob else "an array"
        raise FormatError(path, expected=what, found=f"{spec.kind:.40} of {spec.dtype} {spec.shape!r:.80}")


def _check_fit(index: Index, path: str, ranks: Runs | None, record: ArrayRecord) -> None:
    """Refuses an array whose spec or layout is not there, or which do not fit each other."""
    _check_number(index, path, record.spec)
    _check_kind(index, path, record)
    if ranks is not None:
        raise FormatError(path, expected="one array per rank", found="one for all")
    if not -1 <= record.layout < len(index.layouts):
        raise FormatError(path, expected=f"one of {len(index.layouts)} layouts", found=f"number {record.layout}")
    layout = index.layouts[record.layout] if record.layout >= 0 else None
    if layout is not None and not isinstance(layout, BoxLayout):
        try:
            check_placements(layout, index.specs[record.spec].shape, path)
        except TreeckptError as error:
            raise FormatError(path, expected=error.expected, found=error.found) from error


def _check_chunks(index: Index, path: str, record: ArrayRecord, grids: dict[object, int], manifest: bool) -> None:
    chunks = record.chunks
    if type(chunks) is WholeChunk:
        if not 0 <= chunks.rank < index.world or not 0 <= chunks.start < MAX_NBYTES:
            raise FormatError(path, expected="a chunk of a rank", found=f"rank {chunks.rank}, byte {chunks.start}")
    elif type(chunks) is GridChunks:
        key = (record.spec, chunks.cuts, chunks.rank)
        cells = grids.get(key)
        if cells is None:
            cells = grids[key] = _check_grid(index, path, chunks, index.specs[record.spec].shape)
        check_runs(chunks.start, length=cells, path=path, low=0, high=MAX_NBYTES)
    elif isinstance(chunks, BoxChunks):
        _check_boxes(index, path, chunks, index.specs[record.spec].shape)
    elif not manifest:
        assert isinstance(chunks, NoChunks), "the last of the union"
        raise FormatError(path, expected="chunks", found="none")


def _check_grid(index: Index, path: str, grid: GridChunks, shape: tuple[int, ...]) -> int:
    """Checks the cuts and ranks of a grid, and returns its number of cells."""
    if len(grid.cuts) != len(shape):
        raise FormatError(path, expected=f"cuts of {len(shape)} dimensions", found=f"{len(grid.cuts)}")
    for cut, size in zip(grid.cuts, shape, strict=True):
        check_runs(cut, path=path, low=0)
        if not rises_strictly(cut, 0, size) or not size:
            raise FormatError(path, expected=f"rising cuts from 0 to {size}", found=f"{cut!r:.80}")
    cells = math.prod(length_of(cut) - 1 for cut in grid.cuts)
    check_runs(grid.rank, length=cells, path=path, low=0, high=index.world)
    return cells


MAX_BOX_NUMBERS = 1 << 22
"""Numbers in the offsets and shapes of one array's boxes together, which are expanded when the array is read."""


def _check_boxes(index: Index, path: str, boxes: BoxChunks, shape: tuple[int, ...]) -> None:
    if len(boxes.offset) != len(shape) or len(boxes.shape) != len(shape):
        raise FormatError(path, expected=f"boxes of {len(shape)} dimensions", found=f"{len(boxes.offset)}")
    rows = length_of(boxes.rank)
    if not rows or rows * max(1, len(shape)) > MAX_BOX_NUMBERS:
        raise FormatError(path, expected="a list of boxes", found=f"{rows} of {len(shape)} dimensions")
    for offsets, shapes, size in zip(boxes.offset, boxes.shape, shape, strict=True):
        check_runs(offsets, length=rows, path=path, low=0, high=size)
        check_runs(shapes, length=rows, path=path, low=1, high=size + 1)
    check_runs(boxes.rank, length=rows, path=path, low=0, high=index.world)
    check_runs(boxes.start, length=rows, path=path, low=0, high=MAX_NBYTES)


def _check_alias(index: Index, path: str, ranks: Runs | None, record: AliasRecord, limit: int) -> int:
    """Checks an alias, and returns how many ranks, at most `limit`, were compared one by one."""
    compared = 0
    base = index.leaves[record.of] if 0 <= record.of < len(index.leaves) else None
    is_blob = isinstance(base, (BlobRecord, PerRankBlobs)) or index.specs[record.spec].kind in BLOB_KINDS
    if is_blob or not isinstance(base, (ArrayRecord, PerRankArrays)) or not 0 <= base.spec < len(index.specs):
        raise FormatError(path, expected="an alias of an array", found=f"of leaf {record.of}")
    if isinstance(base, PerRankArrays):
        group = index.paths[record.of][1]
        within = ranks is not None and group is not None
        if ranks is not None and group is not None and ranks != group:  # nearly always the two are equal
            compared = length_of(ranks) + length_of(group)
            within = compared <= limit and bool(np.isin(decode_runs(ranks), decode_runs(group)).all())
        if not within:
            raise FormatError(path, expected="an alias among the same ranks", found=f"of leaf {record.of}")
    spec, other = index.specs[record.spec], index.specs[base.spec]
    fits = spec.dtype == other.dtype and (spec.kind == "numpy") == (other.kind == "numpy")
    if record.view is None:
        fits = fits and spec.shape == other.shape
    else:
        offset, strides = record.view.offset, record.view.strides
        fits = fits and len(strides) == len(spec.shape) and min((offset, *strides)) >= 0
        # offset and strides of a view count elements in C order
        fits = fits and is_c_order(other.shape, other.order)
        if fits and 0 not in spec.shape:
            last = offset + sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True))
            fits = last < math.prod(other.shape)
    if not fits:
        raise FormatError(path, expected=f"a view inside shape {other.shape}", found=_alias_text(spec, record))
    return compared


def _alias_text(spec: ArraySpec, record: AliasRecord) -> str:
    view = f" at offset {record.view.offset} with strides {record.view.strides}" if record.view is not None else ""
    return f"{spec.dtype} of shape {spec.shape}{view}"[:120]
