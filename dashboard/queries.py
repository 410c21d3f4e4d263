"""From what the library and the core say to what a page shows. No file is opened and nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from treeckpt.core.analysis.diff import leaf_text
from treeckpt.core.analysis.outline import Outline, OutlineRow, leaf_nbytes
from treeckpt.core.format.records import Index, Leaf
from treeckpt.core.text import value_text, value_type, visible
from treeckpt.runs.catalog import CheckpointInfo

from .library import Library, Missing, ReadingInfo, Run
from .pages import (
    CheckpointPage,
    CheckpointRow,
    Fact,
    Group,
    NodeRow,
    SearchPage,
    TreePage,
)
from .reading import Reading
from .run_pages import LoadingPage, ReadingRow

__all__ = [
    "above",
    "checkpoint_page",
    "checkpoint_row",
    "loading_page",
    "opened",
    "search_page",
    "short",
    "status_of",
    "tree_page",
]

PAGE = 100
MAX_NAME = 2000
"""Characters of a name or a path that are shown."""


def moment(ns: int | None) -> str | None:
    """Unix nanoseconds as ISO 8601 to the millisecond."""
    if ns is None:
        return None
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def short(text: str) -> str:
    """A name as stored, or its beginning: a hostile one may be as long as the index."""
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}… ({len(text)} characters)"


def status_of(info: CheckpointInfo) -> str:
    """complete, saving, partial, corrupt, foreign, or reading: its large index is read for the first time."""
    if isinstance(info, ReadingInfo):
        return "reading"
    return "saving" if info.status == "partial" and info.under_way else info.status


def checkpoint_row(checkpoint_id: str, run: Run, info: CheckpointInfo) -> CheckpointRow:
    """One directory of a run."""
    under_way = info.under_way
    rate = info.nbytes / info.seconds if info.nbytes and info.seconds and info.status != "partial" else None
    return CheckpointRow(
        id=checkpoint_id,
        run=run.id,
        run_name=run.name,
        name=visible(info.name),
        status=status_of(info),
        step=info.step,
        save_id=info.save_id,
        world=info.world,
        leaves=info.leaves,
        nbytes=info.nbytes,
        created=moment(info.created_ns),
        seconds=info.seconds,
        rate=rate,
        error=visible(info.error) if info.error else None,
        readable=info.leaves is not None,
        pinned=info.pinned,
        saved=under_way[-1].fraction if under_way else None,
        phase=under_way[-1].phase if under_way else None,
        abandoned=info.abandoned,
        follows=info.lineage.follows or None if info.lineage is not None else None,
    )


def opened(library: Library, checkpoint_id: str) -> tuple[CheckpointRow, Outline]:
    """A checkpoint and its tree.

    Raises:
        Missing: there is none, or it has no index to browse.
    """
    run, info = library.checkpoint(checkpoint_id)
    row = checkpoint_row(checkpoint_id, run, info)
    if not row.readable:
        raise Missing(f"This checkpoint is {row.status}: {row.error}")
    return row, library.outline(info)


def loading_page(library: Library, url: str, reading: Reading) -> LoadingPage:
    """A checkpoint whose index is still being read, as far as it is known.

    Args:
        url: of its folder.
    """
    checkpoint_id, run, info = library.unread(url)
    row = checkpoint_row(checkpoint_id, run, info)
    share = reading.done / reading.total if reading.phase == "write" and reading.total else None
    return LoadingPage(row, ReadingRow(reading.phase, reading.done, reading.total, share, reading.seconds))


def node_row(index: Index, row: OutlineRow) -> NodeRow:
    """One node of the tree."""
    leaf = index.entries[row.first] if row.kind == "leaf" else None
    return NodeRow(
        node=row.node,
        key=short(row.key),
        path=short(row.path),
        kind=row.kind,
        cls=row.cls,
        children=row.children,
        leaves=row.leaves,
        nbytes=row.nbytes,
        share=row.nbytes / index.nbytes if index.nbytes else 0.0,
        leaf=row.first if leaf is not None else None,
        text=leaf_text(index, leaf) if leaf is not None else _container_text(row),
    )


def _container_text(row: OutlineRow) -> str:
    kind = {"per_rank": "per rank"}.get(row.kind, row.kind)
    return f"{kind} {row.cls.rpartition(':')[2]}" if row.cls else kind


def leaf_row(index: Index, leaf: Leaf) -> NodeRow:
    """A leaf found by its number: its place in the tree is left out."""
    nbytes = leaf_nbytes(leaf)
    share = nbytes / index.nbytes if index.nbytes else 0.0
    key = short(leaf.path.rpartition("/")[2])
    return NodeRow("", key, short(leaf.path), "leaf", "", 0, 1, nbytes, share, leaf.number, leaf_text(index, leaf))


def above(outline: Outline, name: str) -> list[NodeRow]:
    """The nodes from the root to a node's parent."""
    steps = name.split(".") if name else []
    names = [".".join(steps[:n]) for n in range(len(steps))]
    return [node_row(outline.index, outline.row(n)) for n in names]


def tree_page(outline: Outline, name: str, start: int) -> TreePage:
    """A page of a node's children.

    Raises:
        MismatchError: there is no such node.
    """
    node = outline.row(name)
    rows = outline.children(name, start=start, count=PAGE)
    if node.kind == "leaf" and not name:  # the whole tree is one leaf
        rows = [node]
    following = start + PAGE if start + PAGE < node.children else None
    index = outline.index
    return TreePage(
        node_row(index, node), above(outline, name), start, following, [node_row(index, row) for row in rows]
    )


def search_page(outline: Outline, query: str, start: int) -> SearchPage:
    """Leaves whose path holds every word of the query."""
    leaves, following = outline.search(query, start=start, count=PAGE)
    return SearchPage(query, start, following, [leaf_row(outline.index, leaf) for leaf in leaves])


def _groups(outline: Outline) -> list[Group]:
    """The largest parts of a tree: its first level, or the second where the first is one node."""
    node = outline.row()
    while node.children == 1:
        node = outline.children(node.node, count=1)[0]
    rows = outline.children(node.node, count=10_000)
    total = outline.index.nbytes or 1
    rows = sorted((row for row in rows if row.nbytes), key=lambda row: -row.nbytes)
    groups = [Group(short(row.key), row.nbytes, row.leaves, row.nbytes / total) for row in rows[:6]]
    if rest := rows[6:]:
        nbytes = sum(row.nbytes for row in rest)
        groups.append(Group(f"{len(rest)} more", nbytes, sum(row.leaves for row in rest), nbytes / total))
    return groups


def _metadata(index: Index) -> Sequence[Fact]:
    pairs = list(index.metadata.items())[:PAGE]
    return [Fact(short(name), value_type(value), value_text(value, 1000)) for name, value in pairs]


def checkpoint_page(library: Library, checkpoint_id: str, node: str, query: str, start: int) -> CheckpointPage:
    """One checkpoint. What has no index to browse gets a page that says what it is."""
    run, info = library.checkpoint(checkpoint_id)
    row = checkpoint_row(checkpoint_id, run, info)
    if not row.readable:
        return CheckpointPage(row, None, [], [], None, None)
    outline = library.outline(info)
    return CheckpointPage(
        checkpoint=row,
        files=len(outline.index.file_list),
        metadata=list(_metadata(outline.index)),
        groups=_groups(outline),
        tree=tree_page(outline, node, 0 if query else start),
        found=search_page(outline, query, start) if query.strip() else None,
    )
