"""A class that a program lacks matters only to what is loaded: what is left out is not made."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch

import treeckpt as tc
from treeckpt._cli.main import main

TRAIN = """
import dataclasses, enum, typing
@dataclasses.dataclass
class Config:
    lr: float
    table: object
@dataclasses.dataclass
class Empty:
    pass
class Pair(typing.NamedTuple):
    a: int
    b: object
class Mode(enum.Enum):
    FAST = 1
class Node:
    def __init__(self, x): self.x = x
class Static:
    def __init__(self, x): self.x = x
class Mapping(dict):
    pass
class Plain:
    pass
"""
KINDS: dict[str, Callable[[Any], Any]] = {
    "dataclass": lambda m: m.Config(0.1, np.arange(3)),
    "empty": lambda m: m.Empty(),
    "namedtuple": lambda m: m.Pair(1, "x"),
    "enum": lambda m: m.Mode.FAST,
    "registered": lambda m: m.Node(np.arange(3)),
    "registered without leaves": lambda m: m.Static(4),
    "nested": lambda m: [{"x": m.Config(1, m.Pair(1, [m.Mode.FAST]))}],
    "pickled": lambda m: m.Plain(),
    "per rank": lambda m: tc.PerRank(m.Config(0.1, 2)),
}


@pytest.fixture
def train() -> Iterator[types.ModuleType]:
    """A module that the program has imported while it saves."""
    module = types.ModuleType("train_of_test")
    sys.modules[module.__name__] = module
    exec(TRAIN, module.__dict__)
    every = optree.registry.__dict__["__GLOBAL_NAMESPACE"]
    optree.register_pytree_node(module.Node, lambda n: ([n.x], None), lambda _, c: module.Node(*c), namespace=every)
    optree.register_pytree_node(module.Static, lambda n: ([], n.x), lambda x, _: module.Static(x), namespace=every)
    yield module
    sys.modules.pop(module.__name__, None)
    optree.unregister_pytree_node(module.Node, namespace=every)
    optree.unregister_pytree_node(module.Static, namespace=every)


def without_class(path: Path, tree: Any) -> Path:
    """Saves a tree, and takes its classes away."""
    tc.save(path, tree, allow_pickle=True, step=1)
    del sys.modules["train_of_test"]
    return path


def weights(empty: bool = False) -> dict[str, Any]:
    return {"w": np.zeros(4) if empty else np.arange(4.0), "n": 0 if empty else 7}


def is_loaded(model: Any) -> bool:
    return model["w"].tolist() == [0, 1, 2, 3] and model["n"] == 7


CALLS: dict[str, Callable[[Path], Any]] = {
    "select": lambda p: tc.load(p, select="model"),
    "exclude": lambda p: tc.load(p, exclude="config"),
    "salvage": lambda p: tc.load(p, select="model", fallback=tc.Fallback(on_corrupt="skip")),
    "like": lambda p: tc.load(p, {"model": weights(True), "config": ...}),
    "like, selected": lambda p: tc.load(p, {"model": weights(True)}, select="model"),
    "strict": lambda p: tc.load(p, {"model": weights(True)}, strict="missing"),
    "bank": lambda p: tc.load([p, tc.From(p, select="model/n")], select="model"),
    "bank of parts": lambda p: tc.load([tc.From(p, select="model"), tc.From(p, exclude="config")]),
    "bank, like": lambda p: tc.load([p, p], {"model": weights(True), "config": ...}),
    "renamed": lambda p: tc.load(p, select="net", rename={"model": "net"})["net"],
    "dropped": lambda p: tc.load(p, transforms=tc.rules.Drop("config")),
    "async": lambda p: tc.load_async(p, select="model").result(),
    "manager": lambda p: tc.Manager(p.parent).restore(select="model"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_a_part_that_is_left_out_is_not_needed(tmp_path: Path, kind: str, train: Any) -> None:
    path = without_class(tmp_path / "step_00000001", {"model": weights(), "config": KINDS[kind](train)})
    with pytest.raises(tc.TreeckptError, match=r"config.*(no such class|pickled object)"):
        tc.load(path)
    for call in CALLS.values():
        found = call(path)
        assert is_loaded(found.get("model", found))
    into = {"model": weights(True)}
    tc.load_into(path, into, select="model")
    tc.load_into(path, other := {"model": weights(True), "config": ...})
    assert is_loaded(into["model"]) and is_loaded(other["model"]) and other["config"] is ...
    assert tc.load_abstract(path, select="model")["model"]["n"] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_without_its_class_is_converted_and_shown(tmp_path: Path, kind: str, train: Any) -> None:
    path = without_class(tmp_path / "c", {"model": weights(), "config": KINDS[kind](train)})
    tc.convert.convert(path, tmp_path / "c.pt", select="model")
    tc.convert.convert(path, tmp_path / "sub.pt", subtree="model")
    tc.convert.convert(path, tmp_path / "ours", select="model")
    assert torch.load(tmp_path / "c.pt")["model"]["n"] == torch.load(tmp_path / "sub.pt")["n"] == 7
    assert is_loaded(tc.load(tmp_path / "ours", select="model")["model"])


def test_show_prints_a_checkpoint_whose_classes_are_missing(tmp_path: Path, train: Any) -> None:
    tree = {kind: make(train) for kind, make in KINDS.items()}
    path = without_class(tmp_path / "c", {"model": weights(), "config": tree})
    done = subprocess.run([sys.executable, "-m", "treeckpt", "show", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for more in (["model/w"], ["config/dataclass/table"], ["--structure"], ["--json"]):
        assert main(["show", str(path), *more]) == 0


def test_what_is_left_out_of_a_class_is_one_ellipsis_and_a_class_with_a_loaded_leaf_stays(
    tmp_path: Path, train: Any
) -> None:
    tree = {
        "a": train.Config(1, {"x": [np.arange(2)]}),
        "b": (train.Pair(1, train.Static(3)), {}),
        "c": train.Static(5),
    }
    tc.save(tmp_path / "c", tree)
    found = tc.load(tmp_path / "c", select="a/lr")
    assert found == {"a": train.Config(1, {"x": [...]}), "b": (..., {}), "c": ...}
    found = tc.load(tmp_path / "c", select=["b/0/b", "c"])
    assert found["a"] is ... and found["b"][0].a is ... and found["b"][0].b.x == 3 and found["c"].x == 5
    found = tc.load([tc.From(tmp_path / "c", exclude="c"), tc.From(tmp_path / "c", select=["a/lr", "c"])])
    assert found["a"].lr == 1 and found["a"].table["x"][0].tolist() == [0, 1]
    assert found["b"][0].b.x == 3 and found["c"].x == 5
    del sys.modules["train_of_test"]
    with pytest.raises(tc.MismatchError, match=r"^a: expected the class train_of_test:Config"):
        tc.load(tmp_path / "c", select="a/lr")


def test_a_later_checkpoint_of_a_bank_gives_a_class_without_leaves(tmp_path: Path, train: Any) -> None:
    for number in (1, 2):
        tc.save(tmp_path / str(number), {"c": train.Static(number), "n": number, "e": {}})
    found = tc.load([tmp_path / "1", tmp_path / "2"])
    assert found["c"].x == 2 and found["n"] == 2 and found["e"] == {}
    assert tc.load([tmp_path / "1", tc.From(tmp_path / "2", select="n")])["c"].x == 1


def test_a_damaged_container_is_salvaged_without_its_class(tmp_path: Path, train: Any) -> None:
    path = tmp_path / "c"
    tc.save(path, {"config": train.Pair(np.ones(1 << 18), np.ones(1 << 18)), "model": weights()})
    [shard] = path.glob("*.safetensors")
    index = tc.inspect(path)
    with shard.open("r+b") as file:
        for name in ("config/a", "config/b"):
            [chunk] = index.chunks_of(index.by_path[name][0])
            _, at = index.locate(chunk.rank, chunk.start, chunk.start + 8, name)
            file.seek(at)
            file.write(b"damaged!")
    del sys.modules["train_of_test"]
    found = tc.load(path, fallback=tc.Fallback(on_corrupt="skip"))
    assert found["config"] is ... and is_loaded(found["model"])
