"""Staging: copies the bytes of a rank's shards into memory that is shared with the writer process, as in the files.

An arena is one anonymous file in memory, page-aligned, mapped whole and populated ahead: the writer process gets its
descriptor once. A save leases an arena for itself. The pool leases the smallest free arena that is large enough, and
creates a new one in the place of a free one that is too small, or was more than twice as large as needed for
`UNDERUSED_LEASES` leases in a row.

Small leaves are copied one after the other by the caller, large contiguous ones by a few threads, for one thread does
not reach the memory's bandwidth. What lies on a device, or is lazily transformed, is copied by its own library where it
can (`copy_to`).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Protocol, runtime_checkable

import numpy as np

from .._arrays.base import Box, HostArray, HostMemory, SourcePiece
from .._core.planning.save_plan import FilePlan, PlannedEntry
from .._core.sharding.region import Region
from .._io.storage.memory import PAGE_NBYTES, advise_huge_pages, madvise_populate
from .._threads import ThreadPool, WorkerThreads
from .shard_files import MEMMOVE_LIMIT, ShardSource, append_entry, has_methods_of, piece_of

PARALLEL_COPY = 1 << 20
"""The bytes of an array from which threads share the copying."""
COPY_PART = 16 << 20
"""The bytes that a thread copies at a time."""
COPY_THREADS = 2
UNDERUSED_LEASES = 8
ARENA_GRANULARITY = 2 << 20
POPULATE_PART = 64 << 20
"""The bytes that a thread populates at a time."""
POPULATE_THREADS = 2

PinMemory = Callable[[int, int], Callable[[], None]]
"""Pins memory at an address, of so many bytes, for a device; returns what unpins it."""


def area_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where in an arena the data areas of files of these sizes start, each on a page; and the bytes of all."""
    ends = list(itertools.accumulate((-(-nbytes // PAGE_NBYTES) * PAGE_NBYTES for nbytes in sizes), initial=0))
    return ends[:-1], ends[-1]


def map_arena(fd: int, nbytes: int) -> np.ndarray:
    """Maps the memory of an arena by its descriptor, as uint8[nbytes]."""
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def _anonymous_file(nbytes: int) -> int:
    """Creates a file in memory; returns its descriptor."""
    if hasattr(os, "memfd_create"):
        # the writer process gets it by a socket: no other child of the program is to inherit it
        fd = os.memfd_create("treeckpt-arena", os.MFD_CLOEXEC)
    else:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryFile(prefix="treeckpt-arena-", dir=shared) as file:  # the name goes with it
            fd = os.dup(file.fileno())
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
                # the driver has allocated the pages that it pins
                self._populated = self.nbytes
        # also where nobody closes it: arenas go with the comm whose saves they hold
        self._finalizer = weakref.finalize(self, _release, self.fd, unpin, os.getpid())
        self._finalizer.atexit = False
        self.lease: Lease | None = None
        self.underused = 0
        """The number of leases in a row that took less than half of it."""

    @property
    def address(self) -> int:
        return int(self.memory.__array_interface__["data"][0])

    def populate(self, nbytes: int) -> None:
        """Has the system allocate the pages of the first bytes; those that are allocated cost nothing."""
        if nbytes <= self._populated:
            return
        parts = [
            self.memory[low : min(low + POPULATE_PART, nbytes)] for low in range(self._populated, nbytes, POPULATE_PART)
        ]
        with ThreadPool(POPULATE_THREADS, "treeckpt-populate") as pool:
            list(pool.map(_populate, parts))
        self._populated = nbytes

    def close(self) -> None:
        """Gives the memory back."""
        if self._map is None:
            return
        self._finalizer()
        # a map that is exported as an array cannot be closed
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
    # where the kernel has no call for it, a write to each page makes the system allocate it
    if not madvise_populate(int(part.__array_interface__["data"][0]), len(part)):
        part[::PAGE_NBYTES] = 0


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
                # no arena is smaller than the granularity
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


def order_device_copies() -> None:
    """Has copies from devices wait for the work that the calling thread has started on the devices so far."""
    # a program that has not imported torch has no tensors on a device
    if "torch" in sys.modules:
        from .._arrays.cuda_copies import wait_for_current_streams

        wait_for_current_streams()


def after_device_order() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which what this thread reads of devices comes after what `order_device_copies` waits for."""
    if "torch" not in sys.modules:
        return contextlib.nullcontext()
    from .._arrays.cuda_copies import use_copy_streams

    return use_copy_streams()


def cuda_pinning() -> PinMemory | None:
    """Returns the function that pins memory for a device, in a process that uses one."""
    if "torch" not in sys.modules:
        return None
    from .._arrays.cuda_copies import pin_function

    return pin_function()


@runtime_checkable
class HostCopyable(Protocol):
    """An array that its library copies to host memory."""

    def copy_to(self, box: Box, out: np.ndarray) -> Callable[[], None] | None:
        """Starts to copy a box to `out`, uint8[n]; returns what waits for the end, None if it has ended."""
        ...


ByteCopy = tuple[np.ndarray, np.ndarray]
"""A copy as (target, source), both uint8[n]."""


class _MemorySink:
    """Memory that is filled from the front. `delayed` gets large copies; None where the source is soon gone."""

    def __init__(self, memory: np.ndarray, delayed: list[ByteCopy] | None) -> None:
        self._memory, self._delayed, self._filled = memory, delayed, 0

    def append_memory(self, memory: HostMemory, nbytes: int) -> None:
        self.append(memory.array)

    def remaining(self) -> np.ndarray:
        return self._memory[self._filled :]

    def advance(self, nbytes: int) -> None:
        self._filled += nbytes

    def append(self, data: np.ndarray, *, stays: bool = True) -> None:
        start, self._filled = self._filled, self._filled + data.nbytes
        target = self._memory[start : self._filled]
        if data.flags.c_contiguous:
            source = data.reshape(-1).view(np.uint8)
            if self._delayed is None or len(source) < PARALLEL_COPY:
                target[:] = source
            else:
                self._delayed.append((target, source))
        elif data.nbytes:
            np.copyto(target.view(data.dtype).reshape(data.shape), data)


def stage(source: ShardSource, memory: np.ndarray) -> None:
    """Copies what a rank writes to `memory`, uint8[n], as many bytes as `area_offsets` gives for the files."""
    delayed: list[ByteCopy] = []
    device_copies: list[Callable[[], None]] = []
    offsets, _ = area_offsets([file.nbytes for file in source.files])
    address = memory.ctypes.data
    for file, start in zip(source.files, offsets, strict=True):
        for write in file.writes:  # entries follow each other without holes
            pieces, region = source.pieces(write.leaf), write.region
            data = pieces[0].data if pieces else None
            if (
                # creating a numpy array for each small leaf takes longer than its copy
                write.nbytes <= MEMMOVE_LIMIT
                and type(data) is HostMemory
                and len(pieces) == 1
                and region == pieces[0].region
            ):
                ctypes.memmove(address + start, data.address, write.nbytes)
            elif write.nbytes:
                _stage_entry(write, pieces, memory[start : start + write.nbytes], delayed, device_copies)
            start += write.nbytes
    parts = [
        partial(np.copyto, target[low : low + COPY_PART], data[low : low + COPY_PART])
        for target, data in delayed
        for low in range(0, len(data), COPY_PART)
    ]
    # before the wait for the devices, which copy meanwhile
    WorkerThreads(COPY_THREADS)(parts)
    for wait in device_copies:
        wait()


def _stage_entry(
    write: PlannedEntry,
    pieces: Sequence[SourcePiece],
    target: np.ndarray,
    delayed: list[ByteCopy],
    device_copies: list[Callable[[], None]],
) -> None:
    piece = piece_of(write, pieces)
    if isinstance(piece.data, (HostArray, HostMemory)):
        append_entry(_MemorySink(target, delayed), write, pieces)
    elif not has_methods_of(piece.data, HostCopyable):  # what is read for the copy is gone after that
        append_entry(_MemorySink(target, None), write, pieces)
    elif (wait := piece.data.copy_to(write.region.relative_to(piece.region).slices(), target)) is not None:
        device_copies.append(wait)


class StagedShardSource:
    """Shards out of staging memory, filled by `stage`, where each data area is one entry."""

    private = True

    def __init__(self, files: Sequence[FilePlan], memory: np.ndarray) -> None:
        sizes = [file.nbytes for file in files]
        self.files: list[FilePlan] = []
        self._pieces: list[SourcePiece] = []
        for file, start in zip(files, area_offsets(sizes)[0], strict=True):
            whole = Region((0,), (file.nbytes,))
            write = PlannedEntry(len(self._pieces), whole, 0, file.nbytes)
            self.files.append(FilePlan(file.part, file.stream, file.nbytes, (write,)))
            self._pieces.append(SourcePiece(whole, HostArray(memory[start : start + file.nbytes])))

    def pieces(self, leaf: int) -> Sequence[SourcePiece]:
        return self._pieces[leaf : leaf + 1]
