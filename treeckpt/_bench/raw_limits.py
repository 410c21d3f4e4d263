"""Measures the limits of this machine that every trial is compared with, in bytes per second.

W: durable O_DIRECT write (8 MiB blocks, file preallocated, fsync), R: O_DIRECT read into touched memory, R_fresh: the
same into new memory in huge pages, each the better of one and two threads; C: copy into touched shared
memory; plain, plain_fresh: one thread's buffered read of a file in the page cache, into touched and into new memory.
W_huge, R_huge: W and R with two blocks in huge pages that are used again and again: the device gets fewer requests.
Where the file system refuses O_DIRECT, buffered calls with fsync, and reads after dropping the pages, take its place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .._io.storage.memory import aligned_buffer
from .meter import opened, pretouch_memory
from .results import Limit

BLOCK = 8 << 20
THREADS = (1, 2)
LARGEST = 1 << 30
"""Bytes of the file, at most."""
MIN_RATED_NBYTES = BLOCK
"""Bytes below which a rate says nothing."""


class RawLimits:
    """Measures with one file and one buffer.

    Args:
        path: of the file; `remove` deletes it.
        nbytes: of the payload that is compared.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = min(max(nbytes, MIN_RATED_NBYTES), LARGEST) // BLOCK * BLOCK
        self._path = path
        self._memory = aligned_buffer(self.nbytes)
        self._array = np.frombuffer(self._memory, np.uint8)
        block = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
        for index, start in enumerate(range(0, self.nbytes, BLOCK)):  # no two blocks alike, for devices that compare
            self._array[start : start + BLOCK] = block + np.uint8(index)
            self._array[start : start + 8] = np.frombuffer(index.to_bytes(8, "little"), np.uint8)
        self._shared: np.ndarray | None = None
        self._ring = aligned_buffer(2 * BLOCK, huge=True)
        self._ring[:] = bytes(self._memory[:BLOCK]) * 2
        self._direct: int = getattr(os, "O_DIRECT", 0)
        try:
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._direct) as fd:
                os.pwrite(fd, self._memory[:BLOCK], 0)
        except OSError:
            self._direct = 0
        self.remove()

    def remove(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)

    def measure(self, limit: Limit) -> float:
        """Returns a rate. The writes leave the file that the reads read."""
        if limit == "C":
            return max(map(self._copy, THREADS))
        if limit in ("plain", "plain_fresh"):
            self._read(1, self._memory, cached=True)
            return self._read(1, self._memory if limit == "plain" else None, cached=True)
        memory = None if limit == "R_fresh" else self._ring if limit.endswith("huge") else self._memory
        if memory is not None and limit.startswith("W"):
            return max(self._write(threads, memory) for threads in THREADS)
        return max(self._read(threads, memory) for threads in THREADS)

    def _write(self, threads: int, memory: memoryview) -> float:
        self.remove()
        start = time.perf_counter()
        with opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct) as fd:
            with contextlib.suppress(OSError):
                os.posix_fallocate(fd, 0, self.nbytes)
            self._each_block(threads, lambda at: _transfer(os.pwrite, fd, memory, at))
            os.fsync(fd)
        return self.nbytes / (time.perf_counter() - start)

    def _read(self, threads: int, memory: memoryview | None, *, cached: bool = False) -> float:
        """Reads the file into memory; None allocates new memory, which counts.

        Args:
            cached: reads through the page cache.
        """
        with opened(self._path, os.O_RDONLY if cached else os.O_RDONLY | self._direct) as fd:
            if not cached:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if memory is None:
                pretouch_memory(self.nbytes)
            start = time.perf_counter()
            into = aligned_buffer(self.nbytes, huge=not cached) if memory is None else memory
            self._each_block(threads, lambda at: _transfer(_pread, fd, into, at))
            return self.nbytes / (time.perf_counter() - start)

    def _copy(self, threads: int) -> float:
        if self._shared is None:
            self._shared = np.frombuffer(mmap.mmap(-1, self.nbytes), np.uint8)  # anonymous and shared by default
            self._shared[:] = 1
        shared = self._shared
        start = time.perf_counter()
        self._each_block(threads, lambda at: np.copyto(shared[at : at + BLOCK], self._array[at : at + BLOCK]))
        return self.nbytes / (time.perf_counter() - start)

    def _each_block(self, threads: int, work: Callable[[int], None]) -> None:
        """Calls `work` with the offset of each block."""
        starts = range(0, self.nbytes, BLOCK)
        if threads == 1:
            for start in starts:
                work(start)
            return
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, starts):
                pass


def _pread(fd: int, data: memoryview, at: int) -> int:
    return os.preadv(fd, [data], at)


def _transfer(call: Callable[[int, memoryview, int], int], fd: int, memory: memoryview, at: int) -> None:
    """Reads or writes the block at an offset, in as many calls as it takes; memory that is shorter is used again."""
    low = at % len(memory)
    data, done = memory[low : low + BLOCK], 0
    while done < BLOCK:
        count = call(fd, data[done:], at + done)
        if not count:
            raise OSError(f"the file for raw limits ends at {at + done}")
        done += count
