"""The order of dimensions in memory of moments that a restore creates: the saved one, as torch's load_state_dict."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc

CHANNELS_LAST: Any = {"memory_format": torch.channels_last}


class Rotated(torch.optim.Optimizer):
    """Keeps moments by columns, as eigh and transposes leave them, some of another shape than the parameter's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.reshape(len(p), -1)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["basis"] = torch.linalg.eigh(grad @ grad.T)[1]
                    state["turned"] = torch.zeros_like(grad.t()).t() if p.ndim == 2 else torch.zeros_like(p)
                state["step"] += 1
                state["turned"] += p.grad
                p -= group["lr"] * (state["basis"] @ state["turned"].reshape(len(p), -1)).view_as(p)


def job(*, last: bool = False, steps: int = 0, kind: Any = Rotated) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 5))
    model = model.to(**CHANNELS_LAST) if last else model
    made = model, kind(model.parameters())
    for _ in range(steps):
        step(*made)
    return made


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(2, 3, 4, 4).to(**CHANNELS_LAST)).square().sum().backward()
    optimizer.step()


def orders(optimizer: Any) -> list[Any]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [{name: value.stride() for name, value in state.items()} for state in states]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [Rotated, torch.optim.AdamW])
@pytest.mark.parametrize("how", ["restore", "resume", "state dicts"])
def test_moments_of_a_fresh_optimizer_lie_as_they_did(kind: Any, last: bool, how: str, tmp_path: Path) -> None:
    model, optimizer = job(last=last, steps=2, kind=kind)
    fresh = job(last=last, kind=kind)
    if how == "restore":
        tc.save(tmp_path / "a", tc.training.state(model, optimizer))
        tc.training.restore(tmp_path / "a", *fresh)
    elif how == "resume":
        with tc.Manager(tmp_path) as manager:
            manager.save(2, tc.training.state(model, optimizer))
        with tc.Manager(tmp_path) as manager:
            assert manager.resume(*fresh) is not None
    else:
        tc.save(tmp_path / "a", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        tc.training.restore(tmp_path / "a", *fresh, rng=False)
    twin = job(last=last, kind=kind)
    twin[0].load_state_dict(copy.deepcopy(model.state_dict()))
    twin[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert orders(fresh[1]) == orders(twin[1]) == orders(optimizer)
    for one in ((model, optimizer), fresh):
        step(*one)
    for a, b in zip(model.parameters(), fresh[0].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_moments_of_a_used_optimizer_lie_as_they_were_saved(last: bool, turned: bool, tmp_path: Path) -> None:
    """Without `turned` rows become columns after the save, with it columns become rows."""
    model, optimizer = job(last=last, steps=1, kind=torch.optim.AdamW)
    weights = [p for p in model.parameters() if p.ndim == 2]
    states: list[dict[str, Any]] = [optimizer.state[p] for p in weights]

    def lie(turned: bool) -> None:
        for state in states:
            state["exp_avg"] = torch.randn(16, 5).t() if turned else torch.randn(5, 16)

    lie(turned)
    tc.save(tmp_path / "a", tc.training.state(model, optimizer))
    saved, there = copy.deepcopy(optimizer.state_dict()), orders(optimizer)
    lie(not turned)
    tc.training.restore(tmp_path / "a", model, optimizer)
    assert orders(optimizer) == there
    assert torch.equal(optimizer.state[weights[0]]["exp_avg"], saved["state"][2]["exp_avg"])


def test_a_moment_in_c_order_of_a_parameter_that_is_not_stays_in_c_order(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 3, bias=False)
        model.weight = nn.Parameter(torch.ones(4, 3).t())
        return model, torch.optim.SGD(model.parameters(), momentum=0.9)

    model, optimizer = made()
    optimizer.state[model.weight]["momentum_buffer"] = torch.randn(3, 4)
    tc.save(tmp_path / "a", tc.training.state(model, optimizer))
    fresh, other = made()
    tc.training.restore(tmp_path / "a", fresh, other)
    found = other.state[fresh.weight]["momentum_buffer"]
    assert fresh.weight.stride() == (1, 3)
    assert found.stride() == (4, 1)


def test_moments_of_files_without_orders_lie_as_their_parameters(tmp_path: Path) -> None:
    model, optimizer = job(steps=1, kind=torch.optim.AdamW)
    tc.save(tmp_path / "a", tc.training.state(model, optimizer))
    fresh, other = job(last=True, kind=torch.optim.AdamW)
    tc.training.restore(tmp_path / "a", fresh, other)
    weight = next(fresh.parameters())
    assert other.state[weight]["exp_avg"].is_contiguous(**CHANNELS_LAST)


def test_objects_get_their_arrays_in_the_saved_order(tmp_path: Path) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.held: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"held": self.held}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.held = state["held"]

    keeper, fresh = Keeper(), Keeper()
    keeper.held = torch.randn(3, 4).t()
    model = nn.Linear(2, 2)
    tc.save(tmp_path / "a", tc.training.state(model, extra={"keeper": keeper}))
    tc.training.restore(tmp_path / "a", model, extra={"keeper": fresh})
    assert torch.equal(fresh.held, keeper.held)
    assert fresh.held.stride() == (1, 4)
