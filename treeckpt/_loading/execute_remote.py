"""Carries out reads from a store that is far away: many at once, each put in place as it arrives.

Shards that are not open yet are opened by the same fetch: their headers are asked for together with the data, and come
first. Such reads were rounded out to blocks of the usual size. Where a header says otherwise, the reads of that shard
are passed over, and carried out once more, rounded out to its own blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from .._io.storage.checkpoint import ArrivingHeaders
from .._io.storage.local_files import too_short
from .._io.storage.memory import copy_bytes, populating
from .._io.storage.shard_reader import ArrivingBlocks, OpenedShard, check_checksum
from .execute_local import ReadRun, put_all
from .plan import ContiguousMemory, Read, address_of, copy_contiguous, rounded_out


def execute_remote(run: ReadRun, reads: Sequence[Read], *, memory: int) -> None:
    """Carries out reads, and opens their shards first.

    Args:
        memory: bytes of ranges that have been requested and not consumed, at most, unless one range is longer.

    Raises:
        CorruptError: bytes are missing, or differ from their checksum; or a shard is missing, cut short, or of another
            save.
    """
    # twice at most: after the first fetch all shards are open, and reads can follow their blocks
    while reads:
        with populating([read.memory for read in reads if read.memory is not None]) as arrived:
            fetch = _Fetch(run, reads, arrived)
            fetch.run(memory)
        reads = [_rounded_anew(read, run.shard(read.file).block) for read in fetch.passed_over]


def _rounded_anew(read: Read, block: int) -> Read:
    """Returns the read of the whole blocks around another one; what would stay in memory is copied there."""
    destinations = read.destinations
    if read.memory is not None:
        destinations = (ContiguousMemory(read.start, read.stop, address_of(read.memory), read.memory),)
    return rounded_out(msgspec.structs.replace(read, destinations=destinations, memory=None), block)


class _ArrivingRead:
    """A read whose bytes arrive, in order.

    Attributes:
        destination: number of the first of several in contiguous memory that lacks bytes.
        collected: memory for all bytes, where the read has none and its destinations need them all at once.
    """

    def __init__(self, run: ReadRun, read: Read, shard: OpenedShard) -> None:
        self._run, self._read, self._begin = run, read, run.recorder.now()
        self._blocks = ArrivingBlocks(shard, read.start, partial(check_checksum, run.checkpoint.store, shard))
        self.destination, self.collected = 0, read.memory
        self._direct = bool(read.destinations) and type(read.destinations[0]) is ContiguousMemory
        if read.destinations and not self._direct and read.memory is None:
            # a box is copied with strides, which takes all of its bytes
            self.collected = np.empty(read.nbytes, np.uint8).data

    def put(self, at: int, data: memoryview) -> bool:
        """Puts bytes from byte `at` of the read on in place; blocks that end in them match their checksums.

        Returns:
            Whether they are the last ones.
        """
        run, read = self._run, self._read
        if run.verify:
            self._blocks.add(data)
        done = at + len(data) == read.nbytes
        if self.collected is not None:
            copy_bytes(self.collected[at:], data)
            if done:
                put_all(run, read, self.collected)
        elif self._direct:
            if not at:
                run.written.append(read)
            self.destination = copy_contiguous(read.destinations, self.destination, read.start + at, data)
        if done:
            run.recorder.add("read", self._begin, run.recorder.now(), read.nbytes)
        return done


class _Fetch:
    """One fetch of reads, with the headers of those shards that are not open.

    Args:
        arrived: is set with the first bytes.
    """

    def __init__(self, run: ReadRun, reads: Sequence[Read], arrived: threading.Event) -> None:
        self._run, self._reads, self._arrived = run, reads, arrived
        self._headers = ArrivingHeaders(run.checkpoint, [read.file for read in reads], whole=run.whole)
        self._first = len(self._headers.ranges)
        """The number of headers, which come first."""
        self._arriving: dict[int, _ArrivingRead] = {}
        self.passed_over: list[Read] = []
        """Reads that are not of whole blocks of their shard."""

    def run(self, memory: int) -> None:
        store, reads = self._run.checkpoint.store, self._reads
        ranges = [(read.file.name, read.file.header + read.start, read.nbytes) for read in reads]
        shared = any(read.shared for read in reads)  # then all through the page cache
        with self._headers.named_errors():
            store.fetch([*self._headers.ranges, *ranges], self._take, memory=memory, first=self._first, shared=shared)

    def _take(self, number: int, at: int, data: memoryview, size: int | None) -> None:
        """Takes bytes of a range; see `Consume`."""
        if number < self._first:
            self._headers.take(number, at, data, size)
            return
        # from now on memory gets its pages from what is written to it, not in advance
        self._arrived.set()
        read = self._reads[number - self._first]
        position = read.file.header + read.start
        if size is not None and size < position + read.nbytes:
            url = f"{self._run.checkpoint.store.url}/{read.file.name}"
            raise too_short(url, position, read.nbytes, max(size - position, 0), what="object")
        if not at:
            shard = self._run.shard(read.file)
            # its edges have no checksum of their own
            if self._run.verify and rounded_out(read, shard.block) is not read:
                self.passed_over.append(read)
            else:
                self._arriving[number] = _ArrivingRead(self._run, read, shard)
        arriving = self._arriving.get(number)
        if arriving is not None and arriving.put(at, data):
            del self._arriving[number]
