"""Repeated blocks of a tree, such as the layers of a model: the tree shows them folded."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from treeckpt._core.tree.spec import BLOB_KINDS
from treeckpt._inspect.diff import leaf_text
from treeckpt._inspect.outline import Outline, OutlineRow

from .repeated_blocks import RepeatedBlocks, find_repeated_blocks

MAX_CHILDREN = 5000
"""Children of a node; with more of them nothing is folded."""
MAX_LEAVES = 100
"""Leaves of a child that are compared one by one; larger children are equal if their counts and bytes are."""
MAX_DEPTH = 50
"""Levels that are compared; deeper nodes are equal if their counts and bytes are."""


class FoldRow(msgspec.Struct, frozen=True):
    """Children `start` to `stop` of a node: a block that is repeated `blocks` times."""

    start: int
    stop: int
    blocks: int
    title: str
    names: list[str]
    skip: int
    """Characters between the name of the block and the rest of a child's key: 1 for a dot, 0 if there is no rest."""
    leaves: int
    nbytes: int


class FoldsPage(msgspec.Struct, frozen=True):
    """The repeated blocks among the children of a node."""

    node: str
    children: int
    dtypes: list[str]
    """All dtypes of the checkpoint, for the filter."""
    folds: list[FoldRow]


def folds_page(outline: Outline, name: str) -> FoldsPage:
    """Returns the repeated blocks among the children of a node.

    Raises:
        MismatchError: there is no such node.
    """
    node = outline.row(name)
    dtypes = sorted({spec.dtype for spec in outline.index.specs if spec.kind not in BLOB_KINDS})
    if node.children > MAX_CHILDREN:
        return FoldsPage(name, node.children, dtypes, [])
    rows = outline.children(node, count=MAX_CHILDREN)
    folds = find_repeated_blocks([row.key for row in rows], [_content_key(outline, row) for row in rows])
    return FoldsPage(name, node.children, dtypes, [_fold_row(fold, rows) for fold in folds])


def _content_key(outline: Outline, row: OutlineRow, depth: int = 0) -> Hashable:
    """Returns a key that is equal for nodes that differ by name only."""
    if row.kind == "leaf":
        return leaf_text(outline.index, outline.index.entries[row.first])
    if row.leaves > MAX_LEAVES or depth > MAX_DEPTH:
        return row.kind, row.cls, row.children, row.leaves, row.nbytes
    inner = outline.children(row, count=MAX_LEAVES)
    return row.kind, row.cls, tuple((child.key, _content_key(outline, child, depth + 1)) for child in inner)


def _fold_row(fold: RepeatedBlocks, rows: list[OutlineRow]) -> FoldRow:
    inside = rows[fold.start : fold.stop]
    return FoldRow(
        start=fold.start,
        stop=fold.stop,
        blocks=fold.blocks,
        title=fold.title,
        names=[fold.name(block) for block in range(fold.blocks)],
        skip=1 if fold.length > 1 or inside[0].key != fold.name(0) else 0,
        leaves=sum(row.leaves for row in inside),
        nbytes=sum(row.nbytes for row in inside),
    )
