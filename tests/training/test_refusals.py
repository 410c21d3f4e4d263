"""What a refusal of other leaves advises loses nothing that was trained, and works when it is pasted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training


def trained(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    """Returns a model, and an optimizer that has made a step on it."""
    optimizer = kind(model.parameters(), **options)
    sum(parameter.pow(2).sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return model, optimizer


def hint(path: Path, model: nn.Module, optimizer: Any = None, **options: Any) -> str:
    """Returns what the refusal of a restore advises."""
    with pytest.raises(tc.MismatchError) as caught:
        training.restore(path, model, optimizer, rng=False, **options)
    return caught.value.hint


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ((torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1})),
        ((torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})),
        ((torch.optim.AdamW, {}), (torch.optim.RAdam, {})),
        ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.RMSprop, {})),
    ],
)
def test_the_refusal_of_another_class_of_optimizer_does_not_advise_to_lose_the_moments(
    tmp_path: Path, saved: Any, here: Any
) -> None:
    model, optimizer = trained(nn.Linear(2, 2), saved[0], **saved[1])
    tc.save(tmp_path / "c", training.state(model, optimizer))
    text = hint(tmp_path / "c", model, here[0](model.parameters(), **here[1]))
    assert "another class" in text and "Give an optimizer of the class and options that were saved" in text
    assert "strict" not in text


def test_the_refusal_of_options_that_a_new_scheduler_added_speaks_of_the_scheduler(tmp_path: Path) -> None:
    model, optimizer = trained(nn.Linear(2, 2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    tc.save(tmp_path / "c", training.state(model, optimizer, scheduler=schedule))
    again = torch.optim.AdamW(model.parameters())
    other = torch.optim.lr_scheduler.OneCycleLR(again, 0.1, total_steps=9)
    text = hint(tmp_path / "c", model, again, scheduler=other)
    assert "OneCycleLR" in text and "after the restore" in text and "strict" not in text
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=9, cycle_momentum=False)
    assert "another class" in hint(tmp_path / "c", model, sgd)
