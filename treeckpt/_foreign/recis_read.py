"""RecIS: hash tables in blocks of safetensors shards, and the dense model, objects and readers in files of torch.save.

A checkpoint becomes the tree `{"model", "sparse", "sparse_opt", "extra", "io_state"}`, of which it has what was saved:
the state dict of `model.pt`; a `KeyedTable` for each hash table; the scalars of the sparse optimizer; the objects of
`extra.pt`; and the states of the readers by the number of their shard.

Each shard saved its rows of a table, those of a range of buckets, in the order of a hash map. They are read in the
order in which ours are saved, by bucket and id. The ids alone are held in memory, of the shards whose rows are asked
for, as the order of their rows; rows of slots are gathered from the files when they are read. A row may be in the
shard of other buckets, as lookups on a CPU place negative ids: then all shards are sorted together.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import LazyArray, raw_dtype
from .._core.format.decoding import decode_json
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region
from .._core.text import count_text
from .._core.tree.keyed_table import PART_SIZE, RowOrder, buckets_of, sort_rows
from .._core.tree.spec import ArraySpec, TableSpec
from .._core.tree.structure import TABLE_KEYS, child_path
from .._io.storage.foreign_formats import (
    RECIS_DENSE,
    RECIS_EXTRA,
    RECIS_INDEX,
    RECIS_KEYS,
    RECIS_READER,
    RECIS_READERS,
    RECIS_UNDER_WAY,
)
from .._io.storage.store import Store
from ..errors import CorruptError, FormatError, StoreError, TreeError
from .checksums import ArchiveChecksums
from .files import ForeignTree, range_of, store_window
from .pickle_values import RefusedLeaf
from .safetensors_read import MAX_HEADER, TAGS, read_safetensors
from .torch_read import read_torch

_TAGS = TAGS | {"bool": "bool"}
"""The dtypes that RecIS writes; it has a name of its own for one."""
_BLOCK = re.compile(r"(.+)@([^@^]+)\^([0-9]{1,18})@([0-9]{1,18})@([0-9]{1,18})", re.DOTALL)
"""What a block holds: a table, a slot of it or "id", and the first bucket, the one after the last, and how many."""
_PART = re.compile(r".*/part_([0-9]{1,9})_([0-9]{1,9})", re.DOTALL)
"""The name of a block in a shard: which of how many saved it."""
_MAX_BUCKETS = 1 << 20
"""Buckets of a table, at most: RecIS has 65,536 unless told otherwise, and each takes 8 bytes."""
_TWO_SAVES = "Files of two saves may lie here"
_DENSE = "^ "
"""How the name of a tensor of the sparse optimizer ends."""


class _RecisIndex(msgspec.Struct):
    """Which shard has each block."""

    file_index: dict[str, int]
    block_index: dict[str, int]


class _TablePart(msgspec.Struct, frozen=True):
    """What one shard saved of a table: rows of a range of buckets."""

    number: int
    count: int
    """The number of shards."""
    begin: int
    end: int
    buckets: int
    columns: dict[str, LazyArray] = {}
    """The ids, as "id", and the slots by name."""

    @property
    def rows(self) -> int:
        return self.columns["id"].spec.shape[0]

    @property
    def range_text(self) -> str:
        return f"buckets {self.begin} to {self.end} of {self.buckets} by {count_text(self.count, 'shard')}"


class _SortedParts:
    """Parts of a table whose rows are sorted together: those of a range of buckets.

    Args:
        first: the number of their first row among all of the table.
    """

    def __init__(self, parts: Sequence[_TablePart], begin: int, end: int, first: int) -> None:
        self.parts, self.begin, self.end, self.first = parts, begin, end, first
        self.rows = sum(part.rows for part in parts)
        self.arranged: RowOrder | None = None


class _RowReader:
    """Reads the rows of a table in the order of their buckets and ids; several threads may read at a time."""

    def __init__(self, label: str, spec: TableSpec, parts: Sequence[_TablePart]) -> None:
        self._label, self._spec, self._parts = label, spec, parts
        self._sorted: list[_SortedParts] | None = None
        self._memory: dict[tuple[int, str], np.ndarray] = {}
        self._lock = threading.RLock()

    def read_offsets(self, region: Region) -> np.ndarray:
        """Returns the first rows of a range of buckets."""
        (start,), (count,) = region.offset, region.shape
        out = np.empty(count, np.int64)
        for run in self._runs():
            low, high = max(start, run.begin), min(start + count, run.end)
            if low < high:
                out[low - start : high - start] = self._order(run).starts[low:high] + run.first
        return out.view(raw_dtype(8))

    def read_column(self, name: str, region: Region) -> np.ndarray:
        """Returns a box of the ids or of a slot."""
        start, stop = region.offset[0], region.offset[0] + region.shape[0]
        found: list[np.ndarray] = []
        for run in self._runs():
            low, high = max(start, run.first), min(stop, run.first + run.rows)
            if low < high:
                rows = self._gather(run, name, slice(low - run.first, high - run.first))
                found.append(rows[(slice(None), *region.slices()[1:])])
        if not found:
            return np.empty(region.shape, raw_dtype(dtype_of(self._parts[0].columns[name].spec.dtype).itemsize))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _runs(self) -> list[_SortedParts]:
        """Returns the parts in the order of their buckets, together where they share some."""
        with self._lock:
            if self._sorted is None:
                parts = sorted(self._parts, key=lambda part: part.begin)
                apart = all(a.end == b.begin for a, b in itertools.pairwise(parts))
                if apart and all(map(self._is_at_home, parts)):
                    firsts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
                    self._sorted = [
                        _SortedParts([p], p.begin, p.end, first) for p, first in zip(parts, firsts, strict=False)
                    ]
                else:
                    self._sorted = [_SortedParts(parts, 0, self._spec.buckets, 0)]
            return self._sorted

    def _is_at_home(self, part: _TablePart) -> bool:
        """Whether all ids of a part are of its buckets."""
        ids = self._rows_of(part, "id").view(np.int64)
        for low in range(0, len(ids), PART_SIZE):
            buckets = buckets_of(ids[low : low + PART_SIZE], self._spec)
            if not ((buckets >= part.begin) & (buckets < part.end)).all():
                return False
        return True

    def _order(self, run: _SortedParts) -> RowOrder:
        """Sorts the ids of some parts, once.

        Raises:
            CorruptError: an id has several rows.
        """
        with self._lock:
            if run.arranged is None:
                ids = np.concatenate([self._rows_of(part, "id") for part in run.parts]).view(np.int64)
                try:
                    run.arranged = sort_rows(ids, self._spec)
                except TreeError as error:
                    raise CorruptError(
                        self._label,
                        expected="a table with each id once",
                        found=error.found,
                        hint="RecIS takes any one of these rows; load and save it there, or leave the table out",
                    ) from error
            return run.arranged

    def _gather(self, run: _SortedParts, name: str, rows: slice) -> np.ndarray:
        order = self._order(run).order
        wanted = np.arange(rows.start, rows.stop) if order is None else order[rows]
        if len(run.parts) == 1:
            return np.take(self._rows_of(run.parts[0], name), wanted, axis=0)
        out: np.ndarray | None = None
        before = 0
        for part in run.parts:
            memory = self._rows_of(part, name)
            out = np.empty((len(wanted), *memory.shape[1:]), memory.dtype) if out is None else out
            inside = (wanted >= before) & (wanted < before + part.rows)
            out[inside] = memory[wanted[inside] - before]
            before += part.rows
        assert out is not None, "a table has parts"
        return out

    def _rows_of(self, part: _TablePart, name: str) -> np.ndarray:
        """Returns a block as an array: a map of its file; elsewhere its bytes, which are kept for the last block."""
        key, array = (part.number, name), part.columns[name]
        raw, window = raw_dtype(dtype_of(array.spec.dtype).itemsize), range_of(array)
        if window is None:
            return np.empty(array.spec.shape, raw)
        with self._lock:
            if key not in self._memory:
                try:
                    data = np.frombuffer(window.store.map(window.name, window.start, window.size), np.uint8)
                except StoreError:  # the files are on no disk
                    data = window.read(0, window.size)
                    self._memory.clear()
                self._memory[key] = data.view(raw).reshape(array.spec.shape)
            return self._memory[key]


def _decode(store: Store, name: str, kind: Any) -> Any:
    try:
        return decode_json(store.read(name, limit=MAX_HEADER), kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{store.url}/{name}", expected="a file of RecIS", found=f"{error}"[:200]) from error


class _Blocks(msgspec.Struct, frozen=True):
    """The blocks in the shards of a checkpoint."""

    arrays: dict[str, LazyArray] = {}
    keys: dict[str, str] = {}
    """What each block of a table holds, as `_BLOCK`."""
    shards: frozenset[str] = frozenset()
    """The names of the shards."""


def _read_blocks(store: Store, sizes: dict[str, int]) -> _Blocks:
    """Returns all blocks.

    Raises:
        CorruptError: files, or blocks in them, are not those of the index.
    """
    if not sizes.keys() & {RECIS_KEYS, RECIS_INDEX}:
        return _Blocks()
    for name in (RECIS_KEYS, RECIS_INDEX):
        if name not in sizes:
            raise _unfinished(store, f"the file {name}", "none")
    index: _RecisIndex = _decode(store, RECIS_INDEX, _RecisIndex)
    blocks: dict[str, LazyArray] = {}
    for file, number in index.file_index.items():
        if file not in sizes:
            raise CorruptError(f"{store.url}/{file}", expected="a shard that the index names", found="no such file")
        found, _ = read_safetensors(store_window(store, file, sizes), tags=_TAGS)
        named = {name for name, of in index.block_index.items() if of == number}
        if wrong := sorted(named ^ found.keys()):
            raise CorruptError(
                f"{store.url}/{file}",
                expected="the blocks that the index names",
                found=f"{wrong[0][:80]!r} in one of the two only",
                hint=_TWO_SAVES,
            )
        blocks |= found
    if lost := sorted(index.block_index.keys() - blocks.keys()):
        raise CorruptError(store.url, expected=f"a shard with the block {lost[0][:80]!r}", found="none in the index")
    keys: dict[str, str] = _decode(store, RECIS_KEYS, dict[str, str])
    if lost := sorted(keys.keys() - blocks.keys()):
        expected = f"the block {lost[0][:80]!r}, which {RECIS_KEYS} names"
        raise CorruptError(store.url, expected=expected, found="none in the index", hint=_TWO_SAVES)
    return _Blocks(blocks, keys, frozenset(index.file_index))


def _unfinished(store: Store, expected: str, found: str) -> CorruptError:
    hint = "The save that wrote it has not ended, or was killed; take the one before it"
    return CorruptError(store.url, expected=expected, found=found, hint=hint)


def _read_parts(store: Store, blocks: _Blocks) -> dict[str, list[_TablePart]]:
    """Returns what each shard saved of each table, by the name of the table."""
    tables: dict[str, dict[int, _TablePart]] = {}
    for name, array in blocks.arrays.items():
        if name.endswith(_DENSE) and name not in blocks.keys:
            continue
        part, held = _PART.fullmatch(name), _BLOCK.fullmatch(blocks.keys.get(name, ""))
        if part is None or held is None:
            found = f"{name[:80]!r}: {blocks.keys.get(name)!r:.80}"
            raise FormatError(store.url, expected="a block of a table, or a tensor", found=found)
        new = _TablePart(int(part[1]), int(part[2]), *(int(number) for number in held.groups()[2:]), columns={})
        known = tables.setdefault(held[1], {}).setdefault(new.number, new)
        if msgspec.structs.replace(known, columns={}) != new:
            expected, found = f"blocks of one range of shard {new.number}", f"{known.range_text}, and {new.range_text}"
            raise _mixed(store, held[1], expected, found)
        known.columns[held[2]] = array
    return {table: [parts[number] for number in sorted(parts)] for table, parts in tables.items()}


def _mixed(store: Store, table: str, expected: str, found: str) -> CorruptError:
    hint = f"{_TWO_SAVES}, or some are missing"
    return CorruptError(f"table {table[:80]!r}: {store.url}", expected=expected, found=found, hint=hint)


def _check_parts(store: Store, table: str, parts: Sequence[_TablePart]) -> None:
    """Checks that parts are all of a table.

    Raises:
        CorruptError, FormatError: they are not.
    """
    first, wrong = parts[0], partial(_mixed, store, table)
    if [part.number for part in parts] != [*range(first.count)] or any(p.count != first.count for p in parts):
        raise wrong(f"the parts of {count_text(first.count, 'shard')}", f"those of {[p.number for p in parts][:8]}")
    if any(part.buckets != first.buckets for part in parts) or not 0 < first.buckets <= _MAX_BUCKETS:
        raise FormatError(
            f"table {table[:80]!r}: {store.url}",
            expected=f"parts with one number of buckets, of at most {_MAX_BUCKETS}",
            found=f"{sorted({part.buckets for part in parts})[:5]}",
        )
    reached = 0
    for part in sorted(parts, key=lambda part: part.begin):
        if part.begin > reached:
            break
        reached = max(reached, part.end)
    if reached != first.buckets:
        raise wrong(f"parts that hold {first.buckets} buckets", f"none with bucket {reached}")
    for part in parts:
        ids = part.columns.get("id")
        if ids is None or ids.spec.dtype != "int64" or len(ids.spec.shape) != 1:
            raise wrong(f"ids of int64[N] in part {part.number}", "none" if ids is None else f"{ids.spec.shape}")
        uneven = [name for name, array in part.columns.items() if array.spec.shape[:1] != ids.spec.shape]
        if uneven:
            raise wrong(f"a row for each id in part {part.number}", f"{part.columns[uneven[0]].spec.shape}")
        mine, others = _row_texts(part), _row_texts(first)
        if unlike := sorted(name for name, _ in mine.items() ^ others.items()):
            here, there = (rows.get(unlike[0], "none") for rows in (mine, others))
            found = f"{unlike[0]!r}: {here} in part {part.number}, {there} in part 0"
            raise wrong("parts with rows of the same slots", found)


def _row_texts(part: _TablePart) -> dict[str, str]:
    """Returns the dtype and shape of a row of each column, as text."""
    specs = {name: array.spec for name, array in part.columns.items()}
    return {name: f"{spec.dtype}[{', '.join(map(str, spec.shape[1:]))}]" for name, spec in specs.items()}


def _columns(store: Store, table: str, parts: Sequence[_TablePart], spec: TableSpec) -> dict[str, Any]:
    """Returns the columns of a table, which are read when they are asked for."""
    reader, first = _RowReader(f"table {table[:80]!r}: {store.url}", spec, parts), parts[0]
    rows = sum(part.rows for part in parts)

    def column(name: str) -> LazyArray:
        of = first.columns[name].spec
        return LazyArray(ArraySpec((rows, *of.shape[1:]), of.dtype), partial(reader.read_column, name))

    offsets = LazyArray(ArraySpec((spec.buckets,), "int64", kind="numpy"), reader.read_offsets)
    slots = {name: column(name) for name in sorted(first.columns) if name != "id"}
    return dict(zip(TABLE_KEYS, (column("id"), offsets, slots, {}), strict=True))


def read_recis(store: Store, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> ForeignTree:
    """Returns the state in a checkpoint of RecIS, with its arrays left in the files.

    Raises:
        FormatError, CorruptError: it is none, it was not saved to its end, or its files do not fit together.
    """
    sizes = store.sizes()
    if under_way := sorted(filter(RECIS_UNDER_WAY.fullmatch, sizes)):
        raise _unfinished(store, "a save that has ended", f"the file {under_way[0]}")
    blocks = _read_blocks(store, sizes)
    tree: dict[str, Any] = {}
    tables: dict[tuple[str, ...], TableSpec] = {}

    def read(name: str, above: str) -> Any:
        own: list[RefusedLeaf] = []
        tree = read_torch(store_window(store, name, sizes), sums, own)
        for leaf in own:
            path = f"{above}/{leaf.path}" if leaf.path else above
            refused.append(msgspec.structs.replace(leaf, path=path))
        return tree

    if RECIS_DENSE in sizes:
        tree["model"] = read(RECIS_DENSE, "model")
    for table, parts in sorted(_read_parts(store, blocks).items()):
        _check_parts(store, table, parts)
        spec = tables["sparse", table] = TableSpec("u64_mod", 1, parts[0].buckets)
        tree.setdefault("sparse", {})[table] = _columns(store, table, parts, spec)
    for name in sorted(blocks.arrays.keys() - blocks.keys.keys()):
        tree.setdefault("sparse_opt", {})[name.removesuffix(_DENSE)] = blocks.arrays[name]
    if RECIS_EXTRA in sizes:
        tree["extra"] = read(RECIS_EXTRA, "extra")
    states = {int(match[1]): match[0] for match in map(RECIS_READER.fullmatch, sizes) if match}
    count = _reader_count(store, sizes, states)
    for number in range(count):
        tree.setdefault("io_state", {})[number] = read(states[number], child_path("io_state", number))
    stale = [name for name in sizes if name.endswith(".safetensors") and name not in blocks.shards]
    stale += [name for number, name in states.items() if number >= count]
    return ForeignTree(tree, unread=tuple(sorted(stale)), tables=tables)


def _reader_count(store: Store, sizes: Mapping[str, int], states: Mapping[int, str]) -> int:
    """Returns how many shards saved the states of their readers.

    Raises:
        CorruptError: some of these are missing.
    """
    if RECIS_READERS not in sizes:
        if states:
            raise _unfinished(store, f"the file {RECIS_READERS} beside {min(states.values())}", "none")
        return 0
    text = store.read(RECIS_READERS, limit=MAX_HEADER).decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise FormatError(f"{store.url}/{RECIS_READERS}", expected="a number", found=f"{text!r:.40}")
    if missing := next((number for number in range(min(int(text), len(states) + 1)) if number not in states), None):
        raise _unfinished(store, f"the states of {text} readers", f"none of shard {missing}")
    return int(text)
