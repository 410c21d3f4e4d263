"""Message stores: in memory, and over torch.distributed's Store: the one of all ranks, and those that leaders serve.

Where the common Store is a TCPStore, a leader serves another one for the ranks that it leads, and posts its address in
the common one; so no server has more than some dozens of clients that wait. A rank that cannot connect to its leader's
store (a firewall, for instance) falls back to the common Store, which the leader also reads while a message is missing.
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
from functools import partial
from typing import Any

from ...errors import RankError
from ...threads import start_thread

CONNECT_TIMEOUT = 20.0
"""Seconds in which a leader's server has to be reached."""
CALL_TIMEOUT = 60.0
"""Seconds in which a leader's server answers a call."""
FALLBACK_INTERVAL = 2.0
"""Seconds between two reads of the common Store by a leader, for ranks that could not connect to it."""


class ThreadMessageStore:
    """A message store in this process's memory, for threads that act as ranks."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def post(self, key: str, data: bytes) -> None:
        with self.changed:
            self.messages[key] = data
            self.changed.notify_all()

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        with self.changed:
            self.changed.wait_for(lambda: all(key in self.messages for key in keys), timeout)
            return [self.messages.get(key) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        with self.changed:
            for key in keys:
                self.messages.pop(key, None)


class TorchMessageStore:
    """Messages in a Store that rank `server` serves, under a prefix."""

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
        """Polls: a blocking wait would hold this connection, and its end cannot be told from a broken connection."""
        deadline, pause, names = time.monotonic() + timeout, 0.0005, self._keys(keys)
        try:
            while not (complete := self.store.check(names)) and time.monotonic() < deadline:
                time.sleep(min(pause, timeout))
                pause = min(pause * 1.5, 0.05)
            # get blocks for a missing key, so it is called for existing ones only
            return [bytes(self.store.get(name)) if complete or self.store.check([name]) else None for name in names]
        except RuntimeError as error:
            raise _store_error(error, self.server) from error

    def drop(self, keys: Sequence[str]) -> None:
        with contextlib.suppress(RuntimeError):
            for name in self._keys(keys):
                self.store.delete_key(name)

    def fallback(self, leader: int) -> TorchMessageStore:
        """Returns the part of this store that a leader and the ranks that cannot connect to it use."""
        return TorchMessageStore(self.store, f"{self.prefix}/led by {leader}", self.server)


def _store_error(error: RuntimeError, server: int) -> RankError:
    return RankError(
        "ranks",
        ranks={server: f"its message store does not answer: {error!s:.200}"},
        expected=f"torch.distributed's Store, which rank {server} or the launcher (torchrun) serves",
        hint=f"Look at what ended rank {server}, or the launcher. A save that was under way may be committed: look "
        "before saving there again",
    )


class _TimeLimitedStore:
    """A leader's Store with a time limit for every call: torch's client waits for ever for a machine that vanished.

    Calls run in a daemon thread, which does not keep the process from ending, as those of an executor would.
    """

    def __init__(self, store: Any, limit: float) -> None:
        self._store, self._limit, self._unreachable = store, limit, False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        if start_thread(partial(_run_calls, self._calls), "treeckpt-store") is None:
            raise RuntimeError("no thread can be started")

    def set(self, key: str, data: bytes) -> None:
        self._call(self._store.set, key, data)

    def get(self, key: str) -> Any:
        return self._call(self._store.get, key)

    def check(self, keys: list[str]) -> bool:
        return self._call(self._store.check, keys)

    def delete_key(self, key: str) -> None:
        self._call(self._store.delete_key, key)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        future: Future[Any] = Future()
        try:
            if self._unreachable:
                raise TimeoutError
            self._calls.put((future, function, arguments))
            return future.result(self._limit)
        except TimeoutError as error:
            self._unreachable = True
            raise RuntimeError(f"no answer for {self._limit:g} s") from error

    def __del__(self) -> None:
        self._calls.put(None)


def _run_calls(calls: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        future, function, arguments = call
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, arguments  # else the last call would keep its Store alive


class LeaderStore:
    """The store that this rank serves as leader; ranks that cannot connect to it use `fallback`, in the common one."""

    def __init__(self, own: TorchMessageStore, fallback: TorchMessageStore) -> None:
        self.own, self._fallback, self._fallback_used = own, fallback, False

    def post(self, key: str, data: bytes) -> None:
        self.own.post(key, data)
        if self._fallback_used:
            self._fallback.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            messages = self.own.wait(keys, max(min(left, FALLBACK_INTERVAL), 0))
            missing = [i for i, message in enumerate(messages) if message is None]
            if missing:
                for i, message in zip(missing, self._fallback.wait([keys[i] for i in missing], 0), strict=True):
                    messages[i] = message
                    self._fallback_used = self._fallback_used or message is not None
            if None not in messages or left <= FALLBACK_INTERVAL:
                return messages

    def drop(self, keys: Sequence[str]) -> None:
        self.own.drop(keys)
        if self._fallback_used:
            self._fallback.drop(keys)


def serve_leader_store(common: TorchMessageStore, leader: int) -> LeaderStore | TorchMessageStore:
    """Serves this rank's own store and posts its address in the common one; where it cannot, returns the fallback."""
    fallback = common.fallback(leader)
    try:
        server = _new_server(common.store)
    except (RuntimeError, OSError, ValueError):
        server = None
    if server is None:
        common.post(_address_key(leader), b"")
        return fallback
    host, store = server
    common.post(_address_key(leader), f"{host} {store.port}".encode())
    return LeaderStore(TorchMessageStore(store, fallback.prefix, leader), fallback)


def connect_to_leader(common: TorchMessageStore, leader: int, timeout: float) -> TorchMessageStore:
    """Returns the message store of this rank's leader; the fallback where it cannot be reached.

    Raises:
        RankError: the leader posted no address within `timeout` seconds, or the common store cannot be reached.
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
        pause = min(pause * 2, 1.0)  # all ranks poll the one server for this
    fallback = common.fallback(leader)
    if not address:
        return fallback
    host, _, port = address.decode().rpartition(" ")
    try:
        store = _TimeLimitedStore(open_tcp_store(host, int(port), serves=False), CALL_TIMEOUT)
    except (RuntimeError, OSError, ValueError):
        return fallback
    return TorchMessageStore(store, fallback.prefix, leader)


def _address_key(leader: int) -> str:
    return f"board of {leader}"


def _new_server(store: Any) -> tuple[str, Any] | None:
    """Starts a TCPStore; returns this host's address for other ranks, and it. None where `store` is no TCPStore."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host or not port:
        return None
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing; finds by which of its addresses this host reaches the common server
        address = probe.getsockname()[0]
    return address, open_tcp_store(address, 0, serves=True)


def open_tcp_store(host: str, port: int, *, serves: bool) -> Any:
    """Returns a TCPStore of torch, as its server or as a client."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_TIMEOUT))
