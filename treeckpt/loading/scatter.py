"""Scatters one range of a rank's stream into the arrays, or boxes of arrays, that lie there.

`Scatter` takes whatever is contiguous both in the file and in memory: small arrays, large ones that are wanted whole,
and rows of them. The range is read and verified as one, and then copied to each destination; or read straight into them
without a copy, where the bytes are in the page cache. `Boxes` takes everything else.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from .read_request import BoxDestination, ContiguousMemory, ReadRequest

__all__ = ["Boxes", "Scatter"]

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

    def write(self, low: int, data: memoryview) -> None:
        """Copies bytes of the stream, from `low` on, to their destinations."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        for begin, stop, target in self._between(low, low + len(data)):
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


class Boxes(msgspec.Struct, frozen=True):
    """Boxes of chunks in a range of one rank's stream, all of which is read at once."""

    requests: Sequence[ReadRequest[BoxDestination]]

    def write(self, low: int, data: memoryview) -> None:
        """Copies boxes to their destinations from bytes of the stream, from `low` on."""
        memory = np.frombuffer(data, np.uint8)
        for request in self.requests:
            _, start, nbytes = request.byte_range
            request.destination.write(memory[start - low : start - low + nbytes])

    def parts(self, low: int, high: int) -> None:
        """Returns None: boxes are not contiguous in memory."""
