"""Carries out reads from local files: a few at a time, each straight to where its bytes belong if that is possible.

Bytes of the page cache are read into contiguous destinations without a copy, or copied from a map of it. All others are
read into the memory where they stay, or through a buffer. What is read is compared with its checksums before it is
copied, and right after it where it was read to its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

import msgspec

from .._core.format.records import File
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.local_files import LEAST_MAPPED
from .._io.storage.memory import PAGE_NBYTES, aligned_buffer
from .._io.storage.shard_reader import OpenedShard, check_blocks, check_parts
from .._io.timing import Recorder
from .._threads import WorkerThreads
from .plan import ContiguousMemory, Read, copy_contiguous, parts_of

READERS = 3
"""Threads that read at the same time, and the buffers of a load."""
BEFORE_THREADS = 1 << 20
"""Bytes that are read before threads are ready."""


class ReadRun(msgspec.Struct, frozen=True):
    """What the reads of a load have in common."""

    checkpoint: Checkpoint
    recorder: Recorder
    """Gets a span for each read."""
    verify: bool
    """Compares every block that is read with its checksum."""
    whole: bool
    """Refuses shards that are cut short, even where the wanted bytes are there."""
    written: list[Read]
    """Reads whose bytes have reached their destinations, or may have; each is added before the first byte is put."""
    executor: Callable[..., None]
    """Carries out reads of this rank from the kind of store that it is: `execute_local` or `execute_remote`."""

    def execute(self, reads: Sequence[Read], memory: int) -> None:
        """Carries out reads of this rank alone, see `executor`."""
        self.executor(self, reads, memory=memory)

    def shard(self, file: File) -> OpenedShard:
        """Returns a shard, which is opened if it was not; raises CorruptError as `Checkpoint.shard`."""
        return self.checkpoint.shard(file, whole=self.whole)


class Buffers:
    """So many buffers for reads without memory of their own, each large enough for all of them."""

    def __init__(self, reads: Sequence[Read], count: int) -> None:
        self._nbytes = max((read.nbytes for read in reads if read.memory is None), default=0)
        self._free: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def take(self) -> memoryview:
        """Returns a buffer; waits until one was given back if all are taken."""
        # allocated when it is first needed: most reads go straight to their places
        return self._free.get() or aligned_buffer(-(-self._nbytes // PAGE_NBYTES) * PAGE_NBYTES, huge=True)

    def give_back(self, buffer: memoryview) -> None:
        self._free.put(buffer)

    @contextlib.contextmanager
    def one(self) -> Iterator[memoryview]:
        """Gives a buffer while the body runs."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)


def execute_local(run: ReadRun, reads: Sequence[Read], *, memory: int) -> None:
    """Carries out reads, begun in order; the first error stops what has not begun, and is raised.

    Args:
        memory: bytes of buffers, at most, unless one read needs more.

    Raises:
        CorruptError: bytes are missing, or differ from their checksum.
    """
    # nothing to do at the same time, or done before a thread has started
    if len(reads) <= 1 or sum(read.nbytes for read in reads) < BEFORE_THREADS:
        buffers = Buffers(reads, 1)
        for read in reads:
            _execute(run, read, buffers)
        return
    largest = max((read.nbytes for read in reads if read.memory is None), default=1)
    threads = max(1, min(READERS, memory // largest))
    buffers = Buffers(reads, threads)
    WorkerThreads(threads)([partial(_execute, run, read, buffers) for read in reads])


def _execute(run: ReadRun, read: Read, buffers: Buffers) -> None:
    """Carries out one read: into its memory, into its destinations, from mapped memory, or through a buffer."""
    if read.memory is not None:
        _read_into(run, read, read.memory)
        put_all(run, read, read.memory)
    elif not _read_parts(run, read) and not _read_mapped(run, read):
        with buffers.one() as buffer:
            _read_into(run, read, buffer[: read.nbytes])
            put_all(run, read, buffer[: read.nbytes])


def put_all(run: ReadRun, read: Read, data: memoryview) -> None:
    """Copies all bytes of a read to its destinations."""
    if not read.destinations:
        return
    run.written.append(read)
    if type(read.destinations[0]) is ContiguousMemory:
        copy_contiguous(read.destinations, 0, read.start, data)
        return
    for one in read.destinations:
        one.write(data[one.start - read.start : one.stop - read.start])


def _read_into(run: ReadRun, read: Read, out: memoryview) -> None:
    """Fills memory with the bytes of a read."""
    begin, store = run.recorder.now(), run.checkpoint.store
    store.read_into(read.file.name, read.file.header + read.start, out, shared=read.shared)
    if run.verify:
        check_blocks(store, run.shard(read.file), read.start, out)
    run.recorder.add("read", begin, run.recorder.now(), read.nbytes)


def _read_parts(run: ReadRun, read: Read) -> bool:
    """Reads from the page cache straight into contiguous destinations; False, with nothing read, if that cannot be."""
    parts = parts_of(read)
    if parts is None:
        return False
    begin, store, done = run.recorder.now(), run.checkpoint.store, True
    try:
        done = store.read_parts(read.file.name, read.file.header + read.start, parts, shared=read.shared)
        if done and run.verify:
            check_parts(store, run.shard(read.file), read.start, parts)
    finally:
        if done:  # or it failed midway
            run.written.append(read)
    if done:
        run.recorder.add("read", begin, run.recorder.now(), read.nbytes)
    return done


def _read_mapped(run: ReadRun, read: Read) -> bool:
    """Copies from mapped memory to the destinations; False if the bytes cannot be mapped."""
    begin, store = run.recorder.now(), run.checkpoint.store
    if read.nbytes < LEAST_MAPPED:
        return False
    with store.mapped(read.file.name, read.file.header + read.start, read.nbytes, fetch=read.shared) as memory:
        if memory is None:
            return False
        if run.verify:
            # before the copy: damaged bytes do not reach an array
            check_blocks(store, run.shard(read.file), read.start, memory)
        run.recorder.add("read", begin, run.recorder.now(), read.nbytes)
        put_all(run, read, memory)
        return True
