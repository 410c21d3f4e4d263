"""Treemaps of the bytes of a checkpoint: nested boxes by the tree, its parts, ranks, files or dtypes.

A tree of a million leaves has more boxes than a screen has pixels. So the largest nodes are expanded first, until there
are enough boxes; smaller nodes, and those beyond the limit, are merged into one box of their parent. Where that box
would be larger than all others, it is divided into ranges of nodes of about equal sizes, which a map of its own shows.
"""

from __future__ import annotations

import heapq
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Literal

import msgspec
import numpy as np

from .._core.format.records import Index
from .._core.sharding.int_runs import decode_runs
from .._core.tree.spec import BLOB_KINDS
from ..errors import MismatchError
from .outline import Outline, OutlineRow, Texts

TreemapKey = Literal["tree", "part", "rank", "file", "dtype"]

MIN_DIVIDED = 16
"""With room for fewer boxes than this, merged nodes are not divided."""
MIN_SHARE = 400_000
"""A box with a share of less than 1 in this many is smaller than a pixel."""
FEW_CHILDREN = 200
"""Children of one node that are made rows before they are sorted, which takes less time than numpy."""
MAX_CHILDREN = 100_000
"""Children of one node that are considered."""


class TreemapBox(msgspec.Struct, frozen=True):
    """One box of a treemap."""

    parent: int
    """Position of the parent in the list of boxes, -1 for the root."""
    name: str
    nbytes: int
    leaf: int = -1
    """Number of the leaf that the box shows; -1 for none."""
    node: str = ""
    """Name of the node that the box shows, see `_inspect.outline`; empty for none. `0.3:8-40` are those of its children
    that are the 9th to the 40th largest."""
    more: int = 0
    """Number of smaller boxes that are merged in it."""


def treemap_of(outline: Outline, by: TreemapKey, *, node: str = "", count: int = 20_000) -> list[TreemapBox]:
    """Returns boxes, each after its parent; the first is the whole checkpoint or the given node.

    Args:
        node: the root of a map by the tree; the other maps show the whole checkpoint.
        count: the most boxes.

    Raises:
        MismatchError: there is no such node.
    """
    if by == "tree":
        return _by_tree(outline, node, count)
    shares = _by_writer(outline, by) if by in ("rank", "file") else _by_kind(outline, by)
    return _by_group(outline, *shares, count)


def node_and_range(node: str) -> tuple[str, slice]:
    """Returns the name of a node, and which of its children, the largest first, a map begins with.

    Raises:
        MismatchError: it names no range.
    """
    name, colon, given = node.partition(":")
    if not colon:
        return name, slice(None)
    start, _, stop = given.partition("-")
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise MismatchError(node, expected="a node, or a range of its children as 0.3:8-40", found="neither")
    return name, slice(int(start), int(stop))


def _by_tree(outline: Outline, node: str, count: int) -> list[TreemapBox]:
    name, part = node_and_range(node)
    root = outline.row(name)
    boxes = [_box(-1, root)]
    smallest = root.nbytes / MIN_SHARE
    heap = [(-root.nbytes, 0, root)]
    while heap and len(boxes) < count - 1:
        _, at, row = heapq.heappop(heap)
        sizes, rows_at = _largest_first(outline, row)
        nbytes, more, first = row.nbytes, row.children, 0
        if at == 0 and name != node:
            sizes, first = sizes[part], part.start
            if not sizes:
                raise MismatchError(node, expected=f"a range of {row.children:,} children", found="none of them")
            nbytes, more = sum(sizes), len(sizes)
            boxes[0] = TreemapBox(-1, f"{more:,} of {root.key}", nbytes, node=node)
        # One place is kept for the box of the smaller ones.
        room = count - len(boxes) - 1
        shown = bisect_left(sizes, -smallest, hi=min(room, len(sizes)), key=operator.neg)
        if sum(sizes[shown:]) > max(sizes[:1], default=0) and room >= MIN_DIVIDED:
            shown = bisect_left(sizes, -nbytes / room, hi=min(shown, room // 2), key=operator.neg)
        for child in rows_at(range(first, first + shown)):
            if child.kind != "leaf":
                heapq.heappush(heap, (-child.nbytes, len(boxes), child))
            boxes.append(_box(at, child))
        ranges = divided(sizes, shown, room - shown)
        edges = rows_at([first + place for start, stop in ranges for place in (start, stop - 1)])
        for (start, stop), low, high in zip(ranges, edges, edges, strict=True):
            between = f"{low.key} … {high.key}"
            place = f"{row.node}:{first + start}-{first + stop}"
            boxes.append(TreemapBox(at, between, sum(sizes[start:stop]), node=place, more=stop - start))
        done = len(sizes) if ranges else shown
        if (rest := nbytes - sum(sizes[:done])) > 0 and more > done:
            boxes.append(TreemapBox(at, "", rest, node=row.node, more=more - done))
    return boxes


def _largest_first(
    outline: Outline, above: OutlineRow
) -> tuple[Sequence[int], Callable[[Sequence[int]], Iterator[OutlineRow]]]:
    """Returns the bytes of the children of a node, the largest first, and what gives the rows at some of these places.

    Of many children most have no box of their own: no row is made of them.
    """
    if above.children <= FEW_CHILDREN:
        rows = sorted(outline.children(above, count=FEW_CHILDREN), key=lambda child: -child.nbytes)
        return [row.nbytes for row in rows], lambda places: (rows[at] for at in places)
    nbytes = outline.child_nbytes(above, MAX_CHILDREN)
    order = np.argsort(-nbytes, kind="stable")
    return nbytes[order].data, lambda places: outline.children_at(above, order[np.array(places, np.int64)])


def divided(sizes: Sequence[int], shown: int, room: int) -> list[tuple[int, int]]:
    """Divides what is merged into ranges, so that none is larger than the largest that is shown, if there is room.

    Args:
        sizes: of all, the largest first.
        shown: how many have a box of their own.
        room: the most ranges.

    Returns:
        Where ranges start and stop; none if what is merged is smaller than the largest.
    """
    rest = sum(sizes[shown:])
    if room < MIN_DIVIDED // 2 or not sizes or rest <= sizes[0]:
        return []
    most = max(sizes[0], 2 * rest // room)
    before = array("q", accumulate(sizes, initial=0))
    ranges, start = list[tuple[int, int]](), shown
    while start < len(sizes):
        stop = max(start + 1, bisect_right(before, before[start] + most) - 1)
        ranges.append((start, stop))
        start = stop
    return ranges


def _box(parent: int, row: OutlineRow) -> TreemapBox:
    return TreemapBox(parent, row.key, row.nbytes, row.first if row.kind == "leaf" else -1, row.node)


Shares = tuple[Sequence[str] | Texts, np.ndarray, np.ndarray, np.ndarray]
"""Names of groups, and for each share of a leaf in a group: number of the group, of the leaf, bytes."""


def _by_kind(outline: Outline, by: TreemapKey) -> Shares:
    nbytes, spec = outline.columns()
    [shown] = np.nonzero((nbytes > 0) & (spec >= 0))
    if by == "part":
        names, part = outline.parts()
        return names, part[shown], shown, nbytes[shown]
    numbers: dict[str, int] = {}
    dtypes = [one.kind if one.kind in BLOB_KINDS else one.dtype for one in outline.index.specs]
    of_spec = [numbers.setdefault(name, len(numbers)) for name in dtypes]
    return list(numbers), np.array(of_spec, np.int64)[spec[shown]], shown, nbytes[shown]


def _by_writer(outline: Outline, by: TreemapKey) -> Shares:
    index, chunks = outline.index, outline.chunks()
    names = _group_names(index, by)
    if chunks is None:
        files = index.file_list
        group = np.array([file.rank for file in files], np.int64) if by == "rank" else np.arange(len(files))
        return names, group, np.full(len(files), -1), np.array([file.nbytes for file in files], np.int64)
    [leaf] = np.nonzero(chunks.form >= 0)
    form = chunks.form[leaf]
    first = np.concatenate([[0], chunks.ends[:-1]])[form]
    counts = chunks.ends[form] - first
    before = np.cumsum(counts) - counts
    at = np.arange(counts.sum()) + np.repeat(first - before, counts)
    group = rank = chunks.rank[at]
    if by == "file":
        group = _file_numbers(index, rank, np.repeat(chunks.start[leaf], counts) + chunks.offset[at])
    return names, *_summed(group, np.repeat(leaf, counts), chunks.nbytes[at])


def _summed(group: np.ndarray, leaf: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the shares by group and leaf, with one share of each leaf in a group.

    Args:
        leaf: rising.
    """
    if not len(leaf):
        return group, leaf, nbytes
    small = group.astype(np.uint16) if group.min() >= 0 and group.max() < 1 << 16 else group  # sorted in one pass
    order = np.argsort(small, kind="stable")
    group, leaf, nbytes = group[order], leaf[order], nbytes[order]
    [new] = np.nonzero(np.concatenate([[True], (np.diff(group) != 0) | (np.diff(leaf) != 0)]))
    return group[new], leaf[new], np.add.reduceat(nbytes, new)


def _group_names(index: Index, by: TreemapKey) -> list[str]:
    if by == "rank":
        return [f"rank {rank}" for rank in range(index.world)]
    return [f"file {number}" for number in range(len(index.file_list))]


def _file_numbers(index: Index, rank: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Returns the numbers of the files that hold the given bytes of ranks' streams."""
    ranks, streams = decode_runs(index.files.rank), decode_runs(index.files.stream)
    # positions among the distinct starts of files: ranks and starts together would overflow an int64
    distinct = np.unique(streams)
    keys, asked = (
        ranks_ * (len(distinct) + 1) + np.searchsorted(distinct, starts, side="right")
        for ranks_, starts in ((ranks, streams), (rank, start))
    )
    return np.searchsorted(keys, asked, side="right") - 1


def _by_group(
    outline: Outline, names: Sequence[str] | Texts, group: np.ndarray, leaf: np.ndarray, nbytes: np.ndarray, count: int
) -> list[TreemapBox]:
    total = int(nbytes.sum())
    sums = np.bincount(group, nbytes, len(names)).astype(np.int64)
    boxes = [TreemapBox(-1, "", total)]
    order: list[int] = np.argsort(-sums, kind="stable").tolist()
    largest = [at for at in order if sums[at]]
    where: dict[int, int] = {}
    sizes: list[int] = sums[largest].tolist()
    shown = min(len(largest), max(1, count // 2))
    if sum(sizes[shown:]) > max(sizes[:1], default=0) and count >= MIN_DIVIDED:
        shown = count // 4
    for at in largest[:shown]:
        where[at] = len(boxes)
        boxes.append(TreemapBox(0, names[at], int(sums[at])))
    for start, stop in divided(sizes, shown, count // 4) or [(shown, len(largest))] * (shown < len(largest)):
        between = (
            f"{names[largest[start]]} … {names[largest[stop - 1]]}" if start > shown or stop < len(largest) else ""
        )
        boxes.append(TreemapBox(0, between, sum(sizes[start:stop]), more=stop - start))
    left = {at: int(sums[at]) for at in where}
    members: list[int] = np.bincount(group[leaf >= 0], minlength=len(names)).tolist()
    # A place is kept in each group for the box of its smaller leaves.
    room = max(0, count - len(boxes) - len(where))
    by_size = np.argsort(-nbytes, kind="stable")
    is_shown = np.zeros(len(names), bool)
    is_shown[list(where)] = True
    by_size = by_size[(leaf[by_size] >= 0) & is_shown[group[by_size]]]
    kept = room if len(by_size) <= room or room < MIN_DIVIDED else room // 2
    shown = by_size[:kept]
    shown = shown[nbytes[shown] >= -(-total // (room if kept < room else MIN_SHARE))]
    rising = np.sort(leaf[shown]).tolist()
    paths = dict(zip(rising, outline.paths(rising), strict=True))
    most: dict[int, int] = {}
    for at, number, size in zip(group[shown].tolist(), leaf[shown].tolist(), nbytes[shown].tolist(), strict=True):
        most.setdefault(at, size)
        boxes.append(TreemapBox(where[at], paths[number], size, number))
        left[at] -= size
        members[at] -= 1
    few = int(kept < room) * (room - kept) / total if total else 0.0
    smaller = by_size[len(shown) :]
    smaller = smaller[np.argsort(group[smaller], kind="stable")]
    groups = group[smaller]
    for at, rest in left.items():
        if not (rest and members[at]):
            continue
        low, high = np.searchsorted(groups, [at, at + 1]).tolist()
        merged = smaller[low:high] if few and rest > most.get(at, 0) else shown[:0]
        boxes += _merged(outline, where[at], leaf[merged], nbytes[merged], most.get(at, 0), int(few * rest)) or [
            TreemapBox(where[at], "", rest, more=members[at])
        ]
    return boxes


def _merged(
    outline: Outline, parent: int, leaf: np.ndarray, nbytes: np.ndarray, most: int, room: int
) -> list[TreemapBox]:
    """Returns the boxes of the smaller leaves of a group, the largest first; none if they are not divided."""
    ranges = divided(np.concatenate([[most], nbytes]).data, 1, room) if len(leaf) else []
    ends = sorted({int(leaf[n]) for start, stop in ranges for n in (start - 1, stop - 2)})
    paths = dict(zip(ends, outline.paths(ends), strict=True))
    return [
        TreemapBox(
            parent,
            f"{paths[int(leaf[start - 1])]} … {paths[int(leaf[stop - 2])]}",
            int(nbytes[start - 1 : stop - 1].sum()),
            more=stop - start,
        )
        for start, stop in ranges
    ]
