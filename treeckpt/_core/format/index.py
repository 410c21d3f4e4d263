"""Encodes and decodes index.json, which describes all that a checkpoint holds and where every byte of it lies.

It is published last; its presence is the commit. A seal and a version come first, so that both can be checked before
the rest is decoded. `rebuild` restores a lost index from the headers of the shards.

An index of arrays whose chunks are ranges of elements is packed into columns. Ranks that hold ranges of all arrays
concatenated, as ZeRO's do, cut arrays at any element: each array has a few irregular chunks, and a record that lists
them takes fifty bytes for each chunk. All such arrays share columns of the lengths of their ranges and of the ranks
that wrote them. Boxes follow from these, and starts from the order in which every save writes its entries
(`_core.planning.save_plan`). Equal subtrees, such as those of a model and of its moments, are stored once. `pack`
returns None where this cannot describe the index exactly, and `unpack` restores exactly the index that was packed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...errors import CorruptError, FormatError, MismatchError, TreeckptError
from ..planning.save_plan import BoxOwners, ChunkOffsets, order_classes, stream_offsets
from ..sharding.dtypes import dtype_of
from ..sharding.int_runs import MAX_VALUE, Run, Runs, check_runs, decode_runs, encode_runs, length_of
from ..sharding.region import MAX_NDIM, Region, c_strides, flat_boxes, max_boxes
from ..text import count_text
from ..tree.spec import ArraySpec
from ..tree.structure import (
    MAX_DEPTH,
    Structure,
    check_stack,
    expand_shared_subtrees,
    extract_shared_subtrees,
    leaf_count,
)
from .check_index import check_index
from .records import (
    ArrayRecord,
    BoxChunks,
    Chunks,
    FileTable,
    GridChunks,
    Index,
    Leaf,
    LeafRecord,
    NoChunks,
    PerRankArrays,
    WholeChunk,
    encode_boxes,
    encode_chunks,
    file_table,
)
from .references import SharedFile, with_homes
from .shard_header import MAX_NBYTES, ShardHeader, check_seal, sealed

VERSION = 1
SHARING_VERSION = 2
"""The version of an index that names files in the directories of other checkpoints."""
INDEX_NAME = "index.json"
MAX_INDEX = 1 << 30
MAX_PLAIN_NBYTES = 256 << 10
"""Bytes up to which an index is never packed: msgspec decodes records several times as fast as columns."""
_ZEROS = "0" * 16


class _IndexDocument(msgspec.Struct, forbid_unknown_fields=True):
    """The file: the seal and the version first, so that they can be checked before the rest is decoded."""

    seal: str
    format: str
    version: int
    index: msgspec.Raw


_DOCUMENT = msgspec.json.Decoder(_IndexDocument)


def encode_index(index: Index) -> bytes:
    """Encodes index.json."""
    body = msgspec.json.encode(index)
    packed = pack(index) if len(body) > MAX_PLAIN_NBYTES else None
    if packed is not None and len(packed) < len(body):
        body = packed
    version = SHARING_VERSION if index.references is not None else VERSION
    return sealed(msgspec.json.encode(_IndexDocument(_ZEROS, "treeckpt", version, msgspec.Raw(body))))


def decode_index(data: bytes, name: str = INDEX_NAME) -> Index:
    """Decodes index.json.

    Raises:
        CorruptError: the seal is broken or missing.
        FormatError: another format or version, unknown fields, or records that contradict each other.
    """
    if len(data) > MAX_INDEX:
        raise FormatError(name, expected=f"at most {MAX_INDEX} bytes", found=f"{len(data)}")
    hint = "The file was changed after it was written; try treeckpt verify --repair"
    check_seal(data, name, hint=hint, repairable=True)
    try:
        document = _DOCUMENT.decode(data)
    except RecursionError as error:
        raise _too_deep(name) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(name, expected="a treeckpt index", found=f"{error}"[:200]) from error
    if document.format != "treeckpt" or document.version not in (VERSION, SHARING_VERSION):
        raise FormatError(
            name,
            expected=f"treeckpt index version {VERSION} or {SHARING_VERSION}",
            found=f"{document.format} version {document.version}"[:80],
            hint="Load it with the version of treeckpt that wrote it, or a newer one",
        )
    index = _decode_body(bytes(document.index), name)
    if (index.references is not None) != (document.version == SHARING_VERSION):
        expected = f"version {VERSION}, or {SHARING_VERSION} with references"
        hint = "The file was changed after it was written; try treeckpt verify --repair"
        raise FormatError(name, expected=expected, found=f"version {document.version}", hint=hint)
    return index


def _decode_body(body: bytes, name: str, *, manifest: bool = False) -> Index:
    try:
        index = unpack(body, name)
        check_index(index, name, manifest=manifest)
        return index
    except MismatchError as error:  # of a spec
        raise FormatError(name, expected=error.expected, found=error.found) from error
    except TreeckptError:
        raise
    except RecursionError as error:
        raise _too_deep(name) from error
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise FormatError(name, expected="an index as treeckpt writes it", found=f"{error}"[:200]) from error


def _too_deep(name: str) -> FormatError:
    """Returns the error for a document that nests deeper than Python's calls; raises TreeError if the stack is full."""
    check_stack(name)
    expected = f"a tree at most {MAX_DEPTH} levels deep"
    return FormatError(name, expected=expected, found="one beyond Python's recursion limit")


def encode_manifest(index: Index) -> str:
    """Encodes the manifest, which the coordinator's shard holds: the index without chunks, files and disks.

    Of references it has what is known before all ranks have written.
    """
    bare = tuple([_without_chunks(record) for record in index.leaves])
    references = index.references and index.references.before_files
    bare_index = msgspec.structs.replace(index, leaves=bare, files=FileTable(), disks=(), references=references)
    return msgspec.json.encode(bare_index).decode()


def _without_chunks(record: LeafRecord) -> LeafRecord:
    if isinstance(record, ArrayRecord) and not isinstance(record.chunks, NoChunks):
        return msgspec.structs.replace(record, chunks=NoChunks())
    return msgspec.structs.replace(record, start=()) if isinstance(record, PerRankArrays) else record


def rebuild(
    headers: Sequence[tuple[int, ShardHeader]],
    name: str = INDEX_NAME,
    *,
    shared: Mapping[int, Sequence[SharedFile]] = {},
) -> Index:
    """Rebuilds the index that the save of these shards published, or would have published.

    Args:
        headers: (bytes of the header, the decoded header) of every shard; of one in the directory of another checkpoint
            with the save id, the part and the stream that it has here.
        shared: those in the directories of other checkpoints, by rank.

    Raises:
        CorruptError: a shard is missing, such as the one with the manifest, or belongs to another save.
    """
    manifest = next((h.manifest for _, h in headers if h.manifest is not None), None)
    if manifest is None:
        raise CorruptError(
            name,
            expected="the shard of rank 0, which carries the tree",
            found=f"{count_text(len(headers), 'shard')} without it",
            hint="The index cannot be rebuilt from these. Where ranks have saved to the disks of several hosts, copy "
            "the index.json of another one here",
        )
    index = _decode_body(manifest.encode(), name, manifest=True)
    if index.world > len(headers):
        raise CorruptError(
            name,
            expected=f"shards of all {index.world} ranks",
            found=count_text(len(headers), "shard"),
            hint="The save never finished, or shards were lost",
        )
    entries: dict[str, list[_RebuiltChunk]] = {}
    known: set[tuple[int, int]] = set()
    for _, header in headers:
        if (header.save_id, header.world) != (index.save_id, index.world) or (header.rank, header.part) in known:
            raise CorruptError(
                name,
                expected=f"one shard of save {index.save_id} for each rank and part, of {index.world} ranks",
                found=f"one of save {header.save_id}, rank {header.rank} of {header.world}, part {header.part}",
                hint="Move shards of other saves out of the directory",
            )
        known.add((header.rank, header.part))
        for entry in header.entries:
            chunk = _RebuiltChunk(entry.region, header.rank, header.stream + entry.start, entry.shape, entry.dtype)
            entries.setdefault(entry.path, []).append(chunk)
    leaves = tuple(_rebuild_record(leaf, entries) for leaf in index.entries)
    files = file_table((h.rank, h.part, h.stream, h.nbytes, size) for size, h in headers)
    references = index.references
    if references is not None:
        references = with_homes(references, sorted((h.rank, h.part) for _, h in headers), shared)
    rebuilt = msgspec.structs.replace(index, leaves=leaves, files=files, references=references)
    check_index(rebuilt, name)
    return rebuilt


class _RebuiltChunk(msgspec.Struct, frozen=True, order=True, gc=False):
    """An entry of a shard's header, with its rank and its start in the rank's stream."""

    region: Region
    rank: int
    start: int
    shape: tuple[int, ...]
    dtype: str


def _rebuild_record(leaf: Leaf, entries: dict[str, list[_RebuiltChunk]]) -> LeafRecord:
    record, spec = leaf.record, leaf.stored
    if isinstance(record, PerRankArrays) and leaf.ranks is not None:
        starts: list[int] = []
        for rank in decode_runs(leaf.ranks).tolist():
            written = entries.get(leaf.path.replace("~rank*", f"~rank{rank}"), [])
            if len(written) != 1 or spec is None or (written[0].shape, written[0].dtype) != (spec.shape, spec.dtype):
                raise _shard_missing(leaf.path, f"rank {rank}'s own array")
            starts.append(written[0].start)
        return msgspec.structs.replace(record, start=encode_runs(starts))
    if not isinstance(record, ArrayRecord) or spec is None:
        return record
    # by offset, as a plan has them: `encode_chunks` gives a record that is equal to the lost one
    chunks = sorted(entries.get(leaf.path, []))
    if any((c.shape, c.dtype) != (spec.shape, spec.dtype) for c in chunks):
        raise FormatError(leaf.path, expected=f"entries of {spec.dtype} {spec.shape}", found="others")
    if not chunks or sum(c.region.size for c in chunks) != math.prod(spec.shape):
        raise _shard_missing(leaf.path, f"all of shape {spec.shape}")
    owners = BoxOwners(tuple((c.rank, c.region) for c in chunks))
    placed = ChunkOffsets(owners, np.array([c.start for c in chunks], np.int64))
    return msgspec.structs.replace(record, chunks=encode_chunks(spec.shape, placed))


def _shard_missing(path: str, expected: str) -> CorruptError:
    return CorruptError(path, expected=expected, found="a part of it in no shard", hint="A shard is missing")


MAX_NUMBERS = 1 << 17
"""Offsets of all boxes together that a small document may describe; they are computed when the index is read."""
MAX_PER_RANK = 1 << 20
"""Ranks of all leaves under `PerRank` together."""
NUMBERS_PER_BYTE = 2
"""Offsets for each byte of a larger document: an uneven range takes eight bytes or more, and becomes a few boxes."""
MAX_LEAVES_PER_RANGE = 16
"""An index with more leaves than this for each range of a cut array is not packed: it would save too little."""
_SHORT_RUN = 3
"""Runs of at most this many numbers are stored as single numbers, which is as short."""

Column = tuple[int | Run, ...]
"""Integers: single ones, and runs as in `_core.sharding.int_runs`."""


class RangeColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arrays that are cut into ranges of their elements in C order."""

    leaf: Runs
    """Numbers of the leaves, rising."""
    spec: Column
    layout: Column
    count: Column
    """How many ranges each array has."""
    length: Column
    """Elements of each range, except the last of each array, which follows from the shape."""
    first: Column
    """For the first range of each array: its rank minus the rank of the last range of the array before."""
    turn: Column
    """For every other range: its rank minus the rank of the range before."""
    start: Column
    """Starts of the boxes in the streams of their ranks; empty where they follow from the order of entries."""


class PackedIndex(Index, frozen=True):
    """An index as its file holds it: without the leaves that are in `ranges` and the subtrees that are in `shared`."""

    ranges: RangeColumns | None = None
    shared: tuple[Structure, ...] = ()
    """The subtrees that the structure has several times, which `_core.tree.structure` takes out of it."""


_PACKED = msgspec.json.Decoder(PackedIndex)


class _RangedArray(NamedTuple):
    """An array as ranges: the elements and the rank of each."""

    number: int
    record: ArrayRecord
    spec: ArraySpec
    lengths: np.ndarray
    ranks: np.ndarray


class _ArrayBoxes(NamedTuple):
    """The boxes of an array in C order, as columns."""

    offsets: np.ndarray
    shapes: np.ndarray
    ranks: np.ndarray


# packing --------------------------------------------------------------------------------------------------------------
def pack(index: Index) -> bytes | None:
    """Encodes an index; None where that saves nothing, or `unpack` would not restore the same index."""
    cut_up = {n: cut for n, record in enumerate(index.leaves) if (cut := _find_ranges(n, record, index)) is not None}
    listed = sum(len(cut.ranks) for cut in cut_up.values())
    if not listed or listed * MAX_LEAVES_PER_RANGE < len(index.leaves):
        return None  # hardly any chunk is listed, so packing would save too little
    arrays = [cut_up.get(n) or _single_range(n, record, index) for n, record in enumerate(index.leaves)]
    cuts = [cut for cut in arrays if cut is not None]
    rest = tuple([record for record, cut in zip(index.leaves, arrays, strict=True) if cut is None])
    structure, shared = extract_shared_subtrees(index.structure)
    bare = msgspec.structs.replace(index, structure=structure, leaves=rest)
    written = msgspec.json.encode(index)
    # without starts where they follow from the order of entries: each would take some bytes
    for implied in (True, False):
        ranges = _encode_ranges(cuts, implied=implied)
        body = msgspec.json.encode(PackedIndex(**msgspec.structs.asdict(bare), ranges=ranges, shared=shared))
        # what does not describe the index exactly decodes to another one, or is refused
        with contextlib.suppress(TreeckptError):
            if msgspec.json.encode(unpack(body, "index")) == written:
                return body
    return None


def _single_range(number: int, record: LeafRecord, index: Index) -> _RangedArray | None:
    """Returns an array of one chunk as one range, None for any other leaf."""
    if type(record) is not ArrayRecord or not isinstance(record.chunks, WholeChunk):
        return None
    spec = index.specs[record.spec]
    return _RangedArray(number, record, spec, np.array([math.prod(spec.shape)]), np.array([record.chunks.rank]))


def _find_ranges(number: int, record: LeafRecord, index: Index) -> _RangedArray | None:
    """Returns the ranges that an array may have been cut into; `pack` proves it by unpacking."""
    if type(record) is not ArrayRecord or isinstance(record.chunks, WholeChunk):
        return None
    spec, chunks = index.specs[record.spec], record.chunks
    size = math.prod(spec.shape)
    if isinstance(chunks, BoxChunks) and chunks.offset:
        strides = c_strides(spec.shape, 1)
        begins = sum(decode_runs(column) * stride for column, stride in zip(chunks.offset, strides, strict=True))
    elif isinstance(chunks, GridChunks) and all(length_of(cut) == 2 for cut in chunks.cuts[1:]):
        if 4 * len(chunks.cuts[0]) < length_of(chunks.cuts[0]):
            return None  # regular cuts are short already
        begins = decode_runs(chunks.cuts[0])[:-1] * math.prod(spec.shape[1:])
    else:
        return None
    ranks = decode_runs(chunks.rank)
    opens = np.flatnonzero(np.diff(ranks, prepend=-1))
    lengths = np.diff(np.append(np.asarray(begins)[opens], size))
    return _RangedArray(number, record, spec, lengths, ranks[opens]) if (lengths > 0).all() else None


def _encode_ranges(cuts: Sequence[_RangedArray], *, implied: bool) -> RangeColumns:
    ranks = np.concatenate([cut.ranks for cut in cuts])
    counts = np.array([len(cut.ranks) for cut in cuts])
    opens = np.cumsum(counts) - counts
    turns = np.diff(ranks, prepend=0)
    inner = np.ones(len(ranks), bool)
    inner[opens] = False
    return RangeColumns(
        leaf=encode_runs([cut.number for cut in cuts]),
        spec=_encode_column([cut.record.spec for cut in cuts]),
        layout=_encode_column([cut.record.layout for cut in cuts]),
        count=_encode_column(counts),
        length=_encode_column(np.concatenate([cut.lengths[:-1] for cut in cuts])),
        first=_encode_column(turns[opens]),
        turn=_encode_column(turns[inner]),
        start=() if implied else _encode_column(np.concatenate([_starts(cut.record) for cut in cuts])),
    )


def _starts(record: ArrayRecord) -> np.ndarray:
    chunks = record.chunks
    if isinstance(chunks, WholeChunk):
        return np.array([chunks.start])
    assert isinstance(chunks, (BoxChunks, GridChunks)), "arrays that are cut"
    return decode_runs(chunks.start)


def _encode_column(values: Sequence[int] | np.ndarray) -> Column:
    column: list[int | Run] = []
    for run in encode_runs(values):
        if len(run) == 1:
            column.append(run[0])
        elif len(run) == 3 and run[2] <= _SHORT_RUN:
            column += decode_runs((run,)).tolist()
        else:
            column.append(run)
    return tuple(column)


# unpacking ------------------------------------------------------------------------------------------------------------
def unpack(body: bytes, name: str) -> Index:
    """Decodes an index, packed or not. Only what is expanded here is checked here; `check_index` checks the rest.

    Raises:
        FormatError: the columns contradict each other.
        msgspec.MsgspecError: it is no index.
    """
    packed = _PACKED.decode(body)
    index, ranges = Index(*msgspec.structs.astuple(packed)[:-2]), packed.ranges  # without ranges and shared
    if packed.shared:
        index = msgspec.structs.replace(index, structure=expand_shared_subtrees(index.structure, packed.shared, name))
    if ranges is None:
        return index
    most = max(MAX_NUMBERS, NUMBERS_PER_BYTE * len(body))
    numbers = _numbers(index, ranges, leaf_count(index.structure), name)
    cuts = _decode_ranges(index, ranges, numbers, name, most)
    boxes = _expand_boxes(cuts)
    taken = set(numbers)
    rest = iter(index.leaves)
    leaves: list[Any] = [None if n in taken else next(rest) for n in range(len(taken) + len(index.leaves))]
    if ranges.start:
        starts = _column(ranges.start, sum(len(box.ranks) for box in boxes), name, low=0, high=MAX_NBYTES)
    else:
        starts = _implied_starts(index, leaves, cuts, boxes, name)
    taken_starts = 0
    for cut, (offsets, shapes, ranks) in zip(cuts, boxes, strict=True):
        if len(ranks) == 1:
            chunks: Chunks = WholeChunk(int(ranks[0]), int(starts[taken_starts]))
        else:
            chunks = encode_boxes(
                cut.spec.shape, offsets, shapes, ranks, starts[taken_starts : taken_starts + len(ranks)]
            )
        leaves[cut.number] = ArrayRecord(cut.record.spec, cut.record.layout, chunks)
        taken_starts += len(ranks)
    return msgspec.structs.replace(index, leaves=tuple(leaves))


def _numbers(index: Index, ranges: RangeColumns, count: int, name: str) -> list[int]:
    """Decodes the numbers of the leaves that are in the columns."""
    check_runs(ranges.leaf, length=count - len(index.leaves), path=name, low=0, high=count)
    numbers = decode_runs(ranges.leaf)
    if (np.diff(numbers) <= 0).any():
        raise FormatError(name, expected="leaves in rising order", found="others")
    return numbers.tolist()


def _column(column: Column, length: int, name: str, *, low: int = -MAX_VALUE, high: int = MAX_VALUE) -> np.ndarray:
    """Decodes a column to int64[length], and checks that `low <= number < high`."""
    runs = tuple([part for part in column if isinstance(part, tuple)])
    check_runs(runs, length=length - (len(column) - len(runs)), path=name, low=low, high=high)
    numbers: list[int] = []
    for part in column:
        if isinstance(part, tuple):
            numbers += decode_runs((part,)).tolist()
        else:
            numbers.append(part)
    if numbers and (min(numbers) < low or max(numbers) >= high):
        raise FormatError(
            name, expected=f"numbers from {low} to {high - 1}", found=f"{min(numbers)} to {max(numbers)}"[:200]
        )
    return np.array(numbers, np.int64)


def _decode_ranges(index: Index, ranges: RangeColumns, numbers: list[int], name: str, most: int) -> list[_RangedArray]:
    n = len(numbers)
    specs: list[int] = _column(ranges.spec, n, name, low=0, high=len(index.specs)).tolist()
    layouts: list[int] = _column(ranges.layout, n, name, low=-1, high=len(index.layouts)).tolist()
    counts = _column(ranges.count, n, name, low=1, high=most + 1)
    total = int(counts.sum())
    shapes: list[tuple[int, ...]] = [index.specs[spec].shape for spec in specs]
    offsets = sum(count * max_boxes(s) * max(1, len(s)) for count, s in zip(counts.tolist(), shapes, strict=True))
    if max(map(len, shapes), default=0) > MAX_NDIM or offsets > most:
        raise FormatError(name, expected=f"ranges of at most {most} offsets", found="more")
    lengths = _column(ranges.length, total - n, name, low=1, high=MAX_NBYTES)
    opens = np.cumsum(counts) - counts
    turns = np.empty(total, np.int64)
    inner = np.ones(total, bool)
    inner[opens] = False
    turns[opens] = _column(ranges.first, n, name, low=-index.world, high=index.world)
    turns[inner] = _column(ranges.turn, total - n, name, low=-index.world, high=index.world)
    ranks = np.cumsum(turns)
    if total and (ranks.min() < 0 or ranks.max() >= index.world):
        raise FormatError(name, expected=f"ranks below {index.world}", found=f"{ranks.min()} to {ranks.max()}")
    cuts: list[_RangedArray] = []
    for i, (number, spec, layout, shape) in enumerate(zip(numbers, specs, layouts, shapes, strict=True)):
        first, stop = int(opens[i]), int(opens[i] + counts[i])
        mine = lengths[first - i : stop - i - 1]
        size = math.prod(shape) if min(shape, default=1) >= 0 else 0
        # of Python's integers: a sum of hostile lengths may exceed an int64
        left = size - sum(mine.tolist())  # in the last range
        if size >= MAX_NBYTES or (len(mine) and left < 1):
            raise FormatError(name, expected=f"ranges inside shape {shape!r:.80}", found=f"{-left} elements too many")
        record = ArrayRecord(spec, layout, WholeChunk(0, 0))
        cuts.append(_RangedArray(number, record, index.specs[spec], np.append(mine, left), ranks[first:stop]))
    return cuts


def _expand_boxes(cuts: Sequence[_RangedArray]) -> list[_ArrayBoxes]:
    """Expands the ranges of each array to boxes, arrays of equal shape together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, cut in enumerate(cuts):
        alike.setdefault(cut.spec.shape, []).append(i)
    boxes: list[Any] = [None] * len(cuts)
    for shape, members in alike.items():
        several = [i for i in members if len(cuts[i].ranks) > 1]
        for i in members:
            whole = np.array([shape], np.int64).reshape(1, -1)
            boxes[i] = _ArrayBoxes(np.zeros_like(whole), whole, cuts[i].ranks)
        if not several:
            continue
        stops = [np.cumsum(cuts[i].lengths) for i in several]
        starts = [stop - cuts[i].lengths for i, stop in zip(several, stops, strict=True)]
        which, offsets, shapes = flat_boxes(shape, np.concatenate(starts), np.concatenate(stops))
        writers = np.concatenate([cuts[i].ranks for i in several])[which]
        borders = np.searchsorted(which, np.cumsum([len(cuts[i].ranks) for i in several])[:-1])
        for i, o, s, r in zip(several, *(np.split(c, borders) for c in (offsets, shapes, writers)), strict=True):
            boxes[i] = _ArrayBoxes(o, s, r)
    return boxes


def _implied_starts(
    index: Index, leaves: list[Any], cuts: Sequence[_RangedArray], boxes: Sequence[_ArrayBoxes], name: str
) -> np.ndarray:
    """Computes the starts of the boxes of all ranges from the order in which saves write entries."""
    by_number = {cut.number: i for i, cut in enumerate(cuts)}
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    listed: list[np.ndarray] = []
    own = 0
    for number, (_, group) in enumerate(index.paths):
        i, record = by_number.get(number), leaves[number]
        if i is not None:
            ranks, spec = boxes[i].ranks, cuts[i].spec
            sizes = boxes[i].shapes.prod(1)
        elif isinstance(record, PerRankArrays) and group is not None and 0 <= record.spec < len(index.specs):
            check_runs(group, path=name, low=0, high=index.world)
            own += length_of(group)
            if length_of(group) > MAX_NUMBERS or own > MAX_PER_RANK:
                expected = f"leaves of at most {MAX_NUMBERS} ranks each, {MAX_PER_RANK} in all"
                raise FormatError(name, expected=expected, found=f"{own}")
            ranks, spec = decode_runs(group), index.specs[record.spec]
            sizes = np.full(len(ranks), math.prod(spec.shape))
        elif isinstance(record, (ArrayRecord, PerRankArrays)):
            raise FormatError(name, expected="where each range starts, beside arrays that are listed", found="nothing")
        else:
            continue
        dtype = dtype_of(spec.dtype)
        nbytes = sizes * dtype.itemsize
        columns.append((ranks, order_classes(nbytes, dtype.itemsize // dtype.parts), nbytes))
        listed.append(np.full(len(ranks), i is not None))
    if not columns:
        return np.empty(0, np.int64)
    ranks, classes, nbytes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return stream_offsets(ranks, classes, nbytes)[np.concatenate(listed)]
