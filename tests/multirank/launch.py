"""Starts the ranks of some phases with torchrun's agent, and gathers what each case came to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .registry import Phases

__all__ = ["Results", "check_case", "launch"]

ROOT = Path(__file__).resolve().parents[2]


Results = dict[str, dict[str, str]]


def launch(phases: Phases, directory: Path, *, timeout: float = 800.0, cases: str = "tests.multirank.cases") -> Results:
    """What each case of each phase came to, by name: empty if it passed on all ranks, else the errors.

    `""` has the ranks' output, if they did not end well.

    Args:
        cases: the module that has the phases.
    """
    command = [sys.executable, "-m", "tests.multirank.agent", cases, str(directory), *phases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=timeout)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0].decode(errors="replace") + f"\nstopped after {timeout:g} s"
    end = "" if process.returncode == 0 else f"exit {process.returncode}\n{output}"
    return {phase: _gathered(directory, phase, world, end) for phase, (world, _) in phases.items()}


def _gathered(directory: Path, phase: str, world: int, end: str) -> dict[str, str]:
    results = {"": end}
    for rank in range(world):
        path = directory / f"{phase}.{rank}.json"
        found: dict[str, str | None] = json.loads(path.read_text()) if path.exists() else {}
        for name, error in found.items():
            results[name] = results.get(name, "") + (error or "")
    return results


def check_case(results: dict[str, str], case: str) -> None:
    """Fails where a case of a phase did not run, or failed on any rank."""
    if case not in results:
        pytest.fail(f"did not run; the ranks said:\n{results['']}", pytrace=False)
    if results[case]:
        pytest.fail(results[case], pytrace=False)
