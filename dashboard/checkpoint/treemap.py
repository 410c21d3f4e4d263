"""The data of the treemap: boxes in columns, so that tens of thousands of them take few bytes."""

from __future__ import annotations

import msgspec

from treeckpt._inspect.outline import Outline
from treeckpt._inspect.treemap import TreemapKey, treemap_of


class TreemapPage(msgspec.Struct, frozen=True):
    """Nested boxes, each after its parent; the first one contains all others."""

    by: TreemapKey
    node: str
    path: str
    total: int
    above: list[list[str]]
    """[node, name] from the root to the node's parent."""
    parents: list[int]
    names: list[str]
    nbytes: list[int]
    leaves: list[int]
    """The leaf that a box stands for; -1 for none."""
    nodes: list[str]
    """The node that a box stands for, or whose smallest children it combines."""
    more: list[int]
    """Number of smaller boxes that a box combines."""


def treemap_page(outline: Outline, by: TreemapKey, node: str, count: int) -> TreemapPage:
    """Returns the treemap of a checkpoint, or of one node.

    Raises:
        MismatchError: there is no such node.
    """
    node = node if by == "tree" else ""
    boxes = treemap_of(outline, by, node=node, count=count)
    *above, root = outline.way(node)
    return TreemapPage(
        by=by,
        node=node,
        path=root.path,
        total=boxes[0].nbytes,
        above=[[row.node, row.key] for row in above],
        parents=[box.parent for box in boxes],
        names=[box.name for box in boxes],
        nbytes=[box.nbytes for box in boxes],
        leaves=[box.leaf for box in boxes],
        nodes=[box.node for box in boxes],
        more=[box.more for box in boxes],
    )
