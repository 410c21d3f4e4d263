"""What an optimizer's own `state_dict` has comes back, whatever its form and however parameters stand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training
from treeckpt.training._hfai import load, save

from .jobs import net, run, same_tensors, stepped
from .odd_optimizers import KINDS, Counting, Lookahead, Slow, Wrapper

AdamW = torch.optim.AdamW


def _sources(path: Path, model: nn.Module, optimizer: Any) -> list[Any]:
    tc.save(path / "c", training.state(model, optimizer))
    return [path / "c", training.state(model, optimizer, buffers="per_rank")]


@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_state_dict_has_comes_back_exactly(tmp_path: Path, kind: str, steps: int) -> None:
    model = net()
    optimizer = KINDS[kind](model.parameters())
    stepped(model, optimizer, 5)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    expected_state = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, optimizer.state_dict()
    )
    expected = run(model, optimizer, 3)
    fresh = net(1)
    again = KINDS[kind](fresh.parameters())
    stepped(fresh, again, steps)
    report = training.restore(tmp_path / "c", fresh, again)
    assert (report.missing, report.unexpected, report.ignored) == ((), (), ())
    assert same_tensors(again.state_dict(), expected_state)
    assert run(fresh, again, 3) == expected


@pytest.mark.parametrize("how", ["load_into", "manager", "manager, fresh"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_exactly_without_names_too(tmp_path: Path, kind: str, how: str) -> None:
    def job(seed: int, steps: int) -> tuple[nn.Module, Any, tc.Manager]:
        model = net(seed)
        optimizer = KINDS[kind](model.parameters())
        stepped(model, optimizer, steps)
        manager = tc.Manager(tmp_path, background=False)
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        return model, optimizer, manager

    model, optimizer, manager = job(0, 5)
    manager.save(1)
    saved = copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(5)
    expected = run(model, optimizer, 3)
    model, again, manager = job(1, 0 if how == "manager, fresh" else 3)
    if how == "load_into":
        tc.load_into(manager.path(1), {"registered": {"model": model, "optimizer": again}})
    else:
        manager.restore()
    assert same_tensors(again.state_dict(), saved)
    torch.manual_seed(5)
    assert run(model, again, 3) == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lists of tensors"])
def test_it_follows_parameters_in_another_order(tmp_path: Path, kind: str) -> None:
    model = net()
    optimizer = KINDS[kind](model.parameters())
    stepped(model, optimizer, 5)
    sources = _sources(tmp_path, model, optimizer)
    copies = []
    for source in sources:
        fresh = net(1, order=("last", "norm", "first"))
        again = KINDS[kind](fresh.parameters())
        training.restore(source, fresh, again)
        copies.append((fresh, again))
    torch.manual_seed(5)
    expected = run(model, optimizer, 3)
    for fresh, again in copies:
        torch.manual_seed(5)
        assert run(fresh, again, 3) == expected


def test_per_parameter_parts_are_keyed_by_names(tmp_path: Path) -> None:
    model = net()
    optimizer = Slow(AdamW(model.parameters(), lr=0.01))
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    paths = tc.inspect(tmp_path / "c").by_path
    assert "optimizer/first.weight/state_dict/slow/slow" in paths
    assert "optimizer/first.weight/state_dict/base.state/exp_avg" in paths


def test_groups_in_another_order_keep_their_values(tmp_path: Path) -> None:
    def make(model: nn.Module, names: tuple[str, ...]) -> Any:
        rates = {"first": 0.02, "norm": 0.01, "last": 0.003}
        return Slow(AdamW([{"params": getattr(model, name).parameters(), "lr": rates[name]} for name in names]))

    model, fresh = net(), net(1)
    optimizer = make(model, ("first", "norm", "last"))
    optimizer.param_groups[0]["lr"] = 0.5
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    again = make(fresh, ("last", "first", "norm"))
    training.restore(tmp_path / "c", fresh, again)
    assert [group["lr"] for group in again.param_groups] == [0.003, 0.5, 0.01]
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert same_tensors(dict(again.optimizer.state[q]), dict(optimizer.optimizer.state[p]))
        assert same_tensors(again.state[q], optimizer.state[p])


@pytest.mark.parametrize("wrap", [Lookahead, Wrapper])
def test_lost_moments_behind_a_wrapper_are_noticed(tmp_path: Path, wrap: Any) -> None:
    model = net()
    optimizer = wrap(AdamW(model.parameters()))
    stepped(model, optimizer)
    tree = training.state(model, optimizer)
    del tree["optimizer"]["last.weight"]["exp_avg_sq"]
    tc.save(tmp_path / "c", tree)
    fresh = net(1)
    with pytest.raises(tc.MismatchError, match=r"optimizer/last.weight/exp_avg_sq: .*1 missing"):
        training.restore(tmp_path / "c", fresh, wrap(AdamW(fresh.parameters())))


def test_an_optimizer_and_what_wraps_it_save_the_same(tmp_path: Path) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.02)
    stepped(model, optimizer)
    trees = [training.state(model, one, rng=False) for one in (optimizer, Wrapper(optimizer))]
    assert same_tensors(*(tree["optimizer"] for tree in trees))
    assert same_tensors(*(tree["param_groups"] for tree in trees))
    tc.save(tmp_path / "c", trees[1])
    fresh = net(1)
    again = AdamW(fresh.parameters())
    training.restore(tmp_path / "c", fresh, again, rng=False)
    assert same_tensors(again.state_dict(), optimizer.state_dict())


def test_entries_that_only_one_side_has_are_named(tmp_path: Path) -> None:
    model, fresh = net(), net(1)
    plain, counting = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Counting(fresh.parameters())
    stepped(model, plain)
    stepped(fresh, counting)
    tc.save(tmp_path / "plain", training.state(model, plain))
    tc.save(tmp_path / "counting", training.state(fresh, counting))
    with pytest.raises(tc.MismatchError, match=r"param_groups/state_dict/count: .*missing"):
        training.restore(tmp_path / "plain", fresh, counting)
    report = training.restore(tmp_path / "plain", fresh, counting, strict=False)
    assert set(report.missing) > {"param_groups/state_dict/count", "param_groups/state_dict/more"}
    assert counting.count == 2 and torch.equal(
        counting.state[fresh.last.bias]["momentum_buffer"], plain.state[model.last.bias]["momentum_buffer"]
    )
    with pytest.raises(tc.MismatchError, match=r"not here: .*state_dict"):
        training.restore(tmp_path / "counting", model, plain)
    training.restore(tmp_path / "counting", model, plain, strict=False)
    assert set(plain.state[model.last.bias]) == {"momentum_buffer"}


def test_moments_are_not_cast_by_the_optimizer_s_own_load(tmp_path: Path) -> None:
    model, fresh = net().bfloat16(), net(1).bfloat16()
    optimizer, again = Wrapper(AdamW(model.parameters())), Wrapper(AdamW(fresh.parameters()))
    for p in model.parameters():
        moments = {"exp_avg": torch.randn(p.shape), "exp_avg_sq": torch.rand(p.shape)}
        optimizer.state[p] = {"step": torch.tensor(3.0), **moments}
    tc.save(tmp_path / "c", training.state(model, optimizer))
    training.restore(tmp_path / "c", fresh, again)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert same_tensors(again.state[q], optimizer.state[p])


def test_tensors_that_others_hold_stay_the_same_objects(tmp_path: Path) -> None:
    rate = torch.tensor(0.25)
    model = net()
    optimizer = Wrapper(AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False))
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = net(1)
    again = Wrapper(AdamW(fresh.parameters(), lr=rate, foreach=False))
    stepped(fresh, again)
    before = {name: again.state[p]["exp_avg"].data_ptr() for name, p in fresh.named_parameters()}
    training.restore(tmp_path / "c", fresh, again)
    assert again.param_groups[0]["lr"] is rate and rate == 0.5
    assert before == {name: again.state[p]["exp_avg"].data_ptr() for name, p in fresh.named_parameters()}


def test_hyper_parameters_that_are_kept_stay_wherever_they_stand(tmp_path: Path) -> None:
    model = net()
    optimizer, again = (Slow(AdamW(model.parameters(), lr=lr)) for lr in (0.5, 0.25))
    tc.save(tmp_path / "c", training.state(model, optimizer))
    training.restore(tmp_path / "c", model, again, keep=("lr",))
    assert again.param_groups[0]["lr"] == 0.25


class Forgetful(torch.optim.SGD):
    """Gives a number, and does not take it back."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


def test_what_an_optimizer_does_not_take_back_is_named(tmp_path: Path) -> None:
    model = net()
    optimizer = Forgetful(model.parameters(), lr=0.1)
    optimizer.count = 5
    tc.save(tmp_path / "c", training.state(model, optimizer))
    report = training.restore(tmp_path / "c", model, Forgetful(model.parameters(), lr=0.1))
    assert report.ignored == ("param_groups/state_dict/count",)


class Derived(torch.optim.SGD):
    """Has something that it makes anew from its groups when state is set."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.total = lr

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.total = sum(group["lr"] for group in self.param_groups)


def test_what_an_optimizer_derives_from_its_state_is_made_anew(tmp_path: Path) -> None:
    model = net()
    tc.save(tmp_path / "c", training.state(model, Derived(model.parameters(), 0.5)))
    training.restore(tmp_path / "c", model, again := Derived(model.parameters(), 0.1))
    assert again.total == 0.5


class Numbered(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [Counting, lambda p: Numbered(p, lr=0.1)], ids=["own state dict", "state"])
def test_parts_of_an_optimizer_keep_what_they_differ_in(tmp_path: Path, kind: Any) -> None:
    def make(model: nn.Module) -> list[Any]:
        return [kind(part.parameters()) for part in model.children()]

    model, fresh = net(), net(1)
    optimizers, again = make(model), make(fresh)
    for number, optimizer in enumerate(optimizers):
        stepped(model, optimizer, number + 1)
    tc.save(tmp_path / "c", training.state(model, optimizers))
    training.restore(tmp_path / "c", fresh, again[::-1])
    assert [same_tensors(a.state_dict(), b.state_dict()) for a, b in zip(again, optimizers, strict=True)] == [True] * 3
    with pytest.raises(tc.MismatchError, match="param_groups/state_dict: expected one value"):
        training.restore(tmp_path / "c", fresh, kind(fresh.parameters()))


def test_two_optimizers_keep_their_own(tmp_path: Path) -> None:
    def make(models: dict[str, Any]) -> dict[str, Any]:
        return {"a": Counting(models["a"].parameters()), "b": Lookahead(AdamW(models["b"].parameters()))}

    models, fresh = {"a": net(0), "b": net(1)}, {"b": net(2), "a": net(3)}
    optimizers, again = make(models), make(fresh)
    for name in models:
        stepped(models[name], optimizers[name], 3)
    tc.save(tmp_path / "c", training.state(models, optimizers))
    training.restore(tmp_path / "c", fresh, again)
    assert all(same_tensors(again[name].state_dict(), optimizers[name].state_dict()) for name in models)


def test_a_schedule_of_the_wrapped_optimizer_follows_its_groups(tmp_path: Path) -> None:
    class Scheduled:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def state_dict(self) -> Any:
            return self.scheduler.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.scheduler.load_state_dict(state)

    def make(model: nn.Module, names: tuple[str, str]) -> tuple[Any, Any]:
        rates = {"first": 0.5, "last": 0.25}
        optimizer = AdamW([{"params": getattr(model, name).parameters(), "lr": rates[name]} for name in names])
        return Wrapper(optimizer), Scheduled(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    model, fresh = net(), net(1)
    optimizer, schedule = make(model, ("first", "last"))
    stepped(model, optimizer)
    schedule.scheduler.step()
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedule))
    again, renewed = make(fresh, ("last", "first"))
    training.restore(tmp_path / "c", fresh, again, scheduler=renewed)
    assert renewed.scheduler.base_lrs == [0.25, 0.5] and renewed.scheduler.get_last_lr() == [0.125, 0.25]


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_of_hfai_gives_the_state_dict(tmp_path: Path, kind: str) -> None:
    model = net()
    optimizer = KINDS[kind](model.parameters())
    stepped(model, optimizer, 3)
    save(tmp_path / "c", model, optimizer)
    assert same_tensors(load(tmp_path / "c")["optimizer"], optimizer.state_dict())


def test_a_guard_holds_the_step_of_what_is_wrapped(tmp_path: Path) -> None:
    model = net()
    optimizer = Lookahead(AdamW(model.parameters()))
    pending = tc.save_async(
        tmp_path / "c", training.state(model, optimizer), background=tc.BackgroundOptions(staging="lazy")
    )
    training.guard(optimizer, pending)
    before = model.first.weight.detach().clone()
    stepped(model, optimizer, 1)
    pending.result()
    assert torch.equal(tc.load(tmp_path / "c")["model"]["first.weight"], before)
