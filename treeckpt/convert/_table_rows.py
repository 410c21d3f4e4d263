"""The columns of tables that were saved as deltas, as arrays of the rows that count, in the order of their buckets."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np

from .._arrays.base import LazyArray
from .._core.format.records import Leaf
from .._core.format.table_deltas import TablePart, parts_of
from .._core.sharding.region import Region
from .._core.tree.keyed_table import sort_rows
from .._core.tree.spec import ArraySpec
from .._io.comm.comm import SoloComm
from .._io.storage.checkpoint import Checkpoint
from .._loading.match import Load, LoadOptions
from .._loading.read_batch import read_region
from .._loading.table_row import ids_of_table
from .._loading.wanted_rows import all_rows, ids_of


class _Table(msgspec.Struct, frozen=True):
    """The rows of a table that count."""

    parts: tuple[TablePart, ...]
    rows: np.ndarray
    """Their numbers among all that were saved, in the order of the buckets: int64[n]."""
    firsts: np.ndarray
    """The first of each bucket: int64[buckets]."""


class JoinedTables:
    """The tables of a checkpoint that were saved as deltas; the ids of each are read once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known: dict[int, _Table] = {}

    def column(self, leaf: Leaf, spec: ArraySpec) -> LazyArray | None:
        """Returns the rows of a column that count; None for any other leaf. `spec` is that of its array."""
        index = self._checkpoint.index
        ids = ids_of_table(index, leaf)
        if ids is None or not (parts := parts_of(index, ids)):
            return None
        if ids.number not in self._known:
            self._known[ids.number] = self._read(ids, parts)
        table = self._known[ids.number]
        if leaf.number == ids.number + 1:
            return LazyArray(spec, lambda region: table.firsts[region.slices()].view(np.uint64))
        spec = msgspec.structs.replace(spec, shape=(len(table.rows), *spec.shape[1:]))
        return LazyArray(spec, partial(self._gather, leaf, table))

    def _read(self, ids: Leaf, parts: tuple[TablePart, ...]) -> _Table:
        job = Load(self._checkpoint, SoloComm(), LoadOptions())
        rows = all_rows(job, ids, ids.path)
        numbers = rows.numbers(np.arange(rows.count))
        arranged = sort_rows(ids_of(job, ids, ids.path, rows), rows.spec, path=ids.path)
        return _Table(parts, arranged.of(numbers), arranged.starts[:-1].copy())

    def _gather(self, leaf: Leaf, table: _Table, region: Region) -> np.ndarray:
        """Returns a region of a column, of raw dtype: of each part the rows from the first to the last that it has."""
        rows = table.rows[region.offset[0] : region.stop[0]]
        found: np.ndarray | None = None
        for part in table.parts:
            inside = (rows >= part.start) & (rows < part.stop)
            if inside.any():
                low, high = int(rows[inside].min()), int(rows[inside].max()) + 1
                box = Region((low, *region.offset[1:]), (high - low, *region.shape[1:]))
                data = read_region(self._checkpoint, leaf, box)
                found = np.empty(region.shape, data.dtype) if found is None else found
                found[inside] = data[rows[inside] - low]
        return read_region(self._checkpoint, leaf, Region(region.offset, region.shape)) if found is None else found
