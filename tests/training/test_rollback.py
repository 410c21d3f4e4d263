"""A rollback in one process: what the checkpoint has no state for has none afterwards, as after `load_state_dict`."""

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
from .odd_optimizers import KINDS, Counting, Lookahead, Wrapper

AdamW = torch.optim.AdamW


class Experts(nn.Module):
    """Two layers of which a batch uses one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return getattr(self, which)(x).square().sum()


def train(model: nn.Module, optimizer: Any, *experts: str) -> None:
    for which in experts:
        optimizer.zero_grad()
        model(torch.ones(1, 3), which).backward()
        optimizer.step()


def as_torch(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """Returns copies of both states, as `torch.save` would keep them."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_parameter_without_gradient_until_the_checkpoint_has_no_state_after_it(
    tmp_path: Path, in_memory: bool, options: dict[str, Any]
) -> None:
    model = Experts()
    optimizer = AdamW(model.parameters(), **options)
    train(model, optimizer, "b", "b")
    source: Any = training.state(model, optimizer, rng=False)
    expected = as_torch(model, optimizer)
    if in_memory:
        source = copy.deepcopy(expected[0]), source
        source = {**source[1], "model": source[0], "optimizer": copy.deepcopy(source[1]["optimizer"])}
    else:
        tc.save(tmp_path / "c", source)
        source = tmp_path / "c"
    train(model, optimizer, "a", "b", "a")
    report = training.restore(source, model, optimizer, rng=False)
    assert same_tensors((model.state_dict(), optimizer.state_dict()), expected)
    assert report.missing == () and set(report.cleared) == {"optimizer/a.weight", "optimizer/a.bias"}
    train(model, optimizer, "a", "b")
    other = Experts(1)
    again = AdamW(other.parameters(), **options)
    other.load_state_dict(expected[0])
    again.load_state_dict(expected[1])
    train(other, again, "a", "b")
    assert same_tensors((model.state_dict(), optimizer.state_dict()), (other.state_dict(), again.state_dict()))


KEEP_STATE = {"by place beside what it wraps", "other dtypes, wrapped", "other dtypes, nested"}
"""Those whose own `load_state_dict` lets state stay that is not in what it loads."""


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - KEEP_STATE))
def test_a_checkpoint_from_before_the_first_step_leaves_no_state(tmp_path: Path, kind: str) -> None:
    model = net()
    optimizer = KINDS[kind](model.parameters())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    expected = run(model, optimizer, 3)
    report = training.restore(tmp_path / "c", model, optimizer)
    assert (report.missing, report.unexpected, report.ignored) == ((), (), ()) and report.cleared
    assert same_tensors(optimizer.state_dict(), saved)
    assert run(model, optimizer, 3) == expected


@pytest.mark.parametrize("kind", sorted(KEEP_STATE))
def test_an_optimizer_that_keeps_state_of_its_own_will_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model = net()
    optimizer = KINDS[kind](model.parameters())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    stepped(model, optimizer)
    report = training.restore(tmp_path / "c", model, optimizer)
    ours = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert same_tensors(ours, optimizer.state_dict())
    assert any(path.endswith("slow") for path in report.ignored) and set(report.ignored) < set(report.cleared)
    assert "load_state_dict keeps state that is not in what it loads" in caplog.text


def test_a_run_goes_back_to_its_first_checkpoint(tmp_path: Path) -> None:
    model = Experts()
    optimizer = AdamW(model.parameters())
    with tc.Manager(tmp_path, background=False) as manager:
        manager.save(0, training.state(model, optimizer))
        train(model, optimizer, "a", "b")
        manager.resume(model, optimizer)
    assert not optimizer.state


def test_a_layer_that_was_frozen_until_later_begins_anew(tmp_path: Path) -> None:
    model = Experts()
    model.a.requires_grad_(False)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, "b")
    tc.save(tmp_path / "c", training.state(model, optimizer))
    model.a.requires_grad_(True)
    train(model, optimizer, "a")
    training.restore(tmp_path / "c", model, optimizer)
    assert set(optimizer.state) == set(model.b.parameters())


def test_a_group_that_was_added_later_is_refused_with_its_cause_and_begins_anew_without_strict(tmp_path: Path) -> None:
    model = Experts()
    optimizer = AdamW(model.b.parameters())
    train(model, optimizer, "b")
    tc.save(tmp_path / "c", training.state(model, optimizer))
    optimizer.add_param_group({"params": list(model.a.parameters())})
    train(model, optimizer, "a", "b")
    before = as_torch(model, optimizer)
    with pytest.raises(tc.MismatchError, match=r"a\.weight was not in the optimizer when this was saved"):
        training.restore(tmp_path / "c", model, optimizer)
    assert same_tensors((model.state_dict(), optimizer.state_dict()), before)
    report = training.restore(tmp_path / "c", model, optimizer, strict=False)
    assert set(optimizer.state) == set(model.b.parameters())
    assert set(report.missing) == set(report.cleared) == {"optimizer/a.weight", "optimizer/a.bias"}


def test_what_is_not_selected_keeps_its_state(tmp_path: Path) -> None:
    model = Experts()
    optimizer = AdamW(model.parameters())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    train(model, optimizer, "a", "b")
    training.restore(tmp_path / "c", model, optimizer, select="model/a*")
    assert set(optimizer.state) == set(model.b.parameters())
    train(model, optimizer, "a", "b")
    training.restore(tmp_path / "c", model, optimizer, exclude="model/a*")
    assert set(optimizer.state) == set(model.a.parameters())


def test_a_parameter_whose_weight_stays_keeps_its_state(tmp_path: Path) -> None:
    small = nn.ModuleDict({"a": nn.Linear(3, 2)})
    tc.save(tmp_path / "c", training.state(small, AdamW(small.parameters())))
    model = Experts()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, "a", "b")
    report = training.restore(tmp_path / "c", model, optimizer, strict=False)
    assert set(optimizer.state) == set(model.b.parameters())
    assert set(report.cleared) == {"optimizer/a.weight", "optimizer/a.bias"}


def test_a_checkpoint_that_left_frozen_parameters_out_leaves_their_state(tmp_path: Path) -> None:
    model = Experts()
    model.a.requires_grad_(False)
    optimizer = AdamW(model.parameters())
    tc.save(tmp_path / "c", training.state(model, optimizer, frozen=False))
    model.a.requires_grad_(True)
    train(model, optimizer, "a", "b")
    training.restore(tmp_path / "c", model, optimizer, strict="missing")
    assert set(optimizer.state) == set(model.a.parameters())


@pytest.mark.parametrize("wrap", [lambda p: AdamW(p), lambda p: Wrapper(AdamW(p)), Counting])
def test_a_moment_that_is_lost_of_a_state_that_is_there_is_still_an_error(tmp_path: Path, wrap: Any) -> None:
    model = net()
    optimizer = wrap(model.parameters())
    stepped(model, optimizer)
    tree = training.state(model, optimizer)
    own = copy.copy(tree["optimizer"]["last.weight"])
    lost = "exp_avg_sq" if "exp_avg_sq" in own else "momentum_buffer"
    own["more"] = own.pop(lost)
    tree["optimizer"] = {**tree["optimizer"], "last.weight": own}
    tc.save(tmp_path / "c", tree)
    before = as_torch(model, optimizer)
    with pytest.raises(tc.MismatchError, match=rf"^optimizer/last.weight/{lost}: "):
        training.restore(tmp_path / "c", model, optimizer)
    assert same_tensors((model.state_dict(), optimizer.state_dict()), before)


def test_a_moment_that_a_step_after_the_checkpoint_made_is_refused_with_the_way_back(tmp_path: Path) -> None:
    model = net()
    optimizer = Lookahead(AdamW(model.parameters()), every=2)
    stepped(model, optimizer, 1)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    stepped(model, optimizer, 1)
    with pytest.raises(tc.MismatchError, match=r"/slow: .*Restore into a fresh optimizer"):
        training.restore(tmp_path / "c", model, optimizer)
    fresh = Lookahead(AdamW(model.parameters()), every=2)
    training.restore(tmp_path / "c", model, fresh)


class Counted(torch.optim.SGD):
    """Counts its steps in its groups and in what belongs to no parameter, from the first step on."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)


class CountedByItself(Counted):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [Counted, CountedByItself])
def test_what_steps_have_added_to_groups_and_beside_parameters_goes_too(tmp_path: Path, kind: Any) -> None:
    model = Experts()
    optimizer = kind([{"params": list(one.parameters()), "factor": 2} for one in (model.a, model.b)], momentum=0.9)
    expected = as_torch(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    train(model, optimizer, "a", "b")
    training.restore(tmp_path / "c", model, optimizer)
    assert same_tensors((model.state_dict(), optimizer.state_dict()), expected)


def test_an_option_that_a_checkpoint_of_before_the_first_step_lacks_is_still_an_error(tmp_path: Path) -> None:
    model = Experts()
    optimizer = AdamW(model.parameters())
    tree = training.state(model, optimizer)
    for values in tree["param_groups"]["values"].values():
        values.pop("decoupled_weight_decay")
    tc.save(tmp_path / "c", tree)
    train(model, optimizer, "a", "b")
    with pytest.raises(tc.MismatchError, match="param_groups/values/decoupled_weight_decay: "):
        training.restore(tmp_path / "c", model, optimizer)


def test_optimizers_by_name_and_parts_of_one_go_back(tmp_path: Path) -> None:
    models: dict[str, Any] = {"g": Experts(), "d": Experts(1)}
    optimizers: dict[str, Any] = {name: AdamW(one.parameters()) for name, one in models.items()}
    train(models["d"], optimizers["d"], "a", "b")
    tc.save(tmp_path / "c", training.state(models, optimizers))
    for name in models:
        train(models[name], optimizers[name], "a", "b")
    report = training.restore(tmp_path / "c", models, optimizers)
    assert not optimizers["g"].state and len(optimizers["d"].state) == 4
    assert {path.split("/")[1] for path in report.cleared} == {"g"}
    model = Experts()
    parts = [AdamW(model.a.parameters()), AdamW(model.b.parameters())]
    train(model, parts[0], "a")
    tc.save(tmp_path / "parts", training.state(model, parts))
    train(model, parts[1], "b")
    training.restore(tmp_path / "parts", model, parts)
    assert len(parts[0].state) == 2 and not parts[1].state


def test_lbfgs_goes_back_to_before_its_first_step(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    expected = run(model, optimizer, 3)
    training.restore(tmp_path / "c", model, optimizer)
    assert not optimizer.state
    assert run(model, optimizer, 3) == expected


def test_a_tied_parameter_goes_back(tmp_path: Path) -> None:
    model = Experts()
    model.b.weight = model.a.weight
    optimizer = AdamW(model.parameters())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    train(model, optimizer, "a", "b")
    training.restore(tmp_path / "c", model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("how", ["torch.save", "tc.save"])
def test_a_state_dict_of_torch_with_fewer_states_goes_back(tmp_path: Path, how: str) -> None:
    model = Experts()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, "b")
    expected = as_torch(model, optimizer)
    tree = {"model": expected[0], "optimizer": expected[1]}
    torch.save(tree, tmp_path / "c.pt") if how == "torch.save" else tc.save(tmp_path / "c.pt", tree)
    train(model, optimizer, "a", "b")
    training.restore(tmp_path / "c.pt", model, optimizer, rng=False)
    assert same_tensors((model.state_dict(), optimizer.state_dict()), expected)


def test_registered_optimizers_go_back(tmp_path: Path) -> None:
    model = Experts()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, "b")
    expected = as_torch(model, optimizer)
    with tc.Manager(tmp_path, background=False) as manager:
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        manager.save(1)
        train(model, optimizer, "a", "b")
        manager.restore()
    assert same_tensors((model.state_dict(), optimizer.state_dict()), expected)


class Odd(torch.optim.SGD):
    """Keeps None, lists, tuples, nested dicts, numbers as keys, numbers and flags, in states and in groups."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["history"] = [*group.get("history", []), {"at": len(group.get("history", []))}]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state |= {"none": None, "flag": True, 3: p.detach().clone(), "pair": (p.detach() * 2, "text")}
                state["list"] = [*state.get("list", []), p.detach().clone()][-2:]
                state["deep"] = {"x": {1: p.grad.clone(), "empty": {}, "nothing": []}}
        return loss


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["before the first", "one", "three"])
@pytest.mark.parametrize("there", ["fresh", "same"])
def test_odd_states_come_back_as_load_state_dict_gives_them(tmp_path: Path, steps: int, there: str) -> None:
    model = Experts()
    optimizer = Odd(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, *["b"] * steps)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    expected = as_torch(model, optimizer)
    train(model, optimizer, "b", "a", "b")
    if there == "fresh":
        model = Experts(1)
        optimizer = Odd(model.parameters(), lr=0.1, momentum=0.9)
    training.restore(tmp_path / "c", model, optimizer)
    assert same_tensors((model.state_dict(), optimizer.state_dict()), expected)
    train(model, optimizer, "a", "b")
    again = Experts(2)
    other = Odd(again.parameters(), lr=0.1, momentum=0.9)
    again.load_state_dict(expected[0])
    other.load_state_dict(expected[1])
    train(again, other, "a", "b")
    assert same_tensors((model.state_dict(), optimizer.state_dict()), (again.state_dict(), other.state_dict()))
