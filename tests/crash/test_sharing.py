"""What shares files, deletes them or copies what is shared, killed at every effect: nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.killed_sharing import ACTIONS

ROOT = Path(__file__).parents[2]


def run_killed(directory: Path, actions: list[str], stride: int) -> None:
    command = [sys.executable, "-m", "tests.crash.killed_sharing", str(directory), json.dumps(actions), str(stride)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["action"] for row in rows] == actions and all(row["effects"] > 5 for row in rows), rows


def test_nothing_is_lost_where_a_process_dies_that_shares_or_deletes_files(tmp_path: Path) -> None:
    run_killed(tmp_path, list(ACTIONS), 5)


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_lost_at_any_effect(tmp_path: Path, action: str) -> None:
    run_killed(tmp_path, [action], 1)
