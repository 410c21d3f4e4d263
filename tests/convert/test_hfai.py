"""Directories in the shape of hfai.checkpoint.save, written here as its source says: parts, shares, param groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import treeckpt as tc
from tests.helpers.hfai_parts import trained, write_parts
from tests.helpers.training_trees import assert_same

convert = tc.convert.convert


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_are_put_together_as_hfai_load_does(tmp_path: Path, world: int) -> None:
    model, optimizer = trained(0)
    write_parts(
        tmp_path / "ckpt.pt", {"model": [model], "optimizer": [optimizer]}, {"epoch": 3, "rng": torch.ones(5)}, world
    )
    report = convert(tmp_path / "ckpt.pt", tmp_path / "one")
    assert report.source_format == "hfai" and not report.losses
    back = tc.load(tmp_path / "one")
    assert list(back) == ["model", "optimizer", "epoch", "rng"] and back["epoch"] == 3
    assert_same({name: back["model"][name] for name in model}, model)
    assert_same(back["optimizer"]["param_groups"], optimizer["param_groups"])
    assert list(back["optimizer"]["state"]) == list(optimizer["state"])
    for number, moments in optimizer["state"].items():
        assert_same({name: back["optimizer"]["state"][number][name] for name in moments}, moments)


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_numbers_of_parts_may_have_any_number_of_digits(tmp_path: Path, digits: int) -> None:
    write_parts(tmp_path / "old", {"model": [{"w": torch.arange(300.0)}], "optimizer": []}, {}, 3)
    for rank in range(3):
        (tmp_path / "old" / f"PART_{rank:03d}.pt").rename(tmp_path / "old" / f"PART_{rank:0{digits}d}.pt")
    assert tc.convert.detect(tmp_path / "old") == "hfai"
    assert torch.equal(tc.load(tmp_path / "old")["model"]["w"], torch.arange(300.0))
    torch.save([1], tmp_path / "old" / f"PART_{1:0{digits}d}.pt")
    with pytest.raises(tc.FormatError, match=rf"PART_{1:0{digits}d}\.pt: expected a part of hfai"):
        tc.load(tmp_path / "old")


def test_several_models_and_no_optimizer(tmp_path: Path) -> None:
    first, second = trained(1)[0], trained(2)[0]
    write_parts(tmp_path / "ckpt", {"model": [first, second], "optimizer": []}, {}, 2)
    convert(tmp_path / "ckpt", tmp_path / "file.pt")
    back = torch.load(tmp_path / "file.pt")
    assert list(back) == ["model"] and len(back["model"]) == 2
    for found, expected in zip(back["model"], (first, second), strict=True):
        assert_same({name: found[name] for name in expected}, expected)


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    states = {"model": [model], "optimizer": [optimizer]}
    path = tmp_path / "ckpt"
    write_parts(path, states, {}, 3)
    last = (path / "PART_002.pt").read_bytes()
    (path / "PART_002.pt").unlink()
    with pytest.raises(tc.CorruptError, match="2 parts in part 0, found 3"):
        convert(path, tmp_path / "one")
    (path / "PART_004.pt").write_bytes(last)
    with pytest.raises(tc.CorruptError, match=r"PART_000\.pt to PART_002\.pt"):
        convert(path, tmp_path / "one")
    (path / "PART_004.pt").rename(path / "PART_002.pt")
    part = torch.load(path / "PART_001.pt")
    torch.save(part | {"__version__": "1.0.0"}, path / "PART_001.pt")
    with pytest.raises(tc.FormatError, match=r"version 2\.0\.0, found '1\.0\.0'"):
        convert(path, tmp_path / "one")
    shorter = {name: (shape, data[:-1]) for name, (shape, data) in part["model"][0][1].items()}
    torch.save(part | {"model": [(part["model"][0][0], shorter)]}, path / "PART_001.pt")
    with pytest.raises(tc.CorruptError, match="391 elements for shape"):
        convert(path, tmp_path / "one")
    torch.save([1], path / "PART_001.pt")
    with pytest.raises(tc.FormatError, match=r"PART_001\.pt: expected a part of hfai"):
        convert(path, tmp_path / "one")
    assert not (tmp_path / "one").exists()
