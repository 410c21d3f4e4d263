"""A small training for every optimizer of torch.optim."""

from __future__ import annotations

from typing import Any

import torch

from tests.training.jobs import net

__all__ = ["OPTIMIZERS", "torch_job"]


class _Matrices(torch.nn.Module):
    """A model of matrices alone, as Muon trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


class _Rows(torch.nn.Module):
    """A table with sparse gradients, as SparseAdam trains."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x.abs() * 3).long().clamp(max=8))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    name: {} for name in torch.optim.__all__ if name[0].isupper() and name not in ("Optimizer", "SGD", "Adam")
}
OPTIMIZERS |= {"SGD": {"lr": 0.1}, "SGD with momentum": {"lr": 0.1, "momentum": 0.9}}
OPTIMIZERS |= {"Adam": {"amsgrad": True}, "RMSprop": {"momentum": 0.5, "centered": True}}


def torch_job(name: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and one of the optimizers, with two groups where it takes several."""
    torch.manual_seed(seed)
    kind = name.partition(" ")[0]
    model: torch.nn.Module = _Matrices() if kind == "Muon" else _Rows() if kind == "SparseAdam" else net(seed)
    parameters = list(model.parameters())
    halves = [{"params": parameters[:1], "lr": 0.01}, {"params": parameters[1:]}]
    one = kind in ("LBFGS", "SparseAdam")
    return model, getattr(torch.optim, kind)(parameters if one else halves, **OPTIMIZERS[name])
