"""Reads the SQLite file of an index: an `Outline` and an `Index` whose parts are read when they are used.

Memory grows with the size of a result, not with the number of leaves. Objects may be shared between threads.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np

from treeckpt.core.analysis.outline import LeafColumns, NodeRecord, Outline, OutlineRow, words_in
from treeckpt.core.format.records import Index, Leaf, LeafRecord, specs_of
from treeckpt.core.tree.structure import Structure
from treeckpt.errors import MismatchError
from treeckpt.foreign.foreign_records import ForeignIndex
from treeckpt.runs.index_summary import Summary

from .index_table import LEAVES, NAMES, NODES, StoredLeaf

_NODES = msgspec.msgpack.Decoder(list[NodeRecord])
_BLOCK = msgspec.json.Decoder(list[StoredLeaf])
_PATHS = msgspec.json.Decoder(list[str])
# made once: the first decoding of a struct in two threads at a time can crash msgspec
_HEAD = msgspec.json.Decoder(Index)
_FOREIGN = msgspec.json.Decoder(ForeignIndex)
_STRUCTURE = msgspec.json.Decoder(Structure)
_SUMMARY = msgspec.json.Decoder(Summary)
_KEPT = 256
"""Decoded blocks that stay in memory."""
MAX_FOUND = 50_000
"""Nodes whose row stays in memory."""


class _ConnectionPool:
    """Connections to one file; each is used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._free: list[sqlite3.Connection] = []
        with self.connection():
            pass

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = self._free.pop()
        except IndexError:
            connection = sqlite3.connect(self._address, uri=True, check_same_thread=False)
            connection.execute("PRAGMA cache_size = -4096")
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._free.append(connection)

    def part(self, name: str) -> bytes:
        with self.connection() as connection:
            return connection.execute("SELECT data FROM part WHERE name = ?", (name,)).fetchone()[0]

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def __del__(self) -> None:
        self.close()


class _Entries(Sequence[Leaf]):
    """The leaves by number, decoded in blocks."""

    def __init__(self, pool: _ConnectionPool, count: int, index: Index) -> None:
        self._pool, self._count, self._specs = pool, count, index.specs
        self._block = lru_cache(_KEPT)(self._read)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Leaf: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Leaf]: ...
    def __getitem__(self, at: int | slice) -> Leaf | Sequence[Leaf]:
        if isinstance(at, slice):
            return [self[n] for n in range(self._count)[at]]
        number = range(self._count)[at]
        return self._block(number // LEAVES)[number % LEAVES]

    def _read(self, block: int) -> list[Leaf]:
        with self._pool.connection() as connection:
            row = connection.execute("SELECT paths, data FROM leaf WHERE block = ?", (block,)).fetchone()
        return self._decode(block, *row)

    def _decode(self, block: int, paths: bytes, data: bytes) -> list[Leaf]:
        found: list[Leaf] = []
        rows = zip(_PATHS.decode(paths), _BLOCK.decode(data), strict=True)
        for number, (path, (record, ranks)) in enumerate(rows, block * LEAVES):
            found.append(Leaf(number, path, record, ranks, *specs_of(record, self._specs)))
        return found

    def __iter__(self) -> Iterator[Leaf]:
        with self._pool.connection() as connection:
            for row in connection.execute("SELECT block, paths, data FROM leaf ORDER BY block"):
                yield from self._decode(*row)


class _Records(Sequence[LeafRecord]):
    """The records of the leaves."""

    def __init__(self, entries: _Entries) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, at: int) -> LeafRecord: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[LeafRecord]: ...
    def __getitem__(self, at: int | slice) -> LeafRecord | Sequence[LeafRecord]:
        found = self._entries[at]
        return found.record if isinstance(found, Leaf) else [leaf.record for leaf in found]

    def __iter__(self) -> Iterator[LeafRecord]:
        return (leaf.record for leaf in self._entries)


def _open_index(pool: _ConnectionPool) -> Index:
    """Opens the index of a file: its leaves and its structure are read when they are used."""
    kind, decoder = (_StoredForeignIndex, _FOREIGN) if pool.part("kind") == b"ForeignIndex" else (_StoredIndex, _HEAD)
    head = decoder.decode(pool.part("head"))
    entries: Any = _Entries(pool, int(pool.part("count")), head)
    fields = {name: getattr(head, name) for name in head.__struct_fields__}
    index = kind(**{**fields, "leaves": _Records(entries)})
    vars(index).update(pool=pool, entries=entries)
    return index


def _structure(index: Index) -> Structure:
    """Decodes the structure of the tree as a whole."""
    return _STRUCTURE.decode(vars(index)["pool"].part("structure"))


class _StoredIndex(Index, frozen=True, dict=True):
    structure = cached_property(_structure)  # pyright: ignore[reportAssignmentType]


class _StoredForeignIndex(ForeignIndex, frozen=True, dict=True):
    structure = cached_property(_structure)  # pyright: ignore[reportAssignmentType]


class StoredOutline(Outline):
    """The `Outline` of an index in a file.

    Raises:
        sqlite3.Error: the file was not written by `index_table`.
    """

    def __init__(self, path: Path) -> None:
        self._pool = _ConnectionPool(path)
        self.index: Index = _open_index(self._pool)
        self._found: dict[str, tuple[OutlineRow, int]] = {}
        self._block = lru_cache(_KEPT)(self._read)

    def _read(self, block: int) -> list[NodeRecord]:
        with self._pool.connection() as connection:
            [data] = connection.execute("SELECT data FROM node WHERE block = ?", (block,)).fetchone()
        return _NODES.decode(data)

    def _nodes(self, start: int, stop: int) -> list[NodeRecord]:
        """Returns the nodes with numbers from `start` to `stop`."""
        first = start - start % NODES
        blocks = [self._block(number // NODES) for number in range(first, stop, NODES)]
        return list(chain.from_iterable(blocks))[start - first : stop - first]

    def columns(self) -> LeafColumns:
        nbytes, spec = self._pool.part("nbytes"), self._pool.part("spec")
        return LeafColumns(np.frombuffer(nbytes, "<i8"), np.frombuffer(spec, "<i4"))

    def paths(self, numbers: Iterable[int]) -> Iterator[str]:
        read, paths = -1, list[str]()
        with self._pool.connection() as connection:
            for number in numbers:
                if number // LEAVES != read:
                    read = number // LEAVES
                    [data] = connection.execute("SELECT paths FROM leaf WHERE block = ?", (read,)).fetchone()
                    paths = _PATHS.decode(data)
                yield paths[number % LEAVES]

    @cached_property
    def summary(self) -> Summary:
        """What lists of checkpoints show."""
        return _SUMMARY.decode(self._pool.part("summary"))

    def _find(self, name: str) -> tuple[OutlineRow, int]:
        """Returns a node and the number of its first child."""
        if (kept := self._found.get(name)) is not None:
            return kept
        at, path, [node] = "", "", self._nodes(0, 1)
        for step in name.split(".") if name else ():
            _, _, _, child, children, *_ = node
            if not (step.isascii() and step.isdigit() and len(step) < 10) or int(step) >= children:
                raise MismatchError(name[:80], expected="the positions of a node in the tree", found="no such node")
            [node] = self._nodes(child + int(step), child + int(step) + 1)
            at, path = _joined(at, step, "."), _joined(path, node[0], "/")
        return _row(node, at, path), node[3]

    def row(self, name: str = "") -> OutlineRow:
        return self._find(name)[0]

    def children(self, name: str = "", *, start: int = 0, count: int = 100) -> list[OutlineRow]:
        node, child = self._find(name)
        start, stop = min(start, node.children), min(start + count, node.children)
        found = self._nodes(child + start, child + stop)
        above, path = node.node + "." if node.node else "", node.path + "/" if node.path else ""
        rows = [_row(one, f"{above}{at}", path + one[0]) for at, one in enumerate(found, start)]
        if len(self._found) > MAX_FOUND:
            self._found.clear()
        # after a node, its children are requested
        self._found.update((row.node, (row, one[3])) for row, one in zip(rows, found, strict=True) if row.children)
        return rows

    def node_at(self, path: str) -> OutlineRow | None:
        names: list[str] = []
        [node] = self._nodes(0, 1)
        for step in path.split("/") if path else ():
            _, _, _, child, children, *_ = node
            number = self._number_of(step, child, child + children)
            if number is None:
                return None
            names.append(str(number - child))
            [node] = self._nodes(number, number + 1)
        return self._find(".".join(names))[0]

    def _number_of(self, key: str, start: int, stop: int) -> int | None:
        """Returns the number of the node with this key among those from `start` to `stop`."""
        select = "SELECT block, data FROM node WHERE block BETWEEN ? AND ? AND instr(data, ?) ORDER BY block"
        bounds = (start // NODES, (stop - 1) // NODES, key.encode("utf-8", "surrogatepass"))
        with self._pool.connection() as connection:
            for block, data in connection.execute(select, bounds):
                for number, node in enumerate(_NODES.decode(data), block * NODES):
                    if node[0] == key and start <= number < stop:
                        return number
        return None

    def matches(self, text: str, *, start: int = 0) -> Iterator[int]:
        holds = words_in(text)
        start = min(start, len(self.index.entries))
        with self._pool.connection() as connection:
            blocks = connection.execute("SELECT block, text FROM name WHERE block >= ? ORDER BY block",
                                        (start // NAMES,))  # fmt: skip
            for block, text in blocks:
                for number, name in enumerate(text.split("\n") if holds(text) else (), block * NAMES):
                    if number >= start and holds(name):
                        yield number


def _joined(path: str, key: str, separator: str) -> str:
    return f"{path}{separator}{key}" if path else key


def _row(found: NodeRecord, node: str, path: str) -> OutlineRow:
    key, kind, cls, _, children, first, leaves, nbytes = found
    return OutlineRow(node, key, path, kind, cls, children, first, leaves, nbytes)
