"""How a load reads: within a budget of memory, once per host, through the page cache where ranks share pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt._core.sharding.region import Region
from treeckpt._io.comm.comm import thread_comms
from treeckpt._io.storage.store import MemoryStore
from treeckpt._loading.plan import Read, in_turns

MIB = 1 << 20


class Watched(MemoryStore):
    """Notes how many bytes are asked for at a time, and of which the page cache is to keep a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int, bool]] = []

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self.reads.append((name, offset, len(out), shared))
        super().read_into(name, offset, out, shared=shared)

    def data_reads(self) -> list[tuple[str, int, int, bool]]:
        """Those of array bytes: headers come first, and are smaller than a block of checksums."""
        return [read for read in self.reads if read[2] >= 256 << 10]


@pytest.fixture(scope="module")
def store() -> Watched:
    store = Watched()
    rows = np.arange(6 * MIB, dtype=np.float32).reshape(-1, 1024)
    tc.save(store, {"w": rows, "v": rows[:1000, ::-1].copy()})
    return store


def columns(low: int, high: int) -> dict[str, Any]:
    region = Region((0, low), (6 * 1024, high - low))
    return {"w": tc.ArraySpec((6 * 1024, 1024), "float32", regions=(region,), kind="numpy"), "v": ...}


@pytest.mark.parametrize("budget", [MIB, 4 * MIB, 16 * MIB])
def test_buffers_stay_within_the_budget(store: Watched, budget: int) -> None:
    store.reads.clear()
    into = {"w": np.zeros((6 * 1024, 1024), np.float32), "v": np.zeros((1000, 1024), np.float32)}
    tc.load_into(store, into, read=tc.ReadOptions(memory=budget))
    assert into["w"][-1, -1] == 6 * MIB - 1 and into["v"][0, 0] == 1023
    assert max(read[2] for read in store.data_reads()) <= budget
    larger = max(read[2] for read in store.data_reads())
    store.reads.clear()
    tc.load_into(store, into, read=tc.ReadOptions(memory=64 * MIB))
    assert larger <= max(read[2] for read in store.data_reads()) <= 9 * MIB


def test_columns_of_rows_are_read_through_the_page_cache_and_rows_are_not(store: Watched) -> None:
    store.reads.clear()
    found = tc.load(store, columns(512, 1024))
    assert np.array_equal(found["w"], np.arange(6 * MIB, dtype=np.float32).reshape(-1, 1024)[:, 512:])
    assert all(shared for *_, shared in store.data_reads())
    store.reads.clear()
    region = Region((1024, 0), (2048, 1024))
    spec = tc.ArraySpec((6 * 1024, 1024), "float32", regions=(region,), kind="numpy")
    found = tc.load(store, {"w": spec, "v": ...})
    assert found["w"][0, 0] == MIB
    assert not any(shared for *_, shared in store.data_reads())
    assert sum(read[2] for read in store.data_reads()) <= 1.05 * region.size * 4 + 2 * (256 << 10)


def test_new_arrays_of_a_load_do_not_share_bytes(store: Watched) -> None:
    for copy in (False, True):
        specs = {"w": columns(0, 3)["w"], "v": tc.ArraySpec((1000, 1024), "float64", kind="numpy")}
        found = tc.load(store, specs, cast=True, read=tc.ReadOptions(copy=copy))
        kept = found["v"].copy()
        found["w"][:] = -1
        assert np.array_equal(found["v"], kept), copy
        assert found["v"].ctypes.data % 64 == 0 or copy


def test_reading_once_needs_ranks_of_torch_distributed(store: Watched) -> None:
    comm = thread_comms(2)[0]
    with pytest.raises(tc.CheckpointError, match=r"torch\.distributed with the 2 ranks"):
        tc.load(store, read=tc.ReadOptions(once=True), comm=comm)


def test_reading_once_alone_is_reading(store: Watched) -> None:
    found = tc.load(store, read=tc.ReadOptions(once=True))
    assert np.array_equal(found["w"], np.arange(6 * MIB, dtype=np.float32).reshape(-1, 1024))


def test_verifying_reads_each_byte_once(store: Watched) -> None:
    store.reads.clear()
    assert tc.verify(store).ok
    [shard] = tc.inspect(store).file_list
    assert sum(length for name, _, length, _ in store.reads if name == shard.name) == shard.header + shard.nbytes


def test_ranks_of_a_host_begin_with_parts_of_their_own_of_what_all_want(
    store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, world = 3, thread_comms(3)
    wanted: list[list[tuple[str, int, int, bool]]] = []
    for rank, comm in enumerate(world):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        for like in (None, columns(0, 512)):
            store.reads.clear()
            tc.load(store, like, comm=comm)
            assert all(shared for *_, shared in store.data_reads()), "through the page cache"
            wanted += [store.data_reads()] if like is None else []
    assert all(sorted(reads) == sorted(wanted[0]) for reads in wanted), "all of it on each rank"
    firsts = [{read[1] for read in reads[: len(reads) // ranks]} for reads in wanted]
    assert not set.intersection(*firsts), "but not in the same order"
    store.reads.clear()
    region = Region((1024, 0), (2048, 1024))
    tc.load(
        store,
        {"w": tc.ArraySpec((6 * 1024, 1024), "float32", regions=(region,), kind="numpy"), "v": ...},
        comm=world[0],
    )
    assert not any(shared for *_, shared in store.data_reads()), "what this rank alone wants stays as it is"
    store.reads.clear()
    tc.load(store, comm="alone")
    assert not any(shared for *_, shared in store.data_reads())


@given(
    sizes=st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=60),
    count=st.integers(1, 5),
)
def test_turns_change_the_order_of_reads_alone(sizes: list[tuple[int, bool]], count: int) -> None:
    file: Any = None
    tasks = [Read(file, n, n + (size << 20), shared=shared) for n, (size, shared) in enumerate(sizes)]
    orders = [in_turns(tasks, position, count) for position in range(count)]
    for order in orders:
        assert sorted(task.start for task in order) == list(range(len(tasks)))
        assert [task.shared for task in order] == sorted((task.shared for task in tasks), reverse=True)
        assert [task for task in order if not task.shared] == [task for task in tasks if not task.shared]
    assert orders[0] == [*(task for task in tasks if task.shared), *(task for task in tasks if not task.shared)]
