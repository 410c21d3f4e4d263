"""What the golden checkpoints hold, in words of the program; the classes are named by the files, so they stay here."""

from __future__ import annotations

import collections
import datetime as dt
import enum
from typing import Any, NamedTuple

import numpy as np
import torch

import treeckpt as tc

WORLD = 2


class Color(enum.Enum):
    """A class that the golden values name."""

    RED = 1


class Pair(NamedTuple):
    """A class that the golden structure names."""

    first: Any
    second: Any


def arrays() -> dict[str, np.ndarray]:
    """The arrays, whole."""
    return {
        "rows": np.arange(10, dtype=np.float32).reshape(5, 2) - 0.5,
        "flat": np.arange(6, dtype=np.int64).reshape(2, 3) * 10**12,
        "complex": np.array([1 + 2j, -0.0 - 1j], dtype=np.complex64),
        "text": np.array(["ab", "c"], dtype="U2"),
        "empty": np.empty((0, 3), dtype=np.uint8),
        "scalar": np.array(7, dtype=np.int16),
        "time": np.array(["2026-01-02"], dtype="M8[ns]"),
    }


def values() -> dict[Any, Any]:
    """A value of every kind that files of this version know."""
    return {
        "none": None,
        "bools": [True, False],
        "ints": (0, -(1 << 63), 1 << 70),
        "floats": collections.deque([1.5, float("inf"), -0.0], maxlen=4),
        7: "seven",
        (1, "a/b"): b"\x00\xff",
        "pair": Pair(Color.RED, 1 - 2j),
        "default": collections.defaultdict(list, {"x": ["é\U0001f600"]}),
        "ordered": collections.OrderedDict([("z", {3, 1}), ("a", range(0, 9, 2))]),
        "moment": dt.datetime(2026, 10, 25, 2, 30, tzinfo=dt.UTC),
        "scalar": np.float32(0.25),
        "empty": {},
    }


RANGES = (0, 100, 131, 300, 640, 777, 1000)
"""Where the ranges of six ranks begin, of all arrays laid end to end, and the end of the last."""


def end_to_end() -> dict[str, dict[str, np.ndarray]]:
    """The arrays that are cut into ranges, whole: a model and its moments."""
    shapes = [(9, 7), (12,), (3, 4, 10), (5,), (60, 5)]
    names = [f"layers.{n}.weight" for n in range(len(shapes))]
    values = np.arange(500, dtype=np.float32) - 0.5
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    parts = [part.reshape(shape) for part, shape in zip(np.split(values, ends[:-1]), shapes, strict=True)]
    model = dict(zip(names, parts, strict=True))
    return {"model": model, "moments": {name: -part for name, part in model.items()}}


def ranges_tree(rank: int) -> dict[str, Any]:
    """What one of the six ranks holds: its range of all arrays."""
    low, high = RANGES[rank], RANGES[rank + 1]
    held: dict[str, Any] = {}
    first = 0
    for group, arrays in end_to_end().items():
        for name, array in arrays.items():
            begin, stop = max(low - first, 0), min(high - first, array.size)
            if begin < stop:
                part = array.reshape(-1)[begin:stop]
                held.setdefault(group, {})[name] = tc.Sharded(part, array.shape, begin)
            first += array.size
    return {**held, "step": 12, "own": tc.PerRank(np.arange(3) + rank)}


def tree(rank: int) -> dict[str, Any]:
    """What one of the two ranks holds."""
    whole = arrays()
    cut = (slice(0, 3), slice(3, 5))[rank]
    flat = whole["flat"].reshape(-1)
    held: dict[str, Any] = dict(whole)
    held["rows"] = tc.Sharded(whole["rows"][cut], (5, 2), (cut.start, 0))
    held["flat"] = tc.Sharded(flat[:4] if rank == 0 else flat[4:], (2, 3), 4 * rank)
    held["tie"] = held["scalar"]
    return {"arrays": held, "values": values(), "own": tc.PerRank({"seed": np.arange(3) + rank, "rank": rank})}


IDS = [-1, 0, 1 << 52, -(1 << 63), 70_001, 17, 1, 33, (1 << 63) - 1]
BUCKETS = 16


def slots() -> dict[str, np.ndarray]:
    """Of the table, in the order of its ids."""
    rows = np.arange(len(IDS))
    return {
        "embedding": (rows[:, None] + np.array([0, 0.25, 0.5])).astype(np.float32),
        "count": rows.astype(np.int64),
        "half": (rows[:, None] * np.ones(2)).astype(np.float16),
    }


def table_tree(rank: int) -> dict[str, Any]:
    """A table of which each of two ranks owns half the buckets, and an empty one."""
    start, stop = owned = tc.KeyedTable.share(rank, WORLD, BUCKETS)
    mine = np.array([start <= i % BUCKETS < stop for i in IDS])
    part = {name: slot[mine] for name, slot in slots().items()}
    options: dict[str, Any] = {"buckets": BUCKETS, "owned": owned}
    none = {"embedding": np.empty((0, 3), np.float32)}
    return {
        "table": tc.KeyedTable(np.array(IDS, np.int64)[mine], part, scalars={"step": 12}, **options),
        "empty": tc.KeyedTable(np.empty(0, np.int64), none, partition="splitmix64_mod", **options),
    }


def blob_tree(rank: int) -> dict[str, Any]:
    """Long texts and bytes, and a table whose ids each of two ranks has by their remainder."""
    mine = np.array([i % WORLD == rank for i in IDS])
    part = {name: slot[mine] for name, slot in slots().items()}
    return {
        "text": "é\udc80" * 1000,
        "bytes": bytes(range(256)) * 17,
        "buffer": bytearray(b"\0" * 4097),
        "short": "x" * 4096,
        "own": tc.PerRank(f"{rank}" * 4100),
        "table": tc.KeyedTable(np.array(IDS, np.int64)[mine], part, owned=tc.KeyedTable.modulo(rank, WORLD)),
    }


def sharing_tree(step: int) -> dict[str, Any]:
    """What is frozen, what is trained, and a step."""
    frozen = torch.nn.Parameter(torch.arange(30.0).reshape(5, 6), requires_grad=False)
    return {"adapter": torch.full((3,), float(step)), "base": frozen, "step": step}
