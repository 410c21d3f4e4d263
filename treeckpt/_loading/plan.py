"""Plans what a load reads: ranges of files, and the memory that each of them fills.

`read_for` says where the bytes of one destination lie. `plan_reads` makes of many such reads the ones that are carried
out: by this process (`execute_local`, `execute_remote`), or together with other ranks of the host (`execute_shared`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import numpy as np

from .._arrays.base import HostMemory, TargetPiece, raw_dtype
from .._arrays.registry import library_of
from .._core.format.records import File, Index, Leaf, WholeChunk
from .._core.planning.load_plan import (
    READ_GAP,
    Chunk,
    bounded_span_boxes,
    plan_contiguous_reads,
    split_at_multiples,
)
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, byte_runs, c_strides
from .._core.tree.spec import ArraySpec
from .._io.storage.memory import PAGE_NBYTES

TURN = 32 << 20
"""Bytes that one rank of a host reads from the device at a time, of what several ranks want."""
SPARSE = 0.75
"""Part of a range that this rank wants, below which other ranks of the host probably want the rest of it."""
MOST_PARTS = 256
"""Destinations of a read above which it goes through a buffer, and is copied from there."""
_WRITABLE = 0x200
"""PyBUF_WRITE of CPython's buffers."""
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory  # an array type of ctypes for each size takes ten times as long
_view_of.restype, _view_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Destination(Protocol):
    """What some bytes of a file fill."""

    start: int
    """The first of the bytes, in the data area of the file."""
    stop: int
    """One past the last of the bytes, in the data area of the file."""

    def write(self, data: memoryview) -> None:
        """Takes the bytes, all at once."""
        ...


class Read(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a file that are read at once, and what they fill."""

    file: File
    start: int
    """The first byte, in the data area of the file."""
    stop: int
    """One past the last byte, in the data area of the file."""
    destinations: Sequence[Any] = ()
    """Each a `Destination`, by `start`, all of one kind; empty if the bytes are only verified, or stay in `memory`."""
    memory: memoryview | None = None
    """Where the bytes stay; None for a buffer that is used again."""
    shared: bool = False
    """Whether other ranks of the host probably read it too: then through the page cache, so that the device reads it
    once."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class LeafPlaceholder:
    """A place for a leaf: known at once, or once its bytes have been read."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any = None) -> None:
        self.leaf = leaf


class NewArray(msgspec.Struct, frozen=True, gc=False):
    """A whole array that becomes a view of the memory its bytes are read into."""

    start: int
    stop: int
    placeholder: LeafPlaceholder
    spec: ArraySpec


class ContiguousMemory(msgspec.Struct, frozen=True, gc=False):
    """Contiguous bytes of an array that exists already."""

    start: int
    stop: int
    address: int
    """The address of the byte at `start`."""
    memory: Any
    """The object that keeps what is at the address allocated."""

    def part(self, start: int, stop: int) -> ContiguousMemory:
        """Returns the destination of some of the bytes."""
        return ContiguousMemory(start, stop, self.address + start - self.start, self.memory)


class BoxDestination(msgspec.Struct, frozen=True, gc=False):
    """A box of a chunk, copied to where it belongs in a target."""

    start: int
    stop: int
    piece: TargetPiece
    box: Region
    chunk: Region
    itemsize: int

    def write(self, data: memoryview) -> None:
        raw, bytes_ = raw_dtype(self.itemsize), np.frombuffer(data, np.uint8)
        if self.box.shape == self.chunk.shape:
            source = bytes_.view(raw).reshape(self.box.shape)
        else:
            source = np.ndarray(self.box.shape, raw, bytes_, strides=c_strides(self.chunk.shape, self.itemsize))
        self.piece.data.write(self.box.relative_to(self.piece.region).slices(), source)


def memory_at(address: int, nbytes: int) -> memoryview:
    """Returns memory by its address; the caller keeps it allocated."""
    return _view_of(address, nbytes, _WRITABLE)


def address_of(data: memoryview) -> int:
    """Returns the address of the first byte."""
    return np.frombuffer(data, np.uint8).ctypes.data


def place_of(index: Index, path: str, chunk: Chunk | WholeChunk, nbytes: int, first: int = 0) -> tuple[File, int]:
    """Returns the file with `nbytes` bytes of a chunk from its byte `first` on, and where they start in its data area.

    Raises:
        FormatError: no file has them; names the leaf at `path`.
    """
    low = chunk.start + first
    file, position = index.locate(chunk.rank, low, low + nbytes, path)
    return file, position - file.header


def page_offset(index: Index, leaf: Leaf, region: Region) -> int:
    """Returns where in a page of its file a region of an array begins; 0 where it is not one range of one."""
    chunks = index.chunks_of(leaf, region) if region.size else []
    if len(chunks) != 1 or leaf.spec is None:
        return 0
    runs = byte_runs(region, chunks[0].region, dtype_of(leaf.spec.dtype).itemsize)
    if runs.counts:
        return 0
    file, start = place_of(index, leaf.path, chunks[0], runs.length, runs.first)
    return (file.header + start) % PAGE_NBYTES


def read_for(
    index: Index, path: str, chunk: Chunk, piece: TargetPiece, box: Region, itemsize: int, *, shared: bool = False
) -> Read:
    """Returns the read that fills a box of a target from a chunk of the leaf at `path`.

    Its destination is `ContiguousMemory` where the box is contiguous in file and memory, else a `BoxDestination`.

    Raises:
        FormatError: the index names bytes that are in no file.
    """
    source, memory = byte_runs(box, chunk.region, itemsize), piece.data
    first, last = source.span
    file, start = place_of(index, path, chunk, last - first, first)
    stop = start + last - first
    if isinstance(memory, HostMemory) and not source.counts:
        target = byte_runs(box, piece.region, itemsize)
        if not target.counts:
            where = ContiguousMemory(start, stop, memory.address + target.first, memory)
            return Read(file, start, stop, (where,), shared=shared)
    return Read(file, start, stop, (BoxDestination(start, stop, piece, box, chunk.region, itemsize),), shared=shared)


def plan_reads(
    wanted: Sequence[Read], steps: Mapping[str, int], *, limit: int, size: int, gap: int = READ_GAP
) -> list[Read]:
    """Plans the reads that fill all destinations of `wanted`.

    1. Reads are sorted by what they fill: new arrays, boxes, or contiguous memory. Each kind is planned by itself.
    2. A box that spans more than `limit` bytes of its file, or leaves out more than `gap` between two of its rows, is
       cut into tiles that do not.
    3. In each file, what lies at most `gap` bytes apart is joined: tiles up to `limit` bytes, all else to any size.
    4. What goes to contiguous memory is cut at multiples of `size` in the file, and its destinations with it.
    5. Each read is rounded out to whole blocks of its file, inside of the data area: these have checksums.

    Args:
        wanted: in any order, as from `read_for`.
        steps: bytes of a block (or of a page, where nothing is verified) by the name of each file; 1 for all others.
        limit: bytes of one read into a buffer, at most, before it is rounded out.
        size: bytes of one read where any size would do.
        gap: unneeded bytes between two needed ones that cost less to read than a second request does.

    Returns:
        New arrays, boxes, contiguous memory, each by file and place. One for new arrays may have any size: see
        `cut_memory`.
    """
    kinds: dict[Any, list[Read]] = {NewArray: [], BoxDestination: [], ContiguousMemory: []}
    for read in wanted:
        kinds[type(read.destinations[0])].append(read)
    tiles = [tile for read in kinds[BoxDestination] for tile in _tiles(read, limit, gap)]
    planned = list(_join(kinds[NewArray], gap))
    planned += map(_shared_if_sparse, _join(tiles, gap, limit))
    planned += [part for read in _join(kinds[ContiguousMemory], gap) for part in _cut(read, size)]
    return [rounded_out(read, steps.get(read.file.name, 1)) for read in planned]


def _tiles(read: Read, limit: int, gap: int) -> Iterator[Read]:
    """Cuts a box into tiles of bounded span."""
    # so few bytes cannot leave out a gap that is worth a second request
    if read.nbytes <= min(gap, limit):
        yield read
        return
    [copy] = read.destinations
    first = read.start - byte_runs(copy.box, copy.chunk, copy.itemsize).first
    for box in bounded_span_boxes(copy.box, copy.chunk, copy.itemsize, limit=limit, gap=gap):
        if box == copy.box:
            yield read
            return
        low, high = byte_runs(box, copy.chunk, copy.itemsize).span
        tile = BoxDestination(first + low, first + high, copy.piece, box, copy.chunk, copy.itemsize)
        yield Read(read.file, tile.start, tile.stop, (tile,), shared=read.shared)


def _join(reads: Sequence[Read], gap: int, limit: int | None = None) -> Iterator[Read]:
    """Joins reads that lie close together in a file. The joined one is shared if most of its bytes are."""
    if len(reads) <= 1:
        yield from reads
        return
    files = {read.file.name: read.file for read in reads}
    order = sorted(files.values(), key=attrgetter("rank", "part"))
    numbers = {file.name: number for number, file in enumerate(order)}
    ranges = [(numbers[read.file.name], read.start, read.stop - read.start) for read in reads]
    some = any(map(attrgetter("shared"), reads))
    for run in plan_contiguous_reads(ranges, gap=gap, limit=limit):
        inside = [reads[member] for member in run.members]
        shared = some and sum(read.nbytes * (1 if read.shared else -1) for read in inside) > 0
        destinations = [destination for read in inside for destination in read.destinations]
        if len(destinations) > len(inside):
            destinations.sort(key=attrgetter("start"))
        yield Read(inside[0].file, run.start, run.stop, destinations, shared=shared)


def _shared_if_sparse(read: Read) -> Read:
    wanted = sum(copy.box.size * copy.itemsize for copy in read.destinations)
    return msgspec.structs.replace(read, shared=read.shared or wanted < SPARSE * read.nbytes)


def _cut(read: Read, size: int) -> Iterator[Read]:
    """Cuts a read into contiguous memory, and its destinations, at multiples of a size in its file."""
    if read.start // size == (read.stop - 1) // size:
        yield read
        return
    left, number = read.destinations, 0
    across: list[ContiguousMemory] = []
    # multiples in the file are edges of blocks: no block with a checksum is read twice
    for low, high in split_at_multiples(read.start, read.stop, 0, size):
        inside = across
        while number < len(left) and left[number].start < high:
            inside.append(left[number])
            number += 1
        across = [destination.part(high, destination.stop) for destination in inside if destination.stop > high]
        inside = [
            destination if destination.stop <= high else destination.part(destination.start, high)
            for destination in inside
        ]
        yield Read(read.file, low, high, inside, shared=read.shared)


def rounded_out(read: Read, step: int) -> Read:
    """Returns the read of all blocks of `step` bytes that have bytes of another one."""
    start, stop = read.start // step * step, min(-(-read.stop // step) * step, read.file.nbytes)
    if (start, stop) == (read.start, read.stop):
        return read
    return Read(read.file, start, stop, read.destinations, read.memory, read.shared)


def wrap_new_arrays(read: Read, memory: memoryview) -> None:
    """Makes the new arrays of a read of the memory that its bytes are read into."""
    for array in read.destinations:
        array.placeholder.leaf = library_of(array.spec).wrap(array.spec, memory, array.start - read.start)


def cut_memory(read: Read, memory: memoryview | None, size: int) -> list[Read]:
    """Returns reads of at most `size` bytes each that fill the memory of a read, where the bytes stay.

    Args:
        memory: None where the reads are counted, and not carried out.
    """
    return [
        Read(
            read.file,
            read.start + at,
            min(read.start + at + size, read.stop),
            (),
            None if memory is None else memory[at : at + size],
            read.shared,
        )
        for at in range(0, read.nbytes, size)
    ]


def parts_of(read: Read) -> list[memoryview] | None:
    """Returns the memory that the bytes of a read go to, in order, with spare memory for the gaps.

    None where they do not go to contiguous memory, there are too many parts, or destinations overlap.
    """
    destinations = read.destinations
    if not destinations or type(destinations[0]) is not ContiguousMemory:
        return None
    parts: list[memoryview] = []
    position = read.start
    for destination in destinations:
        # a byte that two destinations want can be received only once
        if destination.start < position or len(parts) > MOST_PARTS:
            return None
        if destination.start > position:
            parts.append(memoryview(bytearray(destination.start - position)))
        parts.append(memory_at(destination.address, destination.stop - destination.start))
        position = destination.stop
    if position < read.stop:
        parts.append(memoryview(bytearray(read.stop - position)))
    return parts


def copy_contiguous(destinations: Sequence[ContiguousMemory], first: int, low: int, data: memoryview) -> int:
    """Copies bytes of a file to contiguous memory.

    Args:
        destinations: by `start`.
        first: number of the first destination that may have some of the bytes.
        low: where the bytes start in the data area.

    Returns:
        The number of the first destination that may have some of the bytes behind these.
    """
    address, high = address_of(data), low + len(data)
    number = first
    while number < len(destinations) and (destination := destinations[number]).start < high:
        begin, stop = max(destination.start, low), min(destination.stop, high)
        if begin < stop:
            ctypes.memmove(destination.address + begin - destination.start, address + begin - low, stop - begin)
        if number == first and destination.stop <= high:
            first += 1
        number += 1
    return first


def in_turns(reads: Sequence[Read], position: int, count: int) -> list[Read]:
    """Orders reads so that `count` ranks of a host with the same reads find in the page cache what others have read.

    Shared reads come first, in stretches of `TURN` bytes for each rank. In each one every rank begins with a part of
    its own, which it brings into the page cache, and goes on with those of the ranks after it. Nobody waits: what is
    not there yet is read from the device. What the page cache has to keep does not grow with the checkpoint.

    Args:
        position: of this rank among them.
    """
    ordered: list[Read] = []
    stretch: list[Read] = []
    nbytes = 0
    shared = [read for read in reads if read.shared]
    for number, read in enumerate(shared, 1):
        stretch.append(read)
        nbytes += read.nbytes
        if nbytes >= TURN * count or number == len(shared):
            first = position * len(stretch) // count
            ordered += stretch[first:] + stretch[:first]
            stretch, nbytes = [], 0
    return ordered + [read for read in reads if not read.shared]
