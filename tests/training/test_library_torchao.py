"""torchao: 8-bit, 4-bit and float8 moments, quantised and float8 weights; compared with training without a break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
optim = pytest.importorskip("torchao.optim")
quantization = pytest.importorskip("torchao.quantization")


@pytest.fixture(autouse=True)
def without_compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """inductor's cache on disk takes the code of one subclass for another one's."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")


def job(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    return model, getattr(optim, name)(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, first: int, stop: int) -> None:
    for step in range(first, stop):
        torch.manual_seed(step)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    model, optimizer = job(name)
    train(model, optimizer, 0, 5)
    tc.save(tmp_path / "state", training.state(model, optimizer, rng=False))
    tc.save(tmp_path / "dicts", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "torch.pt")
    fresh, used, dicts, torchs = (job(name, seed=1) for _ in range(4))
    train(*used, 0, 2)
    for one in (fresh, used):
        training.restore(tmp_path / "state", *one, rng=False)
    for (other, theirs), found in (
        (dicts, tc.load(tmp_path / "dicts")),
        (torchs, torch.load(tmp_path / "torch.pt", weights_only=False)),
    ):
        other.load_state_dict(found["model"])
        theirs.load_state_dict(found["optimizer"])
    train(model, optimizer, 5, 10)
    for other, theirs in (fresh, used, dicts, torchs):
        train(other, theirs, 5, 10)
        assert same(model, other)


@pytest.mark.parametrize(
    "config",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig",
     "Int8DynamicActivationIntxWeightConfig"],
)  # fmt: skip
def test_quantised_weights(tmp_path: Path, config: str) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 128)).to(torch.bfloat16)
        quantization.quantize_(model, getattr(quantization, config)())
        return model

    model, other = made(0), made(1)
    weight = model[0].weight
    names, context = weight.__tensor_flatten__()
    tc.save(tmp_path / "a", model.state_dict())
    found = tc.load(tmp_path / "a")["0.weight"]
    assert type(found) is type(weight)
    assert found.__tensor_flatten__() == (names, context)
    assert all(torch.equal(getattr(found, name), getattr(weight, name)) for name in names)
    tc.save(tmp_path / "b", training.state(model, rng=False))
    live = list(map(id, other.parameters()))
    training.restore(tmp_path / "b", other, rng=False)
    assert live == list(map(id, other.parameters()))
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    assert torch.equal(model(x), other(x))
