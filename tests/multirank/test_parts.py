"""Real processes under torchrun: sharded tensors that are made of others, in one layout and in another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .launch import Results, check_case, launch
from .parts_cases import PHASES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(PHASES, Path(tmp_path_factory.mktemp("parts")), cases="tests.multirank.parts_cases")


@pytest.mark.parametrize(("phase", "case"), [(phase, case) for phase, (_, cases) in PHASES.items() for case in cases])
def test_ranks(results: Results, phase: str, case: str) -> None:
    check_case(results[phase], case)


@pytest.mark.parametrize("phase", PHASES)
def test_launch_ends_well(results: Results, phase: str) -> None:
    assert not results[phase][""]
