"""Saves, deletions and clean-ups of a step with sidecar files, killed at every effect: no plain name is of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.effects import run_killed
from tests.crash.killed_naming import ACTIONS


def test_a_kill_leaves_the_plain_names_of_the_checkpoint_or_none(tmp_path: Path) -> None:
    run_killed("killed_naming", tmp_path, list(ACTIONS), 7)


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_no_kill_leaves_the_plain_names_of_another_save(tmp_path: Path, action: str) -> None:
    run_killed("killed_naming", tmp_path, [action], 1)
