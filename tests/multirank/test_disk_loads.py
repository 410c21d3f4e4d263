"""Real processes in mount namespaces: one path, and a disk for each of two hosts."""

from __future__ import annotations

import pytest

from tests.helpers.two_disks import needs_two_disks

from .disk_load_cases import PHASES
from .launch import Results, check_case, launch

PARAMETERS = [(phase, case) for phase, (_, cases) in PHASES.items() for case in ["", *cases]]


@pytest.fixture(scope="module")
def results() -> Results:
    return {}


@pytest.mark.parametrize(("phase", "case"), PARAMETERS)
def test_ranks(results: Results, phase: str, case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_two_disks()
    if not results:
        results |= launch(PHASES, tmp_path_factory.mktemp("disks"), cases="tests.multirank.disk_load_cases")
    check_case(results[phase], case)
