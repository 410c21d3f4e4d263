"""Dealing bytes out: a stretch of a rank's stream that holds many small arrays goes to the memory of each.

The stretch is read and verified like any other array of bytes; only here it falls apart again, by one copy for each
small array. Which arrays are small and lie together, `filling` decides.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np

from .leaves.base import Box, HostMemory

__all__ = ["SMALL", "Dealer", "Few"]

SMALL = 64 << 10
"""Bytes up to which an array is dealt its bytes; a larger one is worth a copy by numpy, and may be cut into blocks."""


class Few(msgspec.Struct, frozen=True, gc=False):
    """A small array: where its bytes lie in `rank`'s stream, and where they are to go."""

    path: str
    rank: int
    start: int
    nbytes: int
    memory: HostMemory


class Dealer:
    """The memory of small arrays as one writable stretch of bytes, the byte at stream offset `start` first.

    Args:
        members: by where they start; none longer than `SMALL`. They may overlap, and leave gaps.
    """

    def __init__(self, start: int, members: Sequence[Few]) -> None:
        self._starts = [few.start - start for few in members]
        self._members = members

    def write(self, box: Box, data: np.ndarray) -> None:
        """Takes bytes `box[0]` of the stretch."""
        [part] = box
        low, high = part.start, part.stop
        data = np.ascontiguousarray(data)
        base = data.ctypes.data - low
        first, last = bisect_left(self._starts, low - SMALL), bisect_left(self._starts, high)
        for start, few in zip(self._starts[first:last], self._members[first:last], strict=True):
            if low <= start and start + few.nbytes <= high:
                ctypes.memmove(few.memory.address, base + start, few.nbytes)
            elif (stop := min(start + few.nbytes, high)) > (begin := max(start, low)):
                ctypes.memmove(few.memory.address + begin - start, base + begin, stop - begin)
