"""The columns of keyed tables: rows in the order in which they are saved, taken out of the program's own arrays.

Ids are put in order once for all columns; rows are then gathered piece by piece while they are written, so that no
second table is ever made. Arrays may be of any library that has an adapter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ..core.sharding.placements import BoxLayout
from ..core.sharding.region import Region
from ..core.tree.keyed_table import Column
from ..core.tree.row_order import Executor, RowOrder, buckets_of, sort_rows
from ..core.tree.spec import ArraySpec, TableSpec
from ..errors import TreeError
from .base import Box, HostArray, HostMemory, Piece, Readable, Source, Writable, raw_dtype
from .threads import WorkerThreads

__all__ = ["Picked", "check_order", "column_source", "placed", "read_ids"]

INT64 = "int64"
AT_ONCE = 1 << 20
"""Rows that are looked at at a time where only a yes or no comes of it."""
THREADS = 4
"""That gather rows: each waits for memory most of the time, which has room for more."""
SHARE = 1 << 20
"""Bytes that a thread gathers at a time."""


class Held(msgspec.Struct, frozen=True):
    """The rows of a table that is saved."""

    ids: np.ndarray
    """In host memory, as they stand in the table, int64[N]."""
    arranged: RowOrder
    together: Executor

    @property
    def count(self) -> int:
        return int(self.arranged.starts[-1])


class _Gathered:
    """Rows of an array in host memory, in another order."""

    def __init__(self, rows: np.ndarray, order: np.ndarray, together: Executor) -> None:
        self._array, self._order, self._together = rows, order, together
        # numpy copies a row as one element: several times faster than number by number
        self._rows = rows.reshape(len(rows), -1).view(f"V{rows[:1].nbytes}")[:, 0]

    def read(self, box: Box) -> np.ndarray:
        return self._array[self._order[box[0]]][(slice(None), *box[1:])]

    def gather(self, rows: slice, target: np.ndarray) -> None:
        """Puts whole rows into memory, uint8[bytes of the rows]."""
        wanted, made = self._order[rows], target.view(self._rows.dtype)
        step = max(1, SHARE // self._rows.itemsize)
        parts = [slice(low, low + step) for low in range(0, len(wanted), step)]
        self._together([partial(np.take, self._rows, wanted[part], out=made[part], mode="clip") for part in parts])


class _Indexed:
    """Rows of an array that is not in host memory, gathered by its own library."""

    def __init__(self, array: Any, order: np.ndarray, source_of: Callable[[Any], Source | None]) -> None:
        self._array, self._order, self._source_of = array, order, source_of

    def read(self, box: Box) -> np.ndarray:
        part = self._array[self._order[box[0]]]
        source = self._source_of(part)
        assert source is not None, "a part of an array is one"
        return source.pieces[0].data.read((slice(0, len(part)), *box[1:]))


def column_source(
    column: Column, path: str, rank: int, source_of: Callable[[Any, str, int], Source | None], *, own: bool = False
) -> tuple[Source, int | None]:
    """Describes a column that is to be saved; for ids and slots with the number of rows.

    Shape and layout count buckets in the place of rows, see `core.tree.keyed_table`; under `PerRank` (`own`) they count
    rows, and there is no layout.

    Raises:
        TreeError: the table is none.
    """

    def describe(array: Any) -> Source:
        return _plain(source_of(array, path, rank), array, path)

    table = column.view.table
    held = column.view.held
    if held is None:
        held = column.view.held = _held(column, path, describe(table.ids))
    start, stop = table.owned
    if column.kind == "offsets":
        starts = held.arranged.starts
        offsets = starts[:-1] if own else starts[start:stop].copy()
        spec = ArraySpec((table.spec.buckets,), INT64, kind="numpy")
        layout = None if own else BoxLayout(((rank, Region((start,), (stop - start,))),))
        region = Region((0,), spec.shape) if own else Region((start,), (stop - start,))
        return Source(spec, layout, (Piece(region, HostArray(offsets)),)), None
    source, rows = describe(column.array), held.count
    found = source.spec.shape[0] if source.spec.shape else None
    if found != describe(table.ids).spec.shape[0]:
        raise TreeError(path, expected="a row for each id", found=f"shape {source.spec.shape}")
    row = source.spec.shape[1:]
    data = _in_order(column, held, source, source_of, path)
    piece = Piece(Region((0, *(0 for _ in row)), (rows, *row)), data)
    if own:
        return Source(msgspec.structs.replace(source.spec, shape=piece.region.shape), None, (piece,)), None
    spec = msgspec.structs.replace(source.spec, shape=(table.spec.buckets, *row))
    held = Region((start, *(0 for _ in row)), (stop - start, *row))
    return Source(spec, BoxLayout(((rank, held),)), (piece,)), rows


def _plain(source: Source | None, array: Any, path: str) -> Source:
    if source is None or source.layout is not None:
        kind, no_array = type(array).__name__, "Make it a numpy array or a tensor, of a row for each id"
        raise TreeError(
            path,
            expected="a plain array of the rows that are here",
            found=kind if source is None else f"a distributed {kind}",
            hint=no_array if source is None else "Each owner gives its own rows; which those are, owned= says",
        )
    return source


def _in_order(
    column: Column, held: Held, source: Source, source_of: Callable[[Any, str, int], Source | None], path: str
) -> Readable:
    data = HostArray(held.ids.view(raw_dtype(8))) if column.kind == "ids" else source.pieces[0].data
    order = held.arranged.order
    if order is None:
        return data
    if isinstance(data, (HostArray, HostMemory)) and data.array.flags.c_contiguous and data.array.nbytes:
        return _Gathered(data.array, order, held.together)
    return _Indexed(column.array, order, lambda part: source_of(part, path, 0))


def read_ids(source: Source) -> np.ndarray:
    """Ids in host memory, int64[N]."""
    data = source.pieces[0].data.read((slice(0, source.spec.shape[0]),))
    return np.ascontiguousarray(data).view(np.int64)


def _held(column: Column, path: str, source: Source) -> Held:
    """Puts the ids of a column's table in order, and compares them with what the table says it owns."""
    table = column.view.table
    if source.spec.dtype != INT64 or len(source.spec.shape) != 1:
        raise TreeError(path, expected="ids of int64[N]", found=f"{source.spec.dtype} of shape {source.spec.shape}")
    ids, together = read_ids(source), WorkerThreads(min(THREADS, os.cpu_count() or 1))
    arranged = sort_rows(ids, table.spec, table.keep, path, execute=together)
    held, starts, (start, stop) = Held(ids, arranged, together), arranged.starts, table.owned
    if starts[stop] - starts[start] != held.count:
        stray = np.delete(arranged.of(ids), slice(starts[start], starts[stop]))
        raise TreeError(
            path,
            expected=f"ids of buckets {start}:{stop} of {table.spec.buckets}, as owned says",
            found=f"{len(stray)} of others, as {stray[0]} of bucket {buckets_of(stray[:1], table.spec)[0]}",
            hint="Deal ids to owners by their bucket, or pass owned= the range that is here",
        )
    return held


def placed(sources: dict[str, Source], starts: dict[str, tuple[int, str]]) -> None:
    """Moves the rows of tables to where they stand among those of all ranks, in place.

    Args:
        starts: by path the row with which this rank's begin; for ids also the path of the offsets, else "".
    """
    for path, (start, offsets) in starts.items():
        source = sources[path]
        piece = source.pieces[0]
        region = Region((start, *piece.region.offset[1:]), piece.region.shape)
        sources[path] = msgspec.structs.replace(source, pieces=(Piece(region, piece.data),))
        if offsets:
            memory = sources[offsets].pieces[0].data
            assert isinstance(memory, HostArray), "as column_source made it"
            memory.array[...] += start - (memory.array[0] if memory.array.size else 0)


class Picked:
    """Takes rows as they are read, and puts those with the given numbers into an array of their own.

    Args:
        rows: their numbers, rising.
        places: the row of the array that each is to be; by default they follow each other.
    """

    def __init__(self, inner: Writable, rows: np.ndarray, places: np.ndarray | None = None) -> None:
        self._inner, self._rows, self._places = inner, rows, places

    def write(self, box: Box, data: np.ndarray) -> None:
        low, high = np.searchsorted(self._rows, (box[0].start, box[0].stop)).tolist()
        if low == high:
            return
        data = data[self._rows[low:high] - box[0].start]
        if self._places is None:
            self._inner.write((slice(low, high), *box[1:]), data)
        elif isinstance(self._inner, (HostArray, HostMemory)):
            self._inner.array[(self._places[low:high], *box[1:])] = data
        else:
            self._write_runs(self._places[low:high], box, data)

    def _write_runs(self, places: np.ndarray, box: Box, data: np.ndarray) -> None:
        """Writes rows whose places follow each other together."""
        starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        for start, stop in itertools.pairwise(starts):
            first = int(places[start])
            self._inner.write((slice(first, first + stop - start), *box[1:]), data[start:stop])


def check_order(ids: np.ndarray, spec: TableSpec, owned: tuple[int, int]) -> str:
    """What is wrong with ids that were loaded as those of these buckets: "" if nothing is."""
    last: tuple[int, int] = (-1, -1)
    for low in range(0, len(ids), AT_ONCE):
        part = ids[low : low + AT_ONCE]
        buckets, unsigned = buckets_of(part, spec), part.view(np.uint64)
        first, end = (int(buckets[0]), int(unsigned[0])), (int(buckets[-1]), int(unsigned[-1]))
        rising = (buckets[1:] > buckets[:-1]) | ((buckets[1:] == buckets[:-1]) & (unsigned[1:] > unsigned[:-1]))
        if first <= last or not rising.all():
            return "ids that are not in order, or twice there"
        if first[0] < owned[0] or end[0] >= owned[1]:
            return f"ids of buckets {first[0]} to {end[0]}"
        last = end
    return ""
