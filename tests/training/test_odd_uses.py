"""Uses that are rare and legal: each is restored in full, or refused by name, and never passed over."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import treeckpt as tc
from treeckpt import training

from .jobs import net, run, same_tensors, stepped

SOURCES = ["checkpoint", "tree"]


def _source(path: Path, kind: str, model: nn.Module, optimizer: Any = None, **parts: Any) -> Any:
    """A checkpoint, or the same state as a tree in memory."""
    if kind == "tree":
        return training.state(model, optimizer, buffers="per_rank", **parts)
    tc.save(path / "c", training.state(model, optimizer, **parts))
    return path / "c"


class Odd(torch.optim.Optimizer):
    """Keeps every kind of thing as state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].get("count", 0) + 1
                self.state[p] = {
                    "count": count,
                    "none": None,
                    "tuple": (torch.full_like(p, count), 3, (count, "x")),
                    "list": [1, torch.ones(3)],
                    "nested": {"a": {"b": p.detach().clone()}, 1: 5},
                    "numpy": np.arange(3.0),
                    "empty": {},
                    "ordered": collections.OrderedDict(a=torch.ones(2)),
                }
        return closure()


@pytest.mark.parametrize("kind", SOURCES)
def test_state_of_every_kind_comes_back_to_a_fresh_optimizer(tmp_path: Path, kind: str) -> None:
    model, fresh = net(), net(1)
    optimizer, again = Odd(model.parameters()), Odd(fresh.parameters())
    stepped(model, optimizer)
    training.restore(_source(tmp_path, kind, model, optimizer), fresh, again)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert repr(again.state[q]) == repr(optimizer.state[p])


class Position:
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


@pytest.mark.parametrize("kind", SOURCES)
def test_each_of_several_loaders_takes_its_state(tmp_path: Path, kind: str) -> None:
    source = _source(tmp_path, kind, net(), loader={"train": Position(5), "rest": [Position(6), 7]})
    loader: dict[str, Any] = {"train": Position(), "rest": [Position(), 0]}
    report = training.restore(source, net(), loader=loader)
    assert (loader["train"].n, loader["rest"][0].n) == (5, 6)
    assert report.loader["rest"][1] == 7, "what cannot take its state is in the report"
    loader = {"train": Position(), "more": Position()}
    with pytest.raises(tc.MismatchError, match="loader/more: expected the state of a Position"):
        training.restore(source, net(), loader=loader)
    assert loader["train"].n == 0


@pytest.mark.parametrize("kind", SOURCES)
def test_an_extra_that_lacks_something_or_has_more_is_an_error(tmp_path: Path, kind: str) -> None:
    source = _source(tmp_path, kind, net(), extra={"a": torch.ones(2), "b": {"c": 3, "d": Position(4)}})
    same: dict[str, Any] = {"a": torch.zeros(2), "b": {"c": 0, "d": Position()}}
    training.restore(source, net(), extra=same)
    assert same["a"].tolist() == [1, 1] and same["b"]["c"] == 3 and same["b"]["d"].n == 4
    more = {"a": torch.zeros(2), "b": {"c": 0, "d": Position(), "e": 1}}
    with pytest.raises(tc.MismatchError, match=r"extra/b/e: .*1 missing in the checkpoint"):
        training.restore(source, net(), extra=more)
    assert more["a"].tolist() == [0, 0]
    with pytest.raises(tc.MismatchError, match=r"extra/b/c: .*not here"):
        training.restore(source, net(), extra={"a": torch.zeros(2)})
    report = training.restore(source, net(), extra=more, strict=False)
    assert report.missing == ("extra/b/e",) and more["b"]["e"] == 1 and more["b"]["c"] == 3
    training.restore(source, net(), extra={"a": torch.zeros(2), "b": ...})


def test_a_model_of_which_nothing_was_saved_is_refused_without_strict_too(tmp_path: Path) -> None:
    for kind in SOURCES:
        source = _source(tmp_path, kind, net())
        other = torch.nn.Sequential(torch.nn.Linear(5, 7))
        before = other[0].weight.detach().clone()
        with pytest.raises(tc.MismatchError, match=r"model/0\.bias.*not asked for: model/first\."):
            training.restore(source, other, strict=False)
        assert torch.equal(other[0].weight, before)


def test_a_value_in_a_tuple_is_not_passed_over(tmp_path: Path) -> None:
    for kind in SOURCES:
        source = _source(tmp_path, kind, net(), extra={"t": (torch.ones(2), 7)})
        with pytest.raises(tc.MismatchError, match="extra/t/1"):
            training.restore(source, net(), extra={"t": (torch.zeros(2), 0)})
        training.restore(source, net(), extra={"t": (into := torch.zeros(2), 7)})
        assert into.tolist() == [1, 1]


class Hooked(nn.Linear):
    """Its state dict has a tensor of its own making, which nothing but its own code can take back."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(_doubled)


def _doubled(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2


def test_a_tensor_of_a_state_dict_hook_is_refused_where_it_would_be_filled_in_vain(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(Hooked()))
    with pytest.raises(tc.MismatchError, match=r"model/weight: .* a hook of state_dict made"):
        training.restore(tmp_path / "c", Hooked())


def test_a_tensor_of_a_hook_that_shows_the_parameter_is_filled(tmp_path: Path) -> None:
    model, fresh = nn.Linear(3, 3), nn.Linear(3, 3)
    for one in (model, fresh):
        one.register_state_dict_post_hook(lambda m, state, *_: state.update(weight=state["weight"].detach().t()))
    tc.save(tmp_path / "c", training.state(model))
    training.restore(tmp_path / "c", fresh)
    assert torch.equal(fresh.weight, model.weight)


def test_lazy_parameters_are_named(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(nn.Linear(4, 3)))
    with pytest.raises(tc.MismatchError, match=r"weight: .* a lazy one"):
        training.restore(tmp_path / "c", nn.LazyLinear(3))
    with pytest.raises(tc.TreeError, match=r"model/weight: .* not initialised yet"):
        tc.save(tmp_path / "d", training.state(nn.LazyLinear(3)))


def test_hooks_of_all_optimizers_do_not_hear_of_a_restore(tmp_path: Path) -> None:
    model, fresh = net(), net(1)
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    heard: list[Any] = []
    hook = register_optimizer_step_pre_hook(lambda *args: heard.append(args))
    try:
        training.restore(tmp_path / "c", fresh, torch.optim.Adam(fresh.parameters()))
    finally:
        hook.remove()
    assert not heard


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


def _two_groups(model: nn.Module, names: tuple[str, str]) -> torch.optim.Optimizer:
    rates = {"first": 0.02, "last": 0.003}
    parts = {name: {"params": getattr(model, name).parameters(), "lr": rates[name]} for name in names}
    return torch.optim.AdamW([parts[name] for name in names])


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on_with_their_groups_in_another_order(tmp_path: Path, name: str) -> None:
    model, fresh = net(), net(1)
    optimizer = _two_groups(model, ("first", "last"))
    schedule = SCHEDULES[name](optimizer)
    run(model, optimizer, 3, scheduler=schedule)
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedule))
    again = _two_groups(fresh, ("last", "first"))
    renewed = SCHEDULES[name](again)
    training.restore(tmp_path / "c", fresh, again, scheduler=renewed)
    for _ in range(8):
        optimizer.step()
        again.step()
        schedule.step()
        renewed.step()
        assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in reversed(optimizer.param_groups)]


def test_parametrised_and_half_precision_models_come_back(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[1])
        return model.bfloat16()

    model, fresh = make(), make()
    optimizer, again = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(fresh.parameters())
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    tc.save(tmp_path / "c", training.state(model, optimizer))
    training.restore(tmp_path / "c", fresh, again)
    assert same_tensors(fresh.state_dict(), model.state_dict())
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert same_tensors(again.state[q], optimizer.state[p]), "moments stay float32"


class Twice(nn.Module):
    """Two layers with one buffer between them."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(300)
        self.first, self.second = nn.Module(), nn.Module()
        for layer in (self.first, self.second):
            layer.register_buffer("table", table)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_buffer_that_two_layers_share_is_written_once_and_stays_shared(tmp_path: Path, device: str) -> None:
    model = Twice()
    model.first.table.copy_(torch.arange(300))
    assert tc.save(tmp_path / "c", training.state(model, rng=False)).nbytes == 1200
    with torch.device(device):
        fresh = Twice()
    training.restore(tmp_path / "c", fresh, rng=False)
    assert fresh.first.table is fresh.second.table and torch.equal(fresh.second.table, model.second.table)


def test_a_fresh_optimizer_takes_its_state_beside_gradients_that_are_left_alone(tmp_path: Path) -> None:
    model, fresh = net(), net(1)
    optimizer, again = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, fresh))
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh(torch.ones(2, 5)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in fresh.named_parameters() if p.grad is not None}
    assert len(gradients) == 6
    training.restore(tmp_path / "c", fresh, again)
    assert same_tensors(again.state_dict(), optimizer.state_dict())
    assert same_tensors({name: p.grad for name, p in fresh.named_parameters()}, gradients)


def test_an_optimizer_for_each_parameter_is_as_good_as_one_for_all(tmp_path: Path) -> None:
    """As where the step is taken during the backward pass."""
    model, fresh, last = net(), net(1), net(2)
    optimizers = [torch.optim.AdamW([p], lr=0.01) for p in model.parameters()]
    for optimizer in optimizers:
        stepped(model, optimizer)
    tc.save(tmp_path / "each", training.state(model, optimizers))
    one = torch.optim.AdamW(fresh.parameters())
    training.restore(tmp_path / "each", fresh, one)
    tc.save(tmp_path / "all", training.state(fresh, one))
    again = [torch.optim.AdamW([p]) for p in reversed(list(last.parameters()))]
    training.restore(tmp_path / "all", last, again)
    for p, q, optimizer in zip(model.parameters(), last.parameters(), optimizers, strict=True):
        found = next(each for each in again if q in each.state)
        assert same_tensors(found.state[q], optimizer.state[p]) and found.param_groups[0]["lr"] == 0.01


def test_a_state_dict_in_the_place_of_a_module_or_an_optimizer_is_named(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    training.save(tmp_path / "h", model, optimizer)
    for given in (model.state_dict(), dict(model.state_dict()), [model.state_dict()], {"a": model.state_dict()}):
        for act in (
            lambda given: training.state(given),
            lambda given: training.restore(tmp_path / "c", given),
            lambda given: training.save(tmp_path / "new", given),
            lambda given: training.load(tmp_path / "h", given),
        ):
            with pytest.raises(tc.TreeError, match=r"model\S*: .*Give the module, not its state_dict"):
                act(given)
    for state in (optimizer.state_dict(), {"a": optimizer.state_dict()}):
        with pytest.raises(tc.TreeError, match=r"optimizer\S*: .*Give the optimizer, not its state_dict"):
            training.state(model, state)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_is_older_than_fully_shard_is_to_be_made_after_it(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(tc.TreeError, match=r"none of them.*\(fully_shard, .*make the optimizer after that"):
            training.state(model, optimizer)
    finally:
        dist.destroy_process_group()


class Cursor:
    """Without `state_dict`."""

    at = 3


def test_a_loader_without_a_state_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    model = net(0)
    plain = torch.utils.data.DataLoader(range(8))  # pyright: ignore[reportArgumentType]
    with pytest.raises(tc.MismatchError, match=r"loader/train: .*found a DataLoader.*StatefulDataLoader"):
        training.state(model, loader={"train": plain})
    tc.save(tmp_path / "c", training.state(model, loader={"at": 3}))
    for loader, name in ((plain, "DataLoader"), ({"at": plain}, "DataLoader"), (Cursor(), "Cursor")):
        with pytest.raises(tc.MismatchError, match=f"found a {name}.*StatefulDataLoader"):
            training.restore(tmp_path / "c", model, loader=loader)
    assert training.restore(tmp_path / "c", model, loader={"at": 0}).loader == {"at": 3}
    tc.save(tmp_path / "p", training.state(model, loader=Path("x")), allow_pickle=True)  # a value for pickle
    training.restore(tmp_path / "p", model, loader=Path("y"), allow_pickle=True)
