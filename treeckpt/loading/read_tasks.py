"""Runs the plan of a load: reads stretches of shards in, and copies or leaves them where they are wanted.

Each block of a plan is read, rounded out to the borders of checksums, verified, and its boxes are copied to their
targets; several are under way at once, in as many buffers. Runs of whole arrays land in page-aligned memory and stay
there. What is to be read is listed first (`ReadTask`) and then carried out: by this process alone (`run_readings`),
or shared with other ranks of the host (`loading.shared_read`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TypeGuard

import msgspec
import numpy as np

from ..arrays.base import ScatteredBytes, TargetPiece, raw_dtype
from ..arrays.threads import WorkerThreads
from ..core.format.shard_header import BLOCK
from ..core.planning.load_plan import READ_LIMIT, BoxCopy, ContiguousRead, ReadBlock
from ..core.sharding.region import c_strides
from ..io.storage.memory import PAGE, aligned_buffer
from ..io.storage.shard_reader import ByteRange, Shards, stretch_of

__all__ = [
    "STRETCH",
    "LoadedRange",
    "ReadTask",
    "list_landings",
    "list_readings",
    "read_limit",
    "ring_of",
    "run_map",
    "run_readings",
]

READERS = 3
STRETCH = 4 << 20
"""Bytes of one read where any would do: a device wants several under way more than it wants them large."""
ALONE = 1 << 20
"""Bytes that are read before threads are ready."""
SPARSE = 0.75
"""Part of a block that this rank wants, below which it is taken that other ranks of the host want the rest of it."""


class ReadTask(msgspec.Struct, frozen=True):
    """A stretch to be read."""

    stretch: ByteRange
    out: memoryview | None = None
    """Where it stays; None for a buffer that is used again."""
    use: Callable[[memoryview], None] | None = None
    """What is done with the bytes; None if they only are to be verified, or stay."""
    shared: bool = False
    """Whether other ranks of the host read it too: then through the page cache, so that the device reads it once."""
    parts: Callable[[], list[memoryview] | None] | None = None
    """The memory where it can be read straight to instead, in order; None where it cannot."""

    @property
    def nbytes(self) -> int:
        return self.stretch.high - self.stretch.low


def list_readings(
    shards: Shards,
    blocks: Iterable[ReadBlock],
    targets: Callable[[int], TargetPiece],
    *,
    itemsize: Callable[[int], int],
    paths: Callable[[int], str],
) -> list[ReadTask]:
    """What is to be read: a stretch per block, whose boxes are copied to their targets.

    Args:
        targets: the piece that want number i fills.
    """
    readings: list[ReadTask] = []
    for block in blocks:
        opened, start = shards.locate(block.rank, block.start, block.stop, paths(block.copies[0].want))
        stretch = stretch_of(opened, start, start + block.stop - block.start, verify=shards.verify)
        wanted = sum(copy.box.size * itemsize(copy.want) for copy in block.copies)
        shared = wanted < SPARSE * (block.stop - block.start)
        skip = start - stretch.low
        straight = _straight(block, skip, stretch.high - stretch.low, targets)
        readings.append(ReadTask(stretch, None, _user(block, skip, targets, itemsize), shared, straight))
    return readings


def _straight(
    block: ReadBlock, skip: int, nbytes: int, targets: Callable[[int], TargetPiece]
) -> Callable[[], list[memoryview] | None] | None:
    """The memory of a block's one copy, with some to spare for what is read only to be verified."""
    if len(block.copies) != 1:
        return None
    [copy] = block.copies
    data = targets(copy.want).data
    if not _is_spread(data):
        return None
    low, size = copy.box.offset[0], copy.box.size

    def parts() -> list[memoryview] | None:
        inside = data.parts(low, low + size)
        ends = [memoryview(bytearray(n)) for n in (skip, nbytes - skip - size)]
        return None if inside is None else [part for part in (ends[0], *inside, ends[1]) if len(part)]

    return parts


@lru_cache(maxsize=64)
def _spreads(kind: type) -> bool:
    return issubclass(kind, ScatteredBytes)  # takes tens of microseconds, and is asked for each stretch


def _is_spread(data: object) -> TypeGuard[ScatteredBytes]:
    return _spreads(type(data))


def _user(
    block: ReadBlock, skip: int, targets: Callable[[int], TargetPiece], itemsize: Callable[[int], int]
) -> Callable[[memoryview], None]:
    def use(memory: memoryview) -> None:
        data = np.frombuffer(memory, np.uint8)[skip:]
        for copy in block.copies:
            _place(data, block, copy, targets(copy.want), itemsize(copy.want))

    return use


def _place(data: np.ndarray, block: ReadBlock, copy: BoxCopy, piece: TargetPiece, itemsize: int) -> None:
    raw = raw_dtype(itemsize)
    first = copy.start - block.start
    box, outer = copy.box, copy.chunk
    if box.shape == outer.shape:
        source = data[first : first + box.size * itemsize].view(raw).reshape(box.shape)
    else:
        span = data[first : first + copy.stop - copy.start]
        source = np.ndarray(box.shape, raw, span, strides=c_strides(outer.shape, itemsize))
    where = box.relative_to(piece.region)
    piece.data.write(where.slices(), source)


class LoadedRange(msgspec.Struct, frozen=True):
    """Memory that holds a run of a rank's stream, the byte at stream offset `start` first."""

    start: int
    memory: memoryview


def run_map(shards: Shards, runs: Sequence[ContiguousRead], paths: Callable[[int], str]) -> list[LoadedRange]:
    """Maps each run, copy-on-write: bytes are read when they are touched, and never compared with checksums."""
    landed: list[LoadedRange] = []
    for run in runs:
        opened, start = shards.locate(run.rank, run.start, run.stop, paths(run.members[0]))
        stretch = stretch_of(opened, start, start + run.stop - run.start, verify=False)
        position = opened.file.header + stretch.low
        memory = shards.store.map(opened.file.name, position, stretch.high - stretch.low)
        landed.append(LoadedRange(run.start, memory[start - stretch.low :]))
    return landed


def list_landings(
    shards: Shards, runs: Sequence[ContiguousRead], paths: Callable[[int], str]
) -> tuple[list[LoadedRange], list[ReadTask]]:
    """Page-aligned memory for each run, where arrays can stay, and what is to be read into it."""
    landed: list[LoadedRange] = []
    readings: list[ReadTask] = []
    for run in runs:
        opened, start = shards.locate(run.rank, run.start, run.stop, paths(run.members[0]))
        whole = stretch_of(opened, start, start + run.stop - run.start, verify=shards.verify)
        memory = aligned_buffer(whole.high - whole.low, huge=True)
        landed.append(LoadedRange(run.start, memory[start - whole.low :]))
        step = max(STRETCH // opened.block, 1) * opened.block
        for low in range(whole.low, whole.high, step):
            part = ByteRange(opened, low, min(low + step, whole.high))
            readings.append(ReadTask(part, memory[low - whole.low : part.high - whole.low]))
    return landed, readings


def read_limit(memory: int) -> int:
    """Bytes of one block, so that a few of them, rounded out to the borders of checksums, fit into the memory."""
    return min(READ_LIMIT, max(memory // READERS // BLOCK * BLOCK - 2 * BLOCK, BLOCK))


def ring_of(readings: Iterable[ReadTask], count: int) -> queue.Queue[memoryview]:
    """`count` buffers, each large enough for those readings that bring no memory of their own."""
    largest = max((reading.nbytes for reading in readings if reading.out is None), default=0)
    ring: queue.Queue[memoryview] = queue.Queue()
    for _ in range(count if largest else 0):
        ring.put(aligned_buffer(-(-largest // PAGE) * PAGE, huge=True))
    return ring


def run_readings(
    shards: Shards, readings: Sequence[ReadTask], *, memory: int, begin: Callable[[ReadTask], object] | None = None
) -> int:
    """Carries out readings, a few at a time.

    Args:
        memory: bytes of buffers, at most, as long as one reading needs no more.
        begin: is called with each reading before its first byte is put in place.

    Returns:
        Bytes read from data areas.
    """
    largest = max((reading.nbytes for reading in readings if reading.out is None), default=0)
    readers = max(1, min(READERS, memory // max(largest, 1)))
    ring = ring_of(readings, readers)
    started = begin or (lambda _: None)

    def job(reading: ReadTask) -> None:
        parts = reading.parts() if reading.parts is not None else None
        if parts is not None:
            straight = True
            try:
                straight = shards.read_parts(reading.stretch, parts)
            finally:
                if straight:  # or it failed midway
                    started(reading)
            if straight:
                return
        if reading.out is not None:
            shards.read(reading.stretch, reading.out[: reading.nbytes], shared=reading.shared)
            return
        with shards.lent(reading.stretch, fetch=reading.shared) as lent:
            if lent is not None:
                if reading.use is not None:
                    started(reading)
                    reading.use(lent)
                return
        out = ring.get()
        try:
            shards.read(reading.stretch, out[: reading.nbytes], shared=reading.shared)
            if reading.use is not None:
                started(reading)
                reading.use(out[: reading.nbytes])
        finally:
            ring.put(out)

    _in_parallel(job, readings, readers)
    return sum(reading.nbytes for reading in readings)


def _in_parallel(job: Callable[[ReadTask], None], readings: Sequence[ReadTask], threads: int) -> None:
    """Does jobs on a few threads; the first error stops what has not begun, and is raised."""
    if len(readings) <= 1 or sum(reading.nbytes for reading in readings) < ALONE:
        for reading in readings:
            job(reading)
        return
    WorkerThreads(threads)([partial(job, reading) for reading in readings])
