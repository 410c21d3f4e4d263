"""The chunks of a leaf: where their bytes are, which rank wrote them, and which ranks held them."""

from __future__ import annotations

import math
import re

import msgspec

from treeckpt._core.format.byte_map import ChunkLocation, chunk_count, holders_of, layout_of, locate_chunks
from treeckpt._core.format.records import AliasRecord, Index, Leaf
from treeckpt._core.sharding.region import Region
from treeckpt._core.text import region_text

from ..pages.checkpoints import PAGE_ROWS, next_start
from ..store.library import NotFound

MAX_CHUNKS = 1 << 18
"""Chunks of one leaf that are listed for a page."""
MAX_HOLDERS = 256
"""Ranks of a mesh up to which the holders of each region are listed."""


NO_FILE = -1


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
    match = re.fullmatch(r"([0-9]{1,18})|([0-9]{0,18})\s*:\s*([0-9]{0,18})", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text[:40]!r} is neither a position nor a range such as 100:200.")
    low = int(match[1] or match[2] or 0)
    high = low + 1 if match[1] else min(int(match[3] or size), size)
    if low >= high or high > size:
        raise ValueError(f"{text[:40]} holds nothing of a dimension of {size}.")
    return low, high


def chunks_page(index: Index, leaf: Leaf, start: int, region: Region | None = None) -> ChunksPage:
    """Returns a page of the chunks of an array, or of those with elements of a region, in row-major order."""
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
        )
        for at in located[start : start + PAGE_ROWS]
    ]
    return ChunksPage(start, len(located), next_start(start, len(located)), rows)
