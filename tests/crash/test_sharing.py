"""What shares files, deletes them or copies what is shared, killed at every effect: nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.effects import run_killed
from tests.crash.killed_sharing import ACTIONS


def test_nothing_is_lost_where_a_process_dies_that_shares_or_deletes_files(tmp_path: Path) -> None:
    run_killed("killed_sharing", tmp_path, list(ACTIONS), 5)


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_lost_at_any_effect(tmp_path: Path, action: str) -> None:
    run_killed("killed_sharing", tmp_path, [action], 1)
