"""Byte ranges of foreign files, and arrays in them: strided, flat, or in several pieces.

Sizes in a file are not trusted: a range that is not within its file is an error before memory is allocated for it.
An array knows where its bytes lie, as far as they lie in a file as they are (`FileArray.parts`): a load then reads them
from there. Any other array is read by its `read`, box by box.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import LazyArray, Storage, raw_dtype
from .._arrays.numpy import abstract
from .._core.format.index import INDEX_NAME
from .._core.format.shard_header import parse_shard_name
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, any_overlap, c_strides, flat_regions, intersect
from .._core.tree.spec import ArraySpec, TableSpec
from .._io.storage.foreign_formats import format_at, format_of_names, newest_of_recis
from .._io.storage.local_store import LocalStore
from .._io.storage.open import local_directory, open_store
from .._io.storage.store import DirectoryEntry, Store, StoreTraits
from .._io.storage.wrapped_store import WrappedStore
from ..errors import CheckpointNotFound, CorruptError

ReadComputed = Callable[[int, memoryview], object]
"""Fills memory with bytes of an array that is in no file as such, from an offset on."""


class FileRange(msgspec.Struct, frozen=True):
    """A byte range of a file."""

    store: Store
    name: str
    start: int
    size: int
    """The number of bytes."""

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


class ForeignStore(WrappedStore):
    """The files that another program wrote, in any store, and arrays that are computed when they are read.

    Args:
        kind: the format, one of `foreign_checkpoint.READERS`.
        file: the one file that is meant; empty for the whole directory.
    """

    def __init__(self, inner: Store, kind: str, file: str = "") -> None:
        super().__init__(inner)
        self.kind, self.file = kind, file
        self.computed: dict[str, ReadComputed] = {}
        """Arrays that are read as if they were files, by a name that no file has: odd strides, values in a pickle."""

    @property
    def label(self) -> str:
        """The URL of what is meant, for errors."""
        return f"{self.url}/{self.file}" if self.file else self.url

    @property
    def traits(self) -> StoreTraits:
        """As those of the files, but never far: `fetch` knows nothing of `computed`."""
        return msgspec.structs.replace(super().traits, far=False)

    def entries(self) -> dict[str, DirectoryEntry]:
        if not self.file or self.kind == "paddle":  # Paddle's file names others beside it
            return self.inner.entries()
        entry = self.inner.entry(self.file)
        return {} if entry is None else {self.file: entry}

    def sizes(self) -> dict[str, int]:
        # of `entries` here: the store within lists files that are not meant
        return Store.sizes(self)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        if name in self.computed:
            self.computed[name](offset, out)
        else:
            self.inner.read_into(name, offset, out, shared=shared)

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        return name not in self.computed and self.inner.read_parts(name, offset, parts, shared=shared)

    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> AbstractContextManager[memoryview | None]:
        return nullcontext() if name in self.computed else self.inner.mapped(name, offset, nbytes, fetch=fetch)

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        if name not in self.computed:
            return self.inner.map(name, offset, nbytes)
        data = memoryview(bytearray(nbytes))
        self.computed[name](offset, data)
        return data


def store_window(store: Store, name: str, sizes: dict[str, int] | None = None) -> FileRange:
    """Returns a whole file of a store.

    Raises:
        CheckpointNotFound: there is none.
    """
    size = (sizes if sizes is not None else store.sizes()).get(name)
    if size is None:
        raise CheckpointNotFound(f"{store.url}/{name}", expected="a file", found="none", hint="Check the path")
    return FileRange(store, name, 0, size)


def foreign_at(path: Any) -> ForeignStore | None:
    """Returns the files at a path, or in a store, that another program wrote; None for anything else.

    Links are followed in a local directory, because the cache of Hugging Face consists of them. In other stores a
    checkpoint is known by the names of its files alone.

    Raises:
        StoreError: it could not be read, so that this is not known.
    """
    place = local_directory(path)
    if place is None:
        store = open_store(path)
        names = [*store.sizes()]
        kind = format_of_names(names)
    else:
        place = newest_of_recis(place)
        kind, names = format_at(place)
        store = LocalStore(place if names is not None else place.parent, follow_links=True)
    # shards without an index are valid safetensors, but ours; beside other files they are what a dead save has left
    own = kind == "safetensors" and any(map(parse_shard_name, names or ()))
    if kind in (None, "pickle") or INDEX_NAME in (names or ()) or own:
        return None
    return ForeignStore(store, kind, "" if place is None or names is not None else place.name)


class ForeignTree(msgspec.Struct, frozen=True):
    """What the reader of a format returns."""

    tree: Any
    """The arrays in it are left in the files, and `...` is in the place of what could not be read."""
    metadata: dict[str, str] = {}
    unread: tuple[str, ...] = ()
    """The names of files of the same format in the directory that no index has."""
    tables: dict[tuple[str, ...], TableSpec] = {}
    """The partition of each keyed table, by the keys of the dict in the tree that has its columns (`TABLE_KEYS`)."""


_ADDRESSES = 1 << 60
"""The first address of bytes in files; no memory has such addresses."""
_next_address = _ADDRESSES
_address_lock = threading.Lock()


def new_address(nbytes: int) -> int:
    """Returns the first address of a range that no other bytes have: ties and views of one storage are known by it."""
    global _next_address
    with _address_lock:
        start = _next_address
        _next_address += max(nbytes, 1) + 4096
    return start


NARROW_NBYTES = 4096
"""Bytes of a file that cost no more to read than a part of them."""

Open = Callable[[], LazyArray]
"""Returns a piece when it is first read."""
FlatReader = Callable[[int, int], np.ndarray]
"""Returns `count` elements from number `start` on, of raw dtype, in one dimension."""


class ArrayPart(msgspec.Struct, frozen=True):
    """A box of an array: a byte range of a file with its elements in C order, or a lazy array of its shape."""

    number: int
    """The number of the part among those of the array."""
    region: Region
    data: FileRange | LazyArray


class FileArray(LazyArray):
    """A lazy array whose bytes lie in files, as they are.

    Args:
        parts: returns the parts that share an element with a region; None for all. They may be opened for it.
        count: the number of all parts.
        deferred: files are opened to find them.
    """

    __slots__ = ("count", "deferred", "parts")

    def __init__(
        self,
        spec: ArraySpec,
        read: Callable[[Region], np.ndarray],
        storage: Storage | None,
        parts: Callable[[Region | None], Sequence[ArrayPart]],
        count: int = 1,
        *,
        deferred: bool = False,
    ) -> None:
        super().__init__(spec, read, storage)
        self.parts, self.count, self.deferred = parts, count, deferred


def with_spec(array: LazyArray, spec: ArraySpec) -> LazyArray:
    """Returns the same array with another spec of its shape and dtype."""
    other = copy.copy(array)
    other.spec = spec
    return other


def range_of(array: LazyArray) -> FileRange | None:
    """Returns the byte range that is all of an array in C order; None if there is no such range."""
    if not isinstance(array, FileArray) or array.count != 1:
        return None
    [part] = array.parts(None)
    return part.data if isinstance(part.data, FileRange) else None


def read_strided(
    flat: FlatReader, itemsize: int, offset: int, strides: tuple[int, ...], box: Region, *, narrow: int = NARROW_NBYTES
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
    # the dimension with the largest steps, between which most of the unneeded bytes lie
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
    narrow: int = NARROW_NBYTES,
    window: FileRange | None = None,
) -> LazyArray:
    """Returns a lazy array over flat elements.

    Args:
        offset, strides: of the array, in elements; None for C order.
        address: of the flat elements; None if ties and views of them are not of interest.
        window: the byte range that the flat elements are, if they are one.
    """
    itemsize, size = dtype_of(spec.dtype).itemsize, math.prod(spec.shape)
    usual = c_strides(spec.shape, 1)
    steps = usual if strides is None else strides
    plain = all(s == c or n == 1 for n, s, c in zip(spec.shape, steps, usual, strict=True))
    storage = None
    if address is not None and size:
        span = 1 + sum((n - 1) * s for n, s in zip(spec.shape, steps, strict=True))
        storage = Storage(address + offset * itemsize, span * itemsize, None if plain else steps)
    read = partial(read_strided, flat, itemsize, offset, steps, narrow=narrow)
    if window is None or not plain or not size:
        return LazyArray(spec, read, storage)
    part = ArrayPart(0, Region.whole(spec.shape), window.within(offset * itemsize, size * itemsize))
    return FileArray(spec, read, storage, lambda _: [part])


def flat_array(spec: ArraySpec, window: FileRange, address: int | None = None) -> LazyArray:
    """Returns a lazy array that is all of a byte range, in C order.

    Raises:
        CorruptError: the range is too short.
    """
    itemsize = dtype_of(spec.dtype).itemsize
    window = window.within(0, math.prod(spec.shape) * itemsize)
    return strided_array(spec, flat_of(window.read, itemsize), 0, None, address, window=window)


def flat_of(read: Callable[[int, int], np.ndarray], itemsize: int) -> FlatReader:
    """Returns a reader of elements by one of bytes, which takes their start and number."""
    raw = raw_dtype(itemsize)
    return lambda start, count: read(start * itemsize, count * itemsize).view(raw)


def elements_of(array: LazyArray) -> FlatReader:
    """Returns a reader of the elements of an array, in C order."""

    def flat(start: int, count: int) -> np.ndarray:
        out = np.empty(count, raw_dtype(dtype_of(array.spec.dtype).itemsize))
        filled = 0
        for part in flat_regions(array.spec.shape, start, start + count):
            out[filled : filled + part.size] = array.read(part).reshape(-1)
            filled += part.size
        return out

    return flat


def memory_array(array: np.ndarray) -> LazyArray:
    """Returns an array in memory as a lazy array."""
    spec = abstract(array, "", 0)
    # the elements of a checkpoint are little-endian
    array = array if array.dtype.byteorder != ">" else array.astype(array.dtype.newbyteorder("<"))
    raw = np.ascontiguousarray(array).reshape(-1).view(raw_dtype(array.itemsize)).reshape(array.shape)
    return LazyArray(spec, lambda region: raw[region.slices()])


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

    def parts(region: Region | None) -> list[ArrayPart]:
        overlapping: list[ArrayPart] = []
        for number, piece in enumerate(pieces):
            if piece[0].size and (region is None or intersect(piece[0], region) is not None):
                opened = _opened(piece, spec, label)
                window = range_of(opened)
                overlapping.append(ArrayPart(number, piece[0], opened if window is None else window))
        return overlapping

    if len(pieces) == 1:
        return FileArray(spec, lambda region: _opened(pieces[0], spec, label).read(region), None, parts, deferred=True)

    def read(region: Region) -> np.ndarray:
        out = np.empty(region.shape, raw)
        for piece in pieces:
            if (common := intersect(piece[0], region)) is not None:
                data = _opened(piece, spec, label).read(common.relative_to(piece[0]))
                out[common.relative_to(region).slices()] = data
        return out

    return FileArray(spec, read, None, parts, len(pieces), deferred=True)


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
        position = 0
        for size, part in zip(sizes, parts, strict=True):
            low, high = max(start, position), min(start + count, position + size)
            if low < high:
                out[low - start : high - start] = elements_of(part)(low - position, high - low)
            position += size
        return out

    made = strided_array(spec, flat, 0, None, None)
    boxes = _flat_parts(spec, parts, sizes)
    if boxes is None:
        return made

    def within(region: Region | None) -> list[ArrayPart]:
        return [part for part in boxes if region is None or intersect(part.region, region) is not None]

    return FileArray(spec, made.read, None, within, len(boxes))


def _flat_parts(spec: ArraySpec, parts: Sequence[LazyArray], sizes: Sequence[int]) -> list[ArrayPart] | None:
    """Returns the boxes of an array whose elements are those of others, one after the other; None if some are not
    ranges of files."""
    boxes: list[ArrayPart] = []
    itemsize, position = dtype_of(spec.dtype).itemsize, 0
    for part, size in zip(parts, sizes, strict=True):
        window = range_of(part)
        if not size:
            continue
        if window is None:
            return None
        start = 0
        for region in flat_regions(spec.shape, position, position + size):
            nbytes = region.size * itemsize
            boxes.append(ArrayPart(len(boxes), region, window.within(start, nbytes)))
            start += nbytes
        position += size
    return boxes
