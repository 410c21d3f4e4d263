"""Keyed tables: rows by 64-bit id, as dynamic embeddings have them, as containers in a tree.

A partition function maps an id to one of a fixed number of buckets; each owner of a part of the table holds a range of
buckets. Rows are saved in the order of (bucket, id as unsigned), so that what any owner holds is a range of rows, and
an array `offsets` holds the first row of each bucket. Neither the positions of rows in the memory of the program that
saves them, nor their slots in a hash table after loading, are stored.

A `KeyedTable` is a container of its arrays: in a tree with the table at `emb` they have the paths `emb/ids`,
`emb/offsets`, `emb/slots/embedding`, ... Flattening one gives a `TableColumn` for each.

A rank knows which buckets it owns and how many rows it has, but not how many rows the others have. So in its inventory
the arrays of a table are sharded by bucket; with the `OwnedRows` of all ranks `row_starts` computes the rows.

Where the bucket of an id is its low bits, rows are sorted as integers that hold both an id's bits and its position, in
parts that may be sorted in parallel; otherwise by two stable sorts.
"""

# A table holds arrays of any library, and numpy's stubs leave some results unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, SupportsIndex

import msgspec
import numpy as np

from ...errors import LayoutError, MismatchError, TreeError
from .spec import ArraySpec, TableSpec
from .structure import DELTA_KEYS, TABLE_KEYS

DEFAULT_BUCKETS = 65_536
"""The default number of buckets of a table."""
MAX_BUCKETS = 1 << 24
"""Buckets of a table, at most: each takes 8 bytes of its `offsets`."""
PART_SIZE = 1 << 17
"""Ids that are processed at a time: they stay in the cache."""
PARALLEL_PARTS = 4
"""The number of parts into which ids are cut for parallel work."""
MAX_MARKS = 256
"""The number of calls whose marked ids are kept apart."""
Keep = Literal["first", "last"]
Executor = Callable[[Sequence[Callable[[], object]]], None]
"""Calls functions that are independent of each other, and returns when all have returned."""


def run_serially(tasks: Sequence[Callable[[], object]]) -> None:
    """Calls the functions one after the other."""
    for task in tasks:
        task()


# buckets -------------------------------------------------------------------------------------------------------------


def _u64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    if buckets & (buckets - 1) == 0:
        return ids & np.uint64(buckets - 1)
    return ids % np.uint64(buckets)


def _splitmix64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    """The bucket by mixed bits (Vigna's splitmix64): for ids whose low bits are unevenly distributed."""
    with np.errstate(over="ignore"):
        mixed = ids + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _u64_mod(mixed ^ (mixed >> np.uint64(31)), buckets)


def _i64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    """The remainder as Python and torch have it, never negative: -1 of 4 buckets is in bucket 3."""
    if buckets & (buckets - 1) == 0:
        # the low bits of two's complement are the remainder, which is never negative
        return ids & np.uint64(buckets - 1)
    return (ids.view(np.int64) % np.int64(buckets)).view(np.uint64)


_FUNCTIONS = {"u64_mod": _u64_mod, "splitmix64_mod": _splitmix64_mod, "i64_mod": _i64_mod}


def check_partition(spec: TableSpec) -> None:
    """Checks that this version can compute a partition.

    Raises:
        LayoutError: no such function, or no such number of buckets.
    """
    if spec.function not in _FUNCTIONS or spec.version != 1:
        raise LayoutError(
            "partition", expected=f"one of {', '.join(_FUNCTIONS)}", found=f"{spec.function}, version {spec.version}"
        )
    if not 0 < spec.buckets <= MAX_BUCKETS:
        raise LayoutError("buckets", expected=f"1 to {MAX_BUCKETS}", found=f"{spec.buckets}")


def buckets_of(ids: np.ndarray, spec: TableSpec) -> np.ndarray:
    """Returns the bucket of each id, uint64[N]; `ids` is int64[N]."""
    return _FUNCTIONS[spec.function](ids.view(np.uint64), spec.buckets)


class ModuloOwner(msgspec.Struct, frozen=True):
    """Owns the ids of which `id % world == rank`, as Python and torch have it: -1 of 4 belongs to rank 3."""

    rank: int
    world: int


def modulo_owner(rank: int, world: int) -> ModuloOwner:
    """Returns, for `owned=`, the ids with `id % world == rank`; the remainder of a negative id is not negative.

    The table is then saved with the partition "i64_mod" and `world` buckets.
    """
    return ModuloOwner(*checked_rank(rank, world))


def checked_rank(rank: object, world: object) -> tuple[int, int]:
    """Returns a rank and the number of ranks.

    Raises:
        LayoutError: they are no such numbers.
    """
    if isinstance(rank, SupportsIndex) and isinstance(world, SupportsIndex):
        rank, world = operator.index(rank), operator.index(world)
        if 0 <= rank < world:
            return rank, world
    raise LayoutError("owned", expected=f"a rank of a world of {world!r:.40}", found=f"{rank!r:.40}")


def owned_text(spec: TableSpec, owned: tuple[int, int]) -> str:
    """Describes the ids in a range of buckets."""
    start, stop = owned
    if spec.function == "i64_mod" and stop == start + 1:
        return f"ids with id % {spec.buckets} == {start}"
    return f"ids of buckets {start}:{stop} of {spec.buckets}"


def bucket_range(rank: int, world: int, buckets: int = DEFAULT_BUCKETS) -> tuple[int, int]:
    """Returns the buckets `start:stop` of one of `world` owners: even, the first ones take the remainder."""
    rank, world = checked_rank(rank, world)
    each, more = divmod(buckets, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


# the order of rows ---------------------------------------------------------------------------------------------------


class RowOrder(msgspec.Struct, frozen=True):
    """The order in which rows are saved."""

    order: np.ndarray | None
    """The position of each row in the table's own arrays, int64[rows]; None if they are in order."""
    starts: np.ndarray
    """The first row of each bucket, then the number of rows, int64[buckets + 1]."""

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Returns ids in that order; the same array if they are in order."""
        return ids if self.order is None else ids[self.order]


def sort_rows(
    ids: np.ndarray, spec: TableSpec, keep: Keep | None = None, path: str = "ids", *, execute: Executor = run_serially
) -> RowOrder:
    """Returns the order of rows by (bucket, unsigned id).

    Args:
        ids: int64[N].
        keep: which of several rows with one id is kept.
        execute: runs the parts of the work, possibly in parallel.

    Raises:
        TreeError: an id has several rows, and `keep` is None.
    """
    unsigned = ids.view(np.uint64)
    power = spec.buckets.bit_length() - 1
    if spec.function in ("u64_mod", "i64_mod") and spec.buckets == 1 << power:
        order, starts, repeated = _sort_by_packed_keys(unsigned, power, execute)
    else:
        buckets = buckets_of(ids, spec)
        order = np.argsort(unsigned, kind="stable")
        # a stable sort of 16-bit numbers is a radix sort
        small = np.uint16 if spec.buckets <= 1 << 16 else np.uint32
        order = order[np.argsort(buckets[order].astype(small), kind="stable")]
        starts, repeated = _bucket_starts(buckets, spec.buckets), _has_duplicates(unsigned, order)
    if order is not None and repeated:
        order = order[_drop_duplicates(ids[order], keep, path)]
        starts = _bucket_starts(buckets_of(ids[order], spec), spec.buckets)
    return RowOrder(order, starts)


def _bucket_starts(buckets: np.ndarray, count: int) -> np.ndarray:
    sizes = np.bincount(buckets.view(np.int64), minlength=count)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _overlapping_parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields parts that fit in the cache, each with the first element of the next one."""
    for low in range(0, len(array), PART_SIZE):
        yield array[low : low + PART_SIZE + 1]


def _has_duplicates(ids: np.ndarray, order: np.ndarray) -> bool:
    """Returns whether an id is repeated; `order` sorts the ids."""
    taken = (ids[part] for part in _overlapping_parts(order))
    return any((part[1:] == part[:-1]).any() for part in taken)


def _sort_by_packed_keys(ids: np.ndarray, power: int, execute: Executor) -> tuple[np.ndarray | None, np.ndarray, bool]:
    """Returns the stable order of (low `power` bits, other bits), the first rows of buckets, and if ids are repeated.

    A key (the id with the low bits moved to the top) and a position, packed into one integer, are sorted as integers,
    in a third of the time of an argsort. Where both do not fit in 64 bits, the last bits of the keys are left out, and
    the keys that are equal without them, in order but for these bits, are sorted afterwards. The order is None for ids
    that are in order.
    """
    width = max(power, int(ids.max(initial=0)).bit_length())
    bits = max(1, (len(ids) - 1).bit_length())
    left_out = max(0, width + bits - 64)
    borders = np.arange(1 << power, dtype=np.uint64) << np.uint64(min(63, width - power - left_out + bits))
    packed, ascending = _pack_keys(ids, power, width, left_out, bits, execute)
    if not ascending:
        _parallel_sort(packed, execute)
    starts = np.append(np.searchsorted(packed, borders), len(ids))
    # keys that only rise repeat no id
    if ascending:
        return None, starts, False
    ties = _equal_neighbours(packed, bits)
    execute([partial(np.bitwise_and, part, np.uint64((1 << bits) - 1), part) for part in _split(packed)])
    order = packed.view(np.int64)
    some = order[ties]
    order[ties] = some[np.argsort(_sort_keys(ids[some], power, width), kind="stable")]
    return order, starts, _has_duplicates(ids, order[ties])


def _split(array: np.ndarray) -> list[np.ndarray]:
    step = max(PART_SIZE, -(-len(array) // PARALLEL_PARTS))
    return [array[low : low + step] for low in range(0, len(array), step)]


def _pack_keys(
    ids: np.ndarray, power: int, width: int, left_out: int, bits: int, execute: Executor
) -> tuple[np.ndarray, bool]:
    """Returns keys without their last bits, with positions in the low bits, uint64[N], and whether the keys ascend."""
    packed, descents = np.empty(len(ids), np.uint64), list[int]()

    def pack(start: int, stop: int) -> None:
        for low in range(start, stop, PART_SIZE):
            keys = _sort_keys(ids[low : low + PART_SIZE + 1], power, width)
            # one place out of order is enough: the other parts need no look
            if not descents and not (keys[1:] > keys[:-1]).all():
                descents.append(low)
            keys = keys[:PART_SIZE]
            keys >>= np.uint64(left_out)
            keys <<= np.uint64(bits)
            keys |= np.arange(low, low + len(keys), dtype=np.uint64)
            packed[low : low + PART_SIZE] = keys

    step = PART_SIZE * max(1, -(-len(ids) // (PART_SIZE * PARALLEL_PARTS)))
    execute([partial(pack, low, min(low + step, len(ids))) for low in range(0, len(ids), step)])
    return packed, not descents


def _parallel_sort(packed: np.ndarray, execute: Executor) -> None:
    """Sorts integers in place: partitions them into parts (a tenth of the work), then sorts each part."""
    parts = [packed]
    while len(parts) < PARALLEL_PARTS and len(packed) > PART_SIZE * len(parts):
        execute([partial(part.partition, len(part) // 2) for part in parts])
        parts = [half for part in parts for half in (part[: len(part) // 2], part[len(part) // 2 :])]
    execute([part.sort for part in parts])


def _sort_keys(ids: np.ndarray, power: int, width: int) -> np.ndarray:
    """Returns ids of `width` bits with the low `power` bits moved to the top."""
    keys = ids & np.uint64((1 << power) - 1)
    keys <<= np.uint64(min(width - power, 63))
    keys |= ids >> np.uint64(power)
    return keys


def _equal_neighbours(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns the positions of sorted integers that equal a neighbour except for the last `bits` bits."""
    same: list[np.ndarray] = [np.empty(0, np.int64)]
    for n, part in enumerate(_overlapping_parts(packed)):
        same.append(np.flatnonzero((part[1:] ^ part[:-1]) >> np.uint64(bits) == 0) + n * PART_SIZE)
    first = np.concatenate(same)
    # np.union1d takes several times as long as the sort itself
    is_tied = np.zeros(len(packed), bool)
    is_tied[first] = is_tied[first + 1] = True
    return np.flatnonzero(is_tied)


def _drop_duplicates(taken: np.ndarray, keep: Keep | None, path: str) -> np.ndarray:
    """Returns which rows are kept, bool[N]. `taken`: ids in order, rows of one id in the order of the caller."""
    same = taken[1:] == taken[:-1]
    if keep is None:
        repeated = np.unique(taken[1:][same])
        more = ", ..." if len(repeated) > 5 else ""
        raise TreeError(
            path,
            expected="each id once",
            found=f"{len(repeated)} ids more than once: {', '.join(map(str, repeated[:5].tolist()))}{more}",
            hint="Pass keep='first' or keep='last' to KeyedTable",
        )
    kept = np.ones(1, bool)
    return np.concatenate([kept, ~same]) if keep == "first" else np.concatenate([~same, kept])


class HashTable(Protocol):
    """The interface of a hash table that `KeyedTable.of` takes: a torch module, a class of an extension, ..."""

    def export(self) -> tuple[Any, Mapping[str, Any]]:
        """Returns all rows: ids int64[N], and slots by name, [N, *row], in the same order."""
        ...

    def import_(self, ids: Any, slots: Mapping[str, Any]) -> None:
        """Replaces all rows by the given ones."""
        ...


class KeyedTable:
    """A table of rows by id, or the part of one that this rank owns.

        tree = {"emb": tc.KeyedTable(ids, {"embedding": weights, "exp_avg": moments}, owned=tc.KeyedTable.share(r, n))}
        tc.save(path, tree)
        tc.load(path, {"emb": tc.KeyedTable(ids[:0], {"embedding": weights[:0]}, owned=...)})   # any other range

    As a target of load its ids and slots only give the names, kinds, dtypes and row shapes of what is wanted; the
    number of rows comes from the checkpoint. `load_into` gives the table new arrays.

    `tc.load(path, ids=ids)` loads the rows of these ids alone, each once, in their order: of every table, or with
    `ids={"emb": ids}` of that at a path, while others are loaded whole. With a table in like they are ids that its
    `owned` has. An id that the checkpoint lacks is an error; with a table in like that has a `fill` for every slot its
    row is filled. Beside the rows the ids of their buckets are read, so a table in many buckets is read least; reads
    are rounded to 256 KiB where checksums are compared.

    >>> table = tc.KeyedTable(np.array([7, -1]), {"embedding": np.ones((2, 3))})
    >>> report = tc.save("run/step_00000200", {"table": table})
    >>> tc.load("run/step_00000200")["table"].ids.tolist()
    [7, -1]
    >>> tc.KeyedTable.share(1, 4, 16)  # the buckets of rank 1 of 4
    (4, 8)
    >>> tc.KeyedTable(np.array([5, -3]), {}, owned=tc.KeyedTable.modulo(1, 4))  # ids with id % 4 == 1
    KeyedTable(2 rows, slots ; buckets (1, 2) of 4)
    >>> tc.load("run/step_00000200", ids=[-1])["table"].slots["embedding"].shape
    (1, 3)

    Args:
        ids: int64[N], in any order, each once.
        slots: arrays [N, *row] by name, such as an embedding and its moments.
        scalars: a tree of values that belong to the whole table, the same on all its owners.
        buckets: the number of buckets. A table takes 8 bytes a bucket beside its rows.
        partition: "u64_mod", the id as unsigned modulo `buckets`; "splitmix64_mod", of its mixed bits; or "i64_mod",
            `id % buckets` as Python and torch have it.
        owned: the buckets `start:stop` whose ids are on this rank; None for all of them. Or
            `KeyedTable.modulo(rank, world)` for the ids with `id % world == rank`, which sets `buckets` and
            `partition`. Any of these loads what another saved; between ranges of the same buckets, and for the same
            `modulo`, a rank reads its own rows only.
        keep: which of several rows with one id is saved, "first" or "last"; None raises an error.
        fill: by name of slot the number that fills it where a checkpoint lacks it; otherwise that is an error.

    Raises:
        LayoutError: no such partition or range.
    """

    __slots__ = ("deltas", "fill", "ids", "keep", "marks", "owned", "scalars", "slots", "spec")

    def __init__(
        self,
        ids: Any,
        slots: Mapping[str, Any],
        *,
        scalars: Mapping[str, Any] | None = None,
        buckets: int = DEFAULT_BUCKETS,
        partition: str = "u64_mod",
        owned: tuple[int, int] | ModuloOwner | None = None,
        keep: Keep | None = None,
        fill: Mapping[str, float] | None = None,
    ) -> None:
        self.ids, self.slots = ids, dict(slots)
        self.scalars = dict(scalars or {})
        self.spec, self.owned = _partition_of(owned, buckets, partition)
        if keep not in (None, "first", "last"):
            raise LayoutError("keep", expected="'first', 'last' or None", found=f"{keep!r:.40}")
        self.keep: Keep | None = keep
        self.fill = dict(fill or {})
        self.marks, self.deltas = RowMarks(), tuple[TableDelta, ...]()

    def touched(self, ids: Any) -> None:
        """Marks rows that have changed, are new, or are no longer there, for incremental saves.

        An incremental save of the same object, or of the same `KeyedTable.of`, then takes these alone for changed,
        without a look at the others; so from the first call on every such row must be marked before the next save.
        Without marks changed rows are found by a digest of each row, which a save computes of all rows.
        Several runs may save the table in turn: each writes what was marked since its own save before.

        >>> ids, rows = np.arange(1000), np.zeros((1000, 8), np.float32)
        >>> table = tc.KeyedTable(ids, {"embedding": rows}, buckets=4)
        >>> with tc.Manager("tables", incremental=True, background=False) as manager:
        ...     for step in (1, 2, 3):
        ...         rows[step] = step
        ...         table.touched([step])
        ...         print(manager.save(step, {"emb": table}).nbytes)
        40032
        104
        104

        Args:
            ids: int64[N]; one that is there several times counts once.

        Raises:
            MismatchError: they are no whole numbers of 64 bits in one dimension.
        """
        self.marks.add(ids)

    def __repr__(self) -> str:
        rows = getattr(self.ids, "shape", ("?",))[0]
        return f"KeyedTable({rows} rows, slots {', '.join(self.slots)}; buckets {self.owned} of {self.spec.buckets})"

    share = staticmethod(bucket_range)
    modulo = staticmethod(modulo_owner)

    @staticmethod
    def buckets_of(ids: Any, count: int = DEFAULT_BUCKETS, *, partition: str = "u64_mod") -> np.ndarray:
        """Returns the bucket of each id, as int64[N]: the owner of an id is the one whose `owned` holds its bucket.

        Args:
            ids: int64[N], as numpy takes it.
            count: the number of buckets.
            partition: as for `KeyedTable`.

        Raises:
            LayoutError: no such partition, or ids of another dtype.
        """
        (spec, _), array = _partition_of(None, count, partition), np.asarray(ids)
        if array.dtype != np.int64:
            raise LayoutError("ids", expected="int64", found=f"{array.dtype}", hint="Convert them")
        return buckets_of(np.ascontiguousarray(array), spec).astype(np.int64)

    @staticmethod
    def of(table: HashTable, **options: Any) -> BoundTable:
        """Wraps a hash table as a leaf: what it exports is saved, and what is loaded is given to its `import_`.

        Args:
            options: as for `KeyedTable`.
        """
        return BoundTable(table, options)

    def with_parts(self, ids: Any, slots: Mapping[str, Any], scalars: Mapping[str, Any]) -> KeyedTable:
        """Returns a table with the same options and other arrays."""
        table = restore_table(self.spec, ids, slots, scalars)
        table.owned, table.keep, table.fill, table.marks = self.owned, self.keep, self.fill, self.marks
        return table


def _partition_of(owned: Any, buckets: Any, partition: str) -> tuple[TableSpec, tuple[int, int]]:
    """Returns the partition of a table, and the range of buckets that is here.

    Raises:
        LayoutError: no such partition or range.
    """
    if isinstance(owned, ModuloOwner):
        if (buckets, partition) not in ((DEFAULT_BUCKETS, "u64_mod"), (owned.world, "i64_mod")):
            raise LayoutError(
                "owned",
                expected="KeyedTable.modulo(rank, world) without buckets= and partition=, which it sets",
                found=f"buckets={buckets!r:.40}, partition={partition!r:.40}",
            )
        buckets, partition, owned = owned.world, "i64_mod", (owned.rank, owned.rank + 1)
    if not isinstance(buckets, SupportsIndex):
        raise LayoutError("buckets", expected="a number of buckets", found=f"{buckets!r:.60}")
    spec = TableSpec(partition, 1, operator.index(buckets))
    check_partition(spec)
    try:
        first, last = (0, spec.buckets) if owned is None else map(operator.index, owned)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            "owned",
            expected="two numbers, the first bucket and the one after the last",
            found=f"{owned!r:.60}",
            hint="Use owned=tc.KeyedTable.share(rank, world); for ids dealt by id % world, tc.KeyedTable.modulo",
        ) from error
    if not 0 <= first <= last <= spec.buckets:
        raise LayoutError("owned", expected=f"a range inside 0:{spec.buckets}", found=f"{first}:{last}")
    return spec, (first, last)


def restore_table(spec: TableSpec, ids: Any, slots: Mapping[str, Any], scalars: Mapping[str, Any]) -> KeyedTable:
    """Returns a whole table as it was saved, also with a partition function that this version does not know."""
    table = object.__new__(KeyedTable)
    table.spec, table.ids, table.scalars = spec, _unwrap_column(ids), dict(scalars)
    table.slots = {name: _unwrap_column(slot) for name, slot in slots.items()}
    table.owned, table.keep, table.fill = (0, spec.buckets), None, {}
    table.marks, table.deltas = RowMarks(), ()
    return table


class ColumnRows(msgspec.Struct, frozen=True):
    """Rows of a column apart from the program's array, in a table that is saved as deltas."""

    spec: ArraySpec
    """That of the program's array, with the number of these rows."""
    rows: np.ndarray | None = None
    """The rows, of raw dtype; None where another checkpoint of the run has them, and they are not written again."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype


class TableDelta(msgspec.Struct, frozen=True):
    """Rows of a table that an incremental save has written, apart from those that were there before."""

    rows: KeyedTable
    """The rows that have changed or are new."""
    deleted: KeyedTable
    """The ids of the rows that are no longer there, without slots."""


class RowMarks:
    """The ids that a program has marked as changed, in the order of its calls.

    They stay until each run that saves the table has saved them, unless one falls `MAX_MARKS` calls behind the others.
    """

    def __init__(self) -> None:
        self.position = self._dropped = 0
        """The number of calls so far, and of those whose ids were dropped."""
        self._parts: list[tuple[int, np.ndarray]] = []
        """(the position after a call, its ids)."""
        self._saved: dict[str, int] = {}
        """The position up to which each run has saved them, by its URL."""

    def add(self, ids: Any) -> None:
        """Marks ids; raises MismatchError."""
        own = np.unique(_as_ids(ids, "touched"))
        self.position += 1
        if len(self._parts) >= MAX_MARKS:
            self._drop(max(self._saved.values(), default=0))
        if len(self._parts) >= MAX_MARKS:  # nobody has saved for long: who asks for the last ones gets all
            own, self._parts = np.unique(np.concatenate([own, *(part for _, part in self._parts)])), []
        self._parts.append((self.position, own))

    def since(self, position: int) -> np.ndarray | None:
        """Returns at least the ids that were marked after a position, rising, each once; None if some were dropped."""
        if position < self._dropped:
            return None
        parts = [part for end, part in self._parts if end > position]
        return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))

    def saved(self, run: str, position: int) -> None:
        """Takes note that a run has saved what was marked up to a position; drops what all runs have saved."""
        self._saved[run] = position
        self._drop(min(self._saved.values()))

    def _drop(self, position: int) -> None:
        self._dropped = max(self._dropped, position)
        self._parts = [part for part in self._parts if part[0] > position]
        self._saved = {run: at for run, at in self._saved.items() if at >= self._dropped}


class BoundTable:
    """A hash table of the user as a stateful object; see `KeyedTable.of`."""

    def __init__(self, table: HashTable, options: dict[str, Any]) -> None:
        self._table, self._options, self._marks = table, options, RowMarks()

    def touched(self, ids: Any) -> None:
        """Marks rows that have changed; see `KeyedTable.touched`."""
        self._marks.add(ids)

    def state_dict(self) -> KeyedTable:
        """Returns the rows that the table exports."""
        ids, slots = self._table.export()
        state = KeyedTable(ids, slots, **self._options)
        state.marks = self._marks
        return state

    def load_state_dict(self, state: KeyedTable) -> None:
        """Replaces the rows of the table by loaded ones."""
        self._table.import_(state.ids, state.slots)


class TableCache:
    """What the columns of a table have in common, such as the order of the rows: computed once and cached here."""

    __slots__ = ("held", "joins", "rows", "table")

    def __init__(self, table: KeyedTable) -> None:
        self.table = table
        self.held: Any = None
        """The rows of the table and their order, once they are computed for a save."""
        self.rows: Any = None
        """The rows of a checkpoint that are wanted, once they are known."""
        self.joins: dict[Any, Any] = {}
        """The positions of slots' rows that were saved with other ids, by the source of these."""


class TableColumn:
    """One array of a table, as a leaf of a tree: the ids, a slot, or the first row of each bucket."""

    __slots__ = ("array", "kind", "name", "view")
    __treeckpt_leaf__: ClassVar[bool] = True

    def __init__(self, view: TableCache, kind: Literal["ids", "offsets", "slot"], array: Any, name: str = "") -> None:
        self.view, self.kind, self.array = view, kind, array
        self.name = name
        """The name of a slot; empty for ids and offsets."""

    @property
    def shape(self) -> Any:
        """The shape of the array; offsets, computed for each save, have no array."""
        return self.array.shape if self.kind != "offsets" else (self.view.table.spec.buckets,)

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype if self.kind != "offsets" else np.dtype(np.int64)


def columns_of(table: KeyedTable) -> tuple[object, ...]:
    """Returns a table's children, in the order of their node; `...` in a table that was loaded in part stays."""
    view = TableCache(table)
    ids = ... if table.ids is ... else TableColumn(view, "ids", table.ids)
    slots = {name: a if a is ... else TableColumn(view, "slot", a, name) for name, a in table.slots.items()}
    deltas = [dict(zip(DELTA_KEYS, (delta.rows, delta.deleted), strict=True)) for delta in table.deltas]
    children = ids, TableColumn(view, "offsets", None), slots, table.scalars
    return (*children, deltas) if deltas else children


def _unwrap_column(child: Any) -> Any:
    return child.array if isinstance(child, TableColumn) else child


# sharding by row ------------------------------------------------------------------------------------------------------


class OwnedRows(msgspec.Struct, frozen=True):
    """The buckets that one rank owns of a table, and its number of rows in them."""

    rank: int
    start: int
    """The first bucket of the rank."""
    stop: int
    """One past the last bucket of the rank."""
    rows: int


def row_starts(owned: Sequence[OwnedRows], buckets: int, path: str) -> tuple[dict[tuple[int, int], int], int]:
    """Returns the first row of each range of buckets, and the number of all rows. Owners of one range are replicas.

    Raises:
        MismatchError: replicas have different numbers of rows.
        LayoutError: ranges overlap, or leave buckets out.
    """
    owners: dict[tuple[int, int], OwnedRows] = {}
    for part in owned:
        first = owners.setdefault((part.start, part.stop), part)
        if first.rows != part.rows:
            raise MismatchError(
                path,
                expected=f"the same rows on every owner of buckets {part.start}:{part.stop}; "
                f"rank {first.rank} has {first.rows}",
                found=f"rank {part.rank} has {part.rows}",
                hint="Give each rank buckets of its own: owned=tc.KeyedTable.share(rank, world)",
            )
    starts: dict[tuple[int, int], int] = {}
    rows = bucket = 0
    for key, part in sorted(owners.items()):
        starts[key] = rows
        rows += part.rows
        if part.start == part.stop:
            continue
        if part.start != bucket:
            raise _coverage_error(path, part, bucket)
        bucket = part.stop
    if bucket != buckets:
        raise _coverage_error(path, OwnedRows(-1, buckets, buckets, 0), bucket)
    return starts, rows


def _coverage_error(path: str, part: OwnedRows, bucket: int) -> LayoutError:
    """Returns the error for a range of buckets that does not start at `bucket`, where the previous one stops."""
    if part.start < bucket:
        found = f"bucket {part.start} is owned by rank {part.rank} and by another, with another range"
    else:
        found = f"no rank owns buckets {bucket}:{part.start}"
    return LayoutError(
        path,
        expected="owners whose ranges hold each bucket once",
        found=found,
        hint="Use owned=tc.KeyedTable.share(rank, world), or modulo(rank, world), with the same world on each rank",
    )


class ChosenIds(msgspec.Struct, frozen=True):
    """The ids whose rows are loaded, of tables by path, or of every table."""

    of_table: Mapping[str, np.ndarray]
    of_all: np.ndarray | None = None

    def beside(self, ids_path: str) -> np.ndarray | None:
        """Returns the chosen ids of the table whose ids have a path; None for a table that is loaded whole."""
        return self.of_table.get(table_path(ids_path), self.of_all)


def table_path(ids_path: str) -> str:
    """Returns the path of a table from that of its ids."""
    return ids_path.removesuffix(TABLE_KEYS[0]).removesuffix("/")


def chosen_ids(given: Any) -> ChosenIds | None:
    """Returns `ids=` of a load: one array of ids for all tables, or a dict of these by the path of a table.

    Raises:
        MismatchError: they are no whole numbers of 64 bits in one dimension, or one is twice there.
    """
    if given is None or isinstance(given, ChosenIds):
        return given
    if isinstance(given, Mapping):
        return ChosenIds({f"{path}": _each_once(ids, f"ids[{path!r:.80}]") for path, ids in given.items()})
    return ChosenIds({}, _each_once(given, "ids"))


def _as_ids(given: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as error:
        raise MismatchError(what, expected="an array of ids", found=f"{given!r:.60} ({error})") from error
    # uint64 has numbers that int64 lacks; an empty list is an array of float64
    whole = array.dtype.kind in "iu" and array.dtype != np.uint64
    if array.ndim != 1 or not (whole or not array.size):
        found = f"{array.dtype} of shape {array.shape}"
        raise MismatchError(what, expected="ids of int64[N]", found=found, hint="One id is [id]")
    return np.ascontiguousarray(array, np.int64)


def find_ids(ids: np.ndarray, wanted: np.ndarray, order: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the position of each wanted id among others, and whether it is there.

    Args:
        order: sorts the others.
    """
    if not len(ids):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    order = np.argsort(ids) if order is None else order
    position = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)]
    return position, ids[position] == wanted


def _each_once(given: Any, what: str) -> np.ndarray:
    ids = _as_ids(given, what)
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise MismatchError(
            what,
            expected="each id once",
            found=f"{values[counts > 1][0]} {counts.max()} times",
            hint="Pass numpy.unique(ids), and take rows with its return_inverse",
        )
    return ids
