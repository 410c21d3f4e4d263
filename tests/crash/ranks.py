"""Ranks that save in the background, of which one is killed; see test_background.

One process imports torch and forks the ranks of the cases. They mostly wait, so all cases run at the same time. Every
line that it prints is one case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import treeckpt as tc
from tests.crash.kills import impatient_once
from tests.helpers.background import Hooked, calls_of, gone, until
from tests.helpers.world import LONG, small_tree
from treeckpt._io.comm.comm import TorchComm, default_comm

WORLD = 2
CALLS = ("create", "write", "write", "commit", "publish")
"""What a writer does until the index is published."""
SILENT = 1.0
"""Seconds after which a rank counts as silent once one is dead."""


def rank_of(rank: int, culprit: int, phase: str, directory: Path) -> str:
    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=LONG))
    comm = default_comm()
    assert isinstance(comm, TorchComm)
    comm.timeout = LONG
    (directory / f"pid{rank}").write_text(f"{os.getpid()}")
    tc.save_async(directory / "one", small_tree(rank, WORLD, seed=1)).result(LONG)
    victim = int((directory / f"pid{culprit}").read_text())  # there since before they saved together
    impatient_once(lambda: gone(victim), comm, seconds=SILENT)
    if rank == culprit and phase == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    log = directory / f"log{rank}"
    try:
        # the one that is to be killed gets no further than that: the others wait for it
        at = CALLS.index(phase) if phase in CALLS else 0
        target = Hooked(directory / "two", log, at, "hold") if rank == culprit else directory / "two"
        pending = tc.save_async(target, small_tree(rank, WORLD, seed=2))
        if rank == culprit:
            assert until(lambda: phase == "staged" or len(calls_of(log)) > at)
            assert phase == "staged" or calls_of(log)[-1].startswith(phase)
            os.kill(os.getpid(), signal.SIGKILL)
        pending.result(LONG)
    except tc.TreeckptError as error:
        return f"{type(error).__name__} {error}"
    return "saved"


def start(culprit: int, phase: str, directory: Path) -> list[int]:
    directory.mkdir()
    pids: list[int] = []
    for rank in range(WORLD):
        pids.append(os.fork())
        if pids[-1] == 0:
            (directory / f"told{rank}").write_text(rank_of(rank, culprit, phase, directory))
            os._exit(0)
    return pids


def run(cases: list[tuple[int, str]], directory: Path) -> None:
    started = {(culprit, phase): start(culprit, phase, directory / f"{culprit} {phase}") for culprit, phase in cases}
    for (culprit, phase), pids in started.items():
        status = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        path = directory / f"{culprit} {phase}"
        files = [path / f"told{rank}" for rank in range(WORLD)]
        told = [file.read_text() if file.exists() else "" for file in files]
        case = {"culprit": culprit, "phase": phase, "path": str(path)}
        print(json.dumps({**case, "status": status, "told": told}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(json.loads(sys.argv[2]), Path(sys.argv[1]))
