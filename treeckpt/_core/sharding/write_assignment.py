"""Which rank writes which elements: every element of every array exactly once, replicas share the work by bytes.

Arrays whose replicas are on the same ranks form one long stream of bytes, which is cut into equal quotas, one per
replica; an array is cut only where a border between quotas falls into it, along the first dimension whose rows are
small enough. So the quotas differ by no more than a row, the pieces are few, and the cuts depend only on the global
layout: each rank finds its own writes in O(leaves), and the coordinator those of all ranks at once, without messages.

Arrays with listed pieces (`BoxLayout`) are written piece by piece, equal pieces by the least loaded of their
holders; of pieces that overlap in part, the first one is written whole and of the next ones what is left.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter

import msgspec
import numpy as np

from ...errors import LayoutError
from .int_runs import Runs, decode_runs
from .placements import (
    BoxLayout,
    Layout,
    MeshLayout,
    Replicate,
    cells_of,
    check_layout,
    held_by,
    mesh_ranks,
    mesh_strides,
    position_of,
    replica_offsets,
)
from .region import Region, earlier_overlaps, intersect, subtract

UNCUT_NBYTES = 64 << 10
"""Bytes up to which an array is never cut."""
MIN_QUOTA = 1 << 20
"""Bytes for which one more replica does not write: a smaller quota costs more than it saves."""


class ArrayLeaf(msgspec.Struct, frozen=True, gc=False):
    """The description of an array from which writes are planned."""

    path: str
    shape: tuple[int, ...]
    itemsize: int
    layout: Layout
    align: int = 0
    """Alignment of an element in the file, in bytes; 0 is the itemsize."""
    per_rank: Runs | None = None
    """The ranks that each have an array of their own of this shape under this path; None for any other array."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class ReplicaSplit(msgspec.Struct, frozen=True):
    """The split of an array among its replicas: each cell is cut at `cuts` along `dim`; `writers[j]` writes part j."""

    dim: int
    cuts: tuple[int, ...]
    writers: tuple[int, ...]
    """Replica numbers, one more than there are cuts."""


class BoxOwners(msgspec.Struct, frozen=True):
    """Writers as a list of (rank, region), in the order of the regions' offsets."""

    pieces: tuple[tuple[int, Region], ...]


class GridOwners(msgspec.Struct, frozen=True):
    """Writers as a grid: per dimension the cells' starts and stops; `ranks` in row-major order of the cells."""

    starts: tuple[np.ndarray, ...]
    stops: tuple[np.ndarray, ...]
    ranks: np.ndarray


Owners = BoxOwners | GridOwners
Assignment = ReplicaSplit | BoxOwners
"""The decision who writes an array: of a `MeshLayout` and of a `BoxLayout`."""
FIRST_REPLICA = ReplicaSplit(0, (), (0,))
"""The first replica writes everything."""


def assign_writers(leaves: Sequence[ArrayLeaf]) -> list[Assignment]:
    """Decides for each array which of its holders write which part.

    Raises:
        LayoutError: pieces leave a gap or lie outside of their array.
    """
    assignments: list[Assignment] = [FIRST_REPLICA] * len(leaves)
    streams: dict[bytes, list[int]] = {}
    loads: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.layout, BoxLayout):
            assignments[i] = _assign_boxes(leaf, leaf.layout, loads)
        elif leaf.per_rank is None and len(mesh_ranks(leaf.layout.mesh)) > 1:
            check_layout(leaf.layout, leaf.shape, leaf.path)
            if len(replica_offsets(leaf.layout)) > 1 and leaf.nbytes:
                # replicas are on the same ranks where the mesh and its replicated dimensions are equal
                replicated = tuple(isinstance(p, Replicate) for p in leaf.layout.placements)
                key = msgspec.json.encode((leaf.layout.mesh.shape, leaf.layout.mesh.ranks, replicated))
                streams.setdefault(key, []).append(i)
    for members in streams.values():
        _assign_stream(leaves, members, assignments)
    return assignments


def _first_holding(leaf: ArrayLeaf) -> tuple[int, tuple[int, ...]]:
    """Returns what the first holder has: its bytes, and the shape of its first cell, which is the largest one."""
    assert isinstance(leaf.layout, MeshLayout)
    held = held_by(leaf.layout, leaf.shape, int(mesh_ranks(leaf.layout.mesh)[0]))
    return sum(h.region.size for h in held) * leaf.itemsize, held[0].region.shape


def _assign_stream(leaves: Sequence[ArrayLeaf], members: list[int], assignments: list[Assignment]) -> None:
    """Assigns the arrays `members`, which form one stream of bytes, in quotas to their replicas."""
    first = leaves[members[0]].layout
    assert isinstance(first, MeshLayout)
    holders = len(replica_offsets(first))
    nominal = [_first_holding(leaves[i]) for i in members]
    total = sum(nbytes for nbytes, _ in nominal)
    parts = max(1, min(holders, total // MIN_QUOTA))
    writer = [part * holders // parts for part in range(parts)]
    start = 0
    for i, (n, shape) in zip(members, nominal, strict=True):
        # borders between quotas strictly inside this array
        low, high = start * parts // total, -(-(start + n) * parts // total)
        inside = [total * k // parts - start for k in range(low + 1, high)]
        if n <= UNCUT_NBYTES or not inside or not shape:
            assignments[i] = ReplicaSplit(0, (), (writer[min((start + n // 2) * parts // total, parts - 1)],))
        else:
            assignments[i] = _split_at_borders(shape, n, inside, writer[low:high], total // parts)
        start += n


def _split_at_borders(
    shape: tuple[int, ...], nbytes: int, inside: list[int], writers: list[int], quota: int
) -> ReplicaSplit:
    """Cuts at the rows nearest to the borders, along the first dimension whose rows are small enough.

    If a holder has several cells, `nbytes` in all, each is cut alike, so a row is that row of all of them.
    """
    grain = max(quota // 16, UNCUT_NBYTES)
    dim = next((d for d, n in enumerate(shape) if nbytes <= n * grain), shape.index(max(shape)))
    rows = shape[dim]
    cuts: list[int] = []
    kept: list[int] = [writers[0]]
    for border, writer in zip(inside, writers[1:], strict=False):
        row = (border * rows + nbytes // 2) // nbytes
        if row >= rows:
            break
        if row == (cuts[-1] if cuts else 0):
            kept[-1] = writer  # the part before would be empty
        else:
            cuts.append(row)
            kept.append(writer)
    return ReplicaSplit(dim, tuple(cuts), tuple(kept))


def _assign_boxes(leaf: ArrayLeaf, layout: BoxLayout, loads: dict[int, int]) -> BoxOwners:
    """Assigns each listed piece to a holder, and adds its bytes to the holder's load in `loads`."""
    whole = Region.whole(leaf.shape)
    holders: dict[Region, list[int]] = {}
    for rank, region in layout.pieces:
        legal = len(region.shape) == len(leaf.shape) and min(region.shape, default=0) >= 0
        if not legal or not region.within(whole):
            raise LayoutError(leaf.path, expected=f"pieces inside shape {leaf.shape}", found=f"rank {rank}: {region}")
        holders.setdefault(region, []).append(rank)
    if not whole.size and layout.pieces:
        return BoxOwners(((layout.pieces[0][0], whole),))
    regions = sorted(r for r in holders if r.size)
    # the usual pieces form a grid: they are disjoint and complete without comparing all pairs
    offsets = np.array([region.offset for region in regions], np.int64)
    ends = np.array([region.stop for region in regions], np.int64)
    regular = bool(leaf.shape and regions) and grid_of(leaf.shape, offsets, ends) is not None
    owned: list[tuple[int, Region]] = []
    for region, rest in ((r, [r]) for r in regions) if regular else _disjoint(regions):
        rank = min(holders[region], key=lambda r: (loads.get(r, 0), r))
        for piece in rest:
            loads[rank] = loads.get(rank, 0) + piece.size * leaf.itemsize
            owned.append((rank, piece))
    if not regular:
        _check_covered(leaf, [region for _, region in owned])
    return BoxOwners(tuple(sorted(owned, key=itemgetter(1))))


def _disjoint(regions: list[Region]) -> Iterator[tuple[Region, list[Region]]]:
    """Yields each region of a sorted list with the part of it that no earlier one holds."""
    for region, others in earlier_overlaps(regions):
        rest = [region]
        for other in others:
            rest = [piece for r in rest for piece in subtract(r, other)]
        yield region, rest


def overlapping_boxes(shape: tuple[int, ...], layout: BoxLayout) -> list[Region]:
    """Returns the boxes of an array that several of its listed pieces hold: whole pieces, or partial overlaps.

    For each piece that overlaps an earlier one, with every element that both hold, there is a box that lies inside of
    it and inside of the first piece that has the element.
    """
    held = [region for _, region in layout.pieces if region.size]
    if sum(region.size for region in held) <= math.prod(shape):
        return []  # they are disjoint, or leave a gap, which is refused
    found = {region for region, count in collections.Counter(held).items() if count > 1}
    distinct = sorted(set(held))
    if sum(region.size for region in distinct) > math.prod(shape):
        own = dict(_disjoint(distinct))
        for region, others in earlier_overlaps(distinct):
            shared = [intersect(region, part) for other in others for part in own[other]]
            found.update(box for box in shared if box is not None)
    return sorted(found)


def grid_of(
    shape: tuple[int, ...], offsets: np.ndarray, ends: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Returns starts and stops per dimension, if each cell between the borders of the regions is exactly one region.

    Args:
        shape: of an array of at least one dimension.
        offsets, ends: of at least one region, int64[n, ndim]; all have elements, and no two are equal.
    """
    starts: list[np.ndarray] = []
    stops: list[np.ndarray] = []
    for d, size in enumerate(shape):
        first = np.unique(offsets[:, d])
        last = np.append(first[1:], size)
        where = np.searchsorted(first, offsets[:, d])
        if first[0] != 0 or (last[where] != ends[:, d]).any():
            return None
        starts.append(first)
        stops.append(last)
    return (starts, stops) if math.prod(map(len, starts)) == len(offsets) else None


def _check_covered(leaf: ArrayLeaf, disjoint: list[Region]) -> None:
    covered = sum(region.size for region in disjoint)
    whole = Region.whole(leaf.shape)
    if covered == whole.size and disjoint:
        return
    gaps = [whole]
    for region in disjoint:
        gaps = [piece for gap in gaps for piece in subtract(gap, region)]
    gap = min(gaps)
    raise LayoutError(
        leaf.path,
        expected=f"pieces that cover all of shape {leaf.shape}",
        found=f"no rank holds offset {gap.offset}, shape {gap.shape}",
        hint="Every rank that holds a part, as of a DTensor, has to call save, without comm='alone'; of a piece in "
        "Sharded check the offset and the global shape",
    )


def writes_of(leaf: ArrayLeaf, assignment: Assignment, rank: int) -> list[Region]:
    """Returns the regions that one rank writes, by offset."""
    if leaf.per_rank is not None:
        return [Region.whole(leaf.shape)] if rank in decode_runs(leaf.per_rank) else []
    if isinstance(assignment, BoxOwners):
        return [region for r, region in assignment.pieces if r == rank]
    layout = leaf.layout
    assert isinstance(layout, MeshLayout)
    if not assignment.cuts and (writer := single_writer(layout, assignment.writers[0])) is not None:
        return [Region.whole(leaf.shape)] if rank == writer else []
    position = position_of(layout.mesh, rank)
    if position is None:
        return []
    if not leaf.nbytes:
        return [] if position else [Region.whole(leaf.shape)]
    replica = 0
    for n, stride, placement in zip(layout.mesh.shape, mesh_strides(layout.mesh), layout.placements, strict=True):
        if isinstance(placement, Replicate):
            replica = replica * n + position // stride % n
    if replica not in assignment.writers:
        return []
    held = [h.region for h in held_by(layout, leaf.shape, rank)]
    if assignment.cuts:
        held = _replica_parts(held, assignment, replica)
    return sorted(held) if len(held) > 1 else held


def _replica_parts(cells: list[Region], split: ReplicaSplit, replica: int) -> list[Region]:
    """Returns the parts of cells that one replica writes."""
    dim = split.dim
    bounds = (0, *split.cuts, 1 << 62)
    ranges = zip(bounds[:-1], bounds[1:], split.writers, strict=True)
    return [
        cell.replace_dim(dim, cell.offset[dim] + low, min(high, cell.shape[dim]) - low)
        for low, high, writer in ranges
        if writer == replica
        for cell in cells
        if low < cell.shape[dim]
    ]


def owners_of(leaf: ArrayLeaf, assignment: Assignment) -> Owners:
    """Returns the writers of one array, all ranks at once; the union of every rank's `writes_of`."""
    if isinstance(assignment, BoxOwners):
        return assignment
    layout = leaf.layout
    assert isinstance(layout, MeshLayout)
    ranks = mesh_ranks(layout.mesh)
    if not leaf.nbytes:
        return BoxOwners(((int(ranks[0]), Region.whole(leaf.shape)),))
    starts: list[np.ndarray] = []
    stops: list[np.ndarray] = []
    positions = np.zeros(1, np.int64)
    offsets = replica_offsets(layout)
    if not assignment.cuts:
        positions = positions + offsets[assignment.writers[0]]
    for dim in range(len(leaf.shape)):
        cells = cells_of(layout, leaf.shape, dim)
        first, last, holders = cells.starts, cells.stops, cells.holders
        if assignment.cuts and dim == assignment.dim:
            first, last, holders = _cut_cells(first, last, holders, assignment, offsets)
        starts.append(first)
        stops.append(last)
        positions = (positions[:, None] + holders).reshape(-1)
    return GridOwners(tuple(starts), tuple(stops), ranks[positions])


@lru_cache(maxsize=4096)
def single_writer(layout: Layout, replica: int) -> int | None:
    """Returns the rank that writes an uncut array whole, None if the layout shards it."""
    if isinstance(layout, BoxLayout) or not all(isinstance(p, Replicate) for p in layout.placements):
        return None
    return int(mesh_ranks(layout.mesh)[replica_offsets(layout)[replica]])


def _cut_cells(
    first: np.ndarray, last: np.ndarray, holders: np.ndarray, split: ReplicaSplit, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts every cell of one dimension into the replicas' parts, without empty ones: (starts, stops, holders)."""
    bounds = np.array([0, *split.cuts, 1 << 62], np.int64)
    low = np.minimum(first[:, None] + bounds[:-1], last[:, None]).reshape(-1)
    high = np.minimum(first[:, None] + np.minimum(bounds[1:], 1 << 61), last[:, None]).reshape(-1)
    holder = (holders[:, None] + offsets[list(split.writers)]).reshape(-1)
    filled = high > low
    return low[filled], high[filled], holder[filled]
