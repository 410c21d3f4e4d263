"""Changes of a file's bytes, and trees of every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import treeckpt as tc
from tests.helpers.world import small_tree


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def zero(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]


def swap(data: bytes, at: int) -> bytes:
    """Two neighbouring stretches change places."""
    return data[:at] + data[at + 16 : at + 32] + data[at : at + 16] + data[at + 32 :]


def truncate(data: bytes, at: int) -> bytes:
    return data[:at]


def extend(data: bytes, at: int) -> bytes:
    return data + data[: at + 1]


def insert(data: bytes, at: int) -> bytes:
    return data[:at] + b" " + data[at:]


def drop(data: bytes, at: int) -> bytes:
    return data[:at] + data[at + 1 :] + b"\0"


CHANGES: list[Callable[[bytes, int], bytes]] = [flip, zero, swap, truncate, extend, insert, drop]


def sharded_tree(rank: int, world: int) -> dict[str, Any]:
    """Rows, columns, boxes, flat ranges, uneven and overlapping pieces, empty arrays, ties."""
    rows = np.arange(70.0).reshape(10, 7)
    low, high = 10 * rank // world, 10 * (rank + 1) // world
    left, right = 7 * rank // world, 7 * (rank + 1) // world
    first, last = 70 * rank // world, 70 * (rank + 1) // world
    part = rows[low:high].copy()
    return {
        "rows": tc.Sharded(part, (10, 7), (low, 0)),
        "columns": tc.Sharded(rows[:, left:right].copy(), (10, 7), (0, left)),
        "flat": tc.Sharded(rows.reshape(-1)[first:last].copy(), (10, 7), first),
        "overlapping": tc.Sharded(rows[: 10 if rank == world - 1 else 6].copy(), (10, 7), (0, 0)),
        "stages": {f"layer{rank}": np.full(5, rank, np.int16)},
        "empty": tc.Sharded(np.empty((0, 3)), (0, 3), (0, 0)),
    }


TREES: dict[str, Callable[[int, int], Any]] = {
    "small": small_tree,
    "sharded": sharded_tree,
    "per rank": lambda rank, world: [tc.PerRank({"n": rank, "w": np.full(3 + rank, rank)}), {"b": tc.PerRank(rank)}],
    "values": lambda rank, world: {"a": [1, 2.5, None, (b"x", {})], "b": float("nan")},
    "one leaf": lambda rank, world: np.arange(10),
    "nothing": lambda rank, world: {},
    "only empty": lambda rank, world: [np.empty((0, 3)), np.empty(0, np.int8)],
    "big replica": lambda rank, world: {"w": np.arange(1 << 20), "v": np.arange(300_000, dtype=np.int16)},
}
