"""What a load reads: ranges of the bytes that ranks wrote, and the memory that each range fills.

Offsets count the bytes of all shards of one rank, end to end: the rank's stream.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from ..arrays.base import HostMemory, TargetPiece, raw_dtype
from ..arrays.registry import library_of
from ..core.planning.load_plan import Chunk
from ..core.sharding.region import Region, byte_runs, c_strides
from ..core.tree.spec import ArraySpec

__all__ = ["BoxDestination", "ContiguousMemory", "LeafPlaceholder", "NewArray", "ReadRequest", "request_for"]

D = TypeVar("D")


class ReadRequest(msgspec.Struct, Generic[D], frozen=True, gc=False):
    """Bytes that are wanted, and what they fill."""

    path: str
    """Of the leaf, for errors."""
    byte_range: tuple[int, int, int]
    """The rank whose stream it is, where the range starts, and its size in bytes."""
    destination: D


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


def request_for(path: str, chunk: Chunk, piece: TargetPiece, box: Region, itemsize: int) -> ReadRequest[Any]:
    """Returns the request that fills a box of a target from a chunk.

    Its destination is `ContiguousMemory` where the box is contiguous in file and memory, else a `BoxDestination`.
    """
    source, memory = byte_runs(box, chunk.region, itemsize), piece.data
    if isinstance(memory, HostMemory) and not source.counts:
        target = byte_runs(box, piece.region, itemsize)
        if not target.counts:
            byte_range = (chunk.rank, chunk.start + source.first, source.length)
            return ReadRequest(path, byte_range, ContiguousMemory(memory.address + target.first, memory))
    first, last = source.span
    return ReadRequest(
        path, (chunk.rank, chunk.start + first, last - first), BoxDestination(piece, box, chunk.region, itemsize)
    )
