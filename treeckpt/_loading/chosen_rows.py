"""The rows of chosen ids of keyed tables: finds them, and reads little more than them.

Of the ids those of the buckets are read to which the chosen ones belong, with the first rows of these buckets; then the
rows that have the chosen ids. Rows that lie near each other are read together, and the reads are rounded to blocks of
checksums where these are compared.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from .._arrays.base import ArrayWriter, HostArray, TargetPiece, raw_dtype
from .._arrays.table_columns import SelectedRowsWriter
from .._core.format.records import Leaf
from .._core.planning.load_plan import READ_GAP
from .._core.sharding.region import Region
from .._core.tree.globs import similar_paths
from .._core.tree.row_order import buckets_of, check_partition
from .._core.tree.structure import TABLE_KEYS
from ..errors import FormatError, LayoutError, MismatchError
from .chosen_ids import ChosenIds, table_path
from .join_slots import Join, Rows, join, read_pieces_now

if TYPE_CHECKING:
    from .match import Load


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


def row_pieces(writer: ArrayWriter, found: Join, row: tuple[int, ...], row_nbytes: int) -> list[TargetPiece]:
    """Returns pieces that write rows of a saved array to their places: rows that lie near each other in one piece.

    Args:
        row: the shape of a row.
        row_nbytes: its size in the file.
    """
    rows, places = found.rows, found.places
    far = max(1, READ_GAP // max(1, row_nbytes))
    borders = [0, *(np.flatnonzero(np.diff(rows) > far) + 1).tolist(), len(rows)] if len(rows) else [0]
    if len(borders) > 2 and places is None:
        places = np.arange(len(rows))
    pieces: list[TargetPiece] = []
    for start, stop in itertools.pairwise(borders):
        low, high = int(rows[start]), int(rows[stop - 1]) + 1
        there = None if places is None else places[start:stop]
        selected = SelectedRowsWriter(writer, rows[start:stop] - low, there)
        region = Region((low, *(0 for _ in row)), (high - low, *row))
        pieces.append(TargetPiece(region, selected))
    return pieces


def _read_numbers(job: Load, leaf: Leaf, path: str, at: np.ndarray) -> np.ndarray:
    """Reads elements of a saved array of int64, at rising positions."""
    numbers = np.empty(len(at), np.int64)
    memory = HostArray(numbers.view(raw_dtype(8)))
    read_pieces_now(job, leaf, path, row_pieces(memory, Join(at), (), 8))
    return numbers


def find_chosen(job: Load, ids: Leaf, path: str, chosen: np.ndarray) -> Join:
    """Returns the saved rows of chosen ids, each with its place among these, and the ids that the table lacks.

    Raises:
        FormatError: the first rows of the buckets are no rows of the table.
    """
    known = job.chosen_rows.get((ids.number, path))
    if known is not None:
        return known
    assert ids.spec is not None, "ids are an array"
    saved, count = job.index.tables[ids.number], ids.spec.shape[0]
    try:
        check_partition(saved)
    except LayoutError:  # of a later version: where an id belongs is not known
        rows = np.arange(count)
    else:
        buckets = np.unique(buckets_of(chosen, saved).astype(np.int64))
        rows = _rows_of_buckets(job, job.index.entries[ids.number + 1], path, buckets, count)
    theirs = _read_numbers(job, ids, path, rows)
    found = join(chosen, theirs, Rows(saved, count, 0, len(rows), rows))
    job.chosen_rows[ids.number, path] = found
    return found


def _rows_of_buckets(job: Load, offsets: Leaf, ids_path: str, buckets: np.ndarray, count: int) -> np.ndarray:
    """Returns the numbers of the rows in rising buckets of a table of `count` rows."""
    path = ids_path.removesuffix(TABLE_KEYS[0]) + TABLE_KEYS[1]
    if offsets.spec is None or len(offsets.spec.shape) != 1 or (buckets >= offsets.spec.shape[0]).any():
        raise FormatError(path, expected="the first rows of the table's buckets", found="none")
    last = offsets.spec.shape[0]
    at = np.union1d(buckets, buckets + 1)
    firsts = _read_numbers(job, offsets, path, at[at < last])
    if at.size and at[-1] == last:
        firsts = np.append(firsts, count)
    lows, highs = (firsts[np.searchsorted(at, wanted)] for wanted in (buckets, buckets + 1))
    ends = np.append(lows, count)
    if (lows < 0).any() or (highs < lows).any() or (highs > ends[1:]).any():
        raise FormatError(path, expected=f"rising numbers up to {count}", found=f"{lows[:5]} to {highs[:5]}")
    if not len(buckets):
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)])
