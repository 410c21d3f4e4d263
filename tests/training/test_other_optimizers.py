"""What a restore does with the state of an optimizer of another class or with other options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt.training._moments import TORCH_MOMENTS

Job = tuple[nn.Module, Any]


def make(kind: Any, *, steps: int = 0, **options: Any) -> Job:
    model = nn.Linear(4, 2)
    job = model, kind(model.parameters(), **options)
    for _ in range(steps):
        step(job)
    return job


def step(job: Job) -> None:
    model, optimizer = job
    optimizer.zero_grad()

    def loss() -> torch.Tensor:
        value = model(torch.ones(3, 4)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)


def state_names(optimizer: Any) -> set[str]:
    return {name for own in optimizer.state.values() for name in own}


def saved(path: Path, job: Job) -> Path:
    tc.save(path, tc.training.state(*job))
    return path


def test_sgd_takes_nothing_of_adamw_but_the_options_that_both_have(tmp_path: Path) -> None:
    path = saved(tmp_path / "adamw", make(torch.optim.AdamW, steps=1, lr=0.25))
    model, optimizer = make(torch.optim.SGD, momentum=0.9, lr=0.1)
    options = set(optimizer.param_groups[0])
    report = tc.training.restore(path, model, optimizer, strict=False)
    assert not state_names(optimizer) and set(optimizer.param_groups[0]) == options
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert set(report.unexpected) == {
        *(
            f"param_groups/values/{name}"
            for name in ("betas", "eps", "amsgrad", "capturable", "decoupled_weight_decay")
        ),
        *(f"optimizer/{name}/{own}" for name in ("weight", "bias") for own in ("step", "exp_avg", "exp_avg_sq")),
    }
    step((model, optimizer))
    assert state_names(optimizer) == {"momentum_buffer"}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.optim.SGD, torch.optim.AdamW),
        (torch.optim.Rprop, torch.optim.Adagrad),
        (torch.optim.AdamW, torch.optim.LBFGS),
        (torch.optim.LBFGS, torch.optim.AdamW),
        (torch.optim.ASGD, torch.optim.SGD),
    ],
)
def test_a_step_works_after_the_state_of_another_class_was_left_out(tmp_path: Path, before: Any, now: Any) -> None:
    job = make(now)
    first = state_names(job[1])
    report = tc.training.restore(saved(tmp_path / "other", make(before, steps=2)), *job, strict=False)
    assert state_names(job[1]) == first and report.unexpected
    step(job)


def test_state_that_another_class_would_take_silently_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "adam", make(torch.optim.Adam, steps=1))
    with pytest.raises(tc.MismatchError, match=r"not here: .*param_groups/values/amsgrad"):
        tc.training.restore(path, *make(torch.optim.RAdam))


def test_a_manager_resumes_without_the_state_of_another_class(tmp_path: Path) -> None:
    with tc.Manager(tmp_path) as manager:
        manager.save(1, tc.training.state(*make(torch.optim.Adam, steps=1)))
    model, optimizer = make(torch.optim.SGD)
    report = tc.Manager(tmp_path).resume(model, optimizer, strict=False)
    assert report is not None and "optimizer/weight/exp_avg" in report.unexpected and not state_names(optimizer)


def test_a_registered_optimizer_of_another_class_is_refused_before_it_changes(tmp_path: Path) -> None:
    with tc.Manager(tmp_path) as manager:
        manager.register("optimizer", make(torch.optim.AdamW, steps=1)[1])
        manager.save(1)
    optimizer = make(torch.optim.SGD)[1]
    before = dict(optimizer.param_groups[0])
    with tc.Manager(tmp_path) as manager:
        manager.register("optimizer", optimizer)
        with pytest.raises(tc.MismatchError, match=r"amsgrad, betas, .* in the checkpoint too"):
            manager.restore()
    assert not state_names(optimizer) and dict(optimizer.param_groups[0]) == before


@pytest.mark.parametrize(
    ("kind", "option", "moment"),
    [(torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"), (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer")],
)
def test_an_option_is_restored_with_its_moment_unless_it_is_kept(
    tmp_path: Path, kind: Any, option: dict[str, Any], moment: str
) -> None:
    path, (name, value) = saved(tmp_path / "with", make(kind, steps=1, **option)), *option.items()
    model, optimizer = make(kind)
    tc.training.restore(path, model, optimizer)
    assert optimizer.param_groups[0][name] == value and moment in state_names(optimizer)
    job = make(kind)
    report = tc.training.restore(path, *job, keep=(name,))
    assert moment not in state_names(job[1]) and set(report.ignored) == {
        f"optimizer/{p}/{moment}" for p in ("weight", "bias")
    }
    step(job)


def test_entries_that_schedulers_and_users_add_are_restored(tmp_path: Path) -> None:
    job = make(torch.optim.AdamW, steps=1)
    torch.optim.lr_scheduler.StepLR(job[1], 1)
    job[1].param_groups[0]["scale"] = 0.5
    for own in job[1].state.values():
        own["ema"] = torch.full((2,), 7.0)
    model, optimizer = make(torch.optim.AdamW)
    report = tc.training.restore(saved(tmp_path / "own", job), model, optimizer)
    group = optimizer.param_groups[0]
    assert (group["initial_lr"], group["scale"]) == (0.001, 0.5) and not (report.unexpected or report.ignored)
    assert all(own["ema"].tolist() == [7, 7] for own in optimizer.state.values())


OTHERS = torch.optim.Optimizer, torch.optim.SparseAdam


@pytest.mark.parametrize("kind", [k for k in vars(torch.optim).values() if isinstance(k, type) and k not in OTHERS])
def test_the_moments_of_every_class_of_torch_are_known(kind: Any) -> None:
    options = {"amsgrad": True, "momentum": 0.9, "centered": True}
    model = nn.Linear(4, 2, bias=False)
    probe = kind(model.parameters())
    job = model, kind(model.parameters(), **{k: v for k, v in options.items() if k in probe.param_groups[0]})
    step(job)
    step(job)
    assert state_names(job[1]) <= TORCH_MOMENTS


def test_sparse_adam_takes_all_that_was_saved_of_it(tmp_path: Path) -> None:
    def job() -> Job:
        model = nn.Embedding(4, 2, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters())

    model, optimizer = job()
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    again = job()
    report = tc.training.restore(saved(tmp_path / "sparse", (model, optimizer)), *again)
    assert state_names(again[1]) == state_names(optimizer) and not (report.missing or report.unexpected)


def two_groups(lr: Any, *more: dict[str, Any]) -> Job:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    settings = more or ({}, {})
    groups = [{"params": part.parameters(), **own} for part, own in zip(model, settings, strict=True)]
    return model, torch.optim.SGD(groups, lr=lr)


def test_groups_that_share_a_tensor_here_get_the_values_that_each_had(tmp_path: Path) -> None:
    rates = {"lr": torch.tensor(0.5)}, {"lr": torch.tensor(0.25)}
    tc.save(tmp_path / "c", tc.training.state(*two_groups(0.1, *rates)))
    model, optimizer = two_groups(shared := torch.tensor(0.125))
    assert all(group["lr"] is shared for group in optimizer.param_groups)
    tc.training.restore(tmp_path / "c", model, optimizer)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[0]["lr"] is shared


def test_optimizers_that_share_a_tensor_here_get_the_values_that_each_had(tmp_path: Path) -> None:
    def pair(*rates: torch.Tensor) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        models: dict[str, nn.Module] = {"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)}
        parts = zip(models.items(), rates, strict=True)
        return models, {name: torch.optim.Adam(one.parameters(), lr=rate) for (name, one), rate in parts}

    tc.save(tmp_path / "c", tc.training.state(*pair(torch.tensor(0.5), torch.tensor(0.25))))
    shared = torch.tensor(0.125)
    models, optimizers = pair(shared, shared)
    tc.training.restore(tmp_path / "c", models, optimizers)
    assert [float(one.param_groups[0]["lr"]) for one in optimizers.values()] == [0.5, 0.25]


def test_a_tensor_that_groups_share_and_that_one_keeps_stays_for_that_one(tmp_path: Path) -> None:
    model, optimizer = two_groups(torch.tensor(0.5))
    last = nn.ModuleDict({"1": nn.Linear(4, 2)})
    tc.save(tmp_path / "c", tc.training.state(last, torch.optim.SGD(last.parameters(), lr=torch.tensor(0.25))))
    tc.training.restore(tmp_path / "c", model, optimizer, strict=False)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("saved", [torch.tensor(0.1, dtype=torch.float64), 0.1], ids=["tensor", "number"])
@pytest.mark.parametrize("here", [torch.tensor(1.0), torch.tensor(1)], ids=["float32", "int64"])
def test_a_value_is_not_rounded_to_the_dtype_of_the_tensor_here(tmp_path: Path, saved: Any, here: torch.Tensor) -> None:
    tc.save(tmp_path / "c", tc.training.state(*make(torch.optim.SGD, lr=saved)))
    model, optimizer = make(torch.optim.SGD, lr=here)
    tc.training.restore(tmp_path / "c", model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    if isinstance(saved, float) and here.is_floating_point():
        assert rate is here and float(rate) == float(torch.tensor(0.1))  # stays the tensor that compiled code has
    else:
        assert rate == saved and type(rate) is type(saved)


def test_groups_that_are_split_do_not_share_what_the_saved_one_had(tmp_path: Path) -> None:
    model, optimizer = make(torch.optim.SGD, lr=torch.tensor(0.5))
    optimizer.param_groups[0]["seen"] = [1]
    tree = tc.training.state(model, optimizer)
    tc.save(tmp_path / "c", tree)
    for source in (tmp_path / "c", tree):
        groups = [{"params": [one], "lr": 0.125} for one in model.parameters()]
        split = torch.optim.SGD(groups, lr=0.125)
        tc.training.restore(source, model, split)
        split.param_groups[0]["lr"].fill_(0.25)
        split.param_groups[0]["seen"].append(2)
        assert float(split.param_groups[1]["lr"]) == float(optimizer.param_groups[0]["lr"]) == 0.5
        assert split.param_groups[1]["seen"] == optimizer.param_groups[0]["seen"] == [1]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.ASGD])
def test_steps_that_an_older_torch_counted_as_numbers_are_counted_on(tmp_path: Path, kind: Any) -> None:
    model, optimizer = make(kind, steps=2, lr=0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    for own in saved["state"].values():
        own.update({name: value.item() for name, value in own.items() if not value.shape})
    tc.save(tmp_path / "c", {"model": model.state_dict(), "optimizer": saved})
    for steps in (0, 1):
        fresh = make(kind, steps=steps, lr=0.1)
        tc.training.restore(tmp_path / "c", *fresh, rng=False)
        expected = torch.nn.Linear(4, 2)
        expected.load_state_dict(model.state_dict())
        theirs = kind(expected.parameters(), lr=0.1)
        theirs.load_state_dict(copy.deepcopy(saved))
        step(fresh)
        step((expected, theirs))
        assert torch.equal(fresh[0].weight, expected.weight)


class SharedCounter(torch.optim.SGD):
    """All its parameters have one tensor that counts the steps, raised with the first of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, *_ = every = [p for group in self.param_groups for p in group["params"]]
        for p in every:
            self.state[p].setdefault("step", self.state[first].get("step", torch.zeros(())))
        self.state[first]["step"] += 1
        for p in every:
            p -= p.grad / self.state[p]["step"]


def test_a_tensor_that_parameters_share_in_an_optimizer_is_shared_again(tmp_path: Path) -> None:
    def made(steps: int) -> Job:
        model = nn.Linear(4, 2)
        job = model, SharedCounter(model.parameters(), lr=0.1)
        for _ in range(steps):
            taken(job)
        return job

    def taken(job: Job) -> None:
        job[0](torch.ones(3, 4)).sum().backward()
        job[1].step()

    job = made(3)
    tree = tc.training.state(*job)
    tc.save(tmp_path / "c", tree)
    fresh = [made(0), made(0)]
    for source, one in zip((tmp_path / "c", tree), fresh, strict=True):
        tc.training.restore(source, *one)
        for mine, theirs in zip(one[0].parameters(), job[0].parameters(), strict=True):
            mine.grad = theirs.grad.clone() if theirs.grad is not None else None
    for one in (job, *fresh):
        taken(one)
        taken(one)
    assert all(torch.equal(one[0].bias, job[0].bias) for one in fresh)
    with tc.Manager(tmp_path / "run") as manager:
        manager.register("optimizer", job[1])
        manager.save(1, {}).result()
    model, optimizer = made(0)
    manager = tc.Manager(tmp_path / "run")
    manager.register("optimizer", optimizer)
    manager.restore()
    assert optimizer.state[model.weight]["step"] is optimizer.state[model.bias]["step"]
