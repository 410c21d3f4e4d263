"""A tree for browsing: the children of one node at a time, each with the leaves and bytes of its subtree.

A node is named by the positions that lead to it from the root, such as `0.3.12`; the root has the empty name. Leaves
are in the order of the structure, so that a subtree is a range of leaf numbers and its bytes are a difference of two
cumulative sums. Only the nodes on the way to a requested one are expanded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np

from ...errors import MismatchError
from ..format.records import AliasRecord, ArrayRecord, Index, Leaf, PerRankArrays
from ..sharding.dtypes import dtype_of
from ..sharding.int_runs import length_of
from ..sharding.placements import Layout, MeshLayout, Replicate
from ..tree.recursion import Recursive, trampoline
from ..tree.structure import Node, PerRankNode, Structure, key_text, keys_of

__all__ = ["IndexOutline", "Outline", "OutlineRow", "held_nbytes", "leaf_nbytes"]


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


class _NodeChildren(msgspec.Struct, frozen=True):
    """A node's keys, and the first leaf of each child relative to the node's own first leaf."""

    keys: Sequence[object]
    starts: np.ndarray


def leaf_nbytes(leaf: Leaf) -> int:
    """Returns the stored bytes of one leaf: 0 for values and aliases."""
    if leaf.spec is None or isinstance(leaf.record, AliasRecord):
        return 0
    nbytes = math.prod(leaf.spec.shape) * dtype_of(leaf.spec.dtype).itemsize
    return nbytes * length_of(leaf.ranks or ()) if isinstance(leaf.record, PerRankArrays) else nbytes


def held_nbytes(index: Index) -> int:
    """Returns the bytes of arrays that all ranks together held: replicas count on every rank.

    For explicit pieces the index does not record which other ranks held them, so they count once.
    """
    sizes = [math.prod(spec.shape) * dtype_of(spec.dtype).itemsize for spec in index.specs]
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

    def search(self, text: str, *, start: int = 0, count: int = 100) -> tuple[list[Leaf], int | None]:
        """Finds leaves from number `start` on whose path contains every word of `text`.

        Returns:
            At most `count` leaves, and the number at which to continue, None at the end.
        """
        ...


class IndexOutline:
    """The outline of an index in memory. It caches what it computes."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._counts: dict[int, int] = {}
        self._opened: dict[int, _NodeChildren] = {}

    @cached_property
    def sizes(self) -> list[int]:
        """Stored bytes of each leaf."""
        index = self.index
        whole = [math.prod(spec.shape) * dtype_of(spec.dtype).itemsize for spec in index.specs]
        return [
            whole[record.spec] if type(record) is ArrayRecord else leaf_nbytes(index.entries[number])
            for number, record in enumerate(index.leaves)
        ]

    @cached_property
    def _sums(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    @cached_property
    def _folded(self) -> list[str]:
        return [leaf.path.casefold() for leaf in self.index.entries]

    def count(self, node: Structure) -> int:
        """Counts the leaves of a node of the structure."""
        if node is None:
            return 1
        if node.children.count(None) == len(
            node.children
        ):  # nearly all nodes hold leaves only: they take the short path
            return len(node.children)
        found = self._counts.get(id(node))
        return trampoline(self._count(node)) if found is None else found

    def _count(self, node: Node) -> Recursive[int]:
        found = self._counts.get(id(node))
        if found is None:
            found = 0
            for child in node.children:
                found += 1 if child is None else (yield self._count(child))
            self._counts[id(node)] = found
        return found

    def _open(self, node: Node, path: str) -> _NodeChildren:
        found = self._opened.get(id(node))
        if found is None:
            counts = np.fromiter(map(self.count, node.children), np.int64, len(node.children))
            found = _NodeChildren(keys_of(node, path), np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))
            self._opened[id(node)] = found
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
            nbytes=self._sums[first + leaves] - self._sums[first],
        )

    def _child(self, node: Node, row: OutlineRow, at: int) -> tuple[Structure, OutlineRow]:
        opened = self._open(node, row.path)
        key = "~rank*" if isinstance(node, PerRankNode) else key_text(opened.keys[at], row.path)
        name = f"{row.node}.{at}" if row.node else str(at)
        path = f"{row.path}/{key}" if row.node else key
        return node.children[at], self._row(node.children[at], name, key, path, row.first + int(opened.starts[at]))

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
            texts = ["~rank*"] * len(keys) if isinstance(node, PerRankNode) else [key_text(k, row.path) for k in keys]
            if step not in texts:
                return None
            node, row = self._child(node, row, texts.index(step))
        return row

    def search(self, text: str, *, start: int = 0, count: int = 100) -> tuple[list[Leaf], int | None]:
        words = text.casefold().split()
        found: list[Leaf] = []
        for number in range(start, len(self._folded)):
            if all(word in self._folded[number] for word in words):
                if len(found) == count:
                    return found, number
                found.append(self.index.entries[number])
        return found, None


def _no_node(name: str) -> MismatchError:
    return MismatchError(name[:80], expected="the positions of a node in the tree", found="no such node")
