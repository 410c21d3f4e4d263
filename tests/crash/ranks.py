"""Ranks that save in the background, of which one is killed; see test_background.

One process imports torch and forks the ranks of the cases. They mostly wait for time limits, so all cases with one
culprit run at the same time. Every line that it prints is one case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import treeckpt as tc
from tests.background import Hooked, calls_of
from tests.world import small_tree
from treeckpt.io.comm import TorchComm, default_comm

WORLD = 2
LIMIT = 3.0
"""Seconds after which a rank counts as silent."""


def rank_of(rank: int, culprit: int, phase: str, directory: Path) -> str:
    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    comm = default_comm()
    assert isinstance(comm, TorchComm)
    comm.timeout = 20.0
    tc.save_async(directory / "one", small_tree(rank, WORLD, seed=1)).result(30)
    comm.timeout = LIMIT
    if rank == culprit and phase == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    log = directory / f"log{rank}"
    try:
        # only the one that is to be killed is slow: the others wait for it
        target = Hooked(directory / "two", log, act="crawl" if rank == culprit else "fail")
        pending = tc.save_async(target, small_tree(rank, WORLD, seed=2))
        if rank == culprit:
            while phase != "staged" and not any(call.startswith(phase) for call in calls_of(log)):
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        pending.result(60)
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


def run(culprit: int, phases: list[str], directory: Path) -> None:
    begin = time.monotonic()
    started = {phase: start(culprit, phase, directory / f"{culprit} {phase}") for phase in phases}
    for phase, pids in started.items():
        status = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        path = directory / f"{culprit} {phase}"
        files = [path / f"told{rank}" for rank in range(WORLD)]
        told = [file.read_text() if file.exists() else "" for file in files]
        case = {"culprit": culprit, "phase": phase, "path": str(path)}
        print(json.dumps({**case, "status": status, "told": told, "seconds": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for culprit, phases in json.loads(sys.argv[2]):
        run(culprit, phases, Path(sys.argv[1]))
