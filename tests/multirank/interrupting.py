"""One rank of a job that is interrupted while it saves; see test_interrupting.

It reads lines from stdin. `save NUMBER` saves, until it is interrupted or told of another rank's interrupt, or has
saved and waits for the interrupt or SIGUSR1; then it saves once more, until that succeeds. It answers with one line of
JSON: how long each call took and what it raised. HOW is `store` (a TCPStore of another process, without a process
group), `gloo`, `async` or `manager`. It runs as a program too: python -m tests.multirank.interrupting HOW PORT RANK
WORLD RUN.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import treeckpt as tc

LIMIT = 300.0
NBYTES = 4 << 20


def tree_of(comm: Any, rank: int, world: int) -> dict[str, Any]:
    own = tc.Sharded(np.full(NBYTES // 8, rank, float), (world * NBYTES // 8,), (rank * NBYTES // 8,))
    return {"step": 1, "own": own, "name": tc.PerRank(f"{rank}")}


def saver(how: str, port: int, rank: int, world: int, run: str) -> Callable[[str], Any]:
    import torch.distributed as dist

    limit, comm = timedelta(seconds=LIMIT), None
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    if how in ("gloo", "async"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    else:
        from treeckpt._io.comm.comm import TorchComm

        comm = TorchComm(store, rank, world)
    tree = tree_of(comm, rank, world)
    if how == "manager":
        manager = tc.Manager(run, background=False, comm=comm)
        return lambda name: manager.save(int(name.strip("ab")) * 2 + name.endswith("b"), tree)
    if how == "async":
        return lambda name: tc.save_async(
            f"{run}/{name}", tree, background=tc.BackgroundOptions(writer="thread")
        ).result(LIMIT)
    return lambda name: tc.save(f"{run}/{name}", tree, comm=comm)


class Interrupt:
    """Raises KeyboardInterrupt at the first SIGINT of a trial while a save is under way; else it is only noted."""

    def __init__(self) -> None:
        self.noted = self.saving = False

    def handle(self, signum: int, _: object) -> None:
        if not self.noted:
            self.noted = True
            if self.saving and signum == signal.SIGINT:
                raise KeyboardInterrupt

    def wait(self) -> None:
        while not self.noted:  # not by an event: a handler that sets it would wait for the lock of the wait
            time.sleep(0.001)


def attempt(save: Callable[[str], Any], name: str, interrupt: Interrupt) -> tuple[float, str]:
    """Saves; returns the seconds that it took, and what it raised."""
    begin, text = time.monotonic(), ""
    try:
        try:
            interrupt.saving = True
            save(name)
        finally:
            interrupt.saving = False
    except (KeyboardInterrupt, tc.TreeckptError) as error:
        text = f"{type(error).__name__}: {error}"
    return time.monotonic() - begin, text


def main(how: str, port: int, rank: int, world: int, run: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    save, interrupt = saver(how, port, rank, world, run), Interrupt()
    save("0a")
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, interrupt.handle)
    print("ready", flush=True)
    for line in sys.stdin:
        number, interrupt.noted = line.split()[1], False
        print("begin", flush=True)
        calls = [attempt(save, f"{number}a", interrupt)]
        if not calls[0][1]:
            interrupt.wait()
        calls.append(attempt(save, f"{number}b", interrupt))
        while calls[-1][1]:
            calls.append(attempt(save, f"{number}b", interrupt))
        interrupt.wait()
        print(json.dumps(calls), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
