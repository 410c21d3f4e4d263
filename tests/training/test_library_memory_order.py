"""Optimizers of pytorch_optimizer that keep moments by columns: strides and training as after torch.save."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc

pytestmark = pytest.mark.slow
library = pytest.importorskip("pytorch_optimizer")
NAMES = ("LoRARite", "SPlus", "SOAP", "Shampoo", "GaLore", "Kron", "AdaFactor", "SM3")


def job(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    left, right = nn.Linear(12, 4, bias=False), nn.Linear(4, 8, bias=False)
    model = nn.Sequential(left, right)
    return model, getattr(library, name)(model.parameters(), lr=1e-2)


def train(one: tuple[nn.Module, Any], steps: int) -> None:
    model, optimizer = one
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(16, 12)).square().mean().backward()
        optimizer.step()


def moments(optimizer: Any) -> list[Any]:
    def shown(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.stride(), value.tolist()
        if isinstance(value, (list, tuple)):
            return [shown(item) for item in value]
        return value if isinstance(value, (int, float, str, bool)) else type(value).__name__

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [{key: shown(value) for key, value in optimizer.state[p].items()} for p in parameters]


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(library, name)])
def test_moments_lie_and_train_as_after_torch_save(name: str, tmp_path: Path) -> None:
    one, twin, fresh = job(name), job(name), job(name)
    train(one, 3)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in one], file)
    file.seek(0)
    for part, state in zip(twin, torch.load(file, weights_only=False), strict=True):
        part.load_state_dict(state)
    tc.save(tmp_path / "a", tc.training.state(*one, rng=False))
    tc.training.restore(tmp_path / "a", *fresh, rng=False)
    assert moments(fresh[1]) == moments(twin[1])
    for other in (twin, fresh):
        train(other, 4)
    assert moments(fresh[1]) == moments(twin[1])
    for a, b in zip(fresh[0].parameters(), twin[0].parameters(), strict=True):
        assert torch.equal(a, b)
