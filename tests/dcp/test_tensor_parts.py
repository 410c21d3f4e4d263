"""`treeckpt.dcp` with tensors that are made of others: filled in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from treeckpt import dcp

from ..helpers.wrapped_moments import Codes


def test_they_are_saved_and_filled(tmp_path: Path) -> None:
    def made(fill: int) -> dict[str, Any]:
        codes = Codes(torch.full((2, 4), fill, dtype=torch.int8), torch.full((2,), float(fill)), True)
        return {"state": {0: {"momentum": codes}}, "mask": (torch.eye(3) * fill).to_sparse(), "x": torch.ones(1) * fill}

    dcp.save(made(3), checkpoint_id=tmp_path / "a")
    state = made(1)
    live = state["state"][0]["momentum"]
    dcp.load(state, checkpoint_id=tmp_path / "a")
    assert state["state"][0]["momentum"] is live
    assert (live.codes == 3).all()
    assert (live.scale == 3).all()
    assert torch.equal(state["mask"].to_dense(), torch.eye(3) * 3)
