"""Dealing bytes out: a stretch of a rank's stream goes to the memory of the arrays, or parts of arrays, that lie there.

Whatever is one run of bytes both in the file and in memory is dealt: small arrays and large ones that are wanted whole,
and rows of them. The stretch is read and verified like any other array of bytes; only here it falls apart again, by
one copy for each member, or none: what waits in the page cache is read straight to where it belongs.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ..arrays.base import Box, HostMemory
from ..core.sharding.region import Region, byte_runs

__all__ = ["Destination", "Scatter", "deal"]

WRITABLE = 0x200
"""PyBUF_WRITE of CPython's buffers."""
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory  # an array type of ctypes for each size takes ten times as long
_view_of.restype, _view_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
MOST = 256
"""Members of a stretch above which it is read at once and dealt from a buffer."""


class Destination(msgspec.Struct, frozen=True, gc=False):
    """A run of bytes: where it lies in `rank`'s stream, and the memory that it is to fill."""

    path: str
    rank: int
    start: int
    nbytes: int
    address: int
    memory: HostMemory
    """Keeps what is at the address where it is."""


def deal(
    path: str, chunk: tuple[Region, int, int], region: Region, memory: HostMemory, box: Region
) -> Destination | None:
    """The member that fills `box` of a wanted region from a chunk; None where it is not one run of bytes in both.

    Args:
        chunk: its region, the rank that wrote it, and where it starts in that rank's stream.
        memory: what holds `region`.
    """
    whole, rank, start = chunk
    source = byte_runs(box, whole, memory.itemsize)
    target = byte_runs(box, region, memory.itemsize)
    if source.counts or target.counts:
        return None
    return Destination(path, rank, start + source.first, source.length, memory.address + target.first, memory)


class Scatter:
    """The memory of some members as one stretch of bytes, the byte at stream offset `start` first.

    Args:
        members: by where they start. They may overlap, and leave gaps.
    """

    def __init__(self, start: int, members: Sequence[Destination]) -> None:
        self._starts = [member.start - start for member in members]
        self._longest = max((member.nbytes for member in members), default=0)
        self._members = members

    def _between(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """For each member with bytes in `low:high`: where they begin and stop, and the address of the first."""
        first, last = bisect_left(self._starts, low - self._longest), bisect_left(self._starts, high)
        for start, member in zip(self._starts[first:last], self._members[first:last], strict=True):
            begin, stop = max(start, low), min(start + member.nbytes, high)
            if begin < stop:
                yield begin, stop, member.address + begin - start

    def write(self, box: Box, data: np.ndarray) -> None:
        """Takes bytes `box[0]` of the stretch."""
        [part] = box
        data = np.ascontiguousarray(data)
        base = data.ctypes.data - part.start
        for begin, stop, address in self._between(part.start, part.stop):
            ctypes.memmove(address, base + begin, stop - begin)

    def parts(self, low: int, high: int) -> list[memoryview] | None:
        """The memory that bytes `low:high` go to, in order, with some to spare for the gaps.

        None where there are too many, or members overlap.
        """
        parts: list[memoryview] = []
        at = low
        for begin, stop, address in self._between(low, high):
            if begin < at or len(parts) > MOST:
                return None
            if begin > at:
                parts.append(memoryview(bytearray(begin - at)))
            parts.append(_view_of(address, stop - begin, WRITABLE))
            at = stop
        if at < high:
            parts.append(memoryview(bytearray(high - at)))
        return parts
