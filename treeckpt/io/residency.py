"""Is a stretch of a file in the page cache, and how much would fit? Asked of the kernel, without reading or waiting."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["cache_room", "is_cached"]

PAGE = mmap.PAGESIZE


@lru_cache(maxsize=1)
def _mincore() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return function


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether all pages of the stretch are in memory; False where that cannot be told."""
    mincore = _mincore()
    if mincore is None or nbytes <= 0 or not hasattr(mmap, "PROT_READ"):
        return False
    low = offset // PAGE * PAGE
    length = offset + nbytes - low
    try:
        mapped = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=low)
    except (OSError, ValueError):  # past the end of the file, or a file system that does not map
        return False
    pages = np.zeros(-(-length // PAGE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    found = mincore(address, length, pages.ctypes.data)
    mapped.close()
    return found == 0 and bool((pages & 1).all())


def cache_room() -> int:
    """Bytes that the system could use without swapping; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
