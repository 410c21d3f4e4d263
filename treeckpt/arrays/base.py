"""The seam between libraries' arrays and the engine: sources to read from and targets to write to, as raw bytes.

Bytes travel as numpy arrays of a *raw* dtype that only knows its width, so bfloat16 and float8 need nothing special. A
source or target is a list of pieces: a region of the global array, and something that gives or takes boxes of it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from ..core.sharding.placements import Layout
from ..core.sharding.region import Region, c_strides
from ..core.tree.spec import ArraySpec
from ..core.tree.value_codec import Typed

__all__ = [
    "Adapter",
    "Box",
    "Flat",
    "HostArray",
    "HostMemory",
    "Piece",
    "Readable",
    "Source",
    "Spread",
    "Storage",
    "Take",
    "Target",
    "TargetPiece",
    "Window",
    "Writable",
    "local_pieces",
    "local_shape_of",
    "overlaps_itself",
    "raw_dtype",
]

Box = tuple[slice, ...]

_RAW = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8"), 16: np.dtype("<c16")}


def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """The numpy dtype under which elements of `itemsize` bytes are moved."""
    return _RAW.get(itemsize) or np.dtype(f"V{itemsize}")


class Readable(Protocol):
    """Gives the elements of a box as a host array of the same width, a view where it can."""

    def read(self, box: Box) -> np.ndarray: ...


class Writable(Protocol):
    """Takes the elements of a box from a host array of raw dtype, whose memory is another's when `write` returns."""

    def write(self, box: Box, data: np.ndarray) -> None: ...


@runtime_checkable
class Spread(Protocol):
    """A stretch of bytes that goes to several places in memory."""

    def write(self, box: Box, data: np.ndarray) -> None: ...

    def parts(self, low: int, high: int) -> list[memoryview] | None:
        """The memory that bytes `low:high` go to, in order; None where that cannot be told."""
        ...


class Window(msgspec.Struct, frozen=True, gc=False):
    """Where the elements of an array stand in memory."""

    address: int
    """Of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes; for C order those of C order."""
    itemsize: int

    @property
    def extent(self) -> tuple[int, int]:
        """Where its bytes begin and stop."""
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return self.address + low, self.address + high + self.itemsize

    @property
    def in_c_order(self) -> bool:
        """Whether all of it is one run of bytes, in C order."""
        pairs = zip(self.shape, self.strides, c_strides(self.shape, self.itemsize), strict=True)
        return all(n == 1 or step == dense for n, step, dense in pairs)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        kind = raw_dtype(self.itemsize).str
        return {"version": 3, "shape": self.shape, "typestr": kind, "data": data, "strides": self.strides}


class HostArray(msgspec.Struct, frozen=True, gc=False):
    """Memory that numpy can address: both readable and writable, without a copy."""

    array: np.ndarray
    """Any strides; of raw dtype where it is written to."""

    @property
    def window(self) -> Window:
        """Where it stands."""
        array = self.array
        return Window(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)

    def read(self, box: Box) -> np.ndarray:
        return self.array[box]

    def write(self, box: Box, data: np.ndarray) -> None:
        self.array[box] = data


class HostMemory(msgspec.Struct, frozen=True, gc=False):
    """A whole array in C order, known by its address: bytes are copied from and to it without making a numpy array.

    Most leaves of an optimizer are of a few bytes, and making an array for each takes longer than all else.
    """

    address: int
    """Of the first element; there is at least one."""
    shape: tuple[int, ...]
    itemsize: int
    owner: Any
    """Keeps the memory where it is."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"version": 3, "shape": self.shape, "typestr": raw_dtype(self.itemsize).str, "data": data}

    @property
    def array(self) -> np.ndarray:
        """The same memory for numpy, of raw dtype."""
        return np.asarray(self)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def window(self) -> Window:
        """Where it stands."""
        return Window(self.address, self.shape, c_strides(self.shape, self.itemsize), self.itemsize)

    def tobytes(self) -> bytes:
        """A copy of all of it."""
        return ctypes.string_at(self.address, self.nbytes)

    def read(self, box: Box) -> np.ndarray:
        return self.array[box]

    def write(self, box: Box, data: np.ndarray) -> None:
        self.array[box] = data


class Flat:
    """A stretch of a 1-D array seen as a box of a global one."""

    def __init__(self, data: Any, start: int, shape: tuple[int, ...]) -> None:
        self.data, self.start, self.shape = data, start, shape
        self._lock = threading.Lock()

    @property
    def window(self) -> Window | None:
        """Where it stands, if that is known."""
        whole: Window | None = getattr(self.data, "window", None)
        if whole is None:
            return None
        [step] = whole.strides
        address = whole.address + self.start * step
        return Window(address, self.shape, c_strides(self.shape, step), whole.itemsize)

    def _span(self, box: Box) -> tuple[int, int]:
        """The stretch of the 1-D array from the first element of a box to behind its last."""
        steps = c_strides(self.shape, 1)
        if any(side.stop <= side.start for side in box):
            return self.start, self.start
        first = sum(side.start * step for side, step in zip(box, steps, strict=True))
        last = sum((side.stop - 1) * step for side, step in zip(box, steps, strict=True))
        return self.start + first, self.start + last + 1

    def _inside(self, span: np.ndarray, box: Box) -> np.ndarray:
        """A box in the stretch that holds it, sharing its memory."""
        shape = tuple(max(side.stop - side.start, 0) for side in box)
        return np.lib.stride_tricks.as_strided(span, shape, c_strides(self.shape, span.strides[0]))

    def read(self, box: Box) -> np.ndarray:
        low, high = self._span(box)
        return self._inside(self.data.read((slice(low, high),)), box)

    def write(self, box: Box, data: np.ndarray) -> None:
        low, high = self._span(box)
        where = (slice(low, high),)
        if isinstance(self.data, (HostArray, HostMemory)):
            self._inside(self.data.read(where), box)[...] = data
            return
        with self._lock:  # what lies between is put back as it was, and another thread may be writing there
            if high - low == data.size:
                self.data.write(where, data.reshape(-1))
                return
            span = np.array(self.data.read(where))
            self._inside(span, box)[...] = data
            self.data.write(where, span)


Take = Callable[[int], memoryview]
"""Gives new host memory of so many bytes, which arrays may share the life of; None leaves it to the library."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A region of a global array and the local memory that holds it."""

    region: Region
    data: Readable


class TargetPiece(msgspec.Struct, frozen=True, gc=False):
    """A region of a global array and the local memory that is to hold it."""

    region: Region
    data: Writable


class Storage(msgspec.Struct, frozen=True, gc=False):
    """Which memory a plain array shows: arrays whose stretches overlap are ties and views of each other."""

    address: int
    """Of the first element."""
    nbytes: int
    """From there to the end of the last element."""
    strides: tuple[int, ...] | None
    """In elements; None for C order."""


class Source(msgspec.Struct, frozen=True, gc=False):
    """An array to be saved, as seen by one rank."""

    spec: ArraySpec
    layout: Layout | None
    """None for a plain array: all of it is here, and every rank that has it holds a replica."""
    pieces: Sequence[Piece]
    storage: Storage | None = None
    """None where the memory is not to be compared (on a device of its own, or lazily transformed)."""


class Target(msgspec.Struct, frozen=True, gc=False):
    """An array to be filled: `leaf` is what the tree gets, `pieces` what the engine writes to."""

    spec: ArraySpec
    leaf: Any
    pieces: Sequence[TargetPiece]


def local_shape_of(spec: ArraySpec) -> tuple[int, ...]:
    """The shape of an array that holds what a spec asks for.

    Regions that make a grid, as the pieces of a strided shard do, are packed into one array of as many dimensions; any
    others, as a flat range cut into boxes, follow each other in one dimension.
    """
    if spec.regions is None:
        return spec.shape
    grid = _grid_of(spec.regions)
    if grid is None:
        return (sum(region.size for region in spec.regions),)
    return tuple(sum(length for _, length in intervals) for intervals in grid)


def local_pieces(spec: ArraySpec, at: Callable[[Box], Writable]) -> list[TargetPiece]:
    """Where each region of a spec stands in an array of its `local_shape_of`; `at` gives a box of that array."""
    if spec.regions is None:
        return [TargetPiece(Region.whole(spec.shape), at(tuple(slice(0, n) for n in spec.shape)))]
    grid = _grid_of(spec.regions)
    if grid is not None:
        starts = [list(itertools.accumulate((n for _, n in intervals), initial=0))[:-1] for intervals in grid]
        boxes = zip(spec.regions, itertools.product(*starts), strict=True)
        return [TargetPiece(r, at(tuple(slice(a, a + n) for a, n in zip(s, r.shape, strict=True)))) for r, s in boxes]
    whole = at((slice(0, sum(region.size for region in spec.regions)),))
    ends = itertools.accumulate((region.size for region in spec.regions), initial=0)
    return [TargetPiece(region, Flat(whole, start, region.shape)) for region, start in zip(spec.regions, ends)]  # noqa: B905


def _grid_of(regions: Sequence[Region]) -> list[list[tuple[int, int]]] | None:
    """Per dimension the (start, length) whose product, in C order, the regions are; None if they are none."""
    if not regions:
        return None
    sides = [tuple(zip(region.offset, region.shape, strict=True)) for region in regions]
    grid = [list(dict.fromkeys(side)) for side in zip(*sides, strict=True)]
    return grid if list(itertools.product(*grid)) == sides else None


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a strided array may share memory; never False where they do."""
    if 0 in shape:
        return False
    reach = 0
    for step, n in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


class Adapter(Protocol):
    """What a library's module offers; each function says None for a leaf that is not its own."""

    def source(self, leaf: Any, path: str, rank: int) -> Source | None:
        """Describes an array that is to be saved."""
        ...

    def abstract(self, leaf: Any, path: str, rank: int) -> ArraySpec | None:
        """Says what an array is, without its data."""
        ...

    def target(self, leaf: Any, path: str, rank: int) -> Target | None:
        """Describes an array that is to be filled in place."""
        ...

    def like(self, leaf: Any, path: str, rank: int, device: str | None, *, take: Take | None = None) -> Target | None:
        """Makes a new array of the leaf's shape, dtype, device and layout; on the host in memory from `take`."""
        ...

    def empty(self, spec: ArraySpec, path: str, device: str | None, *, take: Take | None = None) -> Target:
        """Makes a new array from a spec; on the host in memory from `take`."""
        ...

    def wrap(self, spec: ArraySpec, memory: memoryview, offset: int) -> Any:
        """An array that shows `memory` from byte `offset` on, without a copy."""
        ...

    def view(self, base: Any, spec: ArraySpec, offset: int, strides: tuple[int, ...]) -> Any:
        """A strided window, in elements, into a contiguous array, sharing its memory."""
        ...

    def known_dtype(self, name: str, path: str = ..., /) -> Any:
        """The library's dtype of this name.

        Raises:
            MismatchError: at `path`; it has none.
        """
        ...

    def mark_written(self, leaves: Sequence[Any]) -> None:
        """Has the library know that arrays of it are written to past it."""
        ...

    def cast(self, data: np.ndarray, saved: str, wanted: str) -> np.ndarray:
        """Converts elements of raw dtype from one dtype to another."""
        ...

    def encode(self, value: Any) -> Typed | None:
        """The stored form of a value of the library's (a dtype, a device ...)."""
        ...

    def decode(self, value: Typed) -> Any:
        """The inverse of `encode`; raises LookupError for a kind that is not its own."""
        ...
