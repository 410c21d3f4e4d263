"""Replica groups of torchft that save by one writer: killed in a save, all resume and go on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.framework_job import launch

STEPS = 6


def train(directory: Path, *arguments: str) -> list[Any]:
    """Trains two replica groups; returns what each has at the end, nothing where they were killed."""
    directory.mkdir(exist_ok=True)
    job = launch("tests.integrations.torchft_job", 2, str(directory), str(STEPS), *arguments)
    assert (job.returncode == 0) == ("SIGKILL" not in job.stdout), job.stdout
    return [torch.load(path) for path in sorted(directory.glob("outcome-*.pt"))]


@pytest.mark.slow
def test_replica_groups_killed_in_the_save_of_one_resume_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="`make test-frameworks` installs it", exc_type=ImportError)
    whole = train(tmp_path / "whole")
    assert len(whole) == 2 and not train(tmp_path / "killed", "--kill-at", "4")
    run = tmp_path / "killed" / "run"
    assert tc.verify(run / "step_00000002").ok and not tc.exists(run / "step_00000004")
    resumed = train(tmp_path / "killed")
    for one, other in zip(whole, resumed, strict=True):
        assert other["losses"] == {step: one["losses"][step] for step in range(2, STEPS)}
        assert all(torch.equal(other["weights"][key], weight) for key, weight in one["weights"].items())
    assert tc.load(run / "step_00000006", select="registered")["registered"]["torchft"]["step"] == STEPS
