"""Keyed tables: rows by 64-bit id, as dynamic embeddings have them. Which bucket is an id in, and in which order?

A partition function maps an id to one of so many buckets; each owner of a part of the table holds a range of them.
Rows are saved in the order of (bucket, id as unsigned), so that what any owner holds is a range of rows, and an array
`offsets` says with which row each bucket begins. Where the rows lie in the memory of the program that saves them, and
in which slots of a hash table they end up after loading, is never stored.

A `KeyedTable` is a container of its arrays: in a tree with the table at `emb` they have the paths `emb/ids`,
`emb/offsets`, `emb/slots/embedding`, ... Flattening one gives a `Column` for each.
"""

# A table holds arrays of any library.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol

import msgspec
import numpy as np

from .errors import LayoutError, TreeError
from .spec import TableSpec

__all__ = [
    "BUCKETS",
    "Arranged",
    "BoundTable",
    "Column",
    "HashTable",
    "KeyedTable",
    "TableView",
    "arrange",
    "buckets_of",
    "columns_of",
    "restored",
    "share_of",
]

BUCKETS = 65_536
"""How many buckets a table has, unless told otherwise."""
MAX_BUCKETS = 1 << 24
PART = 1 << 17
"""Ids that are looked at at a time."""
Keep = Literal["first", "last"]


class HashTable(Protocol):
    """What `KeyedTable.of` needs of a hash table: a module of its own kind, an extension's class, a dict."""

    def export(self) -> tuple[Any, Mapping[str, Any]]:
        """All rows: ids int64[N], and slots by name, [N, *row], in the same order."""
        ...

    def import_(self, ids: Any, slots: Mapping[str, Any]) -> None:
        """Replaces all rows by these."""
        ...


# ids and buckets ---------------------------------------------------------------------------------------------------


def _u64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    if buckets & (buckets - 1) == 0:
        return ids & np.uint64(buckets - 1)
    return ids % np.uint64(buckets)


def _splitmix64_mod(ids: np.ndarray, buckets: int) -> np.ndarray:
    """Of mixed bits (Vigna's splitmix64): for ids whose low bits say little."""
    with np.errstate(over="ignore"):
        mixed = ids + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _u64_mod(mixed ^ (mixed >> np.uint64(31)), buckets)


_FUNCTIONS = {"u64_mod": _u64_mod, "splitmix64_mod": _splitmix64_mod}


def check_partition(spec: TableSpec) -> None:
    """Refuses a partition that this version cannot compute.

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
    """The bucket of each id, uint64[N]; `ids` int64[N]."""
    return _FUNCTIONS[spec.function](ids.view(np.uint64), spec.buckets)


def share_of(rank: int, world: int, buckets: int = BUCKETS) -> tuple[int, int]:
    """The buckets `start:stop` of one of `world` owners: equal shares, what is left over to the first ones."""
    if not 0 <= rank < world:
        raise LayoutError("owned", expected=f"a rank of a world of {world}", found=f"{rank}")
    each, more = divmod(buckets, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


class Arranged(msgspec.Struct, frozen=True):
    """Rows in the order in which they are saved."""

    ids: np.ndarray
    """int64[N], in that order."""
    order: np.ndarray | None
    """Where each row stands in the table's own arrays, int64[N]; None if it stands where it is."""
    starts: np.ndarray
    """The first row of each bucket, and the number of rows, int64[buckets + 1]."""


def arrange(ids: np.ndarray, spec: TableSpec, keep: Keep | None = None, path: str = "ids") -> Arranged:
    """Puts ids in the order of (bucket, unsigned id).

    Args:
        ids: int64[N].
        keep: which of several rows with one id stays.

    Raises:
        TreeError: an id has several rows, and `keep` does not say what to do.
    """
    power = spec.buckets.bit_length() - 1
    if spec.function == "u64_mod" and spec.buckets == 1 << power:
        order, starts = _order_by_bits(ids.view(np.uint64), power)
    else:
        buckets = buckets_of(ids, spec)
        order = np.argsort(ids.view(np.uint64), kind="stable")
        # a stable sort of 16-bit numbers is a radix sort
        small = np.uint16 if spec.buckets <= 1 << 16 else np.uint32
        order = order[np.argsort(buckets[order].astype(small), kind="stable")]
        starts = _starts(buckets, spec.buckets)
    taken = ids if order is None else ids.take(order, mode="clip")
    if order is not None and any((part[1:] == part[:-1]).any() for part in _parts(taken)):
        order = order[_distinct(taken, keep, path)]
        taken = ids[order]
        starts = _starts(buckets_of(taken, spec), spec.buckets)
    return Arranged(taken, order, starts)


def _starts(buckets: np.ndarray, count: int) -> np.ndarray:
    sizes = np.bincount(buckets.view(np.int64), minlength=count)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Stretches that stay in a cache while they are looked at, each with the first element of the next."""
    for low in range(0, len(array), PART):
        yield array[low : low + PART + 1]


def _order_by_bits(ids: np.ndarray, power: int) -> tuple[np.ndarray | None, np.ndarray]:
    """The order of (low `power` bits, the other bits), stable, and the first row of each bucket.

    A key, the low bits put first, and a position in one number can be sorted as such, in a third of the time that an
    order takes. Where both do not fit, the last bits of the keys are left out, and the few that are alike without them
    put in order afterwards. The order is None for ids that are in it.
    """
    width = max(power, int(ids.max(initial=0)).bit_length())
    bits = max(1, (len(ids) - 1).bit_length())
    left_out = max(0, width + bits - 64)
    borders = np.arange(1 << power, dtype=np.uint64) << np.uint64(min(63, width - power - left_out + bits))
    packed, rising = np.empty(len(ids), np.uint64), True
    for low in range(0, len(ids), PART):
        keys = _keys(ids[low : low + PART + 1], power, width)
        rising = rising and bool((keys[1:] > keys[:-1]).all())
        keys = keys[:PART]
        keys >>= np.uint64(left_out)
        keys <<= np.uint64(bits)
        keys |= np.arange(low, low + len(keys), dtype=np.uint64)
        packed[low : low + PART] = keys
    if not rising:
        packed.sort()
    starts = np.append(np.searchsorted(packed, borders), len(ids))
    if rising:
        return None, starts
    at = _alike(packed, bits) if left_out else np.empty(0, np.int64)
    if len(at) > len(ids) // 32:
        return np.argsort(_keys(ids, power, width), kind="stable"), starts
    packed &= np.uint64((1 << bits) - 1)
    order = packed.view(np.int64)
    some = order[at]
    order[at] = some[np.argsort(_keys(ids[some], power, width), kind="stable")]
    return order, starts


def _keys(ids: np.ndarray, power: int, width: int) -> np.ndarray:
    """Ids of `width` bits with the low `power` of them put first."""
    keys = ids & np.uint64((1 << power) - 1)
    keys <<= np.uint64(min(width - power, 63))
    keys |= ids >> np.uint64(power)
    return keys


def _alike(packed: np.ndarray, bits: int) -> np.ndarray:
    """Where sorted numbers are the same but for the last bits, neighbours of both sides."""
    same: list[np.ndarray] = [np.empty(0, np.int64)]
    for n, part in enumerate(_parts(packed)):
        same.append(np.flatnonzero((part[1:] ^ part[:-1]) >> np.uint64(bits) == 0) + n * PART)
    first = np.concatenate(same)
    return np.union1d(first, first + 1)


def _distinct(taken: np.ndarray, keep: Keep | None, path: str) -> np.ndarray:
    """Which of rows in order, those of one id in the order in which they were given, are to stay."""
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
    one = np.ones(1, bool)
    return np.concatenate([one, ~same]) if keep == "first" else np.concatenate([~same, one])


# the table as a node of a tree ---------------------------------------------------------------------------------------


class KeyedTable:
    """A table of rows by id, or the part of one that this rank owns.

        tree = {"emb": tc.KeyedTable(ids, {"embedding": weights, "exp_avg": moments}, owned=tc.KeyedTable.share(r, n))}
        tc.save(path, tree)
        tc.load(path, {"emb": tc.KeyedTable(ids[:0], {"embedding": weights[:0]}, owned=...)})   # any other range

    As a target of load its ids and slots only say the names, kinds, dtypes and row shapes of what is wanted; how many
    rows there are, the checkpoint says. `load_into` gives the table new arrays.

    Args:
        ids: int64[N], in any order, each once.
        slots: arrays [N, *row] by name, such as an embedding and its moments.
        scalars: a tree of what belongs to the table as a whole, the same on all its owners.
        buckets: into how many buckets ids are parted. A table takes 8 bytes a bucket beside its rows.
        partition: how: "u64_mod", the id as unsigned modulo `buckets`; or "splitmix64_mod", of its mixed bits.
        owned: the buckets `start:stop` whose ids are here; None for all of them.
        keep: "first" or "last" of several rows with one id is saved; None refuses them.
        fill: by name of slot the number that fills it where a checkpoint lacks it; otherwise that is an error.

    Raises:
        LayoutError: no such partition or range.
    """

    __slots__ = ("fill", "ids", "keep", "owned", "scalars", "slots", "spec")

    def __init__(
        self,
        ids: Any,
        slots: Mapping[str, Any],
        *,
        scalars: Mapping[str, Any] | None = None,
        buckets: int = BUCKETS,
        partition: str = "u64_mod",
        owned: tuple[int, int] | None = None,
        keep: Keep | None = None,
        fill: Mapping[str, float] | None = None,
    ) -> None:
        self.ids, self.slots = ids, dict(slots)
        self.scalars = dict(scalars or {})
        self.spec = TableSpec(partition, 1, operator.index(buckets))
        check_partition(self.spec)
        self.owned = _range(owned, self.spec.buckets)
        if keep not in (None, "first", "last"):
            raise LayoutError("keep", expected="'first', 'last' or None", found=f"{keep!r:.40}")
        self.keep: Keep | None = keep
        self.fill = dict(fill or {})

    def __repr__(self) -> str:
        rows = getattr(self.ids, "shape", ("?",))[0]
        return f"KeyedTable({rows} rows, slots {', '.join(self.slots)}; buckets {self.owned} of {self.spec.buckets})"

    @staticmethod
    def share(rank: int, world: int, buckets: int = BUCKETS) -> tuple[int, int]:
        """The range of buckets that one of `world` owners has, by rank: contiguous and even."""
        return share_of(rank, world, buckets)

    @staticmethod
    def of(table: HashTable, **options: Any) -> BoundTable:
        """A hash table as a leaf: what it exports is saved, and what is restored is given to its `import_`.

        Args:
            options: as for `KeyedTable`.
        """
        return BoundTable(table, options)

    def with_parts(self, ids: Any, slots: Mapping[str, Any], scalars: Mapping[str, Any]) -> KeyedTable:
        """A table as this one, of other arrays."""
        made = object.__new__(KeyedTable)
        made.ids, made.slots, made.scalars = _bare(ids), {k: _bare(v) for k, v in slots.items()}, dict(scalars)
        made.spec, made.owned, made.keep, made.fill = self.spec, self.owned, self.keep, self.fill
        return made


def _range(owned: tuple[int, int] | None, buckets: int) -> tuple[int, int]:
    start, stop = (0, buckets) if owned is None else map(operator.index, owned)
    if not 0 <= start <= stop <= buckets:
        raise LayoutError("owned", expected=f"a range inside 0:{buckets}", found=f"{start}:{stop}")
    return start, stop


def restored(spec: TableSpec, ids: Any, slots: Mapping[str, Any], scalars: Mapping[str, Any]) -> KeyedTable:
    """A whole table as it was saved, also under a partition that this version does not know."""
    made = object.__new__(KeyedTable)
    made.ids, made.slots, made.scalars = _bare(ids), {k: _bare(v) for k, v in slots.items()}, dict(scalars)
    made.spec = spec
    made.owned, made.keep, made.fill = (0, spec.buckets), None, {}
    return made


class BoundTable:
    """A hash table of the user's, as an object with a state; see `KeyedTable.of`."""

    def __init__(self, table: HashTable, options: dict[str, Any]) -> None:
        self._table, self._options = table, options

    def state_dict(self) -> KeyedTable:
        """What the table exports."""
        ids, slots = self._table.export()
        return KeyedTable(ids, slots, **self._options)

    def load_state_dict(self, state: KeyedTable) -> None:
        """Has the table import what was loaded."""
        self._table.import_(state.ids, state.slots)


class TableView:
    """One look at a table: what its columns have in common, as the order of the rows, is found out once."""

    __slots__ = ("arranged", "rows", "table")

    def __init__(self, table: KeyedTable) -> None:
        self.table = table
        self.arranged: Any = None
        """`Arranged`, once it is to be saved."""
        self.rows: Any = None
        """Which rows of a checkpoint are wanted, once that is known."""


class Column:
    """One array of a table, as a leaf of a tree: the ids, a slot, or where each bucket begins."""

    __slots__ = ("array", "kind", "name", "view")
    __treeckpt_leaf__: ClassVar[bool] = True

    def __init__(self, view: TableView, kind: Literal["ids", "offsets", "slot"], array: Any, name: str = "") -> None:
        self.view, self.kind, self.array = view, kind, array
        self.name = name
        """Of a slot."""

    @property
    def shape(self) -> Any:
        """Of the array that is here; offsets, made anew for each save, have none."""
        return self.array.shape if self.kind != "offsets" else (self.view.table.spec.buckets,)

    @property
    def dtype(self) -> Any:
        """Of the array."""
        return self.array.dtype if self.kind != "offsets" else np.dtype(np.int64)


def columns_of(table: KeyedTable) -> tuple[object, ...]:
    """A table's children, in the order of their node; `...` stays what it is, of a table that was loaded in part."""
    view = TableView(table)
    ids = ... if table.ids is ... else Column(view, "ids", table.ids)
    slots = {name: a if a is ... else Column(view, "slot", a, name) for name, a in table.slots.items()}
    return ids, Column(view, "offsets", None), slots, table.scalars


def _bare(child: Any) -> Any:
    return child.array if isinstance(child, Column) else child
