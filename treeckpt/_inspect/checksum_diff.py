"""Compares the bytes of two arrays by the checksums in the shards' headers, without reading the arrays.

The arrays are compared chunk by chunk. Where two chunks have the same offset within a block, equal checksums of all
their blocks prove equal bytes, and a block that differs and lies inside both chunks proves changed bytes. In all other
cases (other chunks, another offset, a difference in a block that neighbours share) the result is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from .._core.format.byte_map import ChunkLocation, locate_chunks
from .._core.format.records import File, Index, Leaf

ByteComparison = Literal["equal", "changed", "unknown"]


class Checksums(msgspec.Struct, frozen=True):
    """The checksums of a shard's data area."""

    hashes: np.ndarray
    """uint64[blocks]."""
    block: int
    """Bytes of each block, except the last."""


ChecksumReader = Callable[[File], Checksums]


def compare_checksums(
    a: Index, x: Leaf, b: Index, y: Leaf, checksums: tuple[ChecksumReader, ChecksumReader]
) -> ByteComparison:
    """Compares leaf `x` of index `a` with leaf `y` of index `b`, which have one shape and dtype.

    Args:
        checksums: readers of the checksums of the files of `a` and of `b`.
    """
    left, right = (sorted(locate_chunks(i, leaf), key=lambda c: (c.region, c.rank)) for i, leaf in ((a, x), (b, y)))
    if [c.region for c in left] != [c.region for c in right]:
        return "unknown"
    verdict: ByteComparison = "equal"
    for one, other in zip(left, right, strict=True):
        found = _compare_chunks(one, other, checksums[0](one.file), checksums[1](other.file))
        if found == "changed":
            return "changed"
        verdict = verdict if found == "equal" else "unknown"
    return verdict


def _compare_chunks(one: ChunkLocation, other: ChunkLocation, sums: Checksums, others: Checksums) -> ByteComparison:
    start, stop = one.start - one.file.header, one.stop - one.file.header
    shift = other.start - other.file.header - start
    if start == stop:
        return "equal"
    if sums.block != others.block or shift % sums.block:
        return "unknown"
    block, moved = sums.block, shift // sums.block
    low, high = start // block, -(-stop // block)
    differs = np.flatnonzero(sums.hashes[low:high] != others.hashes[low + moved : high + moved]) + low
    if not len(differs):
        return "equal"  # all blocks that cover the chunk are equal
    inside = (differs * block >= start) & ((differs + 1) * block <= stop)
    return "changed" if inside.any() else "unknown"
