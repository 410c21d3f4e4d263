"""What shares files, deletes them or copies what is shared, killed at every effect: nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.effects import ROOT, run_killed
from tests.crash.killed_sharing import ACTIONS


def test_nothing_is_lost_where_a_process_dies_that_shares_or_deletes_files(tmp_path: Path) -> None:
    run_killed("killed_sharing", tmp_path, list(ACTIONS), 5)


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(2000)])])
def test_a_training_that_is_killed_now_and_then_loses_no_step_and_leaves_no_byte(tmp_path: Path, steps: int) -> None:
    command = [sys.executable, "-m", "tests.crash.sharing_soak", str(tmp_path / "run"), str(steps), "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["kills"] >= steps / 40 and found["changes"] >= steps / 20
    assert found["shared"] > found["written"] and found["unnamed"] == []


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_lost_at_any_effect(tmp_path: Path, action: str) -> None:
    run_killed("killed_sharing", tmp_path, [action], 1)
