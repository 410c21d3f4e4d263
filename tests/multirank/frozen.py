"""One rank of a job whose rank 0 serves the Store itself, as without a launcher; see test_frozen.

It saves once, says so, and then saves, or asks a manager, for each line of stdin: `save NAME`, `step NUMBER`. It
answers with the seconds that it took and the error. SIGTERM is for `save_on_signal`. It runs as a program where it has
to begin in a network namespace: python -m tests.multirank.frozen HOST PORT RANK TIMEOUT RUN.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch.distributed as dist

import treeckpt as tc
from treeckpt._io.comm.comm import TorchComm


def main(host: str, port: int, rank: int, timeout: float, run: str) -> None:
    serves, limit = rank == 0, timedelta(seconds=300)
    store = dist.TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit)
    if serves:
        print(store.port, flush=True)
    comm = TorchComm(store, rank, 2, timeout=timeout)
    manager = tc.Manager(f"{run}/managed", comm=comm, seconds=1e6, background=False)
    manager.save_on_signal(rank_timeout=2.0)
    manager.should_save(1)
    tc.save(f"{run}/first", {"step": 1}, comm=comm)
    print("ready", flush=True)
    for line in sys.stdin:
        what, argument = line.split()
        begin, error = time.monotonic(), "nothing"
        try:
            if what == "save":
                tc.save(f"{run}/{argument}", {"step": 1}, comm=comm)
            else:
                manager.should_save(int(argument))
        except tc.TreeckptError as failed:
            error = f"{failed}"
        print(f"{time.monotonic() - begin} {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
