"""The state of the random number generators alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import treeckpt as tc


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_continue_from_a_state_that_was_saved(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"rng": tc.PerRank(tc.training.rng_state())})
    expected = [draw() for _ in range(3)]
    assert tc.training.set_rng_state(tc.load(tmp_path / "c")["rng"].value) == []
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("state", [None, {}, {"torch": 1, "numpy": 2, "python": 3}])
def test_what_is_no_state_changes_no_generator(state: object) -> None:
    before = tc.training.rng_state()["torch"]
    with pytest.raises(tc.MismatchError, match="rng"):
        tc.training.set_rng_state(state)  # pyright: ignore[reportArgumentType]
    assert torch.equal(tc.training.rng_state()["torch"], before)
