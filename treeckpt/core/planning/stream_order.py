"""In which order a rank's entries stand in its stream of bytes, and so where every chunk of every rank starts.

First stand the entries whose bytes fill whole pages, then whole cache lines, then by descending alignment, so that
without holes everything is aligned as far as it can be; within a class, in the order of the leaves. `place` finds all
ranks' offsets at once. Which rank writes what, `core.sharding.write_assignment` says; how a rank's entries become
files, `core.planning.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..sharding.int_runs import decode_runs
from ..sharding.region import Region
from ..sharding.write_assignment import ArrayLeaf, Boxes, Owners, Share, lone_writer, owners_of

__all__ = ["CLASSES", "Lone", "Placed", "PlacedWhole", "lone_pieces", "order_class", "place"]

PAGE = 4096
LINE = 64
CLASSES = 7
"""Pages, lines, then alignments 16, 8, 4, 2, 1."""


def order_class(nbytes: int, align: int) -> int:
    """Which of the classes an entry belongs to, by its bytes and the alignment of its elements."""
    if nbytes % PAGE == 0:
        return 0
    if nbytes % LINE == 0:
        return 1
    return 7 - min(align & -align, 16).bit_length()


class Lone(msgspec.Struct, frozen=True, gc=False):
    """An array that one rank writes whole: by far the most common kind, spared the vectors."""

    rank: int
    order: int
    nbytes: int
    region: Region


def lone_pieces(leaves: Sequence[ArrayLeaf], shares: Sequence[Share | Boxes]) -> list[Lone | None]:
    """For each array the rank that writes it whole, None where it is cut up; worked out once for arrays that are alike.

    Layouts are told apart as objects: most leaves share one, and hashing it would take longer than all the rest.
    """
    met: dict[tuple[object, ...], Lone | None] = {}
    found: list[Lone | None] = []
    for leaf, share in zip(leaves, shares, strict=True):
        if leaf.per_rank is not None or isinstance(share, Boxes) or share.cuts:
            found.append(None)
            continue
        key = (leaf.shape, leaf.itemsize, leaf.align, share.writers[0], id(leaf.layout))
        if key not in met:
            met[key] = _lone_piece(leaf, share.writers[0])
        found.append(met[key])
    return found


def _lone_piece(leaf: ArrayLeaf, replica: int) -> Lone | None:
    if (rank := lone_writer(leaf.layout, replica)) is None:
        return None
    nbytes = leaf.nbytes
    return Lone(rank, order_class(nbytes, leaf.align or leaf.itemsize), nbytes, Region.whole(leaf.shape))


class Placed(msgspec.Struct, frozen=True):
    """One array's chunks: who wrote them and where each starts in its writer's stream of data bytes.

    For a leaf that each rank has of its own: one number per rank, in the order of the ranks.
    """

    owners: Owners
    starts: np.ndarray


class PlacedWhole(msgspec.Struct, frozen=True, gc=False):
    """An array that is one chunk: who wrote it, and where it starts in that rank's stream of data bytes."""

    rank: int
    start: int


def place(
    leaves: Sequence[ArrayLeaf], shares: Sequence[Share | Boxes], world: int
) -> tuple[list[Placed | PlacedWhole], np.ndarray]:
    """Where every rank's `plan_save` puts every chunk, without making those plans one by one.

    Two passes over the leaves, vectorised over ranks: the first sums bytes per rank and order class, the second hands
    out offsets.

    Returns:
        (the chunks of each array, bytes that each rank writes: int64[world]).
    """
    lone = lone_pieces(leaves, shares)
    pieces = [one or _pieces(leaf, share) for one, leaf, share in zip(lone, leaves, shares, strict=True)]
    # plain integers for the arrays that one rank writes whole: a vector of one costs ten times as much
    sums = [[0] * world for _ in range(CLASSES)]
    totals = np.zeros((CLASSES, world), np.int64)
    for piece in pieces:
        if isinstance(piece, Lone):
            sums[piece.order][piece.rank] += piece.nbytes
        else:
            np.add.at(totals, (piece.orders, piece.ranks), piece.sizes)
    totals += np.array(sums, np.int64)
    # within a class of a rank, chunks follow the order of the leaves, lone or not: a mixture is counted in vectors
    if None in lone:
        return _place_mixed(pieces, totals), totals.sum(0)
    at = (np.cumsum(totals, axis=0) - totals).tolist()
    placed: list[Placed | PlacedWhole] = []
    for piece in pieces:
        assert isinstance(piece, Lone), "there are no others"
        starts = at[piece.order]
        placed.append(PlacedWhole(piece.rank, starts[piece.rank]))
        starts[piece.rank] += piece.nbytes
    return placed, totals.sum(0)


def _place_mixed(pieces: Sequence[Lone | _Many], totals: np.ndarray) -> list[Placed | PlacedWhole]:
    at = np.cumsum(totals, axis=0) - totals
    placed: list[Placed | PlacedWhole] = []
    for piece in pieces:
        if isinstance(piece, Lone):
            placed.append(PlacedWhole(piece.rank, int(at[piece.order, piece.rank])))
            at[piece.order, piece.rank] += piece.nbytes
        else:
            placed.append(Placed(piece.owners, _hand_out(at, piece.ranks, piece.orders, piece.sizes)))
    return placed


class _Many(msgspec.Struct, frozen=True):
    """Chunks of an array in row-major order: who writes each, its order class, its bytes."""

    ranks: np.ndarray
    owners: Owners
    orders: np.ndarray
    sizes: np.ndarray


def _hand_out(at: np.ndarray, ranks: np.ndarray, classes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Offsets for the chunks of one array; a rank's second chunk in a class comes after its first."""
    slots = classes * at.shape[1] + ranks
    flat = at.reshape(-1)
    if np.bincount(ranks).max(initial=0) <= 1:
        starts = flat[slots]
        flat[slots] += sizes
        return starts
    order = np.argsort(slots, kind="stable")
    sums = np.cumsum(sizes[order])
    before = sums - sizes[order]
    opens = np.flatnonzero(np.diff(slots[order], prepend=-1))
    lengths = np.diff(np.append(opens, len(slots)))
    within = before - np.repeat(before[opens], lengths)
    starts = np.empty(len(slots), np.int64)
    starts[order] = flat[slots[order]] + within
    np.add.at(flat, slots, sizes)
    return starts


def _pieces(leaf: ArrayLeaf, share: Share | Boxes) -> _Many:
    if leaf.per_rank is not None:
        ranks = decode_runs(leaf.per_rank)
        sizes = np.full(len(ranks), leaf.nbytes, np.int64)
        owners: Owners = Boxes(())
    else:
        owners = owners_of(leaf, share)
        if isinstance(owners, Boxes):
            ranks = np.array([rank for rank, _ in owners.pieces], np.int64)
            sizes = np.array([region.size for _, region in owners.pieces], np.int64) * leaf.itemsize
        else:
            ranks = owners.ranks
            sizes = np.full(1, leaf.itemsize, np.int64)
            for first, last in zip(owners.starts, owners.stops, strict=True):
                sizes = (sizes[:, None] * (last - first)).reshape(-1)
    loose = order_class(1, leaf.align or leaf.itemsize)
    orders = np.where(sizes % PAGE == 0, 0, np.where(sizes % LINE == 0, 1, loose))
    return _Many(ranks, owners, orders, sizes)
