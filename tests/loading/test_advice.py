"""Whoever follows the advice of each error, to the letter, ends with right values or a plain refusal."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import treeckpt as tc

W = torch.arange(6.0).reshape(2, 3)
ADVICE: dict[str, Callable[[re.Match[str]], Any]] = {
    r"rename=(\{'.*?\})": lambda found: {"rename": ast.literal_eval(found[1])},
    r"strict=(?P<q>['\"])missing(?P=q)": lambda _: {"strict": "missing"},
    r"strict=False": lambda _: {"strict": False},
    r"cast=True": lambda _: {"cast": True},
    r"from_root=True": lambda _: {"from_root": True},
    r"under='(\w+)'": lambda found: {"under": found[1]},
    r"transforms=rules\.Dequantize\('([^']+)', '([^']+)'": lambda found: {
        "transforms": tc.rules.Dequantize(found[1], found[2])
    },
}


def follow(call: Callable[..., Any], **options: Any) -> tuple[Any, str]:
    """Makes a call with what its errors advise, until it works or an error advises nothing new."""
    text = ""
    for _ in range(8):
        try:
            return call(**options), text
        except (tc.TreeckptError, TypeError) as error:
            text = str(error)
            advised: dict[str, Any] = {}
            for pattern, option in ADVICE.items():
                if (found := re.search(pattern, text)) is not None and not advised.keys() & option(found).keys():
                    advised |= option(found)
            if advised.items() <= options.items():
                return None, text
            options |= advised
    raise AssertionError(f"no end: {text}")


def zeros(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        ({"model": {"w": W}, "step": 1}, {"w": W}),
        ({"state": {"w": W, "b": W[0]}}, {"w": W, "b": W[0]}),
        ({"w": W}, {"w": W.to(torch.float64)}),
        ({"w": W, "more": W[0]}, {"w": W.half()}),
        ({"w": W}, {"model": {"w": W}}),
        ({"model": {"w": W}, "extra": {"ema": {"w": W + 1}}}, {"w": W}),
        ({"w": W.to(torch.int8)}, {"w": W}),
        ({"q": {"weight": W.to(torch.int8), "weight_scale": torch.tensor([0.5])}}, {"q": {"weight": W * 0.5}}),
        (
            {"q": {"weight": W.to(torch.float8_e4m3fn), "weight_scale": torch.tensor([[2.0], [1.0]])}},
            {"q": {"weight": W * torch.tensor([[2.0], [1.0]])}},
        ),
    ],
)
def test_advice_of_a_load_ends_in_the_values_that_were_saved(tmp_path: Path, saved: Any, like: Any) -> None:
    tc.save(tmp_path / "c", saved)
    empty = tc.trees.empty_like(like)
    found, text = follow(lambda **options: tc.load(tmp_path / "c", empty, **options))
    assert found is not None, text
    for (path, a), (_, b) in zip(flat(found), flat(like), strict=True):
        assert torch.equal(a, b), (path, text)
    into = tc.trees.empty_like(like)
    report, text = follow(lambda **options: tc.load_into(tmp_path / "c", into, **options))
    assert report is not None, text
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(flat(into), flat(like), strict=True))


def flat(tree: Any) -> list[tuple[str, Any]]:
    return sorted(tc.trees.flatten_names(tree).items())


@pytest.mark.parametrize(
    ("saved", "like", "says"),
    [
        # LLM.int8 has more than a factor beside its weights
        ({"weight": W.to(torch.int8), "SCB": torch.ones(2)}, {"weight": W}, "Load it with the library that quantized"),
        (
            {"w": W.to(torch.uint8), "w_scale": torch.ones(1), "w_zero_point": torch.ones(1)},
            {"w": W},
            "Load it with the library that quantized",
        ),
        ({"model": {"w": W, "b": W[0]}, "step": 1}, {"model": [W, W[0]], "step": 0}, "Not one name below model is in"),
        ({"w": W}, {"w": W[:1]}, "Ask for the saved shape"),
        ({"w": W, "n": 1}, {"w": 1, "n": 1}, "Put an array"),
        ({"w": 1}, {"w": W}, "found the value 1"),
    ],
)
def test_what_no_option_makes_right_is_refused(tmp_path: Path, saved: Any, like: Any, says: str) -> None:
    tc.save(tmp_path / "c", saved)
    found, text = follow(lambda **options: tc.load(tmp_path / "c", like, **options))
    assert found is None, text
    assert says in text


def test_a_cast_that_cuts_says_so(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"w": np.full(2, 0.5), "c": np.full(2, 1j)})
    with pytest.raises(tc.MismatchError, match="Pass cast=True to convert, which cuts fractions off"):
        tc.load(tmp_path / "c", {"w": np.zeros(2, int), "c": np.zeros(2, complex)})
    with pytest.raises(tc.MismatchError, match="Pass cast=True to convert, which drops imaginary parts"):
        tc.load(tmp_path / "c", {"w": np.zeros(2), "c": np.zeros(2)})


def linear(value: float) -> nn.Linear:
    made = nn.Linear(3, 2)
    with torch.no_grad():
        made.weight.fill_(value)
        made.bias.fill_(value)
    return made


@pytest.mark.parametrize("bank", [False, True])
@pytest.mark.parametrize(
    "tree",
    [
        lambda state: state,
        lambda state: {"model": {f"net.{name}": tensor for name, tensor in state.items()}},
        lambda state: {"model": {name: tensor.double() for name, tensor in state.items()}},
        lambda state: {"weights": state},
        lambda state: {"model": {**state, "head": torch.ones(1)}, "step": 3},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    ],
    ids=["root", "prefix", "dtype", "name", "part", "dotted"],
)
def test_advice_of_a_restore_ends_in_the_model_that_was_saved(tmp_path: Path, tree: Any, bank: bool) -> None:
    tc.save(tmp_path / "c", tree(linear(1.0).state_dict()))
    model = linear(0.0)

    def restore(rename: Any = None, **options: Any) -> Any:
        if bank:
            return tc.training.restore([tc.From(tmp_path / "c", rename=rename)], model, **options)
        return tc.training.restore(tmp_path / "c", model, rename=rename, **options)

    report, text = follow(restore)
    assert report is not None, text
    assert torch.equal(model.weight, linear(1.0).weight) and torch.equal(model.bias, linear(1.0).bias)


@pytest.mark.parametrize("rename", [{"": "model"}, {"weight": "model/weight", "bias": "model/bias"}])
def test_a_rename_of_a_bank_that_needs_the_root_is_told_so_and_then_right(tmp_path: Path, rename: Any) -> None:
    tc.save(tmp_path / "c", dict(linear(1.0).state_dict()))
    model, source = linear(0.0), [tc.From(tmp_path / "c", rename=rename)]
    report, text = follow(lambda **options: tc.training.restore(source, model, **options))
    assert report is not None and "from_root=True" in text
    assert torch.equal(model.weight, linear(1.0).weight)
