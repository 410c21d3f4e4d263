"""Measures the limits of this machine that every trial is compared with, in bytes per second.

W: durable O_DIRECT write (8 MiB blocks, file preallocated, fsync), R: O_DIRECT read into touched memory, R_fresh: the
same into new memory for which huge pages are asked, each the better of one and two threads; C: copy into touched shared
memory; plain, plain_fresh: one thread's buffered read of a file in the page cache, into touched and into new memory.
W_huge, R_huge: W and R with two blocks in huge pages that are used again and again: the device gets fewer requests.
Where the file system refuses O_DIRECT, buffered calls with fsync, and reads after dropping the pages, take its place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..io.storage.memory import advise_huge_pages, aligned_buffer
from .meter import pretouch_memory

__all__ = ["RawLimits"]

BLOCK = 8 << 20
THREADS = (1, 2)
MOST = 1 << 30
LEAST = BLOCK
"""Bytes below which a rate says nothing."""


class RawLimits:
    """Measures with one file and one buffer.

    Args:
        path: of the file; `remove` deletes it.
        nbytes: of the payload that is compared; the file has at most 1 GiB.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = min(max(nbytes, LEAST), MOST) // BLOCK * BLOCK
        self._path = path
        self._mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(self._mapping)
        self._array = np.frombuffer(self._memory, np.uint8)
        block = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
        for index, start in enumerate(range(0, self.nbytes, BLOCK)):  # no two blocks alike, for devices that compare
            self._array[start : start + BLOCK] = block + np.uint8(index)
            self._array[start : start + 8] = np.frombuffer(index.to_bytes(8, "little"), np.uint8)
        self._shared: np.ndarray | None = None
        self._ring = aligned_buffer(2 * BLOCK, huge=True)
        self._ring[:] = bytes(self._memory[:BLOCK]) * 2
        self._direct = self._takes_direct()

    def _takes_direct(self) -> int:
        flag: int = getattr(os, "O_DIRECT", 0)
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o644)
            try:
                os.pwrite(fd, self._memory[:BLOCK], 0)
            finally:
                os.close(fd)
        except OSError:
            flag = 0
        self.remove()
        return flag

    def remove(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)

    def write(self) -> float:
        """W; leaves the file there for the reads."""
        return max(self._write(threads, self._block) for threads in THREADS)

    def write_huge(self) -> float:
        """W_huge; leaves the file there for the reads."""
        return max(self._write(threads, self._block_of_ring) for threads in THREADS)

    def _block(self, at: int) -> memoryview:
        return self._memory[at : at + BLOCK]

    def _block_of_ring(self, at: int) -> memoryview:
        low = at // BLOCK % 2 * BLOCK
        return self._ring[low : low + BLOCK]

    def _write(self, threads: int, block: Callable[[int], memoryview]) -> float:
        self.remove()
        start = time.perf_counter()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct, 0o644)
        try:
            with contextlib.suppress(OSError):
                os.posix_fallocate(fd, 0, self.nbytes)
            self._each(threads, lambda at: _whole(os.pwrite, fd, block(at), at))
            os.fsync(fd)
        finally:
            os.close(fd)
        return self.nbytes / (time.perf_counter() - start)

    def read(self) -> float:
        """R."""
        return max(self._read(threads, self._block) for threads in THREADS)

    def read_huge(self) -> float:
        """R_huge."""
        return max(self._read(threads, self._block_of_ring) for threads in THREADS)

    def read_fresh(self) -> float:
        """R_fresh."""
        return max(map(self._read_fresh, THREADS))

    def _read_fresh(self, threads: int) -> float:
        pretouch_memory(self.nbytes)
        start = time.perf_counter()
        with _fresh(self.nbytes, huge=True) as memory:
            made = time.perf_counter() - start
            return self._read(threads, lambda at: memory[at : at + BLOCK], made)

    def _read(self, threads: int, block: Callable[[int], memoryview], spent: float = 0.0) -> float:
        with self._opened(self._direct) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            self._each(threads, lambda at: _whole(_pread, fd, block(at), at))
            return self.nbytes / (time.perf_counter() - start + spent)

    def copy(self) -> float:
        """C."""
        if self._shared is None:
            self._shared = np.frombuffer(mmap.mmap(-1, self.nbytes), np.uint8)  # anonymous and shared by default
            self._shared[:] = 1
        shared = self._shared

        def run(threads: int) -> float:
            start = time.perf_counter()
            self._each(threads, lambda at: np.copyto(shared[at : at + BLOCK], self._array[at : at + BLOCK]))
            return self.nbytes / (time.perf_counter() - start)

        return max(map(run, THREADS))

    def plain(self) -> float:
        """A buffered read of a cached file into touched memory, by one thread."""
        with self._opened(0) as fd:
            self._plain(fd, self._memory)
            return self._plain(fd, self._memory)

    def plain_fresh(self) -> float:
        """A buffered read of a cached file into new memory, by one thread."""
        with self._opened(0) as fd:
            self._plain(fd, self._memory)
            pretouch_memory(self.nbytes)
            start = time.perf_counter()
            with _fresh(self.nbytes, huge=False) as memory:
                return self._plain(fd, memory, time.perf_counter() - start)

    def _plain(self, fd: int, memory: memoryview, spent: float = 0.0) -> float:
        start = time.perf_counter()
        self._each(1, lambda at: _whole(_pread, fd, memory[at : at + BLOCK], at))
        return self.nbytes / (time.perf_counter() - start + spent)

    @contextlib.contextmanager
    def _opened(self, flag: int) -> Iterator[int]:
        fd = os.open(self._path, os.O_RDONLY | flag)
        try:
            yield fd
        finally:
            os.close(fd)

    def _each(self, threads: int, work: Callable[[int], None]) -> None:
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


def _whole(call: Callable[[int, memoryview, int], int], fd: int, data: memoryview, at: int) -> None:
    """Reads or writes all of `data`, in as many calls as it takes."""
    done = 0
    while done < len(data):
        count = call(fd, data[done:], at + done)
        if not count:
            raise OSError(f"the file for raw limits ends at {at + done}")
        done += count


@contextlib.contextmanager
def _fresh(nbytes: int, *, huge: bool) -> Iterator[memoryview]:
    """New memory; in private pages, as memory allocators have it."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        advise_huge_pages(mapping)
    memory = memoryview(mapping)
    try:
        yield memory
    finally:
        memory.release()
        mapping.close()
