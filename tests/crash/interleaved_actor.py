"""A process that does one action after another, and stops before each of its file operations until it may go on.

Audit hooks see every call that opens, lists, makes, renames, links or removes something; `os.stat`, `os.lstat` and
writes at an offset are replaced. Only what lies below the directory of the present case counts. Each thread has a
connection of its own to the scheduler, so that one may wait for another. `time.sleep` is a stop too, and does not
sleep: the clock that limits how long something is waited for is moved on instead.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tests.crash.interleaved_actions import Action, act
from treeckpt._io.storage import conditions
from treeckpt._io.timing import steady_clock

__all__ = ["EVENTS", "SLEEP", "Clock", "Line", "changes", "serve"]

EVENTS = frozenset(
    {
        *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.rename", "os.link", "os.symlink"),
        *("os.remove", "os.truncate", "os.utime", "os.chmod", "fcntl.flock", "fcntl.lockf"),
    }
)
SLEEP = "sleep"
_LOOKS = ("open", "stat", "lstat", "scandir", "listdir", "GET", "HEAD", "LIST")
_CALLS = ("stat", "lstat", "pwrite", "pwritev")
"""Calls of `os` without an event."""
_PATHS = {"os.rename": 2, "os.link": 2, "os.symlink": 2}
"""How many of an event's first arguments are paths, where that is not one."""


class Line:
    """A connection that carries messages, one a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._rest = connection, b""

    def send(self, message: Any) -> None:
        self.socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> Any:
        """The next message; None at the end of the connection."""
        while b"\n" not in self._rest:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line)

    @property
    def more(self) -> bool:
        """Whether another message has been received already."""
        return b"\n" in self._rest


def changes(operation: str) -> bool:
    """Whether an operation changes what others see, or is a sleep."""
    return operation.partition(" ")[0] not in _LOOKS


class Clock:
    """By how many seconds the clocks of all processes are ahead, which a scheduler and those that it forks share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def late(self) -> float:
        return struct.unpack_from("d", self._memory)[0]

    @late.setter
    def late(self, seconds: float) -> None:
        struct.pack_into("d", self._memory, 0, seconds)


class Gate:
    """Where the threads of a process stop."""

    def __init__(self, address: str, number: int, clock: Clock) -> None:
        self.address, self.number, self.root = address, number, ""
        self.main = self._connect(main=True)
        self._local = threading.local()
        self._local.line, self._local.free, self._local.more, self._local.inside = self.main, 0, [], False
        self._local.only_changes = False
        self._main_thread, self._pid = threading.get_ident(), os.getpid()
        self.slept, self._clock = 0.0, clock
        """Seconds by which the clock that limits waiting is ahead; and by which all clocks are."""

    def _connect(self, *, main: bool) -> Line:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.address)
        line = Line(connection)
        line.send({"actor": self.number, "pid": os.getpid(), "main": main})
        return line

    @property
    def late(self) -> float:
        return self._clock.late

    def begin(self, root: str, *, only_changes: bool) -> None:
        """Begins an action, which stops from its first operation on, or only before those that change something."""
        self.root, self.slept, self._local.only_changes = root, 0.0, only_changes

    def stop(self, what: str) -> None:
        """Waits until the operation may be done."""
        local = self._local
        if getattr(local, "inside", False) or os.getpid() != self._pid:
            return
        if getattr(local, "line", None) is None:
            local.inside = True
            local.line, local.free, local.more, local.only_changes = self._connect(main=False), 0, [], False
        local.inside = True
        try:
            counts = not local.only_changes or changes(what)
            if what != SLEEP and (local.free > 0 or not counts):
                local.free -= counts
                local.more.append(what)
                return
            local.line.send({"next": what, "more": local.more})
            answer = local.line.receive()
            if answer is None or answer == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            local.more, local.free, local.only_changes = [], abs(answer) - 1, answer < 0
        finally:
            local.inside = False

    def told(self, outcome: dict[str, Any]) -> None:
        """Ends an action."""
        local = self._local
        more, local.more, local.free = local.more, [], 0
        self.main.send({"told": outcome, "more": more})

    def at(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Stops before an operation on something below the directory of the case."""
        root = self.root
        if not root or (event == "open" and isinstance(arguments[0], int)):  # a descriptor that is open already
            return
        names = [_name(one) for one in arguments[: _PATHS.get(event, 1)]]
        if any(name.startswith(root) for name in names):
            kind = event.removeprefix("os.")
            if event == "open" and len(arguments) > 2 and isinstance(arguments[2], int):
                kind = "create" if arguments[2] & os.O_CREAT else "open"
            self.stop(" ".join([kind, *(name.removeprefix(root).lstrip("/") or "." for name in names)]))


def _name(path: Any) -> str:
    if isinstance(path, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{path}")
        return ""
    with contextlib.suppress(TypeError):
        return os.fsdecode(path)
    return ""


def _install(gate: Gate) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and gate.root:
            gate.at(event, arguments)

    def stopping(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if gate.root:
                gate.at(name, (path,))
            return real(path, *arguments, **options)

        return call

    sleep, monotonic, now, now_ns = time.sleep, time.monotonic, time.time, time.time_ns

    def sleeping(seconds: float) -> None:
        if not gate.root:
            sleep(seconds)
            return
        gate.slept += seconds
        gate.stop(SLEEP)

    sys.addaudithook(hook)
    for name in _CALLS:
        setattr(os, name, stopping(name, getattr(os, name)))
    time.sleep = sleeping
    time.monotonic = lambda: monotonic() + gate.slept + gate.late
    time.time, time.time_ns = lambda: now() + gate.late, lambda: now_ns() + int(gate.late * 1e9)
    steady_clock.__defaults__ = time.time_ns, lambda: int(time.monotonic() * 1e9)


def serve(address: str, number: int, environment: dict[str, str], host: str, clock: Clock) -> None:
    """Does what it is told until the scheduler ends; actions on a store elsewhere stop at its server instead.

    Args:
        host: the name of a host, by which other processes cannot see whether this one runs; "" for that of this one.
    """
    os.environ.update(environment)
    if host:
        socket.gethostname = lambda: host
    logging.getLogger("treeckpt").setLevel(logging.CRITICAL)
    gate = Gate(address, number, clock)
    _install(gate)
    while (job := gate.main.receive()) is not None:
        gate.begin(job["root"], only_changes=job["only_changes"])
        outcome = act(job["run"], msgspec.convert(job["action"], Action))
        gate.told(outcome)
        gate.root = ""
        # of a process whose record was taken for a dead one's, which it has found out by another case
        for place in [place for place, fault in conditions._answers.items() if fault]:
            del conditions._answers[place]
