"""A selection takes what its path says: keys that begin alike are other keys, and steps that do are other steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import treeckpt as tc
from tests.world import errors_of, on_ranks


def test_a_key_that_another_begins_with_is_not_taken_along(tmp_path: Path) -> None:
    tree = {"model": {"w": np.arange(3)}, "model2": {"w": np.arange(4)}, "model.w": np.arange(5)}
    tc.save(tmp_path / "c", tree)
    found = tc.load(tmp_path / "c", select="model")
    assert found["model"]["w"].tolist() == [0, 1, 2] and found["model"]["w"].dtype == np.int64
    assert found["model2"] == {"w": ...} and found["model.w"] is ...


def test_steps_whose_names_end_alike_are_told_apart(tmp_path: Path) -> None:
    with tc.Manager(tmp_path) as manager:
        for step in (0, 1, 10):
            manager.save(step, {"w": np.full(2, step)})
    with tc.Manager(tmp_path) as manager:
        assert manager.latest() == 10
        assert [manager.restore(step=step)["w"].tolist() for step in (0, 1, 10)] == [[0, 0], [1, 1], [10, 10]]


def test_what_ranks_have_of_their_own_may_be_shaped_otherwise_on_each(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        tc.save(tmp_path, {"own": tc.PerRank(list(range(comm.rank))), "n": 1}, comm=comm)

    assert errors_of(on_ranks(3, save)) == [None] * 3
    found = [outcome.value for outcome in on_ranks(3, lambda comm: tc.load(tmp_path, comm=comm))]
    assert found == [{"own": tc.PerRank(list(range(rank))), "n": 1} for rank in range(3)]
