"""Options that differ from the checkpoint's are taken from it, and said; those that a training changes are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import treeckpt as tc
from treeckpt import training

Make = Callable[[Any], Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def saved(path: Path, kind: Make, schedule: Make | None = None) -> None:
    """Saves a model that was trained for three steps."""
    model = net()
    optimizer = kind(model)
    scheduler = schedule(optimizer) if schedule else None
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*[1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else [])
    tc.save(path, training.state(model, optimizer, scheduler=scheduler))


def restored(path: Path, kind: Make, schedule: Make | None = None, **options: Any) -> tuple[Any, tuple[str, ...]]:
    """Restores into a new model; returns its optimizer, and what was replaced."""
    model = net()
    optimizer = kind(model)
    scheduler = schedule(optimizer) if schedule else None
    return optimizer, training.restore(path, model, optimizer, scheduler=scheduler, **options).replaced


def adamw(**options: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), **options)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_groups(model: Any) -> Any:
    groups = [{"params": model[0].parameters(), "weight_decay": 0.5}, {"params": model[1].parameters()}]
    return torch.optim.AdamW(groups, weight_decay=0.0)


TAKEN = "in the checkpoint, which is taken; keep=('{0}',) keeps yours"


@pytest.mark.parametrize(
    ("there", "here", "texts"),
    [
        (
            adamw(),
            adamw(eps=1e-6, weight_decay=0.3),
            ["param group 0: eps 1e-06 here, 1e-08", "param group 0: weight_decay 0.3 here, 0.01"],
        ),
        (
            adamw(),
            lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.01),
            ["param group 0: decoupled_weight_decay False here, True"],
        ),
        (
            adamw(),
            two_groups,
            ["param group 0: weight_decay 0.5 here, 0.01", "param group 1: weight_decay 0.0 here, 0.01"],
        ),
        (
            two_groups,
            lambda model: torch.optim.AdamW([{"params": part.parameters()} for part in model], betas=(0.8, 0.9)),
            [
                "param groups 0, 1: betas (0.8, 0.9) here, (0.9, 0.999)",
                "param group 0: weight_decay 0.01 here, 0.5",
                "param group 1: weight_decay 0.01 here, 0.0",
            ],
        ),
    ],
    ids=["one group", "another class", "split groups", "all groups"],
)
def test_an_option_that_differs_is_said_with_both_values_and_how_to_keep_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: Make, here: Make, texts: list[str]
) -> None:
    saved(tmp_path / "c", there)
    optimizer, replaced = restored(tmp_path / "c", here)
    names = [text.partition(": ")[2].split()[0] for text in texts]
    wanted = [f"{text} {TAKEN.format(name)}" for text, name in zip(texts, names, strict=True)]
    assert sorted(replaced) == sorted(wanted)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith(f"{tmp_path / 'c'}: ")
    assert all(text in record.getMessage() for text in wanted)
    caplog.clear()
    kept, replaced = restored(tmp_path / "c", here, keep=tuple(dict.fromkeys(names)))
    assert not replaced and not caplog.records
    for name in names:
        assert [group[name] for group in kept.param_groups] == [group[name] for group in here(net()).param_groups]
        assert optimizer.param_groups[0][name] != kept.param_groups[0][name]


@pytest.mark.parametrize(
    ("here", "text"),
    [
        ((torch.optim.AdamW, {"amsgrad": True}), "amsgrad True here, False"),
        ((torch.optim.RMSprop, {"centered": True}), "centered True here, False"),
        ((torch.optim.SGD, {"momentum": 0.9}), "momentum 0.9 here, 0"),
    ],
)
def test_an_option_that_needs_moments_that_were_not_saved_is_said_without_a_way_to_keep_it(
    tmp_path: Path, here: Any, text: str
) -> None:
    saved(tmp_path / "c", lambda model: here[0](model.parameters(), lr=0.1))
    _, replaced = restored(tmp_path / "c", lambda model: here[0](model.parameters(), lr=0.1, **here[1]))
    assert replaced == (f"param group 0: {text} in the checkpoint, which is taken",)


@pytest.mark.parametrize(
    ("there", "here", "name", "values"),
    [
        (
            lambda o: schedules.CosineAnnealingLR(o, 100),
            lambda o: schedules.CosineAnnealingLR(o, 500),
            "T_max",
            "500 here, 100",
        ),
        (lambda o: schedules.StepLR(o, 5), lambda o: schedules.StepLR(o, 5, 0.5), "gamma", "0.5 here, 0.1"),
        (
            lambda o: schedules.MultiStepLR(o, [4, 8]),
            lambda o: schedules.MultiStepLR(o, [8, 8, 9]),
            "milestones",
            "(8, 8, 9) here, (4, 8)",
        ),
        (
            lambda o: schedules.OneCycleLR(o, 0.1, total_steps=9),
            lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
            "total_steps",
            "20 here, 9",
        ),
    ],
)
def test_an_argument_of_a_scheduler_that_differs_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: Make, here: Make, name: str, values: str
) -> None:
    saved(tmp_path / "c", sgd, there)
    _, replaced = restored(tmp_path / "c", sgd, here)
    text = f"scheduler: {name} {values} in the checkpoint, which is taken; to keep yours, set it after the restore"
    assert replaced == (text,)
    assert [text in record.getMessage() for record in caplog.records] == [True]


def test_the_arguments_of_schedulers_in_a_scheduler_are_compared(tmp_path: Path) -> None:
    def sequence(length: int, at: int) -> Make:
        return lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o), schedules.CosineAnnealingLR(o, length)], milestones=[at]
        )

    saved(tmp_path / "c", sgd, sequence(9, 2))
    _, replaced = restored(tmp_path / "c", sgd, sequence(20, 3))
    assert [text.partition(" in the")[0] for text in replaced] == [
        "scheduler: milestones (3,) here, (2,)",
        "scheduler/_schedulers/1: T_max 20 here, 9",
    ]


class Swinging:
    """A scheduler of no package, which changes more than the learning rate and counts in an argument of its own."""

    def __init__(self, optimizer: Any, count: int = 0) -> None:
        self.optimizer, self.count = optimizer, count

    def step(self) -> None:
        self.count += 1
        [group] = self.optimizer.param_groups
        group.update({"betas": (0.5, 0.9)} if "betas" in group else {"momentum": 0.5}, weight_decay=0.1 * self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


ORDINARY: dict[str, Make] = {
    "step": lambda o: schedules.StepLR(o, 2),
    "several steps": lambda o: schedules.MultiStepLR(o, [1, 2, 2]),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "constant": schedules.ConstantLR,
    "linear": schedules.LinearLR,
    "polynomial": lambda o: schedules.PolynomialLR(o, 4),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 4),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 1, 2),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "factors": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=9),
    "one cycle of the rate": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=9, cycle_momentum=False),
    "cycles": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "averaging": lambda o: SWALR(o, 0.05, anneal_epochs=3),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.OneCycleLR(o, 0.5, total_steps=9)], [1]
    ),
    "chain": lambda o: schedules.ChainedScheduler([schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], o),
    "of no package": Swinging,
}


@pytest.mark.parametrize("kind", [sgd, adamw(lr=0.1)], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_resume_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, kind: Make
) -> None:
    saved(tmp_path / "c", kind, ORDINARY[name])
    _, replaced = restored(tmp_path / "c", kind, ORDINARY[name])
    assert not replaced and not caplog.records


def test_a_learning_rate_and_entries_of_groups_that_are_no_arguments_are_not_compared(tmp_path: Path) -> None:
    def marked(lr: float, count: int) -> Make:
        return lambda model: torch.optim.AdamW([{"params": model.parameters(), "count": count}], lr=lr)

    saved(tmp_path / "c", marked(0.1, 1))
    assert restored(tmp_path / "c", marked(0.2, 2))[1] == ()


def test_numbers_of_another_type_that_are_equal_are_not_said(tmp_path: Path) -> None:
    saved(tmp_path / "c", adamw(weight_decay=0))
    assert restored(tmp_path / "c", adamw(weight_decay=0.0))[1] == ()
