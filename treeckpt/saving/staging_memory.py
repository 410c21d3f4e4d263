"""Staging memory: page-aligned, populated ahead, reused from save to save, shared with the writer process.

An arena is one anonymous file in memory, mapped whole: the writer process gets its descriptor once. A save leases an
arena for itself. The pool leases the smallest free arena that is large enough, and creates a new one in the place of a
free one that is too small, or was more than twice as large as needed for `UNDERUSED_LEASES` leases in a row.
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
from operator import attrgetter

import numpy as np

from ..io.storage.memory import PAGE, advise_huge_pages

__all__ = ["Arena", "ArenaPool", "Lease", "PinMemory", "area_offsets", "map_arena"]

UNDERUSED_LEASES = 8
ARENA_GRANULARITY = 2 << 20
POPULATE_PART = 64 << 20
"""Bytes that a thread populates at a time."""
POPULATE_THREADS = 2
_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; mmap has no name for it."""

PinMemory = Callable[[int, int], Callable[[], None]]
"""Pins memory at an address, of so many bytes, for a device; returns what unpins it."""


def area_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where in an arena the data areas of files of these sizes start, each on a page; and the bytes of all."""
    ends = list(itertools.accumulate((-(-nbytes // PAGE) * PAGE for nbytes in sizes), initial=0))
    return ends[:-1], ends[-1]


def map_arena(fd: int, nbytes: int) -> np.ndarray:
    """Maps the memory of an arena by its descriptor, as uint8[nbytes]."""
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def _anonymous_file(nbytes: int) -> int:
    """Creates a file in memory; returns its descriptor."""
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
    """One block of shared memory, pinned for a device by `pin`."""

    _numbers = itertools.count()

    def __init__(self, nbytes: int, pin: PinMemory | None = None) -> None:
        self.number = next(Arena._numbers)
        self.nbytes = max(-(-nbytes // ARENA_GRANULARITY) * ARENA_GRANULARITY, ARENA_GRANULARITY)
        self.fd = _anonymous_file(self.nbytes)
        self._map: mmap.mmap | None = mmap.mmap(self.fd, self.nbytes)
        advise_huge_pages(self._map)
        self.memory = np.frombuffer(self._map, np.uint8)
        self._populated = 0
        unpin: Callable[[], None] | None = None
        if pin is not None:
            with contextlib.suppress(RuntimeError):  # the driver refuses: copies are slower, no more
                unpin = pin(self.address, self.nbytes)
                self._populated = self.nbytes
        # also where nobody closes it: arenas go with the comm whose saves they hold
        self._finalizer = weakref.finalize(self, _release, self.fd, unpin, os.getpid())
        self._finalizer.atexit = False
        self.lease: Lease | None = None
        self.underused = 0
        """Leases in a row that took less than half of it."""

    @property
    def address(self) -> int:
        return int(self.memory.__array_interface__["data"][0])

    def populate(self, nbytes: int) -> None:
        """Has the system allocate the pages of the first bytes; those that are allocated cost nothing."""
        if nbytes <= self._populated:
            return
        parts = [
            self.memory[at : min(at + POPULATE_PART, nbytes)] for at in range(self._populated, nbytes, POPULATE_PART)
        ]
        with ThreadPoolExecutor(POPULATE_THREADS, "treeckpt-populate") as pool:
            list(pool.map(_populate, parts))
        self._populated = nbytes

    def close(self) -> None:
        """Gives the memory back."""
        if self._map is None:
            return
        self._finalizer()
        del self.memory
        with contextlib.suppress(BufferError):  # an array still shows it: it goes with the last one
            self._map.close()
        self._map = None


def _release(fd: int, unpin: Callable[[], None] | None, owner: int) -> None:
    """Releases what an arena holds besides its mapping, which goes after that."""
    if unpin is not None and os.getpid() == owner:  # a fork has no device
        unpin()
    os.close(fd)


def _populate(part: np.ndarray) -> None:
    if not _madvise_populate(int(part.__array_interface__["data"][0]), len(part)):
        part[::PAGE] = 0


def _madvise_populate(address: int, nbytes: int) -> bool:
    """Allocates pages in one system call, through ctypes, which lets other threads run; returns whether it worked."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    return madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) == 0


class Lease:
    """An arena, for one save."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        arena.lease = self

    def release(self) -> None:
        """Gives the arena back to the pool; a second time does nothing."""
        if self.arena.lease is self:
            self.arena.lease = None


class ArenaPool:
    """The arenas of a process; `on_close` is called with the number of each arena that is closed."""

    def __init__(self, *, on_close: Callable[[int], object] | None = None) -> None:
        self._arenas: list[Arena] = []
        self._on_close = on_close
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.nbytes for arena in self._arenas)

    @property
    def leased(self) -> list[bool]:
        """For each arena, whether a save uses it."""
        return [arena.lease is not None for arena in self._arenas]

    def lease(self, nbytes: int, pin: PinMemory | None = None) -> Lease:
        """Leases an arena of at least so many bytes that no other save uses."""
        with self._lock:
            free = sorted((a for a in self._arenas if a.lease is None), key=attrgetter("nbytes"))
            arena = next((a for a in free if a.nbytes >= nbytes), None)
            if arena is not None:
                small = nbytes * 2 < arena.nbytes and arena.nbytes > ARENA_GRANULARITY
                arena.underused = arena.underused + 1 if small else 0
            if arena is None or arena.underused >= UNDERUSED_LEASES:
                stale = arena or (free[-1] if free else None)
                if stale is not None:
                    self._close(stale)
                arena = Arena(nbytes, pin)
                self._arenas.append(arena)
            return Lease(arena)

    def _close(self, arena: Arena) -> None:
        self._arenas.remove(arena)
        arena.close()
        if self._on_close is not None:
            self._on_close(arena.number)

    def close(self) -> None:
        """Gives back the memory of all arenas that are free."""
        with self._lock:
            for arena in [a for a in self._arenas if a.lease is None]:
                self._close(arena)
