"""Keyed tables: rows by 64-bit id, as dynamic embeddings have them. What of one is in a tree?

A partition function maps an id to one of so many buckets; each owner of a part of the table holds a range of them.
Rows are saved in the order of `core.tree.row_order`, and an array `offsets` says with which row each bucket begins.
Where the rows lie in the memory of the program that saves them, and in which slots of a hash table they end up after
loading, is never stored.

A `KeyedTable` is a container of its arrays: in a tree with the table at `emb` they have the paths `emb/ids`,
`emb/offsets`, `emb/slots/embedding`, ... Flattening one gives a `Column` for each.
"""

# A table holds arrays of any library.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from ...errors import LayoutError
from .row_order import BUCKETS, Keep, check_partition, share_of
from .spec import TableSpec

__all__ = ["BoundTable", "Column", "HashTable", "KeyedTable", "TableView", "columns_of", "restored"]


class HashTable(Protocol):
    """What `KeyedTable.of` needs of a hash table: a module of its own kind, an extension's class, a dict."""

    def export(self) -> tuple[Any, Mapping[str, Any]]:
        """All rows: ids int64[N], and slots by name, [N, *row], in the same order."""
        ...

    def import_(self, ids: Any, slots: Mapping[str, Any]) -> None:
        """Replaces all rows by these."""
        ...


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

    __slots__ = ("held", "joins", "rows", "table")

    def __init__(self, table: KeyedTable) -> None:
        self.table = table
        self.held: Any = None
        """Its rows and their order, once it is to be saved."""
        self.rows: Any = None
        """Which rows of a checkpoint are wanted, once that is known."""
        self.joins: dict[Any, Any] = {}
        """Where the rows of slots go that were saved with other ids, by where these come from."""


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
