"""Unmodified frameworks on treeckpt's format after `treeckpt.dcp.install()`: each trains, is killed, and resumes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import treeckpt as tc

ROOT = Path(__file__).parents[2]


def launch(job: str, *arguments: object) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests" / "dcp" / job), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=300, check=False).returncode


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
def test_lightning_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert launch("lightning_job.py", tmp_path / "whole", 7) == 0
    assert launch("lightning_job.py", tmp_path / "killed", 7, 5) != 0
    assert "state_dict" in tc.load(tmp_path / "killed" / "step=4.ckpt")
    assert launch("lightning_job.py", tmp_path / "killed", 7) == 0
    whole, resumed = (torch.load(tmp_path / name / "final.pt") for name in ("whole", "killed"))
    assert resumed["from"] == "step=4.ckpt" and whole["from"] is None
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())
