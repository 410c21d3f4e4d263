"""An index that stays in its SQLite file: an `Outline` and an `Index` that are read row by row.

What a page asks is read when it is asked; nothing grows with the number of leaves but the answers. Safe to share
between threads.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, overload

import msgspec

from treeckpt.core.analysis.node_table import NodeRecord
from treeckpt.core.analysis.outline import OutlineRow
from treeckpt.core.format.records import Index, Leaf, LeafRecord, PerRankValues, ValueRecord
from treeckpt.core.tree.nesting import SplitStructure
from treeckpt.core.tree.structure import Structure
from treeckpt.errors import MismatchError
from treeckpt.runs.catalog import Summary

from .tables import LEAVES, NAMES, NODES, StoredLeaf

__all__ = ["StoredIndex", "StoredOutline"]

_NODES = msgspec.msgpack.Decoder(list[NodeRecord])
_BLOCK = msgspec.json.Decoder(list[StoredLeaf])
_KEPT = 256
"""Blocks of decoded leaves that are kept."""
FOUND = 50_000
"""Nodes whose place is remembered."""


class _Reader:
    """Connections to one file, lent to one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._free: list[sqlite3.Connection] = []
        with self.lent():
            pass

    @contextlib.contextmanager
    def lent(self) -> Iterator[sqlite3.Connection]:
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
        with self.lent() as connection:
            return connection.execute("SELECT data FROM part WHERE name = ?", (name,)).fetchone()[0]

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def __del__(self) -> None:
        self.close()


class _Entries(Sequence[Leaf]):
    """Leaves by number, decoded in blocks."""

    def __init__(self, reader: _Reader, count: int, index: Index) -> None:
        self._reader, self._count, self._specs = reader, count, index.specs
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
        with self._reader.lent() as connection:
            [data] = connection.execute("SELECT data FROM leaf WHERE block = ?", (block,)).fetchone()
        return self._decode(block, data)

    def _decode(self, block: int, data: bytes) -> list[Leaf]:
        found: list[Leaf] = []
        for number, (path, record, ranks) in enumerate(_BLOCK.decode(data), block * LEAVES):
            spec = None if isinstance(record, (ValueRecord, PerRankValues)) else self._specs[record.spec]
            found.append(Leaf(number, path, record, ranks, spec))
        return found

    def __iter__(self) -> Iterator[Leaf]:
        with self._reader.lent() as connection:
            for block, data in connection.execute("SELECT block, data FROM leaf ORDER BY block"):
                yield from self._decode(block, data)


class _Records(Sequence[LeafRecord]):
    """The records alone."""

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


class StoredIndex(Index, frozen=True, dict=True):
    """An index whose leaves and structure are read when they are asked for."""

    @classmethod
    def open(cls, reader: _Reader) -> StoredIndex:
        """The index of a file."""
        head = msgspec.json.decode(reader.part("head"), type=Index)
        entries: Any = _Entries(reader, int(reader.part("count")), head)
        fields = {name: getattr(head, name) for name in head.__struct_fields__}
        index = cls(**{**fields, "leaves": _Records(entries)})
        vars(index).update(reader=reader, entries=entries)
        return index

    @cached_property
    def structure(self) -> Structure:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tree's structure, decoded as a whole."""
        return msgspec.json.decode(vars(self)["reader"].part("structure"), type=SplitStructure).whole()


class StoredOutline:
    """The browsable tree of an index in a file; answers as `core.analysis.outline.Outline` does.

    Raises:
        sqlite3.Error: the file is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self._reader = _Reader(path)
        self.index: Index = StoredIndex.open(self._reader)
        self._found: dict[str, tuple[OutlineRow, int]] = {}
        self._block = lru_cache(_KEPT)(self._read)

    def _read(self, block: int) -> list[NodeRecord]:
        with self._reader.lent() as connection:
            [data] = connection.execute("SELECT data FROM node WHERE block = ?", (block,)).fetchone()
        return _NODES.decode(data)

    def _nodes(self, start: int, stop: int) -> list[NodeRecord]:
        """The nodes with these numbers."""
        first = start - start % NODES
        blocks = [self._block(number // NODES) for number in range(first, stop, NODES)]
        return list(chain.from_iterable(blocks))[start - first : stop - first]

    @cached_property
    def summary(self) -> Summary:
        """What a list of checkpoints shows."""
        return msgspec.json.decode(self._reader.part("summary"), type=Summary)

    def _find(self, name: str) -> tuple[OutlineRow, int]:
        """A node and the number of its first child."""
        if (kept := self._found.get(name)) is not None:
            return kept
        at, path, [node] = "", "", self._nodes(0, 1)
        for step in name.split(".") if name else ():
            _, _, _, child, children, *_ = node
            if not (step.isascii() and step.isdigit() and len(step) < 10) or int(step) >= children:
                raise _no_node(name)
            [node] = self._nodes(child + int(step), child + int(step) + 1)
            at, path = _below(at, step, "."), _below(path, node[0], "/")
        return _row(node, at, path), node[3]

    def row(self, name: str = "") -> OutlineRow:
        """One node.

        Raises:
            MismatchError: there is no such node.
        """
        return self._find(name)[0]

    def children(self, name: str = "", *, start: int = 0, count: int = 100) -> list[OutlineRow]:
        """The node's children, from position `start` on, at most `count`.

        Raises:
            MismatchError: there is no such node.
        """
        node, child = self._find(name)
        start, stop = min(start, node.children), min(start + count, node.children)
        found = self._nodes(child + start, child + stop)
        above, path = node.node + "." if node.node else "", node.path + "/" if node.path else ""
        rows = [_row(one, f"{above}{at}", path + one[0]) for at, one in enumerate(found, start)]
        if len(self._found) > FOUND:
            self._found.clear()
        # who asks for a node asks for its children next
        self._found.update((row.node, (row, one[3])) for row, one in zip(rows, found, strict=True) if row.children)
        return rows

    def node_at(self, path: str) -> OutlineRow | None:
        """The node with this path, None if there is none."""
        names: list[str] = []
        [node] = self._nodes(0, 1)
        for step in path.split("/") if path else ():
            _, _, _, child, children, *_ = node
            number = self._numbered(step, child, child + children)
            if number is None:
                return None
            names.append(str(number - child))
            [node] = self._nodes(number, number + 1)
        return self._find(".".join(names))[0]

    def _numbered(self, key: str, start: int, stop: int) -> int | None:
        """The number of the node of this key among some."""
        select = "SELECT block, data FROM node WHERE block BETWEEN ? AND ? AND instr(data, ?) ORDER BY block"
        asked = (start // NODES, (stop - 1) // NODES, key.encode("utf-8", "surrogatepass"))
        with self._reader.lent() as connection:
            for block, data in connection.execute(select, asked):
                for number, node in enumerate(_NODES.decode(data), block * NODES):
                    if node[0] == key and start <= number < stop:
                        return number
        return None

    def search(self, text: str, *, start: int = 0, count: int = 100) -> tuple[list[Leaf], int | None]:
        """Leaves from number `start` on whose path holds every word of `text`, and where to go on, None at the end."""
        words = sorted(text.casefold().split(), key=len, reverse=True)
        found: list[Leaf] = []
        for number in self._matches(words, start):
            if len(found) == count:
                return found, number
            found.append(self.index.entries[number])
        return found, None

    def _matches(self, words: Sequence[str], start: int) -> Iterator[int]:
        start = min(start, len(self.index.entries))
        with self._reader.lent() as connection:
            blocks = connection.execute("SELECT block, text FROM name WHERE block >= ? ORDER BY block",
                                        (start // NAMES,))  # fmt: skip
            for block, text in blocks:
                if not all(word in text for word in words):
                    continue
                for number, name in enumerate(text.split("\n"), block * NAMES):
                    if number >= start and all(word in name for word in words):
                        yield number


def _below(path: str, key: str, separator: str) -> str:
    return f"{path}{separator}{key}" if path else key


def _row(found: NodeRecord, node: str, path: str) -> OutlineRow:
    key, kind, cls, _, children, first, leaves, nbytes = found
    return OutlineRow(node, key, path, kind, cls, children, first, leaves, nbytes)


def _no_node(name: str) -> MismatchError:
    return MismatchError(name[:80], expected="the positions of a node in the tree", found="no such node")
