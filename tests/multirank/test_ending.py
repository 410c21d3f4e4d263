"""A rank that is killed does not cost the others the launcher's whole grace period once they are told to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import treeckpt as tc
from tests.helpers.background import gone, until

ROOT = Path(__file__).resolve().parents[2]
WORLD = 3
LONG = 120.0
"""Seconds: far more than the survivors take, far less than the 600 of a comm."""


SLOW = pytest.mark.slow
ENDINGS = [("save", 0), *(pytest.param(*at, marks=SLOW) for at in (("should_save", 0), ("save", 2), ("close", 1)))]


@pytest.mark.parametrize(("where", "victim"), ENDINGS)
def test_survivors_of_a_killed_rank_end_soon_after_the_signal(tmp_path: Path, where: str, victim: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    run = tmp_path / "run"
    job = subprocess.Popen(
        [sys.executable, "-m", "tests.multirank.ending", *map(str, (run, store.port, WORLD, victim, where))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        pids = json.loads(job.stdout.readline())

        def all_ready() -> bool:
            return all("ready" in text_of(run, rank) for rank in range(WORLD))

        assert until(lambda: all_ready() or any(map(gone, pids))) and all_ready(), text_of(run, victim)
        os.kill(pids[victim], signal.SIGKILL)
        assert until(lambda: gone(pids[victim]))
        begin = time.monotonic()
        survivors = [rank for rank in range(WORLD) if rank != victim]
        for rank in survivors:
            os.kill(pids[rank], signal.SIGTERM)
        codes = json.loads(job.communicate(timeout=LONG)[0])
        for rank in survivors:
            text = text_of(run, rank)
            assert codes[rank] not in (0, None), text
            assert "RankError" in text and f"rank {victim}: silent for" in text, text
            assert "a signal told this process to end" in text, text
        assert time.monotonic() - begin < LONG
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    assert tc.Manager(run).latest() == 1 and tc.verify(run / "step_00000001").ok


def text_of(run: Path, rank: int) -> str:
    """What a rank has written."""
    told = Path(f"{run}.{rank}")
    return told.read_text() if told.exists() else ""
