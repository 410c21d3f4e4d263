"""Explicit pieces: several on a rank, boxes and flat ranges mixed, and what is wrong with some; groups of ranks."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.world import LONG, errors_of, on_ranks
from treeckpt._arrays.base import FlatRangeArray, HostArray
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import BoxLayout, Mesh, MeshLayout, Replicate, Shard, held_by, layout_of_group
from treeckpt._core.sharding.region import Region
from treeckpt._io.comm.comm import thread_comms

FULL = torch.arange(60.0).reshape(5, 4, 3)


def _box(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return FULL[Region(offset, shape).slices()].clone()


def _parts(rank: int) -> tc.Sharded:
    """Two ranks: boxes and flat ranges, several each, in no order."""
    flat = FULL.reshape(-1)
    if rank == 0:
        return tc.Sharded([flat[48:].clone(), _box((0, 0, 0), (2, 4, 3))], (5, 4, 3), [48, (0, 0, 0)])
    return tc.Sharded(
        [_box((2, 0, 0), (1, 4, 3)), flat[41:48].clone(), flat[36:41].clone()], (5, 4, 3), [(2, 0, 0), 41, 36]
    )


def _blank(leaf: tc.Sharded) -> tc.Sharded:
    return tc.Sharded([torch.zeros_like(local) for local in leaf.locals], leaf.global_shape, leaf.offset)


def _equal(a: tc.Sharded, b: tc.Sharded) -> bool:
    return a.offset == b.offset and all(torch.equal(x, y) for x, y in zip(a.locals, b.locals, strict=True))


def test_a_rank_may_hold_several_pieces() -> None:
    store = tc.MemoryStore()
    assert not any(errors_of(on_ranks(2, lambda comm: tc.save(store, {"w": _parts(comm.rank)}, comm=comm))))
    assert torch.equal(tc.load(store)["w"], FULL)
    assert tc.inspect(store).nbytes == FULL.nbytes, "each element once"
    for rank in (0, 1):
        expected, into = _parts(rank), _blank(_parts(rank))
        assert _equal(tc.load(store, {"w": _blank(expected)})["w"], expected)
        tc.load_into(store, {"w": into})
        assert _equal(into, expected)
        held = tc.load(store, tc.abstract({"w": expected}))["w"]
        assert held.numel() == sum(local.numel() for local in expected.locals)


def test_a_list_of_one_piece_and_arrays_of_numpy() -> None:
    store, full = tc.MemoryStore(), FULL.numpy()
    tc.save(store, {"w": tc.Sharded([full], full.shape, [(0, 0, 0)]), "v": tc.Sharded([full[:2], full[2:]], full.shape, [(0, 0, 0), (2, 0, 0)])})  # fmt: skip  # noqa: E501
    loaded = tc.load(store)
    assert all(np.array_equal(loaded[name], full) for name in "wv")


def test_offsets_and_shapes_may_be_arrays() -> None:
    local, shape = torch.arange(6.0).view(2, 3), np.array([4, 3])
    for kind in (np.array, torch.tensor):
        boxes = tc.Sharded([local, local], shape, kind([[0, 0], [2, 0]]))
        assert boxes.offset == ((0, 0), (2, 0)) and boxes.global_shape == (4, 3)
        assert tc.Sharded(local, shape, kind([2, 0])).offset == (2, 0)
        assert tc.Sharded(local.view(-1), shape, kind(6)).offset == 6
        assert tc.Sharded([local, local.view(-1)], (4, 3), [kind([0, 0]), kind(6)]).offset == ((0, 0), 6)


def test_the_same_pieces_twice_are_one_array() -> None:
    store, pieces = tc.MemoryStore(), [FULL[:2].clone(), FULL[2:].clone()]
    offsets = [(0, 0, 0), (2, 0, 0)]
    tc.save(store, {"a": tc.Sharded(pieces, FULL.shape, offsets), "b": tc.Sharded(pieces, FULL.shape, offsets)})
    loaded = tc.load(store)
    assert loaded["a"] is loaded["b"] and tc.inspect(store).nbytes == FULL.nbytes


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "fewer offsets": (tc.Sharded([FULL, FULL], FULL.shape, [(0, 0, 0)]), tc.LayoutError, "2 pieces, 1 offsets"),
    "no piece": (tc.Sharded([], FULL.shape, []), tc.LayoutError, "of size 0 if the rank holds nothing"),
    "not flat": (tc.Sharded([FULL[:2], FULL[2:]], FULL.shape, [0, (2, 0, 0)]), tc.LayoutError, "a 1-D piece"),
    "dtypes": (
        tc.Sharded([FULL[:2], FULL[2:].int()], FULL.shape, [(0, 0, 0), (2, 0, 0)]), tc.LayoutError, "of one dtype",
    ),
    "two libraries": (
        tc.Sharded([FULL[:2], FULL[2:].numpy()], FULL.shape, [(0, 0, 0), (2, 0, 0)]), tc.TreeError, "of one library",
    ),
    "one outside": (tc.Sharded([FULL, FULL[:1]], FULL.shape, [(0, 0, 0), (5, 0, 0)]), tc.LayoutError, "inside shape"),
    "pieces in pieces": (
        tc.Sharded([tc.Sharded(FULL, FULL.shape, 0)], FULL.shape, [(0, 0, 0)]), tc.TreeError, "an array in Sharded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pieces_are_named(name: str) -> None:
    leaf, kind, text = WRONG[name]
    with pytest.raises(kind, match=text) as caught:
        tc.save(tc.MemoryStore(), {"a": [leaf]})
    assert caught.value.path == "a/0"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("most", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_any_flat_range_of_any_small_array_is_exact(most: int) -> None:
    """Every range of every array of up to 3 dimensions: 1-D memory of one rank, the rest another's."""
    for shape in itertools.chain(*(itertools.product((1, 2, 3), repeat=n) for n in (1, 2, 3))):
        if math.prod(shape) > most:
            continue
        full = np.arange(math.prod(shape)).reshape(shape)
        flat, n = full.reshape(-1), full.size
        for start, stop in itertools.combinations(range(n + 1), 2):
            store = tc.MemoryStore()
            around = tc.Sharded([flat[:start], flat[start:stop], flat[stop:]], shape, [0, start, stop])
            tc.save(store, {"w": around})
            assert np.array_equal(tc.load(store)["w"], full), (shape, start, stop)
            found = tc.load(store, {"w": tc.Sharded(np.zeros(stop - start, full.dtype), shape, start)})["w"]
            assert np.array_equal(found.local, flat[start:stop]), (shape, start, stop)


# replicas of pieces --------------------------------------------------------------------------------------------------
class _Device:
    """Memory that only whole stretches are moved to and from; each is noted."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.moved = array, 0
        self.arrived = threading.Event()
        self.slow = False

    def read(self, box: tuple[slice, ...]) -> np.ndarray:
        data = self.array[box].copy()
        self.moved += data.size
        if self.slow:
            self.slow = False
            self.arrived.wait(0.3)  # for the other thread's write, which must not come in between
        return data

    def write(self, box: tuple[slice, ...], data: np.ndarray) -> None:
        self.array[box] = data
        self.moved += data.size
        self.arrived.set()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_a_flat_range_is_read_and_written_by_boxes_on_any_memory(shape: list[int], data: st.DataObject) -> None:
    sides = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple(slice(low, high) for low, high in sides)
    size = math.prod(shape)
    memory = np.arange(3 * (size + 5), dtype=np.uint32)
    oracle = memory.copy()[3::3][:size].reshape(shape)
    new = np.full(oracle[box].shape, 7777, np.uint32)
    for host in (True, False):
        array = memory.copy()[::3]
        flat = FlatRangeArray(HostArray(array) if host else _Device(array), 1, tuple(shape))
        assert np.array_equal(flat.read(box), oracle[box])
        flat.write(box, new)
        expected = oracle.copy()
        expected[box] = new
        assert np.array_equal(array[1 : 1 + size].reshape(shape), expected)
        assert array[0] == memory[0] and np.array_equal(array[1 + size :], memory[::3][1 + size :])


def test_rows_of_a_flat_range_on_a_device_move_alone() -> None:
    device = _Device(np.zeros(1000, np.uint32))
    flat = FlatRangeArray(device, 100, (30, 30))
    flat.write((slice(3, 5), slice(0, 30)), np.ones((2, 30), np.uint32))
    assert device.moved == 60
    assert flat.read((slice(4, 6), slice(0, 30))).sum() == 30 and device.moved == 120


def test_two_threads_write_boxes_of_a_flat_range_on_a_device_beside_each_other() -> None:
    device = _Device(np.zeros(16, np.uint32))
    device.slow = True
    flat = FlatRangeArray(device, 0, (4, 4))
    ones = np.ones((4, 2), np.uint32)
    threads = [
        threading.Thread(target=flat.write, args=((slice(0, 4), columns), ones))
        for columns in (slice(0, 2), slice(2, 4))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.array.sum() == 16


@pytest.mark.parametrize("large", [False, True])
def test_equal_pieces_that_differ_in_content_are_named(large: bool) -> None:
    """Large ones by samples, unless they are trusted, as replicas are."""
    full = FULL.repeat(1, 1, 20_000) if large else FULL

    def save(comm: Any, **options: Any) -> None:
        rows = full[2:].clone() if comm.rank else full[:2].clone()
        if comm.rank == 3:
            rows[1, 2] += 1
        leaf = tc.Sharded(rows, full.shape, (2 if comm.rank else 0, 0, 0))
        tc.save(store, {"w": [leaf]}, comm=comm, overwrite=True, **options)

    store = tc.MemoryStore()
    if large:
        assert not any(errors_of(on_ranks(4, lambda comm: save(comm, verify_replicas=False))))
    for error in errors_of(on_ranks(4, save)):
        assert isinstance(error, tc.MismatchError)
        assert error.path.startswith("w/0@2,0,0+3,4,")
        assert "rank 1" in str(error) and "rank 3" in str(error)


def test_whole_arrays_that_each_rank_marks_as_its_piece_are_compared_on_every_save() -> None:
    """The mark is wrong where each rank has an array of its own: all but one would be lost."""
    comms = thread_comms(3, timeout=LONG)

    def save(comm: Any, value: Any) -> None:
        tree = {"w": tc.Sharded(torch.full((4,), float(value(comm.rank))), (4,), (0,)), "n": 1}
        tc.save(store, tree, comm=comm, overwrite=True)

    store = tc.MemoryStore()
    for value, fine in (
        (lambda _: 1, True),
        (lambda rank: rank, False),
        (lambda _: 2, True),
        (lambda r: r == 2, False),
    ):
        for error in errors_of(on_ranks(comms, lambda comm, value=value: save(comm, value))):
            assert error is None if fine else isinstance(error, tc.MismatchError) and error.path == "w@0+4", error


@pytest.mark.parametrize("options", [{}, {"verify_replicas": True}])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("shape", ["rows", "nested", "corners"])
def test_pieces_that_overlap_in_part_are_compared_where_they_do(
    shape: str, same: bool, options: dict[str, Any]
) -> None:
    """Windows with a halo, say: what several ranks hold has to agree, and is written once."""

    def leaf(rank: int) -> tc.Sharded:
        if shape == "rows":
            low, high = (0, 4) if rank == 0 else (3, 5)
            piece, offset = FULL[low:high].clone(), (low, 0, 0)
        elif shape == "nested":
            piece, offset = FULL[:, : 1 + 3 * rank].clone(), (0, 0, 0)
        else:  # all of it in two pieces that share a corner, and a third one on rank 1 for the rest
            boxes = [((0, 0, 0), FULL[:3, :3]), ((2, 2, 0), FULL[2:, 2:])]
            rest = [((0, 3, 0), FULL[:2, 3:]), ((3, 0, 0), FULL[3:, :2]), ((2, 3, 0), FULL[2:3, 3:])]
            mine = [boxes[0]] if rank == 0 else [boxes[1], *rest]
            pieces = [part.clone() for _, part in mine]
            if rank and not same:
                pieces[0][0, 0, 1] += 1
            return tc.Sharded(pieces, FULL.shape, [at for at, _ in mine])
        if rank and not same:
            piece[0, 0, 1] += 1
        return tc.Sharded(piece, FULL.shape, offset)

    store = tc.MemoryStore()
    errors = errors_of(on_ranks(2, lambda comm: tc.save(store, {"w": leaf(comm.rank)}, comm=comm, **options)))
    if same:
        assert errors == [None, None]
        assert torch.equal(tc.load(store)["w"], FULL) and tc.inspect(store).nbytes == FULL.nbytes
    else:
        for error in errors:
            assert isinstance(error, tc.MismatchError) and error.path.startswith("w@"), error
            assert "rank 0" in error.expected and "rank 1" in error.found and "tc.Sharded" in error.hint
        assert not store.files


def test_pieces_of_one_rank_that_contradict_each_other_are_refused() -> None:
    leaf = tc.Sharded([FULL[:3].clone(), FULL[2:] + 1], FULL.shape, [(0, 0, 0), (2, 0, 0)])
    with pytest.raises(tc.MismatchError, match=r"w@2,0,0\+1,4,3: .*second piece there"):
        tc.save(tc.MemoryStore(), {"w": leaf})
    fine = tc.Sharded([FULL[:3].clone(), FULL[2:].clone()], FULL.shape, [(0, 0, 0), (2, 0, 0)])
    store = tc.MemoryStore()
    tc.save(store, {"w": fine})
    assert torch.equal(tc.load(store)["w"], FULL)


# groups of ranks -----------------------------------------------------------------------------------------------------
def test_a_group_sees_a_mesh_of_its_own_ranks_as_a_mesh() -> None:
    layout = MeshLayout(Mesh((2, 2), encode_runs([4, 6, 5, 7]), ("a", "b")), (Replicate(), Shard(0)))
    seen = layout_of_group(layout, (8, 3), (7, 6, 5, 4))
    assert isinstance(seen, MeshLayout) and seen.mesh.names == ("a", "b")
    for rank, number in {7: 0, 6: 1, 5: 2, 4: 3}.items():
        assert held_by(seen, (8, 3), number) == held_by(layout, (8, 3), rank)


def test_a_group_sees_its_part_of_a_larger_mesh_as_pieces() -> None:
    layout = MeshLayout(Mesh((2, 2), encode_runs([0, 1, 2, 3])), (Replicate(), Shard(1)))
    seen = layout_of_group(layout, (4, 6), (9, 2, 3))
    assert seen == BoxLayout(((1, Region((0, 0), (4, 3))), (2, Region((0, 3), (4, 3)))))
    pieces = BoxLayout(((5, Region((0,), (1,))), (2, Region((1,), (1,)))))
    assert layout_of_group(pieces, (2,), (1, 2)) == BoxLayout(((1, Region((1,), (1,))),))
