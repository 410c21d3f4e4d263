"""torchtitan's own `Trainer` with `TreeckptManager`, killed in a save and resumed, also on another mesh."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.framework_job import launch

STEPS = 7


@pytest.fixture(autouse=True)
def installed() -> None:
    for package in ("torchtitan", "triton"):  # torchtitan imports its kernels
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: `make test-frameworks` installs it")


def train(directory: Path, ranks: int, *arguments: str, **options: Any) -> tuple[dict[int, set[str]], str]:
    """Trains to the end, or until it is killed; returns what the ranks printed as losses by step, and all output.

    Args:
        options: of the checkpoint manager.
    """
    arguments = (str(directory), str(STEPS), *arguments, "--options", json.dumps(options))
    job = launch("tests.integrations.torchtitan_job", ranks, *arguments)
    losses: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step: *(\d+) +loss: +(\S+)", job.stdout):
        losses.setdefault(int(step), set()).add(loss)
    assert (job.returncode == 0) == ("SIGKILL" not in job.stdout), job.stdout
    return losses, job.stdout


@pytest.mark.slow
def test_a_run_killed_in_a_save_goes_on_on_the_same_mesh_and_on_a_smaller_one(tmp_path: Path) -> None:
    """Two data-parallel ranks, and as many tensor-parallel ones at first; losses are equal to the printed digits."""
    whole, _ = train(tmp_path / "whole", 4, last_save_model_only=False)
    assert list(whole) == list(range(1, STEPS + 1)) and all(len(losses) == 1 for losses in whole.values())
    killed, output = train(tmp_path / "killed", 4, "--kill-at", "4", last_save_model_only=False)
    assert "SIGKILL" in output and list(killed) == [1, 2, 3, 4]
    run = tmp_path / "killed" / "checkpoint"
    assert tc.verify(run / "step-2").ok and not tc.exists(run / "step-4")
    shutil.copytree(tmp_path / "killed", tmp_path / "smaller")
    for directory, ranks in (("killed", 4), ("smaller", 2)):
        resumed, output = train(tmp_path / directory, ranks, last_save_model_only=False)
        assert resumed == {step: whole[step] for step in range(3, STEPS + 1)}, output
        assert tc.Manager(tmp_path / directory / "checkpoint", name="step-{step}").steps() == [2, 4, 6, 7]


@pytest.mark.slow
def test_the_last_step_is_exported_and_another_run_begins_with_a_checkpoint(tmp_path: Path) -> None:
    first, _ = train(tmp_path / "first", 1, export_dtype="bfloat16", keep_latest_k=2, background=False)
    run = tmp_path / "first" / "checkpoint"
    assert sorted(path.name for path in run.glob("step-*")) == ["step-6", "step-7"]
    exported = tc.load(run / "step-7")
    assert exported["lm_head.weight"].dtype == torch.bfloat16 and "optimizer" not in exported
    start = {"initial_load_path": str(run / "step-6"), "load_only": True}
    second, _ = train(tmp_path / "second", 1, initial_load_model_only=False, **start)
    assert second == {7: first[7]} and not list((tmp_path / "second").glob("checkpoint/step-*"))
    third, _ = train(tmp_path / "third", 1, **start)
    assert list(third) == list(range(1, STEPS + 1)) and third[1] != first[1]
