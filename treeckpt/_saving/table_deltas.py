"""Rows of keyed tables that an incremental save writes alone: those that have changed since the checkpoint before.

A table is saved as deltas where this process has made the save that it follows, of the same table on all ranks. What
was there before is in the tree as columns without data, whose files are shared; the rows that have changed or are new
follow as one more delta, with the ids that were deleted. Which rows these are is known from the ids that the program
has marked (`KeyedTable.touched`), or else from a digest of each row, which is kept with the ids: 16 bytes a row.

A table is written whole after `MAX_DELTAS` deltas, or once these have half as many rows as the table, where it has
other slots or another owner than before, after a restart, and under `PerRank`. If one rank writes one table whole, all
ranks write all tables whole, so that they describe the same tree; and so they do where the deltas of all tables take
more bytes, as those of few rows in many buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np

from .._arrays.base import ArraySource, raw_dtype
from .._arrays.registry import source_of
from .._arrays.row_digests import row_digests
from .._arrays.table_columns import column_array, gather_rows, read_ids, table_threads
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.keyed_table import (
    ColumnRows,
    KeyedTable,
    OwnedRows,
    RowMarks,
    TableColumn,
    TableDelta,
    find_ids,
    table_path,
)
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import rank_key
from .._io.comm.comm import Comm

_log = logging.getLogger("treeckpt")
MAX_DELTAS = 10
"""The number of deltas of a table, at most: a load reads all of them."""
MAX_RUNS = 4
"""The number of runs that save tables in turn, at most: of any other run all rows are written."""
FEW_ROWS = 4096
"""The rows of a rank that do not count: a part with fewer is not a reason to write tables whole."""


class TableIds(msgspec.Struct, frozen=True, dict=True):
    """The ids of a table in the order of the program's arrays: int64[N]."""

    ids: np.ndarray

    @cached_property
    def order(self) -> np.ndarray:
        """Their positions, by rising id."""
        return np.argsort(self.ids, kind="stable")

    def find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the position of each wanted id, and whether it is there."""
        return find_ids(self.ids, wanted, self.order)


class KnownTable(msgspec.Struct, frozen=True):
    """The part of a table on this rank, as the checkpoint has it that was saved last."""

    stored: KeyedTable
    """The table with its deltas, without data."""
    ids: TableIds
    digests: np.ndarray | None
    """Of each row: uint64[N]; None where rows were marked."""
    marks: RowMarks
    position: int
    """The marks up to this position are in the checkpoint."""

    @property
    def delta_rows(self) -> int:
        """The number of rows of all deltas."""
        return sum(delta.rows.ids.shape[0] + delta.deleted.ids.shape[0] for delta in self.stored.deltas)


class KnownTables(msgspec.Struct, frozen=True):
    """The tables of the checkpoint that this rank has saved last in a run."""

    save_id: str
    max_shard_bytes: int
    tables: Mapping[str, KnownTable]
    """By the path of the table."""


class KnownRuns(msgspec.Struct, frozen=True):
    """The tables that the comm keeps for the next save in each run, the run that was saved last behind the others."""

    by_url: dict[str, KnownTables]


class _Changes(msgspec.Struct, frozen=True):
    """What has changed in a table."""

    rows: np.ndarray
    """The positions of the rows in the program's arrays that have changed or are new: int64[n]."""
    deleted: np.ndarray
    """The ids that are no longer there: int64[m]."""
    digests: np.ndarray | None


class TableProposal(msgspec.Struct, frozen=True, array_like=True):
    """A rank's tables in an incremental save, as it tells rank 0."""

    follows: str | None = None
    """The save whose tables are shared; "" where tables are whole, None without tables."""
    owned: dict[str, OwnedRows] = {}
    """The rows that it has of each table with deltas, by its path."""
    spared: int = 0
    """The bytes by which these deltas are less than the tables."""


def count_rows_of_ranks(proposals: Iterable[TableProposal]) -> dict[str, int]:
    """Returns the number of rows of each table with deltas, by its path; owners of one range are replicas."""
    parts: dict[str, dict[tuple[int, int], int]] = {}
    for proposal in proposals:
        for path, part in proposal.owned.items():
            parts.setdefault(path, {})[part.start, part.stop] = part.rows
    return {path: sum(rows.values()) for path, rows in parts.items()}


class TableDeltas:
    """One rank's tables in an incremental save: puts deltas in their place, and keeps the rows for the next save.

    Args:
        run: its URL.
        whole: writes all tables whole.
    """

    def __init__(self, comm: Comm, run: str, max_shard_bytes: int, namespace: str, *, whole: bool = False) -> None:
        self._comm, self._run, self._limit, self._namespace = comm, run, max_shard_bytes, namespace
        runs = comm.state.get(KnownRuns)
        known = runs.by_url.get(run) if runs is not None else None
        usable = known is not None and known.max_shard_bytes == max_shard_bytes and not whole
        self._known = known if usable else None
        self._made: dict[str, KnownTable] = {}
        self.proposal = TableProposal()

    def replace(self, tree: object, columns: Sequence[tuple[str, TableColumn]]) -> object:
        """Returns the tree with deltas in the place of tables, or the very tree where these are written whole."""
        own = rank_key(self._comm.rank)
        tables = {
            table_path(path): column.view.table
            for path, column in columns
            if column.kind == "ids" and own not in path.split("/")
        }
        self.proposal = TableProposal("" if tables else None)
        if self._known is not None and self._known.tables.keys() == tables.keys() and tables:
            pairs = {path: self._delta(path, table, self._known.tables[path]) for path, table in tables.items()}
            if all(pair is not None for pair in pairs.values()):
                made = {path: pair for path, pair in pairs.items() if pair is not None}
                self._made = {path: known for path, (_, known, _) in made.items()}
                owned = {
                    path: OwnedRows(self._comm.rank, *tables[path].owned, len(known.ids.ids))
                    for path, known in self._made.items()
                }
                self.proposal = TableProposal(self._known.save_id, owned, sum(spared for _, _, spared in made.values()))
                replaced = {id(tables[path]): table for path, (table, _, _) in made.items()}
                return self._with_tables(tree, replaced)
        self._made = {path: known for path, table in tables.items() if (known := self._whole(path, table)) is not None}
        return tree

    def keep(self, save_id: str) -> None:
        """Keeps the tables for the next save: the save has succeeded."""
        runs = self._comm.state.get(KnownRuns)
        others = {url: known for url, known in runs.by_url.items() if url != self._run} if runs is not None else {}
        own = {self._run: KnownTables(save_id, self._limit, self._made)}
        self._comm.state.put(KnownRuns(dict([*others.items()][1 - MAX_RUNS :]) | own))
        for known in self._made.values():
            known.marks.saved(self._run, known.position)

    def _with_tables(self, tree: object, replaced: Mapping[int, KeyedTable]) -> object:
        """Returns a tree with other tables in the place of those with these identities."""
        options = {"namespace": self._namespace, "whole": frozenset(replaced)}
        _, leaves = flatten(tree, rank=self._comm.rank, **options)
        return replace_leaves(tree, (replaced.get(id(leaf), leaf) for _, leaf in leaves), **options)

    def _sources(self, path: str, table: KeyedTable) -> dict[str, ArraySource] | None:
        """Returns the columns of a table by the name of the slot, its ids as ""; None where it is no valid table."""
        arrays = {"": table.ids, **table.slots}
        if any(array is ... for array in arrays.values()):
            return None
        rank = self._comm.rank
        return {name: column_array(array, path, rank, source_of) for name, array in arrays.items()}

    def _whole(self, path: str, table: KeyedTable) -> KnownTable | None:
        """Returns what the next save has to know of a table that is written whole."""
        sources = self._sources(path, table)
        if sources is None or not _is_valid(sources):
            return None  # describing it raises the error
        ids, position = read_ids(sources[""]), table.marks.position
        if table.keep is not None and len(np.unique(ids)) < len(ids):
            return None
        digests = None if position else _digests(sources, len(ids))
        columns = {name: ColumnRows(source.spec) for name, source in sources.items()}
        stored = _part(table, columns.pop(""), columns)
        return KnownTable(stored, TableIds(ids.copy()), digests, table.marks, position)

    def _delta(self, path: str, table: KeyedTable, known: KnownTable) -> tuple[KeyedTable, KnownTable, int] | None:
        """Returns a table as deltas, what the next save has to know of it, and `TableProposal.spared`.

        It returns None where the table is to be written whole.
        """
        sources, stored = self._sources(path, table), known.stored
        if sources is None or not _is_valid(sources) or (table.spec, table.owned) != (stored.spec, stored.owned):
            return None
        columns = {"": stored.ids, **stored.slots}
        if {n: _row(source.spec) for n, source in sources.items()} != {n: _row(c.spec) for n, c in columns.items()}:
            return None
        ids, position = TableIds(read_ids(sources[""])), table.marks.position
        if np.array_equal(ids.ids, known.ids.ids):
            ids = known.ids
        changes = None if len(stored.deltas) >= MAX_DELTAS else _changes(path, table, sources, ids, known)
        if changes is None:
            return None
        count = known.delta_rows + len(changes.rows) + len(changes.deleted)
        if count > max(FEW_ROWS, stored.ids.shape[0]) // 2:
            return None
        arrays = {"": table.ids, **table.slots}
        new = {name: gather_rows(arrays[name], source, changes.rows, source_of) for name, source in sources.items()}
        spec = msgspec.structs.replace(stored.ids.spec, shape=changes.deleted.shape)
        deleted = _part(table, ColumnRows(spec, changes.deleted.view(raw_dtype(8))), {})
        delta = TableDelta(_part(table, new.pop(""), new), deleted)
        without = TableDelta(*(_without_data(part) for part in (delta.rows, delta.deleted)))
        made, then = (_with_deltas(stored, table, (*stored.deltas, last)) for last in (delta, without))
        kept = ids if ids is known.ids else TableIds(ids.ids.copy())
        row = sum(source.spec.nbytes for source in sources.values()) // max(len(ids.ids), 1)
        # the first rows of the buckets are written twice
        spared = (
            (len(ids.ids) - len(changes.rows)) * row - deleted.ids.spec.nbytes - 8 * (table.owned[1] - table.owned[0])
        )
        return made, KnownTable(then, kept, changes.digests, table.marks, position), spared


class SharedSave(Protocol):
    """The checkpoint that a save follows."""

    @property
    def shared_id(self) -> str:
        """The save whose files may be shared; "" for none."""
        ...


def must_be_whole(proposals: Iterable[TableProposal], base: SharedSave | None) -> bool:
    """Whether ranks must write all tables whole.

    They must where not all share those of the checkpoint that the save follows, or where that is less to write.
    """
    made = [proposal for proposal in proposals if proposal.follows is not None]
    saves = {proposal.follows for proposal in made}
    if saves <= {""}:
        return False
    return saves != {base.shared_id if base is not None else ""} or sum(proposal.spared for proposal in made) <= 0


def _is_valid(sources: Mapping[str, ArraySource]) -> bool:
    """Whether ids are int64[N], and each slot has N rows."""
    ids = sources[""].spec
    shapes = (source.spec.shape for source in sources.values())
    return (ids.dtype, len(ids.shape)) == ("int64", 1) and all(shape[:1] == ids.shape for shape in shapes)


def _row(spec: ArraySpec) -> tuple[str, tuple[int, ...]]:
    return spec.dtype, spec.shape[1:]


def _without_data(table: KeyedTable) -> KeyedTable:
    slots = {name: ColumnRows(column.spec) for name, column in table.slots.items()}
    return _part(table, ColumnRows(table.ids.spec), slots)


def _part(table: KeyedTable, ids: object, slots: Mapping[str, object]) -> KeyedTable:
    """Returns a table of the same buckets with other arrays, and without scalars."""
    part = table.with_parts(ids, slots, {})
    part.keep, part.fill = None, {}
    return part


def _with_deltas(stored: KeyedTable, table: KeyedTable, deltas: tuple[TableDelta, ...]) -> KeyedTable:
    """Returns a stored table with the scalars of `table`, and with deltas."""
    made = table.with_parts(stored.ids, stored.slots, table.scalars)
    made.deltas = deltas
    return made


def _digests(sources: Mapping[str, ArraySource], rows: int) -> np.ndarray:
    slots = [source for name, source in sources.items() if name]
    return row_digests(slots, rows, table_threads())


def _changes(
    path: str, table: KeyedTable, sources: Mapping[str, ArraySource], ids: TableIds, known: KnownTable
) -> _Changes | None:
    """Returns what has changed in a table; None where that is not known."""
    if table.marks.position and known.marks is table.marks:
        marked = table.marks.since(known.position)  # dropped where another run has saved many times since
        return None if marked is None else _marked_changes(path, ids, marked, known.ids)
    if known.digests is None:
        return None
    digests = _digests(sources, len(ids.ids))
    if ids is known.ids:
        return _Changes(np.flatnonzero(digests != known.digests), np.empty(0, np.int64), digests)
    rising = ids.ids[ids.order]
    if (rising[1:] == rising[:-1]).any():
        return None  # the whole table is refused, or `keep` decides
    position, was = known.ids.find(rising)
    same = was & (digests[ids.order] == known.digests[position] if len(known.digests) else was)
    before = known.ids.ids[known.ids.order]
    _, stays = ids.find(before)
    return _Changes(np.sort(ids.order[~same]), before[~stays], digests)


def _marked_changes(path: str, ids: TableIds, marked: np.ndarray, before: TableIds) -> _Changes | None:
    """Returns the changes that marks name; None where they do not explain the number of rows."""
    (position, there), (_, was) = ids.find(marked), before.find(marked)
    told = len(before.ids) + int((there & ~was).sum()) - int((was & ~there).sum())
    if len(ids.ids) != told:
        _log.warning("%s: written whole: %d rows, of which `touched` explains %d", path, len(ids.ids), told)
        return None
    return _Changes(np.sort(position[there]), marked[was & ~there], None)
