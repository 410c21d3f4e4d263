"""A short run of `tests.integrity.mutations`: of changed files comes what is right, or an error of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrity.mutations import FORMATS

SEEDS = os.environ.get("TREECKPT_MUTATIONS", "12")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_changed_files_give_errors_of_ours_or_right_results(name: str) -> None:
    """In a process of its own: what a changed file has it map must not stay in the one that runs the tests."""
    command = [sys.executable, "-m", "tests.integrity.mutations", name, "0", SEEDS]
    where = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]
