"""How ranks talk: small messages to the coordinator and back, without any collective of the user's process groups.

Rank 0 is the coordinator. `gather` brings one message of every rank to it, `broadcast` one of its own to all. Every
wait has a time limit, and a rank that never sends is named. `TorchComm` goes over a clone of torch.distributed's Store (a
connection of its own), so a wait never blocks the training's use of it.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Protocol

from ..core.errors import RankError

__all__ = ["Comm", "SoloComm", "ThreadComm", "TorchComm", "default_comm", "thread_comms"]

TIMEOUT = 600.0
"""Seconds to wait for other ranks, unless told otherwise."""


class Comm(Protocol):
    """One rank's connection to the others. Calls come in the same order on every rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def memory(self) -> dict[str, Any]:
        """A place for what ranks agreed on, kept between saves."""
        ...

    def gather(self, data: bytes, *, timeout: float | None = None) -> list[bytes] | None:
        """Every rank's message, on rank 0; None elsewhere.

        Args:
            timeout: seconds, instead of the usual limit.

        Raises:
            RankError: a rank did not send in time.
        """
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's message, on every rank.

        Raises:
            RankError: rank 0 did not send in time.
        """
        ...


class SoloComm:
    """One rank, alone."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.memory: dict[str, Any] = {}

    def gather(self, data: bytes, *, timeout: float | None = None) -> list[bytes] | None:
        return [data]

    def broadcast(self, data: bytes | None) -> bytes:
        assert data is not None, "rank 0 has the message"
        return data


def _silent(ranks: list[int], seconds: float) -> RankError:
    return RankError(
        "ranks",
        ranks=dict.fromkeys(ranks, f"silent for {seconds:g} s"),
        expected="a message from every rank",
        hint="Look at what these ranks are doing; a rank that died, or that never called, shows here",
    )


class _Board:
    """Messages between threads that act as ranks."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], bytes] = {}
        self.changed = threading.Condition()

    def post(self, key: tuple[int, int], data: bytes) -> None:
        with self.changed:
            self.messages[key] = data
            self.changed.notify_all()

    def wait(self, keys: list[tuple[int, int]], timeout: float) -> list[bytes | None]:
        with self.changed:
            self.changed.wait_for(lambda: all(key in self.messages for key in keys), timeout)
            return [self.messages.get(key) for key in keys]


class ThreadComm:
    """Threads of one process as ranks: for tests, and for what needs no more."""

    def __init__(self, rank: int, size: int, board: _Board, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.memory: dict[str, Any] = {}
        self._board = board
        self._count = 0

    def gather(self, data: bytes, *, timeout: float | None = None) -> list[bytes] | None:
        self._count += 1
        self._board.post((self._count, self.rank), data)
        if self.rank:
            return None
        limit = self.timeout if timeout is None else timeout
        found = self._board.wait([(self._count, rank) for rank in range(self.size)], limit)
        if silent := [rank for rank, message in enumerate(found) if message is None]:
            raise _silent(silent, limit)
        return [message for message in found if message is not None]

    def broadcast(self, data: bytes | None) -> bytes:
        self._count += 1
        if data is not None and self.rank == 0:
            self._board.post((self._count, 0), data)
        # the coordinator may itself be waiting, for as long, for a rank that is silent
        found = self._board.wait([(self._count, 0)], self.timeout * 2 + 1)[0]
        if found is None:
            raise _silent([0], self.timeout * 2 + 1)
        return found


def thread_comms(size: int, *, timeout: float = TIMEOUT) -> list[ThreadComm]:
    """Connected comms for `size` threads, by rank."""
    board = _Board()
    return [ThreadComm(rank, size, board, timeout) for rank in range(size)]


class TorchComm:
    """Processes of torch.distributed, over its key-value Store.

    Args:
        store: any torch.distributed Store; the default group's is cloned by `default_comm`.
        timeout: seconds.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float = TIMEOUT, prefix: str = "treeckpt") -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.memory: dict[str, Any] = {}
        self._store, self._prefix = store, prefix
        self._count = 0
        self._last: str | None = None

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._count}/{rank}"

    def gather(self, data: bytes, *, timeout: float | None = None) -> list[bytes] | None:
        self._count += 1
        if self.rank:
            self._store.set(self._key(self.rank), data)
            return None
        keys = [self._key(rank) for rank in range(1, self.size)]
        limit = self.timeout if timeout is None else timeout
        if keys and not self._wait(keys, time.monotonic() + limit):
            silent = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
            raise _silent(silent, limit)
        found = [data, *(bytes(self._store.get(key)) for key in keys)]
        for key in keys:
            self._store.delete_key(key)
        return found

    def _wait(self, keys: list[str], deadline: float) -> bool:
        """Polls: a blocking wait would hold this connection and cannot be told from a broken one when it ends."""
        pause = 0.0005
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return True

    def broadcast(self, data: bytes | None) -> bytes:
        self._count += 1
        key = self._key(0)
        if self.rank == 0:
            assert data is not None, "rank 0 has the message"
            self._store.set(key, data)
            # everyone has read the message before the last one by now: each has sent something since
            previous, self._last = self._last, key
            if previous is not None:
                self._store.delete_key(previous)
            return data
        limit = self.timeout * 2 + 1
        if not self._wait([key], time.monotonic() + limit):
            raise _silent([0], limit)
        return bytes(self._store.get(key))


def default_comm() -> Comm:
    """The comm of this process: over torch.distributed's default group if that is up, else alone.

    It is kept with the default group's Store, so that ranks count their messages alike and a new group starts anew.
    """
    if "torch" not in sys.modules:
        return SoloComm()
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SoloComm()
    store: Any = dist.distributed_c10d._get_default_store()
    kept = _COMMS.get(id(store))
    if kept is None or kept[0] is not store:
        _COMMS.clear()
        kept = (store, TorchComm(_clone(store), dist.get_rank(), dist.get_world_size()))
        _COMMS[id(store)] = kept
    return kept[1]


_COMMS: dict[int, tuple[Any, TorchComm]] = {}
"""The one comm of the default process group, which is itself a global of torch's."""


def _clone(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store  # a kind of Store without clones: shared, its calls are short polls
