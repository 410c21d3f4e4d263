"""Interleavings of processes at their file operations: python -m tests.crash.interleavings PLACE FIRST COUNT; see
test_interleavings.

PLACE is a directory, best in memory, or "s3". A few processes are forked at first, and do one action in each case. All
of them are stopped but for one, which goes on for one operation or a few; `Order` says which. A case has a number, and
is the same whenever it is run. Every line that is printed is a case of which something does not hold, with all that
happened; the last one has the counts.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tests.crash.interleaved_actions import CHECK, Action
from tests.crash.interleaved_actor import SLEEP, Line, changes, serve
from tests.crash.interleaved_cases import STARTS, STEPS, Case, Order, Turn, draw
from tests.crash.interleaved_checks import Event, Record, violations
from treeckpt.core.format.file_names import step_name
from treeckpt.core.format.index import decode_index
from treeckpt.errors import TreeckptError

ACTORS = 3
CHECKER = ACTORS
"""The process that looks at what is there behind a case."""
QUIET = 0.001
"""Seconds between two looks at whether a process that has not stopped waits for another one."""
STUCK = 20.0
"""Seconds that nobody goes on."""
SLEEPS = 6000
"""Sleeps in a row of processes that wait for nothing that could still happen."""


class Link(msgspec.Struct):
    """A thread of a process, as the scheduler sees it."""

    line: Line
    process: Process
    next: str | None = None
    """The operation before which it has stopped."""


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

    def __init__(self, environments: list[dict[str, str]]) -> None:
        self.environments = environments
        self.address = f"\0treeckpt-interleavings-{os.getpid()}-{time.monotonic_ns()}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.address)
        self.listener.listen(64)
        self.poller = select.epoll()
        self.poller.register(self.listener.fileno(), select.EPOLLIN)
        self.links: dict[int, Link] = {}
        self.events: list[Event] = []
        self.told: dict[int, dict[str, Any]] = {}
        self.processes = [self.fork(number) for number in range(len(environments))]

    def fork(self, number: int) -> Process:
        pid = os.fork()
        if pid == 0:
            try:
                for link in self.links.values():
                    link.line.socket.close()
                self.listener.close()
                self.poller.close()
                serve(self.address, number, self.environments[number])
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
        process = next((p for p in known if p.pid == hello["pid"]), None)
        if process is None:
            connection.close()
            return
        link = Link(line, process)
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

    def stopped(self, process: Process) -> list[Link]:
        return [link for link in self.links.values() if link.process is process and link.next is not None]

    def settle(self) -> None:
        """Waits until every process that has begun has stopped, has ended, or waits for another one."""
        begin = time.monotonic()
        self.poll(0)
        while True:
            loose = [p for p in self.processes if p.state == "busy" and not self.stopped(p)]
            if not loose:
                return
            if self.poll(QUIET):
                continue
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

    def call(self, number: int, run: str, action: Action, root: str, *, only_changes: bool = False) -> None:
        process = self.processes[number]
        assert process.main is not None
        process.state, process.done, process.only_changes = "busy", 0, only_changes
        process.main.line.send({"run": run, "action": action, "root": root, "only_changes": only_changes})

    def check(self, run: str) -> dict[str, Any]:
        """What is there in a run now."""
        self.call(CHECKER, run, CHECK, "")
        begin = time.monotonic()
        while self.processes[CHECKER].state == "busy":
            self.poll(1.0)
            assert time.monotonic() - begin < 120, "the check does not end"
        return self.told.pop(CHECKER)


def asleep(pid: int) -> bool:
    """Whether every thread of a process waits for something."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/stat").read_bytes()
            if text[text.rindex(b")") + 2 : text.rindex(b")") + 3] not in (b"S", b"Z"):
                return False
    except OSError:
        return False
    return True


def _short(told: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in told.items() if key != "trace"})[:400]


class LocalStage(Stage):
    """Cases in directories of the disk, or of memory."""

    def __init__(self, place: Path) -> None:
        self.place, self.cases = place, 0
        self.run, self.root = "", ""
        self._seen: dict[int, tuple[Any, ...] | None] = {}
        self._names: dict[int, str | None] = {}
        super().__init__([{}] * (ACTORS + 1))

    def begin(self, files: dict[str, bytes]) -> None:
        """A run of its own with these files."""
        self.cases += 1
        self.root = str(self.place / f"case{self.cases}")
        self.run = f"{self.root}/run"
        for name, data in files.items():
            path = Path(self.run) / name
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(parents=True)
            path.write_bytes(data)
        os.makedirs(self.run, exist_ok=True)
        self._seen, self._names = dict.fromkeys(STEPS), dict.fromkeys(STEPS)
        self.look(-1)
        self.events.clear()
        self.told.clear()

    def committed(self) -> dict[int, str | None]:
        return dict(self._names)

    def look(self, who: int) -> None:
        if not self.run:
            return
        for step in STEPS:
            path = f"{self.run}/{step_name(step)}/index.json"
            try:
                at = os.stat(path)
                seen = (at.st_ino, at.st_mtime_ns, at.st_size)
            except OSError:
                seen = None
            if seen == self._seen[step]:
                continue
            self._seen[step] = seen
            name = None if seen is None else _save_id(Path(path).read_bytes())
            if name != self._names[step]:
                self._names[step] = name
                self.events.append((who, "index", (step, name)))

    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in Path(self.run).rglob("*") if path.is_file())
        return {str(path.relative_to(self.run)): path.read_bytes() for path in found}

    def end(self) -> None:
        shutil.rmtree(self.root)
        self.run = ""
        for process in list(self.processes):
            if process.state == "dead":
                self.fork(process.number)
            process.state = "idle"


def _save_id(index: bytes) -> str | None:
    """The save that an index names; None where it is no index."""
    try:
        return decode_index(index).save_id
    except TreeckptError:
        return None


class Theatre:
    """Runs cases one after the other."""

    def __init__(self, stage: LocalStage) -> None:
        self.stage = stage
        self.starts = {name: self._start(name) for name in STARTS}

    def _start(self, name: str) -> tuple[dict[str, bytes], dict[str, int]]:
        """The files of a start, and the seeds of its saves."""
        seeds: dict[str, int] = {}
        files: dict[str, bytes] = {}
        for number, (what, step, where) in enumerate(STARTS[name]):
            if what in ("lose index", "tear index", "lengthen"):
                files = _damaged(files, what, step)
                continue
            seed = 10 + number
            self.stage.begin(files)
            before = self.stage.committed()
            self._alone(Action(what, step, seed), where)
            seeds |= {s: seed for n, s in self.stage.committed().items() if s is not None and s != before[n]}
            files = self.stage.files()
            self.stage.end()
        return files, seeds

    def _alone(self, action: Action, where: str) -> None:
        """One action, killed somewhere."""
        stage, process = self.stage, self.stage.processes[0]
        stage.call(0, stage.run, action, stage.run)
        while True:
            stage.settle()
            if process.state != "busy":
                return
            link = stage.stopped(process)[0]
            assert link.next is not None
            if where.isdigit() and process.done == int(where) or (where and not where.isdigit() and _met(where, link.next)):
                stage.kill(process)
                return
            self._go_on(link, 1)

    def _go_on(self, link: Link, count: int) -> None:
        assert link.next is not None
        self.stage.events.append((link.process.number, "op", link.next))
        link.process.did(link.next)
        link.next = None
        link.line.send(-count if link.process.only_changes else count)

    def play(self, case: Case) -> Record:
        stage, order = self.stage, Order(case)
        files, seeds = self.starts[case.start]
        stage.begin(files)
        before = stage.committed()
        actors = stage.processes[: len(case.actions)]
        for process in actors:
            process.state, process.done = "called", 0
        sleeps = 0
        while True:
            stage.settle()
            turns, links = self._turns(actors)
            if not turns or sleeps > SLEEPS:
                if any(process.state == "busy" for process in actors):
                    self._stop(actors)
                break
            turn, count = order.choose(turns)
            link, process = links[turn.place], actors[turn.actor]
            sleeps = sleeps + 1 if turn.what == SLEEP else 0
            if case.killed is not None and case.killed[0] == turn.actor:
                if process.done >= case.killed[1]:
                    stage.kill(process)
                    continue
                count = min(count, case.killed[1] - process.done)
            if link is None:
                action = case.actions[turn.actor]
                stage.call(turn.actor, stage.run, action, stage.run, only_changes=case.only_changes)
                stage.events.append((turn.actor, "begin", action.words))
            else:
                self._go_on(link, count if link is process.main else 1)
        stage.look(-1)
        told = dict(stage.told)
        known = {told[who]["saved"][1]: told[who]["saved"][2] for who in told if "saved" in told[who]}
        record = Record(case, before, {**seeds, **known}, list(stage.events), told, stage.check(stage.run))
        stage.end()
        return record

    def _turns(self, actors: list[Process]) -> tuple[list[Turn], list[Link | None]]:
        turns: list[Turn] = []
        links: list[Link | None] = []
        for process in actors:
            if process.state == "called":
                turns.append(Turn(process.number, "begin", 0, len(links)))
                links.append(None)
            for link in self.stage.stopped(process) if process.state == "busy" else ():
                turns.append(Turn(process.number, link.next or "", process.done, len(links)))
                links.append(link)
        return turns, links

    def _stop(self, actors: list[Process]) -> None:
        for process in actors:
            if process.state == "busy":
                self.stage.told[process.number] = {"stuck": "it waits for what does not happen"}
                self.stage.kill(process)


def _met(where: str, operation: str) -> bool:
    return re.search(where.replace(" ", ".*"), operation) is not None


def _damaged(files: dict[str, bytes], what: str, step: int) -> dict[str, bytes]:
    folder = f"{step_name(step)}/"
    index = f"{folder}index.json"
    if what == "lose index":
        return {name: data for name, data in files.items() if name != index}
    if what == "tear index":
        return {**files, index: files[index][:-20]}
    return {n: data + b"x" * (n.startswith(f"{folder}shard")) for n, data in files.items()}


def row_of(record: Record, found: list[str]) -> dict[str, Any]:
    case = record.case
    names = [action.words for action in case.actions]
    lines = [f"{names[who] if who >= 0 else '-'} [{who}]: {what} {data}" for who, what, data in record.events]
    return {
        "number": case.number,
        "kind": case.kind,
        "start": case.start,
        "order": case.order,
        "only_changes": case.only_changes,
        "frozen": case.frozen,
        "killed": case.killed,
        "violations": found,
        "before": record.before,
        "trace": lines,
        "check": record.check,
    }


def main(place: str, first: int, count: int) -> None:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        os.environ["TREECKPT_CACHE"] = f"{directory}/cache"
        gc.collect()
        gc.freeze()
        theatre = Theatre(LocalStage(Path(directory)))
        cases: collections.Counter[str] = collections.Counter()
        failed: collections.Counter[str] = collections.Counter()
        operations, begin = 0, time.monotonic()
        for number in range(first, first + count):
            case = draw(number)
            record = theatre.play(case)
            cases[case.kind] += 1
            operations += sum(what == "op" for _, what, _ in record.events)
            if found := violations(record):
                failed[case.kind] += 1
                print(json.dumps(row_of(record, found)), flush=True)
        theatre.stage.close()
        times = {"seconds": time.monotonic() - begin, "processor": sum(os.times()[:4])}
        print(json.dumps({"cases": cases, "failed": failed, "operations": operations, **times}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
