"""The columns of keyed tables: reads the rows of the program's arrays in the order in which they are saved.

Ids are sorted once for all columns; rows are then gathered piece by piece while they are written, so that no second
table is created. Arrays may be of any library that has an adapter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from .._core.sharding.placements import BoxLayout
from .._core.sharding.region import Region
from .._core.tree.keyed_table import (
    ColumnRows,
    Executor,
    RowOrder,
    TableColumn,
    buckets_of,
    owned_text,
    sort_rows,
)
from .._core.tree.spec import ArraySpec, TableSpec
from .._threads import WorkerThreads
from ..errors import TreeError
from .base import (
    ArrayReader,
    ArraySource,
    ArrayWriter,
    Box,
    HostArray,
    HostMemory,
    SourcePiece,
    StoredElsewhere,
    raw_dtype,
)

INT64 = "int64"
CHECKED_ROWS = 1 << 20
"""The number of rows whose order is checked at a time."""
THREADS = 4
"""The number of threads that gather rows: each waits for memory most of the time, whose bandwidth allows more."""
GATHER_NBYTES = 1 << 20
"""The bytes that a thread gathers at a time."""


class TableRows(msgspec.Struct, frozen=True):
    """The ids of a table to save, and their order."""

    ids: np.ndarray
    """The ids in host memory, in the order of the table: int64[N]."""
    arranged: RowOrder
    together: Executor

    @property
    def count(self) -> int:
        return int(self.arranged.starts[-1])


def _as_elements(rows: np.ndarray) -> np.ndarray:
    """Returns rows of bytes in C order as elements: numpy copies one several times faster than number by number."""
    return rows.reshape(len(rows), -1).view(f"V{rows[:1].nbytes}")[:, 0]


class _ReorderedRows:
    """Reads rows of an array in host memory in another order."""

    def __init__(self, rows: np.ndarray, order: np.ndarray, together: Executor) -> None:
        self._array, self._order, self._together = rows, order, together
        self._rows = _as_elements(rows)

    def read(self, box: Box) -> np.ndarray:
        return self._array[self._order[box[0]]][(slice(None), *box[1:])]

    def gather(self, rows: slice, out: np.ndarray) -> None:
        """Puts whole rows into memory, uint8[bytes of the rows]."""
        wanted, made = self._order[rows], out.view(self._rows.dtype)
        step = max(1, GATHER_NBYTES // self._rows.itemsize)
        parts = [slice(low, low + step) for low in range(0, len(wanted), step)]
        # by default numpy would buffer `out` to raise for numbers out of range, of which there are none
        self._together([partial(np.take, self._rows, wanted[part], out=made[part], mode="clip") for part in parts])


class _IndexedRows:
    """Reads rows of an array that is not in host memory, gathered by its own library."""

    def __init__(self, array: Any, order: np.ndarray, source_of: Callable[[Any], ArraySource | None]) -> None:
        self._array, self._order, self._source_of = array, order, source_of

    def read(self, box: Box) -> np.ndarray:
        part = self._array[self._order[box[0]]]
        source = self._source_of(part)
        assert source is not None, "a part of an array is an array"
        return source.pieces[0].data.read((slice(0, len(part)), *box[1:]))


def column_source(
    column: TableColumn,
    path: str,
    rank: int,
    source_of: Callable[[Any, str, int], ArraySource | None],
    *,
    own: bool = False,
) -> tuple[ArraySource, int | None]:
    """Describes a column to save; for ids and slots with the number of rows.

    Shape and layout count buckets instead of rows, see `_core.tree.keyed_table`; under `PerRank` (`own`) they count
    rows, and there is no layout.

    Raises:
        TreeError: the arrays are no valid table.
    """

    def describe(array: Any) -> ArraySource:
        return column_array(array, path, rank, source_of)

    table = column.view.table
    if isinstance(table.ids, ColumnRows) and table.ids.rows is None:
        return _stored_source(column, table.ids, rank)
    held = column.view.held
    if held is None:
        held = column.view.held = _held(column, path, describe(table.ids))
    start, stop = table.owned
    if column.kind == "offsets":
        starts = held.arranged.starts
        # a copy, which `shift_offsets` changes in place
        offsets = starts[:-1] if own else starts[start:stop].copy()
        spec = ArraySpec((table.spec.buckets,), INT64, kind="numpy")
        layout = None if own else BoxLayout(((rank, Region((start,), (stop - start,))),))
        region = Region((0,), spec.shape) if own else Region((start,), (stop - start,))
        return ArraySource(spec, layout, (SourcePiece(region, HostArray(offsets)),)), None
    source, rows = describe(column.array), held.count
    found = source.spec.shape[0] if source.spec.shape else None
    if found != describe(table.ids).spec.shape[0]:
        raise TreeError(path, expected="a row for each id", found=f"shape {source.spec.shape}")
    row = source.spec.shape[1:]
    data = _in_order(column, held, source, source_of, path)
    piece = SourcePiece(Region((0, *(0 for _ in row)), (rows, *row)), data)
    if own:
        return ArraySource(msgspec.structs.replace(source.spec, shape=piece.region.shape), None, (piece,)), None
    spec = msgspec.structs.replace(source.spec, shape=(table.spec.buckets, *row))
    owned = Region((start, *(0 for _ in row)), (stop - start, *row))
    return ArraySource(spec, BoxLayout(((rank, owned),)), (piece,)), rows


def _stored_source(column: TableColumn, ids: ColumnRows, rank: int) -> tuple[ArraySource, int | None]:
    """Describes a column that another checkpoint has; as `column_source`."""
    table, rows = column.view.table, ids.shape[0]
    start, stop = table.owned
    spec = ArraySpec((rows,), INT64, kind="numpy") if column.kind == "offsets" else column.array.spec
    row, is_offsets = spec.shape[1:], column.kind == "offsets"
    corner, count = tuple(0 for _ in row), stop - start
    owned = Region((start, *corner), (count, *row))
    here = owned if is_offsets else Region((0, *corner), (rows, *row))
    spec = msgspec.structs.replace(spec, shape=(table.spec.buckets, *row))
    source = ArraySource(spec, BoxLayout(((rank, owned),)), (SourcePiece(here, StoredElsewhere()),))
    return source, None if is_offsets else rows


def column_array(
    array: Any, path: str, rank: int, source_of: Callable[[Any, str, int], ArraySource | None]
) -> ArraySource:
    """Describes the array of a column, in the order of the program; raises TreeError where it is no plain array."""
    if isinstance(array, ColumnRows) and array.rows is not None:
        return ArraySource(array.spec, None, (SourcePiece(Region.whole(array.shape), HostArray(array.rows)),))
    source = source_of(array, path, rank)
    if source is None or source.layout is not None:
        kind, no_array = type(array).__name__, "Make it a numpy array or a tensor, of a row for each id"
        raise TreeError(
            path,
            expected="a plain array of the rows that are here",
            found=kind if source is None else f"a distributed {kind}",
            hint=no_array if source is None else "Each owner gives its own rows; which those are, owned= says",
        )
    return source


def gather_rows(
    array: Any, source: ArraySource, rows: np.ndarray, source_of: Callable[[Any, str, int], ArraySource | None]
) -> ColumnRows:
    """Returns a copy of rows of a column in host memory; `source` describes its array."""
    data = source.pieces[0].data
    if isinstance(data, (HostArray, HostMemory)):
        copied = np.take(data.array, rows, axis=0)
    else:
        shape = (len(rows), *source.spec.shape[1:])
        whole = tuple(slice(0, n) for n in shape)
        copied = np.ascontiguousarray(_IndexedRows(array, rows, lambda part: source_of(part, "", 0)).read(whole))
    return ColumnRows(msgspec.structs.replace(source.spec, shape=copied.shape), copied)


def table_threads() -> WorkerThreads:
    """Returns the threads that sort, gather and mix the rows of a table."""
    return WorkerThreads(min(THREADS, os.cpu_count() or 1))


def _in_order(
    column: TableColumn,
    held: TableRows,
    source: ArraySource,
    source_of: Callable[[Any, str, int], ArraySource | None],
    path: str,
) -> ArrayReader:
    data = HostArray(held.ids.view(raw_dtype(8))) if column.kind == "ids" else source.pieces[0].data
    order = held.arranged.order
    if order is None:
        return data
    if isinstance(data, (HostArray, HostMemory)) and data.array.flags.c_contiguous and data.array.nbytes:
        return _ReorderedRows(data.array, order, held.together)
    return _IndexedRows(column.array, order, lambda part: source_of(part, path, 0))


def read_ids(source: ArraySource) -> np.ndarray:
    """Returns ids in host memory, int64[N]."""
    data = source.pieces[0].data.read((slice(0, source.spec.shape[0]),))
    return np.ascontiguousarray(data).view(np.int64)


def _held(column: TableColumn, path: str, source: ArraySource) -> TableRows:
    """Sorts the ids of a column's table, and checks that they are of buckets that the table owns."""
    table = column.view.table
    if source.spec.dtype != INT64 or len(source.spec.shape) != 1:
        raise TreeError(path, expected="ids of int64[N]", found=f"{source.spec.dtype} of shape {source.spec.shape}")
    ids, together = read_ids(source), table_threads()
    arranged = sort_rows(ids, table.spec, table.keep, path, execute=together)
    held, starts, (start, stop) = TableRows(ids, arranged, together), arranged.starts, table.owned
    if starts[stop] - starts[start] != held.count:
        stray = np.delete(arranged.of(ids), slice(starts[start], starts[stop]))
        raise TreeError(
            path,
            expected=f"{owned_text(table.spec, table.owned)}, as owned says",
            found=f"{len(stray)} of others, as {stray[0]} of bucket {buckets_of(stray[:1], table.spec)[0]}",
            hint="Deal ids to owners by their bucket, or pass owned= the range that is here, or "
            "tc.KeyedTable.modulo(rank, world) for the ids with id % world == rank",
        )
    return held


def shift_rows(source: ArraySource, start: int) -> ArraySource:
    """Returns the source of a column whose first row here is `start` among those of all ranks."""
    piece = source.pieces[0]
    region = Region((start, *piece.region.offset[1:]), piece.region.shape)
    return msgspec.structs.replace(source, pieces=(SourcePiece(region, piece.data),))


def shift_offsets(source: ArraySource, start: int) -> None:
    """Sets the bucket offsets of a table whose first row here is `start`, in place."""
    memory = source.pieces[0].data
    if isinstance(memory, StoredElsewhere):
        return
    assert isinstance(memory, HostArray), "as column_source created it"
    memory.array[...] += start - (memory.array[0] if memory.array.size else 0)


class SelectedRowsWriter:
    """Writes those rows that have the given numbers to an array, and ignores the others.

    Args:
        rows: their numbers, ascending.
        places: the row of the array for each; by default they follow each other.
    """

    def __init__(self, inner: ArrayWriter, rows: np.ndarray, places: np.ndarray | None = None) -> None:
        self._inner, self._rows, self._places = inner, rows, places

    def write(self, box: Box, data: np.ndarray) -> None:
        low, high = np.searchsorted(self._rows, (box[0].start, box[0].stop)).tolist()
        if low == high:
            return
        rows = self._rows[low:high]
        first, last = int(rows[0]), int(rows[-1]) + 1
        # rows that follow each other, as those of a delta do, need no copy
        together = last - first == len(rows)
        data = data[first - box[0].start : last - box[0].start] if together else data[rows - box[0].start]
        if self._places is None:
            self._inner.write((slice(low, high), *box[1:]), data)
        elif isinstance(self._inner, (HostArray, HostMemory)):
            _scatter(self._inner.array[(slice(None), *box[1:])], self._places[low:high], data)
        else:  # rows with consecutive places together
            places = self._places[low:high]
            starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
            for start, stop in itertools.pairwise(starts):
                first = int(places[start])
                self._inner.write((slice(first, first + stop - start), *box[1:]), data[start:stop])


def _scatter(array: np.ndarray, places: np.ndarray, data: np.ndarray) -> None:
    """Writes rows to places of an array."""
    if not array.flags.c_contiguous or not data.nbytes:
        array[places] = data
        return
    _as_elements(array)[places] = _as_elements(np.ascontiguousarray(data))


def check_order(ids: np.ndarray, spec: TableSpec, owned: tuple[int, int]) -> str:
    """Returns what is wrong with ids that were loaded as those of these buckets; "" if nothing is."""
    last: tuple[int, int] = (-1, -1)
    for low in range(0, len(ids), CHECKED_ROWS):
        part = ids[low : low + CHECKED_ROWS]
        buckets, unsigned = buckets_of(part, spec), part.view(np.uint64)
        first, end = (int(buckets[0]), int(unsigned[0])), (int(buckets[-1]), int(unsigned[-1]))
        rising = (buckets[1:] > buckets[:-1]) | ((buckets[1:] == buckets[:-1]) & (unsigned[1:] > unsigned[:-1]))
        if first <= last or not rising.all():
            return "ids that are not in order, or twice there"
        if first[0] < owned[0] or end[0] >= owned[1]:
            return f"ids of buckets {first[0]} to {end[0]}"
        last = end
    return ""
