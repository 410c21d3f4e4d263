"""What passes through the servers of messages in a simulated save: with one for all ranks, and with those of leaders.

Posts and reads of `_io.comm.rounds` are counted as it makes them, with the messages of the simulated ranks and bundles
of `_io.comm.message_store`; `test_scale` compares the count with that of real rounds. Looks for what is not there yet
are not counted: how many there are depends on how long ranks wait, so for each server it is said how many ranks do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch.distributed as dist

from treeckpt._io.comm.message_store import bundle, children_of, is_leader, parent_of, unbundle

__all__ = ["LOOKS", "Load", "Talk", "requests_per_second"]

LOOKS = 20
"""How often a rank that waits looks, each second."""
NONCE = 8
WORD = 10
"""Bytes around rank 0's word."""
STATE = 120
"""Bytes of what stands on the board of the rounds before."""


class Load(msgspec.Struct):
    """What one server has to do with a save."""

    clients: int = 0
    """Ranks that wait on it at once."""
    messages: int = 0
    """Posted and read."""
    nbytes: int = 0
    """Of these."""

    def add(self, messages: int, nbytes: int) -> None:
        """Counts so many messages of so many bytes each."""
        self.messages += messages
        self.nbytes += messages * nbytes


class Talk:
    """One save's conversation of `world` ranks, grouped by `spans`."""

    def __init__(self, world: int, spans: tuple[int, ...]) -> None:
        self._spans, self._world = spans, world
        self._below = {
            rank: children_of(rank, world, spans) for rank in range(world) if is_leader(rank, world, spans) or not rank
        }
        self.servers = {rank: Load(len(below)) for rank, below in self._below.items()}
        self.seconds = 0.0
        """Of rank 0, to take the bundles apart."""

    def join(self) -> None:
        """Every rank reads the state of the rounds."""
        self.servers[0].add(self._world + 2, STATE)  # rank 0 puts it up, and again at the end

    def gather(self, messages: Sequence[bytes]) -> dict[int, bytes]:
        """Every rank's message goes up; gives what rank 0 hears."""
        heard: dict[int, dict[int, bytes]] = {rank: {rank: messages[rank]} for rank in self._below}
        for rank in range(self._world - 1, 0, -1):
            above = parent_of(rank, self._spans)
            if rank not in self._below:
                self.servers[above].add(2, NONCE + len(messages[rank]))
                heard[above][rank] = messages[rank]
                continue
            packed = bundle(heard[rank], {})
            self.servers[above].add(1, 0)  # that it waits
            self.servers[above].add(2, NONCE + len(packed))
            started = time.process_time()
            heard[above] |= unbundle(packed)[0]
            self.seconds += time.process_time() - started if not above else 0
        return heard[0]

    def broadcast(self, word: bytes, *, last: bool = False) -> None:
        """Rank 0's word goes down; all say that they have read the last one."""
        for rank, below in self._below.items():
            self.servers[rank].add(1 + len(below), WORD + len(word))
            if last:
                self.servers[rank].add(2 * len(below), 0)

    @property
    def busiest(self) -> Load:
        """Of the leaders' servers, that of the most clients."""
        return max((load for rank, load in self.servers.items() if rank), key=lambda load: load.clients, default=Load())


def requests_per_second(seconds: float = 1.0) -> float:
    """What one server of torch.distributed's Store answers here: the look of a rank that waits."""
    limit = timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit) for _ in range(8)]
    asked, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        for client in clients:
            client.check(["treeckpt/1/2/all"])
        asked += len(clients)
    return asked / took
