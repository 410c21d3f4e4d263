"""What a refusal of other leaves advises loses nothing that was trained, and works when it is pasted."""

from __future__ import annotations

import ast
import re
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


def named(**parts: nn.Module) -> nn.Module:
    """Returns a model with these parts, which says nothing of how they run."""
    return nn.ModuleDict(parts)


def layers(width: int, count: int = 2) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


@pytest.mark.parametrize(
    ("saved", "here", "wanted"),
    [
        (
            lambda: named(enc=nn.Linear(2, 2), head=nn.Linear(2, 2)),
            lambda: named(encoder=nn.Linear(2, 2), head=nn.Linear(2, 2)),
            {"model/enc.*": "model/encoder.*"},
        ),
        (
            lambda: named(enc=layers(2), head=layers(3)),
            lambda: named(encoder=layers(2), top=layers(3)),
            {"model/enc.*": "model/encoder.*", "model/head.*": "model/top.*"},
        ),
        (
            lambda: named(net=named(blocks=layers(2, 3), norm=nn.BatchNorm1d(2))),
            lambda: named(net=named(layers=layers(2, 3), norm=nn.BatchNorm1d(2))),
            {"model/net.blocks.*": "model/net.layers.*"},
        ),
    ],
    ids=["one", "two", "nested"],
)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_renamed_submodules_are_told_as_the_line_that_restores_them(
    tmp_path: Path, saved: Any, here: Any, wanted: Any, with_optimizer: bool
) -> None:
    model, optimizer = trained(saved())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = here()
    again = torch.optim.AdamW(fresh.parameters()) if with_optimizer else None
    [text] = re.findall(r"pass rename=(\{.*?\})", hint(tmp_path / "c", fresh, again))
    pasted = ast.literal_eval(text)
    assert pasted == wanted
    report = training.restore(tmp_path / "c", fresh, again, rng=False, rename=pasted)
    assert not report.missing and not report.unexpected
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(old, new)
        assert again is None or torch.equal(optimizer.state[old]["exp_avg"], again.state[new]["exp_avg"])


def test_a_prefix_that_all_names_have_is_told_with_an_optimizer_too(tmp_path: Path) -> None:
    model, optimizer = trained(nn.Linear(2, 2))
    tc.save(tmp_path / "c", training.state(nn.ModuleDict({"net": model}), optimizer))
    text = hint(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    assert "pass rename={'model/net.*': 'model/*'}." in text


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (
            lambda: named(a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 1)),
            lambda: named(x=nn.Linear(2, 2), y=nn.Linear(2, 2), c=nn.Linear(2, 1)),
        ),
        (
            lambda: named(a=nn.Linear(2, 2), c=nn.Linear(2, 1)),
            lambda: named(x=nn.Linear(3, 3), c=nn.Linear(2, 1)),
        ),
        (
            lambda: named(a=nn.Linear(2, 2), c=nn.Linear(2, 1)),
            lambda: named(x=nn.Linear(2, 2, bias=False), c=nn.Linear(2, 1)),
        ),
        (
            lambda: nn.ModuleDict({"1": nn.Linear(2, 2), "9": nn.Linear(2, 1)}),
            lambda: nn.ModuleDict({"2": nn.Linear(2, 2), "9": nn.Linear(2, 1)}),
        ),
    ],
    ids=["two that are alike", "other shapes", "one more", "another layer"],
)
def test_names_that_do_not_match_one_to_one_are_not_guessed(tmp_path: Path, saved: Any, here: Any) -> None:
    model, optimizer = trained(saved())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = here()
    text = hint(tmp_path / "c", fresh, torch.optim.AdamW(fresh.parameters()))
    assert "rename={'" not in text and "rename={saved name: name here}" in text
    assert text.index("rename=") < text.index("strict=False"), "what loses the weights comes last"


class Tied(nn.Module):
    """A model whose head may be tied to its embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(3, 3), nn.Linear(3, 3, bias=False)
        if tied:
            self.h.weight = self.e.weight


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
def test_weights_that_were_tied_when_saved_are_named_where_the_state_of_one_is_missing(
    tmp_path: Path, in_memory: bool, several: bool
) -> None:
    def parts(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return ({"net": model}, {"net": optimizer}) if several else (model, optimizer)

    model, optimizer = trained(Tied(True))
    source: Any = training.state(*parts(model, optimizer))
    if not in_memory:
        tc.save(tmp_path / "c", source)
        source = tmp_path / "c"
    fresh = Tied(False)
    again = torch.optim.AdamW(fresh.parameters())
    text = hint(source, *parts(fresh, again))
    name = "net/h.weight was tied to net/e.weight" if several else "h.weight was tied to e.weight"
    assert text.startswith(f"{name} when this was saved, which has the state of both. Tie them here too, or pass")
    if several:
        return
    report = training.restore(source, fresh, again, rng=False, strict=False)
    assert report.missing == ("optimizer/h.weight",) and torch.equal(fresh.h.weight, model.e.weight)
    assert again.state[fresh.e.weight]["step"] == 1 and fresh.h.weight not in again.state


def test_names_in_extra_that_were_saved_and_are_not_given_are_told(tmp_path: Path) -> None:
    model, optimizer = trained(nn.Linear(2, 2))
    ema = torch.optim.swa_utils.AveragedModel(model)
    extra: dict[str, Any] = {"ema": ema, "epoch": 3, "scaler": torch.amp.GradScaler("cpu")}
    tc.save(tmp_path / "c", training.state(model, optimizer, extra=extra))
    has = "The checkpoint has in extra: ema, epoch, scaler; given here: "
    text = hint(tmp_path / "c", model, optimizer, extra={"epoch": 0})
    assert text.startswith(f"{has}epoch. Give ema, scaler too, and `...` for what stays as it is")
    text = hint(tmp_path / "c", model, optimizer, extra={})
    assert text.startswith(f"{has}nothing. Give ema, epoch, scaler too, ")
    text = hint(tmp_path / "c", model, optimizer, extra={"epoch": 0, "ema": ema, "scaler": ..., "more": 1})
    assert text.startswith(f"{has}epoch, ema, scaler, more. Give the names that were saved, ")
    pasted = {"epoch": 0, "ema": ema, "scaler": ...}
    assert training.restore(tmp_path / "c", model, optimizer, rng=False, extra=pasted).extra["epoch"] == 3


def two_layers() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 1)})


@pytest.mark.parametrize("strict", [True, "missing"])
def test_a_parameter_that_was_not_in_the_optimizer_is_told(tmp_path: Path, strict: Any) -> None:
    model = two_layers()
    _, optimizer = trained(model.b)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    text = hint(tmp_path / "c", model, torch.optim.AdamW(model.parameters()), strict=strict)
    assert text.startswith("a.weight was not in the optimizer when this was saved, as it was frozen or added later. ")
    assert "class" not in text


def test_a_parameter_that_trains_in_no_optimizer_here_is_told(tmp_path: Path) -> None:
    model, optimizer = trained(two_layers())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    part = torch.optim.AdamW(model["b"].parameters())
    text = hint(tmp_path / "c", model, part)
    assert text.startswith("a.weight was in the optimizer when this was saved, and is not in it here. Give it to the ")
    report = training.restore(tmp_path / "c", model, part, rng=False, strict="missing")
    assert "optimizer/a.bias/exp_avg" in report.unexpected


def test_an_optimizer_that_is_not_given_is_told(tmp_path: Path) -> None:
    models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
    optimizers = {name: trained(one)[1] for name, one in models.items()}
    tc.save(tmp_path / "c", training.state(models, optimizers))
    text = hint(tmp_path / "c", models, {"g": optimizers["g"]})
    assert text.startswith("The optimizer 'd' was saved, and is not given. Give it, or pass strict='missing'")
    training.restore(tmp_path / "c", models, {"g": optimizers["g"]}, rng=False, strict="missing")


def test_a_model_that_is_a_part_of_the_saved_one_is_told(tmp_path: Path) -> None:
    model, optimizer = trained(two_layers())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    part = nn.ModuleDict({"b": nn.Linear(2, 1)})
    for given in (None, torch.optim.AdamW(part.parameters())):
        text = hint(tmp_path / "c", part, given)
        assert text.startswith("Pass strict='missing' if one is a part of the other")
        training.restore(tmp_path / "c", part, given, rng=False, strict="missing")


def test_what_was_left_out_of_model_and_optimizer_is_told(tmp_path: Path) -> None:
    model = two_layers()
    model["a"].requires_grad_(False)
    _, optimizer = trained(model.b)
    optimizer.add_param_group({"params": list(model["a"].parameters())})
    tc.save(tmp_path / "c", training.state(model, optimizer, frozen=False))
    model["a"].requires_grad_(True)
    text = hint(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    assert text.startswith("Pass strict='missing'")


def test_a_state_of_which_a_part_is_lost_is_told(tmp_path: Path) -> None:
    model, optimizer = trained(nn.Linear(2, 2))
    tree = training.state(model, optimizer)
    tree["optimizer"]["weight"] = {k: v for k, v in tree["optimizer"]["weight"].items() if k != "exp_avg_sq"}
    tc.save(tmp_path / "c", tree)
    text = hint(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    assert text.startswith("A part of this state was not saved")


def adapted(name: str) -> nn.Module:
    """A frozen layer with an adapter of a name, as libraries for adapters nest them."""
    layer = nn.ModuleDict({"base": nn.Linear(2, 2), "lora_A": nn.ModuleDict({name: nn.Linear(2, 1, bias=False)})})
    layer["base"].requires_grad_(False)
    return nn.ModuleDict({"layer": layer})


@pytest.mark.parametrize("strict", [True, "missing", False])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_an_adapter_of_another_name_is_refused_with_the_rename(
    tmp_path: Path, strict: Any, with_optimizer: bool
) -> None:
    model = adapted("default")
    adapter = model["layer"]["lora_A"]["default"]
    _, optimizer = trained(adapter)
    tc.save(tmp_path / "c", training.state(model, optimizer, frozen=False))
    fresh = adapted("other")
    here = fresh["layer"]["lora_A"]["other"]
    again = torch.optim.AdamW(here.parameters()) if with_optimizer else None
    text = hint(tmp_path / "c", fresh, again, strict=strict)
    [line] = re.findall(r"pass rename=(\{.*?\})", text)
    report = (
        training.restore(
            tmp_path / "c", fresh, again, rng=False, rename=ast.literal_eval(line), strict=strict or "missing"
        )
        if strict is not True
        else None
    )
    if report is not None:
        assert torch.equal(here.weight, adapter.weight) and not report.missing
        assert again is None or torch.equal(
            again.state[here.weight]["exp_avg"], optimizer.state[adapter.weight]["exp_avg"]
        )


def test_moments_of_layers_that_are_frozen_here_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained(two_layers())
    tc.save(tmp_path / "c", training.state(model, optimizer))
    model["a"].requires_grad_(False)
    again = torch.optim.AdamW(model["b"].parameters())
    report = training.restore(tmp_path / "c", model, again)
    assert set(report.ignored) == {"optimizer/a.weight", "optimizer/a.bias"}
    [record] = caplog.records
    assert record.levelname == "WARNING" and str(tmp_path / "c") in record.getMessage()
    assert "optimizer/a.bias, optimizer/a.weight" in record.getMessage() and "frozen here" in record.getMessage()
    caplog.clear()
    fresh = two_layers()
    fresh["a"].requires_grad_(False)
    tc.save(tmp_path / "no moments", training.state(fresh, torch.optim.AdamW(fresh.parameters())))
    training.restore(tmp_path / "no moments", model, again)
    assert not caplog.records


@pytest.mark.parametrize("under", ["", "model"])
def test_what_is_no_source_is_refused_by_its_class_wherever_it_is_placed(under: str) -> None:
    source: Any = 5
    with pytest.raises(tc.MismatchError, match="found int"):
        tc.training.restore(source, torch.nn.Linear(2, 2), under=under)
