"""Streams the data area of a shard into a file, with its checksums.

Entries are copied one after the other into page-aligned buffers; full ones are hashed and written by a few threads
while the next one is filled.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from ..arrays.base import HostArray, HostMemory, SourcePiece
from ..core.format.shard_header import BLOCK, block_count, hash_block
from ..core.planning.save_plan import FilePlan, PlannedEntry
from ..core.sharding.region import Region, tiles
from ..io.storage.memory import PAGE
from ..io.storage.store import Writer
from ..io.timing import Recorder
from ..threads import ThreadPool

BUFFER = 8 << 20
"""Bytes of one write. Measured: 4 to 16 MiB reach the device's rate, smaller ones do not."""
READ_PART = 6 << 20
"""Bytes that are read at a time of an array that is not in host memory. A reader may have two copies of them; with the
buffers and all small objects a conversion stays within 56 MiB."""
BUFFER_COUNT = 4
WRITE_THREADS = 3
MEMMOVE_LIMIT = 64 << 10
"""Bytes up to which an array is copied by its address: for a larger one the time that numpy takes to begin is small."""


class ShardSource(Protocol):
    """The bytes of a rank's shards, before they are written."""

    @property
    def files(self) -> Sequence[FilePlan]:
        """The entries of each shard. They fill the same data areas as those of the rank's `SavePlan`."""
        ...

    def pieces(self, leaf: int) -> Sequence[SourcePiece]:
        """Returns the local memory of a leaf, by the number that `PlannedEntry.leaf` gives."""
        ...

    @property
    def private(self) -> bool:
        """Whether nobody else can change the bytes."""
        ...


class ByteSink(Protocol):
    """Takes arrays one after the other, each in C order: a file, or memory."""

    def append(self, data: np.ndarray, *, stays: bool = True) -> None:
        """Appends the elements of an array.

        Args:
            stays: the array stays as it is, and in memory anyway, until the shard is written.
        """
        ...

    def append_memory(self, memory: HostMemory, nbytes: int) -> None:
        """Appends a small array, all of it."""
        ...

    def remaining(self) -> np.ndarray:
        """Returns memory for what comes next, uint8[n], to be filled from the front; n > 0 may be less than needed."""
        ...

    def advance(self, nbytes: int) -> None:
        """Takes that many bytes at the front of `remaining` as filled."""
        ...


@runtime_checkable
class RowGatherer(Protocol):
    """An array whose rows are not contiguous in memory; only whole rows are read."""

    def gather(self, rows: slice, out: np.ndarray) -> None:
        """Copies rows to `out`, uint8[n]."""
        ...


def contiguous_parts(data: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the bytes of an array in C order, uint8[n]: all of it where it is, or copies of about `BUFFER` bytes."""
    if data.flags.c_contiguous:
        yield data.reshape(-1).view(np.uint8)
        return
    row = data[:1].nbytes
    if row > BUFFER and data.ndim > 1:
        for part in data:
            yield from contiguous_parts(part)
        return
    rows = max(1, BUFFER // max(1, row))
    for low in range(0, len(data), rows):
        yield np.ascontiguousarray(data[low : low + rows]).reshape(-1).view(np.uint8)


class WriteCallbacks(msgspec.Struct, frozen=True):
    """What the writing of shards waits for, and to whom it tells how far it is."""

    before_first: Callable[[], object]
    """Called before a byte is written, but not before uploads are begun and data is hashed; what it raises ends all."""
    before_commit: Callable[[], object]
    """Called before a shard is complete."""
    on_written: Callable[[int], None]
    """Called with the bytes of each block of data that was written."""
    on_interrupt: Callable[[BaseException], None] = lambda error: None
    """Called at an interrupt of the thread that writes, before other threads have ended."""


class Pipeline(msgspec.Struct, frozen=True):
    """What all files of a save are written through."""

    pool: ThreadPool
    free: queue.Queue[memoryview]
    """Buffers to fill."""
    on_written: Callable[[int], None]


class BufferedWriter:
    """Writes one data area through buffers: the caller fills them, threads hash and write them.

    Args:
        base: where the data area starts in the file.
        nbytes: of the data area.
    """

    def __init__(self, writer: Writer, base: int, nbytes: int, pipeline: Pipeline) -> None:
        self._writer, self._base, self._pipeline, self._free = writer, base, pipeline, pipeline.free
        self.hashes = [0] * block_count(nbytes)
        self.hash_ns = 0
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()
        self._take_buffer()
        self._filled = 0  # bytes in the buffer
        self._start = 0  # where the buffer goes in the data area

    def append_memory(self, memory: HostMemory, nbytes: int) -> None:
        if nbytes >= BUFFER - self._filled:
            self.append(memory.array)
            return
        ctypes.memmove(self._address + self._filled, memory.address, nbytes)
        self._filled += nbytes

    def remaining(self) -> np.ndarray:
        return self._bytes[self._filled :]

    def advance(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == BUFFER:
            self._submit(self._buffer, BUFFER, self._free)
            self._filled = 0
            self._take_buffer()

    def append(self, data: np.ndarray, *, stays: bool = True) -> None:
        for part in contiguous_parts(data):
            self._append_bytes(part)

    def _append_bytes(self, data: np.ndarray) -> None:
        if self._filled == 0 and len(data) >= BUFFER and data.ctypes.data % PAGE == 0:
            data = self._write_in_place(data)
        if len(data) < BUFFER - self._filled:
            self._bytes[self._filled : self._filled + len(data)] = data
            self._filled += len(data)
            return
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER - self._filled)
            self._bytes[self._filled : self._filled + count] = data[done : done + count]
            self.advance(count)
            done += count

    def _write_in_place(self, data: np.ndarray) -> np.ndarray:
        """Writes whole blocks from where they are, without a copy; returns the rest."""
        whole = len(data) // BUFFER * BUFFER
        for low in range(0, whole, BUFFER):
            while len(self._pending) >= BUFFER_COUNT:
                wait(self._pending, return_when=FIRST_COMPLETED)
                self._reap()
            self._submit(data[low : low + BUFFER].data, BUFFER, None)
        return data[whole:]

    def _take_buffer(self) -> None:
        self._buffer = self._free.get()
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._address = self._bytes.ctypes.data

    def _submit(self, block: memoryview, nbytes: int, free: queue.Queue[memoryview] | None) -> None:
        """Has a thread hash and write a block, which returns to `free` after that."""
        self._pending.append(self._pipeline.pool.submit(self._write_block, block, nbytes, self._start, free))
        self._start += nbytes
        self._reap()

    def _write_block(self, block: memoryview, nbytes: int, start: int, free: queue.Queue[memoryview] | None) -> None:
        try:
            self._hash_and_write(block, nbytes, start)
        finally:
            if free is not None:
                free.put(block)

    def _hash_and_write(self, block: memoryview, nbytes: int, start: int) -> None:
        begin = time.perf_counter_ns()
        for at in range(0, nbytes, BLOCK):
            self.hashes[(start + at) // BLOCK] = hash_block(block[at : min(at + BLOCK, nbytes)])
        hash_ns = time.perf_counter_ns() - begin
        with self._lock:
            self.hash_ns += hash_ns
        self._writer.write(self._base + start, block[:nbytes])
        self._pipeline.on_written(nbytes)

    def _reap(self) -> None:
        """Forgets the blocks that are written; raises the error of one that failed."""
        for future in [f for f in self._pending if f.done()]:
            self._pending.remove(future)
            future.result()

    def finish(self) -> None:
        """Writes the last buffer, and waits for all blocks."""
        if self._filled:
            self._submit(self._buffer, self._filled, self._free)
        else:
            self._free.put(self._buffer)
        errors = [error for f in self._pending if (error := f.exception()) is not None]
        if errors:
            raise errors[0]

    def drain(self) -> None:
        """After an error: waits until no thread uses the file any more."""
        wait(self._pending)


def write_data(buffered: BufferedWriter, plan: FilePlan, source: ShardSource, recorder: Recorder) -> list[int]:
    """Writes a file's data area; returns its checksums."""
    start = recorder.now()
    try:
        for write in plan.writes:
            append_entry(buffered, write, source.pieces(write.leaf))
        buffered.finish()
    finally:
        buffered.drain()
    recorder.add("hash", start, start + buffered.hash_ns, plan.nbytes)
    return buffered.hashes


def append_entry(sink: ByteSink, write: PlannedEntry, pieces: Sequence[SourcePiece]) -> None:
    """Appends the bytes of an entry to a sink, from the piece that holds it."""
    if not write.nbytes:
        return
    region, piece = write.region, piece_of(write, pieces)
    if isinstance(piece.data, HostMemory) and write.nbytes <= MEMMOVE_LIMIT and region == piece.region:
        sink.append_memory(piece.data, write.nbytes)
    elif isinstance(piece.data, (HostArray, HostMemory)):
        array = piece.data.array
        sink.append(array if region == piece.region else array[region.relative_to(piece.region).slices()])
    elif isinstance(piece.data, RowGatherer):
        _append_rows(sink, region.relative_to(piece.region), write.nbytes, piece.data)
    else:  # lazily transformed, on a device or in another file
        itemsize = write.nbytes // region.size
        for part in tiles(region.relative_to(piece.region), READ_PART // itemsize):
            sink.append(piece.data.read(part.slices()), stays=False)


def piece_of(write: PlannedEntry, pieces: Sequence[SourcePiece]) -> SourcePiece:
    """Returns the piece that holds an entry of at least one byte."""
    if len(pieces) == 1:
        return pieces[0]
    piece = next((piece for piece in pieces if write.region.within(piece.region)), None)
    assert piece is not None, f"the plan writes {write.region}, which this rank does not hold"
    return piece


def _append_rows(sink: ByteSink, box: Region, nbytes: int, rows: RowGatherer) -> None:
    """Gathers rows in the memory that they are written from."""
    low, high = box.offset[0], box.offset[0] + box.shape[0]
    row_nbytes = nbytes // box.shape[0]
    while low < high:
        out = sink.remaining()
        count = min(len(out) // row_nbytes, high - low)
        if count:
            rows.gather(slice(low, low + count), out[: count * row_nbytes])
            sink.advance(count * row_nbytes)
        else:  # a row that lies across two buffers, or is longer than one
            count = 1
            row = np.empty(row_nbytes, np.uint8)
            rows.gather(slice(low, low + 1), row)
            sink.append(row)
        low += count
