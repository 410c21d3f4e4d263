"""A state of frozen arrays and trained ones that take turns, as that of a LoRA training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import treeckpt as tc

__all__ = ["FROZEN", "NBYTES", "Adapted", "assert_same", "data_nbytes", "write_adapted"]

FROZEN = 3
NBYTES = 300_000 * 4


class Adapted:
    """A state of frozen arrays and trained ones that take turns, as LoRA's."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.frozen = [
            torch.nn.Parameter(torch.randn(300_000, generator=generator), requires_grad=False) for _ in range(FROZEN)
        ]
        self.trained = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(FROZEN)]
        self.step = 0

    def train(self) -> dict[str, Any]:
        self.step += 1
        with torch.no_grad():
            for parameter in self.trained:
                parameter += 1
        layers = {f"layer{i}": {"base": self.frozen[i], "adapter": self.trained[i]} for i in range(FROZEN)}
        return {**layers, "step": self.step}


def assert_same(path: Any, tree: dict[str, Any]) -> None:
    loaded = tc.load(path)
    assert loaded["step"] == tree["step"]
    for name, layer in tree.items():
        if name != "step":
            for key, parameter in layer.items():
                assert torch.equal(loaded[name][key], parameter), (name, key)


def data_nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("shard-*"))


def write_adapted(run: Path, steps: int = 4) -> Adapted:
    """Writes a run of incremental saves, where what is frozen lies with step 1; returns the state."""
    state = Adapted()
    with tc.Manager(run, keep=None, incremental=True, background=False) as manager:
        for step in range(1, steps + 1):
            manager.save(step, state.train())
    return state
