"""The chunks of a leaf: where their bytes are, which rank wrote them, which ranks held them, and the map of them.

The shard map has the regions of an array on the plane of two of its dimensions, with gaps and overlaps.
"""

from __future__ import annotations

import math
import re

import msgspec
import numpy as np

from treeckpt._core.format.byte_map import ChunkLocation, chunk_count, holders_of, layout_of, locate_chunks
from treeckpt._core.format.records import AliasRecord, Index, Leaf, PerRankArrays
from treeckpt._core.sharding.region import Region
from treeckpt._core.text import region_text
from treeckpt._inspect.outline import Outline

from ..pages.checkpoints import PAGE_ROWS, next_start
from ..pages.damage import Damage
from ..store.library import NotFound

MAX_CHUNKS = 1 << 18
"""Chunks of one leaf that are listed for a page."""
MAX_HOLDERS = 256
"""Ranks of a mesh up to which the holders of each region are listed."""


NO_FILE = -1
MAX_BOXES = 4096
"""Regions drawn on one map."""
MAX_OVERLAPS = 500
"""Overlaps drawn on one map."""
MAX_BOXES_WITH_HOLDERS = 512
"""Regions on a map up to which the number of their holders is computed."""


class ChunkRow(msgspec.Struct, frozen=True):
    """A chunk and where its bytes are."""

    region: str
    offset: list[int]
    shape: list[int]
    rank: int
    holders: list[int] | None
    """Ranks that held all of it; None if the index does not record it, or if they are too many to list."""
    file: int
    """The number of the shard; NO_FILE for bytes that are computed from those of another program's file."""
    name: str
    start: int
    stop: int
    damaged: bool
    """Whether any of these bytes is known to be damaged."""


class ChunksPage(msgspec.Struct, frozen=True):
    """A page of the chunks of an array."""

    start: int
    total: int
    next: int | None
    rows: list[ChunkRow]


def leaf_of(index: Index, number: int) -> Leaf:
    """Returns the leaf of a number.

    Raises:
        NotFound: there is none.
    """
    if not 0 <= number < len(index.entries):
        raise NotFound("There is no such leaf in this checkpoint.")
    return index.entries[number]


def stored_leaf(index: Index, leaf: Leaf) -> Leaf:
    """Returns the leaf whose chunks hold the bytes of this one: of an alias, its target."""
    return index.entries[leaf.record.of] if isinstance(leaf.record, AliasRecord) else leaf


def locate(index: Index, leaf: Leaf, region: Region | None = None) -> list[ChunkLocation]:
    """Returns the chunks of a leaf, or those with elements of a region, with their place in a shard.

    Raises:
        NotFound: it has more than MAX_CHUNKS chunks.
    """
    if chunk_count(stored_leaf(index, leaf)) > MAX_CHUNKS and region is None:
        raise NotFound(f"This leaf has more than {MAX_CHUNKS:,} chunks; ask for a part of it with treeckpt show.")
    return locate_chunks(index, leaf, region)


def holders(index: Index, leaf: Leaf, region: Region) -> list[int] | None:
    """Returns the ranks that held a region; None if the index does not record it, or if its mesh is too large."""
    base = stored_leaf(index, leaf)
    layout = layout_of(index, base)
    if layout is None or base.spec is None or math.prod(layout.mesh.shape) > MAX_HOLDERS:
        return None
    return holders_of(layout, base.spec.shape, region)


def file_numbers(index: Index) -> dict[str, int]:
    """Returns the numbers of shards by name."""
    return {file.name: number for number, file in enumerate(index.file_list)}


def parse_region(text: str, shape: tuple[int, ...]) -> Region | None:
    """Parses a region such as `100:200, :, 7`, None for an empty text; dimensions that are left out are whole.

    Raises:
        ValueError: the text is no region of an array of this shape.
    """
    parts = [part.strip() for part in text.strip().strip("[]").split(",")]
    if parts == [""]:
        return None
    if len(parts) > len(shape):
        raise ValueError(f"The array has {len(shape)} dimensions, not {len(parts)}.")
    bounds = [_interval(part, n) for part, n in zip(parts, shape, strict=False)] + [(0, n) for n in shape[len(parts) :]]
    return Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


def _interval(text: str, size: int) -> tuple[int, int]:
    # A number of 18 digits fits 64 bits.
    match = re.fullmatch(r"([0-9]{1,18})|([0-9]{0,18})\s*:\s*([0-9]{0,18})", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text[:40]!r} is neither a position nor a range such as 100:200.")
    low = int(match[1] or match[2] or 0)
    high = low + 1 if match[1] else min(int(match[3] or size), size)
    if low >= high or high > size:
        raise ValueError(f"{text[:40]} holds nothing of a dimension of {size}.")
    return low, high


def chunks_page(
    outline: Outline, damage: Damage, number: int, start: int = 0, *, region: Region | None = None
) -> ChunksPage:
    """A page of the chunks of an array.

    They are in row-major order; with a `region`, only those with elements of it.
    """
    index = outline.index
    leaf = leaf_of(index, number)
    located = locate(index, leaf, region)
    numbers = file_numbers(index)
    rows = [
        ChunkRow(
            region=region_text(at.region),
            offset=list(at.region.offset),
            shape=list(at.region.shape),
            rank=at.rank,
            holders=holders(index, leaf, at.region),
            file=numbers.get(at.file.name, NO_FILE),
            name=at.file.name,
            start=at.start,
            stop=at.stop,
            damaged=damage.of_bytes(at.file.name, at.start, at.stop),
        )
        for at in located[start : start + PAGE_ROWS]
    ]
    return ChunksPage(start, len(located), next_start(start, len(located)), rows)


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
    damaged: list[int] = []
    """The positions of the boxes of which bytes are known to be damaged."""
    overlaps: list[list[int]] = []
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


def positions(at: str) -> list[int]:
    """Parses a position for each dimension, as `0,3`; what is left out is 0."""
    return [int(n[:18]) if n else 0 for n in at.split(",")] if at else []


def map_page(
    outline: Outline,
    damage: Damage,
    number: int,
    y: int | None = None,
    x: int | None = None,
    at: str = "",
    *,
    most: int = MAX_BOXES,
) -> MapPage:
    """The regions of an array on the plane of two of its dimensions.

    By default, and in place of values out of range, these are the last two dimensions and position 0 of the others.

    Args:
        at: the position in every other dimension.
        most: regions that are drawn.
    """
    index = outline.index
    leaf, place = leaf_of(index, number), positions(at)
    names, sizes = map_dims(index, leaf)
    if not sizes:
        return MapPage([], [], y=None, x=None, at=[], rows=0, columns=0, boxes=[], files={}, more=0, missing=0)
    x = _along(x, sizes, len(sizes) - 1)
    y = _along(y, sizes, next((d for d in reversed(range(len(sizes))) if d != x), None), x)
    where = [place[d] if d < len(place) and 0 <= place[d] < n else 0 for d, n in enumerate(sizes)]
    drawn = _on_plane(index, stored_leaf(index, leaf), sizes, y, x, where)
    numbers, files, boxes = file_numbers(index), {}, []
    for region, chunk in drawn[:most]:
        top, rows = (region.offset[y], region.shape[y]) if y is not None else (0, 1)
        left, columns = (region.offset[x], region.shape[x]) if x is not None else (0, 1)
        file = numbers.get(chunk.file.name, NO_FILE)
        files[file] = chunk.file.name
        held_by = holders(index, leaf, chunk.region) if len(drawn) <= MAX_BOXES_WITH_HOLDERS else None
        count = len(held_by) if held_by is not None else 1
        boxes.append([top, left, top + rows, left + columns, chunk.rank, file, chunk.start, chunk.stop, count])
    rows, columns = sizes[y] if y is not None else 1, sizes[x] if x is not None else 1
    more = max(0, len(drawn) - most)
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
        damaged=[n for n, (_, at) in enumerate(drawn[:most]) if damage.of_bytes(at.file.name, at.start, at.stop)],
        overlaps=overlaps,
    )


def overlaps_of(boxes: list[list[int]]) -> tuple[list[list[int]], int]:
    """Returns the intersections of pairs of boxes, at most MAX_OVERLAPS, and the number of elements in all of them."""
    if len(boxes) < 2:
        return [], 0
    top, left, bottom, right = np.array([box[:4] for box in boxes], np.int64).T
    shared_boxes: list[list[int]] = []
    twice = 0
    for at in range(len(boxes) - 1):
        rest = slice(at + 1, None)
        low, high = np.maximum(top[at], top[rest]), np.minimum(bottom[at], bottom[rest])
        first, last = np.maximum(left[at], left[rest]), np.minimum(right[at], right[rest])
        shared = np.flatnonzero((low < high) & (first < last))
        if len(shared):
            cut = np.stack([low, first, high, last], 1)[shared]
            twice += int(((cut[:, 2] - cut[:, 0]) * (cut[:, 3] - cut[:, 1])).sum())
            shared_boxes += cut[: MAX_OVERLAPS - len(shared_boxes)].tolist()
    return shared_boxes, twice


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
