"""A short run of every fuzzing target; `make fuzz` goes on for longer."""

from __future__ import annotations

import pytest

from .targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_only_errors_of_ours_come_out(name: str) -> None:
    TARGETS[name]()
