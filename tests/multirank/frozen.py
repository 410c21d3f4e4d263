"""One rank of a job whose rank 0 serves the Store itself, as without a launcher; see test_frozen.

It saves once, says so, and then saves, or asks a manager, for each line of stdin: `save NAME`, `step NUMBER`. It
answers with the seconds that it took, how often it called the Store, and the error. `limit SECONDS`, without an answer,
is the time limit of its messages from then on, and of calls on the Store: none is short before that. SIGTERM is for
`save_on_signal`. It runs as a program where it has to begin in a network namespace: python -m tests.multirank.frozen
HOST PORT RANK RUN.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import treeckpt as tc
from tests.helpers.background import until
from treeckpt._io.comm.comm import TorchComm
from treeckpt._io.comm.message_store import answer_limit


class Counted:
    """A Store that counts the calls on it."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls += 1
            return getattr(self._store, name)(*arguments)

        return call


def limit_waits(comm: TorchComm, seconds: float) -> None:
    """Sets the time limit of a comm anew; first waits for the answer to a call that had none so far."""
    calls = comm.common._calls
    assert until(lambda: calls._unanswered is None or not calls._unanswered.ended.locked())
    comm.timeout, calls.limit = seconds, answer_limit(seconds)


def main(host: str, port: int, rank: int, run: str) -> None:
    serves, limit = rank == 0, timedelta(seconds=300)
    store = dist.TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit)
    if serves:
        print(store.port, flush=True)
    counted = Counted(store)
    comm = TorchComm(counted, rank, 2, timeout=limit.total_seconds())
    manager = tc.Manager(f"{run}/managed", comm=comm, seconds=1e6, background=False)
    manager.save_on_signal(rank_timeout=2.0)
    manager.should_save(1)
    tc.save(f"{run}/first", {"step": 1}, comm=comm)
    print("ready", flush=True)
    for line in sys.stdin:
        what, argument = line.split()
        if what == "limit":
            limit_waits(comm, float(argument))
            continue
        begin, calls, error = time.monotonic(), counted.calls, "nothing"
        try:
            if what == "save":
                tc.save(f"{run}/{argument}", {"step": 1}, comm=comm)
            else:
                manager.should_save(int(argument))
        except tc.TreeckptError as failed:
            error = f"{failed}"
        print(f"{time.monotonic() - begin} {counted.calls - calls} {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
