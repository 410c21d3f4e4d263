"""What a load reads: ranges of the bytes that ranks wrote, and the memory that each range fills.

Offsets count the bytes of all shards of one rank, end to end: the rank's stream. One range that is read scatters into
all destinations that lie in it: contiguous ones (`Scatter`), or boxes (`Boxes`).
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from ..arrays.base import HostMemory, TargetPiece, raw_dtype
from ..arrays.registry import library_of
from ..core.planning.load_plan import Chunk
from ..core.sharding.region import Region, byte_runs, c_strides
from ..core.tree.spec import ArraySpec

D = TypeVar("D")
WRITABLE = 0x200
"""PyBUF_WRITE of CPython's buffers."""
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory  # an array type of ctypes for each size takes ten times as long
_view_of.restype, _view_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
MOST = 256
"""Destinations in a range above which it is read into a buffer and copied from there."""


def memory_at(address: int, nbytes: int) -> memoryview:
    """Returns memory by its address; the caller keeps it allocated."""
    return _view_of(address, nbytes, WRITABLE)


class ReadRequest(msgspec.Struct, Generic[D], frozen=True, gc=False):
    """Bytes that are wanted, and what they fill."""

    path: str
    """Of the leaf, for errors."""
    byte_range: tuple[int, int, int]
    """The rank whose stream it is, where the range starts, and its size in bytes."""
    destination: D
    shared: bool = False
    """Whether other ranks of this host want the same bytes, as far as this rank knows."""


class LeafPlaceholder:
    """A place for a leaf: known at once, or once its bytes have been read."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any = None) -> None:
        self.leaf = leaf


class NewArray(msgspec.Struct, frozen=True, gc=False):
    """A whole array that becomes a view of the memory its bytes are read into."""

    placeholder: LeafPlaceholder
    spec: ArraySpec

    def view(self, memory: memoryview, offset: int) -> None:
        """Makes the array of memory, from byte `offset` on."""
        self.placeholder.leaf = library_of(self.spec).wrap(self.spec, memory, offset)


class ContiguousMemory(msgspec.Struct, frozen=True, gc=False):
    """Contiguous bytes of an array that exists already."""

    address: int
    memory: HostMemory
    """Keeps what is at the address alive."""


class BoxDestination(msgspec.Struct, frozen=True, gc=False):
    """A box of a chunk, copied to where it belongs in a target."""

    piece: TargetPiece
    box: Region
    chunk: Region
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.box.size * self.itemsize

    def write(self, data: np.ndarray) -> None:
        """Writes the box.

        Args:
            data: uint8; the bytes of the chunk from the first to the last element of the box.
        """
        raw = raw_dtype(self.itemsize)
        if self.box.shape == self.chunk.shape:
            source = data.view(raw).reshape(self.box.shape)
        else:
            source = np.ndarray(self.box.shape, raw, data, strides=c_strides(self.chunk.shape, self.itemsize))
        self.piece.data.write(self.box.relative_to(self.piece.region).slices(), source)


def request_for(
    path: str, chunk: Chunk, piece: TargetPiece, box: Region, itemsize: int, *, shared: bool = False
) -> ReadRequest[Any]:
    """Returns the request that fills a box of a target from a chunk.

    Its destination is `ContiguousMemory` where the box is contiguous in file and memory, else a `BoxDestination`.
    """
    source, memory = byte_runs(box, chunk.region, itemsize), piece.data
    if isinstance(memory, HostMemory) and not source.counts:
        target = byte_runs(box, piece.region, itemsize)
        if not target.counts:
            byte_range = (chunk.rank, chunk.start + source.first, source.length)
            return ReadRequest(path, byte_range, ContiguousMemory(memory.address + target.first, memory), shared)
    first, last = source.span
    byte_range = (chunk.rank, chunk.start + first, last - first)
    return ReadRequest(path, byte_range, BoxDestination(piece, box, chunk.region, itemsize), shared)


class Scatter:
    """Contiguous destinations that lie close together in one rank's stream: small arrays, large ones, rows of them.

    A range of the stream is read and verified as one, and copied to each destination; or read straight into them
    without a copy, where the bytes are in the page cache.

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
            parts.append(memory_at(address, stop - begin))
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
