"""Finds arrays to fill that share memory, and compares the bytes that each would write there.

Address ranges are compared by sorting, which costs next to nothing where none overlap. For arrays that share memory,
the new content is read into temporary buffers, a few blocks at a time, and compared byte by byte. Strided arrays whose
elements interleave, as columns of one matrix, share no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, flat_regions, overlapping_groups, tiles
from .._core.tree.spec import ArraySpec
from ..errors import MismatchError
from .base import ArrayTarget, HostArray, HostMemory, StridedMemory, TargetPiece, raw_dtype

MAX_OVERLAP_STEPS = 1_000_000
"""The steps of numpy's search for a shared element of two strided arrays; after these they count as overlapping."""

FillTargets = Callable[[Sequence[tuple[int, Sequence[TargetPiece]]]], None]
"""Writes the new content of numbered targets into other pieces of the same arrays."""


class Overlap(msgspec.Struct, frozen=True):
    """Parts of two targets with bytes in common."""

    numbers: tuple[int, int]
    regions: tuple[tuple[Region, ...], tuple[Region, ...]]
    """The regions to read of each target, in the order of their bytes."""
    itemsizes: tuple[int, int]
    skip: tuple[int, int] = (0, 0)
    """The number of bytes before the common ones."""
    nbytes: int = -1
    """The number of common bytes; -1 for all."""
    windows: tuple[StridedMemory, StridedMemory] | None = None
    """The addresses of both, if the common bytes are no contiguous range."""


def _windows(target: ArrayTarget) -> list[tuple[Region, StridedMemory]]:
    """Returns the pieces whose addresses are known."""
    found = [(piece.region, getattr(piece.data, "window", None)) for piece in target.pieces]
    return [(region, window) for region, window in found if window is not None and region.size]


def _extent(target: ArrayTarget) -> tuple[int, int]:
    if len(target.pieces) == 1 and isinstance(memory := target.pieces[0].data, HostMemory):
        return memory.address, memory.address + memory.nbytes
    extents = [window.extent for _, window in _windows(target)]
    return min((low for low, _ in extents), default=0), max((high for _, high in extents), default=0)


def overlapping_pairs(targets: Sequence[ArrayTarget]) -> Iterator[tuple[int, int]]:
    """Yields pairs of targets that may write to the same memory, by number, the smaller first.

    Of several with exactly the same memory each is paired with the first, and the first with all others.
    """
    extents = [_extent(target) for target in targets]
    for group in overlapping_groups([low for low, _ in extents], [high for _, high in extents]):
        firsts: dict[object, int] = {}
        for number in sorted(group):
            windows = tuple(_windows(targets[number]))
            if (first := firsts.setdefault(windows, number)) != number:
                yield first, number
        active: list[int] = []
        for number in sorted(firsts.values(), key=lambda n: extents[n]):
            active = [other for other in active if extents[other][1] > extents[number][0]]
            yield from ((min(other, number), max(other, number)) for other in active)
            active.append(number)


def in_same_memory(first: ArrayTarget, second: ArrayTarget) -> bool:
    """Returns whether the same regions of two targets are in the same memory."""
    return _windows(first) == _windows(second)


def memory_key(target: ArrayTarget) -> object:
    """Returns a key that is equal for arrays with the same memory for each element; None if it is not known."""
    found = tuple(_windows(target))
    return (target.spec.shape, target.spec.dtype, found) if found and len(found) == len(target.pieces) else None


def overlaps_of(targets: Sequence[ArrayTarget], pair: tuple[int, int], limit: int) -> Iterator[Overlap]:
    """Yields the parts that two targets would both write.

    Args:
        limit: bytes of a part, at most; where the common bytes are no contiguous range, it is as long as the pieces.
    """
    left, right = (_windows(targets[number]) for number in pair)
    alike = [window for _, window in left] == [window for _, window in right]
    for i, (a, p) in enumerate(left):
        for j, (b, q) in enumerate(right):
            if alike and i != j:
                continue  # pieces of one array do not overlap
            if p == q or (p.in_c_order and q.in_c_order):
                yield from _contiguous_overlaps(pair, (a, b), (p, q), limit)
            elif _overlap(p, q):
                yield Overlap(pair, ((a,), (b,)), (p.itemsize, q.itemsize), windows=(p, q))


def _overlap(p: StridedMemory, q: StridedMemory) -> bool:
    (a, b), (c, d) = p.extent, q.extent
    if b <= c or d <= a:
        return False
    try:
        return np.shares_memory(np.asarray(p), np.asarray(q), max_work=MAX_OVERLAP_STEPS)  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True


def _contiguous_overlaps(
    pair: tuple[int, int], regions: tuple[Region, Region], windows: tuple[StridedMemory, StridedMemory], limit: int
) -> Iterator[Overlap]:
    """Yields the parts that two arrays in C order, or one array, have in common."""
    p, q = windows
    sizes = [region.size * window.itemsize for region, window in zip(regions, windows, strict=True)]
    low, high = max(p.address, q.address), min(p.address + sizes[0], q.address + sizes[1])
    step = max(limit, 1)
    for start in range(low, high, step):
        stop = min(start + step, high)
        parts = [
            _cover(region, window.itemsize, start - window.address, stop - window.address)
            for region, window in zip(regions, windows, strict=True)
        ]
        skip = parts[0][1], parts[1][1]
        yield Overlap(pair, (parts[0][0], parts[1][0]), (p.itemsize, q.itemsize), skip, stop - start)


def _cover(region: Region, itemsize: int, low: int, high: int) -> tuple[tuple[Region, ...], int]:
    """Returns the boxes that hold bytes `low:high` of a region's elements, and their number of bytes before these."""
    first, last = low // itemsize, -(-high // itemsize)
    boxes = flat_regions(region.shape, first, last)
    return tuple(box.shifted(region.offset) for box in boxes), low - first * itemsize


def conflicting_pair(
    targets: Sequence[ArrayTarget], is_one: Callable[[int, int], bool], fill: FillTargets, limit: int
) -> tuple[int, int] | None:
    """Returns two targets, by number, that would write different bytes to one address; None if there are none.

    Twice the same number: two pieces of one target would.

    Args:
        is_one: whether two targets take the same bytes, which need not be compared then.
        fill: reads the new content of targets.
        limit: bytes to read at a time; a longer part is read alone.
    """
    numbered = [(number, part) for number, target in enumerate(targets) for part in _disjoint_parts(target)]
    owners, parts = [number for number, _ in numbered], [part for _, part in numbered]

    def differ(first: int, second: int) -> bool:
        return first == second or not is_one(first, second)

    pairs = (pair for pair in overlapping_pairs(parts) if differ(*(owners[number] for number in pair)))
    overlaps = (overlap for pair in pairs for overlap in overlaps_of(parts, pair, limit // 2))
    found = _first_difference(
        overlaps, lambda wanted: fill([(owners[number], pieces) for number, pieces in wanted]), limit
    )
    return None if found is None else (owners[found[0]], owners[found[1]])


def _disjoint_parts(target: ArrayTarget) -> list[ArrayTarget]:
    """Returns a target as it is, or one for each of its pieces where their address ranges overlap."""
    if len(target.pieces) < 2 or target.layout is not None:
        return [target]
    extents = [window.extent for _, window in _windows(target)]
    if not overlapping_groups([low for low, _ in extents], [high for _, high in extents]):
        return [target]
    return [msgspec.structs.replace(target, pieces=(piece,)) for piece in target.pieces]


def pieces_in_one_place(path: str) -> MismatchError:
    """Returns the error of an array of which pieces with different content share memory in the target."""
    return MismatchError(
        path,
        expected="memory of its own for each piece of the target, but for what pieces have in common",
        found="pieces that share memory, and other bytes for each",
        hint="Check the offsets given to tc.Sharded, and that each piece is an array of its own",
    )


def _first_difference(overlaps: Iterable[Overlap], fill: FillTargets, limit: int) -> tuple[int, int] | None:
    """Returns the first pair of targets with different bytes in an overlap, of which `limit` bytes are read at once."""
    batch: list[Overlap] = []
    size = 0
    for overlap in overlaps:
        batch.append(overlap)
        size += sum(r.size * n for part, n in zip(overlap.regions, overlap.itemsizes, strict=True) for r in part)
        if size >= limit:
            if (found := _difference_in(batch, fill)) is not None:
                return found
            batch, size = [], 0
    return _difference_in(batch, fill)


def is_equal(spec: ArraySpec, fill: FillTargets, limit: int) -> bool:
    """Returns whether targets 0 and 1 have the same new content, in the regions and the dtype of a spec."""
    itemsize = dtype_of(spec.dtype).itemsize
    regions = (Region.whole(spec.shape),) if spec.regions is None else spec.regions
    # of each part both targets are read at the same time
    most = max(1, limit // 2 // itemsize)
    parts = (tile for region in regions if region.size for tile in tiles(region, most))
    overlaps = (Overlap((0, 1), ((part,), (part,)), (itemsize, itemsize)) for part in parts)
    return _first_difference(overlaps, fill, limit) is None


def _difference_in(batch: Sequence[Overlap], fill: FillTargets) -> tuple[int, int] | None:
    wanted: list[tuple[int, list[TargetPiece]]] = []
    sides: list[list[np.ndarray]] = []
    for overlap in batch:
        made = [_pieces(part, n) for part, n in zip(overlap.regions, overlap.itemsizes, strict=True)]
        wanted += [(number, pieces) for number, (_, pieces) in zip(overlap.numbers, made, strict=True)]
        sides.append([buffer.view(np.uint8) for buffer, _ in made])
    if wanted:
        fill(wanted)
    pairs = zip(batch, sides, strict=True)
    return next(
        (overlap.numbers for overlap, (left, right) in pairs if not _is_equal_content(overlap, left, right)), None
    )


def _pieces(regions: Sequence[Region], itemsize: int) -> tuple[np.ndarray, list[TargetPiece]]:
    """Returns memory for regions, one after the other, and their pieces in it."""
    buffer = np.empty(sum(region.size for region in regions), raw_dtype(itemsize))
    pieces: list[TargetPiece] = []
    start = 0
    for region in regions:
        pieces.append(TargetPiece(region, HostArray(buffer[start : start + region.size].reshape(region.shape))))
        start += region.size
    return buffer, pieces


def _is_equal_content(overlap: Overlap, left: np.ndarray, right: np.ndarray) -> bool:
    if overlap.windows is not None:
        return _is_equal_in_place(overlap.windows, left, right)
    if overlap.nbytes >= 0:
        left, right = (
            side[skip : skip + overlap.nbytes] for side, skip in zip((left, right), overlap.skip, strict=True)
        )
    return np.array_equal(left, right)


def _is_equal_in_place(windows: tuple[StridedMemory, StridedMemory], left: np.ndarray, right: np.ndarray) -> bool:
    """Returns whether two strided arrays have the same content where they overlap: tried on temporary memory."""
    p, q = windows
    low, high = min(p.extent[0], q.extent[0]), max(p.extent[1], q.extent[1])
    memory, touched = np.zeros(high - low, np.uint8), np.zeros(high - low, np.bool_)

    def shown(of: np.ndarray, window: StridedMemory) -> np.ndarray:
        shape, strides = (*window.shape, window.itemsize), (*window.strides, 1)
        return np.ndarray(shape, of.dtype, of, window.address - low, strides)

    shown(memory, p)[...] = left.reshape(*p.shape, p.itemsize)
    shown(touched, p)[...] = True
    differs = shown(memory, q) != right.reshape(*q.shape, q.itemsize)
    return not (differs & shown(touched, q)).any()
