"""Saves, deletions and clean-ups of a step with sidecar files, killed at every effect: no plain name is of another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.killed_naming import ACTIONS

ROOT = Path(__file__).parents[2]


def run_killed(directory: Path, actions: list[str], stride: int) -> None:
    command = [sys.executable, "-m", "tests.crash.killed_naming", str(directory), json.dumps(actions), str(stride)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["action"] for row in rows] == actions and all(row["effects"] > 5 for row in rows), rows


def test_a_kill_leaves_the_plain_names_of_the_checkpoint_or_none(tmp_path: Path) -> None:
    run_killed(tmp_path, list(ACTIONS), 7)


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_no_kill_leaves_the_plain_names_of_another_save(tmp_path: Path, action: str) -> None:
    run_killed(tmp_path, [action], 1)
