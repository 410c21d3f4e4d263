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
from tests.helpers.s3 import S3

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


def listed_by_ray(storage: Path | str) -> list[str]:
    """The checkpoints in the list that Ray keeps beside them."""
    from pyarrow.fs import FileSystem

    files, place = FileSystem.from_uri(str(storage))
    if not files.get_file_info(f"{place}/{SNAPSHOT}").is_file:
        return []
    with files.open_input_stream(f"{place}/{SNAPSHOT}") as stream:
        return [one["checkpoint_dir_name"] for one in json.loads(stream.read())["checkpoint_results"]]


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


@pytest.mark.slow
def test_a_run_in_a_bucket_that_is_killed_inside_a_save_resumes_bit_for_bit(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="`make test-frameworks` installs it")
    # The proxy of the tests does not understand how pyarrow uploads.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    buckets = {name: s3.url(name) for name in ("whole", "killed")}
    job = launch(tmp_path / "whole", 2, "--storage", buckets["whole"])
    assert job.returncode == 0, job.stdout
    whole, _ = outcomes(tmp_path / "whole")
    assert listed_by_ray(buckets["whole"]) == ["step_00000004", "step_00000006"]  # num_to_keep=2
    assert tc.Manager(f"{buckets['whole']}/run").steps() == [4, 6]

    killed = launch(tmp_path / "killed", 2, "--storage", buckets["killed"], "--kill-at", "6")
    assert killed.returncode != 0 and (tmp_path / "killed/killed").exists(), killed.stdout
    unfinished = f"{buckets['killed']}/run/step_00000006"
    assert tc.exists(f"{buckets['killed']}/run/step_00000004") and not tc.exists(unfinished)
    assert "step_00000006" not in listed_by_ray(buckets["killed"])
    fewer = launch(tmp_path / "killed", 1, "--storage", buckets["killed"])
    assert fewer.returncode == 0, fewer.stdout
    (one,) = outcomes(tmp_path / "killed")
    check_same(whole, one, 4)
    assert "step_00000006" in listed_by_ray(buckets["killed"]) and tc.verify(unfinished).ok
