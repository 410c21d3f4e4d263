"""What a container keeps beside its children, and custom metadata: where it cannot be stored, the place is named."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch

import treeckpt as tc
from treeckpt._core.tree.containers import (
    flatten_one_level,
    is_leaf_type,
    is_plain_dataclass,
    is_stateful_type,
    new_instance,
    new_struct_sequence,
    struct_sequence_fields,
)
from treeckpt.errors import TreeError

_numbers = itertools.count()


class Node:
    """Children, and something beside them."""

    def __init__(self, children: list[Any], beside: Any) -> None:
        self.children, self.beside = children, beside


class Odd:
    """Of no kind that can be stored."""


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"node-metadata-{next(_numbers)}"
    optree.register_pytree_node(
        Node, lambda node: (node.children, node.beside), lambda beside, children: Node(list(children), beside),
        namespace=name,
    )  # fmt: skip
    yield name
    optree.unregister_pytree_node(Node, namespace=name)


@pytest.mark.parametrize("beside", [Odd(), {"a": Odd()}, (1, Odd())])
@pytest.mark.parametrize("way", ["save", "save_async", "load", "load_into", "abstract"])
def test_metadata_of_a_node_is_named_by_the_nodes_path(tmp_path: Path, namespace: str, beside: Any, way: str) -> None:
    tree = {"model": {"first": np.ones(2), "x": Node([np.ones(3)], beside)}}
    tc.save(tmp_path / "c", {"model": {"first": np.ones(2), "x": Node([np.ones(3)], 1)}}, namespace=namespace)
    calls = {
        "save": lambda: tc.save(tmp_path / "d", tree, namespace=namespace),
        "save_async": lambda: tc.save_async(
            tmp_path / "d", tree, namespace=namespace, background=tc.BackgroundOptions(writer="thread")
        ),
        "load": lambda: tc.load(tmp_path / "c", tree, namespace=namespace),
        "load_into": lambda: tc.load_into(tmp_path / "c", tree, namespace=namespace),
        "abstract": lambda: tc.abstract(tree, namespace=namespace),
    }
    with pytest.raises(tc.TreeError) as caught:
        calls[way]()
    assert caught.value.path == "model/x" and "Odd" in caught.value.found


def test_the_factory_of_a_defaultdict_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError) as caught:
        tc.save(tmp_path / "c", {"m": {"d": collections.defaultdict(Odd)}})
    assert caught.value.path == "m/d"


def test_a_node_alone_is_the_root(tmp_path: Path, namespace: str) -> None:
    with pytest.raises(tc.TreeError, match=r"^<root>: .*Odd"):
        tc.save(tmp_path / "c", Node([1], Odd()), namespace=namespace)


@pytest.mark.parametrize("value", [Odd(), [1, Odd()], np.ones(3), tc.PerRank(1)])
def test_custom_metadata_is_named_by_its_key(tmp_path: Path, value: Any) -> None:
    with pytest.raises(tc.TreeError) as caught:
        tc.save(tmp_path / "c", {"w": 1}, custom_metadata={"fine": 1, "note": value})
    assert caught.value.path == "custom_metadata/note"
    assert not (tmp_path / "c" / "index.json").exists()


# one level at a time --------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Point:
    x: Any
    y: Any


@dataclasses.dataclass
class Marked:
    __treeckpt_leaf__ = True
    x: int = 0


@dataclasses.dataclass
class Numbers(list):
    x: int = 0


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "keys", "children"),
    [
        ({"b": 1, 2: 3}, ["b", 2], [1, 3]),
        (collections.OrderedDict(b=1), ["b"], [1]),
        (collections.defaultdict(list, a=1), ["a"], [1]),
        (collections.defaultdict(None, a=1), ["a"], [1]),
        ([5, 6], [0, 1], [5, 6]),
        ((5,), [0], [5]),
        (collections.deque([5, 6], 4), [0, 1], [5, 6]),
        (Pair(5, 6), ["a", "b"], [5, 6]),
        (Point(5, 6), ["x", "y"], [5, 6]),
    ],
)
def test_a_container_is_flattened_into_its_keys_and_children(tree: Any, keys: list[Any], children: list[Any]) -> None:
    found = flatten_one_level(tree, "p", "", 0)
    assert found is not None and list(found.keys) == keys and list(found.children) == children
    assert len(found.build((None,) * len(children)).children) == len(children)


@pytest.mark.parametrize(
    "leaf", [5, None, "x", np.zeros(2), np.float32(1), {1, 2}, Marked(), Numbers(), object(), Point]
)
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    assert flatten_one_level(leaf, "p", "", 0) is None


def test_children_that_are_all_leaves_for_certain_are_told() -> None:
    for tree, certain in (([1, "x", np.zeros(1)], True), ([1, [2]], False), ([object()], False), ([], True)):
        found = flatten_one_level(tree, "p", "", 0)
        assert found is not None and found.has_only_leaves() is certain


def test_classes_are_told_apart() -> None:
    kinds = [int, bytes, type(None), np.ndarray, np.float32, torch.Tensor, list, Point, Stateful]
    assert [is_leaf_type(kind) for kind in kinds] == [True] * 6 + [False] * 3
    assert [is_stateful_type(kind) for kind in (Stateful, type(Stateful), Point, int, torch.optim.SGD)] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert [is_plain_dataclass(kind) for kind in (Point, Marked, Numbers, list)] == [True, False, False, False]


def test_a_struct_sequence_is_made_of_its_items_and_hidden_fields() -> None:
    now = time.gmtime(5)
    items, hidden = struct_sequence_fields(time.struct_time)
    assert items[:2] == ("tm_year", "tm_mon") and set(hidden) == {"tm_gmtoff", "tm_zone"}
    beside = {"tm_gmtoff": 7, "tm_zone": "X"}
    again = new_struct_sequence(time.struct_time, [*now, *(beside[name] for name in hidden)])
    assert again == now and (again.tm_gmtoff, again.tm_zone) == (7, "X")  # type: ignore[attr-defined]
    names, _ = struct_sequence_fields(os.stat_result)
    assert len(set(names)) == len(names) == 10


def test_a_dataclass_without_a_field_is_refused_by_path() -> None:
    point = object.__new__(Point)
    point.x = 1
    with pytest.raises(TreeError, match="'y'") as caught:
        flatten_one_level(point, "a/b", "", 0)
    assert caught.value.path == "a/b"
    made = new_instance(Point, ("y", "x"), (1, 2))
    assert isinstance(made, Point) and (made.x, made.y) == (2, 1)
