"""Ranks that each load a part are strict together: what none asks for is refused on all, and nobody waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks, shards_of

SIZE = 3


def part(rank: int, value: float | None = None) -> dict[str, Any]:
    """The tree of one stage: layers of its own, a number that all have, and state of the rank."""
    fill = float(rank) if value is None else value
    return {
        "model": {f"layer{rank}": np.full((2, 2), fill)},
        "step": int(fill >= 0),
        "own": tc.PerRank(np.full(1, fill)),
    }


def save(path: Path, extra: Callable[[int], dict[str, Any]] = lambda rank: {}) -> None:
    assert (
        errors_of(on_ranks(SIZE, lambda comm: tc.save(path, part(comm.rank) | extra(comm.rank), comm=comm)))
        == [None] * SIZE
    )


WAYS: dict[str, Callable[..., Any]] = {
    "load": lambda path, tree, comm: tc.load(path, tree, comm=comm, partial=True),
    "load_into": lambda path, tree, comm: tc.load_into(path, tree, comm=comm, partial=True),
    "bank": lambda path, tree, comm: tc.load_into(
        [tc.From(path, exclude="step"), tc.From(path, select="step")], tree, comm=comm, partial=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_stages_load_their_parts_and_what_none_asks_for_is_refused_on_all(way: str, tmp_path: Path) -> None:
    save(tmp_path / "c", lambda rank: {"head": np.ones(1), "tail": 1} if rank == 1 else {})
    outcomes = on_ranks(SIZE, lambda comm: WAYS[way](tmp_path / "c", part(comm.rank, -1.0), comm))
    for error in errors_of(outcomes):
        assert isinstance(error, tc.MismatchError) and "by one rank of 3" in str(error)
        assert "2 asked for by none: head, tail" in str(error) and 'strict="missing"' in str(error)

    def load(comm: Any) -> Any:
        tree = part(comm.rank, -1.0) | ({"head": np.zeros(1), "tail": 0} if comm.rank == 2 else {})
        found = WAYS[way](tmp_path / "c", tree, comm)
        tree = found if way == "load" else tree
        return tree["model"][f"layer{comm.rank}"].sum() == 4.0 * comm.rank and tree["own"].value[0] == comm.rank

    assert [(outcome.error, outcome.value) for outcome in on_ranks(SIZE, load)] == [(None, True)] * SIZE


@pytest.mark.parametrize("strict", [True, "missing", False])
def test_what_no_rank_asks_for_is_reported_as_unexpected(strict: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", lambda rank: {"head": np.ones(1)})

    def load(comm: Any) -> Any:
        tree = part(comm.rank)
        return tc.load_into(tmp_path / "c", tree, comm=comm, partial=True, strict=strict).unexpected

    for outcome in on_ranks(SIZE, load):
        assert "head" in str(outcome.error) if strict is True else outcome.value == ("head",)


def test_state_of_a_rank_is_asked_for_by_no_other(tmp_path: Path) -> None:
    save(tmp_path / "c")

    def load(comm: Any) -> Any:
        tree = part(comm.rank)
        if comm.rank == 1:
            del tree["own"]
        return tc.load(tmp_path / "c", tree, comm=comm, partial=True)

    assert all("own/~rank*" in str(error) for error in errors_of(on_ranks(SIZE, load)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["missing", "shape", "no checkpoint"])
def test_a_rank_that_fails_is_named_on_the_others(way: str, fault: str, tmp_path: Path) -> None:
    if (way, fault) == ("bank", "shape"):
        pytest.skip("shapes are compared for each checkpoint, after what all of them have")
    save(tmp_path / "c")

    def load(comm: Any) -> Any:
        tree, path = part(comm.rank), tmp_path / "c"
        if comm.rank == 1 and fault == "missing":
            tree["more"] = 1
        elif comm.rank == 1 and fault == "shape":
            tree["model"]["layer1"] = np.zeros(3)
        elif comm.rank == 1:
            path = tmp_path / "nowhere"
        return WAYS[way](path, tree, comm)

    first, bad, last = errors_of(on_ranks(SIZE, load))
    kind = tc.CheckpointNotFound if fault == "no checkpoint" else tc.MismatchError
    assert isinstance(bad, (kind, tc.RankError))
    for error in (first, last):
        assert isinstance(error, tc.RankError) and [*error.ranks] == [1] and kind.__name__ in error.ranks[1]


def test_a_table_on_one_rank_is_loaded_by_another(tmp_path: Path) -> None:
    def table(rank: int, filled: float) -> dict[str, Any]:
        return {"table": tc.KeyedTable(np.arange(4), {"w": np.full((4, 2), filled)})} if rank else {}

    on_ranks(2, lambda comm: tc.save(tmp_path / "c", {"dense": np.ones(2)} | table(comm.rank, 5.0), comm=comm))

    def load(comm: Any) -> Any:
        tree = {"dense": np.zeros(2)} | table(1 - comm.rank, 0.0)
        return tc.load(tmp_path / "c", tree, comm=comm, partial=True)

    first, second = on_ranks(2, load)
    assert errors_of([first, second]) == [None, None] and [*second.value] == ["dense"]
    assert first.value["table"].slots["w"].sum() == 40


def test_one_rank_is_strict_for_itself(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": 1, "b": 2})
    assert tc.load(tmp_path / "c", {"a": 0, "b": 0}, partial=True) == {"a": 1, "b": 2}
    with pytest.raises(tc.MismatchError, match=r"not asked for|asked for by none"):
        tc.load(tmp_path / "c", {"a": 0}, partial=True)
    with pytest.raises(tc.MismatchError, match="partial: expected True or False, found 'yes'"):
        tc.load(tmp_path / "c", {"a": 0}, partial="yes")  # type: ignore[arg-type]


def stage(rank: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed + rank)
    model = nn.Module()
    model.add_module(f"block{rank}", nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if seed:
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("by_manager", [False, True])
def test_stages_of_a_training_are_restored_as_strictly_as_one_model(by_manager: bool, tmp_path: Path) -> None:
    saved = {rank: stage(rank, 10) for rank in range(SIZE)}

    def save(comm: Any) -> None:
        model, optimizer = saved[comm.rank]
        with tc.Manager(tmp_path, comm=comm) as manager:
            manager.save(1, tc.training.state([model], [optimizer]))

    def restore(comm: Any, own: int) -> Any:
        model, optimizer = stage(own, 0)
        if by_manager:
            with tc.Manager(tmp_path, comm=comm) as manager:
                report = manager.resume([model], [optimizer], partial=True)
        else:
            report = tc.training.restore(tmp_path / "step_00000001", [model], [optimizer], comm=comm, partial=True)
        assert report is not None
        return report.unexpected, model, optimizer

    assert errors_of(on_ranks(SIZE, save)) == [None] * SIZE
    for rank, outcome in enumerate(on_ranks(SIZE, lambda comm: restore(comm, comm.rank))):
        assert outcome.error is None
        unexpected, model, optimizer = outcome.value
        assert unexpected == ()
        for one, other in zip(saved[rank][0].parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(saved[rank][1].state[one]["exp_avg"], optimizer.state[other]["exp_avg"])
    for error in errors_of(on_ranks(SIZE, lambda comm: restore(comm, min(comm.rank, 1)))):
        assert isinstance(error, tc.MismatchError) and "model/block2.weight" in str(error), error


def test_a_manager_restores_parts_and_passes_over_a_damaged_step(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        with tc.Manager(tmp_path, comm=comm) as manager:
            for step in (1, 2):
                manager.save(step, part(comm.rank, float(step)))

    assert errors_of(on_ranks(SIZE, save)) == [None] * SIZE
    [shard, *_] = shards_of(tmp_path / "step_00000002")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x77")

    def restore(comm: Any) -> Any:
        tree = part(comm.rank, -1.0)
        with tc.Manager(tmp_path, comm=comm) as manager:
            manager.restore(into=tree, partial=True)
            return tree["model"][f"layer{comm.rank}"].sum(), manager.count

    assert [outcome.value for outcome in on_ranks(SIZE, restore)] == [(4.0, 1)] * SIZE


def test_a_rank_that_does_not_see_the_step_of_a_manager_leaves_nobody_waiting(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        with tc.Manager(tmp_path / "0", comm=comm) as manager:
            manager.save(1, part(comm.rank))

    assert errors_of(on_ranks(SIZE, save)) == [None] * SIZE

    def restore(comm: Any) -> Any:
        with tc.Manager(tmp_path / str(comm.rank % 2), comm=comm) as manager:
            manager.restore(into=part(comm.rank), partial=True, step=1)

    for error in errors_of(on_ranks(SIZE, restore)):
        assert isinstance(error, tc.TreeckptError) and "silent" not in str(error), error
