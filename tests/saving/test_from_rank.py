"""`FromRank`: one rank's value counts, whatever the others have, and comes back in any world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.world import assert_equal, errors_of, on_ranks

SUBTREES = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.builds(lambda n: np.arange(n), st.integers(0, 5))),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=15, deadline=None)
@given(st.lists(SUBTREES, min_size=2, max_size=3), st.data())
def test_the_named_rank_decides_whatever_the_others_have(subtrees: list[Any], data: st.DataObject) -> None:
    world, named = len(subtrees), data.draw(st.integers(0, len(subtrees) - 1))
    store = tc.MemoryStore()

    def save(comm: Any) -> None:
        mark = tc.FromRank(subtrees[comm.rank], rank=named)
        tc.save(store, {"w": np.ones(3), "in": [mark, {"deep": (mark, 1)}]}, comm=comm)

    assert errors_of(on_ranks(world, save)) == [None] * world
    expected = subtrees[named]
    for loaded in (tc.load(store), *(one.value for one in on_ranks(4, lambda comm: tc.load(store, comm=comm)))):
        assert_equal(loaded, {"w": np.ones(3), "in": [expected, {"deep": (expected, 1)}]})


def test_saves_again_and_in_the_background_take_the_new_value(tmp_path: Path) -> None:
    def train(comm: Any) -> None:
        with tc.Manager(tmp_path, comm=comm, background=bool(comm.size % 2), keep=None) as manager:
            for step in (1, 2, 3):
                best = {"loss": 10 - step, "w": np.full(4, step)} if comm.rank == 0 else None
                manager.save(step, {"best": tc.FromRank(best), "state": np.full(3, step)})

    for world in (2, 3):
        assert errors_of(on_ranks(world, train)) == [None] * world
        for step in (1, 2, 3):
            found = tc.load(tmp_path / f"step_{step:08d}")
            assert found["best"]["loss"] == 10 - step and found["best"]["w"].tolist() == [step] * 4


def test_one_process_saves_and_a_target_of_load_stands_for_its_value() -> None:
    store, linear = tc.MemoryStore(), torch.nn.Linear(2, 2)
    tc.save(store, tc.FromRank({"net": linear, "step": 3}))
    found = tc.load(store, {"net": tc.FromRank(torch.nn.Linear(2, 2).state_dict()), "step": tc.FromRank(0)})
    assert found["step"] == 3 and torch.equal(found["net"]["weight"], linear.weight)
    with pytest.raises(tc.TreeError, match=r"step: .*can be filled in place, found a FromRank.*use treeckpt\.load"):
        tc.load_into(store, {"net": linear, "step": tc.FromRank(0)})


@pytest.mark.parametrize("rank", [2, -1, True])
def test_a_rank_that_does_not_save_is_refused(tmp_path: Path, rank: int) -> None:
    found = on_ranks(2, lambda comm: tc.save(tmp_path / "c", {"a": {"b": tc.FromRank(1, rank)}}, comm=comm))
    assert all("a/b: expected FromRank of a rank below 2, found rank=" in str(one.error) for one in found)
    assert not list(tmp_path.glob("*/index.json"))


def test_a_value_that_the_named_rank_does_not_have_is_refused(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        tree = {"w": 1, "mine": tc.FromRank(5)} if comm.rank else {"w": 1}
        tc.save(tmp_path / "c", tree, comm=comm)

    for one in on_ranks(2, save):
        assert "mine: expected a value from rank 0, which FromRank names, found nothing" in str(one.error)
    with pytest.raises(tc.TreeError, match=r"a: expected a value of one rank, found PerRank state"):
        tc.save(tmp_path / "c", {"a": tc.FromRank({"b": tc.PerRank(1)})}, comm="alone")


def test_an_index_that_has_an_absent_subtree_is_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": [1]})
    index = tmp_path / "c" / "index.json"
    text = index.read_bytes()
    assert b'["list",' in text
    index.write_bytes(text.replace(b'["list",[null]]', b'["absent",0,[]]'))
    with pytest.raises((tc.FormatError, tc.CorruptError)):
        tc.load(tmp_path / "c")
