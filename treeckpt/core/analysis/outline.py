"""A tree for browsing: the children of one node at a time, each with the leaves and bytes of its subtree.

A node of an `Outline` is named by the positions that lead to it from the root, such as `0.3.12`; the root has the empty
name. Leaves are in the order of the structure, so that a subtree is a range of leaf numbers and its bytes are a
difference of two cumulative sums. Only the nodes on the way to a requested one are expanded.

`node_records` lists all nodes as one table, for readers that keep it on disk. There nodes are numbered breadth first
from the root, 0, so that the children of a node are adjacent.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from ...errors import FormatError, MismatchError
from ..format.records import ArrayRecord, Index, Leaf, PerRankArrays, PerRankValues, ValueRecord
from ..sharding.int_runs import length_of
from ..sharding.placements import Layout, MeshLayout, Replicate
from ..tree.structure import KeyTextCache, Node, Structure, containers_of

MAX_NBYTES = 1 << 63
"""Bytes of all leaves of a table are below this, because they are stored as a signed integer of 64 bits."""

NodeRecord = tuple[str, str, str, int, int, int, int, int]
"""(key, kind, class, number of the first child, children, number of the first leaf, leaves, stored bytes), see
`OutlineRow`."""


class OutlineRow(msgspec.Struct, frozen=True):
    """One node of a tree."""

    node: str
    """Positions from the root."""
    key: str
    """The last key of its path."""
    path: str
    kind: str
    """The kind of container, or "leaf"."""
    cls: str
    """The class of a namedtuple, dataclass or registered node, else empty."""
    children: int
    first: int
    """Number of its first leaf; its own for a leaf."""
    leaves: int
    nbytes: int
    """Stored bytes of the subtree's arrays; shared storage counts where it was written."""


class LeafColumns(NamedTuple):
    """Of each leaf, by its number."""

    nbytes: np.ndarray
    """Stored bytes, int64."""
    spec: np.ndarray
    """Number of its spec in the index, int32; -1 for a leaf that is no array."""


class _NodeChildren(msgspec.Struct, frozen=True):
    """A node's keys as text, and the first leaf of each child relative to the node's own first leaf."""

    keys: list[str]
    starts: list[int]


def held_nbytes(index: Index) -> int:
    """Returns the bytes of arrays that all ranks together held: replicas count on every rank.

    For explicit pieces the index does not record which other ranks held them, so they count once.
    """
    sizes = [spec.nbytes for spec in index.specs]
    copies = [_copies(layout) for layout in index.layouts]
    total = 0
    for record in index.leaves:
        if isinstance(record, ArrayRecord):
            total += sizes[record.spec] * (copies[record.layout] if record.layout >= 0 else 1)
        elif isinstance(record, PerRankArrays):
            total += sizes[record.spec] * length_of(record.start)
    return total


def _copies(layout: Layout) -> int:
    """Returns the number of replicas of each region."""
    if not isinstance(layout, MeshLayout):
        return 1
    pairs = zip(layout.mesh.shape, layout.placements, strict=False)
    return math.prod(size for size, placement in pairs if isinstance(placement, Replicate))


class Outline(Protocol):
    """The browsable tree of an index, in memory or in a file; threads may share it."""

    index: Index

    def row(self, name: str = "") -> OutlineRow:
        """Returns one node.

        Raises:
            MismatchError: there is no such node.
        """
        ...

    def children(self, name: str = "", *, start: int = 0, count: int = 100) -> list[OutlineRow]:
        """Returns the node's children from position `start` on, at most `count`.

        Raises:
            MismatchError: there is no such node.
        """
        ...

    def node_at(self, path: str) -> OutlineRow | None:
        """Returns the node with this path, None if there is none."""
        ...

    def columns(self) -> LeafColumns:
        """Returns bytes and spec of every leaf."""
        ...

    def paths(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yields the paths of leaves; quick where the numbers rise."""
        ...

    def search(self, text: str, *, start: int = 0, count: int = 100) -> tuple[list[Leaf], int | None]:
        """Finds leaves from number `start` on whose path contains every word of `text`.

        Returns:
            At most `count` leaves, and the number at which to continue, None at the end.
        """
        found: list[Leaf] = []
        for number in self.matches(text, start=start):
            if len(found) == count:
                return found, number
            found.append(self.index.entries[number])
        return found, None

    def matches(self, text: str, *, start: int = 0) -> Iterator[int]:
        """Yields the numbers of such leaves."""
        ...


class IndexOutline(Outline):
    """The outline of an index in memory. It caches what it computes."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._texts = KeyTextCache()
        self._opened: dict[int, _NodeChildren] = {}

    @cached_property
    def sizes(self) -> list[int]:
        """Stored bytes of each leaf."""
        index = self.index
        whole = [spec.nbytes for spec in index.specs]
        return [
            whole[record.spec] if isinstance(record, ArrayRecord) else index.entries[number].nbytes
            for number, record in enumerate(index.leaves)
        ]

    def columns(self) -> LeafColumns:
        values = ValueRecord, PerRankValues
        specs = [-1 if isinstance(record, values) else record.spec for record in self.index.leaves]
        return LeafColumns(np.array(self.sizes, np.int64), np.array(specs, np.int32))

    def paths(self, numbers: Iterable[int]) -> Iterator[str]:
        return (self.index.entries[number].path for number in numbers)

    @cached_property
    def sums(self) -> list[int]:
        """Stored bytes of all leaves before each one, then of all."""
        return [0, *accumulate(self.sizes)]

    @cached_property
    def _counts(self) -> dict[int, int]:
        """The leaves below each container, by its id."""
        counts: dict[int, int] = {}
        for node in reversed([node for node, *_ in containers_of(self.index.structure)]):
            inner = [counts[id(child)] for child in node.children if child is not None]
            counts[id(node)] = len(node.children) - len(inner) + sum(inner)
        return counts

    @cached_property
    def _folded(self) -> list[str]:
        return [leaf.path.casefold() for leaf in self.index.entries]

    def count(self, node: Structure) -> int:
        """Counts the leaves of a node of the structure."""
        return 1 if node is None else self._counts[id(node)]

    def _open(self, node: Node, path: str) -> _NodeChildren:
        found = self._opened.get(id(node))
        if found is None:
            starts = [0, *accumulate(map(self.count, node.children))]
            found = self._opened[id(node)] = _NodeChildren(self._texts.of(node, path), starts)
        return found

    def _row(self, node: Structure, name: str, key: str, path: str, first: int) -> OutlineRow:
        leaves = self.count(node)
        return OutlineRow(
            node=name,
            key=key,
            path=path,
            kind="leaf" if node is None else str(node.__struct_config__.tag),
            cls=getattr(node, "cls", ""),
            children=0 if node is None else len(node.children),
            first=first,
            leaves=leaves,
            nbytes=self.sums[first + leaves] - self.sums[first],
        )

    def _child(self, node: Node, row: OutlineRow, at: int) -> tuple[Structure, OutlineRow]:
        opened = self._open(node, row.path)
        key = opened.keys[at]
        name = f"{row.node}.{at}" if row.node else str(at)
        path = f"{row.path}/{key}" if row.node else key
        return node.children[at], self._row(node.children[at], name, key, path, row.first + opened.starts[at])

    def _find(self, name: str) -> tuple[Structure, OutlineRow]:
        node, row = self.index.structure, self._row(self.index.structure, "", "", "", 0)
        for step in name.split(".") if name else ():
            if node is None or not (step.isascii() and step.isdigit() and len(step) < 10):
                raise _no_node(name)
            if int(step) >= len(node.children):
                raise _no_node(name)
            node, row = self._child(node, row, int(step))
        return node, row

    def row(self, name: str = "") -> OutlineRow:
        return self._find(name)[1]

    def children(self, name: str = "", *, start: int = 0, count: int = 100) -> list[OutlineRow]:
        node, row = self._find(name)
        if node is None:
            return []
        return [self._child(node, row, at)[1] for at in range(start, min(start + count, len(node.children)))]

    def node_at(self, path: str) -> OutlineRow | None:
        node, row = self._find("")
        for step in path.split("/") if path else ():
            if node is None:
                return None
            keys = self._open(node, row.path).keys
            if step not in keys:
                return None
            node, row = self._child(node, row, keys.index(step))
        return row

    def matches(self, text: str, *, start: int = 0) -> Iterator[int]:
        holds = words_in(text)
        return (number for number in range(start, len(self._folded)) if holds(self._folded[number]))


def words_in(text: str) -> Callable[[str], bool]:
    """Returns a test of a casefolded path: whether it contains every word of `text`.

    A `/` and a `~` of a word also stand for those in a key, which a path has as `~1` and `~0`.
    """
    words = sorted(text.casefold().split(), key=len, reverse=True)
    plain = [word for word in words if "/" not in word and "~" not in word]
    spellings = [re.escape(word).replace("\\~", "\\~0?").replace("/", "(?:/|\\~1)") for word in words]
    patterns = [re.compile(one) for one, word in zip(spellings, words, strict=True) if word not in plain]
    return lambda path: all(word in path for word in plain) and all(pattern.search(path) for pattern in patterns)


def _no_node(name: str) -> MismatchError:
    return MismatchError(name[:80], expected="the positions of a node in the tree", found="no such node")


def node_records(outline: IndexOutline) -> Iterator[NodeRecord]:
    """Yields every node in the order of its number.

    Raises:
        FormatError: the bytes of all leaves are more than fit 64 bits.
    """
    index, sizes, sums = outline.index, outline.sizes, outline.sums
    if sums[-1] >= MAX_NBYTES:
        raise FormatError("", expected="fewer than 2**63 bytes in all", found=f"{sums[-1]}")
    waiting: deque[tuple[Node, str, int]] = deque()
    following = 1
    texts, kinds = KeyTextCache(), dict[type, str]()

    def row(node: Node, key: str, path: str, first: int) -> NodeRecord:
        nonlocal following
        child, children, leaves = following, len(node.children), outline.count(node)
        following += children
        waiting.append((node, path, first))
        kind = kinds.get(type(node)) or kinds.setdefault(type(node), str(node.__struct_config__.tag))
        cls = "" if kind == "dict" else getattr(node, "cls", "")
        return key, kind, cls, child, children, first, leaves, sums[first + leaves] - sums[first]

    if index.structure is None:
        yield "", "leaf", "", 0, 0, 0, 1, sizes[0]
        return
    yield row(index.structure, "", "", 0)
    while waiting:
        node, path, first = waiting.popleft()
        children = node.children
        steps = texts.of(node, path)
        if children.count(None) == len(children):  # nearly all nodes hold leaves only: they take the short path
            yield from [(step, "leaf", "", 0, 0, at, 1, sizes[at]) for at, step in enumerate(steps, first)]
            continue
        prefix = path + "/" if path else ""
        for text, child in zip(steps, children, strict=True):
            if child is None:
                yield text, "leaf", "", 0, 0, first, 1, sizes[first]
                first += 1
            else:
                found = row(child, text, prefix + text, first)
                first += found[6]
                yield found
