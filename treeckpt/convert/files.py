"""Byte ranges of foreign files, and arrays in them: strided, flat, or in several pieces.

Sizes in a file are not trusted: a range that is not within its file is an error before memory is allocated for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from ..arrays.base import Storage, raw_dtype
from ..arrays.lazy import LazyArray
from ..arrays.numpy import dtype_name
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, any_overlap, c_strides, flat_regions, intersect
from ..core.tree.spec import ArraySpec
from ..errors import CheckpointNotFound, CorruptError
from ..io.storage.local_read import LocalReader
from ..io.storage.open import open_store
from ..io.storage.store import LocalStore, Store

NARROW = 4096
"""Bytes of a file that cost no more to read than a part of them."""

Open = Callable[[], LazyArray]
"""Returns a piece when it is first read."""
FlatReader = Callable[[int, int], np.ndarray]
"""Returns `count` elements from number `start` on, of raw dtype, in one dimension."""


class FileRange(msgspec.Struct, frozen=True):
    """A byte range of a file."""

    store: Store
    name: str
    start: int
    size: int
    """Bytes."""

    @property
    def label(self) -> str:
        """The URL of the file, for errors."""
        return f"{self.store.url}/{self.name}"

    def within(self, start: int, size: int) -> FileRange:
        """Returns a part of this range.

        Raises:
            CorruptError: it is not inside.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise CorruptError(
                self.label,
                expected=f"a range of {size} bytes from {start} on",
                found=f"{self.size} bytes in all",
                hint="The file is damaged, was cut short, or lies; get it anew from where it was written",
            )
        return FileRange(self.store, self.name, self.start + start, size)

    def read(self, start: int, size: int) -> np.ndarray:
        """Returns bytes of it, as uint8[size]."""
        inner = self.within(start, size)
        data = np.empty(size, np.uint8)
        inner.read_into(0, data)
        return data

    def read_into(self, start: int, out: np.ndarray, *, shared: bool = False) -> None:
        """Fills a uint8 array with bytes of it; `shared` as in `Store.read_into`."""
        inner = self.within(start, len(out))
        if len(out):
            self.store.read_into(self.name, inner.start, out.data, shared=shared)


def file_window(path: str | os.PathLike[str]) -> FileRange:
    """Returns a whole local file.

    Raises:
        CheckpointNotFound: there is none.
    """
    file = Path(path).absolute()
    return store_window(ForeignStore(file.parent), file.name)


class ForeignStore(LocalStore):
    """A directory of another program; links are followed, because the cache of Hugging Face consists of them."""

    def sizes(self) -> dict[str, int]:
        try:
            return {path.name: path.stat().st_size for path in self.directory.iterdir() if path.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def read(self, name: str, *, limit: int) -> bytes:
        return super().read(self._resolved(name), limit=limit)

    def _reader(self, name: str) -> AbstractContextManager[LocalReader]:
        return super()._reader(self._resolved(name))

    def _resolved(self, name: str) -> str:
        return str((self.directory / name).resolve())


def open_foreign(path: str | os.PathLike[str] | Store) -> Store:
    """Returns the store of a directory of another program."""
    store = open_store(path)
    return ForeignStore(store.directory) if type(store) is LocalStore else store


def store_window(store: Store, name: str, sizes: dict[str, int] | None = None) -> FileRange:
    """Returns a whole file of a store.

    Raises:
        CheckpointNotFound: there is none.
    """
    size = (sizes if sizes is not None else store.sizes()).get(name)
    if size is None:
        raise CheckpointNotFound(f"{store.url}/{name}", expected="a file", found="none", hint="Check the path")
    return FileRange(store, name, 0, size)


class ReadableRange(Protocol):
    """A byte range that can be read."""

    def read(self, start: int, size: int) -> np.ndarray:
        """Returns bytes of it, as uint8[size]."""
        ...


def read_strided(
    flat: FlatReader, itemsize: int, offset: int, strides: tuple[int, ...], box: Region, *, narrow: int = NARROW
) -> np.ndarray:
    """Reads a box of a strided array over flat elements.

    The box is cut until little more than its elements is read, so a box of a transposed array costs many small reads,
    and never a large one.

    Args:
        offset, strides: of the array, in elements; none is negative.
        narrow: bytes that cost no more to read than a part of them.
    """
    raw = raw_dtype(itemsize)
    if not box.size:
        return np.empty(box.shape, raw)
    start = offset + sum(o * s for o, s in zip(box.offset, strides, strict=True))
    spans = [(n - 1) * s for n, s in zip(box.shape, strides, strict=True)]
    span = sum(spans) + 1
    if span * itemsize <= max(narrow, 2 * box.size * itemsize):
        return np.ndarray(box.shape, raw, flat(start, span), strides=tuple(s * itemsize for s in strides))
    dim = max(range(len(spans)), key=lambda d: strides[d] if box.shape[d] > 1 else -1)
    out = np.empty(box.shape, raw)
    half = box.shape[dim] // 2
    for low, count in ((0, half), (half, box.shape[dim] - half)):
        part = box.replace_dim(dim, box.offset[dim] + low, count)
        read = read_strided(flat, itemsize, offset, strides, part, narrow=narrow)
        out[part.relative_to(box).slices()] = read
    return out


def strided_array(
    spec: ArraySpec,
    flat: FlatReader,
    offset: int,
    strides: tuple[int, ...] | None,
    address: int | None,
    *,
    narrow: int = NARROW,
) -> LazyArray:
    """Returns a lazy array over flat elements.

    Args:
        offset, strides: of the array, in elements; None for C order.
        address: of the flat elements; None if ties and views of them are not of interest.
    """
    itemsize = dtype_of(spec.dtype).itemsize
    usual = c_strides(spec.shape, 1)
    steps = usual if strides is None else strides
    storage = None
    if address is not None and math.prod(spec.shape):
        span = 1 + sum((n - 1) * s for n, s in zip(spec.shape, steps, strict=True))
        plain = all(s == c or n == 1 for n, s, c in zip(spec.shape, steps, usual, strict=True))
        storage = Storage(address + offset * itemsize, span * itemsize, None if plain else steps)
    return LazyArray(spec, partial(read_strided, flat, itemsize, offset, steps, narrow=narrow), storage)


def flat_array(spec: ArraySpec, window: FileRange, address: int | None = None) -> LazyArray:
    """Returns a lazy array that is all of a byte range, in C order.

    Raises:
        CorruptError: the range is too short.
    """
    itemsize = dtype_of(spec.dtype).itemsize
    window = window.within(0, math.prod(spec.shape) * itemsize)
    return strided_array(spec, flat_of(window, itemsize), 0, None, address)


def flat_of(window: ReadableRange, itemsize: int) -> FlatReader:
    """Returns a reader of the elements of a byte range."""
    raw = raw_dtype(itemsize)
    return lambda start, count: window.read(start * itemsize, count * itemsize).view(raw)


def elements_of(array: LazyArray) -> FlatReader:
    """Returns a reader of the elements of an array, in C order."""

    def flat(start: int, count: int) -> np.ndarray:
        out = np.empty(count, raw_dtype(dtype_of(array.spec.dtype).itemsize))
        at = 0
        for part in flat_regions(array.spec.shape, start, start + count):
            out[at : at + part.size] = array.read(part).reshape(-1)
            at += part.size
        return out

    return flat


def memory_array(array: np.ndarray) -> LazyArray:
    """Returns an array in memory as a lazy array."""
    array = array if array.dtype.byteorder != ">" else array.astype(array.dtype.newbyteorder("<"))
    raw = np.ascontiguousarray(array).reshape(-1).view(raw_dtype(array.itemsize)).reshape(array.shape)
    return LazyArray(
        ArraySpec(array.shape, dtype_name(array.dtype, ""), kind="numpy"), lambda region: raw[region.slices()]
    )


def from_boxes(spec: ArraySpec, pieces: Sequence[tuple[Region, Open]], label: str) -> LazyArray:
    """Returns an array that consists of boxes.

    Raises:
        CorruptError: boxes are missing, outside, or overlap.
    """
    whole, regions = Region.whole(spec.shape), [region for region, _ in pieces]
    misplaced = any(len(r.shape) != len(spec.shape) or not r.within(whole) for r in regions)
    full = [region for region in regions if region.size]
    if misplaced or sum(r.size for r in full) != whole.size or any_overlap(full):
        raise CorruptError(
            label,
            expected=f"pieces that make up shape {spec.shape}, each element once",
            found=f"{len(pieces)} pieces of {sum(r.size for r in full)} elements",
            hint="A file of another save may lie among these, or one is missing",
        )
    raw = raw_dtype(dtype_of(spec.dtype).itemsize)
    if len(pieces) == 1:
        return LazyArray(spec, lambda region: _opened(pieces[0], spec, label).read(region))

    def read(region: Region) -> np.ndarray:
        out = np.empty(region.shape, raw)
        for piece in pieces:
            if (common := intersect(piece[0], region)) is not None:
                data = _opened(piece, spec, label).read(common.relative_to(piece[0]))
                out[common.relative_to(region).slices()] = data
        return out

    return LazyArray(spec, read)


def _opened(piece: tuple[Region, Open], spec: ArraySpec, label: str) -> LazyArray:
    region, opened = piece
    lazy = opened()
    if lazy.spec.shape != region.shape or lazy.spec.dtype != spec.dtype:
        raise CorruptError(
            label,
            expected=f"a piece of shape {region.shape} of {spec.dtype}",
            found=f"one of shape {lazy.spec.shape} of {lazy.spec.dtype}",
            hint="The files are not of one save",
        )
    return lazy


def from_ranges(spec: ArraySpec, parts: Sequence[LazyArray], label: str) -> LazyArray:
    """Returns an array whose elements in C order are those of other arrays, one after the other.

    Raises:
        CorruptError: they have another number of elements.
    """
    sizes = [math.prod(part.spec.shape) for part in parts]
    total = sum(sizes)
    if total != math.prod(spec.shape):
        raise CorruptError(
            label,
            expected=f"{math.prod(spec.shape)} elements for shape {spec.shape}",
            found=f"{total} in {len(parts)} parts",
        )
    raw = raw_dtype(dtype_of(spec.dtype).itemsize)

    def flat(start: int, count: int) -> np.ndarray:
        out = np.empty(count, raw)
        at = 0
        for size, part in zip(sizes, parts, strict=True):
            low, high = max(start, at), min(start + count, at + size)
            if low < high:
                out[low - start : high - start] = elements_of(part)(low - at, high - low)
            at += size
        return out

    return strided_array(spec, flat, 0, None, None)
