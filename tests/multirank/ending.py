"""The ranks of a training of which one is killed, and which are then told to end; see test_ending.

    python -m tests.multirank.ending RUN PORT WORLD VICTIM WHERE

One process imports torch and forks the ranks, which end as programs do. What rank 0 writes is in the file `RUN.0`. The
process prints the ids of the ranks, and at the end their exit codes.

The store of torch.distributed is the test's, as torchrun's agent serves it. WHERE says where the survivors wait for the
victim: in `save`'s agreement, in `should_save`, or in `close`, behind a save in the background to which it agreed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import treeckpt as tc
from treeckpt._saving import background


def train(run: Path, port: int, rank: int, world: int, victim: int, where: str) -> None:
    limit = timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    with tc.Manager(run, background=where == "close", seconds=1e6) as manager:
        manager.save_on_signal(exit=0, rank_timeout=2.0)
        manager.should_save(1)
        manager.save(1, {"step": 1})
        manager.wait()
        if where == "close":
            if rank == victim:
                background.complete = lambda *_, **__: threading.Event().wait()
            manager.save(2, {"step": 2})
        print("ready", flush=True)
        if rank == victim:
            threading.Event().wait()
        if where == "save":
            manager.save(2, {"step": 2})
        if where == "should_save":
            for step in range(2, 1000):
                manager.should_save(step)


def main(arguments: list[str]) -> int:
    run, port, world, victim = Path(arguments[0]), *map(int, arguments[1:4])
    pids: list[int] = []
    for rank in range(world):
        pids.append(os.fork())
        if pids[-1] == 0:
            told = os.open(f"{run}.{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(told, 1)
            os.dup2(told, 2)
            train(run, port, rank, world, victim, arguments[4])
            return 0
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
