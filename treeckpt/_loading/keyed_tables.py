"""Finds the rows of a saved table that this rank wants, and reads them.

Rows are saved in the order of their buckets. Where the wanted table has the buckets of the saved one, a rank's rows are
one range, given by two numbers of `offsets`. Where it has others (another function, another number of buckets), all ids
are read, and the wanted rows of every slot are selected while the slot is read.

Of chosen ids (`ids=`) those of their buckets are read, with the first rows of these; then the rows that have them. Rows
that lie near each other are read together, and the reads are rounded to blocks of checksums where these are compared.

Rows of a slot that come from another table than the ids, by rules or from another checkpoint, are joined to these by
the ids of the table that they were saved with, whatever rules make of the rest of that table. An id that this table
lacks is filled where the target has a fill value, and refused otherwise.

Where several checkpoints of a bank give ids of one table, it gets the rows of all of them, joined by id: of an id that
several have, the last one's row is taken, as far as that one has its slots (`RowGivers`).

A table is never loaded in part: a slot that is not in the checkpoint, or not selected, is filled where the target has a
fill value, and refused otherwise, because its old rows are not those of the new ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .._arrays.base import ArrayTarget, TargetPiece, raw_dtype
from .._arrays.registry import abstract_of, source_of
from .._arrays.table_columns import check_order, read_ids
from .._core.format.records import Leaf
from .._core.format.table_deltas import parts_of
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region
from .._core.tree.keyed_table import (
    ChosenIds,
    TableColumn,
    buckets_of,
    owned_text,
    sort_rows,
    table_path,
)
from .._core.tree.paths import similar_paths
from .._core.tree.spec import ArraySpec, TableSpec
from .._core.tree.structure import TABLE_KEYS
from ..errors import CorruptError, MismatchError
from ..rules._assemble import constant_write
from ..rules._composed_array import Constant
from ..rules._view import ComposedLeaf
from .plan import LeafPlaceholder, page_offset
from .wanted_rows import (
    Join,
    Rows,
    all_rows,
    find_chosen,
    find_rows,
    first_rows,
    ids_of,
    join,
    rising,
    row_pieces,
)

if TYPE_CHECKING:
    from .match import Load


class GivenRows(msgspec.Struct, frozen=True):
    """The rows of a column that one checkpoint gives."""

    giver: Load
    leaf: Leaf
    joined: Join
    whole: ArraySpec
    """What is wanted of kind, dtype and row shape, with all saved rows."""


def ids_beside(path: str) -> str | None:
    """Returns the path of the ids of the table that has a slot at a path; None for a path of no slot."""
    *table, slots, _ = ("", *path.split("/"))
    return "/".join([*table[1:], TABLE_KEYS[0]]) if slots == TABLE_KEYS[2] else None


def ids_to_join(giver: Load, leaf: Leaf, path: str, home: Load, ids: Leaf) -> Leaf | None:
    """Returns the ids that a slot was saved with; None where these are the ids of its table, or all rows are equal.

    Raises:
        MismatchError: there are none, or rules moved its rows.
    """
    sources, moved = [leaf], False
    if isinstance(leaf, ComposedLeaf):
        sources, parts = list(leaf.sources.values()), [p for p in leaf.array.parts if not isinstance(p, Constant)]
        moved = any(part.axes[:1] != (0,) or part.region.offset[0] != part.box.offset[0] for part in parts)
    names = [giver.index.entries[source.number].path for source in sources]
    saved_ids = {leaf.number: leaf for leaf in (_saved_ids(giver, name) for name in names) if leaf is not None}
    if moved or len(saved_ids) > 1 or (sources and not saved_ids):
        raise MismatchError(
            path,
            expected="a slot of one KeyedTable, whose rows have ids",
            found=f"{', '.join(names[:4])}{', its rows moved by rules' if moved else ''}",
            hint="Load it under a path of its own, and build the table from there",
        )
    return next((own for own in saved_ids.values() if giver is not home or own.number != ids.number), None)


def _saved_ids(job: Load, slot: str) -> Leaf | None:
    """Returns the ids that a slot of this name was saved with."""
    leaves = job.index.by_path.get(ids_beside(slot) or "", ())
    own = [leaf for leaf in leaves if leaf.ranks is None or job.source_rank in decode_runs(leaf.ranks)]
    return next((leaf for leaf in own if leaf.number in job.index.tables), None)


def no_plain_rows(path: str, wanted: Any, where: str) -> MismatchError:
    """Returns the error for plain arrays, which have no ids to join rows by."""
    return MismatchError(
        path,
        expected=f"a KeyedTable in like, to join rows of {where} by id",
        found=f"a {type(wanted).__name__}",
        hint="Ask for a tc.KeyedTable, or take the whole table from one checkpoint, as it was saved",
    )


def check_tables(job: Load, chosen: ChosenIds) -> None:
    """Refuses, by a MismatchError, the name of what is no table of a checkpoint, and a checkpoint without any."""
    tables = [table_path(leaf.path) for leaf in job.view.entries if leaf.number in job.index.tables]
    for name in chosen.of_table.keys() - set(tables) or ([""] if not tables else []):
        near = similar_paths(name, tables)
        raise MismatchError(
            f"ids[{name!r:.80}]" if chosen.of_table else "ids",
            expected="the path of a KeyedTable in the checkpoint",
            found="none in it" if not tables else "no table there",
            hint=f"There is {', '.join(near or tables[:5])}" if tables else "Load it without ids=",
        )


def find_column(job: Load, column: TableColumn, path: str) -> Leaf | None:
    """Returns the saved leaf of a column; None where it stays as it is, or is filled.

    Raises:
        MismatchError: it would keep rows that are not those of the ids.
    """
    if column.kind == "offsets":
        return None
    if (giver := job.options.joined.get(path)) is not None:
        return giver.find(path)
    leaf = job.find(path) if job.selected(path) else None
    ids = _prefix(column, path) + TABLE_KEYS[0]
    if leaf is not None and not job.selected(ids):
        raise MismatchError(
            path,
            expected="a slot together with the ids of its rows",
            found="only the slot selected",
            hint=f"Select {ids} too, or the whole table and exclude what is not wanted",
        )
    if leaf is not None or job.find(ids) is None or not job.selected(ids):
        if leaf is None and job.selected(path):
            job.missing.append(path)  # with all of its table
        return leaf
    if column.name in column.view.table.fill:
        return None
    if job.selected(path):
        job.missing.append(path)
        if job.options.strict:
            return None
    raise MismatchError(
        path,
        expected="each slot of the table, or what to fill it with",
        found="not in the checkpoint" if job.selected(path) else "not selected",
        hint=f"Pass fill={{{column.name!r}: 0.0}} to the KeyedTable in like, or leave the slot out of it",
    )


def column_slot(job: Load, column: TableColumn, path: str, leaf: Leaf | None) -> LeafPlaceholder:
    """Adds the rows of a column to what is read, or fills them."""
    ids_path = _prefix(column, path) + TABLE_KEYS[0]
    ids = job.find(ids_path) if job.selected(ids_path) else None
    if column.kind == "offsets" or ids is None:
        return LeafPlaceholder(column)
    table = column.view.table
    if job.options.ids is not None and (chosen := job.options.ids.beside(ids_path)) is not None:
        return _chosen_slot(job, column, path, leaf, (ids_path, ids), chosen)
    givers: RowGivers | None = job.options.rows.get(ids_path)
    if givers is not None:
        return _united_slot(job, column, path, leaf, givers)
    rows = column.view.rows
    if rows is None:
        rows = column.view.rows = find_rows(job, table.spec, table.owned, ids_path, ids)
    wanted = _wanted(job, column, path)
    if leaf is None:
        return LeafPlaceholder(_filled(job, table.fill[column.name], wanted, rows.count, path).leaf)
    giver = job.options.joined.get(path, job)
    if column.kind == "slot" and (own := ids_to_join(giver, leaf, path, job, ids)) is not None:
        joined = column.view.joins.get((giver, own.number))
        if joined is None:
            theirs = find_rows(giver, table.spec, table.owned, ids_path, own)
            joined = join(ids_of(job, ids, ids_path, rows), ids_of(giver, own, ids_path, theirs), theirs)
            column.view.joins[giver, own.number] = joined
        given = GivenRows(giver, leaf, joined, _with_rows(wanted, leaf))
        return _joined(job, [given], path, joined.missing, table.fill.get(column.name))
    whole = msgspec.structs.replace(wanted, shape=(rows.saved, *wanted.shape[1:]))
    if rows.patch is not None:
        return _patched(job, leaf, rows, whole, path)
    if rows.picked is not None:
        return _joined(job, [GivenRows(job, leaf, Join(rows.picked), whole)], path)
    if rows.count < rows.saved:
        row = whole.shape[1:]
        region = Region((rows.start, *(0 for _ in row)), (rows.count, *row))
        whole = msgspec.structs.replace(whole, regions=(region,))
    slot = job.array(path, leaf, whole)
    if column.kind == "ids":
        job.batch.after.append(partial(_check, job, slot, rows, column, path))
    return slot


def _chosen_slot(
    job: Load, column: TableColumn, path: str, leaf: Leaf | None, beside: tuple[str, Leaf], chosen: np.ndarray
) -> LeafPlaceholder:
    """Adds the rows of chosen ids to what is read, in the order of these.

    Args:
        beside: the path and the leaf of the ids of the table.
    """
    table, (ids_path, ids), wanted = column.view.table, beside, _wanted(job, column, path)
    buckets = buckets_of(chosen, table.spec)
    if (others := (buckets < table.owned[0]) | (buckets >= table.owned[1])).any():
        raise MismatchError(
            ids_path,
            expected=f"{owned_text(table.spec, table.owned)}, as owned in like says",
            found=f"{chosen[others][0]} among the chosen ids",
            hint="Choose ids of this rank, or leave owned= out of the KeyedTable in like",
        )
    if column.kind == "ids":
        if not table.slots:
            _refuse_missing(job, find_chosen(job, ids, ids_path, chosen), path)
        return _given_ids(job, wanted, chosen, path)
    fill = table.fill.get(column.name)
    if leaf is None:
        return LeafPlaceholder(_filled(job, table.fill[column.name], wanted, len(chosen), path).leaf)
    giver = job.options.joined.get(path, job)
    joined = find_chosen(giver, ids_to_join(giver, leaf, path, job, ids) or ids, ids_path, chosen)
    return _joined(job, [GivenRows(giver, leaf, joined, _with_rows(wanted, leaf))], path, joined.missing, fill)


def _united_slot(job: Load, column: TableColumn, path: str, leaf: Leaf | None, givers: RowGivers) -> LeafPlaceholder:
    """Adds the rows of a column that several checkpoints give, or fills them."""
    table, wanted = column.view.table, _wanted(job, column, path)
    ids = givers.ids(table.spec, table.owned)
    if column.kind == "ids":
        return _given_ids(job, wanted, ids, path)
    if leaf is None:
        return LeafPlaceholder(_filled(job, table.fill[column.name], wanted, len(ids), path).leaf)
    given, missing = givers.column(path, wanted, table.spec, table.owned, alone=job.options.joined.get(path))
    return _joined(job, given, path, missing, table.fill.get(column.name))


def _given_ids(job: Load, wanted: ArraySpec, chosen: np.ndarray, path: str) -> LeafPlaceholder:
    """Returns new ids, the chosen ones."""
    target = job.new(msgspec.structs.replace(wanted, shape=chosen.shape), path)
    _put_ids(target, chosen)
    job.loaded += 1
    return LeafPlaceholder(target.leaf)


def _put_ids(target: ArrayTarget, ids: np.ndarray) -> None:
    for piece in target.pieces if len(ids) else ():
        piece.data.write((slice(0, len(ids)),), ids.view(raw_dtype(8)))


def _refuse_missing(job: Load, joined: Join, path: str) -> None:
    """Refuses, by a MismatchError, chosen ids that a table lacks."""
    if len(joined.missing):
        listed = ", ".join(map(str, joined.missing[:5])) + (", ..." if len(joined.missing) > 5 else "")
        raise MismatchError(
            path,
            expected="the chosen ids in the table",
            found=f"{len(joined.missing)} that are not in {job.checkpoint.url}: {listed}",
            hint="Pass like with a KeyedTable(..., fill={slot: 0.0}), whose slots are filled for these",
        )


def _prefix(column: TableColumn, path: str) -> str:
    """What the paths of a table's columns begin with."""
    steps = path.split("/")[: -1 if column.kind != "slot" else -2]
    return "/".join([*steps, ""])


def _wanted(job: Load, column: TableColumn, path: str) -> ArraySpec:
    """What a column of the target says of kind, dtype and row shape; its number of rows says nothing."""
    spec = abstract_of(column.array, path, job.here)
    if spec is None or not spec.shape or spec.regions is not None:
        raise MismatchError(
            path,
            expected="an array of rows, or an ArraySpec of one",
            found=f"{type(column.array).__name__}",
            hint='As in KeyedTable(tc.ArraySpec((0,), "int64"), {"embedding": tc.ArraySpec((0, 16), "float32")})',
        )
    if column.kind == "ids" and (spec.dtype, len(spec.shape)) != ("int64", 1):
        raise MismatchError(
            path,
            expected="ids of int64[N]",
            found=f"{spec.dtype} of shape {spec.shape}",
            hint="As in np.empty(0, np.int64): an empty list alone becomes an array of float64",
        )
    return spec


def _filled(job: Load, fill: float, wanted: ArraySpec, count: int, path: str) -> ArrayTarget:
    """Returns a new slot that is filled with one number."""
    spec = msgspec.structs.replace(wanted, shape=(count, *wanted.shape[1:]))
    target = job.new(spec, path)
    for piece in target.pieces:
        constant_write(Constant(piece.region, float(fill), ()), piece, spec)()
    return target


def _check(job: Load, slot: LeafPlaceholder, rows: Rows, column: TableColumn, path: str) -> None:
    """Checks that the loaded ids are in the buckets that they were loaded for."""
    if not rows.count:
        return
    source = source_of(slot.leaf, path, job.here)
    assert source is not None, "ids are an array"
    if wrong := check_order(read_ids(source), rows.spec, column.view.table.owned):
        raise CorruptError(
            path,
            expected=f"ids of buckets {column.view.table.owned} in rising order",
            found=wrong,
            hint="The table was changed after it was saved",
        )


# slots of another table than the ids ------------------------------------------------------------------------------
def slot_as_saved(job: Load, leaf: Leaf) -> LeafPlaceholder | None:
    """Adds ids and slots of which not all saved rows are wanted, or whose ids come from another table; else None."""
    path, spec = leaf.path, leaf.spec
    is_ids = leaf.number in job.index.tables
    ids_path = path if is_ids else ids_beside(path)
    if ids_path is None or spec is None:
        return None
    home = job.options.joined.get(ids_path, job)
    ids = home.find(ids_path) if home is not job or job.selected(ids_path) else None
    if ids is None or ids.number not in home.index.tables:
        return None
    wanted = msgspec.structs.replace(spec, device=None) if job.options.device is None else spec
    givers: RowGivers | None = job.options.rows.get(ids_path)
    if givers is not None:
        saved = home.index.tables[ids.number]
        united = givers.ids(saved, (0, saved.buckets))
        if is_ids:
            return _given_ids(job, wanted, united, path)
        given, missing = givers.column(path, wanted, saved, (0, saved.buckets), alone=job)
        return _joined(job, given, path, missing)
    chosen = job.options.ids.beside(ids_path) if job.options.ids is not None else None
    own = None if is_ids else ids_to_join(job, leaf, path, home, ids)
    if chosen is None and own is None:
        rows = all_rows(job, ids, ids_path) if parts_of(job.index, ids) else None
        if rows is None or rows.patch is None:
            return None
        return _patched(job, leaf, rows, _with_rows(wanted, leaf), path)
    elif chosen is not None:
        joined = find_chosen(job, own or ids, ids_path, chosen)
        _refuse_missing(job, joined, ids_path)
        if is_ids:
            return _given_ids(job, wanted, chosen, path)
    else:
        assert own is not None, "else the rows are its own"
        tables = (home, ids, all_rows(home, ids, ids_path)), (job, own, rows := all_rows(job, own, ids_path))
        mine, theirs = (ids_of(giver, table_ids, ids_path, taken) for giver, table_ids, taken in tables)
        joined = join(mine, theirs, rows)
    return _joined(job, [GivenRows(job, leaf, joined, _with_rows(wanted, leaf))], path, joined.missing)


def refuse_plain(job: Load, leaf: Leaf, path: str, wanted: Any) -> None:
    """Refuses, by a MismatchError, rows of a table with deltas, or beside the ids of another one, for plain arrays."""
    ids_path = path if leaf.number in job.index.tables else ids_beside(path)
    if ids_path is None or (ids := job.find(ids_path)) is None:
        return
    if parts_of(job.index, ids):
        raise MismatchError(
            path,
            expected="a KeyedTable in like, or no like: some of the saved rows are replaced by later ones",
            found=f"a {type(wanted).__name__}",
            hint="Ask for a tc.KeyedTable; a checkpoint that is saved without base= has the rows of plain arrays",
        )
    if ids_path == path or not job.selected(ids_path) or ids.number not in job.index.tables:
        return
    if ids_to_join(job, leaf, path, job, ids) is not None:
        raise no_plain_rows(path, wanted, job.checkpoint.url)


def _with_rows(wanted: ArraySpec, leaf: Leaf) -> ArraySpec:
    """Returns a spec with the rows of a saved slot."""
    assert leaf.spec is not None, "slots are arrays"
    return msgspec.structs.replace(wanted, shape=(leaf.spec.shape[0], *wanted.shape[1:]))


def _patched(job: Load, leaf: Leaf, rows: Rows, whole: ArraySpec, path: str) -> LeafPlaceholder:
    """Adds a column of a table with deltas: the range of whole rows is read in place, and then the others over it."""
    patch, row = rows.patch, whole.shape[1:]
    assert patch is not None, "the table has deltas"
    spec = msgspec.structs.replace(whole, shape=(rows.count, *row))
    if leaf.number in job.index.tables:
        own = job.new(spec, path)
        job.batch.after.append(lambda: _put_ids(own, patch().ids))
    else:
        job.check(path, leaf, whole)
        job.claims.take(path, leaf)
        region = Region((rows.start, *(0 for _ in row)), (rows.kept, *row))
        own = job.new(spec, path, 0 if isinstance(leaf, ComposedLeaf) else page_offset(job.index, leaf, region))
        [piece] = own.pieces
        kept = first_rows(piece.data, rows.kept)
        if kept is not None and rows.kept:
            job.batch.add_target(path, leaf, ArrayTarget(whole, own.leaf, [TargetPiece(region, kept)]))
        in_place = kept is not None or not rows.kept
        target = ArrayTarget(whole, own.leaf, own.pieces)
        job.batch.after.append(partial(_put_others, job, leaf, target, rows, path, in_place=in_place))
    job.loaded += 1
    return LeafPlaceholder(own.leaf)


def _put_others(job: Load, leaf: Leaf, target: ArrayTarget, rows: Rows, path: str, *, in_place: bool) -> None:
    """Reads the rows of a table with deltas over the range that was read in place; without it all rows."""
    assert rows.patch is not None and leaf.spec is not None, "a column of a table with deltas"
    patch, row = rows.patch(), target.spec.shape[1:]
    others = patch.others if in_place else rising(patch.numbers(rows.start), np.arange(rows.count))
    nbytes = math.prod(row) * dtype_of(leaf.spec.dtype).itemsize
    pieces = row_pieces(target.pieces[0].data, others, row, nbytes)
    batch = job.new_batch()
    batch.add_target(path, leaf, ArrayTarget(target.spec, target.leaf, pieces))
    job.run_now(batch)


def _joined(
    job: Load,
    given: Sequence[GivenRows],
    path: str,
    missing: Sequence[int] | np.ndarray = (),
    fill: float | None = None,
) -> LeafPlaceholder:
    """Adds the rows of a column, each in its place in the table of `job`.

    Args:
        missing: the ids of the table of which nobody gives a row.
        fill: the number that fills these.
    """
    count, last = sum(len(one.joined.rows) for one in given) + len(missing), given[-1]
    if len(missing) and fill is None:
        raise MismatchError(
            path,
            expected=f"a row for each of the table's {count} ids",
            found=f"none for {len(missing)} of them, as {missing[0]}, in the table of {last.giver.checkpoint.url}",
            hint=f"Pass like with a KeyedTable(..., fill={{{path.rpartition('/')[2]!r}: 0.0}}), or leave the slot out",
        )
    for one in given:
        one.giver.check(path, one.leaf, one.whole)
        one.giver.claims.take(path, one.leaf)
    row = last.whole.shape[1:]
    if len(missing) and fill is not None:
        own = _filled(job, fill, last.whole, count, path)
    else:
        own = job.new(msgspec.structs.replace(last.whole, shape=(count, *row)), path)
    for one in given:
        assert one.leaf.spec is not None, "columns are arrays"
        nbytes = math.prod(row) * dtype_of(one.leaf.spec.dtype).itemsize
        pieces = [part for piece in own.pieces for part in row_pieces(piece.data, one.joined, row, nbytes)]
        batch = job.batch if one.giver is job else one.giver.new_batch()
        batch.add_target(path, one.leaf, ArrayTarget(one.whole, own.leaf, pieces))
        if one.giver is not job:
            job.batch.after.append(partial(job.run_now, batch))
    job.loaded += 1
    return LeafPlaceholder(own.leaf)


# rows of several checkpoints --------------------------------------------------------------------------------------


class _KnownIds(msgspec.Struct, frozen=True):
    """The rows of a saved table that are wanted, and their ids."""

    rows: Rows
    ids: np.ndarray


class RowGivers:
    """The checkpoints of a bank that give rows of one table, and which gives which.

    Args:
        jobs: loads that see them, the last one first in rank.
        path: of the table's ids.
    """

    def __init__(self, jobs: Sequence[Load], path: str) -> None:
        self.jobs, self._path = jobs, path
        self._known: dict[tuple[int, int, TableSpec, tuple[int, int]], _KnownIds] = {}
        self._united: dict[tuple[TableSpec, tuple[int, int]], np.ndarray] = {}
        self._joined: dict[tuple[Any, TableSpec, tuple[int, int]], tuple[list[Join], np.ndarray]] = {}
        self.taken = [0] * len(jobs)
        """How many rows of the table each checkpoint gives."""

    def ids(self, spec: TableSpec, owned: tuple[int, int]) -> np.ndarray:
        """Returns the ids that any of them has, of a range of buckets, in the order of these."""
        if (united := self._united.get((spec, owned))) is not None:
            return united
        parts = [self._of(job, self._ids_leaf(job), spec, owned).ids for job in self.jobs]
        every = np.concatenate(parts)
        order = _last_rows(every, spec)
        stops = np.cumsum([len(part) for part in parts])
        counts = np.bincount(np.searchsorted(stops, order, side="right"), minlength=len(parts)).tolist()
        self.taken = [taken + count for taken, count in zip(self.taken, counts, strict=True)]
        united = self._united[spec, owned] = every[order]
        return united

    def column(
        self, path: str, wanted: ArraySpec, spec: TableSpec, owned: tuple[int, int], *, alone: Load | None
    ) -> tuple[list[GivenRows], np.ndarray]:
        """Returns the rows of a slot that each gives, and the ids of which none has a row.

        Args:
            alone: the checkpoint that gives all of the slot, if it has not rows of its own here.
        """
        jobs: Sequence[Load] = self.jobs
        if alone is not None and all(job.checkpoint is not alone.checkpoint for job in jobs):
            jobs = [alone]
        found = ((job, job.find(path)) for job in jobs if job.selected(path))
        leaves = [(job, leaf) for job, leaf in found if leaf is not None]
        ids = [(job, ids_to_join(job, leaf, path, job, leaf) or self._ids_leaf(job)) for job, leaf in leaves]
        joins, missing = self._joins(ids, spec, owned)
        parts = zip(leaves, joins, strict=True)
        return [GivenRows(job, leaf, own, _with_rows(wanted, leaf)) for (job, leaf), own in parts], missing

    def _joins(
        self, givers: Sequence[tuple[Load, Leaf]], spec: TableSpec, owned: tuple[int, int]
    ) -> tuple[list[Join], np.ndarray]:
        """Returns which rows of each giver go where in the table, and its ids of which none has a row.

        Args:
            givers: each with the ids of its rows; slots with the same ones are joined once.
        """
        key = tuple((id(job), ids.number) for job, ids in givers), spec, owned
        if (found := self._joined.get(key)) is not None:
            return found
        parts = [self._of(job, ids, spec, owned) for job, ids in givers]
        every = np.concatenate([known.ids for known in parts])
        order = _last_rows(every, spec)
        joined = join(self.ids(spec, owned), every[order], Rows(spec, len(order), 0, len(order)))
        numbers, places = order[joined.rows], joined.places
        assert places is not None, "rows that are found have places"
        joins: list[Join] = []
        before = 0
        for known in parts:
            inside = (numbers >= before) & (numbers < before + len(known.ids))
            local = numbers[inside] - before
            saved = known.rows.numbers(local)
            turn = np.argsort(saved)
            joins.append(Join(saved[turn], places[inside][turn]))
            before += len(known.ids)
        self._joined[key] = joins, np.asarray(joined.missing)
        return self._joined[key]

    def _ids_leaf(self, job: Load) -> Leaf:
        leaf = job.find(self._path)
        assert leaf is not None, "it gives rows of the table"
        return leaf

    def _of(self, job: Load, ids: Leaf, spec: TableSpec, owned: tuple[int, int]) -> _KnownIds:
        key = id(job), ids.number, spec, owned
        if key not in self._known:
            rows = find_rows(job, spec, owned, self._path, ids)
            self._known[key] = _KnownIds(rows, ids_of(job, ids, self._path, rows))
        return self._known[key]


def _last_rows(ids: np.ndarray, spec: TableSpec) -> np.ndarray:
    """Returns the position of the last row of each id, in the order of buckets."""
    order = sort_rows(ids, spec, "last").order
    return np.arange(len(ids)) if order is None else order
