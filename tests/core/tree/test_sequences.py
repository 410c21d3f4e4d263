"""Lists and tuples that hold values only are one value to a load, whatever lengths they have here and in the file."""

from __future__ import annotations

import collections
import dataclasses
from collections import ChainMap, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training


class Point(NamedTuple):
    x: Any
    y: Any


def _load_into(path: Path, saved: Any, target: Any, **options: Any) -> None:
    tc.save(path / "c", saved, overwrite=True)
    tc.load_into(path / "c", target, **options)


def _copy_into(path: Path, saved: Any, target: Any, **options: Any) -> None:
    tc.trees.copy_into(saved, target)


def _manager(path: Path, saved: Any, target: Any, **options: Any) -> None:
    writer = tc.Manager(path / "run", background=False)
    writer.register("state", saved)
    writer.save(1)
    reader = tc.Manager(path / "run")
    reader.register("state", target)
    reader.restore(**options)


def _extra(kind: str) -> Callable[..., None]:
    def act(path: Path, saved: Any, target: Any, **options: Any) -> None:
        source: Any = training.state(nn.Linear(1, 1), extra=saved)
        if kind == "checkpoint":
            tc.save(path / "c", source, overwrite=True)
            source = path / "c"
        training.restore(source, nn.Linear(1, 1), extra=target, **options)

    return act


WAYS: dict[str, Callable[..., None]] = {
    "load_into": _load_into,
    "copy_into": _copy_into,
    "manager": _manager,
    "extra of a checkpoint": _extra("checkpoint"),
    "extra of a tree": _extra("tree"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("here", "saved"),
    [
        ([9, 8, 7], [1]),
        ([], [1, "a", None]),
        ([1, 2], []),
        ([[1], 2], [[1, 5], 2]),
        ([{"a": 1}], [{"b": 1}, {"c": [2]}]),
        ((1, 2), (3,)),
        ((1, 2), (3, 4)),
        (((1,), 2), ((1, 2), 2)),
        (Point(1, (2,)), Point(3, (4, 5))),
        (collections.deque([1]), collections.deque([2, 3])),
        ([[]], []),
        ([()], [(1,)]),
    ],
)
def test_the_saved_content_is_taken_whole(tmp_path: Path, way: str, here: Any, saved: Any) -> None:
    tree = {"values": here, "w": torch.zeros(2), "deep": {"also": here}}
    weight, identities = tree["w"], (tree["values"], tree["deep"])
    WAYS[way](tmp_path, {"values": saved, "w": torch.ones(2), "deep": {"also": saved}}, tree)
    assert tree["values"] == saved and tree["deep"] == {"also": saved} and type(tree["values"]) is type(saved)
    assert tree["w"] is weight and weight.tolist() == [1, 1]
    assert tree["deep"] is identities[1]
    if isinstance(here, (list, collections.deque)):
        assert tree["values"] is identities[0], "a list keeps its identity"


def test_without_strict_lists_are_not_mixed(tmp_path: Path) -> None:
    tree = {"numbers": [9, 8, 7], "none": [], "new": 1}
    tc.save(tmp_path / "c", {"numbers": [1], "none": [2], "old": 1})
    report = tc.load_into(tmp_path / "c", tree, strict=False)
    assert tree == {"numbers": [1], "none": [2], "new": 1}
    assert (report.missing, report.unexpected, report.loaded) == (("new",), ("old",), 2)


def test_keys_of_dicts_of_values_are_matched_by_name(tmp_path: Path) -> None:
    tree = {"settings": {"here": 1, "both": 2}}
    tc.save(tmp_path / "c", {"settings": {"both": 3, "there": 4}})
    with pytest.raises(tc.MismatchError, match="settings/here"):
        tc.load_into(tmp_path / "c", tree)
    tc.load_into(tmp_path / "c", tree, strict=False)
    assert tree == {"settings": {"here": 1, "both": 3}}


def test_a_new_tree_has_the_saved_list(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": [1, 2, 3], "b": (1,), "w": torch.ones(1)})
    like = {"a": [0], "b": (0, 0), "w": torch.zeros(1)}
    assert tc.load(tmp_path / "c", like) == {"a": [1, 2, 3], "b": (1,), "w": torch.ones(1)}
    assert like["a"] == [0]
    bank = tc.Bank([tmp_path / "c"])
    assert tc.load(bank, like)["a"] == [1, 2, 3]
    tc.load_into(bank, like)
    assert like["a"] == [1, 2, 3] and like["b"] == (1,)


def test_arrays_in_a_list_keep_it_from_being_one_value(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"mixed": [1, torch.ones(1)], "plain": [1, 2]})
    for tree in (
        {"mixed": [1], "plain": [0, 0]},
        {"mixed": [1, torch.zeros(1)], "plain": [0, torch.zeros(1), 3]},
    ):
        before = repr(tree)
        with pytest.raises(tc.MismatchError):
            tc.load_into(tmp_path / "c", tree)
        assert repr(tree) == before


def test_what_is_left_out_of_a_list_keeps_it_from_being_one_value(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": [1, 2, 3]})
    tree: dict[str, Any] = {"a": [..., 5]}
    with pytest.raises(tc.MismatchError, match="a/2"):
        tc.load_into(tmp_path / "c", tree)
    tc.load_into(tmp_path / "c", tree, strict=False)
    assert tree == {"a": [..., 2]}
    tree = {"a": ...}
    tc.load_into(tmp_path / "c", tree)
    assert tree == {"a": ...}
    tree = {"a": [7, 8]}
    tc.load_into(tmp_path / "c", tree, select="a/1")
    assert tree == {"a": [7, 2]}
    tc.load_into(tmp_path / "c", tree, exclude="a")
    assert tree == {"a": [7, 2]}
    tc.load_into(tmp_path / "c", tree, select="a")
    assert tree == {"a": [1, 2, 3]}


def test_a_deque_without_room_is_refused_by_name(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"recent": collections.deque([1, 2, 3])})
    tree = {"recent": collections.deque([9], maxlen=2)}
    with pytest.raises(tc.MismatchError, match="recent: expected at most 2 items"):
        tc.load_into(tmp_path / "c", tree)
    assert list(tree["recent"]) == [9]


def test_an_object_in_two_places_takes_what_each_place_has(tmp_path: Path) -> None:
    empty: tuple[Any, ...] = ()
    tc.save(tmp_path / "c", {"a": (), "b": (1,), "c": [(), ()]})
    tree = {"a": empty, "b": empty, "c": [empty, empty]}
    tc.load_into(tmp_path / "c", tree)
    assert tree == {"a": (), "b": (1,), "c": [(), ()]}


def test_each_rank_s_own_list_grows(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"loader": tc.PerRank({"seen": [1, 2, 3]})})
    tree = {"loader": tc.PerRank({"seen": [0]})}
    tc.load_into(tmp_path / "c", tree)
    assert tree["loader"].value == {"seen": [1, 2, 3]}


def test_rules_name_lists_that_grew(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"old": [1, 2, 3], "w": torch.ones(1)})
    tree = {"new": [0], "w": torch.zeros(1)}
    tc.load_into(tmp_path / "c", tree, rename={"old": "new"})
    assert tree["new"] == [1, 2, 3]


def _trained(lr: float, betas: tuple[float, float]) -> tuple[nn.Module, torch.optim.AdamW]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("how", ["objects", "states", "restore", "manager"])
def test_a_live_optimizer_with_other_betas_loads(tmp_path: Path, how: str) -> None:
    model, optimizer = _trained(0.1, (0.8, 0.9))
    other, live = _trained(0.2, (0.7, 0.6))
    if how == "restore":
        tc.save(tmp_path / "c", training.state(model, optimizer))
        training.restore(tmp_path / "c", other, live)
    elif how == "manager":
        for one, module, steps in ((optimizer, model, "save"), (live, other, "restore")):
            manager = tc.Manager(tmp_path / "run", background=False)
            manager.register("optimizer", one)
            manager.register("model", module)
            manager.save(1) if steps == "save" else manager.restore()
    elif how == "objects":
        tc.save(tmp_path / "c", {"opt": optimizer})
        tc.load_into(tmp_path / "c", {"opt": live})
    else:
        state = live.state_dict()
        tc.save(tmp_path / "c", {"opt": optimizer.state_dict()})
        tc.load_into(tmp_path / "c", {"opt": state})
        live.load_state_dict(state)
    assert live.param_groups[0]["betas"] == (0.8, 0.9) and live.param_groups[0]["lr"] == 0.1
    moments = [optimizer.state[p]["exp_avg"] for p in optimizer.param_groups[0]["params"]]
    assert all(
        torch.equal(moment, live.state[p]["exp_avg"])
        for moment, p in zip(moments, live.param_groups[0]["params"], strict=True)
    )


# mappings of other classes ---------------------------------------------------------------------------------------
class Settings(dict[str, Any]):
    pass


class Store(ChainMap[str, Any]):
    """Of which treeckpt does not know where its items are."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Settings, UserDict, Store])
def test_a_mapping_of_a_class_of_its_own_is_filled(tmp_path: Path, way: str, kind: Any) -> None:
    inner = kind({"w": torch.zeros(2), "n": 1, "seen": [1], "pair": (1, 2)})
    tree = {"outer": kind({"inner": inner, "model": nn.Linear(1, 1)}), "k": 0}
    weight, seen, model = inner["w"], inner["seen"], tree["outer"]["model"]
    saved = {"w": torch.ones(2), "n": 5, "seen": [1, 2, 3], "pair": (3, 4)}
    source = nn.Linear(1, 1)
    WAYS[way](tmp_path, {"outer": {"inner": saved, "model": source}, "k": 7}, tree)
    assert type(tree["outer"]) is kind and tree["outer"]["inner"] is inner and tree["k"] == 7
    assert inner["w"] is weight and weight.tolist() == [1, 1]
    assert inner["n"] == 5 and inner["seen"] is seen and seen == [1, 2, 3] and inner["pair"] == (3, 4)
    assert tree["outer"]["model"] is model and torch.equal(model.weight, source.weight)


def test_a_mapping_may_be_the_tree_itself(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"w": np.ones(2), "n": 1})
    tree = Settings(w=np.zeros(2), n=0)
    for strict in (True, False):
        tree["w"][:], tree["n"] = 0, 0
        tc.load_into(tmp_path / "c", tree, strict=strict)
        assert tree["w"].tolist() == [1, 1] and tree["n"] == 1
    assert tc.load(tmp_path / "c", Settings(w=np.zeros(2), n=0))["n"] == 1


def test_a_mapping_with_other_keys_is_refused_by_name(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"s": {"a": 1, "b": 2}})
    with pytest.raises(tc.MismatchError, match="s/b"):
        tc.load_into(tmp_path / "c", {"s": Settings(a=0)})


def test_a_container_that_cannot_be_filled_is_refused_by_its_class(tmp_path: Path) -> None:
    class Numbers(list[int]):
        pass

    tc.save(tmp_path / "c", {"s": {"a": 1}, "l": [1, 2]})
    for tree, options in (
        ({"s": Store({"a": 0})}, {"allow_pickle": True}),
        ({"l": Numbers([0, 0])}, {}),
    ):
        with pytest.raises(tc.MismatchError, match=r"(Store|Numbers), and leaves below it"):
            tc.load_into(tmp_path / "c", tree, strict=False, **options)


@pytest.mark.parametrize("kind", [Settings, Store])
def test_mappings_that_were_pickled_come_back_as_such(tmp_path: Path, kind: Any) -> None:
    tc.save(tmp_path / "c", {"s": kind({"a": 1})}, allow_pickle=True)
    tree = {"s": kind({"a": 0})}
    tc.load_into(tmp_path / "c", tree, allow_pickle=True)
    assert tree["s"] == {"a": 1} and type(tree["s"]) is kind


class _Counter:
    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@dataclasses.dataclass(frozen=True)
class _Fixed:
    counter: object
    rate: float


@pytest.mark.parametrize("kind", [lambda counter, rate: (counter, rate), _Fixed], ids=["tuple", "frozen dataclass"])
def test_a_value_beside_an_object_with_a_state_is_loaded_where_neither_stands_in_what_can_change(tmp_path, kind):
    tc.save(tmp_path / "c", {"x": kind(_Counter(1), 0.5)})
    counter = _Counter(7)
    tree = {"x": kind(counter, 0.9)}
    tc.load_into(tmp_path / "c", tree)
    own, rate = tree["x"] if isinstance(tree["x"], tuple) else (tree["x"].counter, tree["x"].rate)
    assert (own is counter, own.count, rate) == (True, 1, 0.5)
