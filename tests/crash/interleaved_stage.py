"""The processes of an interleaving as their scheduler sees them, and the run that they work on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tests.crash.interleaved_actions import Action
from tests.crash.interleaved_actor import Clock, Line, changes, serve
from tests.crash.interleaved_cases import STEPS
from tests.crash.interleaved_checks import Event
from treeckpt._core.format.files import step_name
from treeckpt._core.format.index import decode_index
from treeckpt._io.storage.kept_files import LAPSE
from treeckpt.errors import TreeckptError

__all__ = [
    "ACTORS",
    "LATER",
    "LONGEST_PAUSE",
    "QUIET",
    "STUCK",
    "Link",
    "LocalStage",
    "Process",
    "Stage",
    "asleep",
    "save_id_in",
]

ACTORS = 3
CHECKER = ACTORS
"""The process that looks at what is there behind a case."""
QUIET, LONGEST_PAUSE = 0.001, 0.016
"""Seconds between looks at whether a process that has not stopped waits for another one: twice as long each time."""
STUCK = 120.0
"""Seconds that nobody goes on."""
LATER = LAPSE + 100.0
"""Seconds that a process of another host is stopped."""

_ID = re.compile("[0-9a-f]{16}")
"""The random part of names."""


class Link(msgspec.Struct):
    """A thread of a process, as the scheduler sees it."""

    line: Line
    process: Process
    next: str | None = None
    """The operation before which it has stopped."""
    sent: bool = False
    """Whether it is a request that has been sent to a server."""


class Process(msgspec.Struct):
    """One that does actions."""

    number: int
    pid: int
    main: Link | None = None
    state: str = "idle"
    """Or "called" (with an action that it has not begun), "busy", "told", "dead"."""
    done: int = 0
    only_changes: bool = False
    """Whether it stops, and counts, only before operations that change something."""

    def did(self, operation: str) -> None:
        self.done += not self.only_changes or changes(operation)


class Stage:
    """The processes, and how they are told to go on."""

    def __init__(self, environments: list[dict[str, str]], *, far: bool) -> None:
        self.environments, self.far, self.clock = environments, far, Clock()
        self.address = self.listen()
        self.poller = select.epoll()
        self.poller.register(self.listener.fileno(), select.EPOLLIN)
        self.links: dict[int, Link] = {}
        self.events: list[Event] = []
        self.told: dict[int, dict[str, Any]] = {}
        self.run, self.cases = "", 0
        self.names: dict[int, str | None] = {}
        """The save that each step's index names."""
        self.processes = [self.fork(number) for number in range(len(environments))]

    def listen(self) -> str:
        """The address for the processes, which is there already the second time."""
        if not hasattr(self, "listener"):
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(f"\0treeckpt-interleavings-{os.getpid()}-{time.monotonic_ns()}")
            self.listener.listen(64)
        return "\0" + self.listener.getsockname()[1:].decode()

    def begin(self, files: dict[str, bytes]) -> None:
        """A run of its own with these files."""
        self.cases, self.clock.late = self.cases + 1, 0.0
        self.lay(files)
        self.events.clear()
        self.told.clear()

    def end(self) -> None:
        """Forgets the run."""
        self.run = ""
        for process in list(self.processes):
            if process.state == "dead":
                self.fork(process.number)
            self.processes[process.number].state = "idle"

    def lay(self, files: dict[str, bytes]) -> None:
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """What is in the run."""
        raise NotImplementedError

    def fork(self, number: int) -> Process:
        pid = os.fork()
        if pid == 0:
            try:
                for link in self.links.values():
                    link.line.socket.close()
                self.listener.close()
                self.poller.close()
                serve(self.address, number, self.environments[number], f"host{number}" * self.far, self.clock)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        process = Process(number, pid)
        begin = time.monotonic()
        if number >= len(getattr(self, "processes", ())):
            self.newest = process
        else:
            self.processes[number] = process
        while process.main is None:
            self.poll(1.0)
            assert time.monotonic() - begin < STUCK, "a process does not begin"
        return process

    def poll(self, timeout: float) -> bool:
        """Hears what processes say within a time; returns whether there was something."""
        found = self.poller.poll(timeout)
        for fd, _ in found:
            if fd == self.listener.fileno():
                self._accept()
                continue
            link = self.links.get(fd)
            if link is None:
                continue
            message = link.line.receive()
            if message is None:
                self._close(link)
                continue
            self.hear(link, message)
            while link.line.more:
                self.hear(link, link.line.receive())
        return bool(found)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        line = Line(connection)
        hello = line.receive()
        known = [*getattr(self, "processes", ()), *([self.newest] if hasattr(self, "newest") else [])]
        process = next((p for p in known if hello["pid"] in (p.pid, 0) and p.number == hello["actor"]), None)
        if process is None:
            connection.close()
            return
        link = Link(line, process, sent=not hello["pid"])
        self.links[connection.fileno()] = link
        self.poller.register(connection.fileno(), select.EPOLLIN)
        if hello["main"]:
            process.main = link
        while line.more:
            self.hear(link, line.receive())

    def _close(self, link: Link) -> None:
        fd = link.line.socket.fileno()
        self.poller.unregister(fd)
        del self.links[fd]
        link.line.socket.close()
        if link is link.process.main and link.process.state not in ("dead", "told"):
            link.process.state = "dead"
            self.told.setdefault(link.process.number, {"stuck": "the process ended by itself"})

    def hear(self, link: Link, message: dict[str, Any]) -> None:
        process = link.process
        for what in message.get("more", ()):
            process.did(what)
            self.events.append((process.number, "op", what))
        self.look(process.number)
        if "told" in message:
            process.state = "told"
            self.told[process.number] = message["told"]
            self.events.append((process.number, "told", _short(message["told"])))
        else:
            link.next = message["next"]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            assert process.main is not None
            process.state = "dead"
            process.main.line.socket.shutdown(socket.SHUT_RDWR)
            os.waitpid(process.pid, 0)

    def look(self, who: int) -> None:
        """Sees what has changed."""

    def go_on(self, link: Link, count: int) -> None:
        """Lets a thread go on for so many operations."""
        assert link.next is not None
        self.events.append((link.process.number, "op", link.next))
        link.process.did(link.next)
        link.next = None
        link.line.send(-count if link.process.only_changes else count)

    def stopped(self, process: Process) -> list[Link]:
        """The threads of a process that could go on, in an order that is the same whenever the case is played."""
        found = [link for link in self.links.values() if link.process is process and link.next is not None]
        return found if len(found) < 2 else sorted(found, key=lambda link: _ID.sub("", link.next or ""))

    def settle(self) -> None:
        """Waits until every process that has begun has stopped, has ended, or waits for another one."""
        begin, pause = time.monotonic(), QUIET
        self.poll(0)
        while True:
            loose = [p for p in self.processes if p.state == "busy" and not self.stopped(p)]
            if not loose:
                return
            if self.poll(pause):
                continue
            pause = min(2 * pause, LONGEST_PAUSE)
            if all(asleep(p.pid) for p in loose) and not self.poll(0):
                ready = any(p.state == "called" or self.stopped(p) for p in self.processes)
                if ready or time.monotonic() - begin > STUCK:
                    return

    def kill(self, process: Process) -> None:
        process.state = "dead"
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        for link in [link for link in self.links.values() if link.process is process]:
            self._close(link)
        self.events.append((process.number, "killed", None))

    def call(self, number: int, action: Action, *, only_changes: bool = False, free: bool = False) -> None:
        """Has a process begin an action; one that is `free` stops nowhere."""
        process = self.processes[number]
        assert process.main is not None
        process.state, process.done, process.only_changes = "busy", 0, only_changes
        root = "" if free else self.run
        job = {"run": self.run, "action": action, "root": root, "only_changes": only_changes}
        process.main.line.send(job)

    def check(self, number: int) -> dict[str, Any]:
        """What is there in the run now; of processes on other hosts later, when none of them counts as alive.

        A clock that was set back is right again.
        """
        self.clock.late = max(self.clock.late, 0.0) + LATER * self.far
        self.call(CHECKER, Action("check", seed=number), free=True)
        begin = time.monotonic()
        while self.processes[CHECKER].state == "busy":
            self.poll(1.0)
            assert time.monotonic() - begin < 120, "the check does not end"
        return self.told.pop(CHECKER)


def asleep(pid: int) -> bool:
    """Whether every thread of a process waits for something, and has for a moment: none has run between two looks."""
    try:
        first = _threads(pid)
        return all(state in (b"S", b"Z") for state, _ in first.values()) and first == _threads(pid)
    except OSError:
        return False


def _threads(pid: int) -> dict[str, tuple[bytes, bytes]]:
    """The threads of a process: the state of each, and how often it has stopped running."""
    found: dict[str, tuple[bytes, bytes]] = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        text = Path(f"/proc/{pid}/task/{task}/status").read_bytes()
        state = text.index(b"State:\t") + len(b"State:\t")
        found[task] = text[state : state + 1], text[text.index(b"voluntary_ctxt_switches") :]
    return found


def _short(told: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in told.items() if key != "trace"})[:400]


class LocalStage(Stage):
    """Cases in directories of the disk, or of memory."""

    def __init__(self, place: Path, *, far: bool = False) -> None:
        self.place = place
        self._seen: dict[int, tuple[Any, ...] | None] = {}
        super().__init__([{}] * (ACTORS + 1), far=far)

    def lay(self, files: dict[str, bytes]) -> None:
        self.run = str(self.place / f"case{self.cases}" / "run")
        os.makedirs(self.run)
        for name, data in files.items():
            path = Path(self.run) / name
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir()
            path.write_bytes(data)
        self._seen, self.names = dict.fromkeys(STEPS), dict.fromkeys(STEPS)
        self.look(-1)

    def look(self, who: int) -> None:
        for step in STEPS if self.run else ():
            path = f"{self.run}/{step_name(step)}/index.json"
            try:
                at = os.stat(path)
                seen = (at.st_ino, at.st_mtime_ns, at.st_size)
            except OSError:
                seen = None
            if seen == self._seen[step]:
                continue
            self._seen[step] = seen
            name = None if seen is None else save_id_in(Path(path).read_bytes())
            if name != self.names[step]:
                self.names[step] = name
                self.events.append((who, "index", (step, name)))

    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in Path(self.run).rglob("*") if path.is_file())
        return {str(path.relative_to(self.run)): path.read_bytes() for path in found}

    def end(self) -> None:
        shutil.rmtree(Path(self.run).parent)
        super().end()


def save_id_in(index: bytes) -> str | None:
    """The save that an index names; None where it is no index."""
    try:
        return decode_index(index).save_id
    except TreeckptError:
        return None
