"""Memory for the blocks of files: page-aligned buffers, and slabs from which a load takes its new arrays."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..._threads import start_thread

PAGE_NBYTES = 4096
HUGE = 2 << 20
"""Bytes of a huge page."""
SLAB = 64 << 20
"""Bytes of address space of one slab; only the pages that are touched take memory."""
FIRST_SLAB = 64 << 10
"""Bytes of the first slab."""
ALIGN = 64
SENDING_SECONDS = 0.015
"""Seconds in which the first requests are sent: each thread for one needs memory, and would wait for these pages."""
_POPULATE_WRITE = 23
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:  # not that of mmap: it keeps Python's global lock
    _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def aligned_buffer(nbytes: int, *, huge: bool = False) -> memoryview:
    """Allocates zeroed, page-aligned memory, as reads and writes past the page cache need it.

    Args:
        huge: requests huge pages: page faults take half of the time of a load otherwise, and physically contiguous
            memory goes to the device as one request.
    """
    # private: huge pages are mostly switched off for shared memory, which is the default of mmap
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(nbytes, PAGE_NBYTES), **private)
    if huge and nbytes >= HUGE:
        advise_huge_pages(memory)
    return memoryview(memory)[:nbytes]


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Requests huge pages for memory that is not touched yet; systems without them use small pages."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


@contextlib.contextmanager
def populating(memories: Sequence[memoryview]) -> Iterator[threading.Event]:
    """Gives zeroed memory its pages while the first bytes for it are on their way, until the event is set.

    To touch 500 MB of new memory takes as long as to receive them, and nothing else is to be done in the first round
    trip. What is written there meanwhile stays.
    """
    arrived = threading.Event()

    def run() -> None:
        arrived.wait(SENDING_SECONDS)
        for memory in memories:
            for start in range(0, len(memory), HUGE):
                if arrived.is_set() or not _populate(memory[start : start + HUGE]):
                    return

    thread = start_thread(run, "treeckpt-populate") if sum(map(len, memories)) >= HUGE else None
    try:
        yield arrived
    finally:
        arrived.set()
        if thread is not None:
            thread.join()


def _populate(memory: memoryview) -> bool:
    """Gives memory its pages, without Python's global lock; returns whether the system can (Linux 5.14 and later)."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    low = address // PAGE_NBYTES * PAGE_NBYTES
    return madvise_populate(low, address + len(memory) - low)


def madvise_populate(address: int, nbytes: int) -> bool:
    """Allocates the pages from a page's address on in one system call, as `_populate`; returns whether it worked."""
    return _madvise is not None and not _madvise(address, nbytes, _POPULATE_WRITE)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies bytes to the beginning of other memory; unlike an assignment without Python's global lock."""
    if len(source):
        np.copyto(np.frombuffer(target, np.uint8, len(source)), np.frombuffer(source, np.uint8))


class SlabAllocator:
    """Allocates arrays from slabs in huge pages.

    Touching new memory in pages of 4 KiB costs as much as reading it from the device. Arrays of a few megabytes are too
    small for huge pages of their own, so they share slabs; a slab is freed with the last array in it. Each slab is
    twice as large as the one before, from `FIRST_SLAB` up to `SLAB`: a thousand loads of a small part each would map
    64 GiB otherwise, and to clear a huge page takes longer than all else in the load of one small array.
    """

    def __init__(self) -> None:
        self._rest = memoryview(b"")
        self._next = FIRST_SLAB

    def take(self, nbytes: int, page_offset: int = 0) -> memoryview:
        """Returns zeroed memory, aligned to 64 bytes, that no other array shares.

        Args:
            page_offset: bytes between the start of a page and that of memory of half a slab or more.
        """
        if nbytes >= SLAB // 2:
            return aligned_buffer(page_offset + nbytes, huge=True)[page_offset:]
        if nbytes > len(self._rest):
            while self._next < nbytes:
                self._next *= 2
            self._rest = aligned_buffer(self._next, huge=True)
            self._next = min(2 * self._next, SLAB)
        piece, self._rest = self._rest[:nbytes], self._rest[-(-nbytes // ALIGN) * ALIGN :]
        return piece


def available_memory() -> int:
    """Returns the bytes of memory that can be used without swapping; 0 if not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
