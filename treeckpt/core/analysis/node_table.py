"""A tree as one table of nodes: the rows of `outline`, for readers that keep the table on disk and not the tree.

Nodes are numbered breadth first from the root, 0, so that the children of a node are adjacent: a node stores the number
of its first child and the number of its children. Leaves are in the order of the structure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate

from ...errors import FormatError
from ..format.records import Index
from ..tree.structure import KeyTextCache, Node, PerRankNode
from .outline import IndexOutline

__all__ = ["NodeRecord", "node_records"]

MAX_NBYTES = 1 << 63
"""Bytes of all leaves together are below this, because they are stored as a signed integer of 64 bits."""

NodeRecord = tuple[str, str, str, int, int, int, int, int]
"""(key, kind, class, number of the first child, children, number of the first leaf, leaves, stored bytes), see
`outline.OutlineRow`."""


def node_records(index: Index) -> Iterator[NodeRecord]:
    """Yields every node in the order of its number.

    Raises:
        FormatError: the bytes of all leaves are more than fit 64 bits.
    """
    outline = IndexOutline(index)
    sizes = outline.sizes
    sums = [0, *accumulate(sizes)]
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
        steps = ["~rank*"] * len(children) if isinstance(node, PerRankNode) else texts.of(node, path)
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
