"""The chunks of an array as an index stores them: one chunk, a grid of cuts, or a list of boxes.

Columns of writing ranks and of starts are run-length coded. Only `encode_chunks` chooses the form, the smallest one, so
that a plan and the headers of the shards give equal records. `chunks_in` finds the chunks of a region, or of a rank,
without expanding the others.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from ..planning.load_plan import Chunk
from ..planning.save_plan import BoxOwners, ChunkOffsets, GridOwners, SingleChunkOffset, grid_of
from ..sharding.int_runs import Runs, decode_runs, encode_runs, length_of, value_at
from ..sharding.region import Region


class WholeChunk(msgspec.Struct, frozen=True, tag="w", array_like=True, gc=False):
    """One chunk that holds the whole array."""

    rank: int
    start: int


class GridChunks(msgspec.Struct, frozen=True, tag="g", array_like=True):
    """A grid: `cuts[d]` are the borders along dimension d, with 0 and the size; columns are in row-major order."""

    cuts: tuple[Runs, ...]
    rank: Runs
    start: Runs


class BoxChunks(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """A list of boxes: one column for each dimension of the offsets and of the shapes."""

    offset: tuple[Runs, ...]
    shape: tuple[Runs, ...]
    rank: Runs
    start: Runs


class NoChunks(msgspec.Struct, frozen=True, tag="n", array_like=True):
    """Not placed yet: in the manifest, which the coordinator's shard holds."""


class DeferredChunks(NoChunks, frozen=True):
    """Chunks whose places are found when they are first asked for; in memory only, never in a file."""

    find: Any = None
    """Takes a region, or None for all; returns the chunks that share an element with it."""
    count: int = 0


Chunks = WholeChunk | GridChunks | BoxChunks | NoChunks


def chunks_in(
    chunks: Chunks, shape: tuple[int, ...], region: Region | None = None, *, rank: int | None = None
) -> list[Chunk]:
    """Returns the chunks of an array of `shape`.

    Args:
        region: keeps only the chunks that share an element with it.
        rank: keeps only the chunks that this rank wrote; used without `region`.
    """
    if isinstance(chunks, WholeChunk):
        wanted = rank is None or rank == chunks.rank
        return [Chunk(Region.whole(shape), chunks.rank, chunks.start)] if wanted else []
    if isinstance(chunks, DeferredChunks):
        return [chunk for chunk in chunks.find(region) if rank in (None, chunk.rank)]
    if isinstance(chunks, NoChunks):
        return []
    written = None if rank is None else np.flatnonzero(decode_runs(chunks.rank) == rank)
    if written is not None and not len(written):
        return []
    if isinstance(chunks, GridChunks):
        return _grid_chunks(chunks, region, written)
    return _box_chunks(chunks, region, written)


def count_chunks(chunks: Chunks) -> int:
    """Counts the chunks of an array without building them."""
    if isinstance(chunks, WholeChunk):
        return 1
    if isinstance(chunks, GridChunks):
        return math.prod(length_of(cut) - 1 for cut in chunks.cuts)
    if isinstance(chunks, DeferredChunks):
        return chunks.count
    return length_of(chunks.rank) if isinstance(chunks, BoxChunks) else 0


def _grid_chunks(chunks: GridChunks, region: Region | None, cells: np.ndarray | None) -> list[Chunk]:
    """Returns the chunks of the given cells, or of those that share an element with `region`."""
    cuts = [decode_runs(c) for c in chunks.cuts]
    counts = [len(c) - 1 for c in cuts]
    if cells is None:
        cells = np.zeros(1, np.int64)
        for d, cut in enumerate(cuts):
            first, last = 0, counts[d]
            if region is not None:
                first = max(int(np.searchsorted(cut, region.offset[d], side="right")) - 1, 0)
                last = min(int(np.searchsorted(cut, region.offset[d] + region.shape[d], side="left")), last)
            cells = (cells[:, None] * counts[d] + np.arange(first, last)).reshape(-1)
    total = math.prod(counts)
    ranks, starts = _lookup(chunks.rank, cells, total), _lookup(chunks.start, cells, total)
    bounds = [c.tolist() for c in cuts]
    found: list[Chunk] = []
    for cell, rank, start in zip(cells.tolist(), ranks, starts, strict=True):
        offset: list[int] = []
        shape: list[int] = []
        for d in reversed(range(len(cuts))):
            cell, i = divmod(cell, counts[d])
            offset.append(bounds[d][i])
            shape.append(bounds[d][i + 1] - bounds[d][i])
        found.append(Chunk(Region(tuple(reversed(offset)), tuple(reversed(shape))), rank, start))
    return found


def _lookup(runs: Runs, cells: np.ndarray, total: int) -> list[int]:
    # single lookups take about (8 + runs) steps each, expanding the column about one step for each number
    if len(cells) * (8 + len(runs)) < total:
        return [value_at(runs, cell) for cell in cells.tolist()]
    return decode_runs(runs)[cells].tolist()


def _box_chunks(chunks: BoxChunks, region: Region | None, rows: np.ndarray | None) -> list[Chunk]:
    """Returns the chunks of the given rows, or of those that share an element with `region`."""
    ranks, starts = decode_runs(chunks.rank), decode_runs(chunks.start)
    offsets = np.stack([decode_runs(c) for c in chunks.offset], 1) if chunks.offset else np.empty((len(ranks), 0), int)
    shapes = np.stack([decode_runs(c) for c in chunks.shape], 1) if chunks.shape else offsets
    keep = np.arange(len(ranks)) if rows is None else rows
    if region is not None:
        low, high = np.array(region.offset), np.array(region.stop)
        keep = np.flatnonzero(((offsets < high) & (offsets + shapes > low)).all(1))
    columns = (column[keep].tolist() for column in (offsets, shapes, ranks, starts))
    return [Chunk(Region(tuple(o), tuple(s)), r, a) for o, s, r, a in zip(*columns, strict=True)]


def encode_chunks(shape: tuple[int, ...], placed: ChunkOffsets | SingleChunkOffset) -> Chunks:
    """Encodes an array's chunks: as one chunk, as a grid where the regions form one, else as boxes."""
    if isinstance(placed, SingleChunkOffset):
        return WholeChunk(placed.rank, placed.start)
    owners, starts = placed.owners, placed.starts
    if isinstance(owners, BoxOwners):
        pieces = owners.pieces
        if len(pieces) == 1 and pieces[0][1].is_whole(shape):
            return WholeChunk(pieces[0][0], int(starts[0]))
        offsets = np.array([region.offset for _, region in pieces], np.int64)
        shapes = np.array([region.shape for _, region in pieces], np.int64)
        return encode_boxes(shape, offsets, shapes, np.array([rank for rank, _ in pieces], np.int64), starts)
    return _encode_grid(shape, owners, starts)


def encode_boxes(
    shape: tuple[int, ...], offsets: np.ndarray, shapes: np.ndarray, ranks: np.ndarray, starts: np.ndarray
) -> Chunks:
    """Encodes disjoint boxes, sorted by offset: as a grid where they form one.

    Args:
        offsets, shapes: int64[n, ndim].
        ranks, starts: int64[n].
    """
    grid = grid_of(shape, offsets, offsets + shapes) if shape and len(offsets) else None
    if grid is not None:
        return _encode_grid(shape, GridOwners(tuple(grid[0]), tuple(grid[1]), ranks), starts)
    return BoxChunks(
        tuple(encode_runs(column) for column in offsets.T),
        tuple(encode_runs(column) for column in shapes.T),
        encode_runs(ranks),
        encode_runs(starts),
    )


def _encode_grid(shape: tuple[int, ...], owners: GridOwners, starts: np.ndarray) -> Chunks:
    if len(owners.ranks) == 1:
        return WholeChunk(int(owners.ranks[0]), int(starts[0]))
    cuts = tuple(encode_runs(np.append(first, size)) for first, size in zip(owners.starts, shape, strict=True))
    return GridChunks(cuts, encode_runs(owners.ranks), encode_runs(starts))
