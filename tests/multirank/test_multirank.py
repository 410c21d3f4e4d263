"""Real processes under torchrun: every layout into every other one across world sizes, replicas, stages, agreement.

Each phase is a world of its own size that runs many cases, all in one launch; a test here shows what one case came to.
Phases build on each other's checkpoints: four ranks save, three and two load and save, four load again, and this
process is the world of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc

from .cases import PHASES
from .launch import Results, check_case, launch
from .layout_alone import load_alone, save_alone
from .layouts import bits
from .training_cases import mlp, oracle_of


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The directory of all phases, and what has run so far."""
    return tmp_path_factory.mktemp("multirank"), {}


def _phase(shared: tuple[Path, Results], phase: str) -> tuple[Path, dict[str, str]]:
    """What became of a phase; the first to ask has all of them run."""
    directory, results = shared
    if not results:
        save_alone(directory)
        results |= launch(PHASES, directory)
    return directory, results[phase]


@pytest.mark.parametrize(("phase", "case"), [(phase, case) for phase, (_, cases) in PHASES.items() for case in cases])
def test_ranks(shared: tuple[Path, Results], phase: str, case: str) -> None:
    _, results = _phase(shared, phase)
    check_case(results, case)


@pytest.mark.parametrize("phase", PHASES)
def test_launch_ends_well(shared: tuple[Path, Results], phase: str) -> None:
    _, results = _phase(shared, phase)
    assert not results[""]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_one_process_loads_what_many_saved(shared: tuple[Path, Results], world: int) -> None:
    directory, _ = _phase(shared, "three")
    load_alone(directory, world, variants=(world % 4,))


@pytest.mark.parametrize("name", ["fsdp tp", "hsdp"])
def test_sharded_training_states_load_into_plain_tensors(shared: tuple[Path, Results], name: str) -> None:
    directory, _ = _phase(shared, "four")
    oracle = torch.load(directory / f"{name}.pt")
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    like: dict[str, Any] = {"model": model.state_dict(), "optimizer": ...}
    loaded = tc.load(directory / f"{name} state", like, strict=False)
    model.load_state_dict(loaded["model"])
    whole = tc.load(directory / f"{name} state")
    optimizer.load_state_dict(whole["optimizer"])
    assert type(whole["model"]["up.weight"]) is torch.Tensor
    assert whole["optimizer"]["param_groups"][0]["lr"] == 0.01
    for state in (whole, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}):
        found = oracle_of(state)
        assert list(found) == list(oracle)
        assert all(bits(found[key]) == bits(oracle[key]) for key in oracle)


def test_own_state_of_four_ranks_in_a_world_of_one(shared: tuple[Path, Results]) -> None:
    directory, _ = _phase(shared, "four")
    with pytest.raises(tc.MismatchError, match="world of 4"):
        tc.load(directory / "own")
    own = tc.load(directory / "own", fallback=tc.Fallback(per_rank="take"))
    assert own["rng"].value["state"].tolist() == [0] * 5
    assert tc.load(directory / "own", select="step") == {"rng": tc.PerRank({"state": ..., "numpy": ...}),
        "loader": tc.PerRank([..., {"epoch": ...}, ..., ...]), "alike": tc.PerRank(...), "step": 7}  # fmt: skip
