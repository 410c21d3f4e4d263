"""Models whose `state_dict` hooks give parameters other names and shapes, and their training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PARTS = ("wq", "wk", "wv")


class Attention(nn.Module):
    """One fused matrix, saved as three: as views of it, or as tensors of their own, turned."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.wqkv, self.turned = nn.Linear(4, 12, bias=False), turned
        self.register_state_dict_post_hook(split_fused)
        self.register_load_state_dict_pre_hook(join_fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wqkv(x)[:, :4]


def split_fused(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, part in zip(PARTS, state.pop(f"{prefix}wqkv.weight").chunk(3), strict=True):
        state[f"{prefix}{name}.weight"] = part.t().contiguous() if module.turned else part


def join_fused(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    parts = [state.pop(f"{prefix}{name}.weight") for name in PARTS if f"{prefix}{name}.weight" in state]
    if parts:
        state[f"{prefix}wqkv.weight"] = torch.cat([part.t() if module.turned else part for part in parts])


class Plain(nn.Module):
    """The same, of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(4, 4, bias=False) for _ in PARTS)


def job(seed: int, *, turned: bool, wrap: Any = lambda model: model) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(nn.Sequential(Attention(turned=turned), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> list[float]:
    losses = []
    for number in range(count):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
