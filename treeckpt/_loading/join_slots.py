"""Joins slots to the ids of another table, id by id.

Rules and banks of checkpoints can put a slot beside ids that it was not saved with. The ids of its rows are those of
the table in which it was saved, whatever rules make of the rest of that table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .._arrays.base import ArrayTarget, ArrayWriter, HostArray, TargetPiece, raw_dtype
from .._arrays.table_columns import SelectedRowsWriter
from .._core.format.records import Leaf
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region
from .._core.tree.spec import TableSpec
from .._core.tree.structure import TABLE_KEYS
from ..errors import FormatError, MismatchError
from ..rules._composed_array import Constant
from ..rules._view import ComposedLeaf

if TYPE_CHECKING:
    from .match import Load


class Rows(msgspec.Struct, frozen=True):
    """The wanted rows of a table."""

    spec: TableSpec
    saved: int
    """Rows in the checkpoint."""
    start: int
    count: int
    picked: np.ndarray | None = None
    """Their numbers, where they are not `start:start + count`."""


class Join(msgspec.Struct, frozen=True):
    """Which row of a saved slot goes to which row of a table."""

    rows: np.ndarray
    """Rising numbers of saved rows."""
    places: np.ndarray | None = None
    """Where each is wanted; None where they follow each other."""
    missing: Sequence[int] | np.ndarray = ()
    """Ids of the table that have no such row."""


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
    found = {leaf.number: leaf for leaf in (_saved_ids(giver, name) for name in names) if leaf is not None}
    if moved or len(found) > 1 or (sources and not found):
        raise MismatchError(
            path,
            expected="a slot of one KeyedTable, whose rows have ids",
            found=f"{', '.join(names[:4])}{', its rows moved by rules' if moved else ''}",
            hint="Load it under a path of its own, and build the table from there",
        )
    return next((own for own in found.values() if giver is not home or own.number != ids.number), None)


def _saved_ids(job: Load, slot: str) -> Leaf | None:
    """Returns the ids that a slot of this name was saved with."""
    leaves = job.index.by_path.get(ids_beside(slot) or "", ())
    own = [leaf for leaf in leaves if leaf.ranks is None or job.source_rank in decode_runs(leaf.ranks)]
    return next((leaf for leaf in own if leaf.number in job.index.tables), None)


def ids_of(job: Load, leaf: Leaf, path: str, rows: Rows) -> np.ndarray:
    """Reads the ids of some rows of a table."""
    ids = np.empty(rows.count, np.int64)
    memory = HostArray(ids.view(raw_dtype(8)))
    if rows.picked is None:
        read_now(job, leaf, path, Region((rows.start,), (rows.count,)), memory)
    else:
        read_now(job, leaf, path, Region((0,), (rows.saved,)), SelectedRowsWriter(memory, rows.picked))
    return ids


def join(ids: np.ndarray, theirs: np.ndarray, rows: Rows) -> Join:
    """Finds the rows that have given ids."""
    order = np.argsort(theirs)
    at = np.searchsorted(theirs, ids, sorter=order)
    at = order[np.minimum(at, len(theirs) - 1)] if len(theirs) else at
    there = theirs[at] == ids if len(theirs) else np.zeros(len(ids), bool)
    numbers = at[there] + rows.start if rows.picked is None else rows.picked[at[there]]
    turn = np.argsort(numbers)
    return Join(numbers[turn], np.flatnonzero(there)[turn], ids[~there])


def all_rows(job: Load, ids: Leaf) -> Rows:
    """Returns all rows of the table with these ids."""
    assert ids.spec is not None, "ids are an array"
    return Rows(job.index.tables[ids.number], ids.spec.shape[0], 0, ids.spec.shape[0])


def read_now(job: Load, leaf: Leaf, path: str, region: Region, into: ArrayWriter) -> None:
    """Reads a part of an array at once, because what else is read depends on it."""
    read_pieces_now(job, leaf, path, [TargetPiece(region, into)])


def read_pieces_now(job: Load, leaf: Leaf, path: str, pieces: Sequence[TargetPiece]) -> None:
    """Reads parts of an array at once."""
    saved = leaf.spec
    assert saved is not None, "arrays only are read"
    if saved.dtype != "int64":
        raise FormatError(path, expected="an array of int64", found=saved.dtype)
    job.claims.take(path, leaf)
    before = job.new_batch()
    before.add_target(path, leaf, ArrayTarget(saved, None, pieces))
    job.run_now(before)


def no_plain_rows(path: str, wanted: Any, where: str) -> MismatchError:
    """Returns the error for plain arrays, which have no ids to join rows by."""
    return MismatchError(
        path,
        expected=f"a KeyedTable in like, to join rows of {where} by id",
        found=f"a {type(wanted).__name__}",
        hint="Ask for a tc.KeyedTable, or take the whole table from one checkpoint, as it was saved",
    )
