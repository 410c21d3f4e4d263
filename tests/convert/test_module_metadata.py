"""`_metadata` of state dicts in files of other programs: read in place, converted both ways, or said to be left out."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.hfai_parts import write_parts
from treeckpt.convert import convert
from treeckpt.errors import TreeError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())


METADATA = {"": {"version": 1}, "0": {"version": 1}, "1": {"version": 2}, "2": {"version": 1}}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    torch.save({"model": model().state_dict(), "epoch": 3}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_a_file_of_torch_save_is_loaded_with_metadata(archive: Path) -> None:
    for like in (None, {"model": model().state_dict(), "epoch": 0}):
        found = tc.load(archive, like)["model"]
        assert type(found) is OrderedDict and found._metadata == METADATA  # type: ignore[attr-defined]
    assert tc.load(archive, rename={"model/0.*": "model/9.*"})["model"]._metadata["9"] == {"version": 1}


def test_metadata_goes_through_a_checkpoint_of_ours_and_back(archive: Path, tmp_path: Path) -> None:
    convert(archive, tmp_path / "ours")
    assert tc.load(tmp_path / "ours")["model"]._metadata == METADATA
    for options in ({}, {"select": "model/1.*"}):
        name = tmp_path / f"{len(options)}.pt"
        assert not convert(tmp_path / "ours", name, **options).notes  # type: ignore[arg-type]
        assert torch.load(name, weights_only=True)["model"]._metadata == METADATA
    convert(tmp_path / "ours", tmp_path / "sub.pt", subtree="model")
    fresh = model()
    fresh.load_state_dict(torch.load(tmp_path / "sub.pt", weights_only=True))
    assert torch.load(tmp_path / "sub.pt", weights_only=True)._metadata == METADATA


def test_a_training_state_of_ours_becomes_a_file_with_metadata(tmp_path: Path) -> None:
    here = model()
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
    tc.save(tmp_path / "ours", tc.training.state(here, optimizer, rng=False))
    convert(tmp_path / "ours", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["model"]._metadata == METADATA


@pytest.mark.parametrize("name", ["dcp", "m.safetensors"])
def test_the_report_says_where_metadata_is_left_out(archive: Path, tmp_path: Path, name: str) -> None:
    report = convert(archive, tmp_path / name, to="dcp" if name == "dcp" else "safetensors", subtree="model")
    assert not report.losses and "the versions of 4 modules" in str(report)


def test_attributes_that_weights_only_refuses_are_a_loss_that_is_named(tmp_path: Path) -> None:
    state = OrderedDict(w=torch.zeros(1))
    state.when, state.note = dt.date(2026, 1, 2), ["a", (1, None)]  # type: ignore[attr-defined]
    tc.save(tmp_path / "ours", {"model": state})
    assert tc.load(tmp_path / "ours")["model"].when == dt.date(2026, 1, 2)
    with pytest.raises(TreeError, match=r"model\.when"):
        convert(tmp_path / "ours", tmp_path / "a.pt")
    convert(tmp_path / "ours", tmp_path / "a.pt", lossy=True)
    assert vars(torch.load(tmp_path / "a.pt", weights_only=True)["model"]) == {"note": ["a", (1, None)]}


class Version:
    """A class that no file of ours has."""


def test_an_attribute_that_only_code_could_make_is_refused_by_its_place(tmp_path: Path) -> None:
    state: Any = OrderedDict(w=torch.zeros(1))
    state._metadata = OrderedDict({"": {"version": Version()}})
    torch.save({"model": state}, tmp_path / "a.pt")
    with pytest.raises(TreeError, match=r"model\._metadata"):
        convert(tmp_path / "a.pt", tmp_path / "ours")


def test_the_parts_of_hfai_have_the_metadata_of_the_first(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", {"model": [dict(model().state_dict())], "optimizer": []}, {}, 2)
    assert not hasattr(tc.load(tmp_path / "parts")["model"], "_metadata")
    for part in (tmp_path / "parts").iterdir():
        content = torch.load(part, weights_only=False)
        small, large = content["model"][0]
        kept: Any = OrderedDict(small)
        kept._metadata = model().state_dict()._metadata  # type: ignore[attr-defined]
        content["model"] = [(kept, large)]
        torch.save(content, part)
    assert tc.load(tmp_path / "parts")["model"]._metadata == METADATA


def test_what_hfai_style_calls_save_comes_back_with_metadata(tmp_path: Path) -> None:
    tc.training.save(tmp_path / "saved", model())
    assert tc.training.load(tmp_path / "saved")["model"]._metadata == METADATA
