"""Models whose `state_dict` hooks give parameters other names and shapes: saved under these, loaded by the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.training.fused_jobs import Attention, Plain, job, step
from treeckpt import training

from .jobs import same_tensors


@pytest.mark.parametrize("turned", [False, True], ids=["views", "tensors of their own"])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, torch.compile], ids=["plain", "parallel", "compiled"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_training_goes_on_with_a_fused_matrix_that_is_saved_in_parts(tmp_path: Path, turned: bool, wrap: Any) -> None:
    model, optimizer = job(0, turned=turned)
    step(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    paths = tc.inspect(tmp_path / "c").by_path
    assert "model/0.wq.weight" in paths and "model/0.wqkv.weight" not in paths
    assert "optimizer/0.wqkv.weight/exp_avg" in paths
    tree = training.state(model, optimizer, buffers="per_rank")
    copies = []
    for source in (tmp_path / "c", tree):
        fresh, again = job(1, turned=turned, wrap=wrap)
        weight = next(fresh.parameters())
        address = weight.data_ptr()
        report = training.restore(source, fresh, again)
        assert (report.missing, report.unexpected, report.ignored) == ((), (), ())
        assert next(fresh.parameters()) is weight and weight.data_ptr() == address
        assert same_tensors(again.state_dict(), optimizer.state_dict())
        copies.append((fresh, again))
    expected = step(model, optimizer)
    for fresh, again in copies:
        assert step(getattr(fresh, "module", getattr(fresh, "_orig_mod", fresh)), again) == expected


@pytest.mark.parametrize("turned", [False, True], ids=["views", "tensors of their own"])
def test_a_model_on_the_meta_device_takes_the_parts(tmp_path: Path, turned: bool) -> None:
    model, optimizer = job(0, turned=turned)
    step(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    with torch.device("meta"):
        fresh, again = job(1, turned=turned)
    report = training.restore(tmp_path / "c", fresh, again)
    assert not report.on_meta and not any(p.is_meta for p in fresh.parameters())
    assert torch.equal(fresh[0].wqkv.weight, model[0].wqkv.weight)
    assert step(fresh, again) == step(model, optimizer)


def test_the_parts_are_those_of_a_model_that_has_them_apart(tmp_path: Path) -> None:
    fused, apart = Attention(turned=False), Plain()
    tc.save(tmp_path / "fused", training.state(fused, rng=False))
    training.restore(tmp_path / "fused", apart, rng=False)
    assert torch.equal(torch.cat([p.data for p in apart.parameters()]), fused.wqkv.weight)
    tc.save(tmp_path / "apart", training.state(Plain(), rng=False))
    training.restore(tmp_path / "apart", fused, rng=False)
    assert torch.equal(fused.wqkv.weight[4:8], tc.load(tmp_path / "apart")["model"]["wk.weight"])


def test_what_is_left_out_of_the_parts_stays(tmp_path: Path) -> None:
    model, fresh = Attention(turned=True), Attention(turned=True)
    tc.save(tmp_path / "c", training.state(model, rng=False))
    before = fresh.wqkv.weight.detach().clone()
    training.restore(tmp_path / "c", fresh, rng=False, select="model/wk*")
    assert torch.equal(fresh.wqkv.weight[4:8], model.wqkv.weight[4:8])
    assert torch.equal(fresh.wqkv.weight[:4], before[:4]) and torch.equal(fresh.wqkv.weight[8:], before[8:])


def test_a_frozen_parameter_that_a_hook_renames_needs_no_state(tmp_path: Path) -> None:
    model, optimizer = job(0, turned=True)
    step(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh, _ = job(1, turned=True)
    fresh[0].requires_grad_(False)
    again = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad])
    assert training.restore(tmp_path / "c", fresh, again).ignored == ("optimizer/0.wqkv.weight",)


class Stubborn(nn.Linear):
    """Gives a name that it does not take back."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(lambda m, state, *_: state.update(more=state["weight"] * 2))
        self.register_load_state_dict_pre_hook(lambda *_: None)


def test_a_name_that_the_model_does_not_take_back_is_named(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(Stubborn()))
    with pytest.raises(tc.MismatchError, match=r"model/more: expected a name that the model's load_state_dict takes"):
        training.restore(tmp_path / "c", Stubborn())


class Cached(nn.Linear):
    """Keeps what it derives from its weight when that is loaded, in a hook or in code of its own."""

    def __init__(self, *, hook: bool) -> None:
        super().__init__(3, 3)
        self.derived = self.weight.detach() * 2
        self.hook = hook
        if hook:
            self.register_load_state_dict_post_hook(lambda module, keys: module.derive())

    def derive(self) -> None:
        self.derived = self.weight.detach() * 2

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if not self.hook:
            self.derive()


@pytest.mark.parametrize("meta", [False, True], ids=["", "meta"])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["plain", "parallel"])
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "method"])
def test_what_a_module_derives_when_it_is_loaded_is_derived(tmp_path: Path, hook: bool, wrap: Any, meta: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Cached(hook=hook))
    tc.save(tmp_path / "c", training.state(model))
    for source in (tmp_path / "c", training.state(model, buffers="per_rank")):
        with torch.device("meta" if meta else "cpu"):
            fresh = nn.Sequential(nn.Linear(3, 3), Cached(hook=hook))
        weight = fresh[1].weight
        training.restore(source, wrap(fresh))
        assert torch.equal(fresh[1].derived, model[1].weight * 2) and fresh[1].weight is weight
