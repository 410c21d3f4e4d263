"""What a save, a load and a resume pass on one rank: CONTRIBUTING names each module of the first two."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.passed_modules import passed_modules
from treeckpt._io.comm.comm import SoloComm

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
Passed = dict[str, set[str]]


def saving(path: Path) -> Passed:
    tree, comm = {"w": torch.ones(64)}, SoloComm()  # the default comm knows of background saves of other tests
    tc.save(path / "first", tree, comm=comm)
    return passed_modules(lambda: tc.save(path / "second", tree, comm=comm))


def loading(path: Path) -> Passed:
    tc.save(path / "saved", {"w": np.ones((64, 64), np.float32)})
    like = {"w": tc.Sharded(np.zeros((64, 32), np.float32), (64, 64), (0, 32))}
    tc.load(path / "saved", like)
    return passed_modules(lambda: tc.load(path / "saved", like))


def resuming(path: Path) -> Passed:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with tc.Manager(path / "run", background=False) as manager:
        manager.save(1, tc.training.state(model, optimizer))
        return passed_modules(lambda: manager.resume(model, optimizer))


@pytest.mark.parametrize(("call", "title"), [(saving, "The life of a save"), (loading, "The life of a load")])
def test_each_module_that_a_call_passes_is_named_in_contributing(call, title: str, tmp_path: Path) -> None:
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    modules = {str(path.with_suffix("")).removesuffix("/__init__") for path in Path(tc.__file__).parent.rglob("*.py")}
    root = f"{Path(tc.__file__).parent}/"
    named = {name for name in re.findall(r"`([\w/]+)`", section) if root + name in modules}
    assert named == set(call(tmp_path))


@pytest.mark.parametrize(("call", "most"), [(saving, 35), (loading, 37), (resuming, 71)])
def test_a_call_passes_few_modules(call, most: int, tmp_path: Path) -> None:
    assert len(call(tmp_path)) <= most
