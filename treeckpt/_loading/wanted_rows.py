"""Which rows of a saved table are wanted, and reads of some of its rows.

Of a table that was saved as deltas, see `format.table_deltas`, a row counts unless a later delta has its id, or deletes
it. The ids of the deltas are found among the whole rows inside of their buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from .._arrays.base import ArrayTarget, ArrayWriter, Box, HostArray, HostMemory, TargetPiece, raw_dtype
from .._arrays.table_columns import SelectedRowsWriter, table_threads
from .._core.format.records import Leaf
from .._core.format.table_deltas import JoinedIndex, TablePart, parts_of
from .._core.planning.load_plan import READ_GAP
from .._core.sharding.region import Region
from .._core.tree.keyed_table import buckets_of, check_partition, find_ids
from .._core.tree.spec import ArraySpec, TableSpec
from .._core.tree.structure import TABLE_KEYS
from .._threads import call_in_thread
from ..errors import FormatError, LayoutError, MismatchError

if TYPE_CHECKING:
    from .match import Load

SCANNED_ROWS = 1 << 14
"""The rows of a table up to which all are compared with the ids of its deltas; in more rows these are searched."""
SEARCHED_IDS = 1 << 14
"""The ids that are searched for at a time."""
NO_ROW = -1
"""The number in the place of that of a row, for an id that a delta deletes."""


class Join(msgspec.Struct, frozen=True):
    """Which row of a saved slot goes to which row of a table."""

    rows: np.ndarray
    """The rising numbers of the saved rows that are read."""
    places: np.ndarray | None = None
    """The row of the table that each is for; None where they follow each other."""
    missing: Sequence[int] | np.ndarray = ()
    """The ids of the table of which no row was saved."""


class Patch(msgspec.Struct, frozen=True):
    """Rows of a table with deltas: a range of the whole rows, over which others are put."""

    others: Join
    """The rows that are not those of the range, each with its place."""
    ids: np.ndarray
    """The ids of all rows: int64[count]."""

    def numbers(self, start: int) -> np.ndarray:
        """Returns the numbers of all rows: int64[count]."""
        every = np.arange(start, start + len(self.ids))
        every[self.others.places] = self.others.rows
        return every


class Rows(msgspec.Struct, frozen=True):
    """The wanted rows of a table."""

    spec: TableSpec
    saved: int
    """The number of rows in the checkpoint."""
    start: int
    count: int
    picked: np.ndarray | None = None
    """The rising numbers of the wanted rows, where they are not `start:start + count`."""
    kept: int = 0
    """Of a table with deltas: the first so many rows are `start:start + kept` of the whole rows, but for others."""
    patch: Callable[[], Patch] | None = None
    """Returns the wanted rows of a table with deltas, once they are found."""

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """Returns the numbers of the saved rows at positions among the wanted ones."""
        if self.picked is not None:
            return self.picked[positions]
        return positions + self.start if self.patch is None else self.patch().numbers(self.start)[positions]


def ids_of(job: Load, leaf: Leaf, path: str, rows: Rows) -> np.ndarray:
    """Reads the ids of some rows of a table."""
    if rows.patch is not None:
        return rows.patch().ids
    ids = np.empty(rows.count, np.int64)
    memory = HostArray(ids.view(raw_dtype(8)))
    if rows.picked is None:
        read_now(job, leaf, path, Region((rows.start,), (rows.count,)), memory)
    else:
        read_now(job, leaf, path, Region((0,), (rows.saved,)), SelectedRowsWriter(memory, rows.picked))
    return ids


def join(ids: np.ndarray, theirs: np.ndarray, rows: Rows) -> Join:
    """Finds the rows that have given ids."""
    places, there = find_ids(theirs, ids)
    numbers = rows.numbers(places[there])
    # rising numbers of rows, so that rows that lie near each other are read together
    turn = np.argsort(numbers)
    return Join(numbers[turn], np.flatnonzero(there)[turn], ids[~there])


def all_rows(job: Load, ids: Leaf, path: str) -> Rows:
    """Returns all rows of the table with these ids."""
    saved = job.index.tables[ids.number]
    return find_rows(job, saved, (0, saved.buckets), path, ids)


def read_now(job: Load, leaf: Leaf, path: str, region: Region, into: ArrayWriter) -> None:
    """Reads a part of an array at once, because what else is read depends on it."""
    read_pieces_now(job, leaf, path, [TargetPiece(region, into)])


def read_pieces_now(job: Load, leaf: Leaf, path: str, pieces: Sequence[TargetPiece]) -> None:
    """Reads parts of an array at once."""
    job.claims.take(path, leaf)
    before = job.new_batch()
    before.add_target(path, leaf, ArrayTarget(_int64(leaf, path), None, pieces))
    job.run_now(before)


def row_pieces(writer: ArrayWriter, joined: Join, row: tuple[int, ...], row_nbytes: int) -> list[TargetPiece]:
    """Returns pieces that write rows of a saved array to their places: rows that lie near each other in one piece.

    Args:
        row: the shape of a row.
        row_nbytes: its size in the file.
    """
    rows, places = joined.rows, joined.places
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


def _read_numbers(job: Load, leaf: Leaf, path: str, positions: np.ndarray) -> np.ndarray:
    """Reads elements of a saved array of int64, at rising positions."""
    numbers = np.empty(len(positions), np.int64)
    memory = HostArray(numbers.view(raw_dtype(8)))
    read_pieces_now(job, leaf, path, row_pieces(memory, Join(positions), (), 8))
    return numbers


def find_chosen(job: Load, ids: Leaf, path: str, chosen: np.ndarray) -> Join:
    """Returns the saved rows of chosen ids, each with its place among these, and the ids that the table lacks.

    Raises:
        FormatError: the first rows of the buckets are no rows of the table.
    """
    # all slots of a table ask for the same rows
    known = job.chosen_rows.get((ids.number, path))
    if known is not None:
        return known
    assert ids.spec is not None, "ids are an array"
    saved, count = job.index.tables[ids.number], ids.spec.shape[0]
    # of a partition of a later version it is not known where an id belongs
    buckets = np.unique(buckets_of(chosen, saved).astype(np.int64)) if _is_known(saved) else None

    def read(column: Leaf, offsets: Leaf, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers of rows between two that may have the ids, and their ids."""
        if buckets is None:
            rows = np.arange(start, stop)
        else:
            rows = start + _rows_of_buckets(job, offsets, _offsets_path(path), buckets, stop - start)
        return rows, _read_numbers(job, column, path, rows)

    parts = parts_of(job.index, ids)
    if not parts:
        rows, theirs = read(ids, job.index.entries[ids.number + 1], 0, count)
    else:
        events: list[tuple[np.ndarray, np.ndarray]] = []
        for part in parts:
            if part.deleted is not None and part.deleted_offsets is not None:
                _, gone = read(part.deleted, part.deleted_offsets, 0, _count(part.deleted))
                events.append((np.full(len(gone), NO_ROW), gone))
            events.append(read(ids, part.offsets, part.start, part.stop))
        theirs, rows = _last_of_each(*map(np.concatenate, zip(*events, strict=True)))
        theirs, rows = theirs[rows >= 0], rows[rows >= 0]
        turn = np.argsort(rows)
        theirs, rows = theirs[turn], rows[turn]
    joined = join(chosen, theirs, Rows(saved, count, 0, len(rows), rows))
    job.chosen_rows[ids.number, path] = joined
    return joined


def _count(leaf: Leaf) -> int:
    assert leaf.spec is not None, "ids are an array"
    return leaf.spec.shape[0]


def _rows_of_buckets(job: Load, offsets: Leaf, path: str, buckets: np.ndarray, count: int) -> np.ndarray:
    """Returns the numbers of the rows in rising buckets of a table of `count` rows."""
    if offsets.spec is None or len(offsets.spec.shape) != 1 or (buckets >= offsets.spec.shape[0]).any():
        raise FormatError(path, expected="the first rows of the table's buckets", found="none")
    last = offsets.spec.shape[0]
    borders = np.union1d(buckets, buckets + 1)
    firsts = _read_numbers(job, offsets, path, borders[borders < last])
    if borders.size and borders[-1] == last:
        firsts = np.append(firsts, count)
    lows, highs = (firsts[np.searchsorted(borders, wanted)] for wanted in (buckets, buckets + 1))
    ends = np.append(lows, count)
    if (lows < 0).any() or (highs < lows).any() or (highs > ends[1:]).any():
        raise FormatError(path, expected=f"rising numbers up to {count}", found=f"{lows[:5]} to {highs[:5]}")
    if not len(buckets):
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)])


def find_rows(job: Load, spec: TableSpec, owned: tuple[int, int], path: str, leaf: Leaf) -> Rows:
    """Returns the rows of a table in a range of buckets, of any partition.

    Args:
        path, leaf: of its ids.

    Raises:
        MismatchError: there is no table.
        FormatError: the first rows of the buckets are no rows of the table.
    """
    saved = job.index.tables.get(leaf.number)
    if saved is None or leaf.spec is None or len(leaf.spec.shape) != 1:
        raise MismatchError(
            path, expected="a KeyedTable in the checkpoint", found="something else", hint="Load it as what it is"
        )
    if parts := parts_of(job.index, leaf):
        key = leaf.number, spec, owned
        if key not in job.table_rows:
            job.table_rows[key] = _rows_of_parts(job, spec, owned, path, leaf, parts)
        return job.table_rows[key]
    rows = leaf.spec.shape[0]
    if saved != spec:
        # ids are classified while they are read: only a bit for each row is kept
        chosen = _Chosen(rows, spec, owned)
        read_now(job, leaf, path, Region((0,), (rows,)), chosen)
        picked = np.flatnonzero(chosen.mask)
        return Rows(spec, rows, 0, len(picked), picked)
    offsets = job.index.entries[leaf.number + 1]  # they stand behind the ids
    if owned == (0, saved.buckets) or owned[0] == owned[1]:
        return Rows(saved, rows, 0, 0 if owned[0] == owned[1] else rows)
    [firsts] = _first_rows(job, [offsets], _offsets_path(path), saved, owned)
    low, high = _rows_between(firsts, _offsets_path(path), saved, owned, rows)
    return Rows(saved, rows, low, high - low)


class _Chosen:
    """Finds, while ids are read, which of them are in a range of buckets."""

    def __init__(self, rows: int, spec: TableSpec, owned: tuple[int, int]) -> None:
        self.mask, self._spec, self._owned = np.zeros(rows, bool), spec, owned

    def write(self, box: Box, data: np.ndarray) -> None:
        buckets = buckets_of(np.ascontiguousarray(data).view(np.int64), self._spec)
        self.mask[box[0]] = (buckets >= self._owned[0]) & (buckets < self._owned[1])


def _offsets_path(ids_path: str) -> str:
    return ids_path.removesuffix(TABLE_KEYS[0]) + TABLE_KEYS[1]


def _read_ranges(job: Load, path: str, ranges: Sequence[tuple[Leaf, int, int]]) -> list[np.ndarray]:
    """Reads ranges of arrays of int64, given as (array, start, stop), all at once."""
    batch, found = job.new_batch(), list[np.ndarray]()
    for leaf, start, stop in ranges:
        found.append(np.empty(stop - start, np.int64))
        if start < stop:
            piece = TargetPiece(Region((start,), (stop - start,)), HostArray(found[-1].view(raw_dtype(8))))
            job.claims.take(path, leaf)
            batch.add_target(path, leaf, ArrayTarget(_int64(leaf, path), None, [piece]))
    job.run_now(batch)
    return found


def _int64(leaf: Leaf, path: str) -> ArraySpec:
    assert leaf.spec is not None, "arrays only are read"
    if leaf.spec.dtype != "int64":
        raise FormatError(path, expected="an array of int64", found=leaf.spec.dtype)
    return leaf.spec


def _first_rows(
    job: Load, offsets: Sequence[Leaf], path: str, saved: TableSpec, owned: tuple[int, int]
) -> list[np.ndarray]:
    """Reads the first rows of a range of the buckets of tables, and of the one behind it: int64[n] of each."""
    for leaf in offsets:
        if leaf.spec is None or leaf.spec.shape != (saved.buckets,):
            raise FormatError(path, expected=f"the first rows of {saved.buckets} buckets", found="none")
    start, stop = owned
    return _read_ranges(job, path, [(leaf, start, min(stop + 1, saved.buckets)) for leaf in offsets])


def _rows_between(
    firsts: np.ndarray, path: str, saved: TableSpec, owned: tuple[int, int], rows: int
) -> tuple[int, int]:
    """Returns the first row in a range of the saved buckets, and the one after the last, of so many rows.

    Args:
        firsts: as `_first_rows` returns them.
    """
    start, stop = owned
    if start == stop:
        return 0, 0
    low, high = int(firsts[0]), int(firsts[stop - start]) if stop < saved.buckets else rows
    if not 0 <= low <= high <= rows:
        raise FormatError(path, expected=f"rising numbers up to {rows}", found=f"{low}, {high}")
    return low, high


# tables that were saved as deltas ---------------------------------------------------------------------------------


def _rows_of_parts(
    job: Load, spec: TableSpec, owned: tuple[int, int], path: str, ids: Leaf, parts: Sequence[TablePart]
) -> Rows:
    """As `find_rows`, of a table with deltas: all first rows of buckets are read together, and then all ids.

    Which of all rows count is found in another thread, while the whole rows are read.
    """
    saved, offsets_path = job.index.tables[ids.number], _offsets_path(path)
    between = owned if saved == spec else (0, saved.buckets)
    columns = [(ids, parts[0].offsets, parts[0].start, parts[0].stop)]
    for part in parts[1:]:
        assert part.deleted is not None and part.deleted_offsets is not None, "a delta has them"
        columns.append((part.deleted, part.deleted_offsets, 0, _count(part.deleted)))
        columns.append((ids, part.offsets, part.start, part.stop))
    is_searched = parts[0].stop > SCANNED_ROWS and _is_known(saved)
    firsts: list[np.ndarray] = []
    if between != (0, saved.buckets):
        firsts = _first_rows(job, [offsets for _, offsets, _, _ in columns], offsets_path, saved, between)
    elif is_searched:
        firsts = _first_rows(job, [parts[0].offsets], offsets_path, saved, between)
    ranges: list[tuple[Leaf, int, int]] = []
    for number, (column, _, start, stop) in enumerate(columns):
        low, high = 0, stop - start
        if between != (0, saved.buckets):
            low, high = _rows_between(firsts[number], offsets_path, saved, between, stop - start)
        ranges.append((column, start + low, start + high))
    of_whole, *others = _read_ranges(job, path, ranges)
    numbers = [np.arange(low, high) if leaf is ids else np.full(high - low, NO_ROW) for leaf, low, high in ranges[1:]]
    start, stop = ranges[0][1:]

    def find() -> Patch:
        every = np.concatenate(others)
        if is_searched and len(of_whole):
            ends = np.append(firsts[0][: between[1] - between[0]] - start, stop - start)
            place, there = search_ids(of_whole, ends, every, saved, between[0])
        else:
            place, there = find_ids(of_whole, every)
        return _patch(of_whole, start, _last_changes(len(of_whole), numbers, every, place, there))

    if saved == spec and owned == (0, saved.buckets):
        assert isinstance(job.index, JoinedIndex), "it has parts"
        count = job.index.counted[ids.number]
        patch = call_in_thread(partial(_checked, find, count, path), "treeckpt-rows").result
        return Rows(spec, _count(ids), start, count, kept=min(count, len(of_whole)), patch=patch)
    found, kept = find(), len(of_whole)
    if saved != spec:
        buckets = buckets_of(found.ids, spec)
        found, kept = _selected(found, start, (buckets >= owned[0]) & (buckets < owned[1])), 0
    return Rows(spec, _count(ids), start, len(found.ids), kept=min(kept, len(found.ids)), patch=lambda: found)


def _checked(find: Callable[[], Patch], count: int, path: str) -> Patch:
    """Finds the rows of a table; raises FormatError where they are not as many as the index says."""
    found = find()
    if len(found.ids) != count:
        raise FormatError(path, expected=f"{count} rows, as references in the index say", found=f"{len(found.ids)}")
    return found


class _LastChanges(msgspec.Struct, frozen=True):
    """What the deltas of a table change of its whole rows."""

    places: np.ndarray
    """The rising positions, among the whole rows, of those that are replaced or deleted."""
    rows: np.ndarray
    """The number of the row that each is replaced by; `NO_ROW` where it is deleted."""
    new_ids: np.ndarray
    new_rows: np.ndarray
    """The ids that no whole row has, and the numbers of their rows."""


def _last_changes(
    count: int, numbers: Sequence[np.ndarray], ids: np.ndarray, place: np.ndarray, there: np.ndarray
) -> _LastChanges:
    """Returns the last change of each id.

    Args:
        count: the number of whole rows.
        numbers: of each delta in turn, the rows of the ids that it changes, each once, or `NO_ROW`.
        ids: of all deltas; and the place of each among the whole rows, if it is `there`.
    """
    every = np.concatenate(numbers)
    last = np.full(count, NO_ROW, np.int32 if len(every) < 1 << 31 else np.int64)  # of `every`, for each whole row
    stop = 0
    for own in numbers:
        start, stop = stop, stop + len(own)
        found = np.flatnonzero(there[start:stop]) + start
        last[place[found]] = found
    places = np.flatnonzero(last >= 0)
    new_ids, new_rows = _last_of_each(every[~there], ids[~there])
    stays = new_rows >= 0
    return _LastChanges(places, every[last[places]], new_ids[stays], new_rows[stays])


def _patch(of_whole: np.ndarray, start: int, changes: _LastChanges) -> Patch:
    """Returns the rows that count: whole rows, what deltas have in their place, and new ones in that of deleted ones.

    Args:
        of_whole: the ids of the whole rows, from number `start` on.
    """
    places, rows = changes.places, changes.rows
    stays = rows >= 0
    holes = places[~stays]
    count = len(of_whole) - len(holes) + len(changes.new_ids)
    kept = min(count, len(of_whole))
    number = np.arange(start + kept, start + len(of_whole))  # of the whole rows behind those that are kept
    behind = stays & (places >= kept)
    number[places[behind] - kept] = rows[behind]
    counts = np.ones(len(number), bool)
    counts[holes[holes >= kept] - kept] = False
    free = np.concatenate([holes[holes < kept], np.arange(kept, count)])
    same = stays & (places < kept)
    others = np.concatenate([rows[same], changes.new_rows, number[counts]])
    ids = of_whole
    if len(free) or kept < len(of_whole):
        ids = np.concatenate([of_whole[:kept], np.zeros(count - kept, np.int64)])
        ids[free] = np.concatenate([changes.new_ids, of_whole[kept:][counts]])
    return Patch(rising(others, np.concatenate([places[same], free])), ids)


def rising(rows: np.ndarray, places: np.ndarray) -> Join:
    """Returns rows, each once, and their places, by rising row.

    A table of all rows from the first to the last is filled, which takes less time than a sort.
    """
    if not len(rows):
        return Join(rows, places)
    first = int(rows.min())
    place_of = np.full(int(rows.max()) + 1 - first, NO_ROW)
    place_of[rows - first] = places
    taken = np.flatnonzero(place_of != NO_ROW)
    return Join(taken + first, place_of[taken])


def _selected(patch: Patch, start: int, chosen: np.ndarray) -> Patch:
    """Returns those rows of a table that are chosen, bool[count]."""
    ids = patch.ids[chosen]
    return Patch(rising(patch.numbers(start)[chosen], np.arange(len(ids))), ids)


def _is_known(saved: TableSpec) -> bool:
    """Whether this version can compute a partition."""
    try:
        check_partition(saved)
    except LayoutError:
        return False
    return True


def _last_of_each(numbers: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each id once, rising, and the last number that it has."""
    found, first = np.unique(ids[::-1], return_index=True)
    return found, numbers[::-1][first]


def search_ids(
    ids: np.ndarray, firsts: np.ndarray, wanted: np.ndarray, saved: TableSpec, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """As `find_ids`, of ids in the order of a table; part by part, which stays in the cache.

    Args:
        firsts: the first position of each bucket from `start` on, and the end.
    """
    at, there = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    unsigned, of_wanted = ids.view(np.uint64), wanted.view(np.uint64)
    buckets = buckets_of(wanted, saved).view(np.int64) - start
    # by bucket, so that a part of the ids stays in the cache; a stable sort of 16-bit numbers is a radix sort
    shift = max(0, len(firsts).bit_length() - 16)
    order = np.argsort((buckets >> shift).astype(np.uint16), kind="stable")

    def search(part: np.ndarray) -> None:
        target, bucket = of_wanted[part], buckets[part]
        low, end = firsts[bucket], firsts[bucket + 1]
        last = np.maximum(end - 1, 0)
        # the last position of a bucket that does not lie behind the id, by steps of half the size
        step = 1 << max(0, int((end - low).max(initial=0)).bit_length() - 1)
        np.minimum(low, last, out=low)
        while step:
            probe = np.minimum(low + step, last)
            low += (probe - low) * (unsigned.take(probe, mode="clip") <= target)
            step >>= 1
        at[part], there[part] = low, (low < end) & (unsigned[low] == target)

    if len(ids):
        parts = [order[low : low + SEARCHED_IDS] for low in range(0, len(wanted), SEARCHED_IDS)]
        table_threads()([partial(search, part) for part in parts])
    return at, there


def first_rows(writer: ArrayWriter, count: int) -> ArrayWriter | None:
    """Returns what writes the first rows of an array in host memory alone; None for any other array."""
    if isinstance(writer, HostMemory) and count:
        return HostMemory(writer.address, (count, *writer.shape[1:]), writer.itemsize, writer.owner)
    return HostArray(writer.array[:count]) if isinstance(writer, HostArray) else None
