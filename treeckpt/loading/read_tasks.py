"""Lists the reads of a load, and runs them: ranges of shards that fill memory, or are copied to where they belong.

Requests that lie close together are read as one range, rounded out to whole blocks with checksums, and verified. A few
reads run at once, each with a buffer, unless the bytes stay in the memory that they are read into. Reads are listed
first (`ReadTask`) and then carried out: by this process alone (`run_tasks`), or shared with other ranks of the host
(`loading.shared_read`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from ..arrays.threads import WorkerThreads
from ..core.format.records import Index
from ..core.format.shard_header import BLOCK
from ..core.planning.load_plan import (
    READ_GAP,
    READ_LIMIT,
    bounded_span_boxes,
    plan_contiguous_reads,
    split_at_multiples,
)
from ..core.sharding.region import byte_runs
from ..io.storage.checkpoint import ShardReader
from ..io.storage.memory import PAGE, aligned_buffer
from ..io.storage.shard_reader import ByteRange, aligned_range
from .read_request import BoxDestination, ContiguousMemory, NewArray, ReadRequest
from .scatter import Scatter, ScatterSlice

__all__ = [
    "DEVICE_READ",
    "ReadTask",
    "buffers_for",
    "join_contiguous",
    "list_tasks",
    "map_arrays",
    "read_limit",
    "run_tasks",
]

D = TypeVar("D")

READERS = 3
DEVICE_READ = 4 << 20
"""Bytes of one read where any size would do: a device wants several requests in flight more than large ones."""
ALONE = 1 << 20
"""Bytes that are read before threads are ready."""
SPARSE = 0.75
"""Part of a range that this rank wants, below which other ranks of the host probably want the rest of it."""


class Sink(Protocol):
    """What is done with the bytes of one read."""

    def parts(self) -> list[memoryview] | None:
        """Returns the memory that the read can fill directly, in order; None where it needs a buffer."""
        ...

    def write(self, data: memoryview) -> None:
        """Copies what was read to its destinations."""
        ...


class ScatterSink(msgspec.Struct, frozen=True):
    """Bytes `start:stop` of a rank's stream, between `before` and `after` bytes that are read only to be verified."""

    destination: ScatterSlice
    start: int
    stop: int
    before: int
    after: int

    def parts(self) -> list[memoryview] | None:
        inside = self.destination.scatter.parts(self.start, self.stop)
        if inside is None:
            return None
        first, last = memoryview(bytearray(self.before)), memoryview(bytearray(self.after))
        return [part for part in (first, *inside, last) if len(part)]

    def write(self, data: memoryview) -> None:
        address = np.frombuffer(data, np.uint8).ctypes.data + self.before
        self.destination.scatter.copy(self.start, self.stop, address)


class BoxSink(msgspec.Struct, frozen=True):
    """Boxes in a rank's stream from byte `start` on, which follows `before` bytes that are read only to be verified."""

    boxes: Sequence[ReadRequest[BoxDestination]]
    start: int
    before: int

    def parts(self) -> list[memoryview] | None:
        return None

    def write(self, data: memoryview) -> None:
        memory = np.frombuffer(data, np.uint8)
        for box in self.boxes:
            _, start, nbytes = box.byte_range
            first = self.before + start - self.start
            box.destination.write(memory[first : first + nbytes])


class ReadTask(msgspec.Struct, frozen=True):
    """One read."""

    byte_range: ByteRange
    out: memoryview | None = None
    """Memory where the bytes stay; None for a buffer that is used again."""
    sink: Sink | None = None
    """None if the bytes are only verified, or stay."""
    shared: bool = False
    """Whether other ranks of the host read it too: then through the page cache, so that the device reads it once."""

    @property
    def nbytes(self) -> int:
        return self.byte_range.stop - self.byte_range.start


def list_tasks(reader: ShardReader, requests: Sequence[ReadRequest[Any]], limit: int) -> list[ReadTask]:
    """Returns the reads that fill the destinations of requests; new arrays exist then, without their bytes.

    Args:
        requests: in any order; contiguous ones that lie close together are read as one range.
        limit: bytes of one read into a buffer, at most.

    Raises:
        CorruptError: a shard is missing, cut short, or of another save.
    """
    tasks = _new_array_tasks(reader, _with(requests, NewArray))
    tasks += _box_tasks(reader, _with(requests, BoxDestination), limit)
    joined = join_contiguous(reader.checkpoint.index, _with(requests, ContiguousMemory), limit)
    return tasks + [_scatter_task(reader, request) for request in [*_with(requests, ScatterSlice), *joined]]


def _with(requests: Sequence[ReadRequest[Any]], kind: type[D]) -> list[ReadRequest[D]]:
    return [request for request in requests if type(request.destination) is kind]


def join_contiguous(
    index: Index, requests: Sequence[ReadRequest[ContiguousMemory]], limit: int
) -> Iterator[ReadRequest[ScatterSlice]]:
    """Joins contiguous requests that lie close together, and cuts them at multiples of a size in their file.

    Args:
        limit: the size in bytes; at most `DEVICE_READ` is taken.
    """
    for run in plan_contiguous_reads([request.byte_range for request in requests], borders=index.borders):
        inside = [requests[i] for i in run.members]
        path, piece = inside[0].path, ScatterSlice(Scatter(inside))
        file, _ = index.locate(run.rank, run.start, run.stop, path)
        for low, high in split_at_multiples(run.start, run.stop, file.stream, min(limit, DEVICE_READ)):
            yield ReadRequest(path, (run.rank, low, high - low), piece)


def _new_array_tasks(reader: ShardReader, requests: Sequence[ReadRequest[NewArray]]) -> list[ReadTask]:
    """Reads of whole arrays into page-aligned memory, where they stay."""
    tasks: list[ReadTask] = []
    for run in plan_contiguous_reads([r.byte_range for r in requests], borders=reader.checkpoint.index.borders):
        shard, start = reader.locate(run.rank, run.start, run.stop, requests[run.members[0]].path)
        whole = aligned_range(shard, start, start + run.stop - run.start, verify=reader.verify)
        memory = aligned_buffer(whole.stop - whole.start, huge=True)
        step = max(DEVICE_READ // shard.block, 1) * shard.block
        for low in range(whole.start, whole.stop, step):
            part = ByteRange(shard, low, min(low + step, whole.stop))
            tasks.append(ReadTask(part, memory[low - whole.start : part.stop - whole.start]))
        _view_arrays(requests, run.members, memory[start - whole.start :], run.start)
    return tasks


def map_arrays(reader: ShardReader, requests: Sequence[ReadRequest[NewArray]]) -> None:
    """Maps arrays copy-on-write: bytes are read when they are touched, and never compared with checksums."""
    for run in plan_contiguous_reads([r.byte_range for r in requests], borders=reader.checkpoint.index.borders):
        shard, start = reader.locate(run.rank, run.start, run.stop, requests[run.members[0]].path)
        whole = aligned_range(shard, start, start + run.stop - run.start, verify=False)
        memory = reader.store.map(shard.file.name, shard.file.header + whole.start, whole.stop - whole.start)
        _view_arrays(requests, run.members, memory[start - whole.start :], run.start)


def _view_arrays(
    requests: Sequence[ReadRequest[NewArray]], members: Iterable[int], memory: memoryview, start: int
) -> None:
    """Makes arrays of memory that holds a rank's stream from byte `start` on."""
    for member in members:
        request = requests[member]
        request.destination.view(memory, request.byte_range[1] - start)


def _box_tasks(reader: ShardReader, requests: Sequence[ReadRequest[BoxDestination]], limit: int) -> list[ReadTask]:
    """Reads of boxes, cut into tiles of at most `limit` bytes; tiles that lie close together are read at once."""
    boxes = [tile for request in requests for tile in _tiles(request, limit)]
    tasks: list[ReadTask] = []
    for run in plan_contiguous_reads(
        [b.byte_range for b in boxes], borders=reader.checkpoint.index.borders, limit=limit
    ):
        inside = [boxes[member] for member in run.members]
        shard, start = reader.locate(run.rank, run.start, run.stop, inside[0].path)
        whole = aligned_range(shard, start, start + run.stop - run.start, verify=reader.verify)
        shared = sum(box.destination.nbytes for box in inside) < SPARSE * (run.stop - run.start)
        tasks.append(ReadTask(whole, None, BoxSink(inside, run.start, start - whole.start), shared))
    return tasks


def _tiles(request: ReadRequest[BoxDestination], limit: int) -> Iterable[ReadRequest[BoxDestination]]:
    copy, (rank, start, _) = request.destination, request.byte_range
    first = byte_runs(copy.box, copy.chunk, copy.itemsize).first
    for box in bounded_span_boxes(copy.box, copy.chunk, copy.itemsize, limit=limit, gap=READ_GAP):
        if box == copy.box:
            yield request
            return
        low, high = byte_runs(box, copy.chunk, copy.itemsize).span
        byte_range = (rank, start + low - first, high - low)
        yield ReadRequest(request.path, byte_range, msgspec.structs.replace(copy, box=box))


def _scatter_task(reader: ShardReader, request: ReadRequest[ScatterSlice]) -> ReadTask:
    rank, low, nbytes = request.byte_range
    shard, start = reader.locate(rank, low, low + nbytes, request.path)
    whole = aligned_range(shard, start, start + nbytes, verify=reader.verify)
    before, after = start - whole.start, whole.stop - start - nbytes
    return ReadTask(whole, None, ScatterSink(request.destination, low, low + nbytes, before, after))


def read_limit(memory: int) -> int:
    """Returns the bytes of one read, so that a few, rounded out to whole blocks with checksums, fit into the memory."""
    return min(READ_LIMIT, max(memory // READERS // BLOCK * BLOCK - 2 * BLOCK, BLOCK))


def buffers_for(tasks: Iterable[ReadTask], count: int) -> queue.Queue[memoryview]:
    """Returns `count` buffers, each large enough for every task that has no memory of its own."""
    largest = max((task.nbytes for task in tasks if task.out is None), default=0)
    buffers: queue.Queue[memoryview] = queue.Queue()
    for _ in range(count if largest else 0):
        buffers.put(aligned_buffer(-(-largest // PAGE) * PAGE, huge=True))
    return buffers


def run_tasks(
    reader: ShardReader, tasks: Sequence[ReadTask], *, memory: int, on_write: Callable[[ReadTask], object] | None = None
) -> int:
    """Carries out reads, a few at a time; the first error stops what has not begun, and is raised.

    Args:
        memory: bytes of buffers, at most, unless one read needs more.
        on_write: is called with each task that has a sink, before its first byte is put in place.

    Returns:
        Bytes read from data areas.
    """
    largest = max((task.nbytes for task in tasks if task.out is None), default=0)
    threads = max(1, min(READERS, memory // max(largest, 1)))
    runner = _TaskRunner(reader, buffers_for(tasks, threads), on_write or (lambda _: None))
    nbytes = sum(task.nbytes for task in tasks)
    if len(tasks) <= 1 or nbytes < ALONE:
        for task in tasks:
            runner.run(task)
    else:
        WorkerThreads(threads)([partial(runner.run, task) for task in tasks])
    return nbytes


class _TaskRunner(msgspec.Struct, frozen=True):
    """What the threads of one load share."""

    reader: ShardReader
    buffers: queue.Queue[memoryview]
    on_write: Callable[[ReadTask], object]

    def run(self, task: ReadTask) -> None:
        """Carries out one read: into its destinations, into its own memory, from mapped memory, or through a buffer."""
        if self._read_parts(task):
            return
        if task.out is not None:
            self.reader.read(task.byte_range, task.out[: task.nbytes], shared=task.shared)
            return
        with self.reader.mapped(task.byte_range, fetch=task.shared) as memory:
            if memory is not None:
                self._write(task, memory)
                return
        buffer = self.buffers.get()
        try:
            self.reader.read(task.byte_range, buffer[: task.nbytes], shared=task.shared)
            self._write(task, buffer[: task.nbytes])
        finally:
            self.buffers.put(buffer)

    def _read_parts(self, task: ReadTask) -> bool:
        """Reads straight into the destinations; False, with nothing changed, where that is not possible."""
        parts = task.sink.parts() if task.sink is not None else None
        if parts is None:
            return False
        done = True
        try:
            done = self.reader.read_parts(task.byte_range, parts)
        finally:
            if done:  # or it failed midway
                self.on_write(task)
        return done

    def _write(self, task: ReadTask, data: memoryview) -> None:
        if task.sink is not None:
            self.on_write(task)
            task.sink.write(data)
