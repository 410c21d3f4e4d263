"""Groups of live optimizers: names that several have, wrappers without groups, and schedulers that write into them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training

from .jobs import net, run, same_tensors, stepped
from .odd_optimizers import Coarse, Wrapper

AdamW = torch.optim.AdamW


def with_names(model: Any, order: tuple[str, ...], names: dict[str, str]) -> torch.optim.Optimizer:
    rates = {"first": 0.1, "norm": 0.01, "last": 0.001}
    return AdamW(
        [{"params": list(getattr(model, one).parameters()), "lr": rates[one], "name": names[one]} for one in order]
    )


@pytest.mark.parametrize("order", [("first", "norm", "last"), ("last", "norm", "first")])
def test_groups_of_one_name_are_told_apart_by_their_parameters(tmp_path: Path, order: tuple[str, ...]) -> None:
    names = {"first": "decay", "norm": "rest", "last": "decay"}
    model, fresh = net(), net(1)
    optimizer = with_names(model, ("first", "norm", "last"), names)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run(model, optimizer, 2, scheduler=schedule)
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedule))
    again = with_names(fresh, order, names)
    renewed = torch.optim.lr_scheduler.ExponentialLR(again, 0.1)
    training.restore(tmp_path / "c", fresh, again, scheduler=renewed)
    rates = {name: 0.25 * rate for name, rate in (("first", 0.1), ("norm", 0.01), ("last", 0.001))}
    assert [group["lr"] for group in again.param_groups] == pytest.approx([rates[one] for one in order])
    assert [group["name"] for group in again.param_groups] == [names[one] for one in order]
    assert renewed.gamma == 0.5 and renewed.base_lrs == [4 * group["lr"] for group in again.param_groups]
    torch.manual_seed(3)
    expected = run(model, optimizer, 2, scheduler=schedule)
    torch.manual_seed(3)
    assert run(fresh, again, 2, scheduler=renewed) == expected


def test_parts_of_an_optimizer_and_groups_without_parameters_may_have_one_name(tmp_path: Path) -> None:
    def make(model: Any, *rates: float) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(
                [{"params": list(part.parameters()), "name": "all", "lr": rate}, {"params": [], "name": "none"}],
                lr=0.5,
            )
            for part, rate in zip((model.first, model.last), rates, strict=True)
        ]

    model = net()
    parts = make(model, 0.1, 0.2)
    parts[1].param_groups[1]["lr"] = 0.125
    tc.save(tmp_path / "c", training.state(model, parts))
    again = make(model, 1.0, 2.0)
    training.restore(tmp_path / "c", model, again)
    assert [group["lr"] for one in again for group in one.param_groups] == [0.1, 0.5, 0.2, 0.125]


def test_state_dicts_of_torch_with_groups_of_one_name_are_taken(tmp_path: Path) -> None:
    names = dict.fromkeys(("first", "norm", "last"), "all")
    model, fresh = net(), net(1)
    optimizer = with_names(model, ("first", "norm", "last"), names)
    stepped(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    again = with_names(fresh, ("first", "norm", "last"), names)
    training.restore(tmp_path / "c.pt", fresh, again, rng=False)
    assert same_tensors(again.state_dict(), optimizer.state_dict())


class Writing(torch.optim.lr_scheduler.StepLR):
    """Sets hyper-parameters of its optimizer while it loads, from what it reads in the groups."""

    read: float = 0.0

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            self.read = float(group["lr"])
            group["lr"], group["betas"] = torch.tensor(9.0), (0.0, 0.0)
            if isinstance(group["marks"], list):
                group["marks"].append(0)


@pytest.mark.parametrize("wrap", [lambda o: o, Wrapper])
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_what_a_scheduler_writes_into_groups_while_it_loads_does_not_stay(tmp_path: Path, wrap: Any, rate: Any) -> None:
    def job(lr: Any) -> tuple[Any, Any, Any]:
        model = net()
        inner = AdamW([{"params": list(model.parameters()), "marks": [1, 2]}], lr=lr, foreach=False)
        return model, wrap(inner), Writing(inner, 3)

    model, optimizer, scheduler = job(rate)
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=scheduler))
    live = copy.copy(rate) * 0.25 if isinstance(rate, torch.Tensor) else 0.125
    model, again, renewed = job(live)
    training.restore(tmp_path / "c", model, again, scheduler=renewed)
    group = again.param_groups[0]
    assert group["lr"] == 0.5 and type(group["lr"]) is type(rate) and group["betas"] == (0.9, 0.999)
    assert group["marks"] == [1, 2] and renewed.read == 0.5
    assert not isinstance(rate, torch.Tensor) or group["lr"] is live
    model, again, renewed = job(0.125)
    training.restore(tmp_path / "c", model, again, scheduler=renewed, keep=("lr",))
    assert again.param_groups[0]["lr"] == 0.125 and again.param_groups[0]["betas"] == (0.9, 0.999)


def test_what_a_registered_scheduler_writes_while_it_loads_does_not_stay(tmp_path: Path) -> None:
    def job(lr: float) -> tuple[nn.Module, torch.optim.Optimizer, tc.Manager]:
        model = net()
        optimizer = AdamW([{"params": list(model.parameters()), "marks": None}], lr=lr)
        manager = tc.Manager(tmp_path, background=False)
        manager.register("scheduler", Writing(optimizer, 3))
        return model, optimizer, manager

    model, optimizer, manager = job(0.5)
    manager.save(1, training.state(model, optimizer))
    model, again, manager = job(0.125)
    manager.resume(model, again)
    assert again.param_groups[0]["lr"] == 0.5 and again.param_groups[0]["betas"] == (0.9, 0.999)


class Scaling:
    """Has no groups and no state of its own class: a scale beside the optimizer that it wraps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.scale = optimizer, 8.0

    def step(self, closure: Any = None) -> Any:
        self.scale *= 2
        return self.optimizer.step(closure)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]
        self.optimizer.load_state_dict(state_dict["inner"])


class Derived(torch.optim.Optimizer):
    """An optimizer by its class that never called its constructor, with all entries at one root."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.scale = optimizer, 8.0
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.scale *= 2
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: Any) -> None:
        self.scale = state_dict["scale"]
        self.optimizer.load_state_dict(state_dict)


class Masters(Derived):
    """Trains copies in single precision of the parameters, which it gives to the optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.model_parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.masters = [nn.Parameter(p.detach().double()) for p in self.model_parameters]
        optimizer.param_groups[0]["params"] = self.masters

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        loss = closure()
        for p, master in zip(self.model_parameters, self.masters, strict=True):
            master.grad = p.grad.double()
        super().step()
        for p, master in zip(self.model_parameters, self.masters, strict=True):
            p.data.copy_(master.data)
            p.grad = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": [p.detach().clone() for p in self.masters]}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for master, saved in zip(self.masters, state_dict["masters"], strict=True):
            master.data.copy_(saved)


@pytest.mark.parametrize("inner", [lambda p: AdamW(p, lr=0.01), Coarse], ids=["AdamW", "other dtypes"])
@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "in place"])
@pytest.mark.parametrize("kind", [Scaling, Derived, Masters])
def test_an_optimizer_without_groups_has_those_of_the_one_inside(
    tmp_path: Path, kind: Any, inner: Any, steps: int
) -> None:
    if kind is Masters and inner is Coarse:
        pytest.skip("needs no closure")
    model, fresh = net(), net(1)
    optimizer, again = kind(inner(model.parameters())), kind(inner(fresh.parameters()))
    stepped(model, optimizer, 3)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    expected = run(model, optimizer, 3)
    stepped(fresh, again, steps)
    report = training.restore(tmp_path / "c", fresh, again)
    assert (report.missing, report.unexpected, report.ignored) == ((), (), ())
    assert same_tensors(again.state_dict(), saved)
    assert run(fresh, again, 3) == expected


@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "in place"])
@pytest.mark.parametrize("kind", [Scaling, Derived, Masters])
def test_it_is_restored_where_it_is_registered(tmp_path: Path, kind: Any, steps: int) -> None:
    def job(seed: int, steps: int) -> tuple[nn.Module, Any, tc.Manager]:
        model = net(seed)
        optimizer = kind(AdamW(model.parameters(), lr=0.01))
        stepped(model, optimizer, steps)
        manager = tc.Manager(tmp_path, background=False)
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        return model, optimizer, manager

    model, optimizer, manager = job(0, 3)
    manager.save(1)
    saved = copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(5)
    expected = run(model, optimizer, 3)
    model, again, manager = job(1, steps)
    manager.restore()
    assert same_tensors(again.state_dict(), saved)
    torch.manual_seed(5)
    assert run(model, again, 3) == expected


def test_a_schedule_of_a_wrapper_without_groups_follows_the_inner_groups(tmp_path: Path) -> None:
    model = net()
    optimizer = Scaling(AdamW(model.parameters(), lr=0.5))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedule))
    assert "scheduler/base_lrs/by_group/first.bias" in tc.inspect(tmp_path / "c").by_path


class Nothing(torch.optim.Optimizer):
    """An optimizer by its class, without groups and without one inside."""

    def __init__(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        pass


def test_an_optimizer_without_groups_anywhere_is_refused_by_name() -> None:
    model = net()
    with pytest.raises(tc.TreeError, match=r"^optimizer: expected an optimizer with param_groups.* found a .*Nothing"):
        training.state(model, Nothing())
    with pytest.raises(tc.TreeError, match=r"^optimizer/a: .*Nothing"):
        training.restore(training.state(model), {"a": model}, {"a": Nothing()})
