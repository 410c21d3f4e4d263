"""A tree for browsing: the children of one node at a time, each with the leaves and bytes of its subtree.

A node of an `Outline` is named by the positions that lead to it from the root, such as `0.3.12`; the root has the empty
name. Nodes are numbered breadth first from the root, 0, so that the children of a node are adjacent. Leaves are in the
order of the structure, so that a subtree is a range of leaf numbers and its bytes are a difference of two cumulative
sums. All of it is in columns of numbers and two runs of text, in memory or mapped from a file: a page of a tree of a
million leaves takes 0.1 ms, a search of all paths 50 ms, and to make the columns one second.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from typing import NamedTuple

import msgspec
import numpy as np

from .._core.format.byte_map import ChunkColumns, chunk_columns
from .._core.format.records import ArrayRecord, Index, Leaf, PerRankValues, ValueRecord
from .._core.tree.structure import KeyTextCache, Node
from ..errors import FormatError, MismatchError

MAX_NBYTES = 1 << 63
"""Bytes of all leaves are below this, because they are stored as a signed integer of 64 bits."""
MAX_CHUNKS = 4_000_000
"""With more chunks than this, ranks and files are shown without leaves."""
ROWS_AT_ONCE = 1000
"""Rows that are in memory at once, where many are made one after the other."""
SEARCHED_AT_ONCE = 8192
"""Paths that a search tests at once, before it tests each of them."""
LEAF = ("leaf", "")
"""The kind and the class of a leaf; see `OutlineColumns.forms`."""


class OutlineRow(msgspec.Struct, frozen=True):
    """One node of a tree."""

    number: int
    """The place of the node among all, breadth first from the root, which has 0."""
    node: str
    """The positions that lead to it from the root."""
    key: str
    """The last key of its path."""
    path: str
    kind: str
    """The kind of container, or "leaf"."""
    cls: str
    """The class of a namedtuple, dataclass or registered node, else empty."""
    children: int
    first: int
    """The number of the first leaf of its subtree; for a leaf, its own."""
    leaves: int
    nbytes: int
    """Stored bytes of the subtree's arrays; shared storage counts where it was written."""


class LeafColumns(NamedTuple):
    """Of each leaf, by its number."""

    nbytes: np.ndarray
    """Stored bytes, int64."""
    spec: np.ndarray
    """Number of its spec in the index, int32; -1 for a leaf that is no array."""


class PartColumns(NamedTuple):
    """The parts of a training state, see `state_part`."""

    names: Sequence[str] | Texts
    part: np.ndarray
    """Of each leaf the number of its part, int32."""


class OutlineColumns(NamedTuple):
    """The nodes and leaves of a tree, by number. Texts are UTF-8 with a line feed after each but the last."""

    forms: Sequence[tuple[str, str]]
    """The kind and the class that nodes have; the first is LEAF."""
    form: np.ndarray
    """Of each node, the number of its form, int32."""
    child: np.ndarray
    """Of each node, the number of its first child, int64; its children end where those of the next node begin."""
    first: np.ndarray
    """Of each node, the number of its first leaf, int64."""
    leaves: np.ndarray
    """Of each node, the leaves of its subtree, int64."""
    keys: bytes | memoryview
    key_ends: np.ndarray
    """Where the key of each node ends, int64."""
    sums: np.ndarray
    """Stored bytes of all leaves before each one, then of all, int64."""
    spec: np.ndarray
    """Of each leaf, the number of its spec in the index, int32; -1 for a leaf that is no array."""
    paths: bytes | memoryview
    path_ends: np.ndarray
    """Where the path of each leaf ends, int64."""


class Texts:
    """Texts as a run of UTF-8, see `OutlineColumns`."""

    def __init__(self, data: bytes | memoryview, ends: np.ndarray) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        """Returns one text."""
        return self.run(number, number + 1)

    def __iter__(self) -> Iterator[str]:
        return self.pick(range(len(self)))

    def run(self, start: int, stop: int) -> str:
        """Returns the texts from `start` to `stop` as one, with a line feed between them."""
        low, high = self._ends[start - 1] + 1 if start else 0, self._ends[stop - 1] if stop > start else 0
        return str(self._data[low:high], "utf-8", "surrogatepass")

    def lines(self, start: int, stop: int, text: str | None = None) -> list[str]:
        """Returns the same as a list.

        Args:
            text: the run, case-folded, where the texts are to be so.
        """
        lines = (self.run(start, stop) if text is None else text).split("\n")
        if len(lines) == stop - start:
            return lines
        picked = self.pick(range(start, stop))  # one of them has a line feed of its own, or there is none
        return list(picked) if text is None else [one.casefold() for one in picked]

    def pick(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yields texts by number."""
        at = np.fromiter(numbers, np.int64)
        starts = np.where(at > 0, self._ends[at - 1] + 1, 0).tolist()
        for low, high in zip(starts, self._ends[at].tolist(), strict=True):
            yield str(self._data[low:high], "utf-8", "surrogatepass")


class Outline:
    """The browsable tree of an index; threads may share it."""

    def __init__(self, index: Index, columns: OutlineColumns) -> None:
        self.index = index
        self._columns = columns
        self._keys = Texts(columns.keys, columns.key_ends)
        self._paths = Texts(columns.paths, columns.path_ends)

    @classmethod
    def of(cls, index: Index) -> Outline:
        """Makes the outline of an index in memory.

        Raises:
            FormatError: the bytes of all leaves are more than fit 64 bits.
        """
        return cls(index, outline_columns(index))

    def columns(self) -> LeafColumns:
        """Returns bytes and spec of every leaf."""
        return LeafColumns(np.diff(self._columns.sums), self._columns.spec)

    def chunks(self) -> ChunkColumns | None:
        """Returns the chunks of all leaves; None if there are more than MAX_CHUNKS."""
        return chunk_columns(self.index, MAX_CHUNKS)

    def parts(self) -> PartColumns:
        """Returns the part of the state that each leaf belongs to."""
        return part_columns(path for path, _ in self.index.paths)

    def paths(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yields the paths of leaves."""
        return self._paths.pick(numbers)

    def row(self, name: str = "") -> OutlineRow:
        """Returns one node.

        Raises:
            MismatchError: there is no such node.
        """
        return self.way(name)[-1]

    def way(self, name: str) -> list[OutlineRow]:
        """Returns the nodes from the root to a node.

        Raises:
            MismatchError: there is no such node.
        """
        rows = self._rows(None, 0, 1)
        for step in name.split(".") if name else ():
            # No node has children of ten digits, and `int` raises another error for very long texts.
            position = int(step) if step.isascii() and step.isdigit() and len(step) < 10 else rows[-1].children
            if position >= rows[-1].children:
                raise MismatchError(name[:80], expected="the positions of a node in the tree", found="no such node")
            rows += self._rows(rows[-1], position, position + 1)
        return rows

    def way_to_leaf(self, number: int) -> list[OutlineRow]:
        """Returns the nodes from the root to a leaf."""
        rows = self._rows(None, 0, 1)
        while (above := rows[-1]).children:
            low = int(self._columns.child[above.number])
            position = int(np.searchsorted(self._columns.first[low : low + above.children], number, side="right")) - 1
            rows += self._rows(above, position, position + 1)
        return rows

    def children(self, node: str | OutlineRow = "", *, start: int = 0, count: int = 100) -> list[OutlineRow]:
        """Returns the children of a node, given by name or as a row, from position `start` on, at most `count`.

        Raises:
            MismatchError: there is no such node.
        """
        above = self.row(node) if isinstance(node, str) else node
        return self._rows(above, min(start, above.children), min(start + count, above.children))

    def child_nbytes(self, above: OutlineRow, count: int) -> np.ndarray:
        """Returns the bytes of the first `count` children of a node."""
        low = int(self._columns.child[above.number])
        return self._nbytes(slice(low, low + min(count, above.children)))

    def children_at(self, above: OutlineRow, positions: np.ndarray) -> Iterator[OutlineRow]:
        """Yields children of a node by position."""
        low = int(self._columns.child[above.number])
        for start in range(0, len(positions), ROWS_AT_ONCE):
            some = positions[start : start + ROWS_AT_ONCE]
            yield from self._rows_of(above, some.tolist(), low + some, self._keys.pick(low + some))

    def _nbytes(self, part: slice | np.ndarray) -> np.ndarray:
        """Returns the bytes of nodes."""
        first = self._columns.first[part]
        return self._columns.sums[first + self._columns.leaves[part]] - self._columns.sums[first]

    def _rows(self, above: OutlineRow | None, start: int, stop: int) -> list[OutlineRow]:
        """Returns children of a node by position, or the root."""
        low = int(self._columns.child[above.number]) if above is not None else 0
        part = slice(low + start, low + stop)
        return self._rows_of(above, range(start, stop), part, self._keys.lines(part.start, part.stop))

    def _rows_of(
        self, above: OutlineRow | None, positions: Sequence[int], part: slice | np.ndarray, keys: Iterable[str]
    ) -> list[OutlineRow]:
        """Returns children of a node: by their positions, their numbers and their keys."""
        columns = self._columns
        low, after = int(columns.child[above.number]) if above is not None else 0, columns.child[1:]
        children = after[part] - columns.child[part]
        numbers = columns.form[part], children, columns.first[part], columns.leaves[part], self._nbytes(part)
        rows = zip(positions, keys, *(column.tolist() for column in numbers), strict=True)
        name = f"{above.node}." if above is not None and above.node else ""
        path = f"{above.path}/" if above is not None and above.path else ""
        return [
            OutlineRow(
                number=low + position,
                node=f"{name}{position}" if above is not None else "",
                key=key,
                path=path + key,
                kind=columns.forms[form][0],
                cls=columns.forms[form][1],
                children=below,
                first=first_leaf,
                leaves=count,
                nbytes=nbytes,
            )
            for position, key, form, below, first_leaf, count, nbytes in rows
        ]

    def node_at(self, path: str) -> OutlineRow | None:
        """Returns the node with this path, None if there is none."""
        [row] = self._rows(None, 0, 1)
        for step in path.split("/") if path else ():
            low = int(self._columns.child[row.number])
            keys = self._keys.lines(low, low + row.children) if row.children else []
            if step not in keys:
                return None
            position = keys.index(step)
            [row] = self._rows(row, position, position + 1)
        return row

    def search(self, text: str, *, start: int = 0, count: int = 100) -> tuple[list[Leaf], int | None]:
        """Finds leaves from number `start` on whose path contains every word of `text`.

        Returns:
            At most `count` leaves, and the number at which to continue, None at the end.
        """
        leaves: list[Leaf] = []
        for number in self.matches(text, start=start):
            if len(leaves) == count:
                return leaves, number
            leaves.append(self.index.entries[number])
        return leaves, None

    def matches(self, text: str, *, start: int = 0) -> Iterator[int]:
        """Yields the numbers of such leaves."""
        holds, total = words_in(text), len(self._columns.spec)
        for low in range(start, total, SEARCHED_AT_ONCE):
            high = min(low + SEARCHED_AT_ONCE, total)
            folded = self._paths.run(low, high).casefold()
            if not holds(folded):
                continue
            for number, path in enumerate(self._paths.lines(low, high, folded), low):
                if holds(path):
                    yield number


def words_in(text: str) -> Callable[[str], bool]:
    """Returns a test of a casefolded path: whether it contains every word of `text`.

    A `/` and a `~` of a word also stand for those in a key, which a path has as `~1` and `~0`.
    """
    words = sorted(text.casefold().split(), key=len, reverse=True)
    plain = [word for word in words if "/" not in word and "~" not in word]
    spellings = [re.escape(word).replace("\\~", "\\~0?").replace("/", "(?:/|\\~1)") for word in words]
    patterns = [re.compile(one) for one, word in zip(spellings, words, strict=True) if word not in plain]
    return lambda path: all(word in path for word in plain) and all(pattern.search(path) for pattern in patterns)


def state_part(path: str) -> str:
    """Returns the part of a training state that a leaf belongs to: its first key, and for deep paths also the last.

    So each moment of an optimizer is a part: `optimizer … exp_avg`.
    """
    first, _, rest = path.partition("/")
    return f"{first} … {rest.rpartition('/')[2]}" if "/" in rest else first


def part_columns(paths: Iterable[str]) -> PartColumns:
    """Returns the parts of the leaves with these paths."""
    numbers: dict[str, int] = {}
    part = array("i", [numbers.setdefault(name, len(numbers)) for name in map(state_part, paths)])
    return PartColumns(list(numbers), np.array(part, np.int32))


def outline_columns(index: Index) -> OutlineColumns:
    """Returns the columns of an index.

    Raises:
        FormatError: the bytes of all leaves are more than fit 64 bits.
    """
    forms, form, counts, keys, edges = _nodes(index)
    # The root has the number 0, so its first child has 1.
    child = np.concatenate([[0], np.cumsum(counts)]) + 1
    first, leaves = np.zeros(len(form), np.int64), (form == 0).astype(np.int64)
    levels = [(low, middle, high) for (low, middle), (_, high) in pairwise(pairwise(edges))]
    for low, middle, high in reversed(levels):  # the nodes of a level, and below them those of the next one
        sums = np.concatenate([[0], np.cumsum(leaves[middle:high])])
        leaves[low:middle] += np.diff(sums[child[low : middle + 1] - middle])
    for low, middle, high in levels:
        before = np.cumsum(leaves[middle:high]) - leaves[middle:high]
        own = first[low:middle] - np.concatenate([before, [0]])[child[low:middle] - middle]
        first[middle:high] = before + np.repeat(own, counts[low:middle])
    whole, values = [spec.nbytes for spec in index.specs], (ValueRecord, PerRankValues)
    sizes = [
        whole[record.spec]
        if isinstance(record, ArrayRecord)
        else 0
        if isinstance(record, values)  # without the entries, which are a second for a million leaves
        else index.entries[number].nbytes
        for number, record in enumerate(index.leaves)
    ]
    if (total := sum(sizes)) >= MAX_NBYTES:
        raise FormatError("", expected="fewer than 2**63 bytes in all", found=f"{total}")
    specs = [-1 if isinstance(record, values) else record.spec for record in index.leaves]
    return OutlineColumns(
        forms,
        form,
        child,
        first,
        leaves,
        *join_texts(keys),
        np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]),
        np.array(specs, np.int32),
        *join_texts(path for path, _ in index.paths),
    )


def _nodes(index: Index) -> tuple[list[tuple[str, str]], np.ndarray, np.ndarray, list[str], list[int]]:
    """Returns forms; form, number of children, and key of each node; where the levels of the tree begin and end."""
    forms: dict[tuple[str, str], int] = {LEAF: 0}
    form, counts, keys, edges = array("i"), array("q"), [""], [0]
    texts, below = KeyTextCache(), list[tuple[Node, str]]()

    def add(node: Node, path: str) -> None:
        kind = str(node.__struct_config__.tag), getattr(node, "cls", "")
        form.append(forms.setdefault(kind, len(forms)))
        counts.append(len(node.children))
        below.append((node, path))

    if index.structure is None:
        form.append(0)
        counts.append(0)
    else:
        add(index.structure, "")
    edges.append(1)
    while below:
        level, below = below, []
        for node, path in level:
            steps = texts.of(node, path)
            keys += steps
            if node.children.count(None) == len(steps):  # nearly all nodes hold leaves only: they take the short path
                form.extend(repeat(0, len(steps)))
                counts.extend(repeat(0, len(steps)))
                continue
            prefix = path + "/" if path else ""
            for step, child in zip(steps, node.children, strict=True):
                if child is not None:
                    add(child, prefix + step)
                else:
                    form.append(0)
                    counts.append(0)
        edges.append(len(form))
    return list(forms), np.array(form, np.int32), np.array(counts, np.int64), keys, edges


def join_texts(texts: Iterable[str]) -> tuple[bytes, np.ndarray]:
    """Returns texts as one run, and where each ends."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return b"\n".join(encoded), np.cumsum(lengths + 1) - 1
