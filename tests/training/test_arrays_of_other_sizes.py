"""Objects that hold arrays of another number or size than was saved: what they take is their own affair."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training


class Replay:
    """A buffer that grows, whose state has arrays in lists, dicts and tuples."""

    def __init__(self, size: int) -> None:
        self.items = [torch.full((2,), float(n)) for n in range(size)]
        self.buffer, self.numbers = torch.arange(2.0 * size).reshape(size, 2), np.arange(size)
        self.weights, self.pair = {n: torch.tensor(float(n)) for n in range(size)}, (size, torch.ones(size))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Average:
    """An average of a model, with the weights that it set aside for an evaluation."""

    def __init__(self, model: nn.Module, *, stored: bool = False, value: float = 0.0) -> None:
        self.shadow = [torch.full_like(p, value) for p in model.parameters()]
        self.stored = [parameter.clone() for parameter in model.parameters()] if stored else None

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)  # which torch refuses for what is in the graph of a gradient
        self.shadow, self.stored = state["shadow"], state["stored"]


class Metric(nn.Module):
    """A module that takes tensors of any size, and a list of them, by its own code."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(float(size)))
        self.seen = [torch.ones(n + 1) for n in range(size)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "total"], destination[prefix + "seen"] = self.total, self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.total, self.seen = state_dict.pop(prefix + "total"), state_dict.pop(prefix + "seen")


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_plain(value) for value in state)
    return state.tolist() if hasattr(state, "tolist") else state


def _load_into(path: Path, saved: Any, here: Any) -> None:
    tc.save(path, {"it": saved})
    tc.load_into(path, {"it": here})


def _register(path: Path, saved: Any, here: Any) -> None:
    for one, act in ((saved, "save"), (here, "restore")):
        manager = tc.Manager(path, background=False)
        manager.register("it", one)
        manager.save(1) if act == "save" else manager.restore()


def _extra(path: Path, saved: Any, here: Any) -> None:
    tc.save(path, training.state(nn.Linear(1, 1), extra={"it": saved}))
    training.restore(path, nn.Linear(1, 1), extra={"it": here})


def _extra_of_tree(path: Path, saved: Any, here: Any) -> None:
    training.restore(training.state(nn.Linear(1, 1), extra={"it": saved}), nn.Linear(1, 1), extra={"it": here})


def _copy_into(path: Path, saved: Any, here: Any) -> None:
    tc.trees.copy_into({"it": saved}, {"it": here})


WAYS: list[Callable[[Path, Any, Any], None]] = [_load_into, _register, _extra, _extra_of_tree, _copy_into]
MODEL = nn.Linear(2, 2)
PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "empty": lambda: (Replay(3), Replay(0)),
    "to empty": lambda: (Replay(0), Replay(3)),
    "larger": lambda: (Replay(3), Replay(2)),
    "smaller": lambda: (Replay(2), Replay(3)),
    "same": lambda: (Replay(3), Replay(3)),
    "average with stored weights": lambda: (Average(MODEL, stored=True, value=2.0), Average(MODEL)),
    "average without": lambda: (Average(MODEL, value=2.0), Average(MODEL, stored=True)),
    "stored weights on both sides": lambda: (Average(MODEL, stored=True, value=2.0), Average(MODEL, stored=True)),
    "metric": lambda: (Metric(3), Metric(2)),
    "used metric": lambda: (Metric(1), Metric(4)),
    "fresh metric": lambda: (Metric(4), Metric(0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_saved_state_is_given_to_the_object(
    tmp_path: Path, pair: str, way: Callable[[Path, Any, Any], None]
) -> None:
    saved, here = PAIRS[pair]()
    expected = _plain(saved.state_dict())
    way(tmp_path / "c", saved, here)
    assert _plain(here.state_dict()) == expected


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_the_same_shape_are_filled_in_place(tmp_path: Path, way: Callable[[Path, Any, Any], None]) -> None:
    saved, here = Replay(3), Replay(2)
    first = here.items[0].zero_()
    saved.items[0].fill_(5)
    way(tmp_path / "c", saved, here)
    assert here.items[0] is first and first.tolist() == [5, 5]
    saved.items[2].fill_(-1)
    assert here.items[2].tolist() == [2, 2], "new arrays are copies"


def test_an_array_of_the_same_shape_and_another_dtype_needs_cast(tmp_path: Path) -> None:
    saved, here = Replay(2), Replay(2)
    here.buffer = here.buffer.double()
    tc.save(tmp_path / "c", {"it": saved})
    with pytest.raises(tc.MismatchError, match="it/buffer: expected float64, found float32"):
        tc.load_into(tmp_path / "c", {"it": here})
    tc.load_into(tmp_path / "c", {"it": here}, cast=True)
    assert here.buffer.dtype is torch.float64


def test_a_module_of_torch_alone_is_compared_before_anything_changes(tmp_path: Path) -> None:
    """Its `load_state_dict` refuses other shapes after it has filled the others."""
    tc.save(tmp_path / "c", {"a": Replay(3), "module": nn.BatchNorm1d(2)})
    here = {"a": Replay(1), "module": nn.BatchNorm1d(3)}
    with pytest.raises(tc.MismatchError, match=r"module/weight: expected shape \(3,\), found \(2,\)"):
        tc.load_into(tmp_path / "c", here)
    assert len(here["a"].items) == 1


@pytest.mark.parametrize("pair", ["larger", "smaller", "empty"])
def test_a_part_that_is_not_selected_leaves_what_is_here(tmp_path: Path, pair: str) -> None:
    saved, here = PAIRS[pair]()
    before = _plain(here.state_dict())
    tc.save(tmp_path / "c", {"it": saved, "step": 3})
    tree = {"it": here, "step": 0}
    tc.load_into(tmp_path / "c", tree, select="step")
    assert tree["step"] == 3 and _plain(here.state_dict()) == before


def test_the_optimizer_of_a_tree_goes_back_to_where_a_parameter_had_no_state(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.Adam(model.parameters())

    def step(layers: int) -> None:
        optimizer.zero_grad()
        torch.stack([layer(torch.ones(1, 2)).sum() for layer in model[:layers]]).sum().backward()
        optimizer.step()

    step(1)
    tc.save(tmp_path / "c", {"optimizer": optimizer})
    moment = optimizer.state[model[0].weight]["exp_avg"].clone()
    step(2)
    tc.load_into(tmp_path / "c", {"optimizer": optimizer})
    assert len(optimizer.state) == 2
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moment)


def test_an_optimizer_that_lacks_some_of_the_moments_is_sent_to_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tc.save(tmp_path / "c", {"optimizer": optimizer})
    del optimizer.state[model.bias]
    with caplog.at_level(logging.WARNING), pytest.raises(tc.MismatchError, match=r"without state/1/momentum_buffer"):
        tc.load_into(tmp_path / "c", {"optimizer": optimizer}, strict=False)
    assert not caplog.records
