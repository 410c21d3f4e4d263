"""Runs the plan of a save: streams a rank's shards out.

Saving copies entries one after the other into page-aligned buffers of `BUFFER` bytes; full buffers go to a few threads
that hash and write them while the next is filled, so a save needs no more memory than those buffers. The header is
written last, with the checksums. An upload takes bytes in order, so there the data is read twice: once for the
checksums, and once to send it behind the header.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import msgspec
import numpy as np

from ..arrays.base import HostArray, HostMemory, Piece, Readable
from ..core.format.shard_header import BLOCK, Entry, ShardHeader, block_count, encode_header, hash_block, with_hashes
from ..core.planning.save_plan import FilePlan, ShardEntry
from ..core.sharding.region import Region, tiles
from ..errors import CheckpointError
from ..io.storage.memory import PAGE, aligned_buffer
from ..io.storage.store import Store, Writer
from ..io.timing import Recorder

__all__ = ["BUFFER", "SaveFile", "Sink", "entries_of", "feed", "run_save"]

BUFFER = 8 << 20
"""Bytes of one write. Measured: 4 to 16 MiB reach the device's rate, smaller ones do not."""
BUFFERS = 4
WRITERS = 3
SMALL = 64 << 10
"""Bytes up to which an array is copied by address: more, and what numpy takes to begin with is nothing."""


class Sink(Protocol):
    """Takes arrays one after the other, each in C order: a file, or memory."""

    def feed(self, data: np.ndarray) -> None: ...

    def copy(self, memory: HostMemory, nbytes: int) -> None:
        """Takes a small array, all of it."""
        ...

    def room(self) -> np.ndarray:
        """Memory for what comes next, uint8[n], to be filled from the front; n > 0 may be less than is wanted."""
        ...

    def advance(self, nbytes: int) -> None:
        """Takes that many bytes of `room` as filled."""
        ...


class _Pipe:
    """Buffers on their way to a file: filled by the caller, hashed and written by threads."""

    def __init__(self, writer: Writer, base: int, nbytes: int, pool: ThreadPoolExecutor, ring: queue.Queue[Any]):
        self._writer, self._base, self._pool, self._ring = writer, base, pool, ring
        self.hashes = [0] * block_count(nbytes)
        self.hash_ns = self.write_ns = 0
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()
        self._take()
        self._at = 0  # bytes in the buffer
        self._start = 0  # where the buffer goes in the data area

    def copy(self, memory: HostMemory, nbytes: int) -> None:
        """Appends a small array."""
        if nbytes >= BUFFER - self._at:
            self.feed(memory.array)
            return
        ctypes.memmove(self._address + self._at, memory.address, nbytes)
        self._at += nbytes

    def room(self) -> np.ndarray:
        """What is free of the buffer that is being filled."""
        return self._bytes[self._at :]

    def advance(self, nbytes: int) -> None:
        """Takes the front of `room` as filled."""
        self._at += nbytes
        if self._at == BUFFER:
            self._send(self._buffer, BUFFER, self._ring)
            self._at = 0
            self._take()

    def feed(self, data: np.ndarray) -> None:
        """Appends the elements of an array, in C order."""
        if data.flags.c_contiguous:
            self._feed_bytes(data.reshape(-1).view(np.uint8))
            return
        row = data[:1].nbytes
        if row > BUFFER and data.ndim > 1:
            for part in data:
                self.feed(part)
            return
        rows = max(1, BUFFER // max(1, row))
        for low in range(0, len(data), rows):
            self._feed_bytes(np.ascontiguousarray(data[low : low + rows]).reshape(-1).view(np.uint8))

    def _feed_bytes(self, data: np.ndarray) -> None:
        if self._at == 0 and len(data) >= BUFFER and data.ctypes.data % PAGE == 0:
            data = self._send_in_place(data)
        if len(data) < BUFFER - self._at:
            self._bytes[self._at : self._at + len(data)] = data
            self._at += len(data)
            return
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER - self._at)
            self._bytes[self._at : self._at + count] = data[done : done + count]
            self.advance(count)
            done += count

    def _send_in_place(self, data: np.ndarray) -> np.ndarray:
        """Writes whole blocks from where they are, no copy made; returns what is left."""
        whole = len(data) // BUFFER * BUFFER
        for low in range(0, whole, BUFFER):
            while len(self._pending) >= BUFFERS:
                wait(self._pending, return_when=FIRST_COMPLETED)
                self._reap()
            self._send(data[low : low + BUFFER].data, BUFFER, None)
        return data[whole:]

    def _take(self) -> None:
        self._buffer: memoryview = self._ring.get()
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._address = self._bytes.ctypes.data

    def _send(self, block: memoryview, nbytes: int, ring: queue.Queue[Any] | None) -> None:
        self._pending.append(self._submit(block, nbytes, self._start, ring))
        self._start += nbytes
        self._reap()

    def _submit(self, block: memoryview, nbytes: int, start: int, ring: queue.Queue[Any] | None) -> Future[None]:
        done: Future[None] = Future()
        once = threading.Lock()

        def work() -> None:
            if not once.acquire(blocking=False):
                return
            try:
                done.set_result(self._work(block, nbytes, start, ring))
            except BaseException as error:
                done.set_exception(error)

        try:
            self._pool.submit(work)
        except RuntimeError:
            # no thread can be started, as when the interpreter ends: this one does it, unless another one that runs
            # has it already, since the pool keeps what it was given
            work()
        return done

    def _reap(self) -> None:
        """Lets go of what is written; raises what failed."""
        for future in [f for f in self._pending if f.done()]:
            self._pending.remove(future)
            future.result()

    def _work(self, block: memoryview, nbytes: int, start: int, ring: queue.Queue[Any] | None) -> None:
        try:
            begin = time.perf_counter_ns()
            for at in range(0, nbytes, BLOCK):
                self.hashes[(start + at) // BLOCK] = hash_block(block[at : min(at + BLOCK, nbytes)])
            middle = time.perf_counter_ns()
            self._writer.write(self._base + start, block[:nbytes])
            end = time.perf_counter_ns()
            with self._lock:
                self.hash_ns += middle - begin
                self.write_ns += end - middle
        finally:
            if ring is not None:
                ring.put(block)

    def finish(self) -> None:
        """Sends what is left and waits for everything."""
        if self._at:
            self._send(self._buffer, self._at, self._ring)
        else:
            self._ring.put(self._buffer)
        errors = [error for f in self._pending if (error := f.exception()) is not None]
        if errors:
            raise errors[0]

    def drain(self) -> None:
        """After an error: waits until no thread uses the file any more."""
        wait(self._pending)


class SaveFile(msgspec.Struct, frozen=True):
    """One shard to write: its plan, its name, and a header that lacks only the checksums."""

    plan: FilePlan
    name: str
    header: ShardHeader


def run_save(
    store: Store,
    files: Sequence[SaveFile],
    pieces: Callable[[int], Sequence[Piece]],
    recorder: Recorder,
    *,
    created: Callable[[str], None] = lambda name: None,
) -> list[tuple[int, int]]:
    """Writes a rank's shards, durably.

    Args:
        pieces: the local pieces of leaf number i.
        created: told each file's name before the file is made, for cleaning up after a failure.

    Returns:
        (bytes of the header, bytes of the data) of each file.
    """
    huge = any(file.plan.nbytes >= BUFFER for file in files)
    ring: queue.Queue[Any] = queue.Queue()
    for _ in range(BUFFERS):
        ring.put(aligned_buffer(BUFFER, huge=huge))
    with ThreadPoolExecutor(WRITERS, "treeckpt-write") as pool:
        return [_save_file(store, file, pieces, recorder, pool, ring, created) for file in files]


def _save_file(
    store: Store,
    file: SaveFile,
    pieces: Callable[[int], Sequence[Piece]],
    recorder: Recorder,
    pool: ThreadPoolExecutor,
    ring: queue.Queue[Any],
    created: Callable[[str], None],
) -> tuple[int, int]:
    blank = encode_header(file.header)
    base = len(blank)
    created(file.name)
    with recorder.span("write", base + file.plan.nbytes):
        writer = store.create(file.name, base + file.plan.nbytes)

        def stream(to: Writer) -> list[int]:
            return _stream(_Pipe(to, base, file.plan.nbytes, pool, ring), file.plan, pieces, recorder)

        def put_head(hashes: list[int]) -> None:
            head = aligned_buffer(base)
            head[:] = with_hashes(blank, hashes)
            writer.write(0, head)

        try:
            if getattr(writer, "ordered", False):
                hashes = stream(NullWriter())
                put_head(hashes)
                if stream(writer) != hashes:
                    raise _changed(f"{store.url}/{file.name}")
            else:
                put_head(stream(writer))
            with recorder.span("fsync"):
                writer.commit()
        except BaseException:
            writer.abort()
            raise
    return base, file.plan.nbytes


class NullWriter:
    """Takes what is only hashed."""

    def write(self, offset: int, data: memoryview) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...


def _stream(pipe: _Pipe, plan: FilePlan, pieces: Callable[[int], Sequence[Piece]], recorder: Recorder) -> list[int]:
    """Sends a file's data through a pipe; returns its checksums."""
    start = recorder.now()
    try:
        for write in plan.writes:
            feed(pipe, write, pieces(write.leaf))
        pipe.finish()
    finally:
        pipe.drain()
    recorder.add("hash", start, start + pipe.hash_ns, plan.nbytes)
    return pipe.hashes


def _changed(path: str) -> CheckpointError:
    return CheckpointError(
        path,
        expected="arrays that stay as they are while they are being saved",
        found="other bytes than a moment ago",
        hint="Wait for the save before anything trains on, or use save_async",
    )


def feed(pipe: Sink, write: ShardEntry, pieces: Sequence[Piece]) -> None:
    """Gives a sink the bytes of an entry, from the piece that holds it."""
    region = write.region
    piece = pieces[0] if len(pieces) == 1 else _holder(region, pieces)
    if piece is None or not write.nbytes:
        return
    if isinstance(piece.data, HostMemory) and write.nbytes <= SMALL and region == piece.region:
        pipe.copy(piece.data, write.nbytes)
    elif isinstance(piece.data, (HostArray, HostMemory)):
        array = piece.data.array
        pipe.feed(array if region == piece.region else array[region.relative_to(piece.region).slices()])
    elif (gather := getattr(piece.data, "gather", None)) is not None:
        _feed_gathered(pipe, region.relative_to(piece.region), write.nbytes, gather)
    else:
        _feed_boxes(pipe, region.relative_to(piece.region), piece.data, write.nbytes // region.size)


def _holder(region: Region, pieces: Sequence[Piece]) -> Piece | None:
    for piece in pieces:
        if region.within(piece.region):
            return piece
    assert not region.size, f"the plan writes {region}, which this rank does not hold"
    return None


def _feed_gathered(pipe: Sink, box: Region, nbytes: int, gather: Callable[[slice, np.ndarray], None]) -> None:
    """Has rows that lie here and there put together where they are written from. Of an array only whole rows are."""
    low, high = box.offset[0], box.offset[0] + box.shape[0]
    size = nbytes // box.shape[0]
    while low < high:
        room = pipe.room()
        count = min(len(room) // size, high - low)
        if count:
            gather(slice(low, low + count), room[: count * size])
            pipe.advance(count * size)
        else:  # a row that lies across two buffers, or is longer than one
            count = 1
            row = np.empty(size, np.uint8)
            gather(slice(low, low + 1), row)
            pipe.feed(row)
        low += count


def _feed_boxes(pipe: Sink, box: Region, data: Readable, itemsize: int) -> None:
    """Reads what is lazily transformed, on a device or in another file: no more than a buffer of it at a time."""
    for part in tiles(box, BUFFER // itemsize):
        pipe.feed(data.read(part.slices()))


def entries_of(plan: FilePlan, describe: Callable[[int], tuple[str, str, tuple[int, ...]]]) -> tuple[Entry, ...]:
    """The header's entries of a file's plan; `describe` gives a leaf's path, dtype and global shape."""
    entries: list[Entry] = []
    for write in plan.writes:
        path, dtype, shape = describe(write.leaf)
        entries.append(Entry(path, dtype, shape, write.region, write.start, write.nbytes))
    return tuple(entries)
