"""Objects with `state_dict` and `load_state_dict`, anywhere in a tree."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import nn

import treeckpt as tc


class Counter:
    def __init__(self, n: int = 0, *, array: bool = False) -> None:
        self.n, self.array, self.loads = n, torch.full((3,), float(n)) if array else None, 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "seen": list(range(self.n))} | ({} if self.array is None else {"array": self.array})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n, self.loads = state["n"], self.loads + 1
        assert state["seen"] == list(range(self.n))


@dataclasses.dataclass
class Box:
    inside: Any


def _tree(n: int) -> dict[str, Any]:
    return {
        "list": [Counter(n), 1],
        "tuple": (Counter(n), torch.full((2,), float(n))),
        "box": Box(Counter(n)),
        "own": tc.PerRank({"loader": Counter(n)}),
        "model": nn.Linear(2, 2),
        "step": n,
    }


def test_they_are_saved_as_their_states_and_take_them_back(tmp_path: Path) -> None:
    tree = _tree(4)
    tc.save(tmp_path / "c", tree)
    into = _tree(1)
    objects = [into["list"][0], into["tuple"][0], into["box"].inside, into["own"].value["loader"]]
    weight = into["model"].weight
    tc.load_into(tmp_path / "c", into)
    assert [(one.n, one.loads) for one in objects] == [(4, 1)] * 4
    assert into["list"][0] is objects[0] and into["box"].inside is objects[2], "the objects stay"
    assert into["model"].weight is weight and torch.equal(weight, tree["model"].weight)
    assert into["step"] == 4 and into["tuple"][1].tolist() == [4.0, 4.0]


def test_values_of_their_states_count_as_loaded(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": Counter(3), "b": Counter(2, array=True), "step": 5})
    into = {"a": Counter(), "b": Counter(2, array=True), "step": 0}
    report = tc.load_into(tmp_path / "c", into)
    assert report.loaded == len(tc.inspect(tmp_path / "c").leaves) == 9
    assert "9 leaves" in str(report)
    alone = tc.load_into(tmp_path / "c", into, select="a")
    assert alone.loaded == 4


def test_schedulers_and_scalers_are_no_zero_leaves(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    state = {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2), "scaler": torch.amp.GradScaler("cpu")}
    tc.save(tmp_path / "c", state)
    assert tc.load_into(tmp_path / "c", state).loaded == len(tc.inspect(tmp_path / "c").leaves) > 5


def test_without_like_they_come_as_states(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": Counter(2), "b": collections.OrderedDict(model=nn.Linear(2, 1))})
    found = tc.load(tmp_path / "c")
    assert found["a"] == {"n": 2, "seen": [0, 1]} and set(found["b"]["model"]) == {"weight", "bias"}


def test_a_new_tree_has_states_in_their_places(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": Counter(2, array=True)})
    counter = Counter(2)
    counter.array = torch.zeros(3)
    found = tc.load(tmp_path / "c", {"a": counter})
    assert found["a"]["array"].tolist() == [2.0] * 3 and counter.loads == 0 and counter.array.tolist() == [0.0] * 3


def test_a_tree_may_be_such_an_object(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", Counter(3))
    tc.load_into(tmp_path / "c", counter := Counter())
    assert counter.n == 3


def test_nothing_is_loaded_into_any_of_them_where_one_does_not_fit(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": Counter(3), "model": nn.Linear(2, 2)})
    into = {"a": Counter(1), "model": nn.Linear(3, 2)}
    before = into["model"].weight.clone()
    with pytest.raises(tc.MismatchError, match="model/weight"):
        tc.load_into(tmp_path / "c", into)
    assert into["a"].loads == 0 and torch.equal(before, into["model"].weight)
    with pytest.raises(tc.MismatchError, match="b: expected the state of a Counter, found nothing"):
        tc.load_into(tmp_path / "c", {"b": Counter(1)})


def test_a_fresh_optimizer_is_sent_to_restore(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tc.save(tmp_path / "c", {"optimizer": optimizer})
    with pytest.raises(tc.MismatchError, match=r"optimizer: .*training.restore"):
        tc.load_into(tmp_path / "c", {"optimizer": torch.optim.Adam(nn.Linear(2, 2).parameters())})
    tc.load_into(tmp_path / "c", {"optimizer": optimizer})


@pytest.mark.parametrize("strict", [True, False, "missing"])
def test_a_fresh_optimizer_whose_lr_is_a_tensor_is_sent_to_restore_too(tmp_path: Path, strict: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    tc.save(tmp_path / "fresh", {"optimizer": optimizer})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tc.save(tmp_path / "c", {"optimizer": optimizer})
    fresh = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.5))
    with pytest.raises(tc.MismatchError, match=r"optimizer: expected an optimizer that has state .*training.restore"):
        tc.load_into(tmp_path / "c", {"optimizer": fresh}, strict=strict)
    assert fresh.param_groups[0]["lr"] == 0.5 and not fresh.state
    tc.load_into(tmp_path / "fresh", {"optimizer": fresh}, strict=strict)
    assert torch.equal(fresh.param_groups[0]["lr"], torch.tensor(0.1))


@pytest.mark.parametrize("globs", [{"select": "w"}, {"exclude": "a"}], ids=str)
def test_an_object_that_is_not_selected_keeps_its_state(tmp_path: Path, globs: Any) -> None:
    tc.save(tmp_path / "c", {"w": torch.ones(2), "a": Counter(3)})
    target = {"w": torch.zeros(2), "a": Counter(1)}
    report = tc.load_into(tmp_path / "c", target, **globs)
    assert (target["a"].n, target["a"].loads) == (1, 0) and report.loaded == 1
    assert torch.equal(target["w"], torch.ones(2))


def test_an_unexpected_key_is_still_found(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": Counter(3), "more": 1})
    with pytest.raises(tc.MismatchError, match="not asked for: more"):
        tc.load_into(tmp_path / "c", {"a": Counter(1)})


# containers by their class ---------------------------------------------------------------------------------------
@dataclasses.dataclass
class Progress:
    """A dataclass with a state of its own, and more in it than its fields."""

    step: int = 0

    def __post_init__(self) -> None:
        self.history: list[int] = []

    def advance(self, step: int) -> Progress:
        self.step, self.history = step, list(range(step))
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.history = state["step"], list(state["history"])


class _States:
    """What makes any class one with a state."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Pair(_States, NamedTuple("Pair", [("a", int), ("b", int)])):
    step = 0


class Keyed(_States, dict[str, int]):
    step = 0


class Listed(_States, list[int]):
    step = 0


class Node(_States):
    step = 0


optree.register_pytree_node(Node, lambda node: ((node.step,), None, ("step",)), lambda _, c: Node(), namespace="states")


def _objects(step: int) -> dict[str, Any]:
    tree = {"progress": Progress().advance(step), "pair": Pair(1, 2), "keyed": Keyed(), "listed": Listed(), "n": Node()}
    for one in tree.values():
        if not isinstance(one, Progress):
            one.step, one.history = step, list(range(step))
    return tree


def _restored(tree: dict[str, Any], step: int) -> bool:
    return all((one.step, one.history) == (step, list(range(step))) for one in tree.values())


@pytest.mark.parametrize("way", ["load_into", "save_async", "extra", "extra of a tree", "manager", "copy_into"])
def test_a_class_is_asked_for_its_state_before_it_is_taken_for_a_container(tmp_path: Path, way: str) -> None:
    tree, into = _objects(3), _objects(1)
    objects = dict(into)
    if way == "load_into":
        tc.save(tmp_path / "c", tree, namespace="states")
        tc.load_into(tmp_path / "c", into, namespace="states")
    elif way == "save_async":
        tc.save_async(tmp_path / "c", tree, namespace="states").result()
        tc.load_into(tmp_path / "c", into, namespace="states")
    elif way == "copy_into":
        tc.trees.copy_into(tree, into, namespace="states")
    elif way == "manager":
        for one, act in ((tree, "save"), (into, "restore")):
            manager = tc.Manager(tmp_path / "run", background=False)
            for name, thing in one.items():
                manager.register(name, thing)
            manager.save(1) if act == "save" else manager.restore()
    else:
        source: Any = tc.training.state(nn.Linear(1, 1), extra=tree)
        if way == "extra":
            tc.save(tmp_path / "c", source)
            source = tmp_path / "c"
        tc.training.restore(source, nn.Linear(1, 1), extra=into)
    assert into == objects and all(into[key] is one for key, one in objects.items())
    assert _restored(into, 3)


def test_such_classes_come_as_their_states_without_a_target(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", _objects(2), namespace="states")
    expected = {key: {"step": 2, "history": [0, 1]} for key in _objects(2)}
    assert tc.load(tmp_path / "c") == expected
    assert tc.load(tmp_path / "c", _objects(1), namespace="states") == expected


def test_operations_on_trees_have_states_in_the_places_of_objects() -> None:
    tree = {"progress": Progress().advance(2), "model": nn.Linear(2, 1)}
    state = {"progress": {"step": 2, "history": [0, 1]}, "model": dict(tree["model"].state_dict())}
    for made in (
        tc.trees.offload(tree),
        tc.trees.gather(tree),
        tc.trees.distribute(tree, tree),
        tc.trees.distribute(tree, tree, src=0),
        tc.trees.unflatten_names(tc.trees.flatten_names(tree), tree),
    ):
        assert made["progress"] == state["progress"]
        assert all(torch.equal(made["model"][name], state["model"][name]) for name in ("weight", "bias"))
    assert tc.trees.broadcast(tree) is tree
    assert tc.trees.empty_like(tree)["model"]["weight"].shape == (1, 2)
    assert tc.abstract(tree)["model"]["weight"].shape == (1, 2)
    assert set(tc.trees.flatten_names({"m": nn.Linear(2, 1)})) == {"m.weight", "m.bias"}
    assert tc.trees.same_structure(tree, {**state, "model": tree["model"].state_dict()})
    assert not tc.trees.same_structure(tree, {**tree, "model": nn.Linear(3, 1)})
    into = {"progress": Progress(), "model": nn.Linear(2, 1)}
    tc.trees.copy_into(tree, into)
    assert into["progress"].history == [0, 1] and torch.equal(into["model"].weight, tree["model"].weight)


def test_a_class_itself_is_no_object_with_a_state() -> None:
    with pytest.raises(tc.TreeError, match="kind: expected an array"):
        tc.trees.offload({"kind": Progress})


def test_what_cannot_be_taken_apart_is_named_beside_such_objects(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match=r"^deep/odd: "):
        tc.save(tmp_path / "c", {"a": Counter(1), "deep": {"odd": collections.defaultdict(lambda: 0)}})
