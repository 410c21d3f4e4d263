"""Weights are restored from a checkpoint of a program whose classes this one lacks, as an evaluation does."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.background import in_child
from treeckpt import training

TRAIN = """
import dataclasses, enum, sys, typing
import torch
@dataclasses.dataclass
class Config:
    lr: float
    layers: list
class Pair(typing.NamedTuple):
    a: int
    b: object
class Mode(enum.Enum):
    FAST = 1
class Plain:
    pass
"""
KINDS: dict[str, Callable[[Any], Any]] = {
    "dataclass": lambda m: m.Config(0.1, [m.Pair(1, m.Mode.FAST)]),
    "enum": lambda m: {"mode": m.Mode.FAST},
    "namedtuple": lambda m: m.Pair(1, torch.ones(2)),
    "pickled": lambda m: m.Plain(),
}


@pytest.fixture
def train() -> Iterator[types.ModuleType]:
    module = types.ModuleType("train_of_test")
    sys.modules[module.__name__] = module
    exec(TRAIN, module.__dict__)
    yield module
    sys.modules.pop(module.__name__, None)


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def saved(path: Path, train: Any, kind: str, where: str) -> torch.nn.Module:
    """Saves a training with an object of a class, and takes the class away; returns the model."""
    model, config = net(), KINDS[kind](train)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    extra = {"config": config, "epoch": 3, "mean": torch.ones(2)} if where == "extra" else None
    tree = training.state(model, optimizer, extra=extra)
    tree |= {"config": config} if where == "root" else {}
    tc.save(path, tree, allow_pickle=True, step=1)
    del sys.modules["train_of_test"]
    return model


RESTORES: dict[str, Callable[..., Any]] = {
    "restore": training.restore,
    "bank": lambda path, *given, **options: training.restore([path], *given, **options),
    "resume": lambda path, *given, **options: tc.Manager(path.parent).resume(*given, **options),
    "ruled": lambda path, *given, **options: training.restore(
        path, *given, transforms=tc.rules.Rename("model/weight", "model/weight"), **options
    ),
}


@pytest.mark.parametrize("how", RESTORES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_is_not_asked_for_needs_no_class(tmp_path: Path, kind: str, how: str, train: Any) -> None:
    model, fresh = saved(tmp_path / "step_00000001", train, kind, "root"), net()
    optimizer = torch.optim.SGD(fresh.parameters(), momentum=0.9)
    report = RESTORES[how](tmp_path / "step_00000001", fresh)
    assert torch.equal(fresh.state_dict()["weight"], model.state_dict()["weight"])
    assert "config" in report.ignored
    assert "config" in RESTORES[how](tmp_path / "step_00000001", fresh, optimizer).ignored


@pytest.mark.parametrize("how", RESTORES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_extra_that_comes_back_beside_weights_lacks_what_cannot_be_made(
    tmp_path: Path, kind: str, how: str, train: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, fresh = tmp_path / "step_00000001", net()
    model = saved(path, train, kind, "extra")
    report = RESTORES[how](path, fresh)
    assert torch.equal(fresh.state_dict()["weight"], model.state_dict()["weight"])
    below = "extra/config/mode" if kind == "enum" else "extra/config"
    assert report.extra["epoch"] == 3 and report.extra["mean"].tolist() == [1, 1]
    assert report.extra["config"] == ({"mode": ...} if kind == "enum" else ...)
    assert [path for path in report.ignored if path.startswith("extra")] == [below]
    [record] = caplog.records
    assert record.getMessage().endswith(below)


@pytest.mark.parametrize("how", RESTORES)
@pytest.mark.parametrize("kind", KINDS)
def test_where_a_training_goes_on_an_extra_that_cannot_be_made_is_refused_before_anything_changes(
    tmp_path: Path, kind: str, how: str, train: Any
) -> None:
    path, fresh = tmp_path / "step_00000001", net()
    model = saved(path, train, kind, "extra")
    before = fresh.state_dict()["weight"].clone()
    optimizer = torch.optim.SGD(fresh.parameters(), momentum=0.9)
    with pytest.raises(tc.MismatchError, match=r"extra/config.*extra=False"):
        RESTORES[how](path, fresh, optimizer)
    assert torch.equal(fresh.state_dict()["weight"], before) and not optimizer.state
    RESTORES[how](path, fresh, optimizer, extra=False)
    RESTORES[how](path, fresh, optimizer, extra={"config": ..., "epoch": 0, "mean": torch.zeros(2)})
    assert torch.equal(fresh.state_dict()["weight"], model.state_dict()["weight"])


def test_an_object_in_a_file_of_torch_save_is_left_out_likewise(tmp_path: Path, train: Any) -> None:
    model, fresh = net(), net()
    tree = {"model": model.state_dict(), "config": train.Config(0.1, []), "extra": {"c": train.Config(1, []), "n": 1}}
    torch.save(tree, tmp_path / "c.pt")
    del sys.modules["train_of_test"]
    report = training.restore(tmp_path / "c.pt", fresh)
    assert torch.equal(fresh.state_dict()["weight"], model.state_dict()["weight"])
    assert report.extra == {"c": ..., "n": 1} and "extra/c" in report.ignored and "config" in report.ignored
    found = tc.load(tmp_path / "c.pt", select="model")
    assert torch.equal(found["model"]["weight"], model.state_dict()["weight"]) and found["config"] is ...
    tc.convert.convert(tmp_path / "c.pt", tmp_path / "ours", select="model")


def test_an_evaluation_restores_what_a_training_script_has_saved(tmp_path: Path) -> None:
    training_script = f"""{TRAIN}
import treeckpt as tc
assert __name__ == "__main__"
model = torch.nn.Linear(2, 2)
state = tc.training.state(model, torch.optim.SGD(model.parameters()), extra={{"config": Config(0.1, [Mode.FAST])}})
tc.save(sys.argv[1], state | {{"config": Config(0.1, [])}})
"""
    (tmp_path / "train.py").write_text(training_script)

    def run_script() -> int:
        sys.argv = ["train.py", str(tmp_path / "c")]
        runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
        return 0

    assert in_child(run_script) == (0, "")
    fresh = net()
    report = training.restore(tmp_path / "c", fresh)
    assert report.extra == {"config": ...} and report.loaded == 2


def test_load_as_hfai_has_it_fills_a_model_without_the_class_of_others(tmp_path: Path, train: Any) -> None:
    model, fresh = net(), net()
    training.save(tmp_path / "c", model, others={"config": train.Config(0.1, []), "epoch": 3})
    del sys.modules["train_of_test"]
    found = training.load(tmp_path / "c", fresh)
    assert torch.equal(fresh.state_dict()["weight"], model.state_dict()["weight"])
    assert found["epoch"] == 3 and found["config"] is ...
