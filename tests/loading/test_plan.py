"""Runs of bytes go straight to the memory they belong to: whole arrays, and rows of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers import strategies
from treeckpt._arrays.base import HostArray, HostMemory, TargetPiece
from treeckpt._core.format.records import File
from treeckpt._core.format.shard_header import BLOCK, hash_block, hash_parts
from treeckpt._core.planning.load_plan import Chunk, split_at_multiples
from treeckpt._core.sharding.region import Region
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._loading.plan import ContiguousMemory, Read, copy_contiguous, parts_of, plan_reads, read_for


class _OneFile:
    """An index of one file, whose data area is the stream of its rank."""

    def locate(self, rank: int, start: int, stop: int, path: str) -> tuple[File, int]:
        return FILE, start


FILE = File("shard", 0, 0, 0, 1 << 20, 0)


@st.composite
def members(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[int, int]], list[np.ndarray], int, list[Read]]:
    """A data area from a place on, places in it, the memory of each, and the reads of these."""
    start = draw(st.integers(0, 1000))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    gaps = draw(st.lists(st.integers(-3, 5), min_size=len(lengths), max_size=len(lengths)))
    at, places = start, []
    for length, gap in zip(lengths, gaps, strict=True):
        places.append((at, length))
        at = max(at + length + gap, at)
    total = max(first + length for first, length in places) - start
    stream = np.random.default_rng(0).integers(1, 256, total).astype(np.uint8)
    outs = [np.zeros(length, np.uint8) for _, length in places]
    found = [
        Read(FILE, first, first + length, (ContiguousMemory(first, first + length, out.ctypes.data, out),))
        for (first, length), out in zip(places, outs, strict=True)
    ]
    return stream, [(first - start, length) for first, length in places], outs, start, found


@given(members(), st.integers(1, 20), st.integers(1, 12), st.data())
def test_each_destination_gets_its_bytes_whatever_the_reads(made, size: int, step: int, data: st.DataObject) -> None:
    stream, places, outs, start, wanted = made
    area = np.concatenate([np.zeros(start, np.uint8), stream, np.zeros(100, np.uint8)])
    reads = plan_reads(data.draw(st.permutations(wanted)), {"shard": step}, limit=8, size=size, gap=3)
    for read in reads:
        assert read.start % step == 0 == read.stop % step
        cut = sorted({read.start, read.stop, *data.draw(st.lists(st.integers(read.start, read.stop), max_size=4))})
        first = 0
        for low, high in itertools.pairwise(cut):  # as they arrive
            first = copy_contiguous(read.destinations, first, low, memoryview(area[low:high]))
    for (first, length), out in zip(places, outs, strict=True):
        assert out.tolist() == stream[first : first + length].tolist()


@given(members())
def test_the_parts_of_a_range_are_its_members_memory_and_cover_it(made) -> None:
    stream, places, outs, start, wanted = made
    [read] = plan_reads(wanted, {}, limit=8, size=1 << 20, gap=10)
    assert (read.start, read.stop) == (start, start + len(stream))
    parts = parts_of(read)
    if parts is None:
        inside = sorted((first, first + length) for first, length in places)
        assert any(a[1] > b[0] for a, b in itertools.pairwise(inside)), "only members that overlap are refused"
        return
    at = 0
    for part in parts:
        part[:] = stream[at : at + len(part)].tobytes()
        at += len(part)
    assert at == len(stream)
    for (first, length), out in zip(places, outs, strict=True):
        assert out.tolist() == stream[first : first + length].tolist()


@given(st.data())
def test_rows_that_are_one_run_in_both_are_scattered_as_boxes_are_copied(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 4)] * data.draw(st.integers(0, 3))))
    chunk, region = (data.draw(strategies.regions(shape)) for _ in range(2))
    low = tuple(max(a, b) for a, b in zip(chunk.offset, region.offset, strict=True))
    high = tuple(min(a, b) for a, b in zip(chunk.stop, region.stop, strict=True))
    box = Region(low, tuple(max(0, b - a) for a, b in zip(low, high, strict=True)))
    if not box.size:
        return
    full = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    source, target = np.ascontiguousarray(full[chunk.slices()]), np.full(region.shape, -1, np.int16)
    memory = HostMemory(target.ctypes.data, target.shape, 2, target)
    index: Any = _OneFile()
    read = read_for(index, "x", Chunk(chunk, 0, 100), TargetPiece(region, memory), box, 2)
    expected = np.where(np.isin(full, full[box.slices()]), full, -1)[region.slices()]
    if isinstance(read.destinations[0], ContiguousMemory):
        stream = np.concatenate([np.zeros(100, np.uint8), np.frombuffer(source.tobytes(), np.uint8)])
        copy_contiguous(read.destinations, 0, read.start, memoryview(stream[read.start : read.stop]))
        assert (target == expected).all()
    elif box == chunk == region:
        raise AssertionError("a whole array is one run")


@pytest.mark.parametrize(
    ("shape", "wanted", "requests"),
    [
        ((100_000, 100), Region((0, 50), (100_000, 1)), range(1, 7)),  # a column: few large reads, not one for each row
        ((10, 1 << 20), Region((0, 0), (10, 16)), range(10, 11)),  # rows that lie far apart, one by one
        ((4, 4), Region((2, 0), (0, 4)), range(1)),
    ],
)
def test_a_box_is_read_in_as_many_requests_as_its_gaps_are_worth(
    shape: tuple[int, ...], wanted: Region, requests: range
) -> None:
    piece = TargetPiece(wanted, HostArray(np.empty(wanted.shape, "u4")))
    chunk = Chunk(Region.whole(shape), 0, 0)
    index: Any = _OneFile()
    reads = [read_for(index, "w", chunk, piece, wanted, 4)] if wanted.size else []
    planned = plan_reads(reads, {}, limit=8 << 20, size=8 << 20)
    assert len(planned) in requests and all(read.nbytes <= 8 << 20 for read in planned)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 10), st.integers(1, 9))
def test_cuts_lie_on_the_grid_and_cover(start: int, length: int, origin: int, step: int) -> None:
    start += origin
    found = list(split_at_multiples(start, start + length, origin, step))
    assert [at for pair in found for at in range(*pair)] == list(range(start, start + length))
    assert all((low - origin) % step == 0 for low, _ in found[1:])
    assert len(found) <= length // step + 2


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_the_checksum_of_parts_is_that_of_the_whole(parts: list[bytes]) -> None:
    assert hash_parts([memoryview(part) for part in parts]) == hash_block(b"".join(parts))


class _Noted(LocalStore):
    """Notes what is read straight to where it belongs, and what through a buffer."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.straight: list[int] = []
        self.buffered: list[int] = []

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self.buffered.append(len(out))
        super().read_into(name, offset, out, shared=shared)

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        done = super().read_parts(name, offset, parts, shared=shared)
        if done:
            self.straight.append(sum(map(len, parts)))
        return done


def _state(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.rand(700_000 + i * 331, generator=draw) for i in range(4)} | {
        "b": torch.rand(9, generator=draw)
    }


def _saved(path: Path) -> tuple[dict[str, torch.Tensor], Path]:
    saved = _state(1)
    tc.save(path, saved)
    [shard] = path.glob("*.safetensors")
    shard.read_bytes()  # into the page cache
    return saved, shard


def test_what_is_in_the_page_cache_is_read_straight_into_arrays(tmp_path: Path) -> None:
    saved, _ = _saved(tmp_path / "x")
    tree, store = _state(2), _Noted(tmp_path / "x")
    report = tc.load_into(store, tree, read=tc.ReadOptions(verify="stream"))
    assert all(torch.equal(tree[name], saved[name]) for name in saved)
    total = sum(tensor.nbytes for tensor in saved.values())
    assert total <= sum(store.straight) == report.read_nbytes
    assert all(length < BLOCK for length in store.buffered), "only headers go another way"


@pytest.mark.parametrize("verify", [True, "first", "stream"])
def test_changed_bytes_are_found_and_named_when_arrays_are_read_without_a_buffer(tmp_path: Path, verify: Any) -> None:
    saved, shard = _saved(tmp_path / "x")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    tree, before = _state(2), _state(2)
    with pytest.raises(tc.CorruptError, match=r"w\d.*expected bytes that match their checksum, found changed bytes in"):
        tc.load_into(_Noted(tmp_path / "x"), tree, read=tc.ReadOptions(verify=verify))
    if verify == "first":
        assert all(torch.equal(tree[name], before[name]) for name in saved), "nothing is written before all is compared"


def test_neighbours_read_no_block_of_checksums_twice(tmp_path: Path) -> None:
    saved = {f"{i}": torch.rand(3_000_001) for i in range(3)}
    tc.save(tmp_path / "x", saved)
    tree = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    report = tc.load_into(tmp_path / "x", tree, read=tc.ReadOptions(verify="stream"))
    assert report.read_nbytes == sum(tensor.nbytes for tensor in saved.values())
    assert all(torch.equal(tree[name], saved[name]) for name in saved)


def test_rows_of_a_chunk_are_read_as_one_run(tmp_path: Path) -> None:
    full = torch.rand(2400, 512)
    tc.save(tmp_path / "x", {"w": full})
    for rank in range(3):
        store = _Noted(tmp_path / "x")
        (tmp_path / "x").joinpath(tc.inspect(tmp_path / "x").file_list[0].name).read_bytes()
        tree = {"w": tc.Sharded(torch.zeros(800, 512), (2400, 512), (rank * 800, 0))}
        report = tc.load_into(store, tree, read=tc.ReadOptions(verify="stream"))
        assert torch.equal(tree["w"].local, full[rank * 800 : rank * 800 + 800])
        assert sum(store.straight) == report.read_nbytes <= 800 * 512 * 4 + 2 * BLOCK
