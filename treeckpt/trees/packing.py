"""Sends regions of many arrays in few messages: a thousand leaves take a handful of them.

Sender and receivers compute the same packing from the same list of regions; no headers are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from ..arrays.base import ArraySource, ArrayTarget, HostArray, SourcePiece, TargetPiece, raw_dtype
from ..core.sharding.region import Region
from .moving import fill
from .transport import Transport

BUCKET_NBYTES = 64 << 20
"""Size of a message in bytes, at most, unless a single region is larger."""
ALIGN = 16


class PackedRegion(msgspec.Struct, frozen=True):
    """A region of the array at a path."""

    path: str
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


def send_regions(
    entries: Sequence[PackedRegion],
    limit: int,
    transport: Transport,
    *,
    sender: int,
    receivers: Collection[int],
    sources: Mapping[str, ArraySource],
    targets: Mapping[str, ArrayTarget],
) -> None:
    """Sends regions of one rank's arrays to others; every rank calls it with the same entries.

    Args:
        receivers: the ranks that get them; the sender too, if it is to fill targets of its own.
        sources: this rank's arrays by path, if it is the sender.
        targets: the arrays to fill, if it is a receiver; regions of others are ignored.
    """
    sends, receives = transport.rank == sender, transport.rank in receivers
    for bucket in pack_regions(entries, limit) if sends or receives else ():
        data = np.zeros(bucket.nbytes, np.uint8) if sends else np.empty(bucket.nbytes, np.uint8)
        places = [(entry, _window(data, entry, at)) for entry, at in bucket.entries]
        if sends:
            for entry, place in places:
                fill([TargetPiece(entry.region, place)], sources[entry.path].pieces)
        if len(receivers) == transport.size:
            transport.broadcast(data, sender)
        elif sends:
            transport.exchange([(rank, data) for rank in receivers if rank != sender], [])
        else:
            transport.exchange([], [(sender, data)])
        for entry, place in places if receives else ():
            pieces = targets[entry.path].pieces if entry.path in targets else ()
            exact = [piece for piece in pieces if piece.region == entry.region]
            fill(exact or pieces, [SourcePiece(entry.region, place)])
