"""The page of one checkpoint: its tree node by node, repeated blocks folded, the search, the treemap, its metadata.

Paths, values and metadata are as stored; the template or script that draws them escapes them.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import numpy as np

from treeckpt._core.format.records import Index, Leaf
from treeckpt._core.text import value_text, value_type
from treeckpt._core.tree.spec import BLOB_KINDS
from treeckpt._inspect.diff import leaf_text, rows_text
from treeckpt._inspect.outline import Outline, OutlineRow
from treeckpt._inspect.treemap import TreemapKey, node_and_range, treemap_of
from treeckpt._runs.catalog import needed_nbytes
from treeckpt.errors import visible

from ..pages.checkpoints import (
    PAGE_ROWS,
    CheckpointRow,
    OpenTree,
    checkpoint_row,
    filled,
    next_start,
    shorten,
)
from ..pages.damage import NO_DAMAGE, Damage
from ..pages.load_code import MAX_NAMED_LEAVES, SnippetPage, selecting_code
from ..store.library import Library, NotFound
from .leaf_numbers import ContentsSummary, summary_of
from .repeated_blocks import RepeatedBlocks, find_repeated_blocks

SCANNED = 100_000
"""Leaves that one request of a filtered search reads."""
MAX_CHILDREN = 5000
"""Children of a node; with more of them nothing is folded."""
MAX_LEAVES = 100
"""Leaves of a child that are compared one by one; larger children are equal if their counts and bytes are."""
MAX_DEPTH = 50
"""Levels that are compared; deeper nodes are equal if their counts and bytes are."""


class Fact(msgspec.Struct, frozen=True):
    """A named value."""

    name: str
    type: str
    text: str


class Group(msgspec.Struct, frozen=True):
    """A part of the tree with its bytes."""

    name: str
    nbytes: int
    leaves: int
    share: float


class NodeRow(msgspec.Struct, frozen=True):
    """One node of a tree."""

    node: str
    key: str
    path: str
    kind: str
    cls: str
    children: int
    leaves: int
    nbytes: int
    share: float
    """Share of the bytes of the whole checkpoint."""
    leaf: int | None
    """The number of a leaf; None for other nodes."""
    text: str
    """What it is, in a few words."""
    damaged: int
    """Leaves of it that are known to be damaged."""


class TreePage(msgspec.Struct, frozen=True):
    """A page of the children of a node."""

    node: NodeRow
    above: list[NodeRow]
    """The nodes from the root to the parent of the node."""
    start: int
    next: int | None
    rows: list[NodeRow]


class SearchPage(msgspec.Struct, frozen=True):
    """Leaves whose path contains every word of the query."""

    query: str
    start: int
    next: int | None
    rows: list[NodeRow]


class CheckpointPage(msgspec.Struct, frozen=True):
    """One checkpoint and its tree, from the root or from a requested node."""

    checkpoint: CheckpointRow
    files: int | None
    leaves: int | None
    nbytes: int | None
    """Bytes of all arrays."""
    metadata: list[Fact]
    groups: list[Group]
    tree: TreePage | None
    found: SearchPage | None
    contents: ContentsSummary | None
    """What the statistics of its arrays say; None if none are known."""
    needed_nbytes: int = 0
    """Bytes of its files that other checkpoints of the run share, and that go only with the last of these."""
    needed_by: list[str] = []
    """The directories of these checkpoints."""
    located: bool = True
    """Whether it is known which leaves are damaged."""


def node_row(index: Index, damage: Damage, row: OutlineRow) -> NodeRow:
    """Returns the row of one node."""
    leaf = index.entries[row.first] if row.kind == "leaf" else None
    return filled(
        NodeRow,
        row,
        key=shorten(row.key),
        path=shorten(row.path),
        share=row.nbytes / index.nbytes if index.nbytes else 0.0,
        leaf=row.first if leaf is not None else None,
        text=leaf_text(index, leaf) if leaf is not None else _container_text(index, row),
        damaged=damage.count(row.first, row.first + row.leaves),
    )


def _container_text(index: Index, row: OutlineRow) -> str:
    kind = {"per_rank": "per rank"}.get(row.kind, row.kind)
    if row.kind == "table":
        return kind + rows_text(index, row.path)
    return f"{kind} {row.cls.rpartition(':')[2]}" if row.cls else kind


def _found_row(index: Index, damage: Damage, leaf: Leaf) -> NodeRow:
    """Returns the row of a leaf that a search found, without its position in the tree."""
    nbytes = leaf.nbytes
    share = nbytes / index.nbytes if index.nbytes else 0.0
    key = shorten(leaf.path.rpartition("/")[2])
    return NodeRow(
        "",
        key,
        path=shorten(leaf.path),
        kind="leaf",
        cls="",
        children=0,
        leaves=1,
        nbytes=nbytes,
        share=share,
        leaf=leaf.number,
        text=leaf_text(index, leaf),
        damaged=int(damage.holds(leaf.number)),
    )


def tree_page(outline: Outline, damage: Damage, node: str = "", start: int = 0) -> TreePage:
    """A page of the children of a node.

    Raises:
        MismatchError: there is no such node.
    """
    *above, shown = outline.way(node)
    rows = outline.children(shown, start=start, count=PAGE_ROWS)
    if shown.kind == "leaf" and not node:  # the whole tree is one leaf
        rows = [shown]
    index = outline.index
    return TreePage(
        node=node_row(index, damage, shown),
        above=[node_row(index, damage, row) for row in above],
        start=start,
        next=next_start(start, shown.children),
        rows=[node_row(index, damage, row) for row in rows],
    )


def search_page(outline: Outline, damage: Damage, q: str, start: int = 0) -> SearchPage:
    """Leaves by the words of their path; `start` is the number of a leaf."""
    leaves, following = outline.search(q, start=start, count=PAGE_ROWS)
    return SearchPage(q, start, following, [_found_row(outline.index, damage, leaf) for leaf in leaves])


def leaves_page(
    outline: Outline, damage: Damage, q: str = "", dtype: str = "", larger: int = 0, start: int = 0
) -> SearchPage:
    """Leaves by the words of their path, their dtype and their size; `start` is the number of a leaf.

    A filtered page may be short, or empty, and still have a next one: a request reads at most SCANNED leaves.
    """
    if not dtype and not larger:
        return search_page(outline, damage, q, start)
    rows = []
    following: int | None = start
    while following is not None and following < start + SCANNED:
        leaves, following = outline.search(q, start=following, count=1000)
        for leaf in leaves:
            if leaf.spec is None or (dtype and leaf.spec.dtype != dtype) or leaf.nbytes < larger:
                continue
            if len(rows) == PAGE_ROWS:
                return SearchPage(q, start, leaf.number, rows)
            rows.append(_found_row(outline.index, damage, leaf))
    return SearchPage(q, start, following, rows)


def _groups(outline: Outline) -> list[Group]:
    """Returns the largest children of the first node, from the root on, that has more than one."""
    node = outline.row()
    while node.children == 1:
        [node] = outline.children(node, count=1)
    rows = outline.children(node, count=10_000)
    total = outline.index.nbytes or 1
    rows = sorted((row for row in rows if row.nbytes), key=lambda row: -row.nbytes)
    groups = [Group(shorten(row.key), row.nbytes, row.leaves, row.nbytes / total) for row in rows[:6]]
    if rest := rows[6:]:
        nbytes = sum(row.nbytes for row in rest)
        groups.append(Group(f"{len(rest)} more", nbytes, sum(row.leaves for row in rest), nbytes / total))
    return groups


def checkpoint_page(
    library: Library, checkpoint_id: str, node: str = "", q: str = "", start: int = 0
) -> CheckpointPage:
    """One checkpoint of any status.

    Without an index to browse the page holds only the row.
    """
    opened = library.checkpoint(checkpoint_id)
    row = checkpoint_row(checkpoint_id, opened.run, opened.info)
    if not row.readable and row.format is None:
        return CheckpointPage(
            row, None, leaves=None, nbytes=None, metadata=[], groups=[], tree=None, found=None, contents=None
        )
    outline = library.outline(opened)
    damage = OpenTree(library, opened, row, outline).damage
    metadata = list(outline.index.metadata.items())[:PAGE_ROWS]
    infos = (info for _, info in library.checkpoints(opened.run))
    sharing = [info for info in infos if opened.info.name in info.shared_with]
    return CheckpointPage(
        checkpoint=row,
        files=len(outline.index.file_list),
        leaves=len(outline.index.entries),
        nbytes=outline.index.nbytes,
        metadata=[Fact(shorten(name), value_type(value), value_text(value, 1000)) for name, value in metadata],
        groups=_groups(outline),
        tree=tree_page(outline, damage, node, 0 if q else start),
        found=search_page(outline, damage, q, start) if q.strip() else None,
        contents=summary_of(library, opened.info),
        located=damage.located,
        needed_nbytes=needed_nbytes(info.shared_with for info in sharing).get(opened.info.name, 0),
        needed_by=sorted(visible(info.name) for info in sharing),
    )


def snippet_page(tree: OpenTree, path: str = "", node: str = "", start: int = 0, stop: int = 0) -> SnippetPage:
    """The Python code that loads a leaf, or all leaves below a node, or children `start:stop` of a node, as a block.

    Raises:
        MismatchError: there is no such node.
        NotFound: there are too many children.
    """
    info, outline = tree.checkpoint.info, tree.outline
    if stop <= start:
        return SnippetPage(path, selecting_code(info, [path]))
    if stop - start > MAX_NAMED_LEAVES:
        raise NotFound(f"These are {stop - start:,} children, and code names at most {MAX_NAMED_LEAVES:,}.")
    rows = outline.children(outline.row(node), start=start, count=stop - start)
    return SnippetPage(path, selecting_code(info, [row.path for row in rows]))


def found_snippet(tree: OpenTree, q: str = "", dtype: str = "", larger: int = 0) -> SnippetPage:
    """The Python code that loads all leaves that a search finds.

    Raises:
        NotFound: there are too many, or none.
    """
    entries, paths = tree.outline.index.entries, list[str]()
    start: int | None = 0
    while start is not None and len(paths) <= MAX_NAMED_LEAVES:
        page = leaves_page(tree.outline, NO_DAMAGE, q, dtype, larger, start)
        paths += [entries[row.leaf].path for row in page.rows if row.leaf is not None]
        start = page.next
    if not 0 < len(paths) <= MAX_NAMED_LEAVES:
        many = f"More than {MAX_NAMED_LEAVES:,} leaves are found, and code names at most so many: add a word."
        raise NotFound(many if paths else "No leaf is found.")
    return SnippetPage("", selecting_code(tree.checkpoint.info, paths))


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
    damaged: list[int]
    """Leaves of each block that are known to be damaged."""


class FoldsPage(msgspec.Struct, frozen=True):
    """The repeated blocks among the children of a node."""

    node: str
    children: int
    dtypes: list[str]
    """All dtypes of the checkpoint, for the filter."""
    folds: list[FoldRow]


def folds_page(outline: Outline, damage: Damage, node: str = "") -> FoldsPage:
    """Repeated blocks among the children of a node, equal except for their number.

    Raises:
        MismatchError: there is no such node.
    """
    above = outline.row(node)
    dtypes = sorted({spec.dtype for spec in outline.index.specs if spec.kind not in BLOB_KINDS})
    if above.children > MAX_CHILDREN:
        return FoldsPage(node, above.children, dtypes, [])
    rows = outline.children(above, count=MAX_CHILDREN)
    folds = find_repeated_blocks([row.key for row in rows], [_content_key(outline, row) for row in rows])
    return FoldsPage(node, above.children, dtypes, [_fold_row(fold, damage, rows) for fold in folds])


def _content_key(outline: Outline, row: OutlineRow, depth: int = 0) -> Hashable:
    """Returns a key that is equal for nodes that differ by name only."""
    if row.kind == "leaf":
        return leaf_text(outline.index, outline.index.entries[row.first])
    if row.leaves > MAX_LEAVES or depth > MAX_DEPTH:
        return row.kind, row.cls, row.children, row.leaves, row.nbytes
    inner = outline.children(row, count=MAX_LEAVES)
    return row.kind, row.cls, tuple((child.key, _content_key(outline, child, depth + 1)) for child in inner)


def _fold_row(fold: RepeatedBlocks, damage: Damage, rows: list[OutlineRow]) -> FoldRow:
    inside = rows[fold.start : fold.stop]
    blocks = [inside[at : at + fold.length] for at in range(0, len(inside), fold.length)]
    return FoldRow(
        start=fold.start,
        stop=fold.stop,
        blocks=fold.blocks,
        title=fold.title,
        names=[fold.name(block) for block in range(fold.blocks)],
        skip=1 if fold.length > 1 or inside[0].key != fold.name(0) else 0,
        leaves=sum(row.leaves for row in inside),
        nbytes=sum(row.nbytes for row in inside),
        damaged=[damage.count(block[0].first, block[-1].first + block[-1].leaves) for block in blocks],
    )


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
    damaged: list[int]
    """The boxes of leaves that are known to be damaged."""


def treemap_page(
    outline: Outline, damage: Damage, by: TreemapKey = "tree", node: str = "", count: int = 20_000
) -> TreemapPage:
    """Bytes as nested boxes.

    Raises:
        MismatchError: there is no such node.
    """
    node = node if by == "tree" else ""
    boxes = treemap_of(outline, by, node=node, count=count)
    name, part = node_and_range(node)
    above = outline.way(name)
    root = above.pop() if name == node else above[-1]
    path = root.path if name == node else f"{part.stop - part.start:,} of {root.path or 'the tree'}"
    return TreemapPage(
        by=by,
        node=node,
        path=path,
        total=boxes[0].nbytes,
        above=[[row.node, row.key] for row in above],
        parents=[box.parent for box in boxes],
        names=[box.name for box in boxes],
        nbytes=[box.nbytes for box in boxes],
        leaves=[box.leaf for box in boxes],
        nodes=[box.node for box in boxes],
        more=[box.more for box in boxes],
        damaged=np.flatnonzero(np.isin([box.leaf for box in boxes], damage.leaves)).tolist(),
    )
