"""Memory for staging: aligned, leased to one save at a time, kept, and shared with another process by a descriptor."""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._arrays.table_columns import _ReorderedRows
from treeckpt._arrays.torch import DeviceArray
from treeckpt._io.storage.memory import PAGE_NBYTES
from treeckpt._saving import staging as arena_module
from treeckpt._saving.process_channel import ProcessChannel, WriterGone
from treeckpt._saving.shard_files import RowGatherer
from treeckpt._saving.staging import Arena, ArenaPool, HostCopyable, area_offsets, map_arena


@given(st.lists(st.integers(0, 1 << 40), max_size=20))
def test_areas_are_on_pages_and_apart(sizes: list[int]) -> None:
    offsets, total = area_offsets(sizes)
    ends = [*offsets[1:], total][: len(sizes)]
    assert len(offsets) == len(sizes) and all(at % PAGE_NBYTES == 0 for at in (*offsets, total))
    assert all(
        start + size <= end < start + size + PAGE_NBYTES for start, size, end in zip(offsets, sizes, ends, strict=True)
    )


def test_an_arena_is_aligned_and_the_same_memory_everywhere() -> None:
    arena = Arena(3_000_000)
    assert arena.nbytes >= 3_000_000 and arena.address % PAGE_NBYTES == 0
    other = map_arena(arena.fd, arena.nbytes)
    arena.memory[123] = 7
    other[2_999_999] = 9
    assert other[123] == 7 and arena.memory[2_999_999] == 9
    fd = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert other[123] == 7, "who maps it keeps it"


@pytest.mark.parametrize("populates", [True, False])
def test_touching_puts_memory_behind_it(monkeypatch: pytest.MonkeyPatch, populates: bool) -> None:
    if not populates:
        monkeypatch.setattr(arena_module, "madvise_populate", lambda address, nbytes: False)
    arena = Arena(20 << 20)
    arena.memory[5] = 1

    def there() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    assert there() < 1 << 20
    arena.populate(10 << 20)
    assert 10 << 20 <= there() < 12 << 20
    arena.populate(20 << 20)
    assert there() >= 20 << 20 and arena.memory[5] == 1, "what is in it stays"
    arena.close()


def test_where_there_is_no_memfd_a_file_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena(5_000_000)
    map_arena(arena.fd, arena.nbytes)[1] = 3
    assert arena.memory[1] == 3 and os.fstat(arena.fd).st_nlink == 0
    arena.close()


def test_leases_never_share_bytes() -> None:
    pool = ArenaPool()
    first, second = pool.lease(1000), pool.lease(1000)
    first.arena.memory[:] = 1
    second.arena.memory[:] = 2
    assert first.arena is not second.arena and first.arena.memory[0] == 1
    kept = first.arena
    first.release()
    first.release()
    third = pool.lease(500)
    assert third.arena is kept, "it is used again"
    first.release()
    assert pool.lease(500).arena not in (kept, second.arena), "an old lease gives nothing back"


def test_the_smallest_that_is_large_enough_is_taken() -> None:
    pool = ArenaPool()
    leases = [pool.lease(nbytes) for nbytes in (40 << 20, 10 << 20, 20 << 20)]
    for lease in leases:
        lease.release()
    assert pool.lease(15 << 20).arena is leases[2].arena


def test_what_is_too_small_makes_room_for_what_is_large_enough() -> None:
    closed: list[int] = []
    pool = ArenaPool(on_close=closed.append)
    small = pool.lease(1000)
    number = small.arena.number
    small.release()
    large = pool.lease(30 << 20)
    assert closed == [number] and pool.nbytes == large.arena.nbytes == 30 << 20
    pool.close()
    assert pool.nbytes == 30 << 20, "it is leased"
    large.release()
    pool.close()
    assert pool.nbytes == 0


def test_an_arena_that_stays_too_large_is_given_back() -> None:
    pool = ArenaPool()
    pool.lease(40 << 20).release()
    for _ in range(arena_module.UNDERUSED_LEASES - 1):
        pool.lease(1000).release()
    assert pool.nbytes == 40 << 20, "not at once"
    pool.lease(1000).release()
    assert pool.nbytes == 2 << 20


def test_pinned_memory_is_unpinned_before_it_goes() -> None:
    said: list[tuple[str, int]] = []

    def pin(address: int, nbytes: int):
        said.append(("pinned", nbytes))
        return lambda: said.append(("unpinned", address))

    arena = Arena(1000, pin)
    address = arena.address
    arena.close()
    assert said == [("pinned", 2 << 20), ("unpinned", address)]

    def refuse(address: int, nbytes: int):
        raise RuntimeError("no")

    Arena(1000, refuse).close()


def test_messages_and_descriptors_cross_a_channel(tmp_path: Path) -> None:
    import socket
    import threading

    left, right = map(ProcessChannel, socket.socketpair())
    arena = Arena(1000)
    arena.memory[:5] = np.frombuffer(b"hello", np.uint8)
    big = os.urandom(3_000_000)
    sender = threading.Thread(target=lambda: (left.send(b"", [arena.fd]), left.send(big), left.close()))
    sender.start()
    data, [fd] = right.receive()
    assert data == b"" and os.pread(fd, 5, 0) == b"hello" and fd != arena.fd
    os.close(fd)
    assert right.receive() == (big, [])
    with pytest.raises(WriterGone, match="ended"):
        right.receive()
    sender.join()
    right.close()
    arena.close()


def test_silence_at_the_other_end_has_a_limit() -> None:
    import socket

    left, right = map(ProcessChannel, socket.socketpair())
    with pytest.raises(WriterGone, match=r"silent for 0\.05 s"):
        left.receive(timeout=0.05)
    with pytest.raises(WriterGone):
        left.send(bytes(50_000_000), timeout=0.05)
    for channel in (left, right):
        channel.close()


@pytest.mark.parametrize(
    ("protocol", "kind", "method"),
    [(HostCopyable, DeviceArray, "copy_to"), (RowGatherer, _ReorderedRows, "gather")],
    ids=["tensors", "tables"],
)
def test_arrays_name_their_arguments_as_the_protocols_of_a_save_do(protocol: type, kind: type, method: str) -> None:
    assert [*signature(getattr(kind, method)).parameters] == [*signature(getattr(protocol, method)).parameters]
