"""Memory for blocks of files: page-aligned, as reading and writing past the page cache needs it."""

from __future__ import annotations

import contextlib
import mmap

__all__ = ["HUGE", "PAGE", "aligned_buffer", "ask_for_huge_pages"]

PAGE = 4096
HUGE = 2 << 20


def aligned_buffer(nbytes: int, *, huge: bool = False) -> memoryview:
    """Zeroed, page-aligned memory of its own; in huge pages if asked.

    Page faults are half of a load otherwise, and what lies together in memory goes to the device as one request.
    """
    # private: huge pages are mostly switched off for shared memory, which is what mmap makes by itself
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(nbytes, PAGE), **private)
    if huge and nbytes >= HUGE:
        ask_for_huge_pages(memory)
    return memoryview(memory)[:nbytes]


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Asks for them before memory is touched; systems without them, or that refuse, give small ones."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
