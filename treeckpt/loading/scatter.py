"""Scatters one contiguous range of a rank's stream into the arrays, or parts of arrays, that lie there.

It takes whatever is contiguous both in the file and in memory: small arrays, large ones that are wanted whole, and rows
of them. The range is read and verified as one, and then copied to each destination; or read straight into them without
a copy, where the bytes are in the page cache.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import msgspec

from .read_request import ContiguousMemory, ReadRequest

__all__ = ["Scatter", "ScatterSlice"]

WRITABLE = 0x200
"""PyBUF_WRITE of CPython's buffers."""
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory  # an array type of ctypes for each size takes ten times as long
_view_of.restype, _view_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
MOST = 256
"""Destinations in a range above which it is read into a buffer and copied from there."""


class Scatter:
    """The destinations of requests that lie close together in one rank's stream.

    Args:
        requests: ordered by where they start. They may overlap, and leave gaps.
    """

    def __init__(self, requests: Sequence[ReadRequest[ContiguousMemory]]) -> None:
        self._starts = [request.byte_range[1] for request in requests]
        self._longest = max((request.byte_range[2] for request in requests), default=0)
        self._requests = requests

    def _between(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """For each destination with bytes in `low:high`: where they start and stop, and the address of the first."""
        first, last = bisect_left(self._starts, low - self._longest), bisect_left(self._starts, high)
        for start, request in zip(self._starts[first:last], self._requests[first:last], strict=True):
            begin, stop = max(start, low), min(start + request.byte_range[2], high)
            if begin < stop:
                yield begin, stop, request.destination.address + begin - start

    def copy(self, low: int, high: int, address: int) -> None:
        """Copies bytes `low:high` of the stream, which start at `address` in memory, to their destinations."""
        for begin, stop, target in self._between(low, high):
            ctypes.memmove(target, address + begin - low, stop - begin)

    def parts(self, low: int, high: int) -> list[memoryview] | None:
        """Returns the memory that bytes `low:high` go to, in order, with spare memory for the gaps.

        None where there are too many parts, or destinations overlap.
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


class ScatterSlice(msgspec.Struct, frozen=True):
    """The destinations of a part of a scattered range."""

    scatter: Scatter
