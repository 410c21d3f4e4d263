"""States without frozen or unselected parameters: the checkpoint says what it lacks, and a restore leaves it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training


class Adapted(nn.Module):
    """A frozen trunk with a small adapter, as LoRA has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.adapter = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.full((1,), float(seed)))
        self.trunk.requires_grad_(False)


def job(seed: int, *, steps: int = 0) -> tuple[Adapted, torch.optim.Optimizer]:
    model = Adapted(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model.adapter(model.trunk(torch.ones(1, 4))).sum().backward()
        optimizer.step()
    return model, optimizer


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


TRUNK = ("model/trunk.weight", "model/trunk.bias")


def test_frozen_parameters_are_left_out_by_name_and_stay_in_a_restore(tmp_path: Path) -> None:
    model, optimizer = job(1, steps=2)
    tree = training.state(model, optimizer, frozen=False)
    assert set(tree["model"]) == {"adapter.weight", "adapter.bias", "seen"}
    assert tree["left_out"] == {"trunk.weight": "frozen", "trunk.bias": "frozen"}
    tc.save(tmp_path / "c", tree)
    for options in ({"strict": "missing"}, {"strict": False}):
        other, fresh = job(2)
        trunk = other.trunk.weight.clone()
        report = training.restore(tmp_path / "c", other, fresh, **options)  # type: ignore[arg-type]
        assert report.left_alone == TRUNK and not report.missing and "left alone  model/trunk.weight" in str(report)
        assert torch.equal(other.trunk.weight, trunk) and same(other.adapter, model.adapter) and other.seen == 1
        moments = [optimizer.state[p] for p in model.adapter.parameters()]
        for mine, theirs in zip(moments, (fresh.state[p] for p in other.adapter.parameters()), strict=True):
            assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_a_strict_restore_refuses_it_and_says_what_to_do(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(job(1)[0], frozen=False))
    with pytest.raises(tc.MismatchError, match=r"2 missing in the checkpoint: model/trunk.weight") as caught:
        training.restore(tmp_path / "c", job(2)[0])
    assert "strict='missing'" in caught.value.hint


def test_what_is_lost_beside_what_was_left_out_is_still_missing(tmp_path: Path) -> None:
    tree = training.state(job(1)[0], frozen=False)
    del tree["model"]["adapter.bias"]
    tc.save(tmp_path / "c", tree)
    with pytest.raises(tc.MismatchError, match=r"1 missing in the checkpoint: model/adapter.bias"):
        training.restore(tmp_path / "c", job(2)[0], strict="missing")


def test_globs_choose_parameters_and_their_moments(tmp_path: Path) -> None:
    model, optimizer = job(1, steps=1)
    tree = training.state(model, optimizer, select="model/adapter.*", exclude="model/adapter.bias")
    assert set(tree["model"]) == set(tree["optimizer"]) == {"adapter.weight"}
    assert tree["left_out"] == {
        "trunk.weight": "select",
        "trunk.bias": "select",
        "adapter.bias": "exclude",
        "seen": "select",
    }
    tc.save(tmp_path / "c", tree)
    other, fresh = job(2)
    report = training.restore(tmp_path / "c", other, fresh, strict="missing")
    assert set(report.left_alone) == {*TRUNK, "model/adapter.bias", "model/seen"}
    assert torch.equal(other.adapter.weight, model.adapter.weight)
    assert not torch.equal(other.adapter.bias, model.adapter.bias)


def test_a_bank_of_base_and_adapter_fills_all(tmp_path: Path) -> None:
    base, tuned, target = job(1)[0], job(2)[0], job(3)[0]
    tc.save(tmp_path / "base", training.state(base, rng=False))
    tc.save(tmp_path / "adapter", training.state(tuned, frozen=False, rng=False))
    report = training.restore([tmp_path / "base", tmp_path / "adapter"], target, rng=False)
    assert not report.left_alone and same(target.trunk, base.trunk) and same(target.adapter, tuned.adapter)


def test_a_whole_state_says_nothing_of_it() -> None:
    assert "left_out" not in training.state(*job(1))
    assert "left_out" not in training.state(nn.Linear(2, 2), frozen=False)


def test_training_save_leaves_out_too(tmp_path: Path) -> None:
    model, optimizer = job(1, steps=1)
    training.save(tmp_path / "c", model, optimizer, frozen=False)
    other, fresh = job(2)
    trunk = other.trunk.weight.clone()
    training.load(tmp_path / "c", other, fresh, strict="missing")
    assert torch.equal(other.trunk.weight, trunk) and same(other.adapter, model.adapter)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"select": "adapter.*"}, "select='adapter"),
        ({"exclude": ["model/x"]}, "exclude='model/x"),
        ({"frozen": 3}, "frozen"),
    ],
)
def test_what_means_nothing_is_refused(options: Any, path: str) -> None:
    with pytest.raises(tc.TreeError) as caught:
        training.state(job(1)[0], **options)
    assert caught.value.path.startswith(path) and caught.value.expected and caught.value.found and caught.value.hint


class Layer(nn.Linear):
    """A layer with adapters by name, as PEFT has them; tests/integrations/test_adapters_left_out.py has its own."""

    adapter_layer_names = ("lora_A", "lora_embedding", "missing")

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lora_A = nn.ModuleDict({"first": nn.Linear(4, 2), "second": nn.Linear(4, 2)})
        self.lora_embedding = nn.ParameterDict({"third": nn.Parameter(torch.ones(2))})
        self.requires_grad_(False)
        self.lora_A["first"].requires_grad_(True)


def test_adapters_that_are_not_active_are_named_once_where_they_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Layer(), Layer())
    for _ in range(2):
        assert len(training.state(model, frozen=False, exclude="model/1.*")["model"]) == 2
    [record] = caplog.records
    assert (
        record.levelname == "WARNING"
        and "not active: second, third (3 parameters: 0.lora_A.second.weight" in record.message
    )
    training.state(nn.Sequential(Layer()), frozen=False, exclude=("model/*.second.*", "model/*.third"))
    training.state(nn.Sequential(Layer()))
    assert len(caplog.records) == 1
