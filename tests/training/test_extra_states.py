"""Extra states of modules that are files in memory, as FSDP and other libraries give them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc


class Recipe(nn.Linear):
    """Keeps its numbers in an extra state of bytes, as modules with fp8 recipes do."""

    def __init__(self, scale: float) -> None:
        super().__init__(2, 2)
        self.scale = scale

    def get_extra_state(self) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save({"scale": self.scale}, buffer)
        buffer.seek(0)
        return buffer

    def set_extra_state(self, state: Any) -> None:
        assert type(state) is io.BytesIO
        self.scale = torch.load(state, weights_only=True)["scale"]


@pytest.mark.parametrize("way", ["restore", "load", "into", "async", "manager", "file"])
def test_an_extra_state_of_bytes_comes_back(tmp_path: Path, way: str) -> None:
    saved, fresh = nn.Sequential(Recipe(3.0)), nn.Sequential(Recipe(1.0))
    state = tc.training.state(saved, rng=False)
    if way == "manager":
        with tc.Manager(tmp_path / "run") as manager:
            manager.save(1, state)
        with tc.Manager(tmp_path / "run") as manager:
            manager.resume(fresh, rng=False)
    elif way == "file":
        torch.save({"model": saved.state_dict()}, tmp_path / "a.pt")
        fresh.load_state_dict(tc.load(tmp_path / "a.pt")["model"])
    else:
        tc.save_async(tmp_path / "a", state).result() if way == "async" else tc.save(tmp_path / "a", state)
        if way in ("restore", "async"):
            tc.training.restore(tmp_path / "a", fresh, rng=False)
        elif way == "load":
            fresh.load_state_dict(tc.load(tmp_path / "a")["model"])
        else:
            tc.load_into(tmp_path / "a", {"model": fresh})
    assert fresh[0].scale == 3.0
    assert torch.equal(fresh[0].weight, saved[0].weight)
