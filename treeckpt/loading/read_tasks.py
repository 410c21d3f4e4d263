"""Lists the reads of a load, and runs them: ranges of shards that fill memory, or are copied to where they belong.

Requests that lie close together are read as one range, rounded out to whole blocks with checksums, and verified. A few
reads run at once, each with a buffer, unless the bytes stay in the memory that they are read into. Reads are listed
first (`ReadTask`) and then carried out: by this process alone (`run_tasks`), or shared with other ranks of the host
(`loading.shared_read`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

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
from ..io.storage.memory import PAGE, aligned_buffer, copy_bytes, populating
from ..io.storage.shard_reader import ByteRange, aligned_range
from ..io.storage.store import Store
from .read_request import BoxDestination, Boxes, ContiguousMemory, NewArray, ReadRequest, Scatter

D = TypeVar("D")

READERS = 3
DEVICE_READ = 4 << 20
"""The same for local files: a device wants several requests in flight more than large ones."""
ALONE = 1 << 20
"""Bytes that are read before threads are ready."""
TURN = 32 << 20
"""Bytes that one rank of a host reads from the device at a time, of what several ranks want."""
SPARSE = 0.75
"""Part of a range that this rank wants, below which other ranks of the host probably want the rest of it."""


class ReadTask(msgspec.Struct, frozen=True):
    """One read."""

    byte_range: ByteRange
    """Of whole blocks with checksums, so that it may begin before and end after what is wanted."""
    start: int
    """Where it starts in the rank's stream."""
    out: memoryview | None = None
    """Memory where the bytes stay; None for a buffer that is used again."""
    destinations: Scatter | Boxes | None = None
    """None if the bytes are only verified, or stay."""
    shared: bool = False
    """Whether other ranks of the host read it too: then through the page cache, so that the device reads it once."""

    @property
    def nbytes(self) -> int:
        return self.byte_range.stop - self.byte_range.start

    def parts(self) -> list[memoryview] | None:
        """Returns the memory that the read can fill directly, in order; None where it needs a buffer."""
        return self.destinations.parts(self.start, self.start + self.nbytes) if self.destinations is not None else None

    def write(self, data: memoryview, written: list[ReadTask]) -> None:
        """Copies what was read to its destinations; the task is added to `written` before the first byte is."""
        if self.destinations is not None:
            written.append(self)
            self.destinations.write(self.start, data)

    def take(self, data: memoryview, written: list[ReadTask]) -> None:
        """Puts what was read where it belongs: to its destinations, or into the memory where it stays."""
        if self.out is None:
            self.write(data, written)
        elif data is not self.out:
            self.out[: len(data)] = data


def list_tasks(reader: ShardReader, requests: Sequence[ReadRequest[Any]], limit: int) -> list[ReadTask]:
    """Returns the reads that fill the destinations of requests; new arrays exist then, without their bytes.

    Args:
        requests: in any order; contiguous ones that lie close together are read as one range.
        limit: bytes of one read into a buffer, at most.

    Raises:
        CorruptError: a shard is missing, cut short, or of another save.
    """
    index = reader.checkpoint.index
    tasks = _new_array_tasks(reader, requests_to(NewArray, requests))
    boxes = join_boxes(index, requests_to(BoxDestination, requests), limit)
    for request in boxes:
        wanted = sum(box.destination.nbytes for box in request.destination.requests)
        shared = request.shared or wanted < SPARSE * request.byte_range[2]
        tasks.append(ReadTask(*_located(reader, request), None, request.destination, shared))
    joined = join_contiguous(index, requests_to(ContiguousMemory, requests), min(limit, _any_size(reader.store)))
    for request in [*requests_to(Scatter, requests), *joined]:
        tasks.append(ReadTask(*_located(reader, request), None, request.destination, request.shared))
    return tasks


def in_turns(tasks: Sequence[ReadTask], position: int, count: int) -> list[ReadTask]:
    """Orders reads so that `count` ranks of a host with the same reads find in the page cache what others have read.

    Shared reads come first, in stretches of `TURN` bytes for each rank. In each one every rank begins with a part of
    its own, which it brings into the page cache, and goes on with those of the ranks after it. Nobody waits: what is
    not there yet is read from the device. What the page cache has to keep does not grow with the checkpoint.

    Args:
        position: of this rank among them.
    """
    ordered: list[ReadTask] = []
    stretch: list[ReadTask] = []
    nbytes = 0
    shared = [task for task in tasks if task.shared]
    for number, task in enumerate(shared, 1):
        stretch.append(task)
        nbytes += task.nbytes
        if nbytes >= TURN * count or number == len(shared):
            first = position * len(stretch) // count
            ordered += stretch[first:] + stretch[:first]
            stretch, nbytes = [], 0
    return ordered + [task for task in tasks if not task.shared]


def requests_to(kind: type[D], requests: Sequence[ReadRequest[Any]]) -> list[ReadRequest[D]]:
    """Returns the requests with a kind of destination."""
    return [request for request in requests if type(request.destination) is kind]


def _join(
    index: Index, requests: Sequence[ReadRequest[D]], *, limit: int | None = None, gap: int = READ_GAP
) -> Iterator[ReadRequest[list[ReadRequest[D]]]]:
    """Joins requests that lie close together in a file; see `plan_contiguous_reads`. The joined one is shared if most
    of its bytes are."""
    ranges, some = [request.byte_range for request in requests], any(map(attrgetter("shared"), requests))
    for run in plan_contiguous_reads(ranges, gap=gap, borders=index.borders, limit=limit):
        inside = [requests[member] for member in run.members]
        shared = some and sum(request.byte_range[2] * (1 if request.shared else -1) for request in inside) > 0
        yield ReadRequest(inside[0].path, (run.rank, run.start, run.stop - run.start), inside, shared)


def join_contiguous(
    index: Index, requests: Sequence[ReadRequest[ContiguousMemory]], limit: int
) -> Iterator[ReadRequest[Scatter]]:
    """Joins contiguous requests that lie close together, and cuts them at multiples of a size in their file.

    Args:
        limit: the size in bytes.
    """
    for joined in _join(index, requests):
        scatter, (rank, start, nbytes) = Scatter(joined.destination), joined.byte_range
        file, _ = index.locate(rank, start, start + nbytes, joined.path)
        for low, high in split_at_multiples(start, start + nbytes, file.stream, limit):
            yield ReadRequest(joined.path, (rank, low, high - low), scatter, joined.shared)


def join_boxes(
    index: Index, requests: Sequence[ReadRequest[BoxDestination]], limit: int, *, gap: int = READ_GAP
) -> Iterator[ReadRequest[Boxes]]:
    """Cuts boxes into tiles of at most `limit` bytes, and joins tiles that lie at most `gap` bytes apart."""
    tiles = [tile for request in requests for tile in _tiles(request, limit, gap)]
    for joined in _join(index, tiles, limit=limit, gap=gap):
        yield ReadRequest(joined.path, joined.byte_range, Boxes(joined.destination), joined.shared)


def _tiles(request: ReadRequest[BoxDestination], limit: int, gap: int) -> Iterable[ReadRequest[BoxDestination]]:
    copy, (rank, start, _) = request.destination, request.byte_range
    first = byte_runs(copy.box, copy.chunk, copy.itemsize).first
    for box in bounded_span_boxes(copy.box, copy.chunk, copy.itemsize, limit=limit, gap=gap):
        if box == copy.box:
            yield request
            return
        low, high = byte_runs(box, copy.chunk, copy.itemsize).span
        byte_range = (rank, start + low - first, high - low)
        yield ReadRequest(request.path, byte_range, msgspec.structs.replace(copy, box=box), request.shared)


def _located(reader: ShardReader, request: ReadRequest[Any], *, verify: bool | None = None) -> tuple[ByteRange, int]:
    """Returns the whole blocks, or pages, that hold what is requested, and where they start in the rank's stream."""
    rank, start, nbytes = request.byte_range
    shard, first = reader.locate(rank, start, start + nbytes, request.path)
    whole = aligned_range(shard, first, first + nbytes, verify=reader.verify if verify is None else verify)
    return whole, start - (first - whole.start)


def _new_array_tasks(reader: ShardReader, requests: Sequence[ReadRequest[NewArray]]) -> list[ReadTask]:
    """Reads of whole arrays into page-aligned memory, where they stay."""
    tasks: list[ReadTask] = []
    for joined in _join(reader.checkpoint.index, requests):
        whole, start = _located(reader, joined)
        memory = aligned_buffer(whole.stop - whole.start, huge=True)
        step = max(_any_size(reader.store) // whole.shard.block, 1) * whole.shard.block
        for at in range(0, len(memory), step):
            part = memory[at : at + step]
            first = whole.start + at
            byte_range = ByteRange(whole.shard, first, first + len(part))
            tasks.append(ReadTask(byte_range, start + at, part, shared=joined.shared))
        for request in joined.destination:
            request.destination.view(memory, request.byte_range[1] - start)
    return tasks


def map_arrays(reader: ShardReader, requests: Sequence[ReadRequest[NewArray]]) -> None:
    """Maps arrays copy-on-write: bytes are read when they are touched, and never compared with checksums."""
    for joined in _join(reader.checkpoint.index, requests):
        whole, start = _located(reader, joined, verify=False)
        file = whole.shard.file
        memory = reader.store.map(file.name, file.header + whole.start, whole.stop - whole.start)
        for request in joined.destination:
            request.destination.view(memory, request.byte_range[1] - start)


def _any_size(store: Store) -> int:
    """Returns the bytes of one read where any size would do."""
    return store.traits.request_nbytes


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


def run_tasks(reader: ShardReader, tasks: Sequence[ReadTask], *, memory: int, written: list[ReadTask]) -> int:
    """Carries out reads, a few at a time; the first error stops what has not begun, and is raised.

    Args:
        memory: bytes of buffers, at most, unless one read needs more.
        written: each task with destinations is added to it before its first byte is put in place.

    Returns:
        Bytes read from data areas.
    """
    if reader.store.traits.far:
        with populating([task.out for task in tasks if task.out is not None]) as arrived:
            placement, ranges = _Placement(tasks, written, arrived), [task.byte_range for task in tasks]
            shared = any(task.shared for task in tasks)  # then all through the page cache
            reader.fetch(ranges, placement.put, memory=memory, shared=shared)
        return sum(task.nbytes for task in tasks)
    largest = max((task.nbytes for task in tasks if task.out is None), default=0)
    threads = max(1, min(READERS, memory // max(largest, 1)))
    runner = _TaskRunner(reader, buffers_for(tasks, threads), written)
    nbytes = sum(task.nbytes for task in tasks)
    if len(tasks) <= 1 or nbytes < ALONE:
        for task in tasks:
            runner.run(task)
    else:
        WorkerThreads(threads)([partial(runner.run, task) for task in tasks])
    return nbytes


def read_each(
    reader: ShardReader, tasks: Sequence[ReadTask], put: Callable[[int, memoryview], object], *, memory: int
) -> None:
    """Reads ranges, several at once and begun in order, and hands each one to `put`, from several threads.

    Args:
        put: takes the number of a task and its bytes, which lie in the memory of the task or in memory that is used
            again afterwards. The first error, of it or of a read, ends the call and is raised.
        memory: bytes of buffers, at most, unless one read needs more.
    """
    if reader.store.traits.far:
        ranges, shared = [task.byte_range for task in tasks], any(task.shared for task in tasks)
        reader.fetch(ranges, partial(_collect_part, tasks, put, {}), memory=memory, shared=shared)
        return
    threads = max(1, min(READERS, memory // max((task.nbytes for task in tasks), default=1)))
    buffers = buffers_for(tasks, threads)

    def read(number: int, task: ReadTask) -> None:
        buffer = buffers.get() if task.out is None else None
        try:
            data = task.out if buffer is None else buffer[: task.nbytes]
            assert data is not None, "one of the two"
            reader.read(task.byte_range, data, shared=task.shared)
            put(number, data)
        finally:
            if buffer is not None:
                buffers.put(buffer)

    WorkerThreads(threads)([partial(read, number, task) for number, task in enumerate(tasks)])


def _collect_part(
    tasks: Sequence[ReadTask],
    put: Callable[[int, memoryview], object],
    collected: dict[int, memoryview],
    number: int,
    at: int,
    data: memoryview,
) -> None:
    """Collects the bytes of a task from `at` on, which come in order, and hands them to `put` when all are there."""
    task = tasks[number]
    if not at:
        collected[number] = np.empty(task.nbytes, np.uint8).data if task.out is None else task.out
    copy_bytes(collected[number][at:], data)
    if at + len(data) == task.nbytes:
        put(number, collected.pop(number))


class _Placement:
    """Puts the bytes of tasks in place as they arrive, in order for each task.

    Args:
        arrived: is set with the first bytes.
    """

    def __init__(self, tasks: Sequence[ReadTask], written: list[ReadTask], arrived: threading.Event) -> None:
        self._tasks, self._written, self._arrived = tasks, written, arrived
        self._collected: dict[int, memoryview] = {}
        """The bytes so far of tasks whose destinations are not contiguous, by their numbers."""

    def put(self, number: int, at: int, data: memoryview) -> None:
        """Puts bytes of a task in place, from `at` on."""
        task = self._tasks[number]
        self._arrived.set()
        if task.out is not None:
            copy_bytes(task.out[at:], data)
        elif isinstance(task.destinations, Boxes):
            _collect_part(
                self._tasks, lambda _, whole: task.write(whole, self._written), self._collected, number, at, data
            )
        elif task.destinations is not None:
            if not at:
                self._written.append(task)
            task.destinations.write(task.start + at, data)


class _TaskRunner(msgspec.Struct, frozen=True):
    """What the threads of one load share."""

    reader: ShardReader
    buffers: queue.Queue[memoryview]
    written: list[ReadTask]

    def run(self, task: ReadTask) -> None:
        """Carries out one read: into its destinations, into its own memory, from mapped memory, or through a buffer."""
        if (parts := task.parts()) is not None:
            done = True
            try:
                done = self.reader.read_parts(task.byte_range, parts, shared=task.shared)
            finally:
                if done:  # or it failed midway
                    self.written.append(task)
            if done:
                return
        if task.out is not None:
            self.reader.read(task.byte_range, task.out[: task.nbytes], shared=task.shared)
            return
        with self.reader.mapped(task.byte_range, fetch=task.shared) as memory:
            if memory is not None:
                task.write(memory, self.written)
                return
        buffer = self.buffers.get()
        try:
            self.reader.read(task.byte_range, buffer[: task.nbytes], shared=task.shared)
            task.write(buffer[: task.nbytes], self.written)
        finally:
            self.buffers.put(buffer)
