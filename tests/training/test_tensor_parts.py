"""Models and optimizers with tensors that are made of others: restored as `load_state_dict` would, in place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training

from ..helpers.wrapped_moments import CodedSGD, Codes


def job(seed: int = 0) -> tuple[nn.Module, CodedSGD]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))  # 3 elements of the last bias are no block
    return model, CodedSGD(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int) -> None:
    for step in range(first, stop):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [state["momentum"] for state in optimizer.state.values()]


@pytest.mark.parametrize("source", ["checkpoint", "tree"])
@pytest.mark.parametrize("trained", [0, 2])
def test_training_goes_on_as_without_a_break(tmp_path: Path, source: str, trained: int) -> None:
    model, optimizer = job()
    train(model, optimizer, 0, 5)
    tree: Any = training.state(model, optimizer)
    tc.save(tmp_path / "a", tree)
    other, fresh = job(seed=1)
    train(other, fresh, 0, trained)
    before = list(map(id, moments(fresh)))
    training.restore(tmp_path / "a" if source == "checkpoint" else copy.deepcopy(tc.load(tmp_path / "a")), other, fresh)
    assert [type(one) for one in moments(fresh)] == [Codes, Codes, Codes, torch.Tensor]
    assert not trained or before == list(map(id, moments(fresh)))
    train(model, optimizer, 5, 10)
    train(other, fresh, 5, 10)
    assert same(model, other)


def test_state_dicts_that_were_loaded_train_on(tmp_path: Path) -> None:
    model, optimizer = job()
    train(model, optimizer, 0, 5)
    tc.save(tmp_path / "a", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    found, (other, fresh) = tc.load(tmp_path / "a"), job(seed=1)
    other.load_state_dict(found["model"])
    fresh.load_state_dict(found["optimizer"])
    train(model, optimizer, 5, 8)
    train(other, fresh, 5, 8)
    assert same(model, other)


def test_objects_are_filled_in_place(tmp_path: Path) -> None:
    model, optimizer = job()
    train(model, optimizer, 0, 5)
    tc.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    other, used = job(seed=1)
    train(other, used, 0, 1)
    tc.load_into(tmp_path / "a", {"model": other, "optimizer": used})
    train(model, optimizer, 5, 8)
    train(other, used, 5, 8)
    assert same(model, other)


def test_a_moment_of_another_kind_here_gives_way_to_the_saved_one(tmp_path: Path) -> None:
    model, optimizer = job()
    train(model, optimizer, 0, 3)
    tc.save(tmp_path / "coded", training.state(model, optimizer))
    plain = training.state(model, optimizer)["optimizer"]
    other, used = job(seed=1)
    train(other, used, 0, 2)
    for state in used.state.values():
        state["momentum"] = torch.zeros(state["momentum"].shape)
    training.restore(tmp_path / "coded", other, used)
    assert [type(one) for one in moments(used)] == [Codes, Codes, Codes, torch.Tensor]
    assert torch.equal(moments(used)[0].codes, plain["0.weight"]["momentum"].codes)
    for state in optimizer.state.values():
        state["momentum"] = torch.full(state["momentum"].shape, 2.0)
    tc.save(tmp_path / "plain", training.state(model, optimizer))
    training.restore(tmp_path / "plain", other, used)
    assert all(type(one) is torch.Tensor and (one == 2).all() for one in moments(used))


def wrapped_model(seed: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    torch.manual_seed(seed)
    codes = Codes(torch.randint(-9, 9, (4, 4), dtype=torch.int8), torch.rand(4), True)
    model[0].weight = nn.Parameter(codes)
    return model


def test_weights_made_of_others_are_filled_in_place(tmp_path: Path) -> None:
    model, other = wrapped_model(0), wrapped_model(1)
    tc.save(tmp_path / "a", training.state(model, torch.optim.SGD(model[1].parameters(), lr=0.1)))
    live, codes = other[0].weight, other[0].weight.codes
    training.restore(tmp_path / "a", other, torch.optim.SGD(other[1].parameters(), lr=0.1))
    assert other[0].weight is live
    assert isinstance(live, nn.Parameter)
    assert live.codes is codes
    assert torch.equal(codes, model[0].weight.codes)
    assert torch.equal(live.scale, model[0].weight.scale)


def test_moments_of_such_weights_are_what_they_were(tmp_path: Path) -> None:
    """Plain ones, though `empty_like` of the weight is of its class."""
    model, other = wrapped_model(0), wrapped_model(1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, other)]
    optimizers[0].state[model[0].weight]["momentum_buffer"] = torch.rand(4, 4)
    tc.save(tmp_path / "a", training.state(model, optimizers[0]))
    training.restore(tmp_path / "a", other, optimizers[1])
    found = optimizers[1].state[other[0].weight]["momentum_buffer"]
    assert type(found) is torch.Tensor
    assert torch.equal(found, optimizers[0].state[model[0].weight]["momentum_buffer"])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.Module:
        model = wrapped_model(seed)
        model.add_module("again", nn.Linear(4, 4, bias=False))
        model.again.weight = model[0].weight
        return model

    model, other = tied(0), tied(1)
    tc.save(tmp_path / "a", training.state(model))
    training.restore(tmp_path / "a", other)
    assert other.again.weight is other[0].weight
    assert torch.equal(other[0].weight.codes, model[0].weight.codes)
    for one in (model, other):
        assert tc.load(tmp_path / "a")["model"]["again.weight"].signed is one.again.weight.signed


@pytest.mark.parametrize("way", ["plain here", "plain there", "other class", "other context"])
def test_a_model_of_another_kind_is_refused_before_anything_changes(tmp_path: Path, way: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    saved, live = (wrapped_model(0), plain) if way == "plain here" else (plain, wrapped_model(0))
    if way in ("other class", "other context"):
        saved = wrapped_model(1)
        weight = torch.eye(4).to_sparse() if way == "other class" else Codes(*_parts(live[0].weight), False)
        live[0].weight = nn.Parameter(weight)
    tc.save(tmp_path / "a", training.state(saved))
    before = live[1].weight.detach().clone()
    for strict in (True, False):
        with pytest.raises(tc.MismatchError, match=r"model/0.weight: expected"):
            training.restore(tmp_path / "a", live, strict=strict)
    assert torch.equal(live[1].weight, before)


def _parts(weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.codes, weight.scale


def test_sparse_buffers_and_moments(tmp_path: Path) -> None:
    def made(seed: int, mask: torch.Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        model.register_buffer("mask", mask.to_sparse())
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made(0, torch.eye(3))
    optimizer.state[model.weight]["momentum_buffer"] = torch.eye(3).to_sparse()
    optimizer.state[model.bias]["momentum_buffer"] = torch.rand(3)
    tc.save(tmp_path / "a", training.state(model, optimizer))
    for trained in (False, True):
        other, fresh = made(1, torch.ones(3, 3))
        mask = other.mask
        if trained:
            fresh.state[other.weight]["momentum_buffer"] = torch.ones(3, 3).to_sparse()
            fresh.state[other.bias]["momentum_buffer"] = torch.zeros(3)
        training.restore(tmp_path / "a", other, fresh)
        assert other.mask is mask
        assert torch.equal(mask.to_dense(), torch.eye(3))
        found = fresh.state[other.weight]["momentum_buffer"]
        assert found.is_sparse
        assert torch.equal(found.to_dense(), torch.eye(3))


def test_a_manager_resumes_them(tmp_path: Path) -> None:
    model, optimizer = job()
    train(model, optimizer, 0, 5)
    with tc.Manager(tmp_path / "run") as manager:
        manager.save(5, training.state(model, optimizer))
    other, fresh = job(seed=1)
    with tc.Manager(tmp_path / "run") as manager:
        manager.resume(other, fresh)
    train(model, optimizer, 5, 8)
    train(other, fresh, 5, 8)
    assert same(model, other)
