"""Training with Ray Train on two nodes: killed inside a save, it goes on bit for bit, on as many workers or fewer.

`make test-frameworks` installs Ray and runs this.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc

ROOT = Path(__file__).parents[2]
STEPS = 7
SNAPSHOT = "run/checkpoint_manager_snapshot.json"


def launch(directory: Path, workers: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.integrations.ray_job", str(directory), str(STEPS), str(workers)]
    out, err = subprocess.PIPE, subprocess.STDOUT
    return subprocess.run([*command, *arguments], cwd=ROOT, timeout=600, check=False, text=True, stdout=out, stderr=err)


def outcomes(directory: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted(directory.glob("outcome-*.pt"))]


def listed_by_ray(directory: Path) -> list[str]:
    """The checkpoints in the list that Ray keeps beside them."""
    if not (directory / SNAPSHOT).exists():
        return []
    return [one["checkpoint_dir_name"] for one in json.loads((directory / SNAPSHOT).read_text())["checkpoint_results"]]


def check_same(whole: dict[str, Any], resumed: dict[str, Any], step: int) -> None:
    assert resumed["resumed_from"] == step and resumed["known"][-1] == f"step_{step:08}"
    assert list(resumed["losses"]) == list(range(step + 1, STEPS + 1))
    assert all(whole["losses"][step] == loss for step, loss in resumed["losses"].items())
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())


@pytest.mark.slow
def test_a_run_killed_inside_a_save_resumes_bit_for_bit(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: `make test-frameworks` installs it")
    job = launch(tmp_path / "whole", 2)
    assert job.returncode == 0, job.stdout
    whole, other = outcomes(tmp_path / "whole")
    assert whole["resumed_from"] == 0 and whole["known"] == [] and whole["losses"] == other["losses"]
    keep, elsewhere = whole["refusals"]
    assert "num_to_keep" in keep and "treeckpt.integrations.ray.manager()" in elsewhere
    assert listed_by_ray(tmp_path / "whole") == ["step_00000004", "step_00000006"]  # num_to_keep=2

    again = launch(tmp_path / "again", 2, "--kill-at", "4", "--failures", "1")  # Ray starts the workers again
    assert again.returncode == 0, again.stdout
    for one in outcomes(tmp_path / "again"):
        check_same(whole, one, 2)

    killed = launch(tmp_path / "fewer", 2, "--kill-at", "6")
    assert killed.returncode != 0 and (tmp_path / "fewer/killed").exists(), killed.stdout
    unfinished = tmp_path / "fewer/run/step_00000006"
    assert list(unfinished.glob("shard-00000-of-00002.*")) and not tc.exists(unfinished)
    assert unfinished.name not in listed_by_ray(tmp_path / "fewer")
    fewer = launch(tmp_path / "fewer", 1, "--request-at", "7")
    assert fewer.returncode == 0, fewer.stdout
    (one,) = outcomes(tmp_path / "fewer")
    check_same(whole, one, 4)
    assert listed_by_ray(tmp_path / "fewer") == [unfinished.name, "step_00000007"] and tc.verify(unfinished).ok
