"""A short run of `tests.mutations`: of changed files comes what is right, or an error of ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutations import FORMATS, outcome

SEEDS = int(os.environ.get("TREECKPT_MUTATIONS", "12"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_changed_files_give_errors_of_ours_or_right_results(tmp_path: Path, name: str) -> None:
    (tmp_path / "made").mkdir()
    FORMATS[name][0](tmp_path / "made")
    found = [outcome(tmp_path / "made", name, seed, tmp_path / "place") for seed in range(SEEDS)]
    assert not any(found), [text for text in found if text]
