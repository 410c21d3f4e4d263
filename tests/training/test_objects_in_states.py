"""Objects that stand inside the state of another: their states are loaded into the live ones, which stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, SequentialLR

import treeckpt as tc
from treeckpt import training

Restore = Callable[[Path, Any, Any], None]
"""(path, saved object, object here): saves the first and restores it into the second."""


class Inner:
    """An object with a state."""

    def __init__(self, n: int = 0, array: torch.Tensor | None = None) -> None:
        self.n, self.array = n, array

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n} | ({} if self.array is None else {"array": self.array})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n, self.array = state["n"], state.get("array")


class Owner:
    """An object whose state is all of its attributes, another object among them."""

    def __init__(self, inner: Any, count: int = 0) -> None:
        self.inner, self.count = inner, count

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class OwnedModule(nn.Module):
    """A module whose extra state holds an object."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.zeros(2)), inner

    def get_extra_state(self) -> Any:
        return {"inner": self.inner}

    def set_extra_state(self, state: Any) -> None:
        self.inner = state["inner"]


class WholeModule(OwnedModule):
    """A module whose extra state is an object."""

    def get_extra_state(self) -> Any:
        return self.inner

    def set_extra_state(self, state: Any) -> None:
        self.inner = state


class OwnedOptimizer(torch.optim.SGD):
    """An optimizer whose state holds an object."""

    def __init__(self, inner: Any) -> None:
        super().__init__([nn.Parameter(torch.ones(2))], lr=0.1)
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": [self.inner]}

    def load_state_dict(self, state: Any) -> None:
        rest = dict(state)
        [self.inner] = rest.pop("more")
        super().load_state_dict(rest)


class GroupOptimizer(torch.optim.SGD):
    """An optimizer with an object among the hyper-parameters of a group."""

    def __init__(self, inner: Any) -> None:
        super().__init__([{"params": [nn.Parameter(torch.ones(2))], "inner": inner}], lr=0.1)

    @property
    def inner(self) -> Any:
        return self.param_groups[0]["inner"]


class Warmup(LRScheduler):
    """A schedule that gives way to another, which it keeps in an attribute, as that of the warm-up package."""

    def __init__(self, optimizer: Any, steps: int, after: Any) -> None:
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch <= self.steps or self.after is None:
            return [rate * min(1.0, self.last_epoch / self.steps) for rate in self.base_lrs]
        return self.after.get_lr()

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= self.steps and self.after is not None:
            self.after.step()
            self.last_epoch += 1
        else:
            super().step(epoch)


def _load_into(path: Path, saved: Any, here: Any) -> None:
    tc.save(path, {"it": saved})
    tc.load_into(path, {"it": here})


def _copy_into(path: Path, saved: Any, here: Any) -> None:
    tc.trees.copy_into({"it": saved}, {"it": here})


def _register(path: Path, saved: Any, here: Any) -> None:
    for one, act in ((saved, "save"), (here, "restore")):
        manager = tc.Manager(path, background=False)
        manager.register("it", one)
        manager.save(1) if act == "save" else manager.restore()


def _register_reader(path: Path, saved: Any, here: Any) -> None:
    for one, act in ((saved, "save"), (here, "restore")):
        manager = tc.Manager(path, background=False)
        manager.register_io_state("it", one)
        manager.save(1) if act == "save" else manager.restore()


def _part(**places: Callable[[Any], Any]) -> dict[str, Restore]:
    """Ways to restore an object as a part of a training state: from a path, by a manager, and from a tree."""

    def arguments(one: Any) -> tuple[list[Any], dict[str, Any]]:
        given = {name: place(one) for name, place in places.items()}
        model = given.pop("model", None) or nn.Linear(1, 1)
        return [model, given.pop("optimizer", None)], {"rng": False, **given}

    def path(at: Path, saved: Any, here: Any) -> None:
        args, options = arguments(saved)
        tc.save(at, training.state(*args, **options))
        args, options = arguments(here)
        training.restore(at, *args, **options)

    def resume(at: Path, saved: Any, here: Any) -> None:
        manager = tc.Manager(at, background=False)
        args, options = arguments(saved)
        manager.save(1, training.state(*args, **options))
        args, options = arguments(here)
        manager.resume(*args, **options)

    def tree(at: Path, saved: Any, here: Any) -> None:
        args, options = arguments(saved)
        source = training.state(*args, **options)
        args, options = arguments(here)
        training.restore(source, *args, **options)

    return {"path": path, "resume": resume, "tree": tree}


def _model_of(optimizer: Any) -> Any:
    model = nn.Module()
    model.weight = optimizer.param_groups[0]["params"][0]
    return model


def _same(one: Any) -> Any:
    return one


TREES: dict[str, Restore] = {"load_into": _load_into, "copy_into": _copy_into, "register": _register}
EXTRA = {f"extra {name}": way for name, way in _part(extra=lambda one: {"it": one}).items()}
CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Restore], str]] = {
    "object": (Owner, TREES | EXTRA, "inner"),
    "scheduler": (Owner, _part(scheduler=_same), "inner"),
    "loader": (Owner, _part(loader=_same) | {"reader": _register_reader}, "inner"),
    "loaders": (Owner, _part(loader=lambda one: {"train": one}), "inner"),
    "module": (OwnedModule, TREES | EXTRA | _part(model=_same), "_extra_state/inner"),
    "whole extra state": (WholeModule, TREES | EXTRA | _part(model=_same), "_extra_state"),
    "optimizer": (OwnedOptimizer, TREES | EXTRA | _part(model=_model_of, optimizer=_same), "more/0"),
    "group": (GroupOptimizer, _part(model=_model_of, optimizer=_same), "inner"),
}
WAYS = [(case, way) for case, (_, ways, _) in CASES.items() for way in ways]


@pytest.mark.parametrize(("case", "way"), WAYS)
@pytest.mark.parametrize("size", [None, 2, 3])
def test_the_saved_state_is_loaded_into_the_live_object_which_stays(
    tmp_path: Path, case: str, way: str, size: int | None
) -> None:
    """Arrays of the object may be of another size here (2 where 3 was saved)."""
    make, ways, _ = CASES[case]
    inner = Inner(1, None if size is None else torch.zeros(size))
    here = make(inner)
    ways[way](tmp_path / "c", make(Inner(7, None if size is None else torch.ones(3))), here)
    assert here.inner is inner and inner.n == 7
    assert size is None or (inner.array is not None and inner.array.tolist() == [1, 1, 1])


@pytest.mark.parametrize(("case", "way"), WAYS)
def test_a_state_without_a_live_object_is_refused_by_path_before_anything_changes(
    tmp_path: Path, case: str, way: str
) -> None:
    make, ways, below = CASES[case]
    here = make(None)
    with pytest.raises(tc.MismatchError, match="expected a Inner to load its saved state into, found none") as caught:
        ways[way](tmp_path / "c", make(Inner(7)), here)
    assert caught.value.path is not None and caught.value.path.endswith(below)
    assert here.inner is None


def test_an_object_that_has_none_in_the_checkpoint_becomes_what_was_saved(tmp_path: Path) -> None:
    """As with torch: the state of the object around it says None."""
    here = Owner(Inner(3), 1)
    _load_into(tmp_path / "c", Owner(None, 5), here)
    assert here.inner is None and here.count == 5


def test_objects_stand_in_each_other_at_any_depth(tmp_path: Path) -> None:
    leaf, middle = Inner(), Owner(None)
    middle.inner = {"deep": [leaf]}
    here = Owner(middle)
    _load_into(tmp_path / "c", Owner(Owner({"deep": [Inner(4)]}, 2), 1), here)
    assert here.inner is middle and middle.inner["deep"][0] is leaf
    assert (here.count, middle.count, leaf.n) == (1, 2, 4)


def test_an_object_in_its_own_state_is_refused_as_it_is_saved(tmp_path: Path) -> None:
    owner = Owner(None)
    owner.inner = [Owner(owner)]
    with pytest.raises(tc.TreeError, match=r"^it/inner/0/inner: .*that stands in its own state"):
        tc.save(tmp_path / "c", {"it": owner})
    with pytest.raises(tc.TreeError, match=r"^scheduler/inner/0/inner: "):
        training.state(nn.Linear(1, 1), scheduler=owner)


@pytest.mark.parametrize("part", ["scheduler", "loader", "extra"])
def test_an_object_without_a_state_is_refused_by_path_as_it_is_saved(tmp_path: Path, part: str) -> None:
    given: dict[str, Any] = {part: Owner({"call": nn.functional.relu})}
    with pytest.raises(tc.TreeError, match=rf"^{part}(/~rank\*)?/inner/call: "):
        tc.save(tmp_path / "c", training.state(nn.Linear(1, 1), rng=False, **given))


def test_an_object_in_the_state_of_a_parameter_is_refused_as_it_is_saved() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["projector"] = Inner(1)
    with pytest.raises(tc.TreeError, match=r"^optimizer/weight/projector: .*found a Inner"):
        training.state(model, optimizer)


def test_a_module_in_a_state_is_compared_before_anything_changes(tmp_path: Path) -> None:
    here = Owner(nn.Linear(3, 2))
    weight = here.inner.weight.clone()
    with pytest.raises(tc.MismatchError, match=r"^it/inner/weight: expected shape \(2, 3\), found \(2, 2\)"):
        _load_into(tmp_path / "c", Owner(nn.Linear(2, 2), 5), here)
    assert here.count == 0 and torch.equal(here.inner.weight, weight)
    saved, there = Owner(nn.BatchNorm1d(2), 5), Owner(nn.BatchNorm1d(2))
    module = there.inner
    saved.inner(torch.randn(4, 2))
    _load_into(tmp_path / "d", saved, there)
    assert there.inner is module and torch.equal(module.running_mean, saved.inner.running_mean)


def test_without_a_target_the_states_come_as_dicts(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"it": Owner(Inner(7), 1)})
    assert tc.load(tmp_path / "c") == {"it": {"inner": {"n": 7}, "count": 1}}
    assert tc.load(tmp_path / "c", {"it": Owner(Inner(), 0)}) == {"it": {"inner": {"n": 7}, "count": 1}}


# schedulers -----------------------------------------------------------------------------------------------------------
class _Job:
    def __init__(self, *, after: bool = True, nested: bool = False, reverse: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        groups = [{"params": [*self.model[0].parameters()], "lr": 0.1}, {"params": [*self.model[1].parameters()]}]
        self.optimizer = torch.optim.SGD(groups[::-1] if reverse else groups, lr=0.3)
        self.after = CosineAnnealingLR(self.optimizer, 10) if after else None
        self.scheduler: Any = Warmup(self.optimizer, 3, self.after)
        if nested:
            self.scheduler = SequentialLR(self.optimizer, [self.scheduler, ExponentialLR(self.optimizer, 0.9)], [20])

    def rates(self, steps: int) -> list[dict[int, float]]:
        found = []
        for _ in range(steps):
            self.optimizer.step()
            self.scheduler.step()
            found.append({len(group["params"][0]): float(group["lr"]) for group in self.optimizer.param_groups})
        return found


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_schedule_goes_on_in_the_one_that_it_keeps(tmp_path: Path, steps: int, nested: bool, reverse: bool) -> None:
    """Also where the groups have another order here, by which both schedules list their rates."""
    job, fresh = _Job(nested=nested), _Job(nested=nested, reverse=reverse)
    job.rates(steps)
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=job.scheduler))
    training.restore(tmp_path / "c", fresh.model, fresh.optimizer, scheduler=fresh.scheduler)
    warmup = fresh.scheduler._schedulers[0] if nested else fresh.scheduler
    assert warmup.after is fresh.after
    assert fresh.rates(6) == job.rates(6)


def test_a_schedule_that_keeps_none_here_is_refused(tmp_path: Path) -> None:
    job, fresh = _Job(), _Job(after=False)
    tc.save(tmp_path / "c", training.state(job.model, job.optimizer, scheduler=job.scheduler))
    with pytest.raises(tc.MismatchError, match=r"^scheduler/after: expected a CosineAnnealingLR .* of the Warmup here"):
        training.restore(tmp_path / "c", fresh.model, fresh.optimizer, scheduler=fresh.scheduler)


def test_an_optimizer_in_the_state_of_a_scheduler_is_saved_once(tmp_path: Path) -> None:
    """It is the training's own, which has a state by parameter names already."""

    def make() -> tuple[Any, Any, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer, Owner(optimizer, 3)

    (model, optimizer, scheduler), (other, fresh, owner) = make(), make()
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=scheduler))
    assert not any(path.startswith("scheduler/inner/") for path in tc.inspect(tmp_path / "c").by_path)
    training.restore(tmp_path / "c", other, fresh, scheduler=owner)
    assert owner.inner is fresh and owner.count == 3
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
