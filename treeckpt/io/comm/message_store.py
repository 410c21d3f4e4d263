"""Boards of messages over torch.distributed's Store: the one that all ranks have, and those that leaders serve.

A leader serves a TCPStore of its own for the ranks that it leads, where the common Store is one, and tells its address
on that; so in a large world no server has more than some dozens of clients that wait. A rank that cannot connect to it,
as where a firewall stands between, meets its leader on the common Store, where that looks if somebody is missing.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from ...errors import RankError

__all__ = ["LeaderStore", "TorchMessageStore", "connect_to_leader", "serve_leader_store"]

CONNECT_TIMEOUT = 20.0
"""Seconds in which a leader's server has to be reached."""
CALL_TIMEOUT = 60.0
"""Seconds in which a leader's server answers a call."""
FALLBACK_INTERVAL = 2.0
"""Seconds between two looks of a leader for those who could not reach it."""


class TorchMessageStore:
    """Messages on a Store, under a prefix.

    Args:
        server: the rank that serves the Store, for errors.
    """

    def __init__(self, store: Any, prefix: str, server: int = 0) -> None:
        self.store, self.prefix, self.server = store, prefix, server

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [f"{self.prefix}/{key}" for key in keys]

    def post(self, key: str, data: bytes) -> None:
        try:
            self.store.set(f"{self.prefix}/{key}", data)
        except RuntimeError as error:
            raise _store_error(error, self.server) from error

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        """Polls: a blocking wait would hold this connection and cannot be told from a broken one when it ends."""
        deadline, pause, names = time.monotonic() + timeout, 0.0005, self._keys(keys)
        try:
            while not (complete := self.store.check(names)) and time.monotonic() < deadline:
                time.sleep(min(pause, timeout))
                pause = min(pause * 1.5, 0.05)
            # get waits for what is not there, so it is asked for only what is
            return [bytes(self.store.get(name)) if complete or self.store.check([name]) else None for name in names]
        except RuntimeError as error:
            raise _store_error(error, self.server) from error

    def drop(self, keys: Sequence[str]) -> None:
        with contextlib.suppress(RuntimeError):
            for name in self._keys(keys):
                self.store.delete_key(name)


def _store_error(error: RuntimeError, server: int) -> RankError:
    return RankError(
        "ranks",
        ranks={server: f"its message store does not answer: {error!s:.200}"},
        expected=f"torch.distributed's Store, which rank {server} or the launcher (torchrun) serves",
        hint=f"Look at what ended rank {server}, or the launcher. A save that was under way may be committed: look "
        "before saving there again",
    )


class _TimeLimitedStore:
    """A leader's Store whose calls end though its machine may have vanished: torch's own wait for ever."""

    def __init__(self, store: Any, limit: float) -> None:
        self._store, self._limit, self._gone = store, limit, False
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=_run_calls, args=(self._jobs,), daemon=True).start()

    def set(self, key: str, data: bytes) -> None:
        self._call(self._store.set, key, data)

    def get(self, key: str) -> Any:
        return self._call(self._store.get, key)

    def check(self, keys: list[str]) -> bool:
        return self._call(self._store.check, keys)

    def delete_key(self, key: str) -> None:
        self._call(self._store.delete_key, key)

    def _call(self, act: Callable[..., Any], *arguments: Any) -> Any:
        future: Future[Any] = Future()
        try:
            if self._gone:
                raise TimeoutError
            self._jobs.put((future, act, arguments))
            return future.result(self._limit)
        except TimeoutError as error:
            self._gone = True
            raise RuntimeError(f"no answer for {self._limit:g} s") from error

    def __del__(self) -> None:
        self._jobs.put(None)


def _run_calls(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        future, act, arguments = job
        try:
            future.set_result(act(*arguments))
        except BaseException as error:
            future.set_exception(error)
        del job, future, act, arguments  # or the last one's Store would live on


class LeaderStore:
    """A board that this rank serves, and the place on the common one where those are met who cannot reach it."""

    def __init__(self, own: TorchMessageStore, detour: TorchMessageStore) -> None:
        self._own, self._detour, self._met = own, detour, False

    def post(self, key: str, data: bytes) -> None:
        self._own.post(key, data)
        if self._met:
            self._detour.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            found = self._own.wait(keys, max(min(left, FALLBACK_INTERVAL), 0))
            missing = [i for i, message in enumerate(found) if message is None]
            if missing:
                for i, message in zip(missing, self._detour.wait([keys[i] for i in missing], 0), strict=True):
                    found[i] = message
                    self._met = self._met or message is not None
            if None not in found or left <= FALLBACK_INTERVAL:
                return found

    def drop(self, keys: Sequence[str]) -> None:
        self._own.drop(keys)
        if self._met:
            self._detour.drop(keys)


def _fallback_store(common: TorchMessageStore, leader: int) -> TorchMessageStore:
    return TorchMessageStore(common.store, f"{common.prefix}/led by {leader}", common.server)


def serve_leader_store(common: TorchMessageStore, leader: int) -> LeaderStore | TorchMessageStore:
    """This rank's own board, whose address is told on the common one; a part of that where it can serve none.

    Raises:
        RankError: the common board is gone.
    """
    meeting = _fallback_store(common, leader)
    try:
        own = _new_server(common.store)
    except (RuntimeError, OSError, ValueError):
        own = None
    common.post(_address_key(leader), f"{own[0]} {own[1].port}".encode() if own is not None else b"")
    return LeaderStore(TorchMessageStore(own[1], meeting.prefix, leader), meeting) if own is not None else meeting


def connect_to_leader(common: TorchMessageStore, leader: int, timeout: float) -> TorchMessageStore:
    """The board of this rank's leader.

    Raises:
        RankError: the leader told no address within `timeout` seconds, or the common board is gone.
    """
    deadline, pause = time.monotonic() + timeout, 0.002
    while (address := common.wait([_address_key(leader)], 0)[0]) is None:
        if time.monotonic() > deadline:
            raise RankError(
                "ranks",
                ranks={leader: f"silent for {timeout:g} s"},
                expected=f"the address of its message store, for the ranks that rank {leader} speaks for",
                hint=f"Look at what rank {leader} is doing",
            )
        time.sleep(pause)
        pause = min(pause * 2, 1.0)  # all ranks ask the one server for this
    meeting = _fallback_store(common, leader)
    if not address:
        return meeting
    host, _, port = address.decode().rpartition(" ")
    try:
        store = _tcp_store(host, int(port), serves=False)
    except (RuntimeError, OSError, ValueError):
        return meeting
    return TorchMessageStore(_TimeLimitedStore(store, CALL_TIMEOUT), meeting.prefix, leader)


def _address_key(leader: int) -> str:
    return f"board of {leader}"


def _new_server(store: Any) -> tuple[str, Any] | None:
    """A server of one's own and the host by which others reach it; None where the common Store is no server's."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host or not port:
        return None
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing; says by which of its addresses this host reaches the server
        mine = probe.getsockname()[0]
    return mine, _tcp_store(mine, 0, serves=True)


def _tcp_store(host: str, port: int, *, serves: bool) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_TIMEOUT))
