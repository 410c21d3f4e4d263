"""What programs save by the recipe of PyTorch's checkpointing, and similar ones, restores by the names of its error.

The recipe keeps `{"model", "optim"}` of a `Stateful` under one name: pytorch-dcp-docs has its calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import treeckpt as tc
import treeckpt.dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
NAMES = {"app/model": "model", "app/optim": "optimizer"}
Live = tuple[nn.Module, torch.optim.Optimizer]


class AppState(Stateful):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("only what was saved is read")


def live(*, trained: bool) -> Live:
    torch.manual_seed(int(trained))
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + trained)
    if trained:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return model, optimizer


def save_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=path, no_dist=True)


def save_ours(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    treeckpt.dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=path, no_dist=True)


def save_torch(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, path)


def save_optim(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}, path)


def assert_same(first: Live, second: Live) -> None:
    for a, b in zip(first, second, strict=True):
        assert str(a.state_dict()) == str(b.state_dict())


@pytest.mark.parametrize("save", [save_dcp, save_ours, save_torch, save_optim])
def test_the_error_names_the_rename_that_restores_everything(tmp_path: Path, save: Callable[..., None]) -> None:
    saved, fresh = live(trained=True), live(trained=False)
    save(tmp_path / "c.pt", *saved)
    with pytest.raises(tc.MismatchError, match="pass rename=") as caught:
        tc.training.restore(tmp_path / "c.pt", *fresh)
    rename = ast.literal_eval(re.search(r"rename=(\{.*?\})", str(caught.value)).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    report = tc.training.restore(tmp_path / "c.pt", *fresh, rename=rename, from_root=True)
    assert_same(saved, fresh)
    assert report.missing == report.unexpected == ()


@pytest.mark.parametrize("rename", [{"app": ""}, {"app/model": "model"}])
def test_a_rename_that_leaves_the_optimizer_where_it_is_gets_the_whole_one(
    tmp_path: Path, rename: dict[str, str]
) -> None:
    save_dcp(tmp_path / "c", *live(trained=True))
    with pytest.raises(tc.MismatchError, match=re.escape(f"pass rename={NAMES}, from_root=True")):
        tc.training.restore(tmp_path / "c", *live(trained=False), rename=rename, from_root=True)


@pytest.mark.parametrize("bank", [False, True])
def test_a_rename_of_other_parts_than_the_model_is_told_to_see_the_root(tmp_path: Path, bank: bool) -> None:
    save_optim(tmp_path / "c.pt", *live(trained=True))
    rename = {"optim": "optimizer"}
    source: Any = [tc.From(tmp_path / "c.pt", rename=rename)] if bank else tmp_path / "c.pt"
    with pytest.raises(tc.MismatchError, match=r"see `model/\.\.\.` alone: pass from_root=True to restore or resume"):
        tc.training.restore(source, *live(trained=False), rename=None if bank else rename)


def test_a_run_of_the_recipe_goes_on_with_a_manager(tmp_path: Path) -> None:
    saved, fresh, again = live(trained=True), live(trained=False), live(trained=False)
    save_ours(tmp_path / "run" / "step_7", *saved)
    with tc.Manager(tmp_path / "run", background=False) as manager:
        report = manager.resume(*fresh, rename=NAMES, from_root=True)
        assert report is not None
        assert_same(saved, fresh)
        manager.save(manager.count + 1, tc.training.state(*fresh))
    assert tc.Manager(tmp_path / "run").resume(*again) is not None
    assert_same(saved, again)


def test_rules_behind_the_renames_are_applied_too(tmp_path: Path) -> None:
    saved, fresh = live(trained=True), live(trained=False)
    save_dcp(tmp_path / "c", *saved)
    transforms = [tc.rules.Cast("model", "float64")]
    with pytest.raises(tc.MismatchError, match="cast=True"):
        tc.training.restore(tmp_path / "c", *fresh, rename=NAMES, transforms=transforms, from_root=True)
    tc.training.restore(tmp_path / "c", *fresh, rename=NAMES, transforms=transforms, from_root=True, cast=True)
    assert_same(saved, fresh)
