"""The save plan: which rank writes which elements, in which order, and so where every chunk of every rank starts.

Every element of every array is written exactly once; replicas share the work by bytes. Arrays whose replicas are on the
same ranks form one long stream of bytes, which is cut into equal quotas, one per replica; an array is cut only where a
border between quotas falls into it, along the first dimension whose rows are small enough. So the quotas differ by no
more than a row, the pieces are few, and the cuts depend only on the global layout: each rank finds its own writes in
O(leaves), and the coordinator those of all ranks at once, without messages. Arrays with listed pieces (`BoxLayout`) are
written piece by piece, equal pieces by the least loaded of their holders; of pieces that overlap in part, the first one
is written whole and of the next ones what is left.

Arrays that stay the same from save to save can be in groups, see `format.references`: each has files of its own, which
come last. In a file the entries whose bytes fill whole pages come first, then whole cache lines, then by descending
alignment, so that without holes everything is aligned as far as possible; within a class, the order is that of the
leaves. `plan_save` cuts the entries of one rank into files; `assign_offsets` finds all ranks' offsets at once, for the
index. `compute_plan` does all of it from the global tree.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from operator import itemgetter

import msgspec
import numpy as np

from ...errors import LayoutError, TreeError
from ..sharding.dtypes import dtype_of
from ..sharding.int_runs import Runs, decode_runs, encode_runs
from ..sharding.placements import (
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
    replicated_layout,
)
from ..sharding.region import MAX_NDIM, Region, earlier_overlaps, intersect, subtract
from ..tree.structure import table_columns
from .rank_trees import GlobalTree, LeafSpec

# who writes what ------------------------------------------------------------------------------------------------------

UNCUT_NBYTES = 64 << 10
"""The bytes up to which an array is never cut."""
MIN_QUOTA = 1 << 20
"""The bytes for which one more replica does not write: a smaller quota costs more than it saves."""


class ArrayLeaf(msgspec.Struct, frozen=True, gc=False):
    """The description of an array from which writes are planned."""

    path: str
    shape: tuple[int, ...]
    itemsize: int
    layout: Layout
    align: int = 0
    """The alignment of an element in the file, in bytes; 0 is the itemsize."""
    per_rank: Runs | None = None
    """The ranks that each have an array of their own of this shape under this path; None for any other array."""
    group: int = 0
    """The group of arrays that stay the same, which has files of its own; 0 for none."""
    frozen: bool = False
    """Whether the tree says that it is not trained."""
    table: int = 0
    """The number of the keyed table, or of the delta of one, of which it is a column; 0 for no column."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def array_leaves(tree: GlobalTree) -> list[tuple[int, ArrayLeaf]]:
    """Returns the arrays to be written, each with its number among all leaves.

    Raises:
        TreeError: an array has too many dimensions.
    """
    found: list[tuple[int, ArrayLeaf]] = []
    tables = table_columns(tree.structure)
    for number, leaf in enumerate(tree.leaves):
        if leaf.spec is None or leaf.alias_of is not None:
            continue
        if len(leaf.spec.shape) > MAX_NDIM:
            ndim = len(leaf.spec.shape)
            raise TreeError(leaf.path, expected=f"arrays of at most {MAX_NDIM} dimensions", found=f"{ndim}")
        dtype, shape = dtype_of(leaf.spec.dtype), leaf.spec.shape
        layout = leaf.layout or replicated_layout(leaf.per_rank or ())
        align = dtype.itemsize // dtype.parts
        frozen = leaf.spec.kind == "parameter" and not leaf.spec.requires_grad
        table = tables.get(leaf.path, 0)
        own = ArrayLeaf(leaf.path, shape, dtype.itemsize, layout, align, leaf.per_rank, frozen=frozen, table=table)
        found.append((number, own))
    return found


class ReplicaSplit(msgspec.Struct, frozen=True):
    """The split of an array among its replicas: each cell is cut at `cuts` along `dim`; `writers[j]` writes part j."""

    dim: int
    cuts: tuple[int, ...]
    writers: tuple[int, ...]
    """The numbers of the replicas that write, one more than there are cuts."""


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
    loads: dict[int, dict[int, int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.layout, BoxLayout):
            # as below, each group by itself
            assignments[i] = _assign_boxes(leaf, leaf.layout, loads.setdefault(leaf.group, {}))
        elif leaf.per_rank is None and len(mesh_ranks(leaf.layout.mesh)) > 1:
            check_layout(leaf.layout, leaf.shape, leaf.path)
            if len(replica_offsets(leaf.layout)) > 1 and leaf.nbytes:
                # replicas are on the same ranks where the mesh and its replicated dimensions are equal
                replicated = tuple(isinstance(p, Replicate) for p in leaf.layout.placements)
                mesh = leaf.layout.mesh
                # the arrays of a group are written, or not, together: each group is shared out by itself
                key = msgspec.json.encode((mesh.shape, mesh.ranks, replicated, leaf.group))
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
    # where not all holders write, those that do are spread evenly over them
    writer = [part * holders // parts for part in range(parts)]
    start = 0
    for i, (n, shape) in zip(members, nominal, strict=True):
        # borders between quotas strictly inside this array
        low, high = start * parts // total, -(-(start + n) * parts // total)
        inside = [total * k // parts - start for k in range(low + 1, high)]
        # an array that is not cut goes to the part in which its middle lies
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
    # quotas differ by up to a row, so a row is to be small beside a quota
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
    # an array without elements is one chunk, of the first rank that lists a piece
    if not whole.size and layout.pieces:
        return BoxOwners(((layout.pieces[0][0], whole),))
    regions = sorted(r for r in holders if r.size)
    # the usual pieces form a grid: they are disjoint and complete without comparing all pairs
    offsets = np.array([region.offset for region in regions], np.int64)
    ends = np.array([region.stop for region in regions], np.int64)
    regular = bool(leaf.shape and regions) and grid_of(leaf.shape, offsets, ends) is not None
    owned: list[tuple[int, Region]] = []
    for region, rest in ((r, [r]) for r in regions) if regular else _disjoint(regions):
        # the number of the rank decides between equal loads: every rank has to find the same writer
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


def overlapping_pieces(tree: GlobalTree) -> list[tuple[str, Region, int]]:
    """Returns (path, box, bytes) of each box that several listed pieces of an array hold."""
    found: list[tuple[str, Region, int]] = []
    for leaf in tree.leaves:
        if leaf.spec is not None and leaf.alias_of is None and isinstance(leaf.layout, BoxLayout):
            itemsize = dtype_of(leaf.spec.dtype).itemsize
            found += [(leaf.path, box, box.size * itemsize) for box in overlapping_boxes(leaf.spec.shape, leaf.layout)]
    return found


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
    # an array without elements is one chunk, of the first rank of its mesh
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
    # the last part ends with the cell, whose length differs from rank to rank
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


# in which order -------------------------------------------------------------------------------------------------------

PAGE_SIZE = 4096
CACHE_LINE = 64
ORDER_CLASSES = 7
"""The number of classes in a group: pages, cache lines, then alignments 16, 8, 4, 2, 1."""


def order_class(nbytes: int, align: int) -> int:
    """Returns the number of the class of an entry, by its bytes and the alignment of its elements."""
    if nbytes % PAGE_SIZE == 0:
        return 0
    if nbytes % CACHE_LINE == 0:
        return 1
    # the largest power of two that divides the alignment: elements of 12 bytes lie at multiples of 4
    return 7 - min(align & -align, 16).bit_length()


def order_classes(nbytes: np.ndarray, align: int) -> np.ndarray:
    """As `order_class`, of entries with one alignment: int64[n]."""
    unaligned = order_class(1, align)
    return np.where(nbytes % PAGE_SIZE == 0, 0, np.where(nbytes % CACHE_LINE == 0, 1, unaligned))


class SingleWriterArray(msgspec.Struct, frozen=True, gc=False):
    """An array that one rank writes whole: by far the most common kind, handled without numpy."""

    rank: int
    order: int
    nbytes: int
    region: Region


def single_writer_arrays(
    leaves: Sequence[ArrayLeaf], assignments: Sequence[Assignment]
) -> list[SingleWriterArray | None]:
    """Returns a `SingleWriterArray` for each array that one rank writes whole, None for any other.

    Arrays with equal descriptions share one object. Layouts are compared as objects, by `id`: most leaves share one,
    and hashing it would take longer than all the rest.
    """
    known: dict[tuple[object, ...], SingleWriterArray | None] = {}
    found: list[SingleWriterArray | None] = []
    for leaf, assignment in zip(leaves, assignments, strict=True):
        if leaf.per_rank is not None or isinstance(assignment, BoxOwners) or assignment.cuts:
            found.append(None)
            continue
        replica = assignment.writers[0]
        key = (leaf.shape, leaf.itemsize, leaf.align, replica, id(leaf.layout), leaf.group)
        if key not in known:
            rank, nbytes = single_writer(leaf.layout, replica), leaf.nbytes
            order = order_class(nbytes, leaf.align or leaf.itemsize) + ORDER_CLASSES * leaf.group
            region = Region.whole(leaf.shape)
            known[key] = SingleWriterArray(rank, order, nbytes, region) if rank is not None else None
        found.append(known[key])
    return found


# one rank -------------------------------------------------------------------------------------------------------------


class PlannedEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a shard: a region of a leaf, and where its bytes start in the file's data area."""

    leaf: int
    region: Region
    start: int
    nbytes: int


class FilePlan(msgspec.Struct, frozen=True):
    """One shard of a rank: its entries in order."""

    part: int
    stream: int
    """Where the file starts in the stream of all the rank's data bytes."""
    nbytes: int
    writes: tuple[PlannedEntry, ...]
    group: int = 0
    """The group whose arrays it holds; 0 for those that are in none."""


def files_without(files: Sequence[FilePlan], parts: Collection[int]) -> list[FilePlan]:
    """Returns the files that have none of these parts."""
    return [file for file in files if file.part not in parts]


class SavePlan(msgspec.Struct, frozen=True):
    """All files that one rank writes."""

    rank: int
    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def plan_save(
    leaves: Sequence[ArrayLeaf], assignments: Sequence[Assignment], rank: int, *, max_shard_bytes: int = 1 << 62
) -> SavePlan:
    """Plans what `rank` writes: entries by group and alignment, in files of at most `max_shard_bytes`.

    An entry that is larger than `max_shard_bytes` stands alone in its file. The first file holds no group.
    """
    classes: list[list[tuple[int, Region, int]]] = [[] for _ in range(_class_count(leaves))]
    for i, (leaf, single) in enumerate(zip(leaves, single_writer_arrays(leaves, assignments), strict=True)):
        if single is not None:
            if single.rank == rank:
                classes[single.order].append((i, single.region, single.nbytes))
            continue
        for region in writes_of(leaf, assignments[i], rank):
            nbytes = region.size * leaf.itemsize
            order = order_class(nbytes, leaf.align or leaf.itemsize) + ORDER_CLASSES * leaf.group
            classes[order].append((i, region, nbytes))
    files: list[FilePlan] = []
    writes: list[PlannedEntry] = []
    stream = filled = group = 0
    for order, entries in enumerate(classes):
        for i, region, nbytes in entries:
            before, group = group, order // ORDER_CLASSES
            if (writes and filled + nbytes > max_shard_bytes) or group != before:
                files.append(FilePlan(len(files), stream, filled, tuple(writes), before))
                stream, filled, writes = stream + filled, 0, []
            writes.append(PlannedEntry(i, region, filled, nbytes))
            filled += nbytes
    if writes or not files:
        files.append(FilePlan(len(files), stream, filled, tuple(writes), group))
    return SavePlan(rank, tuple(files))


def _class_count(leaves: Sequence[ArrayLeaf]) -> int:
    """Returns the number of classes of all groups."""
    return ORDER_CLASSES * (1 + max((leaf.group for leaf in leaves), default=0))


# all ranks ------------------------------------------------------------------------------------------------------------


class ShardedArray(msgspec.Struct, frozen=True):
    """An array of several chunks, or one of each rank. Of each chunk: its writer, its order class, its bytes."""

    ranks: np.ndarray
    owners: Owners
    orders: np.ndarray
    sizes: np.ndarray


class ChunkOffsets(msgspec.Struct, frozen=True):
    """The chunks of one array: their writers, and where each starts in its writer's stream of data bytes.

    For a leaf that each rank has of its own: one number per rank, in the order of the ranks.
    """

    owners: Owners
    starts: np.ndarray


class SingleChunkOffset(msgspec.Struct, frozen=True, gc=False):
    """The chunk of an array that is one chunk: its writer, and where it starts in that rank's stream of data bytes."""

    rank: int
    start: int


def assign_offsets(
    leaves: Sequence[ArrayLeaf], assignments: Sequence[Assignment], world: int
) -> tuple[list[ChunkOffsets | SingleChunkOffset], np.ndarray]:
    """Returns the offsets that every rank's `plan_save` gives to its chunks, without building those plans.

    Two passes over the leaves, vectorised over ranks: the first sums bytes per rank and order class, the second assigns
    offsets.

    Returns:
        (the chunks of each array, bytes that each rank writes: int64[world]).
    """
    singles = single_writer_arrays(leaves, assignments)
    arrays = [
        single or _sharded_array(leaf, assignment)
        for single, leaf, assignment in zip(singles, leaves, assignments, strict=True)
    ]
    # Python integers for arrays with a single writer: numpy on one element costs ten times as much
    sums = [[0] * world for _ in range(_class_count(leaves))]
    totals = np.zeros((len(sums), world), np.int64)
    for array in arrays:
        if isinstance(array, SingleWriterArray):
            sums[array.order][array.rank] += array.nbytes
        else:
            np.add.at(totals, (array.orders, array.ranks), array.sizes)
    totals += np.array(sums, np.int64)
    offsets = np.cumsum(totals, axis=0) - totals
    # within a class of a rank, all chunks follow the order of the leaves: a mixture of both kinds is counted in numpy
    if None in singles:
        return _assign_mixed_offsets(arrays, offsets), totals.sum(0)
    free = offsets.tolist()
    assigned: list[ChunkOffsets | SingleChunkOffset] = []
    for array in arrays:
        assert isinstance(array, SingleWriterArray), "there are no others"
        starts = free[array.order]
        assigned.append(SingleChunkOffset(array.rank, starts[array.rank]))
        starts[array.rank] += array.nbytes
    return assigned, totals.sum(0)


def _assign_mixed_offsets(
    arrays: Sequence[SingleWriterArray | ShardedArray], free: np.ndarray
) -> list[ChunkOffsets | SingleChunkOffset]:
    """Assigns offsets from `free[order class, rank]`, the first free offsets, which it advances."""
    assigned: list[ChunkOffsets | SingleChunkOffset] = []
    for array in arrays:
        if isinstance(array, SingleWriterArray):
            assigned.append(SingleChunkOffset(array.rank, int(free[array.order, array.rank])))
            free[array.order, array.rank] += array.nbytes
        else:
            assigned.append(ChunkOffsets(array.owners, _allocate(free, array)))
    return assigned


def _allocate(free: np.ndarray, array: ShardedArray) -> np.ndarray:
    """Returns offsets for the chunks of one array; a rank's second chunk in a class comes after its first."""
    slots = array.orders * free.shape[1] + array.ranks
    flat = free.reshape(-1)
    # `flat[slots] += ...` adds once only to a slot that occurs twice
    if np.bincount(array.ranks).max(initial=0) <= 1:
        starts = flat[slots]
        flat[slots] += array.sizes
        return starts
    order = np.argsort(slots, kind="stable")
    starts = np.empty(len(slots), np.int64)
    starts[order] = flat[slots[order]] + _bytes_before(slots[order], array.sizes[order])
    np.add.at(flat, slots, array.sizes)
    return starts


def _sharded_array(leaf: ArrayLeaf, assignment: Assignment) -> ShardedArray:
    if leaf.per_rank is not None:
        ranks = decode_runs(leaf.per_rank)
        sizes = np.full(len(ranks), leaf.nbytes, np.int64)
        owners: Owners = BoxOwners(())
    else:
        owners = owners_of(leaf, assignment)
        if isinstance(owners, BoxOwners):
            ranks = np.array([rank for rank, _ in owners.pieces], np.int64)
            sizes = np.array([region.size for _, region in owners.pieces], np.int64) * leaf.itemsize
        else:
            ranks = owners.ranks
            sizes = np.full(1, leaf.itemsize, np.int64)
            for first, last in zip(owners.starts, owners.stops, strict=True):
                sizes = (sizes[:, None] * (last - first)).reshape(-1)
    orders = order_classes(sizes, leaf.align or leaf.itemsize) + ORDER_CLASSES * leaf.group
    return ShardedArray(ranks, owners, orders, sizes)


def stream_offsets(ranks: np.ndarray, classes: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Returns where entries, in the order of the leaves, start in their rank's stream of data bytes: int64[n]."""
    # this sort is stable: within a class the order of the leaves stays
    order = np.lexsort((classes, ranks))
    starts = np.empty(len(ranks), np.int64)
    starts[order] = _bytes_before(ranks[order], nbytes[order])
    return starts


def _bytes_before(groups: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the sum of the sizes before each entry in its group; the entries of a group are neighbours."""
    before = np.cumsum(sizes) - sizes
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    return before - np.repeat(before[first], np.diff(np.append(first, len(groups))))


# the whole plan -------------------------------------------------------------------------------------------------------

Placement = tuple[dict[int, ChunkOffsets | SingleChunkOffset], list[int]]
"""The chunks of each array by its leaf's number, and the bytes that each rank writes."""


# `dict` gives `cached_property` a place for its result
class GlobalPlan(msgspec.Struct, frozen=True, dict=True):
    """What every rank writes: computed from the global tree alone, equal on all ranks but for `own`."""

    key: str
    """The digest of all ranks' inventories."""
    max_shard_bytes: int
    global_tree: GlobalTree
    arrays: list[tuple[int, ArrayLeaf]]
    """The arrays to be written, each with its leaf's number."""
    shares: list[Assignment]
    """The decision which rank writes which part, for each array."""
    own: SavePlan
    """The files of this rank."""
    groups: tuple[int, ...] = ()
    """The group of each array, see `format.references`; empty where no save is incremental."""

    @cached_property
    def group_runs(self) -> Runs:
        """The groups, encoded."""
        return encode_runs(self.groups)

    @cached_property
    def placement(self) -> Placement:
        """Where each chunk of all ranks starts, and how many bytes each rank writes."""
        placed, totals = assign_offsets([leaf for _, leaf in self.arrays], self.shares, self.global_tree.world)
        numbers = (number for number, _ in self.arrays)
        return dict(zip(numbers, placed, strict=True)), totals.tolist()

    def leaf(self, number: int) -> LeafSpec:
        """Returns the leaf of an array, by the array's number."""
        return self.global_tree.leaves[self.arrays[number][0]]


def compute_plan(
    key: str, global_tree: GlobalTree, rank: int, max_shard_bytes: int, groups: Sequence[int] = ()
) -> GlobalPlan:
    """Computes the plan of a global tree, the same in every process; raises LayoutError as `assign_writers`."""
    arrays = array_leaves(global_tree)
    if groups:
        arrays = [(n, msgspec.structs.replace(a, group=g)) for (n, a), g in zip(arrays, groups, strict=True)]
    leaves = [leaf for _, leaf in arrays]
    shares = assign_writers(leaves)
    own = plan_save(leaves, shares, rank, max_shard_bytes=max_shard_bytes)
    return GlobalPlan(key, max_shard_bytes, global_tree, arrays, shares=shares, own=own, groups=tuple(groups))
