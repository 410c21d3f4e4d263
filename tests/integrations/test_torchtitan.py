"""torchtitan's own `Trainer` with `TreeckptManager`, killed in a save and resumed, also on another mesh."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

import treeckpt as tc
from tests.helpers.framework_job import launch

STEPS = 7


def train(directory: Path, ranks: int, *arguments: str) -> tuple[dict[int, set[str]], str]:
    """Trains to the end, or until it is killed; returns what the ranks printed as losses by step, and all output."""
    job = launch("tests.integrations.torchtitan_job", ranks, str(directory), str(STEPS), *arguments)
    losses: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step: *(\d+) +loss: +(\S+)", job.stdout):
        losses.setdefault(int(step), set()).add(loss)
    assert (job.returncode == 0) == ("SIGKILL" not in job.stdout), job.stdout
    return losses, job.stdout


@pytest.mark.slow
def test_a_run_killed_in_a_save_goes_on_on_the_same_mesh_and_on_a_smaller_one(tmp_path: Path) -> None:
    """Two data-parallel ranks, and as many tensor-parallel ones at first; losses are equal to the printed digits."""
    for package in ("torchtitan", "triton"):  # torchtitan imports its kernels
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: `make test-frameworks` installs it")
    whole, _ = train(tmp_path / "whole", 4)
    assert list(whole) == list(range(1, STEPS + 1)) and all(len(losses) == 1 for losses in whole.values())
    killed, output = train(tmp_path / "killed", 4, "--kill-at", "4")
    assert "SIGKILL" in output and list(killed) == [1, 2, 3, 4]
    run = tmp_path / "killed" / "checkpoint"
    assert tc.verify(run / "step-2").ok and not tc.exists(run / "step-4")
    shutil.copytree(tmp_path / "killed", tmp_path / "smaller")
    for directory, ranks in (("killed", 4), ("smaller", 2)):
        resumed, output = train(tmp_path / directory, ranks)
        assert resumed == {step: whole[step] for step in range(3, STEPS + 1)}, output
        assert tc.Manager(tmp_path / directory / "checkpoint", name="step-{step}").steps() == [2, 4, 6, 7]
