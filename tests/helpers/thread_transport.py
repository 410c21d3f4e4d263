"""A transport of trees between threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeckpt._io.comm.comm import ThreadComm
from treeckpt.trees._transport import Transfer


class ThreadTransport:
    """A transport over a message store, with a number for each message."""

    members = None

    def __init__(self, comm: ThreadComm) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._step = 0
        self._pairs: dict[tuple[int, int], int] = {}
        self.moved = 0

    def _wait(self, key: str) -> bytes:
        found = self._comm.wait([key], 20)[0]
        assert found is not None, f"rank {self.rank} waits for {key}"
        return found

    def all_gather(self, data: bytes) -> list[bytes]:
        self._step += 1
        self._comm.post(f"tell {self._step} {self.rank}", data)
        return [self._wait(f"tell {self._step} {rank}") for rank in range(self.size)]

    def broadcast(self, data: np.ndarray, source: int) -> None:
        self._step += 1
        if self.rank == source:
            self._comm.post(f"broadcast {self._step}", data.tobytes())
        else:
            data[:] = np.frombuffer(self._wait(f"broadcast {self._step}"), np.uint8)
        self.moved += data.nbytes

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        for other, data in sends:
            self._comm.post(self._number(self.rank, other), data.tobytes())
            self.moved += data.nbytes
        for other, data in receives:
            data[:] = np.frombuffer(self._wait(self._number(other, self.rank)), np.uint8)

    def _number(self, sender: int, receiver: int) -> str:
        count = self._pairs[sender, receiver] = self._pairs.get((sender, receiver), 0) + 1
        return f"{sender} to {receiver}: {count}"
