"""Reads a checkpoint by treeckpt/_core/format/FORMAT.md alone, with json, numpy and xxhash and without treeckpt.

`read` returns the tree in dicts, lists and tuples: a container with named fields and a table become dicts, `per_rank` a
dict by rank, a value of a kind that is not in `KINDS` a `(kind, items)`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

KINDS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16), "float": float, "complex": complex, "bytes": base64.b64decode, "range": range,
    "list": lambda *items: list(items), "tuple": lambda *items: items, "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items), "dict": lambda *items: dict(zip(*[iter(items)] * 2, strict=True)),
}  # fmt: skip
UNKNOWN_TO_NUMPY = {"complex32": "V4", "bcomplex32": "V4", "float4_e2m1fn_x2": "u1"}
Box = list[Any]
"""A chunk: the rank that wrote it, its start in the rank's stream, its offset and its shape."""


def value(stored: Any) -> Any:
    if not isinstance(stored, list):
        return stored
    kind, items = stored[0], [value(item) for item in stored[1]]
    return KINDS[kind](*items) if kind in KINDS else (kind, tuple(items))


def dtype(name: str) -> np.dtype[Any]:
    for prefix, code in (("bytes", "S"), ("str", "<U"), ("void", "V")):
        if name.startswith(prefix):
            return np.dtype(code + name.removeprefix(prefix))
    return np.dtype(UNKNOWN_TO_NUMPY.get(name) or getattr(ml_dtypes, name, name))


def column(runs: list[Any]) -> list[int]:
    found: list[int] = []
    for run in runs:
        block, tail = ([run], []) if isinstance(run, int) else ([run[0]], run[1:])
        for step, count in zip(tail[::2], tail[1::2], strict=True):
            block = [number + step * n for n in range(count) for number in block]
        found += block
    return found


def open_sealed(data: bytes) -> Any:
    at = data.index(b'"seal":"', 0, 256) + 8
    found = xxhash.xxh3_64_hexdigest(data[:at] + b"0" * 16 + data[at + 16 :])
    assert found.encode() == data[at : at + 16], "the seal is broken"
    return json.loads(data[data.index(b"{") :])


def boxes_of_chunks(chunks: Any, shape: tuple[int, ...]) -> Iterator[Box]:
    kind, *columns = chunks
    if kind == "w":
        yield [*columns, (0,) * len(shape), shape]
    elif kind == "boxes":  # as `unpack` leaves them
        yield from columns[0]
    else:
        if kind == "g":
            cuts = [column(cut) for cut in columns[0]]
            corners = [itertools.product(*axes) for axes in ([c[:-1] for c in cuts], [np.diff(c) for c in cuts])]
        else:
            corners = [zip(*map(column, axes), strict=True) for axes in columns[:2]]
        yield from map(list, zip(column(columns[-2]), column(columns[-1]), *corners, strict=True))


# ranges ---------------------------------------------------------------------------------------------------------------
def boxes_of_range(shape: tuple[int, ...], low: int, high: int) -> Iterator[Any]:
    """Yields the offset and shape of each box of a range of elements."""
    row = math.prod(shape[1:])
    while low < high:
        first, begin = divmod(low, row)
        rows = 0 if begin else (high - low) // row
        if rows:
            yield (first, *[0] * (len(shape) - 1)), (rows, *shape[1:])
        else:
            part = boxes_of_range(shape[1:], begin, min(row, high - first * row))
            yield from (((first, *offset), (1, *size)) for offset, size in part)
        low = (first + max(rows, 1)) * row


def unpack(index: Any) -> Any:
    """Returns the index with a list of boxes for each array that is in `ranges`."""
    ranges = {key: column(runs) for key, runs in index["ranges"].items()}
    rest, lengths, turns, starts = map(iter, (index["leaves"], ranges["length"], ranges["turn"], ranges["start"]))
    leaves: list[Any] = [None] * (len(index["leaves"]) + len(ranges["leaf"]))
    rank = 0
    for number, spec, count, first in zip(*(ranges[key] for key in ("leaf", "spec", "count", "first")), strict=True):
        shape = tuple(index["specs"][spec]["shape"])
        size, low, found = math.prod(shape), 0, []
        for part in range(count):
            rank += next(turns) if part else first
            high = low + next(lengths) if part < count - 1 else size
            parts = [((0,) * len(shape), shape)] if count == 1 else boxes_of_range(shape, low, high)
            found += [[rank, next(starts, None), *box] for box in parts]
            low = high
        leaves[number] = ["a", spec, -1, ["boxes", found]]
    return index | {"leaves": [leaf or next(rest) for leaf in leaves]}


def order_class(nbytes: int, element: np.dtype[Any]) -> int:
    own = element.type.__module__ == "numpy"  # `kind` means nothing in ml_dtypes
    unit = {"c": element.itemsize // 2, "S": 1, "U": 4, "V": 1}.get(element.kind if own else "", element.itemsize)
    return 0 if nbytes % 4096 == 0 else 1 if nbytes % 64 == 0 else {8: 3, 4: 4, 2: 5, 1: 6}[unit]


# the whole ------------------------------------------------------------------------------------------------------------
class SecondReader:
    """One checkpoint."""

    def __init__(self, directory: Path) -> None:
        document = open_sealed((directory / "index.json").read_bytes())
        self.directory, index = directory, document["index"]
        assert (document["format"], document["version"]) == ("treeckpt", 2 if "references" in index else 1)
        self.index = index = unpack(index) if "ranges" in index else index
        self.groups = list(self._groups(index["structure"], None))
        self.files = list(
            zip(*(column(index["files"][key]) for key in ("rank", "part", "stream", "header")), strict=True)
        )
        shared = index.get("references", {})
        self.homes = [[directory.name, index["save_id"]], *shared.get("homes", [])]
        own = [[0] * len(self.files), [file[1] for file in self.files]]
        columns = [column(shared[key]) for key in ("home", "home_part")] if len(self.homes) > 1 else own
        self.places = dict(zip(self.files, zip(*columns, strict=True), strict=True))
        self.opened: dict[str, bytes] = {}
        self._place_boxes()

    def _groups(self, node: Any, ranks: list[int] | None) -> Iterator[list[int] | None]:
        """Yields for each leaf the ranks of its group, None outside of `per_rank`."""
        if node is None:
            yield ranks
        elif node[:2] == ["custom", ""]:
            yield from self._groups(self.index["shared"][node[2]], ranks)
        else:
            for n, child in enumerate(node[-1]):
                yield from self._groups(child, column(node[1][n]) if node[0] == "per_rank" else ranks)

    def _place_boxes(self) -> None:
        """Sets the starts that `ranges` do not list."""
        written: list[tuple[int, int, int, Box]] = []
        for record, ranks in zip(self.index["leaves"], self.groups, strict=True):
            if record[0] not in ("a", "pa", "px") or (record[0] == "a" and record[3][0] != "boxes"):
                continue
            spec = self.index["specs"][record[1]]
            element = dtype(spec["dtype"])
            for box in record[3][1] if record[0] == "a" else [[rank, 0, 0, spec["shape"]] for rank in ranks or ()]:
                nbytes = math.prod(box[3]) * element.itemsize
                written.append((box[0], order_class(nbytes, element), nbytes, box))
        ends: dict[int, int] = {}
        for rank, _, nbytes, box in sorted(written, key=lambda entry: entry[:2]):
            box[1] = ends.get(rank, 0) if box[1] is None else box[1]
            ends[rank] = ends.get(rank, 0) + nbytes

    def _data(self, rank: int, start: int, nbytes: int) -> bytes:
        """Returns bytes of a rank's stream, from a file whose checksums agree."""
        _, _, stream, header = file = [file for file in self.files if file[0] == rank and file[2] <= start][-1]
        home, part = self.places[file]
        number = f"{rank:05d}.{part:03d}" if part else f"{rank:05d}"
        name = f"shard-{number}-of-{self.index['world']:05d}.{self.homes[home][1]}.safetensors"
        if name not in self.opened:
            data = self.opened[name] = (self.directory.parent / self.homes[home][0] / name).read_bytes()
            facts = open_sealed(data[:header])["__metadata__"]
            hashes, block = np.frombuffer(base64.b64decode(facts["hashes"]), "<u8"), int(facts["block"])
            blocks = [data[at : at + block] for at in range(header, len(data), block)]
            assert hashes.tolist() == [xxhash.xxh3_64_intdigest(one) for one in blocks], f"{name} is damaged"
        return self.opened[name][header + start - stream :][:nbytes]

    def leaf(self, number: int, rank: int | None) -> Any:
        kind, *facts = self.index["leaves"][number]
        own = (self.groups[number] or [rank]).index(rank)
        if kind in ("v", "pv"):
            return value(facts[0] if kind == "v" else facts[0][own])
        spec = self.index["specs"][facts[0]]
        shape, element = tuple(spec["shape"]), dtype(spec["dtype"])
        if kind == "t":
            base = self.leaf(facts[1], rank)
            offset, strides = facts[2] or (0, [n // base.itemsize for n in base.strides])
            steps = [step * base.itemsize for step in strides]
            return np.lib.stride_tricks.as_strided(base.reshape(-1)[offset:], shape, steps)
        array = np.empty(shape, element)
        chunks = facts[2] if kind in ("a", "x") else ["w", rank, column(facts[1])[own]]
        for writer, start, offset, size in boxes_of_chunks(chunks, shape):
            region = tuple(slice(low, low + n) for low, n in zip(offset, size, strict=True))
            data = self._data(writer, start, math.prod(size) * element.itemsize)
            array[region] = np.frombuffer(data, element).reshape(size)
        if kind in ("x", "px"):
            return array.tobytes().decode("utf-8", "surrogatepass") if spec["kind"] == "str" else array.tobytes()
        return array

    def tree(self) -> Any:
        return self._tree(self.index["structure"], None, itertools.count())

    def _tree(self, node: Any, rank: int | None, numbers: Iterator[int]) -> Any:
        if node is None:
            return self.leaf(next(numbers), rank)
        kind, *facts, children = node
        if kind == "custom" and not facts[0]:
            return self._tree(self.index["shared"][facts[1]], rank, numbers)
        if kind == "per_rank":
            found: dict[int, Any] = {}
            for ranks, child in zip(facts[0], children, strict=True):
                mine = [next(numbers) for _ in self._groups(child, None)]
                found |= {one: self._tree(child, one, iter(mine)) for one in column(ranks)}
            return found
        items = [self._tree(child, rank, numbers) for child in children]
        if kind in ("list", "tuple", "deque"):
            return tuple(items) if kind == "tuple" else items
        if kind == "table":
            table = dict(zip(["ids", "offsets", "slots", "scalars"], items, strict=False))
            return _with_deltas(table, items[4]) if len(items) > 4 else table
        return dict(zip(map(value, facts[-1]), items, strict=True))


def _with_deltas(table: Any, deltas: Any) -> Any:
    """A table whose rows are those that count, in no order; its offsets are left out."""
    rows = {i: (table, n) for n, i in enumerate(table["ids"].tolist())}
    for delta in deltas:
        for i in delta["deleted"]["ids"].tolist():
            del rows[i]
        rows.update((i, (delta["rows"], n)) for n, i in enumerate(delta["rows"]["ids"].tolist()))
    slots = {name: np.stack([own["slots"][name][n] for own, n in rows.values()]) for name in table["slots"]}
    return {"ids": np.array([*rows], np.int64), "slots": slots, "scalars": table["scalars"]}


def read(directory: Path) -> Any:
    return SecondReader(directory).tree()
