"""What DeepSpeed keeps elsewhere is refused by name, and the advice of the error works: with DeepSpeed itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_zero_are_refused_with_advice_that_works(stage: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    command = [sys.executable, "-m", "tests.training.deepspeed_job", str(stage), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = dict(
        line.split(": ", 1) for line in done.stdout.splitlines() if ": TreeError" in line or ": saved" in line
    )
    for what in ("parameters", "state dict", "engine"):
        if stage < 3:
            assert errors[what] == "saved"
        else:
            assert "0.weight: expected a tensor with its elements" in errors[what] and "ZeRO-3" in errors[what]
            assert "deepspeed.zero.GatheredParameters" in errors[what]
    assert "found DeepSpeed's DeepSpeedZeroOptimizer" in errors["optimizer"]
    for what in ("optimizer", "inner optimizer"):
        assert "engine.save_checkpoint" in errors[what] and "fully_shard (FSDP2)" in errors[what]
