"""Host memory that a tree is staged into: page-aligned, touched ahead, reused from save to save, shared by descriptor.

An arena is one anonymous file in memory, mapped whole: the writer process gets its descriptor once, whatever the number
of leaves. A save leases an arena for itself, so two saves never share bytes. The pool gives out the smallest free arena
that is large enough, and makes a new one in the place of a free one that is too small, or was too large by half for
`PATIENCE` leases in a row.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..io.storage.memory import PAGE, advise_huge_pages

__all__ = ["Arena", "ArenaPool", "Lease", "area_offsets", "map_arena"]

PATIENCE = 8
GRAIN = 2 << 20
STRIDE = 64 << 20
"""Bytes that are touched at a time."""
THREADS = 2
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which mmap has no name for."""

Pin = Callable[[int, int], Callable[[], None]]
"""Pins memory at an address, of so many bytes, for a device; returns what unpins it."""


def area_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where in an arena the data areas of files of these sizes start, each on a page; and the bytes of all."""
    ends = list(itertools.accumulate((-(-nbytes // PAGE) * PAGE for nbytes in sizes), initial=0))
    return ends[:-1], ends[-1]


def map_arena(fd: int, nbytes: int) -> np.ndarray:
    """The memory of an arena, by its descriptor."""
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def _anonymous(nbytes: int) -> int:
    """The descriptor of a file in memory."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("treeckpt-arena", os.MFD_CLOEXEC)
    else:
        fd, name = tempfile.mkstemp(prefix="treeckpt-arena-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.unlink(name)
    try:
        os.ftruncate(fd, nbytes)
        if hasattr(os, "posix_fallocate") and not hasattr(os, "memfd_create"):
            os.posix_fallocate(fd, 0, nbytes)  # a full file system is to be an error here, not a signal later
    except OSError:
        os.close(fd)
        raise
    return fd


class Arena:
    """One stretch of shared memory.

    Args:
        pin: pins it for a device.
    """

    _numbers = itertools.count()

    def __init__(self, nbytes: int, pin: Pin | None = None) -> None:
        self.number = next(Arena._numbers)
        self.nbytes = max(-(-nbytes // GRAIN) * GRAIN, GRAIN)
        self.fd = _anonymous(self.nbytes)
        self._map: mmap.mmap | None = mmap.mmap(self.fd, self.nbytes)
        advise_huge_pages(self._map)
        self.memory = np.frombuffer(self._map, np.uint8)
        self._touched = 0
        unpin: Callable[[], None] | None = None
        if pin is not None:
            with contextlib.suppress(RuntimeError):  # the driver refuses: copies take a detour, no more
                unpin = pin(self.address, self.nbytes)
                self._touched = self.nbytes
        # also where nobody closes it: arenas go with the comm whose saves they hold
        self._let_go = weakref.finalize(self, _let_go, self.fd, unpin, os.getpid())
        self._let_go.atexit = False
        self.leased = False
        self.spare = 0
        """Leases in a row that took less than half of it."""

    @property
    def address(self) -> int:
        return int(self.memory.__array_interface__["data"][0])

    def touch(self, nbytes: int) -> None:
        """Has the system put memory behind the first bytes; what was touched before costs nothing."""
        if nbytes <= self._touched:
            return
        starts = range(self._touched, nbytes, STRIDE)
        with ThreadPoolExecutor(THREADS, "treeckpt-touch") as pool:
            list(pool.map(lambda at: _touch(self.memory[at : min(at + STRIDE, nbytes)]), starts))
        self._touched = nbytes

    def close(self) -> None:
        """Gives the memory back."""
        if self._map is None:
            return
        self._let_go()
        del self.memory
        with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with the last view
            self._map.close()
        self._map = None


def _let_go(fd: int, unpin: Callable[[], None] | None, owner: int) -> None:
    """What an arena holds besides its mapping, which goes after that."""
    if unpin is not None and os.getpid() == owner:  # a fork has no device
        unpin()
    os.close(fd)


def _touch(part: np.ndarray) -> None:
    address = int(part.__array_interface__["data"][0])
    if not _populate(address, len(part)):
        part[::PAGE] = 0


def _populate(address: int, nbytes: int) -> bool:
    """Asks the kernel to do it at once; through ctypes, which lets other threads run meanwhile."""
    try:
        advise: Any = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    return advise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE) == 0


class Lease:
    """An arena, for one save."""

    def __init__(self, pool: ArenaPool, arena: Arena) -> None:
        self._pool, self.arena = pool, arena

    def release(self) -> None:
        """Gives the arena back to the pool; a second time does nothing."""
        self._pool.take_back(self)


class ArenaPool:
    """The arenas of a process.

    Args:
        closed: told the number of each arena that is closed.
    """

    def __init__(self, *, closed: Callable[[int], None] = lambda number: None) -> None:
        self._arenas: list[Arena] = []
        self._leases: list[Lease] = []
        self._closed = closed
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of all arenas."""
        return sum(arena.nbytes for arena in self._arenas)

    def lease(self, nbytes: int, pin: Pin | None = None) -> Lease:
        """An arena of at least so many bytes that no other save uses."""
        with self._lock:
            free = sorted((a for a in self._arenas if not a.leased), key=lambda a: a.nbytes)
            arena = next((a for a in free if a.nbytes >= nbytes), None)
            if arena is not None:
                small = nbytes * 2 < arena.nbytes and arena.nbytes > GRAIN
                arena.spare = arena.spare + 1 if small else 0
            if arena is None or arena.spare >= PATIENCE:
                stale = arena or (free[-1] if free else None)
                if stale is not None:
                    self._close(stale)
                arena = Arena(nbytes, pin)
                self._arenas.append(arena)
            arena.leased = True
            lease = Lease(self, arena)
            self._leases.append(lease)
            return lease

    def take_back(self, lease: Lease) -> None:
        """Ends a lease."""
        with self._lock:
            if lease in self._leases:
                self._leases.remove(lease)
                lease.arena.leased = False

    def _close(self, arena: Arena) -> None:
        self._arenas.remove(arena)
        arena.close()
        self._closed(arena.number)

    def close(self) -> None:
        """Gives back the memory of all arenas that are free."""
        with self._lock:
            for arena in [a for a in self._arenas if not a.leased]:
                self._close(arena)
