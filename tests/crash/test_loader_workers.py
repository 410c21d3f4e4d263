"""A signal to all processes of a training, as launchers send it, ends it with a last save, also with loader workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeckpt as tc

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 200.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1")


@contextlib.contextmanager
def training(*arguments: object, launcher: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Starts a training in a session of its own, whose process group gets the signal."""
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.crash.loader_training", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def signalled(process: subprocess.Popen[str], ranks: int = 1) -> str:
    """Returns what a training prints that is signalled once it trains."""
    assert process.stdout is not None
    lines: list[str] = []
    while lines.count("training\n") < ranks:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    os.killpg(process.pid, signal.SIGTERM)
    return "".join(lines) + process.communicate(timeout=LIMIT)[0]


def last_step(run: Path) -> int:
    step = tc.Manager(run).latest()
    assert step is not None and tc.verify(tc.Manager(run).path(step)).ok
    return step


SLOW = pytest.mark.slow
STARTS = [("plain", "fork"), *(pytest.param(*at, marks=SLOW) for at in (("stateful", "fork"), ("plain", "spawn"),
    ("stateful", "spawn"), ("plain", "forkserver")))]  # fmt: skip


@pytest.mark.parametrize(("loader", "context"), STARTS)
def test_workers_outlive_the_signal_and_the_training_saves(tmp_path: Path, loader: str, context: str) -> None:
    with training(tmp_path, loader, context, 2) as process:
        text = signalled(process)
        assert process.returncode == 0 and f"stopped at {last_step(tmp_path)}\n" in text, text
        assert "Traceback" not in text, text


@SLOW
def test_under_torchrun_all_ranks_save_the_same_step(tmp_path: Path) -> None:
    with training(tmp_path, "plain", "fork", 2, "--exit", 0, launcher=TORCHRUN) as process:
        text = signalled(process, ranks=2)
        assert last_step(tmp_path) > 2 and "DataLoader worker" not in text, text


def test_a_loop_that_workers_killed_by_the_signal_break_saves_on_leaving_the_manager(tmp_path: Path) -> None:
    with training(tmp_path, "plain", "fork", 2, "--late") as process:
        text = signalled(process)
        assert process.returncode != 0 and "DataLoader worker" in text, text
    step = last_step(tmp_path)
    assert f"step {step} was saved" in text, text
    assert tc.load(tmp_path / f"step_{step:08}")["optimizer"]["weight"]["step"] == step


@SLOW
def test_no_state_is_saved_that_a_broken_step_of_the_optimizer_left(tmp_path: Path) -> None:
    with training(tmp_path, "plain", "fork", 2, "--late", "--torn") as process:
        text = signalled(process)
        assert process.returncode != 0 and "ends by SIGTERM without a last save" in text, text
    assert tc.Manager(tmp_path).latest() is None
