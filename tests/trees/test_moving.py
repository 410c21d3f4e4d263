"""Operations on trees, on one rank: what becomes of every kind of leaf, of ties, views and containers."""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Buffer, Parameter

import treeckpt as tc

BASE = torch.arange(24.0).reshape(4, 6)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class State:
    moment: Any
    step: int


LEAVES: dict[str, Any] = {
    "plain": BASE.clone(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": BASE.clone().t(),
    "strided": BASE.clone()[:, ::2],
    "expanded": torch.tensor([1.0]).expand(5),
    "row of a large one": torch.zeros(1000, 1000)[7],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex128).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "bool": torch.tensor([True, False]),
    "bf16": torch.randn(5).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e5m2),
    "int8": torch.arange(5, dtype=torch.int8),
    "parameter": Parameter(BASE.clone()),
    "frozen": Parameter(BASE.clone(), requires_grad=False),
    "buffer": Buffer(BASE.clone()),
    "active": BASE.clone().requires_grad_(),
    "numpy": np.arange(6.0).reshape(2, 3),
    "numpy scalar array": np.array(3),
    "numpy reversed": np.arange(6)[::-1],
    "piece": tc.Sharded(BASE[:, :2].clone(), (4, 2), (0, 0)),
    "flat piece": tc.Sharded(BASE.reshape(-1).clone(), (4, 6), 0),
    "pieces": tc.Sharded([BASE[:1].clone(), BASE[1:].clone()], (4, 6), [(0, 0), (1, 0)]),
}


def _whole(leaf: Any) -> torch.Tensor:
    """The array of a leaf, dense."""
    if isinstance(leaf, tc.Sharded):
        return torch.cat([_whole(local).reshape(-1) for local in leaf.locals]).reshape(leaf.global_shape)
    tensor = torch.from_numpy(np.ascontiguousarray(leaf)) if isinstance(leaf, np.ndarray) else leaf
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _same(found: Any, expected: Any) -> bool:
    a, b = _whole(found), _whole(expected)
    return a.dtype == b.dtype and a.shape == b.shape and bytes(a.view(-1).view(torch.uint8)) == bytes(
        b.view(-1).view(torch.uint8)
    )  # fmt: skip


def _addresses(leaf: Any) -> set[int]:
    if isinstance(leaf, tc.Sharded):
        return {address for local in leaf.locals for address in _addresses(local)}
    if isinstance(leaf, np.ndarray):
        return {leaf.__array_interface__["data"][0]}
    return {leaf.untyped_storage().data_ptr()} - {0}


def _kind(leaf: Any) -> tuple[Any, ...]:
    grad = getattr(leaf, "requires_grad", None)
    return type(leaf), isinstance(leaf, Buffer), grad, getattr(leaf, "is_leaf", None) if grad else None


COPIES: dict[str, Any] = {
    "offload": tc.trees.offload,
    "offload pinned": lambda tree: tc.trees.offload(tree, pin=True),
    "offload shared": lambda tree: tc.trees.offload(tree, share=True),
    "offload pinned and shared": lambda tree: tc.trees.offload(tree, pin=True, share=True),
    "gather": tc.trees.gather,
    "distribute": lambda tree: tc.trees.distribute(tree, tree),
    "distribute from a rank": lambda tree: tc.trees.distribute(tree, tree, src=0),
}


# every kind of leaf ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", LEAVES)
def test_a_copy_has_the_same_bits_and_kind_in_memory_of_its_own(name: str, copy: str) -> None:
    leaf = LEAVES[name]
    if copy == "distribute from a rank" and isinstance(leaf, tc.Sharded):
        pytest.skip("the source has whole arrays")
    before = _whole(leaf).clone()
    found = COPIES[copy]({"a": [leaf]})["a"][0]
    if copy == "gather" and isinstance(leaf, tc.Sharded):
        assert type(found) is torch.Tensor
    else:
        assert _kind(found) == _kind(leaf)
    assert _same(found, leaf)
    assert not _addresses(found) & _addresses(leaf), "no memory in common"
    for array in found.locals if isinstance(found, tc.Sharded) else [found]:
        array = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        if name in ("transposed", "channels last"):
            assert array.stride() == leaf.stride(), "the order of the dimensions in memory"
            array = array.permute(sorted(range(array.ndim), key=lambda d: -array.stride(d)))
        assert array.is_contiguous() and not array.is_conj() and not array.is_neg(), "dense, as it looks"
        if array.numel():
            array.detach().view(-1).view(torch.uint8).fill_(7)
    assert _same(leaf, before), "the original does not change with the copy"


@pytest.mark.parametrize("name", LEAVES)
def test_empty_like_makes_new_memory_of_the_same_kind(name: str) -> None:
    leaf = LEAVES[name]
    found = tc.trees.empty_like({"a": [leaf]})["a"][0]
    assert _kind(found) == _kind(leaf)
    assert tc.trees.same_structure([found], [leaf])
    assert not _addresses(found) & _addresses(leaf)


WRITABLE = [name for name in LEAVES if name != "expanded"]


@pytest.mark.parametrize("name", WRITABLE)
def test_copy_into_fills_the_very_array(name: str) -> None:
    leaf = LEAVES[name]
    into = [tc.trees.empty_like(leaf)]
    kept = into[0]
    tc.trees.copy_into([leaf], into)
    assert into[0] is kept and _same(kept, leaf)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "subclass": (torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})), tc.TreeError, "subclass"),
    "lazy": (torch.nn.LazyLinear(2).weight, tc.TreeError, "not initialised"),
    "object": (object(), tc.TreeError, "a plain Python value"),
    "array of objects": (np.array([object()]), tc.TreeError, "dtype"),
}


@pytest.mark.parametrize("operation", [*COPIES, "broadcast", "empty_like", "copy_into"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_copied_is_refused_by_name(name: str, operation: str) -> None:
    leaf, kind, text = REFUSED[name]
    if name == "subclass" and operation.startswith("offload"):
        pytest.skip("offload keeps it")
    others = {"broadcast": tc.trees.broadcast, "empty_like": tc.trees.empty_like}
    others["copy_into"] = lambda tree: tc.trees.copy_into(tree, {"a": [1 if name == "object" else torch.ones(2)]})
    act = {**COPIES, **others}[operation]
    with pytest.raises(kind, match=text) as caught:
        act({"a": [leaf]})
    assert caught.value.path == "a/0"  # pyright: ignore[reportAttributeAccessIssue]


def test_meta_tensors_have_no_data_to_copy() -> None:
    meta = {"w": Parameter(torch.empty(3, 2, device="meta"))}
    moved = tc.trees.offload(meta)["w"]
    assert moved.is_meta and isinstance(moved, Parameter) and moved is not meta["w"]
    made = tc.trees.empty_like(meta)["w"]
    assert isinstance(made, Parameter) and made.device.type == "cpu" and made.shape == (3, 2)
    full = {"w": torch.arange(6.0).reshape(3, 2)}
    placed = tc.trees.distribute(full, meta)["w"]
    assert isinstance(placed, Parameter) and torch.equal(placed.data, full["w"])
    assert tc.trees.same_structure({"w": Parameter(torch.ones(3, 2))}, meta)
    for act in (tc.trees.gather, tc.trees.broadcast, lambda t: tc.trees.copy_into(t, full),
                lambda t: tc.trees.distribute(t, full), lambda t: tc.trees.distribute(t, full, src=0)):  # fmt: skip
        with pytest.raises(tc.TreeError, match="w: expected a tensor with data, found one on the meta device"):
            act(meta)
    with pytest.raises(tc.MismatchError, match="w: expected a tensor with memory"):
        tc.trees.copy_into(full, meta)


# containers and values ------------------------------------------------------------------------------------------------
def _containers() -> dict[Any, Any]:
    return {
        "z": collections.OrderedDict(b=torch.ones(2), a=[1, (2.5, None)]),
        "a": Point(torch.zeros(3), "text"),
        3: collections.deque([torch.ones(1), b"x"], maxlen=5),
        "state": State(torch.ones(2), 7),
        "default": collections.defaultdict(list, k=[torch.ones(1)]),
        "own": tc.PerRank({"rng": torch.arange(3)}),
        "mutable": bytearray(b"abc"),
        "set": {1, 2},
        "none": [{}, [], ()],
    }


@pytest.mark.parametrize("copy", [name for name in COPIES if name != "distribute from a rank"])
def test_containers_and_values_come_back_as_they_were(copy: str) -> None:
    tree = _containers()
    found = COPIES[copy](tree)
    assert tc.trees.same_structure(found, tree), str(tc.trees.same_structure(found, tree))
    assert list(found) == list(tree)
    assert found["z"]["a"] == [1, (2.5, None)] and found["a"].y == "text" and found["state"].step == 7
    assert found["mutable"] == tree["mutable"] and found["mutable"] is not tree["mutable"]
    assert found["set"] == {1, 2} and found["set"] is not tree["set"]
    assert found["default"].default_factory is list and found[3].maxlen == 5
    found["z"]["a"].append(9)
    assert tree["z"]["a"] == [1, (2.5, None)], "the containers are new ones"


def test_a_tree_of_one_leaf_is_a_tree() -> None:
    for copy in COPIES.values():
        assert torch.equal(copy(BASE), BASE)


# ties -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("copy", COPIES)
def test_ties_are_kept_and_unequal_leaves_are_not_tied(copy: str) -> None:
    weight = Parameter(BASE.clone())
    tree = {
        "head": weight,
        "wte": weight,
        "data": weight.detach(),
        "other": Parameter(BASE.clone()),
        "one": 1,
        "uno": 1,
    }
    found = COPIES[copy](tree)
    assert found["head"] is found["wte"]
    assert found["other"].data_ptr() != found["head"].data_ptr()
    if not copy.startswith("distribute"):
        assert found["data"].data_ptr() == found["head"].data_ptr() and not found["data"].requires_grad
    assert all(torch.equal(found[name], tree[name]) for name in ("head", "data", "other"))
    assert found["one"] == found["uno"] == 1


def test_one_leaf_of_like_in_two_places_takes_two_arrays() -> None:
    shape = torch.empty(2)
    for options in ({}, {"src": 0}):
        found = tc.trees.distribute({"a": torch.ones(2), "b": torch.zeros(2)}, {"a": shape, "b": shape}, **options)
        assert found["a"].tolist() == [1, 1] and found["b"].tolist() == [0, 0]


# one block ------------------------------------------------------------------------------------------------------------
def test_shared_memory_takes_one_descriptor_for_any_number_of_leaves() -> None:
    program = (
        "import resource, torch, treeckpt as tc\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "tree = {n: torch.full((3,), float(n)) for n in range(2000)}\n"
        "found = tc.trees.offload(tree, share=True)\n"
        "assert all(t.is_shared() and t.data_ptr() % 64 == 0 for t in found.values())\n"
        "assert all(torch.equal(found[n], tree[n]) for n in tree)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=300)


def test_a_view_takes_no_more_than_its_elements() -> None:
    large = torch.zeros(1 << 20)
    found = tc.trees.offload({"w": large[5:9]}, share=True)["w"]
    assert found.untyped_storage().nbytes() == 64
    assert tc.trees.offload({"w": large[5:9]})["w"].untyped_storage().nbytes() == 16


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: tc.trees.offload(BASE, ranks=0), r"ranks: expected a list of ranks, found 0\. Pass ranks=\[0\]"),
        (lambda: tc.trees.offload(BASE, ranks="0"), r"ranks: expected a list of ranks, found '0'\. Pass ranks=\[0\]"),
        (lambda: tc.trees.offload(BASE, ranks=[1]), r"ranks: expected ranks of 0 to 0, found \[1\]"),
        (lambda: tc.trees.empty_like(BASE, device="meta", pin=True), 'device: expected "cpu", with pin= or share='),
        (lambda: tc.trees.gather(BASE, ranks=0), r"ranks: expected a list of ranks, found 0\. Pass ranks=\[0\]"),
        (lambda: tc.trees.gather(BASE, device="gpu"), "device: expected a device of torch.*'gpu'"),
        (lambda: tc.trees.flatten_names({"a": 1}, separator=""), "separator: expected text"),
        (lambda: tc.trees.unflatten_names({"a": 1}, separator=""), "separator: expected text"),
    ],
)
def test_wrong_arguments_are_named(act: Callable[[], object], words: str) -> None:
    with pytest.raises(tc.TreeckptError, match=words):
        act()


def test_numpy_trees_need_no_torch() -> None:
    program = (
        "import sys, numpy as np, treeckpt as tc\n"
        "tree = {'a': np.arange(3), 'b': [1]}\n"
        "for act in (tc.trees.offload, tc.trees.gather, tc.trees.empty_like, tc.trees.broadcast):\n"
        "    assert tc.trees.same_structure(act(tree), tree)\n"
        "tc.trees.copy_into(tree, tc.trees.distribute(tree, tree))\n"
        "assert tc.trees.unflatten_names(tc.trees.flatten_names(tree), tree)['b'] == [1]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=300)


def test_two_offloads_do_not_share_memory() -> None:
    first = tc.trees.offload({"w": BASE}, share=True)
    tc.trees.offload({"w": BASE + 1}, share=True)
    assert torch.equal(first["w"], BASE)


# copy_into ------------------------------------------------------------------------------------------------------------
def test_copy_into_takes_whole_arrays_apart_and_pieces_together() -> None:
    rows = tc.Sharded(torch.zeros(2, 6), (4, 6), (1, 0))
    tc.trees.copy_into({"w": BASE}, {"w": rows})
    assert torch.equal(rows.local, BASE[1:3])
    full = torch.zeros(4, 6)
    tc.trees.copy_into({"w": tc.Sharded([BASE[2:].clone(), BASE.reshape(-1)[:12].clone()], (4, 6), [(2, 0), 0])}, {"w": full})  # fmt: skip  # noqa: E501
    assert torch.equal(full, BASE)
    with pytest.raises(tc.LayoutError, match=r"w: expected all elements .* none at offset \(3, 0\)"):
        tc.trees.copy_into({"w": rows}, {"w": tc.Sharded(torch.zeros(2, 6), (4, 6), (2, 0))})


def test_copy_into_checks_everything_before_it_writes() -> None:
    wrong: list[tuple[Any, Any, str]] = [
        ({"a": BASE, "b": torch.ones(2)}, {"a": torch.zeros(4, 6), "b": torch.zeros(3)}, "b: expected shape"),
        (
            {"a": BASE, "b": torch.ones(2)},
            {"a": torch.zeros(4, 6), "b": torch.zeros(2).double()},
            "b: expected float64",
        ),
        ({"a": BASE}, {"a": torch.zeros(4, 6), "b": 1}, "b: expected the same leaves"),
        ({"a": BASE, "b": 1}, {"a": torch.zeros(4, 6)}, "b: expected the same leaves"),
        ({"a": BASE, "b": 1}, {"a": torch.zeros(4, 6), "b": torch.ones(1)}, "b: expected an array, found a value"),
        (
            {"a": BASE, "b": (1, BASE[0])},
            {"a": torch.zeros(4, 6), "b": (2, torch.zeros(6))},
            "b/0: expected a value that is the same",
        ),
        ({"a": BASE, "b": BASE[0]}, {"a": torch.zeros(4, 6), "b": torch.zeros(1).expand(6)}, "memory for each"),
    ]
    for tree, into, text in wrong:
        with pytest.raises(tc.MismatchError, match=text):
            tc.trees.copy_into(tree, into)
        assert not into["a"].any(), text


def test_copy_into_refuses_two_arrays_for_one() -> None:
    into = torch.zeros(2)
    one = torch.ones(2)
    for tied in (into, into.detach(), into.view(2, 1).view(2), into.numpy()):
        into.zero_()
        with pytest.raises(
            tc.MismatchError, match="b: expected the bytes of a, with which it shares memory in the targ"
        ):
            tc.trees.copy_into({"a": one, "b": torch.full((2,), 2.0)}, {"a": into, "b": tied}, cast=True)
        assert into.tolist() == [0, 0]
        tc.trees.copy_into({"a": one, "b": one.view(2)}, {"a": into, "b": tied})
        assert into.tolist() == [1, 1]
        tc.trees.copy_into({"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": into, "b": tied})
        assert into.tolist() == [0, 0], "two that are equal are as good as one"


def test_copy_into_takes_views_that_agree_where_they_meet() -> None:
    base, wide = torch.arange(12.0), torch.zeros(12)
    tree = {"all": base, "some": base[3:7].clone(), "columns": base.view(3, 4)[:, 1:3]}
    tc.trees.copy_into(tree, {"all": wide, "some": wide[3:7], "columns": wide.view(3, 4)[:, 1:3]})
    assert torch.equal(wide, base)
    wide.zero_()
    with pytest.raises(tc.MismatchError, match="columns: expected the bytes of all"):
        tc.trees.copy_into(tree, {"all": wide, "some": wide[3:7], "columns": wide.view(3, 4)[:, :2]})
    assert not wide.any()
    halves = {"left": wide.view(3, 4)[:, :2], "right": wide.view(3, 4)[:, 2:]}
    tc.trees.copy_into({"left": torch.ones(3, 2), "right": torch.full((3, 2), 2.0)}, halves)
    assert wide.tolist() == [1, 1, 2, 2] * 3


def test_copy_into_casts_when_asked_and_puts_values() -> None:
    into: dict[str, Any] = {"w": torch.zeros(3, dtype=torch.float64), "v": [1, {"x": "old"}], "s": State(0, 1)}
    inner = into["v"]
    tc.trees.copy_into({"w": torch.arange(3), "v": [2, {"x": "new"}], "s": State(0, 5)}, into, cast=True)
    assert into["w"].tolist() == [0, 1, 2] and into["v"] is inner == [2, {"x": "new"}] and into["s"].step == 5


def test_copy_into_swaps_and_shifts_within_shared_memory() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    tc.trees.copy_into({"a": b, "b": a}, {"a": a, "b": b})
    assert a.tolist() == [1] * 3 and b.tolist() == [0] * 3
    base = torch.arange(6.0)
    tc.trees.copy_into({"w": base[:5]}, {"w": base[1:]})
    assert base.tolist() == [0, 0, 1, 2, 3, 4]
    weight = torch.arange(3.0)
    tc.trees.copy_into({"a": weight, "b": weight}, {"a": weight, "b": weight})
    assert weight.tolist() == [0, 1, 2]


# distribute -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"src": 0}])
def test_distribute_asks_for_what_like_says(options: dict[str, Any]) -> None:
    full = {"w": BASE, "extra": torch.ones(1), "v": 5, "n": np.arange(3)}
    like = {
        "w": tc.Sharded(torch.empty(7), (4, 6), 3),
        "v": 0,
        "n": tc.ArraySpec((3,), "int64", kind="numpy"),
        "x": ...,
    }
    found = tc.trees.distribute(full, like, **options)
    assert torch.equal(found["w"].local, BASE.reshape(-1)[3:10]) and found["v"] == 5 and found["x"] is ...
    assert found["n"].tolist() == [0, 1, 2]
    wrong: list[tuple[Any, str]] = [
        ({"y": BASE}, "y: expected"), ({"w": torch.empty(4, 5)}, "w: expected"), ({"w": BASE.int()}, "w: expected"),
        ({"w": 5}, "w: expected a value"), ({"v": torch.ones(2)}, "v: expected"),
    ]  # fmt: skip
    for like, text in wrong:
        with pytest.raises(tc.MismatchError, match=text):
            tc.trees.distribute(full, like, **options)


def test_a_source_of_its_own_state_or_of_pieces_can_not_be_sent() -> None:
    for act in (tc.trees.broadcast, lambda tree: tc.trees.distribute(tree, {}, src=0)):
        with pytest.raises(tc.TreeError, match="PerRank"):
            act({"own": tc.PerRank(torch.ones(2))})
        with pytest.raises(tc.LayoutError, match="makes it whole"):
            act({"w": LEAVES["piece"]})
    for act in (lambda: tc.trees.broadcast(BASE, src=1), lambda: tc.trees.gather(BASE, ranks=[-1])):
        with pytest.raises(tc.RankError, match="within the group"):
            act()


def test_who_is_not_to_receive_gets_specs_that_can_be_loaded() -> None:
    tree = {"w": Parameter(BASE.clone()), "n": np.arange(3), "p": LEAVES["pieces"], "v": 5}
    found = tc.trees.gather(tree, ranks=[])
    assert found["v"] == 5
    assert found["w"] == tc.ArraySpec((4, 6), "float32", requires_grad=True, kind="parameter")
    store = tc.MemoryStore()
    tc.save(store, tree)
    loaded = tc.load(store, found)
    assert torch.equal(loaded["w"].data, BASE) and loaded["n"].tolist() == [0, 1, 2]
    assert torch.equal(loaded["p"], BASE)


# same_structure -------------------------------------------------------------------------------------------------------
def test_the_difference_of_two_trees_is_readable() -> None:
    expected = {
        "same": [torch.ones(2), 1], "shape": torch.ones(2, 3), "dtype": torch.ones(2), "kind": Parameter(torch.ones(2)),
        "pieces": tc.Sharded(torch.ones(2), (4,), (0,)), "value": 1, "array": torch.ones(1), "node": {"x": 1},
        "gone": torch.ones(1), "deep": {"er": {"a": 1, "b": (1, 2)}}, "order": {"a": 1, "b": 2},
        "queue": collections.deque([1], maxlen=3),
    }  # fmt: skip
    found = {
        "same": [torch.zeros(2), 2], "shape": torch.ones(3, 2), "dtype": torch.ones(2).int(), "kind": torch.ones(2),
        "pieces": tc.Sharded(torch.ones(2), (4,), (2,)), "value": "1", "array": 5, "node": [1],
        "new": 1, "deep": {"er": {"a": 1.0, "b": (1,)}}, "order": {"b": 2, "a": 1},
        "queue": collections.deque([1], maxlen=4),
    }  # fmt: skip
    same = tc.trees.same_structure(found, expected)
    assert not same
    assert str(same).splitlines() == [
        "shape: shape (3, 2) instead of (2, 3)",
        "dtype: dtype int32 instead of float32",
        "kind: kind tensor instead of parameter that requires grad",
        "pieces: pieces (2,) at (2,) instead of (2,) at (0,)",
        "value: str instead of int",
        "array: int instead of array",
        "node: list instead of dict",
        "gone: missing",
        "deep/er/a: float instead of int",
        "deep/er/b/1: missing",
        "order: keys in the order ['b', 'a'] instead of ['a', 'b']",
        "queue: maxlen 4 instead of 3",
        "new: unexpected",
    ]
    assert tc.trees.same_structure(expected, expected) and str(tc.trees.same_structure(1, 2)) == "the same structure"
    assert str(tc.trees.same_structure(1, [2])) == "<root>: int instead of list"


# names ----------------------------------------------------------------------------------------------------------------
def test_names_are_those_of_state_dicts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = dict(model.state_dict())
    named = tc.trees.flatten_names({"model": state, "steps": [1, {"lr": 0.5}], "own": tc.PerRank({"rng": 3})})
    assert list(named) == [*(f"model.{name}" for name in state), "steps.0", "steps.1.lr", "own.rng"]
    assert named["model.0.weight"] is state["0.weight"]
    assert named["own.rng"] == tc.PerRank(3)
    assert list(tc.trees.flatten_names({"a": {"b.c": 1}}, separator="/")) == ["a/b.c"]


def test_leaves_that_would_share_a_name_are_both_named() -> None:
    for tree, text in (
        ({"a.b": 1, "a": {"b": 2}}, r"a/b: .* 'a.b', which is that of a.b too"),
        ({"x": {0: 1, "0": 2}}, r"x/~s0: .* 'x.0', which is that of x/0 too"),
        ({"a": {"": 1}, "a.": 2}, r"a.: .* 'a.'"),
    ):
        with pytest.raises(tc.TreeError, match=text) as caught:
            tc.trees.flatten_names(tree)
        assert "separator" in caught.value.hint


def test_names_without_like_become_dicts_and_clashes_are_refused() -> None:
    leaf = {"a dict": "as a leaf"}
    assert tc.trees.unflatten_names({"a.b.c": 1, "a.d": 2, "e": leaf}) == {"a": {"b": {"c": 1}, "d": 2}, "e": leaf}
    for names in ({"a": 1, "a.b": 2}, {"a.b": 1, "a": 2}, {"a": {}, "a.b": 1}, {"a.b": 1, "a.b.c.d": 2}):
        with pytest.raises(tc.TreeError, match="as a leaf and as a container"):
            tc.trees.unflatten_names(names)


def test_names_that_like_lacks_or_has_beyond_are_listed() -> None:
    with pytest.raises(tc.MismatchError, match=r"1 missing: 'b'; 1 not asked for: 'c'"):
        tc.trees.unflatten_names({"a": 1, "c": 2}, {"a": 0, "b": 0})


keys = st.one_of(st.text(max_size=3), st.integers(-3, 12), st.booleans(), st.none())
leaves = st.one_of(st.integers(), st.text(max_size=3), st.none())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4), st.lists(inner, max_size=3), st.tuples(inner, inner),
        st.builds(Point, inner, inner), inner.map(lambda x: collections.OrderedDict(k=x)),
    ),
    max_leaves=12,
)  # fmt: skip


@given(trees.filter(lambda tree: tree is not None))  # None stands for no like
def test_names_lose_nothing_where_like_is_given(tree: Any) -> None:
    try:
        named = tc.trees.flatten_names(tree)
    except tc.TreeError as error:
        assert "a name of its own" in error.expected
        return
    back = tc.trees.unflatten_names(named, tree)
    assert back == tree and repr(back) == repr(tree)
    assert tc.trees.same_structure(back, tree)
    json.dumps(list(named))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_table_is_offloaded_with_its_arrays(kind: str, *, share: bool) -> None:
    ids, rows = torch.tensor([5, 3, 9]), torch.arange(6.0).view(3, 2)
    arrays = [ids, rows, rows.clone()] if kind == "torch" else [ids.numpy(), rows.numpy(), rows.clone().numpy()]
    slots = {"embedding": arrays[1], "exp_avg": arrays[2]}
    table = tc.KeyedTable(arrays[0], slots, scalars={"step": 7}, owned=(0, 16), buckets=32, fill={"exp_avg": 0})
    found = tc.trees.offload({"table": table, "tied": arrays[1]}, share=share)
    arrays[1][:] = -1
    copy = found["table"]
    assert type(copy.ids) is type(arrays[0]) and copy.ids.tolist() == [5, 3, 9]
    assert copy.slots["embedding"].tolist() == [[0, 1], [2, 3], [4, 5]] == found["tied"].tolist()
    assert (copy.scalars, copy.owned, copy.fill, copy.spec) == ({"step": 7}, (0, 16), {"exp_avg": 0}, table.spec)
    store = tc.MemoryStore()
    tc.save(store, tc.trees.offload({"emb": tc.KeyedTable(ids, {"w": rows.clone() + 1})}))
    back = tc.load(store)["emb"]
    order = np.argsort(np.asarray(back.ids)).tolist()
    assert np.asarray(back.slots["w"])[order].tolist() == (rows + 1)[[1, 0, 2]].tolist()


def test_a_view_before_its_array_is_gathered_as_a_view() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    for tree in ({"row": whole[0], "all": whole}, {"all": whole, "row": whole[0]}):
        found = tc.trees.gather(tree)
        assert torch.equal(found["all"], whole) and torch.equal(found["row"], whole[0])
        found["row"].zero_()
        assert torch.equal(found["all"][0], torch.zeros(3))


# as torch's utilities -------------------------------------------------------------------------------------------------
class Unknown:
    """A value of a kind that no checkpoint holds."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner


WITHOUT_CHECK: dict[str, Callable[[Any], Any]] = {
    "gather": lambda tree: tc.trees.gather(tree, type_check=False),
    "distribute": lambda tree: tc.trees.distribute(tree, {"a": 0, "b": 0, "w": BASE}, type_check=False),
}


@pytest.mark.parametrize("name", WITHOUT_CHECK)
def test_type_check_false_takes_a_deep_copy_of_values_of_unknown_kinds(name: str) -> None:
    """pytorch-state_dict_utils, lines 549-558: `copy.deepcopy`, where `type_check` refuses such a value."""
    one = Unknown([1])
    found = WITHOUT_CHECK[name]({"a": one, "b": one, "w": BASE})
    assert type(found["a"]) is Unknown and found["a"] is not one and found["a"].inner == [1]
    assert found["b"] is found["a"]


def test_copy_into_puts_deep_copies_of_unknown_values_without_type_check() -> None:
    one, into = Unknown(1), {"a": Unknown(2), "w": torch.zeros(4, 6)}
    with pytest.raises(tc.TreeError, match="type_check=False"):
        tc.trees.copy_into({"a": one, "w": BASE}, into)
    assert into["a"].inner == 2 and not into["w"].any()
    tc.trees.copy_into({"a": one, "w": BASE}, into, type_check=False)
    assert into["a"].inner == 1 and into["a"] is not one and torch.equal(into["w"], BASE)


def test_an_error_advises_only_options_that_the_function_has() -> None:
    """Of an object of an unknown class; pickles are an option of save and load alone."""
    tree = {"a": Unknown()}
    for act in (tc.trees.offload, tc.trees.gather, tc.trees.broadcast, tc.trees.empty_like,
                lambda t: tc.trees.copy_into(t, {"a": 1}), lambda t: tc.trees.distribute(t, {"a": 1}),
                lambda t: tc.trees.distribute(t, {"a": 1}, src=0)):  # fmt: skip
        with pytest.raises(tc.TreeError) as caught:
            act(tree)
        assert "allow_pickle" not in str(caught.value) and "type_check=False" in str(caught.value)
    for act in (lambda t: tc.save(tc.MemoryStore(), t), lambda t: tc.save_async(tc.MemoryStore(), t).result()):
        with pytest.raises(tc.TreeError, match=r"Or pass allow_pickle=True") as caught:
            act(tree)
        assert "type_check" not in str(caught.value)
    with pytest.raises(tc.TreeError) as caught:
        tc.save(tc.MemoryStore(), {"a": Unknown(sys.stdout)}, allow_pickle=True)
    assert "allow_pickle" not in str(caught.value)


@pytest.mark.parametrize("src", [None, 0])
def test_distribute_without_strict_keeps_leaves_that_the_tree_lacks(src: int | None) -> None:
    """pytorch-state_dict_utils, lines 1929-2014: a key that only the local state dict has stays."""
    like = {"w": torch.zeros(4, 6), "kept": torch.ones(2), "v": 3}
    found = tc.trees.distribute({"w": BASE, "more": 1}, like, src=src, strict=False)
    assert torch.equal(found["w"], BASE) and found["kept"] is like["kept"] and found["v"] == 3
    assert not like["w"].any()
    with pytest.raises(tc.MismatchError, match=r"kept: .* found 2 not in the tree: kept, v.*strict=False"):
        tc.trees.distribute({"w": BASE}, like, src=src)
    with pytest.raises(tc.MismatchError, match="one leaf at least"):
        tc.trees.distribute({"else": BASE}, like, src=src, strict=False)


def test_names_that_count_from_zero_are_those_of_a_list() -> None:
    """pytorch-state_dict_utils, lines 2148-2393: flattened names, and the nested dicts and lists again."""
    tree = {"a": [torch.ones(1), {"b": [2, 3]}], "c": {"x": 1}}
    assert tc.trees.unflatten_names(tc.trees.flatten_names(tree)) == tree
    assert tc.trees.unflatten_names({"1": "b", "0": "a"}) == ["a", "b"], "in the order of the numbers"
    assert tc.trees.unflatten_names({f"n.{i}": i for i in sorted(range(12), key=str)}) == {"n": list(range(12))}
    for named in ({"a.1": 1}, {"a.0": 1, "a.2": 2}, {"a.0": 1, "a.00": 2}, {"a.0": 1, "a.b": 2}):
        assert list(tc.trees.unflatten_names(named)["a"]) == [name[2:] for name in named], "a dict: there is a gap"
    numbered = {"state": {0: 1, 1: 2}}
    names = tc.trees.flatten_names(numbered)
    assert tc.trees.unflatten_names(names, numbered) == numbered
    assert tc.trees.unflatten_names(names) == {"state": [1, 2]}
