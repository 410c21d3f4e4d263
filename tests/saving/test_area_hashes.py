"""The checksums of a data area are the same wherever its pieces lie: on a device they are computed without a read."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.helpers.devices import DEVICES
from treeckpt._arrays import device_checksums
from treeckpt._arrays.base import Box, FlatRangeArray, SourcePiece
from treeckpt._arrays.torch import DeviceArray, tensor_data
from treeckpt._core.format.shard_header import BLOCK, hash_block
from treeckpt._core.planning.save_plan import FilePlan, PlannedEntry
from treeckpt._core.sharding.region import Region
from treeckpt._saving.shard_files import BUFFER, has_checksums
from treeckpt._threads import ThreadPool


class Leaf(msgspec.Struct, frozen=True):
    """A leaf, of which one piece of several is written."""

    pieces: Sequence[SourcePiece]
    written: Region
    itemsize: int


class Leaves(msgspec.Struct, frozen=True):
    """A source of one file, which the entries of leaves fill in turn."""

    leaves: Sequence[Leaf]
    private = False

    @property
    def files(self) -> Sequence[FilePlan]:
        start, writes = 0, list[PlannedEntry]()
        for number, leaf in enumerate(self.leaves):
            nbytes = leaf.written.size * leaf.itemsize
            writes.append(PlannedEntry(number, leaf.written, start, nbytes))
            start += nbytes
        return [FilePlan(0, 0, start, tuple(writes))]

    def pieces(self, leaf: int) -> Sequence[SourcePiece]:
        return self.leaves[leaf].pieces


def leaves_on(device: str) -> list[Leaf]:
    """Leaves whose pieces are not read at once: the local parts of shards, a flat range, a scalar, and one of none."""
    local = torch.randn(500, 300, device=device)
    left, right = Region((0, 0), (500, 120)), Region((0, 500), (500, 180))  # of an array of (500, 700)
    cut = [SourcePiece(left, DeviceArray(local[:, :120])), SourcePiece(right, DeviceArray(local[:, 120:]))]
    flat = torch.arange(200_000, dtype=torch.int16, device=device)
    ranged = [SourcePiece(Region.whole((150, 1000)), FlatRangeArray(DeviceArray(flat), 4_321, (150, 1000)))]
    scalar, empty = torch.tensor(2.5, dtype=torch.float64, device=device), torch.empty(0, 3, device=device)
    return [
        Leaf(cut, right, 4),
        Leaf(cut, Region((100, 20), (300, 100)), 4),
        Leaf(ranged, Region((3, 10), (140, 900)), 2),
        Leaf([SourcePiece(Region((), ()), DeviceArray(scalar))], Region((), ()), 8),
        Leaf([SourcePiece(Region.whole((0, 3)), DeviceArray(empty))], Region.whole((0, 3)), 4),
        Leaf((), Region.whole((0,)), 4),
    ]


def checksums(source: Leaves) -> list[int]:
    """Returns the checksums of what a source's file has, from a copy of its bytes."""
    data = b""
    for leaf in source.leaves:
        held = [piece for piece in leaf.pieces if leaf.written.within(piece.region)]
        data += held[0].data.read(leaf.written.relative_to(held[0].region).slices()).tobytes() if held else b""
    assert len(data) == source.files[0].nbytes
    return [hash_block(data[low : low + BLOCK]) for low in range(0, len(data), BLOCK)]


def has(source: Leaves, expected: list[int]) -> bool:
    with ThreadPool(2, "test") as pool:
        return has_checksums(source.files[0], source, expected, pool)


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_on_a_device_are_compared_without_a_read(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    source, read = Leaves(leaves_on(device)), list[Any]()
    found = checksums(source)
    monkeypatch.setattr(device_checksums, "KINDS", frozenset({device}))
    monkeypatch.setattr(DeviceArray, "read", lambda self, box: read.append(box))
    assert len(found) == 3 and has(source, found)
    for number in range(3):
        assert not has(source, [*found[:number], found[number] ^ 1, *found[number + 1 :]])
    assert not has(source, found[:2]) and not read


@pytest.mark.parametrize("kinds", [frozenset[str](), frozenset({"cpu"})])
def test_where_one_piece_is_elsewhere_the_host_hashes_all(
    monkeypatch: pytest.MonkeyPatch, kinds: frozenset[str]
) -> None:
    here, whole = torch.randn(1000), Region.whole((1000,))
    source = Leaves([*leaves_on("cpu"), Leaf([SourcePiece(whole, tensor_data(here))], whole, 4)])
    found = checksums(source)
    monkeypatch.setattr(device_checksums, "KINDS", kinds)
    assert has(source, found) and not has(source, found[:2])
    here[-1] += 1
    assert not has(source, found)


class Here(Executor):
    """Makes calls in the thread that submits them."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


def test_behind_a_block_that_differs_nothing_is_read() -> None:
    read, shape = list[int](), (BUFFER // 8,)

    class Counted:
        def read(self, box: Box) -> np.ndarray:
            data = np.zeros(shape, "<u8")[box]
            read.append(data.nbytes)
            return data

    whole = Region.whole(shape)
    source = Leaves([Leaf([SourcePiece(whole, Counted())], whole, 8) for _ in range(5)])
    found = [hash_block(bytes(BLOCK))] * (5 * BUFFER // BLOCK)
    assert has_checksums(source.files[0], source, found, Here()) and sum(read) == 5 * BUFFER
    read.clear()
    found[BUFFER // BLOCK + 3] ^= 1
    assert not has_checksums(source.files[0], source, found, Here())
    assert sum(read) == 3 * BUFFER, "what fills a buffer is hashed when the next one is begun"
