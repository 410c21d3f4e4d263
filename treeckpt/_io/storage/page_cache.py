"""Tells whether a byte range of a file is in the page cache, and how much memory is available; reads no file data."""

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
