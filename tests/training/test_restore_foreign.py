"""Training goes on from files of other programs: state dicts of models, and of optimizers, straight from the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import treeckpt as tc
from tests.training.jobs import net, same_tensors
from treeckpt import training


def _saved(model: torch.nn.Module) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_state_dict_alone_is_put_under_model(tmp_path: Path) -> None:
    model = net(1)
    save_file(_saved(model), tmp_path / "model.safetensors")
    torch.save(_saved(model), tmp_path / "model.pt")
    for name in ("model.safetensors", "model.pt"):
        fresh = net(2)
        report = training.restore(tmp_path / name, fresh, under="model", rng=False)
        assert same_tensors(fresh.state_dict(), model.state_dict()) and not report.missing
    fresh = net(2)
    training.restore(torch.load(tmp_path / "model.pt"), fresh, under="model", rng=False)
    assert same_tensors(fresh.state_dict(), model.state_dict())


def test_rules_see_the_names_of_the_files(tmp_path: Path) -> None:
    model = net(1)
    save_file({f"hub.{name}": tensor for name, tensor in _saved(model).items()}, tmp_path / "model.safetensors")
    torch.save({"state_dict": _saved(model), "epoch": 4}, tmp_path / "run.ckpt")
    for name, options in (
        ("model.safetensors", {"under": "model", "rename": {"hub.*": "*"}}),
        ("run.ckpt", {"from_root": True, "rename": {"state_dict": "model"}}),
        ("run.ckpt", {"from_root": True, "transforms": "state_dict/* -> model/*"}),
    ):
        fresh = net(2)
        training.restore(tmp_path / name, fresh, rng=False, **options)
        assert same_tensors(fresh.state_dict(), model.state_dict())


def test_an_error_says_which_names_there_are(tmp_path: Path) -> None:
    save_file({f"hub.{name}": tensor for name, tensor in _saved(net(1)).items()}, tmp_path / "model.safetensors")
    with pytest.raises(tc.MismatchError, match=r"there are model/hub\.\S+, model/hub\."):
        training.restore(tmp_path / "model.safetensors", net(2), under="model", rng=False, rename={"x.*": "*"})
    with pytest.raises(tc.MismatchError, match=r"there are hub\."):
        training.restore(tmp_path / "model.safetensors", net(2), from_root=True, rng=False, rename={"x": "model"})
    with pytest.raises(tc.MismatchError, match=r"`model` at its root.*under='model'"):
        training.restore(tmp_path / "model.safetensors", net(2), rng=False)
