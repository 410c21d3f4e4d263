"""Mapping classes of other libraries: stored by their items and attributes, made again without calling the class."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import treeckpt as tc
from treeckpt._core.tree.containers import MARK, mapping_base, new_mapping
from treeckpt._core.tree.flatten import flatten, unflatten
from treeckpt._core.tree.structure import CustomNode
from treeckpt._core.tree.value_codec import encode_value

_calls: list[str] = []


class Bag(dict[str, Any]):
    """As configurations are: items that are attributes too."""

    def __init__(self, **items: Any) -> None:
        _calls.append("init")
        super().__init__(**items)
        self.__dict__.update(items)

    def __setitem__(self, key: str, value: Any) -> None:
        _calls.append("set")
        super().__setitem__(key, value)


@dataclasses.dataclass
class Output(collections.OrderedDict[str, Any]):
    """As transformers' ModelOutput: fields that are not None are items too."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        _calls.append("init")
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                collections.OrderedDict.__setitem__(self, field.name, getattr(self, field.name))


class Batch(collections.UserDict[str, Any]):
    """As transformers' BatchEncoding: attributes beside the items."""

    def __init__(self, data: Any, sequences: int | None = None) -> None:
        _calls.append("init")
        super().__init__(data)
        self._sequences = sequences


class Frozen(Mapping[str, Any]):
    """With a storage that only it knows."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Slotted(dict[str, Any]):
    __slots__ = ("more",)


class Factory(collections.defaultdict[str, Any]):
    """Of a base class of C that has more than items."""


def _trees() -> list[Any]:
    one = torch.arange(3.0)
    return [
        Bag(lr=0.1, steps=3, inner={"w": one}),
        Output(logits=one),
        Batch({"ids": one, "mask": [1, 2]}, sequences=2),
        Output(logits=(one, Batch({}))),
    ]


def _same(a: Any, b: Any) -> None:
    (ours, found), (theirs, wanted) = flatten(a), flatten(b)
    assert type(a) is type(b) and ours == theirs and [path for path, _ in found] == [path for path, _ in wanted]
    assert all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for (_, x), (_, y) in zip(found, wanted, strict=True)
    )
    assert vars(a).keys() == vars(b).keys()
    for name, value in vars(a).items():
        if name in a:
            assert value is a[name]
        elif name != "data":
            assert value == vars(b)[name]


@pytest.mark.parametrize("tree", _trees(), ids=lambda tree: type(tree).__name__)
def test_items_and_attributes_come_back_and_nothing_of_the_class_is_called(tree: Any) -> None:
    store = tc.MemoryStore()
    tc.save(store, {"x": tree, "n": [tree]})
    _calls.clear()
    loaded = tc.load(store)
    _same(loaded["x"], tree)
    _same(loaded["n"][0], tree)
    _same(tc.load(store, {"x": tree, "n": ...})["x"], tree)
    assert not _calls


def test_a_fill_replaces_items_and_the_attributes_that_are_the_items() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"bag": Bag(lr=0.1, w=torch.ones(2)), "batch": Batch({"step": 3}, sequences=7)})
    bag, batch = Bag(lr=0.2, w=torch.zeros(2)), Batch({"step": 1}, sequences=5)
    weight = bag["w"]
    tc.load_into(store, {"bag": bag, "batch": batch})
    assert bag["w"] is weight and weight.tolist() == [1, 1]
    assert bag["lr"] == bag.lr == 0.1 and batch["step"] == 3
    assert batch._sequences == 5, "what is no leaf is the target's"


def test_operations_on_trees_keep_the_class() -> None:
    for tree in _trees():
        for made in (tc.abstract(tree), tc.trees.offload(tree), tc.trees.empty_like(tree)):
            assert type(made) is type(tree) and list(made) == list(tree)


def test_a_class_that_is_not_here_is_an_error_that_names_it_and_a_plain_target_takes_the_items(tmp_path: Path) -> None:
    module = types.ModuleType("elsewhere")
    module.Bag = type("Bag", (dict,), {"__module__": "elsewhere", "__qualname__": "Bag"})
    sys.modules["elsewhere"] = module
    try:
        tc.save(tmp_path / "c", {"x": module.Bag(a=torch.ones(2))})
        assert type(tc.load(tmp_path / "c")["x"]) is module.Bag
    finally:
        del sys.modules["elsewhere"]
    with pytest.raises(tc.MismatchError, match=r"x: expected the class elsewhere:Bag, found no such class.*like="):
        tc.load(tmp_path / "c")
    assert tc.load(tmp_path / "c", {"x": {"a": torch.zeros(2)}})["x"]["a"].tolist() == [1, 1]
    report = tc.convert.convert(tmp_path / "c", tmp_path / "plain")
    assert "elsewhere:Bag becomes a dict" in str(report) and type(tc.load(tmp_path / "plain")["x"]) is dict
    assert "elsewhere" not in sys.modules


def _local() -> Any:
    class Local(dict[str, Any]):
        pass

    return Local(a=1)


REFUSED = {
    "other storage": lambda: Frozen({"a": 1}),
    "of C": lambda: Factory(int, a=1),
    "slots": lambda: Slotted(a=1),
    "of a function": _local,
    "an attribute that is no plain value": lambda: Batch({"a": 1}, sequences=object()),  # type: ignore[arg-type]
    "mappingproxy": lambda: types.MappingProxyType({"a": 1}),
    "ChainMap": lambda: collections.ChainMap({"a": 1}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_more_than_that_is_refused_with_the_line_that_registers_it(name: str) -> None:
    tree = REFUSED[name]()
    kind = type(tree).__name__
    with pytest.raises(tc.TreeError, match=rf"x: .*optree.register_pytree_node\({kind}, .* {kind}\(zip"):
        tc.save(tc.MemoryStore(), {"x": tree})


_numbers = itertools.count()


def test_the_line_registers_it() -> None:
    with pytest.raises(tc.TreeError) as caught:
        tc.save(tc.MemoryStore(), {"x": Frozen({"b": 1, "a": torch.ones(2)})})
    line = caught.value.hint.partition("class: ")[2].partition(", and pass")[0]
    assert line.startswith("optree.register_pytree_node(Frozen")
    name = f"mappings-{next(_numbers)}"
    exec(line.replace("'mine'", repr(name)), globals())
    try:
        store = tc.MemoryStore()
        tc.save(store, {"x": Frozen({"b": 1, "a": torch.ones(2)})}, namespace=name)
        loaded = tc.load(store, namespace=name)["x"]
        assert type(loaded) is Frozen and list(loaded) == ["b", "a"] and loaded["b"] == 1
    finally:
        optree.unregister_pytree_node(Frozen, namespace=name)


@pytest.mark.parametrize("kind", [collections.defaultdict, type(os.environ), dict, int])
def test_a_file_cannot_have_other_classes_made(kind: type) -> None:
    with pytest.raises(TypeError, match="no subclass"):
        new_mapping(kind, (MARK, (), {}), ["a"], [1])
    leaf, named = iter([1]), CustomNode("here:Kind", encode_value((MARK, (), {}), ""), ("a",), (None,))
    with pytest.raises(tc.MismatchError, match="expected the class here:Kind, a mapping, found TypeError"):
        unflatten(named, leaf, resolve=lambda name: kind)


def test_an_attribute_that_names_no_item_is_refused() -> None:
    for state in [(MARK, ("b",), {}), (MARK, (), {1: 2}), (MARK,)]:
        with pytest.raises((TypeError, KeyError, ValueError)):
            new_mapping(Bag, state, ["a"], [1])


def test_modules_that_are_mappings_are_saved_by_their_state() -> None:
    parameters = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2))})
    assert mapping_base(type(parameters)) is None
    store = tc.MemoryStore()
    tc.save(store, {"x": parameters})
    other = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(2))})
    tc.load_into(store, {"x": other})
    assert other["a"].tolist() == [1, 1]
