"""Packs regions of many arrays into few messages, so that a thousand leaves take a handful of them.

Sender and receivers compute the same packing from the same list of regions; no headers are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from ..arrays.base import HostArray, SourcePiece, TargetPiece, raw_dtype
from ..core.sharding.region import Region
from .moving import fill

__all__ = ["BUCKET_NBYTES", "MessageBucket", "PackedRegion", "empty_bytes", "pack", "pack_regions", "unpack"]

BUCKET_NBYTES = 64 << 20
"""Size of a message in bytes, at most, unless a single region is larger."""
ALIGN = 16


class PackedRegion(msgspec.Struct, frozen=True):
    """A region of an array; `number` identifies the array on both sides."""

    number: int
    region: Region
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.region.size * self.itemsize


class MessageBucket(msgspec.Struct, frozen=True):
    """The regions of one message, each with its first byte in it."""

    entries: tuple[tuple[PackedRegion, int], ...]
    nbytes: int


def pack_regions(entries: Sequence[PackedRegion], limit: int) -> Iterator[MessageBucket]:
    """Yields buckets of at most `limit` bytes, or of one region, in order; omits empty regions."""
    found: list[tuple[PackedRegion, int]] = []
    at = 0
    for entry in entries:
        if not entry.nbytes:
            continue
        if found and at + entry.nbytes > limit:
            yield MessageBucket(tuple(found), at)
            found, at = [], 0
        found.append((entry, at))
        at += -(-entry.nbytes // ALIGN) * ALIGN
    if found:
        yield MessageBucket(tuple(found), at)


def _window(data: np.ndarray, entry: PackedRegion, at: int) -> HostArray:
    raw = data[at : at + entry.nbytes].view(raw_dtype(entry.itemsize))
    return HostArray(raw.reshape(entry.region.shape))


def pack(bucket: MessageBucket, parts: Callable[[int], Sequence[SourcePiece]]) -> np.ndarray:
    """Returns the bytes of a bucket, read from this rank's pieces of each array."""
    data = np.zeros(bucket.nbytes, np.uint8)
    for entry, at in bucket.entries:
        fill([TargetPiece(entry.region, _window(data, entry, at))], parts(entry.number))
    return data


def unpack(data: np.ndarray, bucket: MessageBucket, pieces: Callable[[PackedRegion], Sequence[TargetPiece]]) -> None:
    """Writes the bytes of a bucket to pieces of the arrays."""
    for entry, at in bucket.entries:
        fill(pieces(entry), [SourcePiece(entry.region, _window(data, entry, at))])


def empty_bytes(bucket: MessageBucket) -> np.ndarray:
    """Returns memory for the bytes of a bucket."""
    return np.empty(bucket.nbytes, np.uint8)
