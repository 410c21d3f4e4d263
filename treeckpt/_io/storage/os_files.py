"""System calls that not every system has, most of them on open files, with what stands in for them.

Windows has neither reads and writes at an offset nor directories that can be opened; macOS syncs a file to its device
only, whose cache loses it when the power fails, unless told otherwise. Which calls there are is looked up at each call.
Whether bytes of a file are in the page cache is told by Linux, without a read of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import platform
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fcntl as _fcntl

    fcntl: Any = _fcntl
except ImportError:  # Windows
    fcntl = None

BINARY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every open: a descriptor that child processes do not inherit, and bytes that are not translated."""

_seeking = threading.RLock()
"""Held between a seek and the read or write there: threads share the position of a descriptor."""


def usable_cpus() -> int:
    """Returns the number of processors that this process may run on; of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_at(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fills buffers in order from a file; returns the bytes read, fewer than asked for at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, parts, offset)
    found = 0
    with _seeking, io.FileIO(fd, closefd=False) as file:
        file.seek(offset)
        for part in parts:
            count = file.readinto(part) or 0
            found += count
            if count < len(part):
                break
    return found


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Writes bytes into a file; returns how many, which may be fewer than were given."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def sync_file(fd: int) -> None:
    """Makes a file durable: it is on the device, beyond the device's own cache too."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # file systems without it, such as network ones
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


SYSTEM_PAGE = mmap.PAGESIZE
CACHESTAT = 451
"""The number of the system call cachestat, the same on all architectures of `has_cachestat`."""
has_cachestat = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x")


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    """Page counts of a range; only `cached` is used."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")]


@lru_cache(maxsize=1)
def _libc() -> Any:
    try:
        libc = ctypes.PyDLL(None, use_errno=True)  # a call of 2 us is not worth releasing the GIL
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    except (OSError, AttributeError, TypeError):
        return None
    return libc


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether all pages of a byte range are in memory; False if that cannot be known."""
    if nbytes <= 0 or (libc := _libc()) is None:
        return False
    low = offset // SYSTEM_PAGE * SYSTEM_PAGE
    length = offset + nbytes - low
    pages = -(-length // SYSTEM_PAGE)
    count = _count(libc, fd, low, length)
    return count >= pages if count is not None else _all_in_core(libc, fd, low, length)


def _count(libc: Any, fd: int, low: int, length: int) -> int | None:
    """Returns how many pages of a range are in the page cache; None without cachestat (Linux before 6.5)."""
    global has_cachestat
    if not has_cachestat:
        return None
    counts = _Counts()
    if libc.syscall(CACHESTAT, fd, ctypes.byref(_Range(low, length)), ctypes.byref(counts), 0) == 0:
        return int(counts.cached)
    if ctypes.get_errno() == errno.ENOSYS:
        has_cachestat = False
    return None


def _all_in_core(libc: Any, fd: int, low: int, length: int) -> bool:
    """Whether all pages are in memory by mincore on a map of the range, for kernels without cachestat."""
    # the kernel reports every page of another user's file as cached, to keep their use secret
    if not hasattr(mmap, "PROT_READ") or os.geteuid() not in (0, os.fstat(fd).st_uid):
        return False
    try:
        mapped = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=low)
    except (OSError, ValueError):  # past the end of the file, or a file system that does not map
        return False
    pages = np.zeros(-(-length // SYSTEM_PAGE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    found = libc.mincore(address, length, pages.ctypes.data)
    mapped.close()
    return found == 0 and bool((pages & 1).all())


def available_memory() -> int:
    """Returns the bytes of memory that can be used without swapping; 0 if not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
