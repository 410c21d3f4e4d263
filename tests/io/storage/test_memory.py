"""Memory for what a load allocates: aligned, shared by nobody, and not much more than what is asked for."""

from __future__ import annotations

import mmap
from itertools import pairwise

import numpy as np
import pytest

from treeckpt._io.storage import memory
from treeckpt._io.storage.memory import HUGE, SLAB, SlabAllocator


def address(piece: memoryview) -> int:
    return np.frombuffer(piece, np.uint8).ctypes.data


def test_arrays_are_aligned_zeroed_and_apart():
    allocator = SlabAllocator()
    pieces = [allocator.take(nbytes) for nbytes in (1, 63, 64, 65, 4096, HUGE, HUGE + 1, SLAB // 2, 7)]
    spans = sorted((address(piece), address(piece) + len(piece)) for piece in pieces)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert not any(any(piece[:64]) for piece in pieces)


def test_large_memory_begins_where_in_a_page_it_is_told_to():
    allocator = SlabAllocator()
    for offset in (0, 64, 4032):
        large, small = allocator.take(SLAB // 2 + 1, page_offset=offset), allocator.take(100, page_offset=offset)
        assert (len(large), len(small)) == (SLAB // 2 + 1, 100)
        assert address(large) % 4096 == offset and address(small) % 64 == 0


@pytest.mark.parametrize("nbytes", [1, 100_000, 3 << 20, 20 << 20])
def test_no_more_than_four_times_what_is_taken_is_mapped(monkeypatch: pytest.MonkeyPatch, nbytes: int):
    """The rest is at most one slab, and huge pages are 2 MiB."""
    mapped: list[int] = []
    original = mmap.mmap

    def counting(fd: int, size: int, **options: int) -> mmap.mmap:
        mapped.append(size)
        return original(fd, size, **options)

    monkeypatch.setattr(memory.mmap, "mmap", counting)
    allocator, taken = SlabAllocator(), 0
    for _ in range(40):
        allocator.take(nbytes)
        taken += nbytes
        assert sum(mapped) <= max(HUGE, 4 * taken)
