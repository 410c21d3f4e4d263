"""Keyed tables: rows by 64-bit id, as dynamic embeddings have them, as containers in a tree.

A partition function maps an id to one of a fixed number of buckets; each owner of a part of the table holds a range of
buckets. Rows are saved in the order of `_core.tree.row_order`, and an array `offsets` holds the first row of each
bucket. Neither the positions of rows in the memory of the program that saves them, nor their slots in a hash table
after loading, are stored.

A `KeyedTable` is a container of its arrays: in a tree with the table at `emb` they have the paths `emb/ids`,
`emb/offsets`, `emb/slots/embedding`, ... Flattening one gives a `TableColumn` for each.

A rank knows which buckets it owns and how many rows it has, but not how many rows the others have. So in its inventory
the arrays of a table are sharded by bucket; with the `OwnedRows` of all ranks `row_starts` computes the rows.
"""

# A table holds arrays of any library.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, SupportsIndex

import msgspec
import numpy as np

from ...errors import LayoutError, MismatchError
from .row_order import (
    DEFAULT_BUCKETS,
    Keep,
    ModuloOwner,
    bucket_range,
    buckets_of,
    check_partition,
    modulo_owner,
)
from .spec import TableSpec


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

    __slots__ = ("fill", "ids", "keep", "owned", "scalars", "slots", "spec")

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
        table.owned, table.keep, table.fill = self.owned, self.keep, self.fill
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
    return table


class BoundTable:
    """A hash table of the user as a stateful object; see `KeyedTable.of`."""

    def __init__(self, table: HashTable, options: dict[str, Any]) -> None:
        self._table, self._options = table, options

    def state_dict(self) -> KeyedTable:
        """Returns the rows that the table exports."""
        ids, slots = self._table.export()
        return KeyedTable(ids, slots, **self._options)

    def load_state_dict(self, state: KeyedTable) -> None:
        """Replaces the rows of the table by loaded ones."""
        self._table.import_(state.ids, state.slots)


class TableCache:
    """What the columns of a table have in common, such as the order of the rows: computed once and cached here."""

    __slots__ = ("held", "joins", "rows", "table")

    def __init__(self, table: KeyedTable) -> None:
        self.table = table
        self.held: Any = None
        """Its rows and their order, once they are computed for a save."""
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
        """Of a slot."""

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
    return ids, TableColumn(view, "offsets", None), slots, table.scalars


def _unwrap_column(child: Any) -> Any:
    return child.array if isinstance(child, TableColumn) else child


# sharding by row ------------------------------------------------------------------------------------------------------


class OwnedRows(msgspec.Struct, frozen=True):
    """The buckets that one rank owns of a table, and its number of rows in them."""

    rank: int
    start: int
    """Its first bucket."""
    stop: int
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
