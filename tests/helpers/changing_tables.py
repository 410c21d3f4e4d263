"""A table whose rows change between saves, and what is expected of it."""

from __future__ import annotations

from typing import Any

import numpy as np

import treeckpt as tc

Expected = dict[int, tuple[list[float], list[float]]]


class ChangingTable:
    """Rows by id, of 64-bit ids; `change` changes, deletes and adds some."""

    def __init__(self, rows: int = 6000, *, seed: int = 0, **options: Any) -> None:
        self.random = np.random.default_rng(seed)
        self.rows = {i: self._row() for i in self._ids(rows)}
        self.options = {"buckets": 16} | options
        self.touched = list[int]()

    def _ids(self, count: int) -> list[int]:
        return self.random.integers(-(1 << 63), (1 << 63) - 1, count).tolist()

    def _row(self) -> tuple[list[float], list[float]]:
        return self.random.standard_normal(3).astype(np.float32).tolist(), [float(self.random.integers(1 << 40))]

    def change(self, changed: int = 20, deleted: int = 5, added: int = 7) -> None:
        known = list(self.rows)
        for position in self.random.permutation(len(known))[: changed + deleted].tolist():
            self.touched.append(known[position])
            if changed > 0:
                self.rows[known[position]] = self._row()
                changed -= 1
            else:
                del self.rows[known[position]]
        for i in self._ids(added):
            self.rows[i] = self._row()
            self.touched.append(i)

    @property
    def expected(self) -> Expected:
        return dict(self.rows)

    def table(self, rank: int = 0, world: int = 1, *, shuffled: bool = False) -> tc.KeyedTable:
        """The part of an owner, in the order of the rows, or in another one."""
        partition, buckets = self.options.get("partition", "u64_mod"), self.options["buckets"]
        ids = np.array(list(self.rows), np.int64)
        if shuffled:
            ids = self.random.permutation(ids)
        start, stop = tc.KeyedTable.share(rank, world, buckets)
        bucket = tc.KeyedTable.buckets_of(ids, buckets, partition=partition)
        ids = ids[(bucket >= start) & (bucket < stop)]
        slots = {
            "embedding": np.array([self.rows[i][0] for i in ids.tolist()], np.float32).reshape(-1, 3),
            "count": np.array([self.rows[i][1] for i in ids.tolist()], np.float64).reshape(-1, 1),
        }
        return tc.KeyedTable(ids, slots, owned=(start, stop), scalars={"step": 7}, **self.options)


def target(rank: int = 0, world: int = 1, buckets: int = 16, partition: str = "u64_mod") -> tc.KeyedTable:
    """What an owner asks a checkpoint for."""
    slots = {"embedding": np.empty((0, 3), np.float32), "count": np.empty((0, 1))}
    owned = tc.KeyedTable.share(rank, world, buckets)
    options: dict[str, Any] = {"scalars": {"step": 0}, "buckets": buckets, "partition": partition, "owned": owned}
    return tc.KeyedTable(np.empty(0, np.int64), slots, **options)


def rows_of(table: tc.KeyedTable) -> Expected:
    """The rows of a loaded table; an id that is there twice is an error."""
    ids = np.asarray(table.ids).tolist()
    assert len(set(ids)) == len(ids)
    embedding, count = (np.asarray(table.slots[name]).tolist() for name in ("embedding", "count"))
    return dict(zip(ids, zip(embedding, count, strict=True), strict=True))
