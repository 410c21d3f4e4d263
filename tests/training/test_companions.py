"""What trains beside a model: averages, scalers, schedules and the rarer optimizers come back to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import treeckpt as tc
from treeckpt import training
from treeckpt.training.moments import expected_moments

from .jobs import net, run, same_tensors, stepped

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambdas with state": lambda o: torch.optim.lr_scheduler.LambdaLR(o, Decay()),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=[0.001], cooldown=1),
    "averaging": lambda o: SWALR(o, 0.05, anneal_epochs=3),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LambdaLR(o, Decay()), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


class Decay:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_with_state_of_their_own_go_on(tmp_path: Path, name: str) -> None:
    def step(optimizer: Any, schedule: Any) -> float:
        optimizer.step()
        schedule.step(1.0) if name == "plateau" else schedule.step()
        return optimizer.param_groups[0]["lr"]

    model, fresh = net(), net(1)
    optimizer, again = (torch.optim.SGD(one.parameters(), lr=0.4) for one in (model, fresh))
    schedule, renewed = SCHEDULES[name](optimizer), SCHEDULES[name](again)
    for _ in range(3):
        step(optimizer, schedule)
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedule))
    training.restore(tmp_path / "c", fresh, again, scheduler=renewed)
    assert [step(again, renewed) for _ in range(5)] == [step(optimizer, schedule) for _ in range(5)]


def test_averages_of_a_model_are_a_model_or_an_extra(tmp_path: Path) -> None:
    def job(seed: int) -> tuple[nn.Module, Any, AveragedModel, Any]:
        model = net(seed)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if seed == 0 else 2.0)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), average, scaler

    model, optimizer, average, scaler = job(0)
    for _ in range(3):
        stepped(model, optimizer)
        average.update_parameters(model)
    tc.save(tmp_path / "a", training.state({"model": model, "ema": average}, optimizer, extra={"scaler": scaler}))
    tc.save(tmp_path / "b", training.state(model, optimizer, extra={"ema": average, "scaler": scaler}))
    for path in ("a", "b"):
        fresh, again, ema, other = job(1)
        models, extra = ({"model": fresh, "ema": ema}, {}) if path == "a" else (fresh, {"ema": ema})
        training.restore(tmp_path / path, models, again, extra={**extra, "scaler": other})
        assert same_tensors(dict(ema.state_dict()), dict(average.state_dict())) and int(ema.n_averaged) == 3
        assert other.state_dict() == scaler.state_dict() and other.get_scale() == 8.0


def test_sparse_and_orthogonal_moments_come_back(tmp_path: Path) -> None:
    def sparse(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        table = nn.Embedding(9, 3, sparse=True)
        return table, torch.optim.SparseAdam(table.parameters(), lr=0.1)

    def step(table: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        table(torch.tensor([1, 4, 4])).square().sum().backward()
        optimizer.step()
        return table.weight.detach().clone()

    table, optimizer = sparse(0)
    step(table, optimizer)
    tc.save(tmp_path / "sparse", training.state(table, optimizer))
    fresh, again = sparse(1)
    training.restore(tmp_path / "sparse", fresh, again)
    assert torch.equal(step(fresh, again), step(table, optimizer))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has none")
def test_momentum_of_matrices_comes_back_and_is_known(tmp_path: Path) -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]

    model, fresh = net(), net(1)
    optimizers, again = make(model), make(fresh)
    for optimizer in optimizers:
        stepped(model, optimizer, 3)
    tc.save(tmp_path / "c", training.state(model, optimizers))
    matrix = fresh.get_parameter("first.weight")
    assert expected_moments(again[0], again[0].param_groups[0], matrix) == {"momentum_buffer"}
    training.restore(tmp_path / "c", fresh, again)
    torch.manual_seed(3)
    expected = [run(model, optimizer, 2) for optimizer in optimizers]
    torch.manual_seed(3)
    assert [run(fresh, optimizer, 2) for optimizer in again] == expected
