"""Sends a shard to an object store, which takes its bytes in order: the header, with all checksums, comes first.

The data is hashed by a few threads before anything is sent. It goes out from where it is; small arrays, and those that
are made while they are read, are copied into buffers. The copies are kept for sending while there is memory for all of
them; otherwise the shard is read a second time. What others can change is hashed again when it is being sent.
"""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from ..arrays.base import HostMemory
from ..core.format.shard_header import BLOCK, block_count, hash_block, hash_parts, with_hashes
from ..core.planning.save_plan import FilePlan
from ..io.storage.memory import aligned_buffer
from ..io.storage.store import Writer
from ..io.timing import Recorder
from ..threads import ThreadPool
from .shard_stream import BUFFER, ShardSource, WriteCallbacks, append_entry, contiguous_parts

COPIES = 512 << 20
"""Bytes of the copies of all shards that are being sent at a time."""
IN_PLACE = 256 << 10
"""Bytes from which an array is sent from where it is: a smaller piece costs more to hand over than to copy."""


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
        """Of a buffer: what is filled and not handed over yet, and what is still free."""
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
    """Hashes a data area that comes in pieces, in the threads of a pool."""

    def __init__(self, nbytes: int, pool: ThreadPool) -> None:
        self._hashes, self._pool = [0] * block_count(nbytes), pool
        self._parts: list[np.ndarray] = []
        self._held = self._start = 0
        """Bytes in `_parts`, and where they begin in the data area."""
        self._pending: list[Future[int]] = []
        self.ns = 0
        """Time of all threads together, after `finish`."""

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
            while len(view):
                block.append(view[:room])
                view, room = view[room:], room - len(block[-1])
                if not room:
                    self._hashes[number] = hash_block(block[0]) if len(block) == 1 else hash_parts(block)
                    number, block, room = number + 1, [], BLOCK
        if block:
            self._hashes[number] = hash_parts(block)
        return time.perf_counter_ns() - begin

    def finish(self) -> list[int]:
        """Returns the checksums of all blocks."""
        if self._held:
            self._submit()
        self.ns = sum(future.result() for future in self._pending)
        return self._hashes


class ShardUpload:
    """Sends one shard.

    Args:
        copies: bytes of memory for copies.
        callbacks: a block counts as written when it is handed over to be sent.
    """

    def __init__(
        self,
        plan: FilePlan,
        source: ShardSource,
        recorder: Recorder,
        pool: ThreadPool,
        copies: int,
        callbacks: WriteCallbacks,
    ) -> None:
        self._plan, self._source, self._recorder, self._pool = plan, source, recorder, pool
        self._callbacks = callbacks
        # the part that is not complete yet keeps its copies, and no part is longer than 1/4096 of a large shard
        count = max(copies, plan.nbytes // 4096) // BUFFER + 4
        self._buffers = _CopyBuffers(count, self._forget)
        self.counted = 0
        """Bytes that were told to `callbacks`."""
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
            append_entry(sink, write, self._source.pieces(write.leaf))
        sink.flush()

    def send(self, writer: Writer, header: bytes) -> bool:
        """Sends header and data, and commits; returns whether the data stayed as it was meanwhile."""
        hashes = self._hash()
        self._callbacks.before_first()
        self._writer, self._at = writer, 0
        self._write(np.frombuffer(with_hashes(header, hashes), np.uint8))
        again = _AreaHasher(self._plan.nbytes, self._pool)
        kept = self._kept
        if kept is None:
            self._produce(again.add, self._send)
        else:
            for piece in kept:
                self._send(piece)
            for piece in () if self._source.private else kept:
                again.add(piece)  # while the last parts are being sent
        self._callbacks.before_commit()
        start = self._recorder.now()
        writer.commit()
        self._recorder.add("fsync", start, self._recorder.now())
        return (kept is not None and self._source.private) or again.finish() == hashes

    def _hash(self) -> list[int]:
        """Returns the checksums of the data area."""
        start, hasher = self._recorder.now(), _AreaHasher(self._plan.nbytes, self._pool)
        self._produce(hasher.add, self._keep)
        hashes = hasher.finish()
        self._recorder.add("hash", start, start + hasher.ns, self._plan.nbytes)
        return hashes

    def _keep(self, piece: np.ndarray) -> None:
        if self._kept is not None:
            self._kept.append(piece)

    def _send(self, piece: np.ndarray) -> None:
        for low in range(0, len(piece), BUFFER):
            block = piece[low : low + BUFFER]
            self._write(block)
            self._callbacks.on_written(len(block))
            self.counted += len(block)

    def _write(self, block: np.ndarray) -> None:
        self._writer.write(self._at, block.data)
        self._at += len(block)
