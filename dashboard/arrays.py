"""The queries of one leaf: what it is, where its chunks lie, and the map of two dimensions of its index space."""

from __future__ import annotations

import math
import re

import numpy as np

from treeckpt.core.analysis.outline import Outline, leaf_nbytes
from treeckpt.core.format.byte_map import ChunkLocation, chunk_count, holders_of, layout_of, locate_chunks
from treeckpt.core.format.records import AliasRecord, Index, Leaf, PerRankArrays, PerRankValues, ValueRecord
from treeckpt.core.sharding.dtypes import dtype_of
from treeckpt.core.sharding.int_runs import decode_runs
from treeckpt.core.sharding.placements import MeshLayout, mesh_ranks
from treeckpt.core.sharding.region import Region
from treeckpt.core.text import layout_text, placement_text, region_text, value_text, value_type

from .library import Missing
from .pages import CheckpointRow, ChunkRow, ChunksPage, Fact, LeafPage, MapPage, MeshPart, NodeRow
from .queries import PAGE, node_row, short

__all__ = ["chunks_page", "leaf_of", "leaf_page", "map_page", "parse_region"]

MAX_BOXES = 4096
"""Regions drawn on one map."""
MAX_OVERLAPS = 500
MAX_CHUNKS = 1 << 18
"""Chunks of one leaf that are made for a page."""
MAX_HOLDERS = 256
"""Ranks of a mesh up to which the holders of each region are listed."""


def leaf_of(index: Index, number: int) -> Leaf:
    """The leaf of a number.

    Raises:
        Missing: there is none.
    """
    if not 0 <= number < len(index.entries):
        raise Missing("There is no such leaf in this checkpoint.")
    return index.entries[number]


def _base(index: Index, leaf: Leaf) -> Leaf:
    """The leaf whose chunks hold this one's bytes."""
    return index.entries[leaf.record.of] if isinstance(leaf.record, AliasRecord) else leaf


def _located(index: Index, leaf: Leaf, region: Region | None = None) -> list[ChunkLocation]:
    if chunk_count(_base(index, leaf)) > MAX_CHUNKS and region is None:
        raise Missing(f"This leaf has more than {MAX_CHUNKS:,} chunks; ask for a part of it with treeckpt show.")
    return locate_chunks(index, leaf, region)


def _holders(index: Index, leaf: Leaf, region: Region) -> list[int] | None:
    base = _base(index, leaf)
    layout = layout_of(index, base)
    if layout is None or base.spec is None or math.prod(layout.mesh.shape) > MAX_HOLDERS:
        return None
    return holders_of(layout, base.spec.shape, region)


def _numbers(index: Index) -> dict[str, int]:
    return {file.name: number for number, file in enumerate(index.file_list)}


def parse_region(text: str, shape: tuple[int, ...]) -> Region | None:
    """The region that a text such as `100:200, :, 7` names, None for an empty text; dimensions left out are whole.

    Raises:
        ValueError: saying what is wrong.
    """
    parts = [part.strip() for part in text.strip().strip("[]").split(",")]
    if parts == [""]:
        return None
    if len(parts) > len(shape):
        raise ValueError(f"The array has {len(shape)} dimensions, not {len(parts)}.")
    bounds = [_interval(part, n) for part, n in zip(parts, shape, strict=False)] + [(0, n) for n in shape[len(parts) :]]
    return Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


def _interval(text: str, size: int) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,18})|([0-9]{0,18})\s*:\s*([0-9]{0,18})", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text[:40]!r} is neither a position nor a range such as 100:200.")
    low = int(match[1] or match[2] or 0)
    high = low + 1 if match[1] else min(int(match[3] or size), size)
    if low >= high or high > size:
        raise ValueError(f"{text[:40]} holds nothing of a dimension of {size}.")
    return low, high


def chunks_page(index: Index, leaf: Leaf, start: int, region: Region | None = None) -> ChunksPage:
    """A page of an array's chunks, or of those with elements of a region, in row-major order of the array."""
    located = _located(index, leaf, region)
    numbers = _numbers(index)
    rows = [
        ChunkRow(
            region=region_text(at.region),
            offset=list(at.region.offset),
            shape=list(at.region.shape),
            rank=at.rank,
            holders=_holders(index, leaf, at.region),
            file=numbers[at.file.name],
            name=at.file.name,
            start=at.start,
            stop=at.stop,
        )
        for at in located[start : start + PAGE]
    ]
    return ChunksPage(start, len(located), start + PAGE if start + PAGE < len(located) else None, rows)


def _dims(index: Index, leaf: Leaf) -> tuple[list[str], list[int]]:
    """The dimensions of a leaf's map; the arrays of single ranks are stacked along one more."""
    base = _base(index, leaf)
    if base.spec is None or 0 in base.spec.shape:
        return [], []
    names, sizes = [f"dim {d}" for d in range(len(base.spec.shape))], list(base.spec.shape)
    if isinstance(base.record, PerRankArrays):
        return ["rank", *names], [chunk_count(base), *sizes]
    return (names, sizes) if sizes else (["scalar"], [1])


def _along(wanted: int | None, sizes: list[int], default: int | None, taken: int | None = None) -> int | None:
    return wanted if wanted is not None and 0 <= wanted < len(sizes) and wanted != taken else default


def map_page(index: Index, leaf: Leaf, y: int | None, x: int | None, at: list[int]) -> MapPage:
    """The regions of an array on the plane of dimensions `y` and `x`, cut at position `at[d]` of every other one.

    Whatever is left out or out of range falls back to the last two dimensions and position 0.
    """
    names, sizes = _dims(index, leaf)
    if not sizes:
        return MapPage([], [], None, None, [], 0, 0, [], {}, 0, 0, [])
    x = _along(x, sizes, len(sizes) - 1)
    y = _along(y, sizes, next((d for d in reversed(range(len(sizes))) if d != x), None), x)
    where = [at[d] if d < len(at) and 0 <= at[d] < n else 0 for d, n in enumerate(sizes)]
    found = _on_plane(index, _base(index, leaf), sizes, y, x, where)
    numbers, files, boxes = _numbers(index), {}, []
    for region, chunk in found[:MAX_BOXES]:
        top, rows = (region.offset[y], region.shape[y]) if y is not None else (0, 1)
        left, columns = (region.offset[x], region.shape[x]) if x is not None else (0, 1)
        number = numbers[chunk.file.name]
        files[number] = chunk.file.name
        holders = _holders(index, leaf, chunk.region) if len(found) <= 512 else None
        count = len(holders) if holders is not None else 1
        boxes.append([top, left, top + rows, left + columns, chunk.rank, number, chunk.start, chunk.stop, count])
    rows, columns = sizes[y] if y is not None else 1, sizes[x] if x is not None else 1
    more = max(0, len(found) - MAX_BOXES)
    overlaps, twice = _overlaps(boxes)
    covered = sum((box[2] - box[0]) * (box[3] - box[1]) for box in boxes) - twice
    missing = 0 if more else max(0, rows * columns - covered)
    return MapPage(names, sizes, y, x, where, rows, columns, boxes, files, more, missing, overlaps)


def _overlaps(boxes: list[list[int]]) -> tuple[list[list[int]], int]:
    """What pairs of boxes share, as boxes, at most MAX_OVERLAPS of them; and how many elements all of them are."""
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
    """The chunks that meet the plane, each with its region in the dimensions of the map."""
    offset = tuple(0 if d in (x, y) else where[d] for d in range(len(sizes)))
    shape = tuple(n if d in (x, y) else 1 for d, n in enumerate(sizes))
    if isinstance(base.record, PerRankArrays):
        stacked = [
            (Region((n, *chunk.region.offset), (1, *chunk.region.shape)), chunk)
            for n, chunk in enumerate(locate_chunks(index, base))
        ]
        return [(r, c) for r, c in stacked if offset[0] <= r.offset[0] < offset[0] + shape[0]]
    assert base.spec is not None, "asked only for arrays"
    if not base.spec.shape:
        return [(Region((0,), (1,)), chunk) for chunk in locate_chunks(index, base)]
    return [(chunk.region, chunk) for chunk in _located(index, base, Region(offset, shape))]


def _facts(index: Index, leaf: Leaf) -> list[Fact]:
    spec = leaf.spec
    if spec is None:
        return []
    facts = [Fact("elements", "", f"{math.prod(spec.shape):,}"), Fact("kept as", "", spec.kind)]
    facts.append(Fact("bytes an element", "", f"{dtype_of(spec.dtype).itemsize}"))
    if spec.requires_grad:
        facts.append(Fact("requires grad", "", "yes"))
    if spec.device:
        facts.append(Fact("device when saved", "", spec.device))
    if isinstance(leaf.record, AliasRecord):
        target, view = short(index.entries[leaf.record.of].path), leaf.record.view
        text = f"the storage of {target}" if view is None else f"a view of {target} at {view.offset}, {view.strides}"
        facts.append(Fact("shares", "", text))
    return facts


def _values(leaf: Leaf) -> list[Fact]:
    record = leaf.record
    if isinstance(record, ValueRecord):
        return [Fact("", value_type(record.value), value_text(record.value, 20_000))]
    if isinstance(record, PerRankValues):
        ranks = decode_runs(leaf.ranks or ()).tolist()[:PAGE]
        return [
            Fact(f"rank {rank}", value_type(value), value_text(value, 1000))
            for rank, value in zip(ranks, record.values, strict=False)
        ]
    return []


def leaf_page(checkpoint: CheckpointRow, outline: Outline, number: int, start: int, region: str = "") -> LeafPage:
    """One leaf; its chunks are those with elements of `region`, such as `100:200`, where one is given.

    Raises:
        Missing: there is none.
    """
    index = outline.index
    leaf = leaf_of(index, number)
    base = _base(index, leaf)
    layout = layout_of(index, base)
    dims, sizes = _dims(index, leaf)
    asked, problem = None, None
    try:
        asked = parse_region(region, base.spec.shape) if base.spec else None
    except ValueError as error:
        problem = str(error)
    return LeafPage(
        checkpoint=checkpoint,
        leaf=number,
        path=short(leaf.path),
        above=_above(outline, leaf.path),
        kind=_kind(leaf),
        dtype=leaf.spec.dtype if leaf.spec else None,
        shape=list(leaf.spec.shape) if leaf.spec else None,
        nbytes=leaf_nbytes(leaf),
        facts=_facts(index, leaf),
        layout=_layout_text(base, layout),
        mesh=_mesh(layout) if layout else [],
        mesh_ranks=mesh_ranks(layout.mesh).tolist()[:MAX_HOLDERS] if layout else [],
        values=_values(leaf),
        chunks=chunks_page(index, leaf, start, asked) if leaf.spec else None,
        dims=dims,
        dim_sizes=sizes,
        previous=number - 1 if number else None,
        following=number + 1 if number + 1 < len(index.entries) else None,
        region=region,
        found=[*asked.offset, *asked.shape] if asked else [],
        problem=problem,
    )


def _above(outline: Outline, path: str) -> list[NodeRow]:
    """The nodes that lead to a path, without the leaf itself."""
    steps = path.split("/")
    found = [outline.node_at("/".join(steps[:n])) for n in range(1, len(steps))]
    return [node_row(outline.index, row) for row in found if row is not None]


def _kind(leaf: Leaf) -> str:
    kinds = {ValueRecord: "value", PerRankValues: "value per rank", AliasRecord: "tie", PerRankArrays: "array per rank"}
    return kinds.get(type(leaf.record), "array")


def _layout_text(base: Leaf, layout: MeshLayout | None) -> str | None:
    if base.spec is None:
        return None
    if isinstance(base.record, PerRankArrays):
        return f"an array of its own on each of {chunk_count(base)} ranks"
    return layout_text(layout)


def _mesh(layout: MeshLayout) -> list[MeshPart]:
    names = layout.mesh.names or tuple(f"{d}" for d in range(len(layout.mesh.shape)))
    return [
        MeshPart(name, size, placement_text(placement))
        for name, size, placement in zip(names, layout.mesh.shape, layout.placements, strict=False)
    ]
