"""Writes the shards of a rank: one after the other to a disk, several at a time to an object store.

To a disk, entries are copied one after the other into page-aligned buffers; full ones are hashed and written by a few
threads while the next one is filled, and the header, with the checksums, is written last. What fits into one buffer is
written by the calling thread.

An object store takes the bytes of a shard in order: the header, with all checksums, comes first. The data is hashed by
a few threads before anything is sent. It goes out from where it is; small arrays, and those that are made while they
are read, are copied into buffers. The copies are kept for sending while there is memory for all of them; otherwise the
shard is read a second time. What others can change is hashed again when it is being sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Executor, Future, wait
from functools import lru_cache, partial
from threading import Event
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import msgspec
import numpy as np

from .._arrays.base import HostArray, HostMemory, SourcePiece, tensor_at
from .._core.format.shard_header import (
    BLOCK,
    block_count,
    hash_block,
    hash_parts,
    with_hashes,
)
from .._core.planning.save_plan import FilePlan, PlannedEntry
from .._core.sharding.region import Region, tiles
from .._io.storage.kept_files import ProgressRecorder
from .._io.storage.memory import PAGE_NBYTES, aligned_buffer
from .._io.storage.store import Store, Writer
from .._io.timing import Recorder
from .._threads import ThreadPool
from ..errors import CheckpointError, StoreError

T = TypeVar("T")
BUFFER = 8 << 20
"""The bytes of one write. Measured: 4 to 16 MiB reach the device's rate, smaller ones do not."""
BUFFER_COUNT = 4
WRITE_THREADS = 3
READ_PART = 6 << 20
"""The bytes that are read at a time of an array that is not in host memory. A reader may have two copies of them; with
the buffers and all small objects a conversion stays within 56 MiB."""
MEMMOVE_LIMIT = 64 << 10
"""The bytes up to which an array is copied by its address: for a larger one the time until numpy begins is small."""
SENDINGS = 3
"""How often a shard is sent, at most, where the store refuses a part of an upload for a reason that passes."""
UPLOADS = 4
"""The number of shards that are sent at a time: checksums of one, and ends of others, cost no time of the network."""
COPIES = 512 << 20
"""The largest number of bytes of the copies of all shards that are being sent."""
IN_PLACE = 256 << 10
"""The bytes from which an array is sent from where it is: a smaller piece costs more to hand over than to copy."""


class ShardFile(msgspec.Struct, frozen=True):
    """One shard to write."""

    plan: FilePlan
    name: str
    header: bytes
    """The encoded header, with zeros in the place of the checksums."""


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


class _GivenUp(Exception):
    """Ends the writing of a shard where another one failed, or the save was interrupted."""


Buffers = queue.SimpleQueue[memoryview]


class ShardWriting(msgspec.Struct):
    """How the shards of a rank are written: from where and to where, what that waits for, and what ends it."""

    store: Store
    source: ShardSource
    recorder: Recorder
    record: ProgressRecorder
    """It gets the bytes of each block of data that was written."""
    begun: Future[None] | None = None
    """What must have succeeded before a byte is written, but not before uploads are begun and data is hashed."""
    recorded: Future[None] | None = None
    """What must have succeeded besides before a shard is complete."""
    on_interrupt: Callable[[BaseException], None] = lambda error: None
    """It is called at an interrupt of the thread that writes, before other threads have ended."""
    given_up: Event = msgspec.field(default_factory=Event)
    """It is set where a shard failed, or the save was interrupted: then the writing of all others ends."""
    pool: ThreadPool | None = None
    """It hashes, and writes to a disk; None where the calling thread does so."""
    free: Buffers = msgspec.field(default_factory=Buffers)
    """The buffers to fill."""
    copies: int = 0
    """The largest number of bytes of the copies of one shard that is being sent."""
    hashes: dict[int, np.ndarray] = {}
    """The checksums of the blocks of each shard that was written, by its part: uint64[n]."""

    def before_first(self) -> None:
        """Waits before the first byte of a shard."""
        if self.begun is not None:
            self.begun.result()
        self._check()

    def before_commit(self) -> None:
        """Waits before a shard is complete."""
        for future in (self.begun, self.recorded):
            if future is not None:
                future.result()

    def count(self, nbytes: int) -> None:
        """Counts bytes of data as written."""
        self._check()
        self.record.add(nbytes)

    def _check(self) -> None:
        if self.given_up.is_set():
            raise _GivenUp

    def commit(self, writer: Writer) -> None:
        """Makes a file complete and durable."""
        self.before_commit()
        start = self.recorder.now()
        writer.commit()
        self.recorder.add("fsync", start, self.recorder.now())


def write_files(writing: ShardWriting, files: Sequence[ShardFile]) -> None:
    """Writes a rank's shards, durably."""
    largest, sends = max((file.plan.nbytes for file in files), default=0), writing.store.traits.far
    # one thread for what fits into one buffer: others would have nothing to do beside it, and take longer to start
    single = largest <= BUFFER and not sends
    for _ in range(1 if single else BUFFER_COUNT):
        writing.free.put(aligned_buffer(BUFFER, huge=largest >= BUFFER))
    at_once = min(UPLOADS, len(files)) if sends else 1
    writing.copies = COPIES // max(at_once, 1)
    sizes = [len(file.header) + file.plan.nbytes for file in files]
    with contextlib.nullcontext() if single else ThreadPool(WRITE_THREADS, "treeckpt-write") as writing.pool:
        if sends and files:  # in threads also one shard: a request cannot be interrupted, the wait for it can
            with writing.recorder.span("write", sum(sizes)):
                _call_side_by_side([partial(_write_file, writing, file) for file in files], at_once, writing)
            return
        for file, size in zip(files, sizes, strict=True):
            with writing.recorder.span("write", size):
                _write_file(writing, file)


def _call_side_by_side(calls: Sequence[Callable[[], None]], at_once: int, writing: ShardWriting) -> None:
    """Calls functions in threads; gives the others up, and raises, at the first error or interrupt."""
    with ThreadPool(at_once, "treeckpt-shard") as pool:
        try:
            pending = [pool.submit(call) for call in calls]
            for future in wait(pending, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException as error:
            writing.given_up.set()
            if not isinstance(error, Exception):
                writing.on_interrupt(error)
            # what has not begun is cancelled; the end of the `with` statement waits for the rest
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_file(writing: ShardWriting, file: ShardFile) -> None:
    for tried in range(1, SENDINGS + 1):
        writer = writing.store.create(file.name, len(file.header) + file.plan.nbytes)
        try:
            if writer.ordered:
                _upload(writing, file, writer)
            else:
                _write_in_place(writing, file, writer)
            return
        except BaseException as error:
            writer.abort()
            # a bucket repeats its requests, but no longer has what it has sent of an upload
            again = isinstance(error, StoreError) and error.refused_once and writer.ordered
            if not again or tried == SENDINGS:
                raise


# to a disk ------------------------------------------------------------------------------------------------------------


def _write_in_place(writing: ShardWriting, file: ShardFile, writer: Writer) -> None:
    writing.before_first()
    start, data = writing.recorder.now(), BufferedWriter(writer, len(file.header), file.plan.nbytes, writing)
    try:
        for write in file.plan.writes:
            append_entry(data, write, writing.source.pieces(write.leaf))
        data.finish()
    finally:
        data.drain()
    writing.recorder.add("hash", start, start + data.hash_ns, file.plan.nbytes)
    # aligned, as a write past the page cache needs it
    head = aligned_buffer(len(file.header))
    writing.hashes[file.plan.part] = np.array(data.hashes, np.uint64)
    head[:] = with_hashes(file.header, data.hashes)
    writer.write(0, head)
    writing.commit(writer)


class BufferedWriter:
    """Writes one data area through buffers: the caller fills them, threads hash and write them.

    Args:
        base: where the data area starts in the file.
        nbytes: of the data area.
    """

    def __init__(self, writer: Writer, base: int, nbytes: int, writing: ShardWriting) -> None:
        self._writer, self._base, self._writing, self._free = writer, base, writing, writing.free
        self.hashes = [0] * block_count(nbytes)
        self.hash_ns = 0
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()
        self._take_buffer()
        self._filled = 0  # bytes in the buffer
        self._start = 0  # where the buffer goes in the data area

    def append_memory(self, memory: HostMemory, nbytes: int) -> None:
        # also what just fits: a full buffer has to be submitted, as `advance` does
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
        # a write past the page cache takes memory from a page's start alone
        if self._filled == 0 and len(data) >= BUFFER and data.ctypes.data % PAGE_NBYTES == 0:
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

    def _submit(self, block: memoryview, nbytes: int, free: Buffers | None) -> None:
        """Has a thread hash and write a block, which returns to `free` after that."""
        start, self._start = self._start, self._start + nbytes
        if self._writing.pool is None:
            self._write_block(block, nbytes, start, free)
            return
        self._pending.append(self._writing.pool.submit(self._write_block, block, nbytes, start, free))
        self._reap()

    def _write_block(self, block: memoryview, nbytes: int, start: int, free: Buffers | None) -> None:
        try:
            self._hash_and_write(block, nbytes, start)
        finally:
            # also after an error: the caller waits for a buffer before it learns of the error
            if free is not None:
                free.put(block)

    def _hash_and_write(self, block: memoryview, nbytes: int, start: int) -> None:
        begin = time.perf_counter_ns()
        for low in range(0, nbytes, BLOCK):
            self.hashes[(start + low) // BLOCK] = hash_block(block[low : min(low + BLOCK, nbytes)])
        hash_ns = time.perf_counter_ns() - begin
        with self._lock:
            self.hash_ns += hash_ns
        self._writer.write(self._base + start, block[:nbytes])
        self._writing.count(nbytes)

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
        if self._pending:
            wait(self._pending)


# to an object store ---------------------------------------------------------------------------------------------------


class _CopyBuffers:
    """Buffers for copies, `count` of them at most; one is free again when nothing refers to its memory any more."""

    def __init__(self, count: int, on_scarce: Callable[[], None]) -> None:
        self._left, self._on_scarce = count, on_scarce
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def take(self) -> np.ndarray:
        if not self._left and self._free.empty():
            self._on_scarce()
        if self._left and self._free.empty():
            self._left -= 1
            memory = aligned_buffer(BUFFER, huge=True)
        else:
            memory = self._free.get()
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.put, memory).atexit = False
        return array


class _PieceSink:
    """Hands over a data area as pieces, uint8[n], in order: large arrays where they are, the rest in buffers."""

    def __init__(self, buffers: _CopyBuffers, take: Callable[[np.ndarray], None]) -> None:
        self._buffers, self._take = buffers, take
        self._rest = np.empty(0, np.uint8)
        """The rest of a buffer: what is filled and not handed over yet, and what is still free."""
        self._filled = 0

    def append_memory(self, memory: HostMemory, nbytes: int) -> None:
        self.append(memory.array)  # at most MEMMOVE_LIMIT bytes, which are copied

    def append(self, data: np.ndarray, *, stays: bool = True) -> None:
        stays = stays and data.flags.c_contiguous and data.nbytes >= IN_PLACE
        for part in contiguous_parts(data):
            if stays:
                self.flush()
                self._take(part)
            else:
                self._copy(part)

    def _copy(self, data: np.ndarray) -> None:
        while len(data):
            room = self.remaining()[: len(data)]
            room[:] = data[: len(room)]
            self.advance(len(room))
            data = data[len(room) :]

    def remaining(self) -> np.ndarray:
        if self._filled == len(self._rest):
            self.flush()
            self._rest = self._buffers.take()
        return self._rest[self._filled :]

    def advance(self, nbytes: int) -> None:
        self._filled += nbytes

    def flush(self) -> None:
        """Hands over what is in the buffer."""
        if self._filled:
            piece, self._rest, self._filled = self._rest[: self._filled], self._rest[self._filled :], 0
            self._take(piece)


class _AreaHasher:
    """Hashes a data area that comes in pieces, in the threads of a pool.

    Args:
        expected: the checksums with which those of the blocks are compared: after one that differs none is computed.
    """

    def __init__(self, nbytes: int, pool: Executor, expected: Sequence[int] | None = None) -> None:
        self._hashes, self._pool, self._expected = [0] * block_count(nbytes), pool, expected
        self.differs = expected is not None and len(expected) != len(self._hashes)
        self._parts: list[np.ndarray] = []
        self._held = self._start = 0
        """The number of bytes in `_parts`, and where they begin in the data area."""
        self._pending: list[Future[int]] = []
        self.ns = 0
        """The nanoseconds of all threads together, known after `finish`."""

    def add(self, piece: np.ndarray) -> None:
        while len(piece):
            part = piece[: BUFFER - self._held]
            self._parts.append(part)
            self._held += len(part)
            if self._held == BUFFER:
                self._submit()
            piece = piece[len(part) :]

    def _submit(self) -> None:
        parts, start = self._parts, self._start
        self._parts, self._start, self._held = [], self._start + self._held, 0
        self._pending.append(self._pool.submit(self._hash, parts, start // BLOCK))

    def _hash(self, parts: list[np.ndarray], number: int) -> int:
        """Hashes the blocks from `number` on; returns the nanoseconds that it took."""
        begin = time.perf_counter_ns()
        block: list[memoryview] = []
        room = BLOCK
        for part in parts:
            view = part.data
            while len(view) and not self.differs:
                block.append(view[:room])
                view, room = view[room:], room - len(block[-1])
                if not room:
                    self._hash_block(block, number)
                    number, block, room = number + 1, [], BLOCK
        if block:
            self._hash_block(block, number)
        return time.perf_counter_ns() - begin

    def _hash_block(self, parts: list[memoryview], number: int) -> None:
        found = self._hashes[number] = hash_parts(parts)
        if self._expected is not None and found != self._expected[number]:
            self.differs = True

    def finish(self) -> list[int]:
        """Returns the checksums of all blocks."""
        if self._held:
            self._submit()
        self.ns = sum(future.result() for future in self._pending)
        return self._hashes


def has_checksums(file: FilePlan, source: ShardSource, expected: Sequence[int], pool: Executor) -> bool:
    """Whether the blocks of a data area have these checksums. Nothing is written, nor copied off a device that hashes.

    Args:
        pool: it hashes, while the calling thread reads.
    """
    if (found := _device_hashes(file, source)) is not None:
        return found == expected
    hasher = _AreaHasher(file.nbytes, pool, expected)
    sink = _PieceSink(_CopyBuffers(BUFFER_COUNT * 4, lambda: None), hasher.add)
    for write in file.writes:
        if hasher.differs:
            break
        append_entry(sink, write, source.pieces(write.leaf))
    sink.flush()
    hasher.finish()
    return not hasher.differs


def _device_hashes(file: FilePlan, source: ShardSource) -> list[int] | None:
    """Returns the checksums of a data area that lies on one device which computes them; None for any other one."""
    tensors: list[Any] = []
    for write in file.writes:
        if write.nbytes:
            piece = piece_of(write, source.pieces(write.leaf))
            tensor = tensor_at(piece.data, write.region.relative_to(piece.region).slices())
            if tensor is None:
                return None
            tensors.append(tensor)
    if not tensors:
        return None
    from .._arrays.device_checksums import device_checksums

    return device_checksums(tensors)


def _upload(writing: ShardWriting, file: ShardFile, writer: Writer) -> None:
    upload = _ShardUpload(file.plan, writing)
    try:
        stayed = upload.send(writer, file.header)
    except StoreError:
        # it may be sent again, and its bytes are to count once
        writing.count(-upload.counted)
        raise
    # it is there already: the second hash ends after the last part was sent
    if not stayed:
        writing.store.delete(file.name)
        raise CheckpointError(
            f"{writing.store.url}/{file.name}",
            expected="arrays that stay as they are while they are being saved",
            found="other bytes than a moment ago",
            hint="Wait for the save before anything trains on, or use save_async",
        )


class _ShardUpload:
    """Sends one shard; a block counts as written when it is handed over to be sent."""

    def __init__(self, plan: FilePlan, writing: ShardWriting) -> None:
        assert writing.pool is not None, "it is there wherever shards are sent"
        self._plan, self._writing, self._pool = plan, writing, writing.pool
        # the part that is not complete yet keeps its copies, and no part is longer than 1/4096 of a large shard
        count = max(writing.copies, plan.nbytes // 4096) // BUFFER + 4
        self._buffers = _CopyBuffers(count, self._forget)
        self.counted = 0
        """The number of bytes that count as written."""
        self._kept: list[np.ndarray] | None = []
        """The pieces of the data area, while there is memory for the copies among them."""

    def _forget(self) -> None:
        self._kept = None

    def _produce(self, *takers: Callable[[np.ndarray], None]) -> None:
        """Hands the pieces of the data area to each of `takers`."""

        def take(piece: np.ndarray) -> None:
            for taker in takers:
                taker(piece)

        sink = _PieceSink(self._buffers, take)
        for write in self._plan.writes:
            append_entry(sink, write, self._writing.source.pieces(write.leaf))
        sink.flush()

    def send(self, writer: Writer, header: bytes) -> bool:
        """Sends header and data, and commits; returns whether the data stayed as it was meanwhile."""
        hashes = self._hash()
        self._writing.hashes[self._plan.part] = np.array(hashes, np.uint64)
        self._writing.before_first()
        self._writer, self._at = writer, 0
        self._write(np.frombuffer(with_hashes(header, hashes), np.uint8))
        again = _AreaHasher(self._plan.nbytes, self._pool)
        kept = self._kept
        if kept is None:
            self._produce(again.add, self._send)
        else:
            for piece in kept:
                self._send(piece)
            for piece in () if self._writing.source.private else kept:
                again.add(piece)  # while the last parts are being sent
        self._writing.commit(writer)
        return (kept is not None and self._writing.source.private) or again.finish() == hashes

    def _hash(self) -> list[int]:
        """Returns the checksums of the data area."""
        start, hasher = self._writing.recorder.now(), _AreaHasher(self._plan.nbytes, self._pool)
        self._produce(hasher.add, self._keep)
        hashes = hasher.finish()
        self._writing.recorder.add("hash", start, start + hasher.ns, self._plan.nbytes)
        return hashes

    def _keep(self, piece: np.ndarray) -> None:
        if self._kept is not None:
            self._kept.append(piece)

    def _send(self, piece: np.ndarray) -> None:
        for low in range(0, len(piece), BUFFER):
            block = piece[low : low + BUFFER]
            self._write(block)
            self._writing.count(len(block))
            self.counted += len(block)

    def _write(self, block: np.ndarray) -> None:
        self._writer.write(self._at, block.data)
        self._at += len(block)


# the bytes of entries -------------------------------------------------------------------------------------------------


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


def has_methods_of(data: object, protocol: type[T]) -> TypeGuard[T]:
    """Whether data is of a protocol, as `isinstance` says, which takes 12 us for each piece."""
    return _is_of_protocol(type(data), protocol)


@lru_cache(maxsize=256)
def _is_of_protocol(kind: type, protocol: Any) -> bool:
    return issubclass(kind, protocol)


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


def append_entry(sink: ByteSink, write: PlannedEntry, pieces: Sequence[SourcePiece]) -> None:
    """Appends the bytes of an entry to a sink, from the piece that holds it."""
    if not write.nbytes:
        return
    region, piece = write.region, piece_of(write, pieces)
    # most leaves of an optimizer have a few bytes: to create an array for each takes longer than the copy
    if isinstance(piece.data, HostMemory) and write.nbytes <= MEMMOVE_LIMIT and region == piece.region:
        sink.append_memory(piece.data, write.nbytes)
    elif isinstance(piece.data, (HostArray, HostMemory)):
        array = piece.data.array
        sink.append(array if region == piece.region else array[region.relative_to(piece.region).slices()])
    elif has_methods_of(piece.data, RowGatherer):
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
