"""Long tasks in processes of their own, which neither block the server nor stay in its memory: one at a time a queue.

A process prints one JSON message per line: how far it is, what it has found, and why it failed. It may have a time
limit and limit its own memory; it is cancelled by killing it, and its death is an error of the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from treeckpt import errors
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.open import open_run
from treeckpt._io.storage.store import Store
from treeckpt._threads import start_thread
from treeckpt.errors import CorruptError, StoreError, TreeckptError

_log = logging.getLogger("treeckpt")
JobState = Literal["waiting", "running", "ended", "cancelled", "failed"]
MAX_ENDED = 256
"""Jobs that are remembered after their end."""
PAUSE = 0.2
"""Seconds between two messages about the bytes that were read."""
RESERVE = 64 << 20
"""Bytes of its memory that a process leaves free, at most."""
LOOK_SECONDS = 0.01
"""Seconds of computing between two looks at the memory that a process has taken."""
KILLED = (-9, 137, -24)
"""Exit codes of a process that was killed, by the system or at the end of its time."""
PROGRAM = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
from treeckpt_dashboard.store.jobs import run_main
sys.exit(run_main(importlib.import_module(sys.argv[2]).main, sys.argv[3:]))
"""


# in the process -------------------------------------------------------------------------------------------------------


class JobProgress(msgspec.Struct, tag="progress"):
    """How far a process is."""

    done: int
    """Bytes that it has read, or parts."""
    total: int = 0
    phase: str = ""
    shards: int = 0
    """Shards that were compared."""


class Failed(msgspec.Struct, tag="error"):
    """Why a process failed."""

    text: str
    kind: str = ""
    """The class of an error of `treeckpt.errors`, whose parts follow."""
    path: str = ""
    expected: str = ""
    found: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: TreeckptError) -> Failed:
        """Returns the message of an error."""
        return cls(f"{error}", type(error).__name__, error.path, error.expected, error.found, error.hint)

    def error(self) -> TreeckptError:
        """Returns the error again."""
        kind = getattr(errors, self.kind, CorruptError)
        return kind(self.path, expected=self.expected, found=self.found, hint=self.hint)


def send(message: msgspec.Struct) -> None:
    """Prints a message."""
    # At once, so that no message is left in a buffer when the process is killed.
    os.write(1, line_of(message))


def line_of(message: msgspec.Struct) -> bytes:
    """Returns the line that tells a message."""
    return msgspec.json.encode(message) + b"\n"


class ReadPrinter:
    """Prints in a process how many bytes it has read."""

    def __init__(self) -> None:
        self.shards = 0
        self._nbytes, self._printed = 0, 0.0

    def add(self, nbytes: int) -> None:
        """Counts bytes that were read."""
        self._nbytes += nbytes
        if (now := time.monotonic()) - self._printed >= PAUSE:
            self._printed = now
            self.print()

    def print(self) -> None:
        """Prints the message."""
        send(JobProgress(self._nbytes, shards=self.shards))


def run_main(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Runs the task of a process, and prints the error that ends it."""
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which kills this process
    try:
        main(arguments)
    except TreeckptError as error:
        send(Failed.of(error))
    except OSError as error:
        send(Failed(f"{error}"))
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)  # of `limit_resources`: its handler goes before the process does
    return 0


def folder_at(run: str, name: str) -> Store:
    """Returns the folder of a `place_of`."""
    return open_run(run).folder(name) if run else LocalStore(name)


def limit_resources(memory: int, seconds: int, too_large: bytes) -> None:
    """Limits the bytes that this process may take beyond what it holds, and its time of computing, where possible.

    Near the end of its memory it prints `too_large` and ends: CPython may handle a MemoryError for ever where no memory
    is left for the number of the instruction that raised it.
    """
    try:
        import resource
    except ImportError:  # on Windows
        return
    statm, page = Path("/proc/self/statm"), resource.getpagesize()
    held = int(statm.read_text().split()[0]) * page if statm.exists() else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = held + memory if hard == resource.RLIM_INFINITY else min(held + memory, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    if not held:
        return
    opened = os.open(statm, os.O_RDONLY)

    def look(*_: object) -> None:
        if int(os.pread(opened, 64, 0).split()[0]) * page > most - min(memory // 4, RESERVE):
            os.write(1, too_large)
            os._exit(0)

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, LOOK_SECONDS, LOOK_SECONDS)


# in the server --------------------------------------------------------------------------------------------------------


def place_of(run: str, folder: Store) -> list[str] | None:
    """Returns the arguments with which another process opens a folder; None if that is in the memory of this one.

    Args:
        run: the URL of the folder's run; empty for a local folder.
    """
    if folder.traits.local_path is not None:
        return ["", folder.place]
    return [run, folder.name] if "://" in run and not run.startswith("memory://") else None


class ProcessJob:
    """A process of this program and its progress.

    Args:
        module: the module of the dashboard whose `main` it runs.
        nbytes: what it reads.
        seconds: after which it is killed; None for never.
    """

    messages: ClassVar[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(JobProgress | Failed)
    task: ClassVar[str] = "does it"
    """What it does, in words."""

    def __init__(self, module: str, arguments: Sequence[str], nbytes: int = 0, seconds: float | None = None) -> None:
        self._module, self._arguments, self._seconds = module, arguments, seconds
        self.nbytes = nbytes
        self.state: JobState = "waiting"
        self.cancelled = False
        self.at = JobProgress(0)
        self.error: str | None = None
        self.started = self.ended = 0.0
        self.over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ("waiting", "running")

    def run(self) -> int | None:
        """Runs the process to its end, and takes its messages; returns its status, None if it did not start."""
        # Isolated, so that nothing is imported from the working directory; PROGRAM sets the path of this process.
        command = [sys.executable, "-I", "-c", PROGRAM, json.dumps(sys.path), f"treeckpt_dashboard.{self._module}"]
        with self._lock:
            # Under the lock, so that `cancel` finds either a job that has not started or a process to kill.
            if self.state != "waiting":
                return None
            self.state, self.started = "running", time.monotonic()
            command += self._arguments
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        with self._process as process:
            assert process.stdout is not None, "it is a pipe"
            timer = threading.Timer(self._seconds or 0.0, process.kill)
            timer.daemon = True
            try:
                if self._seconds is not None:
                    timer.start()
                for line in process.stdout:
                    with contextlib.suppress(msgspec.MsgspecError):
                        self.take(self.messages.decode(line))
                process.wait()
            except BaseException:
                process.kill()
                raise
            finally:
                timer.cancel()
        self.ended = time.monotonic()
        return process.returncode

    def take(self, message: Any) -> None:
        """Takes a message of the process."""
        if isinstance(message, JobProgress):
            self.at = message
        elif isinstance(message, Failed):
            self.error = message.text

    def finish(self) -> None:
        """Runs in its turn; an error is a text in `error`."""
        status = self.run()
        if status and not self.cancelled and not self.error:
            self.error = f"the process that {self.task} ended with status {status}"

    def cancel(self) -> None:
        """Ends it, also before its turn."""
        with self._lock:
            self.cancelled = self.cancelled or self.open
            if self.state == "waiting":
                self.state = "cancelled"
            if self._process is not None:
                self._process.kill()

    @property
    def seconds(self) -> float:
        """How long it runs, or ran."""
        return (self.ended or time.monotonic()) - self.started if self.started else 0.0

    @property
    def done(self) -> int:
        """Bytes that it has read."""
        return self.nbytes if self.state == "ended" else min(self.at.done, self.nbytes)

    @property
    def share(self) -> float:
        """The same from 0 to 1."""
        return self.done / self.nbytes if self.nbytes else float(not self.open)


J = TypeVar("J", bound=ProcessJob)


class JobQueue(Generic[J]):
    """The jobs of a server by key, one at a time."""

    def __init__(self) -> None:
        self._jobs: dict[str, J] = {}
        self._ended: deque[tuple[str, J]] = deque()
        self._lock, self._working = threading.Lock(), threading.Lock()

    def add(self, key: str, make: Callable[[], J]) -> J:
        """Starts a job, unless one of this key waits or runs; returns the one that does.

        Raises:
            StoreError: no thread could be started for it.
        """
        with self._lock:
            if (before := self._jobs.get(key)) is not None and before.open:
                return before
            job = make()
            if start_thread(partial(self._work, key, job), "treeckpt-job") is None:
                raise StoreError("", expected="a thread for a process", found="no thread could be started")
            self._jobs[key] = job
            return job

    def _work(self, key: str, job: J) -> None:
        with self._working:
            try:
                job.finish()
            except (OSError, RuntimeError) as error:  # no process can be started, or no thread for its time limit
                job.error = f"{error}"
            except Exception as error:
                job.error = f"{type(error).__name__}: {error}"
                _log.exception("a job of the dashboard failed")
            finally:
                # a page that shows the end shows the result, too
                job.state = "cancelled" if job.cancelled else "failed" if job.error else "ended"
                job.over.set()
                self._remember(key, job)

    def _remember(self, key: str, job: J) -> None:
        with self._lock:
            self._ended.append((key, job))
            if len(self._ended) > MAX_ENDED:
                key, job = self._ended.popleft()
                # A later job of this key stays.
                if self._jobs.get(key) is job:
                    del self._jobs[key]

    def get(self, key: str) -> J | None:
        """Returns the last job of a key."""
        return self._jobs.get(key)

    def cancel(self, key: str) -> None:
        """Ends the job of a key, if there is one."""
        if (job := self._jobs.get(key)) is not None:
            job.cancel()

    def close(self) -> None:
        """Kills all jobs."""
        for job in list(self._jobs.values()):
            job.cancel()
