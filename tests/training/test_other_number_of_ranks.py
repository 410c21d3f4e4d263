"""Restores by another number of ranks: what each rank has of its own is taken, left or refused, never in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.placed_reader import PlacedReader
from tests.helpers.world import errors_of, on_ranks
from treeckpt import training
from treeckpt._io.comm.comm import thread_comms


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def save(path: Path, ranks: int, **parts: Any) -> None:
    """Saves a state of several ranks: parts as their functions give them for a rank, generators of seed 40 + rank."""
    model, states = net(), list[dict[str, Any]]()
    for rank in range(ranks):
        torch.manual_seed(40 + rank)
        states.append(training.state(model, **{name: make(rank) for name, make in parts.items()}))
    assert errors_of(on_ranks(ranks, lambda comm: tc.save(path, states[comm.rank], comm=comm))) == [None] * ranks


def restored(
    path: Path, rank: int, ranks: int, per_rank: Any = None, **options: Any
) -> tuple[int, training.RestoreReport]:
    """Restores as one of several ranks, seeded with 7; returns the seed of torch's generator then, and the report."""
    torch.manual_seed(7)
    fallback = tc.Fallback(per_rank=per_rank)
    report = training.restore(path, net(), comm=thread_comms(ranks)[rank], fallback=fallback, **options)
    return torch.initial_seed(), report


def test_generators_of_fewer_ranks_go_on_as_the_same_ranks_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "c", 4)
    for rank in range(2):
        seed, report = restored(tmp_path / "c", rank, 2)
        assert seed == 40 + rank
        assert report.world_changed == (f"rng: of rank {rank} of 4",) and report.world_changed[0] in str(report)
    [record] = caplog.records  # of rank 0 alone
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert text.startswith(str(tmp_path / "c")) and "4 ranks" in text and "per_rank={'rng': 'take'}" in text
    caplog.clear()
    assert restored(tmp_path / "c", 0, 2, per_rank={"rng": "take"})[0] == 40
    assert restored(tmp_path / "c", 0, 2, rng=False)[0] == 7
    assert not caplog.records


def test_generators_of_more_ranks_stay_as_the_program_seeded_them_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "c", 2)
    for rank in range(3):
        seed, report = restored(tmp_path / "c", rank, 3)
        assert seed == 7 and report.world_changed == ("rng: left as it was here, saved by 2 ranks",)
    [record] = caplog.records
    text = record.getMessage()
    assert "rng=False" in text and "per_rank={'rng': 'take'}" in text and "seed" in text
    caplog.clear()
    assert [restored(tmp_path / "c", rank, 3, per_rank="take")[0] for rank in range(3)] == [40, 41, 40]
    assert not caplog.records


def test_a_bank_asks_who_saved_the_generators_that_it_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "first", 4)
    save(tmp_path / "second", 2)
    seed, report = restored([tmp_path / "first", tmp_path / "second"], 1, 2)
    assert (seed, report.world_changed) == (41, ()) and not caplog.records


@pytest.mark.parametrize("policy", ["error", {"rng": "error"}])
def test_the_generators_are_refused_where_one_says_so(tmp_path: Path, policy: Any) -> None:
    save(tmp_path / "c", 2)
    with pytest.raises(tc.MismatchError, match=r"^rng: .*world of 2"):
        restored(tmp_path / "c", 0, 1, per_rank=policy)


PARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loader": (PlacedReader, {"loader": PlacedReader(-1)}),
    "extra": (lambda rank: {"own": tc.PerRank({"n": rank})}, {}),
    "extra given": (lambda rank: {"own": tc.PerRank({"n": rank})}, {"extra": {"own": tc.PerRank({"n": -1})}}),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_else_is_each_ranks_own_is_refused_with_the_call_to_write(tmp_path: Path, name: str) -> None:
    part, (make, given) = name.split()[0], PARTS[name]
    save(tmp_path / "c", 4, **{part: make})
    with pytest.raises(tc.MismatchError) as caught:
        restored(tmp_path / "c", 1, 2, rng=False, **given)
    text = str(caught.value)
    assert "rank of 2" in text and "world of 4" in text and str(tmp_path / "c") in text
    assert f"per_rank={{{part!r}: 'take'}}" in text and "rank r what rank r % 4 had saved" in text
    assert "alone" not in text
    _, report = restored(tmp_path / "c", 1, 2, rng=False, per_rank={part: "take"}, **given)
    assert report.world_changed == (f"{part}: of rank 1 of 4",)
    assert (given["loader"].at if part == "loader" else report.extra["own"].value["n"]) == 1


def test_a_merge_of_loaders_stands_in_the_report(tmp_path: Path) -> None:
    save(tmp_path / "c", 4, loader=PlacedReader)
    loader = PlacedReader(-1)
    merge = {"loader": lambda states, rank, world: states[rank + world]}
    _, report = restored(tmp_path / "c", 1, 2, rng=False, loader=loader, per_rank=merge)
    assert loader.at == 3 and report.world_changed == ("loader: merged of 4 ranks",)


def test_a_merge_that_raises_is_named_with_its_part_and_its_error_is_the_cause(tmp_path: Path) -> None:
    save(tmp_path / "c", 4, loader=PlacedReader)
    loader = PlacedReader(-1)
    merge = {"loader": lambda states, rank, world: states[0]["taken"]}
    with pytest.raises(tc.MismatchError, match=r"^loader: .*rank 1 of 2 .*per_rank.*KeyError: 'taken'") as caught:
        restored(tmp_path / "c", 1, 2, rng=False, loader=loader, per_rank=merge)
    assert isinstance(caught.value.__cause__, KeyError) and loader.at == -1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mistyped_part_is_refused_with_the_one_that_was_meant(tmp_path: Path, ranks: int) -> None:
    save(tmp_path / "c", 2, loader=PlacedReader)
    with pytest.raises(tc.MismatchError, match=r"per_rank.*'loder'.*near to it.*loader") as caught:
        restored(tmp_path / "c", 0, ranks, loader=PlacedReader(-1), per_rank={"loder": "take", "rng": "take"})
    assert "rng, loader, buffers, extra" in str(caught.value)


def test_only_a_process_that_a_launcher_started_is_told_of_being_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", 1, loader=PlacedReader)
    for call in (
        lambda **options: tc.load(tmp_path / "c", **options),
        lambda **options: training.restore(tmp_path / "c", net(), loader=PlacedReader(-1), **options),
    ):
        with pytest.raises(tc.MismatchError) as caught:
            call(comm=thread_comms(2)[1])
        assert "alone" not in str(caught.value)
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "1")
            patch.setenv("WORLD_SIZE", "2")
            with pytest.raises(tc.MismatchError, match='comm="alone"'):
                call()
            call(comm="alone")
