"""Models spread over a mesh of one device, with NCCL there and gloo on the host, are saved and restored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.devices import CUDA_MARKS


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=CUDA_MARKS)]
)
def test_fsdp2_hsdp_and_tensor_parallelism_on_one_device(tmp_path: Path, device: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.job", device, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[:4] == ["ok fsdp", "ok hsdp", "ok tp", "ok manager"]
