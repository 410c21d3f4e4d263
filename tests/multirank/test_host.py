"""Real processes under torchrun: what the ranks of a host want alike is read once, from far stores and local disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.far_s3 import far_s3_server

from .host_cases import PHASES
from .launch import Results, check_case, launch

PARAMETERS = [
    pytest.param(phase, case, marks=[pytest.mark.slow] if phase == "eight" else [])
    for phase, (_, cases) in PHASES.items()
    for case in ["", *cases]
]


@pytest.fixture(scope="module")
def results() -> Results:
    return {}


@pytest.mark.parametrize(("phase", "case"), PARAMETERS)
def test_ranks(
    results: Results, phase: str, case: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if phase not in results:
        directory: Path = tmp_path_factory.mktemp("host")
        with far_s3_server() as server:
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
            results |= launch({phase: PHASES[phase]}, directory, cases="tests.multirank.host_cases")
    check_case(results[phase], case)
