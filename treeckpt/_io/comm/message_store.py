"""Message stores: in memory, and over torch.distributed's Store: the one of all ranks, and those that leaders serve.

In a large world ranks exchange messages with the leader of their group only. With group sizes (8, 512) rank 8 leads
ranks 8 to 15, usually the ranks of one host; rank 512 leads 513 to 519, the leaders 520, 528 ... 1016, and with them
all ranks up to 1023; rank 0 leads its own group and the leaders of all other groups. Messages go up in bundles, in
which equal messages are stored once, and rank 0's messages are passed down.

Where the common Store is a TCPStore, a leader serves another one for the ranks that it leads, and posts its address in
the common one; so no server has more than some dozens of clients that wait. A rank that cannot connect to its leader's
store (a firewall, for instance) falls back to the common Store, which the leader also reads while a message is missing.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec

from ..._core.format.decoding import decode_msgpack
from ..._core.sharding.int_runs import Runs, decode_runs, encode_runs
from ..._threads import start_thread
from ...errors import RankError
from ..process import TERMINATION

TREE_ABOVE = 1024
"""Number of ranks of the largest world in which every rank exchanges messages with rank 0 itself.

While it waits, a rank polls twenty times a second, and the one thread of a Store's server answers some 50,000 requests
a second (`python -m tests.bench scale` measures it): with 2,500 ranks the polls alone keep it busy.
"""
GROUP_SIZES = (8, 512)
"""Ranks of a usual host, and of 64 hosts: of 16,384 ranks 101 exchange messages with rank 0, 70 with other leaders."""


class _Bundle(msgspec.Struct, array_like=True):
    messages: list[tuple[Runs, bytes]]
    """Distinct messages, each with the ranks that sent it."""
    lost: dict[int, str]
    """Ranks that fell silent, and what is known of each."""


def group_sizes_for(size: int) -> tuple[int, ...]:
    """Returns the group sizes of a world of `size` ranks; none where every rank exchanges messages with rank 0."""
    return GROUP_SIZES if size > TREE_ABOVE else ()


def parent_of(rank: int, group_sizes: tuple[int, ...]) -> int:
    """Returns the leader of a rank; rank 0's is rank 0."""
    return next((rank - rank % size for size in group_sizes if rank % size), 0)


def children_of(rank: int, world: int, group_sizes: tuple[int, ...]) -> list[int]:
    """Returns the ranks whose leader this one is."""
    children: list[int] = []
    step = 1
    for size in (*group_sizes, world):
        if rank % size:
            break
        children += range(rank + step, min(rank + size, world), step)
        step = size
    return children


def is_leader(rank: int, world: int, group_sizes: tuple[int, ...]) -> bool:
    """Returns whether a rank leads others."""
    return bool(children_of(rank, world, group_sizes))


def bundle(messages: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
    """Encodes messages by rank as one message, which holds equal ones once."""
    senders: dict[bytes, list[int]] = {}
    for rank, message in messages.items():
        senders.setdefault(message, []).append(rank)
    distinct = [(encode_runs(sorted(ranks)), message) for message, ranks in senders.items()]
    return msgspec.msgpack.encode(_Bundle(distinct, dict(lost)))


def unbundle(data: bytes) -> tuple[dict[int, bytes], dict[int, str]]:
    """Decodes a bundle: messages by rank, and the lost ranks. Equal messages are one object."""
    bundled = decode_msgpack(data, _Bundle)
    messages: dict[int, bytes] = {}
    for ranks, message in bundled.messages:
        messages |= dict.fromkeys(decode_runs(ranks).tolist(), message)
    return messages, bundled.lost


CONNECT_TIMEOUT = 20.0
"""Seconds in which a leader's server has to be reached."""
CALL_TIMEOUT = 60.0
"""Seconds in which a leader's server answers a call."""
LEAST_ANSWER_LIMIT = 5.0
"""Seconds that the common Store has for an answer, however short a comm's time limit is."""
_ANSWER_CHECK = 0.25
"""Seconds between two looks at what limits the wait for an answer."""
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


class _AnswerLimit(threading.local):
    seconds = math.inf


_ANSWER_LIMIT = _AnswerLimit()


def answer_limit(timeout: float) -> float:
    """Returns the seconds in which the common Store has to answer a comm with this time limit."""
    return max(timeout, LEAST_ANSWER_LIMIT)


@contextlib.contextmanager
def answers_within(seconds: float) -> Iterator[None]:
    """Lets each call on a Store, from this thread in the body, wait for an answer for at most so many seconds."""
    before = _ANSWER_LIMIT.seconds
    _ANSWER_LIMIT.seconds = min(before, seconds)
    try:
        yield
    finally:
        _ANSWER_LIMIT.seconds = before


class _Call:
    """A call on a Store, made by the thread of `_StoreCalls`."""

    __slots__ = ("arguments", "ended", "error", "function", "result")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        """Held until the call has ended."""
        self.ended.acquire()


class _StoreCalls:
    """Makes the calls on one Store in a thread of its own, so that each has a time limit, and can be interrupted.

    torch's client waits in a read without a deadline: for ever where the server is frozen, or its machine is off the
    network. After a call that was not answered in time further ones fail at once, until it is answered after all. The
    thread is a daemon, which does not keep the process from ending. A call costs 25 us more than without the thread.
    Where no thread can be started, the calls have no time limit.

    Args:
        limit: seconds in which a call has to be answered; `answers_within` and a signal shorten it.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._started, self._lock = False, threading.Lock()
        self._unanswered: _Call | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a call; raises what it raises, and RuntimeError where there is no answer in time."""
        if self._unanswered is not None and self._unanswered.ended.locked():
            raise RuntimeError("a call before this one was not answered either")
        if not self._started:
            with self._lock:
                if not self._started:
                    self._started = start_thread(partial(_run_calls, self._calls), "treeckpt-store") is not None
            if not self._started:
                return function(*arguments)
        call = _Call(function, arguments)
        self._calls.put(call)
        if not call.ended.acquire(timeout=_ANSWER_CHECK):
            # the clock is read only for a call that was not answered at once
            begin = time.monotonic() - _ANSWER_CHECK
            while not call.ended.acquire(timeout=_ANSWER_CHECK):
                waited = time.monotonic() - begin
                if waited > min(self.limit, _ANSWER_LIMIT.seconds) or TERMINATION.expired(begin):
                    self._unanswered = call
                    raise RuntimeError(f"no answer for {waited:.3g} s")
        if call.error is not None:
            raise call.error
        return call.result

    def __del__(self) -> None:
        self._calls.put(None)


def _run_calls(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.result = call.function(*call.arguments)
        except BaseException as error:
            call.error = error
        call.ended.release()
        del call  # else the last call would keep its Store alive


def _read(store: Any, names: list[str], *, all_or_none: bool) -> list[bytes | None] | None:
    """Returns the messages of these keys; None where one is missing and all are wanted. It blocks for none of them."""
    complete = not names or store.check(names)
    if not complete and all_or_none:
        return None
    if not complete and len(names) == 1:
        return [None]
    # get blocks for a missing key, so it is called for existing ones only
    return [bytes(store.get(name)) if complete or store.check([name]) else None for name in names]


def _delete(store: Any, names: list[str]) -> None:
    for name in names:
        store.delete_key(name)


class TorchMessageStore:
    """Messages in a Store that rank `server` serves, under a prefix.

    Args:
        limit: seconds in which the Store has to answer a call.
    """

    def __init__(self, store: Any, prefix: str, server: int = 0, *, limit: float | _StoreCalls) -> None:
        self.store, self.prefix, self.server = store, prefix, server
        self._calls = limit if isinstance(limit, _StoreCalls) else _StoreCalls(answer_limit(limit))

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [f"{self.prefix}/{key}" for key in keys]

    def post(self, key: str, data: bytes) -> None:
        try:
            self._calls(self.store.set, f"{self.prefix}/{key}", data)
        except RuntimeError as error:
            raise _store_error(error, self.server) from error

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        """Polls: a blocking wait would hold this connection, and its end cannot be told from a broken connection."""
        deadline, pause, names = time.monotonic() + timeout, 0.0005, self._keys(keys)
        read, messages = partial(_read, self.store, names), None
        try:
            while time.monotonic() < deadline and (messages := self._calls(partial(read, all_or_none=True))) is None:
                time.sleep(min(pause, timeout))
                # up to twenty polls a second of each rank, see `TREE_ABOVE`
                pause = min(pause * 1.5, 0.05)
            return self._calls(partial(read, all_or_none=False)) if messages is None else messages
        except RuntimeError as error:
            raise _store_error(error, self.server) from error

    def drop(self, keys: Sequence[str]) -> None:
        with contextlib.suppress(RuntimeError):
            if keys:
                self._calls(_delete, self.store, self._keys(keys))

    def fallback(self, leader: int) -> TorchMessageStore:
        """Returns the part of this store that a leader and the ranks that cannot connect to it use."""
        return TorchMessageStore(self.store, f"{self.prefix}/led by {leader}", self.server, limit=self._calls)


def _store_error(error: RuntimeError, server: int) -> RankError:
    return RankError(
        "ranks",
        ranks={server: f"its message store does not answer: {error!s:.200}"},
        expected=f"torch.distributed's Store, which rank {server} or the launcher (torchrun) serves",
        hint=f"Look at what ended rank {server}, or the launcher. A save that was under way may be committed: look "
        "before saving there again",
    )


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
        # empty, so that the ranks below take the fallback at once
        common.post(_address_key(leader), b"")
        return fallback
    host, store = server
    common.post(_address_key(leader), f"{host} {store.port}".encode())
    return LeaderStore(TorchMessageStore(store, fallback.prefix, leader, limit=CALL_TIMEOUT), fallback)


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
        store = open_tcp_store(host, int(port), serves=False)
    except (RuntimeError, OSError, ValueError):
        return fallback
    return TorchMessageStore(store, fallback.prefix, leader, limit=CALL_TIMEOUT)


def _address_key(leader: int) -> str:
    return f"board of {leader}"


def _new_server(store: Any) -> tuple[str, Any] | None:
    """Starts a TCPStore; returns this host's address for other ranks, and it. None where `store` is no TCPStore."""
    # torch wraps the Store of a process group in PrefixStores
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
