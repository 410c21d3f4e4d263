"""What a container keeps beside its children, and custom metadata: where it cannot be stored, the place is named."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

import treeckpt as tc

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
        "save_async": lambda: tc.save_async(tmp_path / "d", tree, namespace=namespace, writer="thread"),
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
