"""A short run of `tests.integrity.mutations`: of changed files comes what is right, or an error of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrity.mutations import FORMATS

SEEDS = os.environ.get("TREECKPT_MUTATIONS", "8")


@pytest.fixture(scope="module")
def printed() -> list[str]:
    command = [sys.executable, "-m", "tests.integrity.mutations", "0", SEEDS]
    where = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=280 * len(FORMATS), check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert {line.partition(" ")[0] for line in lines} == set(FORMATS), done.stdout
    return lines


@pytest.mark.timeout(300 * len(FORMATS))
@pytest.mark.parametrize("name", FORMATS)
def test_changed_files_give_errors_of_ours_or_right_results(printed: list[str], name: str) -> None:
    assert [line for line in printed if line.startswith(f"{name} ")] == [f"{name} exits with 0"]
