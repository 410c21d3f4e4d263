"""Leaves of a target that share memory: filled where what is meant for them agrees, else refused before any byte is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

import treeckpt as tc
from tests.helpers.world import LONG, on_ranks
from treeckpt._arrays import overlaps
from treeckpt._arrays.base import HostArray, StridedMemory
from treeckpt._loading import aliasing

A = torch.arange(6.0).view(2, 3)


def saved(tree: Any) -> tc.MemoryStore:
    store = tc.MemoryStore()
    tc.save(store, tree)
    return store


def refused(store: Any, tree: dict[str, Any], words: str = "b: expected the bytes of a", **options: Any) -> None:
    """Refused, and nothing has changed."""
    before = list(map(_array, tree.values()))
    with pytest.raises(tc.MismatchError, match=words):
        tc.load_into(store, tree, **options)
    assert all(np.array_equal(old, new) for old, new in zip(before, map(_array, tree.values()), strict=True))


def _array(leaf: Any) -> np.ndarray:
    """A copy of an array of either library."""
    return (leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf).copy()


# two names of one tensor ----------------------------------------------------------------------------------------------
def ways_of_sharing() -> dict[str, tuple[Any, Any]]:
    weight = torch.zeros(2, 3)
    parameter = Parameter(torch.zeros(2, 3))
    return {
        "one tensor": (weight, weight),
        "a state dict's": (parameter, parameter.detach()),
        "numpy's and torch's": (weight, weight.numpy()),
        "transposed": (weight.t(), weight.t()),
        "two names of flat pieces": (tc.Sharded(weight.view(-1), (2, 3), 0), weight),
    }


@pytest.mark.parametrize("way", ways_of_sharing())
def test_two_arrays_that_differ_are_refused_for_one_place(way: str) -> None:
    first, second = ways_of_sharing()[way]
    shape = (3, 2) if way == "transposed" else (2, 3)
    one, other = A.reshape(shape), A.reshape(shape) + torch.eye(*shape)
    kinds = (one, other.numpy() if isinstance(second, np.ndarray) else other)
    store = saved(dict(zip("ab", kinds, strict=True)))
    plain = {"a": getattr(first, "local", first), "b": second}
    with pytest.raises(tc.MismatchError, match="b: expected the bytes of a, with which it shares memory in the target"):
        tc.load_into(store, {"a": first, "b": second})
    assert not any(_array(leaf).any() for leaf in plain.values()), "nothing is written"
    report = tc.load_into(store, {"a": ..., "b": second})
    assert report.loaded == 1 and np.array_equal(_array(second), other.numpy()), "the hint's way"
    equal = (one, one.numpy().copy() if isinstance(second, np.ndarray) else one.clone())
    tc.load_into(saved(dict(zip("ab", equal, strict=True))), {"a": first, "b": second})
    assert np.array_equal(_array(second), one.numpy()), "saved as two, but equal"
    tc.load_into(saved({"a": one * 2, "b": one * 2}), {"a": first, "b": second})
    assert np.array_equal(_array(second), one.numpy() * 2)


def test_what_the_index_knows_to_be_one_array_is_not_read_to_compare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("read to compare")

    monkeypatch.setattr(aliasing, "read_pieces", never)
    weight = Parameter(A.clone())
    flat = torch.arange(12.0)
    tree = {
        "wte": weight, "head": weight, "data": weight.detach(), "flat": flat, "row": flat[3:6],
        "columns": flat.view(3, 4)[:, 1:3], "turned": flat.view(3, 4).t(), "step": dict.fromkeys(range(5), flat[2]),
        "next": [flat[6:9], flat[9:12]],
    }  # fmt: skip
    store = saved(tree)
    with torch.no_grad():
        weight.zero_()
    flat.zero_()
    tc.load_into(store, tree)
    assert torch.equal(weight, A) and torch.equal(flat, torch.arange(12.0))


def test_many_leaves_of_one_buffer_that_lie_apart_are_no_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "overlaps_of", lambda *_: pytest.fail("some were taken to meet"))
    flat = torch.zeros(6000)
    store = saved({f"{n}": torch.full((3,), float(n)) for n in range(2000)})
    tc.load_into(store, {f"{n}": flat[3 * n : 3 * n + 3] for n in range(2000)})
    assert torch.equal(flat, torch.arange(2000.0).repeat_interleave(3))


def test_columns_of_one_matrix_are_filled_side_by_side() -> None:
    wide = torch.zeros(2, 6)
    tc.load_into(saved({"a": A, "b": A + 6}), {"a": wide[:, ::2], "b": wide[:, 1::2]})
    assert torch.equal(wide[:, ::2], A) and torch.equal(wide[:, 1::2], A + 6)
    refused(saved({"a": A, "b": A + 6}), {"a": wide[:, :3], "b": wide[:, 2:5]})


# any windows ----------------------------------------------------------------------------------------------------------
@st.composite
def windows(draw: st.DrawFn, size: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and strides, in elements, of an array inside a buffer that does not overlap itself."""
    shape = draw(st.sampled_from([(), (1,), (2,), (3,), (5,), (2, 2), (2, 3), (1, 4), (3, 2)]))
    strides: list[int] = []
    step = draw(st.integers(1, 2))
    for n in reversed(shape):
        strides.insert(0, step)
        step = step * n + draw(st.integers(0, 2))
    order = draw(st.permutations(range(len(shape))))
    shape, strides = tuple(shape[d] for d in order), [strides[d] for d in order]
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return draw(st.integers(0, size - 1 - reach)), shape, tuple(strides)


@given(st.data())
def test_a_load_is_refused_if_and_only_if_the_order_of_writing_would_matter(data: st.DataObject) -> None:
    size = 24
    drawn = data.draw(st.lists(windows(size), min_size=2, max_size=4))
    base = torch.arange(float(size))
    given_ = {f"{n}": torch.as_strided(base, w[1], w[2], w[0]).contiguous().clone() for n, w in enumerate(drawn)}
    for _ in range(data.draw(st.integers(0, 2))):  # change an element, so that they may disagree
        leaf = given_[f"{data.draw(st.integers(0, len(drawn) - 1))}"].view(-1)
        leaf[data.draw(st.integers(0, len(leaf) - 1))] += data.draw(st.sampled_from([0.0, 100.0]))
    store = saved(given_)

    def written(order: Any) -> torch.Tensor:
        memory = torch.zeros(size)
        for number in order:
            offset, shape, strides = drawn[number]
            torch.as_strided(memory, shape, strides, offset).copy_(given_[f"{number}"])
        return memory

    ends = [written(order) for order in itertools.permutations(range(len(drawn)))]
    memory_limit = data.draw(st.sampled_from([1, 24, 64 << 20]))
    agree = all(torch.equal(ends[0], end) for end in ends)
    memory = torch.zeros(size)
    tree = {f"{n}": torch.as_strided(memory, shape, strides, at) for n, (at, shape, strides) in enumerate(drawn)}
    numpy = data.draw(st.booleans())
    target = {name: leaf.numpy() if numpy else leaf for name, leaf in tree.items()}
    if agree:
        tc.load_into(store, target, read=tc.ReadOptions(memory=memory_limit))
        assert torch.equal(memory, ends[0])
    else:
        with pytest.raises(tc.MismatchError, match="shares memory"):
            tc.load_into(store, target, read=tc.ReadOptions(memory=memory_limit))
        assert not memory.any()


def test_memory_seen_as_two_dtypes_has_to_agree_by_its_bytes() -> None:
    base = torch.randn(16)
    views = {"a": base, "b": base.view(torch.int32)[2:9], "c": base.view(torch.uint8)[3:9]}
    store = saved({name: leaf.clone() for name, leaf in views.items()})
    kept = base.clone()
    base.zero_()
    tc.load_into(store, views)
    assert torch.equal(base, kept)
    base.zero_()
    refused(store, {**views, "c": base.view(torch.uint8)[4:10]}, "c: expected the bytes of a")


def test_the_window_of_a_reversed_array_reaches_below_its_first_element() -> None:
    base = np.zeros(10, "<f4")
    assert isinstance(HostArray(base[8:2:-2].view("<u4")).window, StridedMemory)
    at = base.ctypes.data
    assert HostArray(base[8:2:-2].view("<u4")).window.extent == (at + 16, at + 36)
    store = saved({"a": np.arange(3, dtype="f4"), "b": np.arange(3, dtype="f4")})
    refused(store, {"a": base[:3], "b": base[2::-1]})
    tc.load_into(saved({"a": np.arange(3, dtype="f4"), "b": np.arange(2, -1, -1, dtype="f4")}), {"a": base[:3], "b": base[2::-1]})  # fmt: skip  # noqa: E501
    assert base[:3].tolist() == [0, 1, 2]


# ways to load ---------------------------------------------------------------------------------------------------------
def test_ties_are_judged_by_what_they_become(tmp_path: Path) -> None:
    weight = torch.zeros(2, 3)
    tree = {"a": weight, "b": weight.detach()}
    casting = saved({"a": A, "b": A.double()})
    tc.load_into(casting, tree, cast=True)
    assert torch.equal(weight, A)
    weight.zero_()
    refused(saved({"a": A, "b": A.double() + 1}), tree, cast=True)
    r = tc.rules
    store = saved({"x": torch.cat([A, A]), "c": A})
    halves = [r.Split("x", ("a", "b"), axis=0), r.Drop("c")]
    tc.load_into(store, tree, transforms=halves)
    assert torch.equal(weight, A)
    weight.zero_()
    refused(saved({"x": torch.cat([A, A + 1]), "c": A}), tree, transforms=halves)
    refused([tc.From(saved({"a": A})), tc.From(saved({"b": A + 1}))], tree)
    tc.load_into([tc.From(saved({"a": A})), tc.From(saved({"b": A.clone()}))], tree)
    assert torch.equal(weight, A)


def test_a_selected_one_of_two_ties_is_filled_alone() -> None:
    weight = torch.zeros(2, 3)
    tc.load_into(saved({"a": A, "b": A + 1}), {"a": weight, "b": weight}, select="b")
    assert torch.equal(weight, A + 1)


def test_damage_is_told_before_ties_are_judged(tmp_path: Path) -> None:
    weight = torch.zeros(2, 3)
    tc.save(tmp_path / "x", {"a": A, "b": A + 1})
    [shard] = (tmp_path / "x").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tc.CorruptError):
        tc.load_into(tmp_path / "x", {"a": weight, "b": weight.detach()})
    assert not weight.any()


def test_each_rank_judges_its_own_pieces(tmp_path: Path) -> None:
    other = A.clone()
    other[1, 2] = 9
    tc.save(tmp_path / "x", {"a": A, "b": other})
    rows = [torch.zeros(1, 3) for _ in range(2)]

    def load(comm: Any) -> None:
        pieces = [tc.Sharded(row, (2, 3), (comm.rank, 0)) for row in (rows[comm.rank], rows[comm.rank].detach())]
        tc.load_into(tmp_path / "x", dict(zip("ab", pieces, strict=True)), comm=comm)

    found = on_ranks(2, load, timeout=LONG)
    assert found[0].error is None and torch.equal(rows[0], A[:1]), "of rank 0's rows nothing differs"
    assert isinstance(found[1].error, tc.MismatchError) and not rows[1].any()


def test_a_new_tree_has_both_arrays_where_like_has_one() -> None:
    for like in ({"a": A, "b": A}, {"a": A, "b": A.detach()}, dict.fromkeys("ab", tc.ArraySpec((2, 3), "float32"))):
        found = tc.load(saved({"a": A, "b": A + 1}), like)
        assert torch.equal(found["a"], A) and torch.equal(found["b"], A + 1), "nothing is lost, so nothing is refused"


# pieces of one array --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("offsets", [[0, 6], [(0, 0), (2, 0)], [0, (2, 0)]])
def test_pieces_of_one_array_in_the_same_memory_are_refused(offsets: list[Any]) -> None:
    store, memory = saved({"w": torch.arange(12.0).view(4, 3)}), torch.zeros(6)
    leaf = tc.Sharded([memory if isinstance(at, int) else memory.view(2, 3) for at in offsets], (4, 3), offsets)
    with pytest.raises(tc.MismatchError, match="w: expected memory of its own for each piece"):
        tc.load_into(store, {"w": leaf})
    with pytest.raises(tc.MismatchError, match="w: expected memory of its own for each piece"):
        tc.trees.copy_into({"w": tc.Sharded(torch.arange(12.0), (4, 3), 0)}, {"w": leaf})
    assert not memory.any(), "nothing is written"


@given(st.integers(0, 12), st.integers(0, 12), st.integers(-2, 2))
def test_pieces_of_one_array_may_share_what_they_have_in_common(low: int, high: int, shift: int) -> None:
    """Flat ranges with a common part, in one buffer; shifted, the elements of the one are not those of the other."""
    low, high = sorted((low, high))
    store, memory = saved({"w": torch.arange(12.0).view(4, 3) + 1}), torch.zeros(16)
    at = low + 2 + shift
    leaf = tc.Sharded([memory[2 : 2 + high], memory[at : at + 12 - low]], (4, 3), [0, low])
    meet = {n: n - 2 for n in range(2, 2 + high)}, {n: n - at + low for n in range(at, at + 12 - low)}
    if any(meet[0][n] != meet[1][n] for n in meet[0].keys() & meet[1].keys()):
        with pytest.raises(tc.MismatchError, match="memory of its own"):
            tc.load_into(store, {"w": leaf})
        assert not memory.any()
    else:
        tc.load_into(store, {"w": leaf})
        filled = meet[0] | meet[1]
        assert memory.tolist() == [filled.get(n, -1) + 1.0 for n in range(16)]


def test_columns_of_one_matrix_are_pieces_of_one_array() -> None:
    wide = torch.zeros(4, 6)
    leaf = tc.Sharded([wide[:, ::2], wide[:, 1::2]], (4, 6), [(0, 0), (0, 3)])
    tc.load_into(saved({"w": torch.arange(24.0).view(4, 6)}), {"w": leaf})
    assert torch.equal(torch.cat([wide[:, ::2], wide[:, 1::2]], 1), torch.arange(24.0).view(4, 6))
