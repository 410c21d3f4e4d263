"""A training that is killed and resumed through a manager ends, bit for bit, as if it never was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import treeckpt as tc


def train(directory: Path, kill_at: int) -> int:
    words = [str(directory / "run"), str(directory / "out"), "14", str(kill_at)]
    command = [sys.executable, "-m", "tests.crash.resume", *words]
    return subprocess.run(command, cwd=Path(__file__).parents[2], timeout=300, check=False).returncode


def test_a_killed_training_resumes_as_if_it_had_gone_on(tmp_path: Path) -> None:
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    assert train(tmp_path / "calm", 0) == 0
    assert train(tmp_path / "killed", 8) == -9
    left = [path for path in (tmp_path / "killed" / "run").iterdir() if (path / "index.json").exists()]
    assert left, "a save before the kill is whole"
    assert all(tc.verify(path).ok for path in left)
    assert train(tmp_path / "killed", 0) == 0
    assert (tmp_path / "killed" / "out").read_text() == (tmp_path / "calm" / "out").read_text()
