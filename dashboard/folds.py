"""The queries of the tree beside its pages: repeated blocks, and a search that also asks for dtype and size."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from treeckpt.core.analysis.diff import leaf_text
from treeckpt.core.analysis.outline import Outline, OutlineRow, leaf_nbytes
from treeckpt.core.analysis.repeated_blocks import RepeatedBlocks, find_repeated_blocks

from .pages import SearchPage
from .queries import PAGE, leaf_row, search_page

__all__ = ["FoldRow", "FoldsPage", "folds_page", "leaves_page"]

MAX_CHILDREN = 5000
"""Children of a node beyond which nothing is folded."""
MAX_LEAVES = 100
"""Leaves of a child up to which it is looked at leaf by leaf; larger ones are alike if their counts and bytes are."""
MAX_DEPTH = 50
"""Levels that are compared; deeper nodes are alike if their counts and bytes are."""
SCAN = 100_000
"""Leaves that one request of a filtered search looks at."""


class FoldRow(msgspec.Struct, frozen=True):
    """Children `start` to `stop` of a node, `blocks` times the same."""

    start: int
    stop: int
    blocks: int
    title: str
    names: list[str]
    skip: int
    """Characters of a child's key that its block's name is, per block: the name, and the dot behind it."""
    leaves: int
    nbytes: int


class FoldsPage(msgspec.Struct, frozen=True):
    """The repeated blocks among a node's children."""

    node: str
    children: int
    dtypes: list[str]
    """All dtypes of the checkpoint, for a filter."""
    folds: list[FoldRow]


def folds_page(outline: Outline, name: str) -> FoldsPage:
    """The repeated blocks of a node.

    Raises:
        MismatchError: there is no such node.
    """
    children = outline.row(name).children
    dtypes = sorted({spec.dtype for spec in outline.index.specs})
    if children > MAX_CHILDREN:
        return FoldsPage(name, children, dtypes, [])
    rows = outline.children(name, count=MAX_CHILDREN)
    folds = find_repeated_blocks([row.key for row in rows], [_kind(outline, row) for row in rows])
    return FoldsPage(name, children, dtypes, [_fold_row(fold, rows) for fold in folds])


def _kind(outline: Outline, row: OutlineRow, depth: int = 0) -> Hashable:
    """What a node is, apart from its name."""
    if row.kind == "leaf":
        return leaf_text(outline.index, outline.index.entries[row.first])
    if row.leaves > MAX_LEAVES or depth > MAX_DEPTH:
        return row.kind, row.cls, row.children, row.leaves, row.nbytes
    inner = outline.children(row.node, count=MAX_LEAVES)
    return row.kind, row.cls, tuple((child.key, _kind(outline, child, depth + 1)) for child in inner)


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


def leaves_page(outline: Outline, query: str, start: int, dtype: str, larger: int) -> SearchPage:
    """Leaves whose path holds every word of the query, of one dtype and at least so many bytes, if that is asked.

    A page may be short, or empty, and still have a next one: no request looks at more than SCAN leaves.
    """
    if not dtype and not larger:
        return search_page(outline, query, start)
    index = outline.index
    rows = []
    following: int | None = start
    while following is not None and following < start + SCAN:
        leaves, following = outline.search(query, start=following, count=1000)
        for leaf in leaves:
            if leaf.spec is None or (dtype and leaf.spec.dtype != dtype) or leaf_nbytes(leaf) < larger:
                continue
            if len(rows) == PAGE:
                return SearchPage(query, start, leaf.number, rows)
            rows.append(leaf_row(index, leaf))
    return SearchPage(query, start, following, rows)
