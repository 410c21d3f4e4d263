"""Starts the ranks of a phase as torchrun does, and gathers what each case came to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["launch"]

ROOT = Path(__file__).resolve().parents[2]


def launch(
    phase: str, world: int, directory: Path, *, timeout: float = 200.0, worker: str = "tests.multirank.worker"
) -> dict[str, str]:
    """What each case came to, by name: empty if it passed on all ranks, else the errors. `""` has the ranks' output."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)),
        *("-m", worker, phase, str(directory)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=timeout)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0].decode(errors="replace") + f"\nstopped after {timeout:g} s"
    results: dict[str, str] = {"": "" if process.returncode == 0 else f"exit {process.returncode}\n{output}"}
    for rank in range(world):
        path = directory / f"{phase}.{rank}.json"
        found: dict[str, str | None] = json.loads(path.read_text()) if path.exists() else {}
        for name, error in found.items():
            results[name] = results.get(name, "") + (error or "")
    return results
