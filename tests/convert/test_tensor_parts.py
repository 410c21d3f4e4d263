"""Tensors that are made of others, in conversions: kept in checkpoints of ours, dicts of their parts elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch

import treeckpt as tc
from treeckpt.convert import convert

from ..helpers.wrapped_moments import Codes


def test_a_conversion_keeps_them_or_names_what_becomes_of_them(tmp_path: Path) -> None:
    codes = Codes(torch.ones(2, 4, dtype=torch.int8), torch.rand(2), True)
    tc.save(tmp_path / "a", {"w": codes, "s": torch.eye(3).to_sparse()})
    report = convert(tmp_path / "a", tmp_path / "b")
    assert not (report.notes or report.losses)
    loaded = tc.load(tmp_path / "b")
    assert type(loaded["w"]) is Codes
    assert torch.equal(loaded["w"].scale, codes.scale)
    assert torch.equal(loaded["s"].to_dense(), torch.eye(3))
    report = convert(tmp_path / "a", tmp_path / "c.pt")
    assert not report.losses
    assert [(finding.path, finding.becomes) for finding in report.notes] == [("w", "a dict"), ("s", "a dict")]
    found = torch.load(tmp_path / "c.pt")
    assert torch.equal(found["w"]["scale"], codes.scale)
    assert list(found["s"]) == ["indices", "values"]
