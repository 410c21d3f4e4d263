"""Layouts: which rank holds which regions of an array, for one rank or for all at once.

A `MeshLayout` is a mesh of ranks and one placement per mesh dimension; from it every rank computes every other rank's
regions, so that regular layouts need no messages. A `BoxLayout` lists the regions of the ranks (explicit pieces, flat
ranges cut into boxes). FSDP, TP, HSDP and pipelines are instances of the first; no code here depends on them.

Placements apply from the left mesh dimension to the right, each to what the previous ones left: `Shard` cuts as
torch.chunk does (ceil-sized pieces, the last ones shorter or empty), `StridedShard` first cuts into `factor` pieces,
each of those into one piece per rank, and gives rank i the i-th of each. Dimensions are independent, so a layout is a
list of intervals per dimension and mesh coordinate, computed for all coordinates at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from ...errors import LayoutError
from .int_runs import Runs, decode_runs, encode_runs, length_of
from .region import Region


class Replicate(msgspec.Struct, frozen=True, tag="r", array_like=True):
    """Every rank along the mesh dimension holds the same elements."""


class Shard(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """The ranks along the mesh dimension hold consecutive pieces of array dimension `dim`."""

    dim: int


class StridedShard(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """As `Shard`, of an array dimension that is first cut into `factor` pieces."""

    dim: int
    factor: int


Placement = Replicate | Shard | StridedShard


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """A grid of ranks: `ranks` in row-major order of `shape`, and optionally one name per dimension."""

    shape: tuple[int, ...]
    ranks: Runs
    names: tuple[str, ...] = ()


class MeshLayout(msgspec.Struct, frozen=True, tag="mesh", array_like=True):
    """A mesh of ranks, and one placement per dimension of it."""

    mesh: Mesh
    placements: tuple[Placement, ...]


class BoxLayout(msgspec.Struct, frozen=True, tag="boxes", array_like=True):
    """A list of (rank, region). Ranks may appear more than once; equal regions are replicas."""

    pieces: tuple[tuple[int, Region], ...]


Layout = MeshLayout | BoxLayout


class LocalRegion(msgspec.Struct, frozen=True, gc=False):
    """A region that a rank holds, and its position in the rank's local array."""

    region: Region
    local: tuple[int, ...]
    """The index of the region's first element in the local array."""


class Cells(msgspec.Struct, frozen=True):
    """The cells of one dimension of a layout: cell c is `starts[c] : stops[c]`, held at mesh position `holders[c]`.

    The cells are in ascending order and together are the whole dimension. A position is an index into the mesh's
    ranks; the positions of all dimensions are added.
    """

    starts: np.ndarray
    stops: np.ndarray
    holders: np.ndarray


@lru_cache(maxsize=64)
def replicated_layout(ranks: Runs) -> MeshLayout:
    """Returns the layout in which each of `ranks` holds the whole array."""
    return MeshLayout(Mesh((length_of(ranks),), ranks), (Replicate(),))


@lru_cache(maxsize=64)
def mesh_ranks(mesh: Mesh) -> np.ndarray:
    """Returns the ranks of the mesh in row-major order, int64[n]. Cached: do not write to the array."""
    ranks = decode_runs(mesh.ranks)
    if len(ranks) != math.prod(mesh.shape):
        raise LayoutError("mesh", expected=f"{math.prod(mesh.shape)} ranks", found=f"{len(ranks)}")
    return ranks


@lru_cache(maxsize=256)
def position_of(mesh: Mesh, rank: int) -> int | None:
    """Returns the position of `rank` among the mesh's ranks, None if it is not part of it."""
    found = np.flatnonzero(mesh_ranks(mesh) == rank)
    return int(found[0]) if len(found) else None


def mesh_strides(mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of positions from one rank to the next along each mesh dimension."""
    return tuple(math.prod(mesh.shape[d + 1 :]) for d in range(len(mesh.shape)))


@lru_cache(maxsize=256)
def replica_offsets(layout: MeshLayout) -> np.ndarray:
    """Returns what to add to a mesh position to reach each of its replicas: int64[replicas], the first is 0."""
    offsets = np.zeros(1, np.int64)
    strides = mesh_strides(layout.mesh)
    for n, stride, placement in zip(layout.mesh.shape, strides, layout.placements, strict=True):
        if isinstance(placement, Replicate):
            offsets = (offsets[:, None] + np.arange(n) * stride).reshape(-1)
    return offsets


@lru_cache(maxsize=256)
def replicas_of(layout: MeshLayout, rank: int) -> frozenset[int]:
    """Returns the ranks that hold the same elements as `rank`, itself among them; none if it is not in the mesh."""
    position = position_of(layout.mesh, rank)
    if position is None:
        return frozenset()
    for n, stride, placement in zip(layout.mesh.shape, mesh_strides(layout.mesh), layout.placements, strict=True):
        if isinstance(placement, Replicate):
            position -= position // stride % n * stride
    return frozenset(mesh_ranks(layout.mesh)[position + replica_offsets(layout)].tolist())


@lru_cache(maxsize=4096)
def _sharding_dims(layout: MeshLayout, dim: int) -> tuple[tuple[int, int, int], ...]:
    """Returns (size, stride, factor) of each mesh dimension that shards array dimension `dim`, from left to right."""
    strides = mesh_strides(layout.mesh)
    return tuple(
        (n, stride, placement.factor if isinstance(placement, StridedShard) else 1)
        for n, stride, placement in zip(layout.mesh.shape, strides, layout.placements, strict=True)
        if not isinstance(placement, Replicate) and placement.dim == dim
    )


def _intervals(
    size: int, sharders: tuple[tuple[int, int, int], ...], position: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns starts[p, i], lengths[p, i], positions[p]: the intervals of all mesh positions or one, in local order."""
    starts = np.zeros((1, 1), np.int64)
    lengths = np.full((1, 1), size, np.int64)
    positions = np.zeros(1, np.int64)
    for count, stride, factor in sharders:
        ranks = np.arange(count) if position is None else np.array([position // stride % count])
        lows, highs = _local_ranges(lengths.sum(1), ranks, count, factor)
        starts, lengths = _select(starts, lengths, lows, highs)
        positions = (positions[:, None] + ranks * stride).reshape(-1)
    return starts, lengths, positions


def _local_ranges(total: np.ndarray, ranks: np.ndarray, count: int, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ranges of a local dimension of each of `ranks`, of `count`: low[p, rank, f], high[p, rank, f]."""
    piece = -(-total // factor)
    f = np.arange(factor)
    low = np.minimum(piece[:, None] * f, total[:, None])[:, None, :]
    high = np.minimum(piece[:, None] * (f + 1), total[:, None])[:, None, :]
    step = -(-(high - low) // count)
    i = ranks[None, :, None]
    return np.minimum(low + step * i, high), np.minimum(low + step * (i + 1), high)


def _select(
    starts: np.ndarray, lengths: np.ndarray, lows: np.ndarray, highs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Selects local ranges from lists of intervals: one row per (position, rank), empty intervals moved to the end."""
    stops = lengths.cumsum(1)
    begins = (stops - lengths)[:, None, None, :]
    low = np.maximum(lows[..., None], begins)
    high = np.minimum(highs[..., None], stops[:, None, None, :])
    picked = np.maximum(high - low, 0)
    rows = picked.shape[0] * picked.shape[1]
    new_starts = (starts[:, None, None, :] + (low - begins)).reshape(rows, -1)
    new_lengths = picked.reshape(rows, -1)
    if new_lengths.shape[1] > 1:
        # stable, so that the intervals that stay are in the order of the local array
        order = np.argsort(new_lengths == 0, axis=1, kind="stable")
        width = max(1, int((new_lengths > 0).sum(1).max(initial=1)))
        order = order[:, :width]
        new_starts = np.take_along_axis(new_starts, order, 1)
        new_lengths = np.take_along_axis(new_lengths, order, 1)
    return new_starts, new_lengths


def check_layout(layout: MeshLayout, shape: Sequence[int], path: str) -> None:
    """Checks that a mesh holds each rank once, and that the placements fit it and the array.

    Raises:
        LayoutError: naming `path`.
    """
    if (fault := _mesh_fault(layout.mesh)) is not None:
        raise LayoutError(path, expected="a mesh that holds each of its ranks once", found=fault)
    check_placements(layout, shape, path)


def check_placements(layout: MeshLayout, shape: Sequence[int], path: str) -> None:
    """Checks as `check_layout`, without the mesh's ranks.

    Raises:
        LayoutError: naming `path`.
    """
    if len(layout.placements) != len(layout.mesh.shape):
        raise LayoutError(
            path,
            expected=f"{len(layout.mesh.shape)} placements",
            found=f"{len(layout.placements)}",
        )
    for placement in layout.placements:
        if not isinstance(placement, Replicate) and not 0 <= placement.dim < len(shape):
            raise LayoutError(path, expected=f"a dimension of shape {tuple(shape)}", found=f"placement {placement}")
        if isinstance(placement, StridedShard) and placement.factor < 1:
            raise LayoutError(path, expected="a factor of at least 1", found=f"placement {placement}")


@lru_cache(maxsize=64)
def _mesh_fault(mesh: Mesh) -> str | None:
    count = math.prod(mesh.shape)
    if not mesh.shape or min(mesh.shape) < 1 or length_of(mesh.ranks) != count:
        return f"shape {mesh.shape} for {length_of(mesh.ranks)} ranks"
    if len(np.unique(mesh_ranks(mesh))) != count:
        return "a rank twice"
    return None


@lru_cache(maxsize=65536)
def _held_intervals(
    size: int, sharders: tuple[tuple[int, int, int], ...], position: int
) -> tuple[tuple[int, int], ...]:
    """Returns the intervals (start, length) of one dimension that one mesh position holds."""
    if not sharders:
        return ((0, size),)
    starts, lengths, _ = _intervals(size, sharders, position)
    return tuple((a, n) for a, n in zip(starts[0].tolist(), lengths[0].tolist(), strict=True) if n)


@lru_cache(maxsize=65536)
def held_by(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[LocalRegion, ...]:
    """Returns the regions of an array of `shape` that `rank` holds, in the order of its local array.

    Adjacent regions are not joined: a strided shard is one region per stride.
    """
    if isinstance(layout, BoxLayout):
        return tuple(LocalRegion(region, (0,) * len(shape)) for r, region in layout.pieces if r == rank)
    position = position_of(layout.mesh, rank)
    if position is None:
        return ()
    dims: list[list[tuple[int, int, int]]] = []
    for dim, size in enumerate(shape):
        # a dimension without elements has one empty interval, or the product below would drop the region
        held = _held_intervals(size, _sharding_dims(layout, dim), position) or (((0, 0),) if size == 0 else ())
        local = itertools.accumulate((length for _, length in held), initial=0)
        # `accumulate` gives one number more, the end of the last interval
        dims.append([(start, length, at) for (start, length), at in zip(held, local, strict=False)])
    return tuple(
        LocalRegion(Region(tuple(p[0] for p in box), tuple(p[1] for p in box)), tuple(p[2] for p in box))
        for box in itertools.product(*dims)
    )


def local_shape(layout: MeshLayout, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
    """Returns the shape of the rank's local array, None if the rank is not in the mesh."""
    position = position_of(layout.mesh, rank)
    if position is None:
        return None
    return tuple(
        sum(length for _, length in _held_intervals(size, _sharding_dims(layout, dim), position))
        for dim, size in enumerate(shape)
    )


@lru_cache(maxsize=4096)
def layout_of_group(layout: Layout, shape: tuple[int, ...], members: tuple[int, ...]) -> Layout:
    """Returns a layout in the numbering of a group: rank members[i] becomes i, and other ranks' regions are left out.

    A mesh stays one where the group contains all of it; otherwise each member's regions are listed.
    """
    number = {rank: i for i, rank in enumerate(members)}
    if isinstance(layout, BoxLayout):
        return BoxLayout(tuple((number[rank], region) for rank, region in layout.pieces if rank in number))
    ranks = mesh_ranks(layout.mesh).tolist()
    if all(rank in number for rank in ranks):
        mesh = Mesh(layout.mesh.shape, encode_runs([number[rank] for rank in ranks]), layout.mesh.names)
        return MeshLayout(mesh, layout.placements)
    here = [rank for rank in ranks if rank in number]
    return BoxLayout(tuple((number[rank], held.region) for rank in here for held in held_by(layout, shape, rank)))


def cells_of(layout: MeshLayout, shape: Sequence[int], dim: int) -> Cells:
    """Returns how the layout cuts one dimension, for all ranks at once. Cached: do not write to the arrays."""
    return _cells(shape[dim], _sharding_dims(layout, dim))


@lru_cache(maxsize=64)
def _cells(size: int, sharders: tuple[tuple[int, int, int], ...]) -> Cells:
    """Cached for few sizes only: the result holds three numbers for every rank."""
    starts, lengths, positions = _intervals(size, sharders)
    holders = np.broadcast_to(positions[:, None], starts.shape)
    filled = lengths > 0
    first, length, holder = starts[filled], lengths[filled], holders[filled]
    order = np.argsort(first, kind="stable")
    first, length = first[order], length[order]
    return Cells(first, first + length, holder[order])
