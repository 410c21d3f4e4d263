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
from treeckpt.training._moments import expected_moments

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


def test_a_disabled_scaler_leaves_what_was_saved_of_another_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`load_state_dict` of a `GradScaler(enabled=False)` does nothing; before, no word was said."""
    model = torch.nn.Linear(2, 2)
    tc.save(tmp_path / "c", training.state(model, rng=False, extra={"scaler": torch.amp.GradScaler("cpu")}))
    off = {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    report = training.restore(tmp_path / "c", model, rng=False, extra=off)
    assert report.ignored == ("extra/scaler",)
    tc.load_into(tmp_path / "c", {"extra": off}, strict="missing")
    words = "extra/scaler: what was saved of a GradScaler was not restored: the one here has enabled=False"
    assert [record.getMessage() for record in caplog.records] == [words, words]
    tc.save(tmp_path / "off", {"extra": off})
    tc.load_into(tmp_path / "off", {"extra": off})
    assert len(caplog.records) == 2


def test_an_enabled_scaler_for_which_a_disabled_one_was_saved_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    """torch raises a `RuntimeError`, after the model was filled."""
    model = torch.nn.Linear(2, 2)
    off = {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    tc.save(tmp_path / "c", training.state(model, rng=False, extra=off))
    other = torch.nn.Linear(2, 2)
    before = other.weight.detach().clone()
    on: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu")}
    with pytest.raises(tc.MismatchError, match=r"extra/scaler: .*found that of one with enabled=False.*`\.\.\.`"):
        training.restore(tmp_path / "c", other, rng=False, extra=on)
    assert torch.equal(other.weight, before)
    training.restore(tmp_path / "c", other, rng=False, extra={"scaler": ...})
    assert torch.equal(other.weight, model.weight)


class Refuses:
    """An object whose `load_state_dict` raises."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError(f"of another version: {state}")


@pytest.mark.parametrize("part", ["scheduler", "loader", "extra"])
def test_an_object_that_raises_as_it_takes_its_state_is_named_with_what_has_changed(tmp_path: Path, part: str) -> None:
    model = torch.nn.Linear(2, 2)
    given: dict[str, Any] = {part: {"it": Refuses()}}
    tc.save(tmp_path / "c", training.state(model, rng=False, **given))
    with pytest.raises(ValueError, match="of another version") as caught:
        training.restore(tmp_path / "c", model, rng=False, **given)
    assert caught.value.__notes__ == [
        f"raised by Refuses.load_state_dict for {part}/it; the arrays of the target are filled already"
    ]
