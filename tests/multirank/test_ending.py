"""A rank that is killed does not cost the others the launcher's whole grace period once they are told to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import treeckpt as tc

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
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multirank.ending", *map(str, (run, store.port, rank, WORLD, victim, where))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()
        ranks[victim].kill()
        ranks[victim].wait()
        begin = time.monotonic()
        survivors = [process for rank, process in enumerate(ranks) if rank != victim]
        for process in survivors:
            process.send_signal(signal.SIGTERM)
        for process in survivors:
            _, text = process.communicate(timeout=LONG)
            assert process.returncode not in (0, None), text
            assert "RankError" in text and f"rank {victim}: silent for" in text, text
            assert "a signal told this process to end" in text, text
        assert time.monotonic() - begin < LONG
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert tc.Manager(run).latest() == 1 and tc.verify(run / "step_00000001").ok
