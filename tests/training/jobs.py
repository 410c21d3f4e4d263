"""Small training jobs in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["net", "run", "same_tensors", "stepped"]


def net(seed: int = 0, *, order: tuple[str, ...] = ("first", "norm", "last")) -> nn.Module:
    """Three layers, registered in any order; the forward pass does not depend on it."""
    torch.manual_seed(seed)
    layers = {"first": nn.Linear(5, 7), "norm": nn.BatchNorm1d(7), "last": nn.Linear(7, 3)}
    model = _Net()
    for name in order:
        model.add_module(name, layers[name])
    return model


class _Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, scheduler: Any = None) -> list[float]:
    """Trains on random batches; the global generator decides which, so it must be restored for equal losses."""
    losses: list[float] = []
    for _ in range(steps):
        x = torch.randn(6, 5)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
        if scheduler is not None:
            scheduler.step()
    return losses


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    run(model, optimizer, steps)


def same_tensors(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the last bit, types and all."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return same and torch.equal(a.detach().cpu(), b.detach().cpu())
    if isinstance(a, dict):
        return isinstance(b, dict) and set(a) == set(b) and all(same_tensors(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_tensors, a, b))
    return type(a) is type(b) and a == b
