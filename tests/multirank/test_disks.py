"""Real processes under torchrun whose ranks are on two hosts with one path and a private disk each: saves and loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.two_disks import needs_two_disks

from .disk_load_cases import PHASES
from .launch import Results, check_case, launch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    needs_two_disks()
    directory: Path = tmp_path_factory.mktemp("disks")
    return launch(PHASES, directory, cases="tests.multirank.disk_load_cases")


@pytest.mark.parametrize(("phase", "case"), [(phase, case) for phase in PHASES for case in ["", *PHASES[phase][1]]])
def test_ranks(results: Results, phase: str, case: str) -> None:
    check_case(results[phase], case)
