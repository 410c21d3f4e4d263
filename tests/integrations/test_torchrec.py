"""Tables of torchrec in a `Manager`: killed in a save, resumed on as many ranks, on fewer and on more."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.helpers.framework_job import launch

STEPS = 6


def train(directory: Path, ranks: int, *arguments: str) -> list[dict[int, float]]:
    """Trains; returns the losses of each rank by step, none where it was killed."""
    directory.mkdir(exist_ok=True)
    job = launch("tests.integrations.torchrec_job", ranks, str(directory), str(STEPS), *arguments)
    assert (job.returncode == 0) == ("SIGKILL" not in job.stdout), job.stdout
    return [torch.load(path) for path in sorted(directory.glob("losses-*.pt"))]


@pytest.mark.slow
def test_tables_of_two_ranks_go_on_on_two_one_and_three(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="`make test-frameworks` installs it", exc_type=(ImportError, OSError))
    whole = train(tmp_path / "whole", 2)
    assert len(whole) == 2 and not train(tmp_path / "killed", 2, "--kill-at", "4")
    for ranks in (1, 2, 3):
        shutil.copytree(tmp_path / "killed", tmp_path / f"{ranks}")
        resumed = train(tmp_path / f"{ranks}", ranks)
        assert [list(losses) for losses in resumed] == [[3, 4, 5, 6]] * ranks
        if ranks == 2:
            assert resumed == [{step: losses[step] for step in range(3, 7)} for losses in whole]
        for step in range(3, 7):  # the same rows: the sums of several ranks are rounded in another order
            expected = fmean(losses[step] for losses in whole)
            assert fmean(losses[step] for losses in resumed) == pytest.approx(expected, rel=1e-5)
