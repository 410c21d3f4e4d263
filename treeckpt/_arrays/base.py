"""Interfaces between array libraries and the reading and writing of files: sources to read from, targets to write to.

Elements are moved as numpy arrays of a *raw* dtype that has only a width, so bfloat16 and float8 need no special
treatment. A source or target is a list of pieces: a region of the global array, and an object that reads or writes
boxes of it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from .._core.sharding.dtypes import dtype_of
from .._core.sharding.placements import Layout
from .._core.sharding.region import Region, c_strides
from .._core.tree.spec import ArraySpec
from ..errors import TreeError

Box = tuple[slice, ...]


class PartsNeeded(TreeError):
    """A sparse or nested tensor, which is saved and filled as its parts, has not been taken apart."""


# numpy has no integer of 16 bytes
_RAW = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8"), 16: np.dtype("<c16")}


def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """Returns the numpy dtype under which elements of `itemsize` bytes are moved."""
    return _RAW.get(itemsize) or np.dtype(f"V{itemsize}")


class ArrayReader(Protocol):
    """Returns the elements of a box as a host array of the same width, a view where possible."""

    def read(self, box: Box) -> np.ndarray: ...


class ArrayWriter(Protocol):
    """Writes a host array of raw dtype to a box; the caller may reuse the array's memory when `write` returns."""

    def write(self, box: Box, data: np.ndarray) -> None: ...


class StridedMemory(msgspec.Struct, frozen=True, gc=False):
    """Addresses of the elements of an array."""

    address: int
    """The address of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The strides in bytes; equal to `c_strides` for an array in C order, whatever its dimensions of length 1."""
    itemsize: int

    @property
    def extent(self) -> tuple[int, int]:
        """Addresses of the first byte, and of the byte after the last."""
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return self.address + low, self.address + high + self.itemsize

    @property
    def in_c_order(self) -> bool:
        """Whether the elements are one range of bytes, in C order."""
        pairs = zip(self.shape, self.strides, c_strides(self.shape, self.itemsize), strict=True)
        return all(n == 1 or step == dense for n, step, dense in pairs)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        kind = raw_dtype(self.itemsize).str
        return {"version": 3, "shape": self.shape, "typestr": kind, "data": data, "strides": self.strides}


class HostArray(msgspec.Struct, frozen=True, gc=False):
    """An array in memory that numpy can address: read and written without a copy."""

    array: np.ndarray
    """The array, of any strides; of raw dtype where it is written to."""

    @property
    def window(self) -> StridedMemory:
        """Addresses of the elements."""
        array = self.array
        return StridedMemory(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)

    def read(self, box: Box) -> np.ndarray:
        return self.array[box]

    def write(self, box: Box, data: np.ndarray) -> None:
        self.array[box] = data


class HostMemory(msgspec.Struct, frozen=True, gc=False):
    """A whole array in C order, given by its address: bytes are copied from and to it without creating a numpy array.

    Most leaves of an optimizer have a few bytes, and creating an array for each takes longer than all else.
    """

    address: int
    """The address of the first element; the array has at least one."""
    shape: tuple[int, ...]
    itemsize: int
    owner: Any
    """What keeps the memory allocated."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"version": 3, "shape": self.shape, "typestr": raw_dtype(self.itemsize).str, "data": data}

    @property
    def array(self) -> np.ndarray:
        """The same memory as a numpy array of raw dtype."""
        return np.asarray(self)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def window(self) -> StridedMemory:
        """Addresses of the elements."""
        return StridedMemory(self.address, self.shape, c_strides(self.shape, self.itemsize), self.itemsize)

    def tobytes(self) -> bytes:
        """Returns a copy of all bytes."""
        return ctypes.string_at(self.address, self.nbytes)

    def read(self, box: Box) -> np.ndarray:
        return self.array[box]

    def write(self, box: Box, data: np.ndarray) -> None:
        self.array[box] = data


class FlatRangeArray:
    """A range of a 1-D array that holds a box of a global array, in C order.

    Args:
        data: reads or writes the 1-D array.
        start: of the range, in elements.
        shape: of the box.
    """

    def __init__(self, data: Any, start: int, shape: tuple[int, ...]) -> None:
        self.data, self.start, self.shape = data, start, shape
        self._lock = threading.RLock()

    @property
    def window(self) -> StridedMemory | None:
        """Addresses of the elements; None where they are not known."""
        whole: StridedMemory | None = getattr(self.data, "window", None)
        if whole is None:
            return None
        [step] = whole.strides
        address = whole.address + self.start * step
        return StridedMemory(address, self.shape, c_strides(self.shape, step), whole.itemsize)

    def _span(self, box: Box) -> tuple[int, int]:
        """Returns the range of the 1-D array from the first element of a box to after its last one."""
        steps = c_strides(self.shape, 1)
        if any(side.stop <= side.start for side in box):
            return self.start, self.start
        first = sum(side.start * step for side, step in zip(box, steps, strict=True))
        last = sum((side.stop - 1) * step for side, step in zip(box, steps, strict=True))
        return self.start + first, self.start + last + 1

    def _inside(self, span: np.ndarray, box: Box) -> np.ndarray:
        """Returns a box as a view of the range that holds it."""
        shape = tuple(max(side.stop - side.start, 0) for side in box)
        return np.lib.stride_tricks.as_strided(span, shape, c_strides(self.shape, span.strides[0]))

    def tensor_at(self, box: Box) -> Any:
        """Returns a box as a view of a tensor; None where the range is not one of a tensor."""
        low, high = self._span(box)
        span = tensor_at(self.data, (slice(low, high),))
        if span is None:
            return None
        shape = tuple(max(side.stop - side.start, 0) for side in box)
        return span.as_strided(shape, c_strides(self.shape, span.stride(0)), span.storage_offset())

    def read(self, box: Box) -> np.ndarray:
        low, high = self._span(box)
        return self._inside(self.data.read((slice(low, high),)), box)

    def write(self, box: Box, data: np.ndarray) -> None:
        low, high = self._span(box)
        where = (slice(low, high),)
        if isinstance(self.data, (HostArray, HostMemory)):
            self._inside(self.data.read(where), box)[...] = data
            return
        # elements between those of the box are written back unchanged, and another thread may write them
        with self._lock:
            if high - low == data.size:
                self.data.write(where, data.reshape(-1))
                return
            span = np.array(self.data.read(where))
            self._inside(span, box)[...] = data
            self.data.write(where, span)


def tensor_at(data: object, box: Box) -> Any:
    """Returns a box of an array as a view of a tensor, where numpy cannot address it; None for any other array."""
    view = getattr(data, "tensor_at", None)
    return None if view is None else view(box)


Allocate = Callable[[int], memoryview]
"""Returns new host memory of so many bytes; a parameter of None leaves the allocation to the library."""


class SourcePiece(msgspec.Struct, frozen=True, gc=False):
    """A region of a global array, and the local memory that holds it."""

    region: Region
    data: ArrayReader


class TargetPiece(msgspec.Struct, frozen=True, gc=False):
    """A region of a global array, and the local memory to write it to."""

    region: Region
    data: ArrayWriter


class Storage(msgspec.Struct, frozen=True, gc=False):
    """The memory of a plain array: arrays whose ranges overlap are aliases or views of each other."""

    address: int
    """The address of the first element."""
    nbytes: int
    """The bytes from there to the end of the last element."""
    strides: tuple[int, ...] | None
    """The strides in elements; None for C order."""

    @property
    def range(self) -> tuple[int, int]:
        """Addresses of the first byte, and of the byte after the last."""
        return self.address, self.address + self.nbytes


class ArraySource(msgspec.Struct, frozen=True, gc=False):
    """An array to save, as one rank holds it."""

    spec: ArraySpec
    layout: Layout | None
    """The layout among ranks; None for a plain array, of which every rank that has it holds a replica."""
    pieces: Sequence[SourcePiece]
    storage: Storage | None = None
    """The memory, to find aliases; None where it is not compared with that of other arrays, as of lazy ones."""

    @property
    def is_stored(self) -> bool:
        """Whether another checkpoint has it, and it is not written again."""
        return any(isinstance(piece.data, StoredElsewhere) for piece in self.pieces)


class StoredElsewhere:
    """The data of an array that another checkpoint has in its files, and that is not written again."""

    def read(self, box: Box) -> np.ndarray:
        raise AssertionError("its files are shared")


class ArrayTarget(msgspec.Struct, frozen=True, gc=False):
    """An array to fill: `leaf` is put into the tree, `pieces` are written to."""

    spec: ArraySpec
    leaf: Any
    pieces: Sequence[TargetPiece]
    layout: Layout | None = None
    """The layout among ranks; None where only this rank's pieces are known."""


def local_shape_of(spec: ArraySpec) -> tuple[int, ...]:
    """Returns the shape of the local array that holds the regions of a spec.

    Regions that form a grid, as the pieces of a strided shard, are packed into one array of as many dimensions; other
    ones, as a flat range cut into boxes, follow each other in one dimension.
    """
    if spec.regions is None:
        return spec.shape
    grid = _grid_of(spec.regions)
    if grid is None:
        return (sum(region.size for region in spec.regions),)
    return tuple(sum(length for _, length in intervals) for intervals in grid)


def local_pieces(spec: ArraySpec, at: Callable[[Box], ArrayWriter]) -> list[TargetPiece]:
    """Returns the pieces of a spec's regions in an array of its `local_shape_of`.

    Args:
        at: returns the writer of a box of that array.
    """
    if spec.regions is None:
        return [TargetPiece(Region.whole(spec.shape), at(tuple(slice(0, n) for n in spec.shape)))]
    grid = _grid_of(spec.regions)
    if grid is not None:
        starts = [list(itertools.accumulate((n for _, n in intervals), initial=0))[:-1] for intervals in grid]
        boxes = zip(spec.regions, itertools.product(*starts), strict=True)
        return [TargetPiece(r, at(tuple(slice(a, a + n) for a, n in zip(s, r.shape, strict=True)))) for r, s in boxes]
    ends = list(itertools.accumulate(region.size for region in spec.regions))
    flat = at((slice(0, sum(region.size for region in spec.regions)),))
    return [
        TargetPiece(region, FlatRangeArray(flat, end - region.size, region.shape))
        for region, end in zip(spec.regions, ends, strict=True)
    ]


def _grid_of(regions: Sequence[Region]) -> list[list[tuple[int, int]]] | None:
    """Returns per dimension the (start, length) whose product, in C order, the regions are; None if there is none."""
    if not regions:
        return None
    sides = [tuple(zip(region.offset, region.shape, strict=True)) for region in regions]
    grid = [list(dict.fromkeys(side)) for side in zip(*sides, strict=True)]
    return grid if list(itertools.product(*grid)) == sides else None


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether two elements of a strided array may share memory; never False where they do."""
    if 0 in shape:
        return False
    reach = 0
    for step, n in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


class Adapter(Protocol):
    """The functions of a library's module, for the arrays of this library."""

    def source(self, leaf: Any, path: str, rank: int) -> ArraySource:
        """Describes an array to save."""
        ...

    def abstract(self, leaf: Any, path: str, rank: int) -> ArraySpec:
        """Returns the spec of an array."""
        ...

    def target(self, leaf: Any, path: str, rank: int) -> ArrayTarget:
        """Describes an array to fill in place."""
        ...

    def like(
        self, leaf: Any, path: str, rank: int, device: str | None, *, allocate: Allocate | None = None
    ) -> ArrayTarget:
        """Creates an array of the leaf's shape, dtype, device and layout; on the host in memory from `allocate`."""
        ...

    def empty(self, spec: ArraySpec, path: str, device: str | None, *, allocate: Allocate | None = None) -> ArrayTarget:
        """Creates an array from a spec; on the host in memory from `allocate`."""
        ...

    def wrap(self, spec: ArraySpec, memory: memoryview, offset: int) -> Any:
        """Returns an array that uses `memory` from byte `offset` on, without a copy: the memory may be filled later.

        The order of the spec is that of the memory: C order, but for dimensions of length 1.
        """
        ...

    def view(self, base: Any, spec: ArraySpec, offset: int, strides: tuple[int, ...]) -> Any:
        """Returns a strided view, in elements of its memory, of a dense array."""
        ...

    def known_dtype(self, name: str, path: str = ..., /) -> Any:
        """Returns the library's dtype of this name.

        Raises:
            MismatchError: for `path`: the library has none.
        """
        ...

    def mark_written(self, leaves: Sequence[Any]) -> None:
        """Tells the library that its arrays were written to without its functions."""
        ...

    def cast(self, data: np.ndarray, saved: str, wanted: str) -> np.ndarray:
        """Converts elements of raw dtype from one dtype to another."""
        ...


class LazyArray:
    """An array given by its spec and by a function that reads any region of it.

    Args:
        read: returns a region's elements, of raw dtype and in the region's shape.
        storage: its range of some address space: lazy arrays that overlap there are aliases or views of each other.
            Choose addresses that no memory has.
    """

    __slots__ = ("_read", "spec", "storage")

    def __init__(self, spec: ArraySpec, read: Callable[[Region], np.ndarray], storage: Storage | None = None) -> None:
        self.spec, self._read, self.storage = spec, read, storage

    def __repr__(self) -> str:
        return f"Lazy({self.spec.dtype}, {self.spec.shape})"

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.spec.shape) * dtype_of(self.spec.dtype).itemsize

    def read(self, region: Region) -> np.ndarray:
        """Returns the elements of a region, of raw dtype."""
        data = self._read(region)
        assert data.shape == region.shape, "a reader returns the region that was requested"
        return data


class _LazyReader:
    """Reads boxes of a lazy array, for a source."""

    def __init__(self, lazy: LazyArray) -> None:
        self._lazy = lazy

    def read(self, box: Box) -> np.ndarray:
        pairs = [side.indices(n) for side, n in zip(box, self._lazy.spec.shape, strict=True)]
        return self._lazy.read(Region(tuple(a for a, _, _ in pairs), tuple(max(0, b - a) for a, b, _ in pairs)))


def lazy_source(leaf: LazyArray) -> ArraySource:
    """Describes a lazy array to save."""
    return ArraySource(leaf.spec, None, (SourcePiece(Region.whole(leaf.spec.shape), _LazyReader(leaf)),), leaf.storage)
