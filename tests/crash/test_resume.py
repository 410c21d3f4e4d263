"""A training that is killed and resumed through a manager trains, bit for bit, as if it never was."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import treeckpt as tc


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_training_killed_at_random_steps_has_the_losses_of_an_unbroken_one(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "tests.crash.resume", str(tmp_path), str(6 * kills), str(kills), "0"]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=600, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    losses = dict(line.split() for line in (calm / "losses").read_text().splitlines())
    trained = [line.split() for line in (killed / "losses").read_text().splitlines()]
    assert len(losses) == 6 * kills and {step for step, _ in trained} == set(losses)
    assert [(step, loss) for step, loss in trained if losses[step] != loss] == []
    steps = [int(step) for step, _ in trained]
    restarts = sum(later <= earlier for earlier, later in pairwise(steps))
    assert len(trained) > len(losses) and restarts, "some kills came between a save and the next"
    assert (killed / "end").read_text() == (calm / "end").read_text()
    left = [path for path in (killed / "run").iterdir() if (path / "index.json").exists()]
    assert left and all(tc.verify(path).ok for path in left)
