"""What several ranks hold is compared on every save, also once the plan is known: large arrays by samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.world import LONG, errors_of, on_ranks
from treeckpt._io.comm.comm import thread_comms

LARGE = 300_000


def stages(rank: int, odd: tuple[int, str] | None = None) -> dict[str, Any]:
    """Ranks 0 and 1 hold the first stage, 2 and 3 the second, and all the embedding."""
    tree = {"embedding": torch.ones(LARGE), f"stage{rank // 2}": {"weight": torch.ones(LARGE)}, f"own{rank}": [rank]}
    if odd is not None and odd[0] == rank:
        name = odd[1]
        changed = torch.zeros(LARGE)
        tree |= {name: changed} if name == "embedding" else {name: {"weight": changed}}
    return tree


@pytest.mark.parametrize(
    ("odd", "path"),
    [((2, "embedding"), "embedding"), ((3, "stage1"), "stage1/weight"), ((1, "stage0"), "stage0/weight")],
)
def test_what_stages_share_is_compared_on_later_saves_too(odd: tuple[int, str], path: str) -> None:
    comms, store = thread_comms(4, timeout=LONG), tc.MemoryStore()

    def save(comm: Any, odd: tuple[int, str] | None) -> None:
        tc.save(store, stages(comm.rank, odd), comm=comm, overwrite=True)

    for which in (None, odd, None, None, odd):
        for error in errors_of(on_ranks(comms, lambda comm, which=which: save(comm, which))):
            if which is None:
                assert error is None, error
            else:
                assert isinstance(error, tc.MismatchError) and error.path == path, error


def test_an_array_that_a_rank_ties_to_another_is_compared_with_those_of_other_ranks() -> None:
    comms, store = thread_comms(2, timeout=LONG), tc.MemoryStore()

    def save(comm: Any, value: float) -> None:
        first, second = torch.ones(LARGE), torch.ones(LARGE)
        if comm.rank:
            first = second = torch.full((LARGE,), value)
        tc.save(store, {"first": first, "second": second}, comm=comm, overwrite=True)

    for value in (1.0, 1.0, 2.0):
        for error in errors_of(on_ranks(comms, lambda comm, value=value: save(comm, value))):
            assert error is None if value == 1 else isinstance(error, tc.MismatchError), error


@pytest.mark.parametrize("form", ["plain", "dcp"])
def test_experts_of_one_name_on_each_rank_are_refused_unless_they_are_marked(tmp_path: Any, form: str) -> None:
    """Expert parallelism written by hand: each rank's list of experts begins with 0."""

    def experts(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(rank)
        return {"experts.0.weight": torch.randn(300, 300), "experts.1.weight": torch.randn(300, 300)}

    def save(comm: Any, *, marked: bool) -> None:
        state = experts(comm.rank)
        tree = {"model": tc.PerRank(state) if marked else state, "step": 3}
        if form == "plain":
            tc.save(tmp_path / f"c{marked}", tree, comm=comm)
        else:
            tc.dcp.save(tree, checkpoint_id=tmp_path / f"c{marked}", process_group=comm)

    for error in errors_of(on_ranks(2, lambda comm: save(comm, marked=False))):
        assert "model/experts.0.weight" in str(error) and "tc.PerRank" in str(error), error
    assert not any(errors_of(on_ranks(2, lambda comm: save(comm, marked=True))))


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_a_large_replica_that_differs_is_refused_and_does_not_become_a_mixture(background: bool) -> None:
    """It would be written in part by each rank."""
    store = tc.MemoryStore()

    def save(comm: Any, **options: Any) -> None:
        tree = {"experts": torch.full((1200, 1000), float(comm.rank)), "rest": torch.ones(3)}
        if background:
            tc.save_async(store, tree, comm=comm, background=tc.BackgroundOptions(writer="thread"), **options).result(
                60
            )
        else:
            tc.save(store, tree, comm=comm, **options)

    for error in errors_of(on_ranks(2, save)):
        assert isinstance(error, tc.MismatchError) and error.path == "experts" and "rank 1" in str(error)
        assert "tc.PerRank" in error.hint
    assert not any(errors_of(on_ranks(2, lambda comm: save(comm, verify_replicas=False))))


@pytest.mark.parametrize("given", ["samples", None, 2, "True"])
def test_another_value_of_verify_replicas_is_named(given: Any) -> None:
    with pytest.raises(tc.TreeckptError, match=r"verify_replicas: expected True, \"sample\" or False") as caught:
        tc.save(tc.MemoryStore(), {"a": 1}, verify_replicas=given)
    assert "64 KiB" in caught.value.hint
