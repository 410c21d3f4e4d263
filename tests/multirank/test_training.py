"""Real processes under torchrun: training goes on with the same losses after every change of arrangement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treeckpt import Fallback, training

from .launch import Results, check_case, launch
from .layouts import bits
from .training_jobs import arrange, arrangements, close, get_losses, train, whole_state
from .training_state_cases import PHASES, Loader


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    return tmp_path_factory.mktemp("training"), {}


def _phase(shared: tuple[Path, Results], phase: str) -> tuple[Path, dict[str, str]]:
    """What became of a phase; the first to ask has all of them run."""
    directory, results = shared
    if not results:
        results |= launch(PHASES, directory, cases="tests.multirank.training_state_cases")
    return directory, results[phase]


@pytest.mark.parametrize(("phase", "case"), [(phase, case) for phase, (_, cases) in PHASES.items() for case in cases])
def test_ranks(shared: tuple[Path, Results], phase: str, case: str) -> None:
    _, results = _phase(shared, phase)
    check_case(results, case)


@pytest.mark.parametrize("phase", PHASES)
def test_launch_ends_well(shared: tuple[Path, Results], phase: str) -> None:
    _, results = _phase(shared, phase)
    assert not results[""]


@pytest.mark.parametrize("source", arrangements(4))
def test_training_goes_on_in_one_process(shared: tuple[Path, Results], source: str) -> None:
    directory, _ = _phase(shared, "four train")
    job, loader = arrange("plain", 1, seed=2), Loader()
    training.restore(
        directory / f"job {source}",
        *job.given,
        scheduler=job.scheduler,
        loader=loader,
        fallback=Fallback(per_rank="take"),
    )
    oracle, state = torch.load(directory / f"job {source}.pt"), whole_state(job)
    assert set(state) == set(oracle)
    assert all(bits(state[name]) == bits(oracle[name]) for name in oracle)
    assert loader.position == 100
    close(train(job, 3, 3), get_losses(directory / f"job {source}.json"), source)
