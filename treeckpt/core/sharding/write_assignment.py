"""Who writes what: every element of every array exactly once, replicas sharing the work by bytes.

Arrays whose replicas live on the same ranks form one long stream of bytes, which is cut into equal quotas, one per
replica; an array is cut only where a border between quotas falls into it, along the first dimension that is fine
enough. So the shares differ by no more than a row, the pieces are few, and the cuts depend on nothing but the global
layout: each rank finds its own writes in O(leaves), and the coordinator all ranks' at once, without talk.

Arrays with listed pieces (`BoxLayout`) are written piece by piece, equal pieces by the least loaded of their
holders; where pieces overlap in part, the one that comes first is written and the rest of the other.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

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
    coordinate_of,
    held_by,
    mesh_ranks,
    replicas,
)
from .region import Region, intersect, subtract

__all__ = [
    "ArrayLeaf",
    "Boxes",
    "Grid",
    "Owners",
    "Share",
    "as_grid",
    "assign",
    "grid_of",
    "held_twice",
    "lone_writer",
    "owners_of",
    "writes_of",
]

SMALL = 64 << 10
"""Bytes up to which an array is never cut."""
MIN_QUOTA = 1 << 20
"""Bytes below which it does not pay to have one more replica write."""


class ArrayLeaf(msgspec.Struct, frozen=True, gc=False):
    """An array to be placed: what planning needs to know of it."""

    path: str
    shape: tuple[int, ...]
    itemsize: int
    layout: Layout
    align: int = 0
    """Bytes to whose multiple an element must be aligned in the file; 0 is the itemsize."""
    per_rank: Runs | None = None
    """Set for a leaf of which each of these ranks has one of its own, of this shape."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Share(msgspec.Struct, frozen=True):
    """How replicas share an array: each cell is cut at `cuts` along `dim`, and part j of it goes to `writers[j]`."""

    dim: int
    cuts: tuple[int, ...]
    writers: tuple[int, ...]
    """Replica numbers, one more than there are cuts."""


class Boxes(msgspec.Struct, frozen=True):
    """Owners as a list: rank r writes region k. In order of the regions' offsets."""

    pieces: tuple[tuple[int, Region], ...]


class Grid(msgspec.Struct, frozen=True):
    """Owners as a grid: per dimension the cells' starts and stops; `ranks` in row-major order of the cells."""

    starts: tuple[np.ndarray, ...]
    stops: tuple[np.ndarray, ...]
    ranks: np.ndarray


Owners = Boxes | Grid
FIRST = Share(0, (), (0,))
"""The first replica writes everything."""


def assign(leaves: Sequence[ArrayLeaf]) -> list[Share | Boxes]:
    """Decides for each array how its holders share the writing.

    Raises:
        LayoutError: pieces leave a gap or stand outside of their array.
    """
    shares: list[Share | Boxes] = [FIRST] * len(leaves)
    streams: dict[bytes, list[int]] = {}
    loads: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.layout, BoxLayout):
            shares[i] = _assign_boxes(leaf, leaf.layout, loads)
        elif leaf.per_rank is None and lone_holder(leaf.layout) is None:
            check_layout(leaf.layout, leaf.shape, leaf.path)
            if len(replicas(leaf.layout)) > 1 and leaf.nbytes:
                streams.setdefault(_stream_key(leaf.layout), []).append(i)
    for members in streams.values():
        _assign_stream(leaves, members, shares)
    return shares


def _stream_key(layout: MeshLayout) -> bytes:
    """Equal for layouts whose replicas live on the same ranks: same mesh, same replicated dimensions."""
    held = tuple(isinstance(p, Replicate) for p in layout.placements)
    return msgspec.json.encode((layout.mesh.shape, layout.mesh.ranks, held))


def _nominal(leaf: ArrayLeaf) -> tuple[int, tuple[int, ...]]:
    """What the first holder has: its bytes, and the shape of its first cell, the largest one there is."""
    assert isinstance(leaf.layout, MeshLayout)
    held = held_by(leaf.layout, leaf.shape, int(mesh_ranks(leaf.layout.mesh)[0]))
    return sum(h.region.size for h in held) * leaf.itemsize, held[0].region.shape


def _assign_stream(leaves: Sequence[ArrayLeaf], members: list[int], shares: list[Share | Boxes]) -> None:
    first = leaves[members[0]].layout
    assert isinstance(first, MeshLayout)
    holders = len(replicas(first))
    nominal = [_nominal(leaves[i]) for i in members]
    total = sum(nbytes for nbytes, _ in nominal)
    parts = max(1, min(holders, total // MIN_QUOTA))
    writer = [part * holders // parts for part in range(parts)]
    start = 0
    for i, (n, shape) in zip(members, nominal, strict=True):
        # borders between quotas strictly inside this array
        low, high = start * parts // total, -(-(start + n) * parts // total)
        inside = [total * k // parts - start for k in range(low + 1, high)]
        if n <= SMALL or not inside or not shape:
            shares[i] = Share(0, (), (writer[min((start + n // 2) * parts // total, parts - 1)],))
        else:
            shares[i] = _cut(shape, n, inside, writer[low:high], total // parts)
        start += n


def _cut(shape: tuple[int, ...], nbytes: int, inside: list[int], writers: list[int], quota: int) -> Share:
    """Cuts at the rows nearest to the borders, along the first dimension whose rows are fine enough.

    A holder of several cells, `nbytes` in all, has each of them cut alike, so a row is that row of all of them.
    """
    grain = max(quota // 16, SMALL)
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
    return Share(dim, tuple(cuts), tuple(kept))


def _assign_boxes(leaf: ArrayLeaf, layout: BoxLayout, loads: dict[int, int]) -> Boxes:
    whole = Region.whole(leaf.shape)
    holders: dict[Region, list[int]] = {}
    for rank, region in layout.pieces:
        legal = len(region.shape) == len(leaf.shape) and min(region.shape, default=0) >= 0
        if not legal or not region.within(whole):
            raise LayoutError(leaf.path, expected=f"pieces inside shape {leaf.shape}", found=f"rank {rank}: {region}")
        holders.setdefault(region, []).append(rank)
    if not whole.size and layout.pieces:
        return Boxes(((layout.pieces[0][0], whole),))
    regions = sorted(r for r in holders if r.size)
    # the usual pieces make a grid: disjoint and complete without comparing each with each
    regular = as_grid(leaf.shape, regions) is not None
    owned: list[tuple[int, Region]] = []
    for region, rest in ((r, [r]) for r in regions) if regular else _disjoint(regions):
        rank = min(holders[region], key=lambda r: (loads.get(r, 0), r))
        for piece in rest:
            loads[rank] = loads.get(rank, 0) + piece.size * leaf.itemsize
            owned.append((rank, piece))
    if not regular:
        _check_covered(leaf, [region for _, region in owned])
    return Boxes(tuple(sorted(owned, key=lambda piece: piece[1])))


def _disjoint(regions: list[Region]) -> Iterator[tuple[Region, list[Region]]]:
    """Each region, of a sorted list, with what of it no earlier one holds."""
    active: list[Region] = []
    for region in regions:
        active = [r for r in active if not r.shape or r.offset[0] + r.shape[0] > region.offset[0]]
        rest = [region]
        for other in active:
            rest = [piece for r in rest for piece in subtract(r, other)]
        active.append(region)
        yield region, rest


def held_twice(shape: tuple[int, ...], layout: BoxLayout) -> list[Region]:
    """Boxes of an array that several of its listed pieces hold: whole pieces, or where they overlap in part.

    For each piece that overlaps an earlier one, with every element that both hold, there is a box that lies inside of
    it and inside of the first piece that has the element.
    """
    held = [region for _, region in layout.pieces if region.size]
    if sum(region.size for region in held) <= math.prod(shape):
        return []  # they are apart, or leave a gap, which is refused
    found = {region for region, count in collections.Counter(held).items() if count > 1}
    distinct = sorted(set(held))
    if sum(region.size for region in distinct) > math.prod(shape):
        active: list[tuple[Region, list[Region]]] = []
        for region, rest in _disjoint(distinct):
            active = [(r, own) for r, own in active if not r.shape or r.stop[0] > region.offset[0]]
            shared = [intersect(region, part) for _, own in active for part in own]
            found.update(box for box in shared if box is not None)
            active.append((region, rest))
    return sorted(found)


def as_grid(shape: tuple[int, ...], regions: Sequence[Region]) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Starts and stops per dimension, if every cell between the borders of the regions is exactly one of them.

    Args:
        regions: with elements, no two alike, sorted.
    """
    if not shape or not regions:
        return None
    offsets = np.array([region.offset for region in regions], np.int64)
    return grid_of(shape, offsets, offsets + np.array([region.shape for region in regions], np.int64))


def grid_of(
    shape: tuple[int, ...], offsets: np.ndarray, ends: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """As `as_grid`, of regions as int64[n, ndim], where there are any."""
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
        hint="Check the offsets and the global shape given to Sharded",
    )


def writes_of(leaf: ArrayLeaf, share: Share | Boxes, rank: int) -> list[Region]:
    """The regions that one rank writes, by offset."""
    if leaf.per_rank is not None:
        return [Region.whole(leaf.shape)] if rank in decode_runs(leaf.per_rank) else []
    if isinstance(share, Boxes):
        return [region for r, region in share.pieces if r == rank]
    layout = leaf.layout
    assert isinstance(layout, MeshLayout)
    if not share.cuts and (lone := lone_writer(layout, share.writers[0])) is not None:
        return [Region.whole(leaf.shape)] if rank == lone else []
    coordinate = coordinate_of(layout.mesh, rank)
    if coordinate is None:
        return []
    if not leaf.nbytes:
        return [Region.whole(leaf.shape)] if not any(coordinate) else []
    replica = 0
    for c, n, placement in zip(coordinate, layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, Replicate):
            replica = replica * n + c
    if replica not in share.writers:
        return []
    held = [h.region for h in held_by(layout, leaf.shape, rank)]
    if share.cuts:
        held = _parts(held, share, replica)
    return sorted(held) if len(held) > 1 else held


def _parts(cells: list[Region], share: Share, replica: int) -> list[Region]:
    parts: list[Region] = []
    bounds = (0, *share.cuts, 1 << 62)
    for low, high, writer in zip(bounds[:-1], bounds[1:], share.writers, strict=True):
        if writer != replica:
            continue
        for cell in cells:
            start, n = cell.offset[share.dim], cell.shape[share.dim]
            offset, shape = list(cell.offset), list(cell.shape)
            offset[share.dim], shape[share.dim] = start + low, min(high, n) - low
            part = intersect(cell, Region(tuple(offset), tuple(shape)))
            if part is not None:
                parts.append(part)
    return parts


def owners_of(leaf: ArrayLeaf, share: Share | Boxes) -> Owners:
    """Who writes what of one array, all ranks at once; the union of every rank's `writes_of`."""
    if isinstance(share, Boxes):
        return share
    layout = leaf.layout
    assert isinstance(layout, MeshLayout)
    ranks = mesh_ranks(layout.mesh)
    if not leaf.nbytes:
        return Boxes(((int(ranks[0]), Region.whole(leaf.shape)),))
    starts: list[np.ndarray] = []
    stops: list[np.ndarray] = []
    positions = np.zeros(1, np.int64)
    offsets = replicas(layout)
    if not share.cuts:
        positions = positions + offsets[share.writers[0]]
    for dim in range(len(leaf.shape)):
        cells = cells_of(layout, leaf.shape, dim)
        first, last, holders = cells.starts, cells.stops, cells.holders
        if share.cuts and dim == share.dim:
            first, last, holders = _cut_cells(first, last, holders, share, offsets)
        starts.append(first)
        stops.append(last)
        positions = (positions[:, None] + holders).reshape(-1)
    return Grid(tuple(starts), tuple(stops), ranks[positions])


@lru_cache(maxsize=4096)
def lone_writer(layout: Layout, replica: int) -> int | None:
    """The rank that writes an uncut array whole, None if the layout cuts it up."""
    if isinstance(layout, BoxLayout) or not all(isinstance(p, Replicate) for p in layout.placements):
        return None
    return int(mesh_ranks(layout.mesh)[replicas(layout)[replica]])


@lru_cache(maxsize=4096)
def lone_holder(layout: MeshLayout) -> int | None:
    """The only rank that holds an array, None if others hold it or parts of it too."""
    return int(mesh_ranks(layout.mesh)[0]) if len(mesh_ranks(layout.mesh)) == 1 else None


def _cut_cells(
    first: np.ndarray, last: np.ndarray, holders: np.ndarray, share: Share, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every cell of one dimension cut into the replicas' parts, empty ones dropped."""
    bounds = np.array([0, *share.cuts, 1 << 62], np.int64)
    low = np.minimum(first[:, None] + bounds[:-1], last[:, None]).reshape(-1)
    high = np.minimum(first[:, None] + np.minimum(bounds[1:], 1 << 61), last[:, None]).reshape(-1)
    holder = (holders[:, None] + offsets[list(share.writers)]).reshape(-1)
    filled = high > low
    return low[filled], high[filled], holder[filled]
