"""Finds the row of an id in a saved keyed table, by reading few of its ids.

Rows are saved in the order of their buckets, and within one by the id as unsigned: `offsets` gives the rows of an id's
bucket, and of these one block of ids after the other is read, each halving what is left. Where a partition is not known
here, all ids are read, block by block. Each read is a peek, so what is rounded to checksums is counted. Of a table that
was saved as deltas the parts are looked through from the last one on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec
import numpy as np

from .._core.format.byte_map import ChunkLocation, locate_chunks
from .._core.format.records import Index, Leaf, PerRankArrays
from .._core.format.table_deltas import count_rows, table_parts
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region
from .._core.tree.keyed_table import buckets_of, check_partition, table_path
from .._core.tree.spec import TableSpec
from .._core.tree.structure import TABLE_KEYS
from .._inspect.numbers import element_texts
from .._io.storage.store import Store
from ..errors import CorruptError, LayoutError, MismatchError
from .peek import MAX_NBYTES, peek

BLOCK_IDS = 1 << 15
"""Ids that are read at a time: as many as lie in one block of checksums."""
SHOWN = 16
"""Elements of a slot that are shown as text."""


class RowSlot(msgspec.Struct, frozen=True):
    """The values that a row has in one slot."""

    path: str
    leaf: int
    dtype: str
    shape: tuple[int, ...]
    """The shape of the row."""
    elements: int
    values: tuple[str, ...]
    """The first elements, as text; none of a row of more than 64 MiB."""
    file: str
    start: int
    """The first byte of the row in the file."""
    stop: int


class TableRow(msgspec.Struct, frozen=True):
    """Where a table has an id."""

    table: str
    """The path of the table."""
    id: str
    """The id as it was asked for; a text, because not each program's numbers have 64 bits."""
    bucket: int | None
    """None for a partition that is not known here."""
    row: int | None
    """The row in its `part`; None where the table does not have the id."""
    part: str
    """The path of the table, or of the rows of the delta that has the row; empty without a row."""
    part_rows: int
    """Rows of the part, with those that later deltas have replaced; 0 without a row."""
    rows: int
    """Rows of the table, as a load gives them."""
    rank: int | None
    """The rank that wrote the row."""
    file: str
    start: int
    """The first byte of the id in the file."""
    slots: tuple[RowSlot, ...]
    read: int
    """Bytes that were read, checksums included."""
    verified: bool
    """Whether all of them match their checksums."""


def parse_id(text: str) -> int:
    """Returns the 64 bits of an id, as a signed number; 2**64 - 1 is -1, as a program with unsigned ids writes it.

    Raises:
        MismatchError: the text is no integer of 64 bits.
    """
    number = int(text) if re.fullmatch(r"\s*-?[0-9]{1,20}\s*", text, re.ASCII) else None
    if number is None or not -(1 << 63) <= number < 1 << 64:
        raise MismatchError("id", expected="an integer from -2**63 to 2**64 - 1", found=f"{text!r:.40}")
    return number - (1 << 64) if number >= 1 << 63 else number


def ids_of_table(index: Index, leaf: Leaf) -> Leaf | None:
    """Returns the ids of the table that a leaf is a column of; None for any other leaf."""
    for number in index.tables:
        ids = index.entries[number]
        table = table_path(ids.path)
        prefix = f"{table}/" if table else ""
        if ids.ranks == leaf.ranks and (
            leaf.number in (number, number + 1) or leaf.path.startswith(f"{prefix}{TABLE_KEYS[2]}/")
        ):
            return ids
    return None


class _Reads:
    """Reads of one search, and what they come to."""

    def __init__(self, store: Store, index: Index, rank: int | None) -> None:
        self._store, self._index, self._rank = store, index, rank
        self.read, self.verified = 0, True

    def of(self, leaf: Leaf, region: Region) -> np.ndarray:
        """Returns a region's bytes, uint8[elements, itemsize]."""
        found = peek(self._store, self._index, leaf, region, rank=self._rank)
        self.read += found.read
        self.verified &= found.verified or not found.data.size  # of no bytes none differs
        return found.data

    def numbers(self, leaf: Leaf, start: int, stop: int) -> np.ndarray:
        """Returns elements of an array of int64."""
        return self.of(leaf, Region((start,), (stop - start,))).reshape(-1).view(np.int64)


def find_row(store: Store, index: Index, ids: Leaf, id_text: str, *, rank: int | None = None) -> TableRow:
    """Finds the row of an id.

    Args:
        ids: of a table, as `ids_of_table` returns them.
        rank: whose table, under `PerRank`; by default the first rank's.

    Raises:
        MismatchError: no id, or no table.
        LayoutError: ids that lie in no file as they are.
        CorruptError: bytes are missing or differ from their checksums, or `offsets` are no rows of the table.
    """
    spec, wanted = index.tables.get(ids.number), parse_id(id_text)
    if spec is None or ids.spec is None or len(ids.spec.shape) != 1 or ids.spec.dtype != "int64":
        raise MismatchError(ids.path, expected="the ids of a keyed table", found="something else")
    if rank is None and isinstance(ids.record, PerRankArrays):
        rank = int(decode_runs(ids.ranks or ())[0])
    reads, rows = _Reads(store, index, rank), count_rows(index, table_path(ids.path))
    bucket, row, held = _find(reads, index, ids, spec, wanted)
    at = _place(index, held, row, 8, rank) if row is not None else None
    slots = tuple(_slots(reads, index, held, row, rank)) if row is not None else ()
    return TableRow(
        table_path(ids.path),
        id_text.strip(),
        bucket=bucket,
        row=row,
        part=table_path(held.path) if row is not None else "",
        part_rows=_length(held) if row is not None else 0,
        rows=_length(ids) if rows is None else rows,
        rank=at[0].rank if at is not None else None,
        file=at[0].file.name if at is not None else "",
        start=at[1] if at is not None else 0,
        slots=slots,
        read=reads.read,
        verified=reads.verified,
    )


def _find(reads: _Reads, index: Index, ids: Leaf, spec: TableSpec, wanted: int) -> tuple[int | None, int | None, Leaf]:
    """Returns the bucket of an id, its row, and the ids among which it is: those of the last part of the table that has
    the id, or has deleted it."""
    bucket = row = None
    for held, deleted in reversed(table_parts(index, ids)):
        bucket, row = _search(reads, index, held, spec, wanted)
        if row is not None:
            return bucket, row, held
        if deleted is not None and _search(reads, index, deleted, spec, wanted)[1] is not None:
            break
    return bucket, None, ids


def _length(ids: Leaf) -> int:
    assert ids.spec is not None, "ids are an array"
    return ids.spec.shape[0]


def _search(reads: _Reads, index: Index, ids: Leaf, spec: TableSpec, wanted: int) -> tuple[int | None, int | None]:
    """Returns the bucket of an id and its row."""
    count, offsets = _length(ids), index.entries[ids.number + 1]  # they stand behind the ids
    try:
        check_partition(spec)
    except LayoutError:  # of a later version
        return None, _scan(reads, ids, count, wanted)
    bucket = int(buckets_of(np.array([wanted], np.int64), spec)[0])
    if offsets.spec is None or offsets.spec.shape != (spec.buckets,):
        raise CorruptError(offsets.path, expected=f"the first rows of {spec.buckets} buckets", found="others")
    ends = [*reads.numbers(offsets, bucket, min(bucket + 2, spec.buckets)).tolist(), count]
    low, high = ends[:2]
    if not 0 <= low <= high <= count:
        raise CorruptError(offsets.path, expected=f"rising numbers up to {count}", found=f"{low}, {high}")
    return bucket, _bisect(reads, ids, low, high, np.uint64(wanted & (1 << 64) - 1))


def _bisect(reads: _Reads, ids: Leaf, low: int, high: int, wanted: np.uint64) -> int | None:
    """Returns the row of an id among rows `low:high`, which are in rising order of unsigned ids."""
    while low < high:
        start = max(low, min((low + high - BLOCK_IDS) // 2, high - BLOCK_IDS))
        stop = min(start + BLOCK_IDS, high)
        block = reads.numbers(ids, start, stop).view(np.uint64)
        at = int(np.searchsorted(block, wanted))
        if at < len(block) and block[at] == wanted:
            return start + at
        if 0 < at < len(block):
            return None
        low, high = (low, start) if at == 0 else (stop, high)
    return None


def _scan(reads: _Reads, ids: Leaf, count: int, wanted: int) -> int | None:
    for start in range(0, count, BLOCK_IDS):
        found = np.flatnonzero(reads.numbers(ids, start, min(start + BLOCK_IDS, count)) == wanted)
        if len(found):
            return start + int(found[0])
    return None


def _place(index: Index, leaf: Leaf, row: int, nbytes: int, rank: int | None) -> tuple[ChunkLocation, int]:
    """Returns the chunk that holds a row of a column, and where in the file the row begins."""
    assert leaf.spec is not None, "columns are arrays"
    region = Region((row, *(0 for _ in leaf.spec.shape[1:])), (1, *leaf.spec.shape[1:]))
    chunks = [at for at in locate_chunks(index, leaf, region) if rank is None or at.rank == rank]
    if not chunks:
        raise CorruptError(leaf.path, expected=f"a chunk with row {row}", found="none")
    return chunks[0], chunks[0].start + (row - chunks[0].region.offset[0]) * nbytes


def _slots(reads: _Reads, index: Index, ids: Leaf, row: int, rank: int | None) -> Iterator[RowSlot]:
    table = table_path(ids.path)
    prefix = f"{table}/{TABLE_KEYS[2]}/" if table else f"{TABLE_KEYS[2]}/"
    for number in range(ids.number + 2, len(index.entries)):  # a slice would decode all of them
        leaf = index.entries[number]
        spec = leaf.spec
        if not leaf.path.startswith(prefix) or leaf.ranks != ids.ranks or spec is None or not spec.shape:
            break
        shape, itemsize = spec.shape[1:], dtype_of(spec.dtype).itemsize
        nbytes = math.prod(shape) * itemsize
        values: list[str] = []
        if nbytes <= MAX_NBYTES:
            data = reads.of(leaf, Region((row, *(0 for _ in shape)), (1, *shape)))
            values = element_texts(data[:SHOWN], spec.dtype)
        at, start = _place(index, leaf, row, nbytes, rank)
        yield RowSlot(
            leaf.path,
            leaf.number,
            dtype=spec.dtype,
            shape=shape,
            elements=math.prod(shape),
            values=tuple(values),
            file=at.file.name,
            start=start,
            stop=start + nbytes,
        )
