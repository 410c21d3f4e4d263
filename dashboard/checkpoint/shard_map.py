"""The shard map: the regions of an array on the plane of two of its dimensions, with gaps and overlaps."""

from __future__ import annotations

import msgspec
import numpy as np

from treeckpt._core.format.byte_map import ChunkLocation, chunk_count, locate_chunks
from treeckpt._core.format.records import Index, Leaf, PerRankArrays
from treeckpt._core.sharding.region import Region

from .chunks import NO_FILE, file_numbers, holders, locate, stored_leaf

MAX_BOXES = 4096
"""Regions drawn on one map."""
MAX_OVERLAPS = 500
"""Overlaps drawn on one map."""
MAX_BOXES_WITH_HOLDERS = 512
"""Regions on a map up to which the number of their holders is computed."""


class MapPage(msgspec.Struct, frozen=True):
    """The plane of two dimensions of an array, at one position in each other dimension."""

    dims: list[str]
    sizes: list[int]
    y: int | None
    x: int | None
    at: list[int]
    rows: int
    columns: int
    boxes: list[list[int]]
    """[top, left, bottom, right, rank, file, first byte, byte past the last, ranks that hold it] of each region."""
    files: dict[int, str]
    more: int
    """Number of regions that are not drawn."""
    missing: int
    """Elements of the plane that are in no region; 0 if not all regions are drawn."""
    overlaps: list[list[int]]
    """[top, left, bottom, right] of parts that are in two regions; no save writes such regions."""


def map_dims(index: Index, leaf: Leaf) -> tuple[list[str], list[int]]:
    """Returns names and sizes of the dimensions of a map; per-rank arrays are stacked along one more dimension."""
    base = stored_leaf(index, leaf)
    if base.spec is None or 0 in base.spec.shape:
        return [], []
    names, sizes = [f"dim {d}" for d in range(len(base.spec.shape))], list(base.spec.shape)
    if isinstance(base.record, PerRankArrays):
        return ["rank", *names], [chunk_count(base), *sizes]
    return (names, sizes) if sizes else (["scalar"], [1])


def _along(wanted: int | None, sizes: list[int], default: int | None, taken: int | None = None) -> int | None:
    return wanted if wanted is not None and 0 <= wanted < len(sizes) and wanted != taken else default


def map_page(
    index: Index, leaf: Leaf, y: int | None, x: int | None, at: list[int], *, most: int = MAX_BOXES
) -> MapPage:
    """Returns the regions of an array on the plane of dimensions `y` and `x`, at position `at[d]` of every other one.

    By default, and in place of values out of range, these are the last two dimensions and position 0.

    Args:
        most: regions that are drawn.
    """
    names, sizes = map_dims(index, leaf)
    if not sizes:
        return MapPage(
            [], [], y=None, x=None, at=[], rows=0, columns=0, boxes=[], files={}, more=0, missing=0, overlaps=[]
        )
    x = _along(x, sizes, len(sizes) - 1)
    y = _along(y, sizes, next((d for d in reversed(range(len(sizes))) if d != x), None), x)
    where = [at[d] if d < len(at) and 0 <= at[d] < n else 0 for d, n in enumerate(sizes)]
    found = _on_plane(index, stored_leaf(index, leaf), sizes, y, x, where)
    numbers, files, boxes = file_numbers(index), {}, []
    for region, chunk in found[:most]:
        top, rows = (region.offset[y], region.shape[y]) if y is not None else (0, 1)
        left, columns = (region.offset[x], region.shape[x]) if x is not None else (0, 1)
        number = numbers.get(chunk.file.name, NO_FILE)
        files[number] = chunk.file.name
        held_by = holders(index, leaf, chunk.region) if len(found) <= MAX_BOXES_WITH_HOLDERS else None
        count = len(held_by) if held_by is not None else 1
        boxes.append([top, left, top + rows, left + columns, chunk.rank, number, chunk.start, chunk.stop, count])
    rows, columns = sizes[y] if y is not None else 1, sizes[x] if x is not None else 1
    more = max(0, len(found) - most)
    overlaps, twice = overlaps_of(boxes)
    covered = sum((box[2] - box[0]) * (box[3] - box[1]) for box in boxes) - twice
    missing = 0 if more else max(0, rows * columns - covered)
    return MapPage(
        names,
        sizes,
        y=y,
        x=x,
        at=where,
        rows=rows,
        columns=columns,
        boxes=boxes,
        files=files,
        more=more,
        missing=missing,
        overlaps=overlaps,
    )


def overlaps_of(boxes: list[list[int]]) -> tuple[list[list[int]], int]:
    """Returns the intersections of pairs of boxes, at most MAX_OVERLAPS, and the number of elements in all of them."""
    if len(boxes) < 2:
        return [], 0
    top, left, bottom, right = np.array([box[:4] for box in boxes], np.int64).T
    found: list[list[int]] = []
    twice = 0
    for at in range(len(boxes) - 1):
        rest = slice(at + 1, None)
        low, high = np.maximum(top[at], top[rest]), np.minimum(bottom[at], bottom[rest])
        first, last = np.maximum(left[at], left[rest]), np.minimum(right[at], right[rest])
        shared = np.flatnonzero((low < high) & (first < last))
        if len(shared):
            cut = np.stack([low, first, high, last], 1)[shared]
            twice += int(((cut[:, 2] - cut[:, 0]) * (cut[:, 3] - cut[:, 1])).sum())
            found += cut[: MAX_OVERLAPS - len(found)].tolist()
    return found, twice


def _on_plane(
    index: Index, base: Leaf, sizes: list[int], y: int | None, x: int | None, where: list[int]
) -> list[tuple[Region, ChunkLocation]]:
    """Returns the chunks that intersect the plane, each with its region in the dimensions of the map."""
    offset = tuple(0 if d in (x, y) else where[d] for d in range(len(sizes)))
    shape = tuple(n if d in (x, y) else 1 for d, n in enumerate(sizes))
    if isinstance(base.record, PerRankArrays):
        stacked = [
            (Region((n, *chunk.region.offset), (1, *chunk.region.shape)), chunk)
            for n, chunk in enumerate(locate_chunks(index, base))
        ]
        return [(r, c) for r, c in stacked if offset[0] <= r.offset[0] < offset[0] + shape[0]]
    assert base.spec is not None, "only arrays have a map"
    if not base.spec.shape:
        return [(Region((0,), (1,)), chunk) for chunk in locate_chunks(index, base)]
    return [(chunk.region, chunk) for chunk in locate(index, base, Region(offset, shape))]
