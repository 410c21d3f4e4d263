"""Is a stretch of a file in the page cache, and how much would fit? Asked of the kernel, without reading or waiting."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["cache_room", "is_cached"]

PAGE = mmap.PAGESIZE
CACHESTAT = 451
"""The number of the system call, on every machine that has had it since it was given numbers the same everywhere."""
_answers = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x")


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    """Pages of a range: in the cache, and others that are not asked for."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")]


@lru_cache(maxsize=1)
def _libc() -> Any:
    try:
        libc = ctypes.PyDLL(None, use_errno=True)  # what takes 2 us is not worth letting go of Python's lock
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    except (OSError, AttributeError, TypeError):
        return None
    return libc


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether all pages of the stretch are in memory; False where that cannot be told."""
    if nbytes <= 0 or (libc := _libc()) is None:
        return False
    low = offset // PAGE * PAGE
    length = offset + nbytes - low
    pages = -(-length // PAGE)
    count = _count(libc, fd, low, length)
    return count >= pages if count is not None else _all_in_core(libc, fd, low, length)


def _count(libc: Any, fd: int, low: int, length: int) -> int | None:
    """Pages of a range that are in the page cache; None where the kernel does not say (Linux does, from 6.5 on)."""
    global _answers
    if not _answers:
        return None
    counts = _Counts()
    if libc.syscall(CACHESTAT, fd, ctypes.byref(_Range(low, length)), ctypes.byref(counts), 0) == 0:
        return int(counts.cached)
    if ctypes.get_errno() == errno.ENOSYS:
        _answers = False
    return None


def _all_in_core(libc: Any, fd: int, low: int, length: int) -> bool:
    """The same, asked of older kernels: by a map of the range."""
    if not hasattr(mmap, "PROT_READ") or not _is_told(fd):
        return False
    try:
        mapped = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=low)
    except (OSError, ValueError):  # past the end of the file, or a file system that does not map
        return False
    pages = np.zeros(-(-length // PAGE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    found = libc.mincore(address, length, pages.ctypes.data)
    mapped.close()
    return found == 0 and bool((pages & 1).all())


def _is_told(fd: int) -> bool:
    """Whether the kernel answers this user truly: of files that are secret to it, it calls every page cached."""
    return os.geteuid() in (0, os.fstat(fd).st_uid)


def cache_room() -> int:
    """Bytes that the system could use without swapping; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
