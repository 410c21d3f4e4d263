"""Loads that end together: what fails on some ranks is told to all, in the foreground and in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.world import LONG

from .registry import Rank, case

TREE = {"w": torch.arange(1000.0), "n": 3}


def _ways(**options: Any) -> dict[str, Callable[[Any, Any], object]]:
    """The loads, by name, each called with a path and what is wanted."""
    return {
        "load": lambda path, like: tc.load(path, like, together=True, **options),
        "load_into": lambda path, like: tc.load_into(path, like, together=True, **options),
        "load_async": lambda path, like: tc.load_async(path, like, together=True, **options).result(),
    }


def _like(rows: int = 1000) -> Any:
    return {"w": torch.zeros(rows), "n": 0}


@case("four")
@case("two")
def what_fails_on_one_rank_is_told_to_all(here: Rank) -> None:
    path = here.directory / f"together {here.world}"
    tc.save(path, TREE)
    last = here.world - 1
    for name, load in _ways().items():
        with pytest.raises(tc.RankError) as caught:
            load(path, _like(999 if here.rank == last else 1000))
        error = caught.value
        assert set(error.ranks) == {last} and error.path == str(path), (name, error)
        assert "MismatchError: w: expected shape (999,), found (1000,)" in error.ranks[last], error
        assert isinstance(error.__cause__, tc.MismatchError) == (here.rank == last), name
        like = _like()
        found = load(path, like)
        assert torch.equal((like if name == "load_into" else found)["w"], TREE["w"]), name  # type: ignore[index]


@case("four")
def what_fails_alike_on_all_is_raised_as_it_is(here: Rank) -> None:
    for load in _ways().values():
        with pytest.raises(tc.CheckpointNotFound, match="no such"):
            load(here.directory / "no such", _like())


@case("four")
def arguments_that_are_wrong_on_one_rank_are_told_to_all(here: Rank) -> None:
    path = here.directory / "together arguments"
    tc.save(path, TREE)
    wrong: dict[str, Any] = {"strict": "give" if here.rank == 1 else True}
    for load in _ways(**wrong).values():
        with pytest.raises(tc.RankError) as caught:
            load(path, _like())
        assert set(caught.value.ranks) == {1} and "'give'" in caught.value.ranks[1], caught.value


@case("four")
def ranks_that_read_once_end_together_too(here: Rank) -> None:
    path = here.directory / "together once"
    tc.save(path, TREE)
    with pytest.raises(tc.RankError) as caught:
        tc.load(path, _like(999 if here.rank == 2 else 1000), together=True, read=tc.ReadOptions(once=True))
    assert "expected shape (999,)" in caught.value.ranks[2], caught.value
    assert torch.equal(tc.load(path, _like(), together=True, read=tc.ReadOptions(once=True))["w"], TREE["w"])


@case("four")
def several_loads_in_the_background_end_together_beside_a_save(here: Rank) -> None:
    paths = [here.directory / f"together {name}" for name in ("first", "second", "third")]
    for path in paths[:2]:
        tc.save(path, TREE)
    wanted = [_like(), _like(999 if here.rank == 1 else 1000)]
    loads = [tc.load_async(path, like, together=True) for path, like in zip(paths, wanted, strict=False)]
    save = tc.save_async(paths[2], TREE)
    with pytest.raises(tc.RankError, match="rank 1: MismatchError"):
        loads[1].result(LONG)
    assert torch.equal(loads[0].result(LONG)["w"], TREE["w"])
    assert save.result(LONG) is not None


@case("two")
def a_load_in_the_background_refuses_to_talk_while_it_reads(here: Rank) -> None:
    path = here.directory / "together refused"
    tc.save(path, TREE)
    with pytest.raises(tc.MismatchError, match=r"once: expected None, in load_async, found True.* 2 ranks"):
        tc.load_async(path, read=tc.ReadOptions(once=True))
    with pytest.raises(tc.MismatchError, match=r"on_corrupt: expected 'error', in load_async, found 'skip'.* 2 ranks"):
        tc.load_async(path, fallback=tc.Fallback(on_corrupt="skip"))
    assert tc.load_async(path).result(LONG)["n"] == 3
