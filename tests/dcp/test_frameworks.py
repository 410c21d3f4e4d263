"""Unmodified frameworks on treeckpt's format after `treeckpt.dcp.install()`: each trains, is killed, and resumes.

`make test-frameworks` installs them and runs these tests.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import treeckpt as tc
from tests.helpers import framework_job

STEPS = 7


class Job(NamedTuple):
    """How a framework is tested."""

    package: str
    module: str
    saved: str
    """A checkpoint that is there when the run is killed, at the start of step 5."""
    steps: frozenset[int] = frozenset({4})
    """Those from which the run may resume."""
    options: tuple[str, ...] = ()


JOBS = (
    Job("pytorch_lightning", "lightning_job", "step=4.ckpt"),
    Job("accelerate", "accelerate_job", "checkpoints/checkpoint_1/pytorch_model_fsdp_0"),
    Job("torchtitan", "torchtitan_job", "checkpoint/step-4"),
    Job(
        "torchtitan", "torchtitan_job", "checkpoint/step-2", frozenset({2, 4}), ("--async-mode", "async")
    ),  # killed while it saves step 4, or after
    Job("composer", "composer_job", "checkpoints/ep0-ba4"),
    Job("torchtnt", "torchtnt_job", "epoch_0_train_step_4"),
)


def launch(job: Job, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    return framework_job.launch(f"tests.dcp.{job.module}", 2, str(directory), str(STEPS), *job.options, *arguments)


def outcomes(directory: Path) -> list[dict[str, Any]]:
    return [torch.load(directory / f"outcome-{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join((job.package, *job.options[1:])))
def test_a_killed_run_resumes_bit_for_bit(job: Job, tmp_path: Path) -> None:
    if importlib.util.find_spec(job.package) is None:
        pytest.skip(f"{job.package} is not installed: `make test-frameworks` installs it")
    whole = launch(job, tmp_path / "whole")
    assert whole.returncode == 0, whole.stdout
    killed = launch(job, tmp_path / "killed", "--kill-at", "5")
    assert "SIGKILL" in killed.stdout and not list((tmp_path / "killed").glob("outcome-*.pt")), killed.stdout
    assert tc.verify(tmp_path / "killed" / job.saved).ok
    resumed = launch(job, tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stdout
    for one, other in zip(outcomes(tmp_path / "whole"), outcomes(tmp_path / "killed"), strict=True):
        assert one["resumed_from"] == 0 and other["resumed_from"] in job.steps
        assert list(other["losses"]) == list(range(other["resumed_from"], STEPS))
        assert all(one["losses"][step] == loss for step, loss in other["losses"].items())
        assert all(torch.equal(other["weights"][key], weight) for key, weight in one["weights"].items())
