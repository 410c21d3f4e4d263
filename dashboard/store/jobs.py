"""Long tasks that a page starts: one at a time, each in a process of its own, cancelled by killing it.

A process prints one JSON message per line: how much it has read, and what it has found.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

JobState = Literal["waiting", "running", "ended", "cancelled", "failed"]
MAX_JOBS = 256
"""Jobs that are remembered; those that have ended are dropped first."""
PAUSE = 0.2
"""Seconds between two messages about the bytes that were read."""
PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from treeckpt_dashboard.{} import main
sys.exit(main(sys.argv[2:]))
"""


class BytesRead(msgspec.Struct, tag="read"):
    """How many bytes were read so far, and how many shards were compared."""

    nbytes: int
    shards: int = 0


class Unreadable(msgspec.Struct, tag="error"):
    """The checkpoint could not be read."""

    text: str


def send(message: msgspec.Struct) -> None:
    """Prints a message."""
    os.write(1, msgspec.json.encode(message) + b"\n")


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
        send(BytesRead(self._nbytes, self.shards))


class ProcessJob:
    """A process of this program and its progress.

    Args:
        program: Python code that gets the module path as its first argument.
        nbytes: what it reads.
    """

    def __init__(self, program: str, arguments: Sequence[str], nbytes: int) -> None:
        self._command = [sys.executable, "-I", "-c", program, json.dumps(sys.path), *arguments]
        self.nbytes = nbytes
        self.state: JobState = "waiting"
        self.cancelled = False
        self.at = BytesRead(0, 0)
        self.error: str | None = None
        self.started = self.ended = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ("waiting", "running")

    def run(self, take: Callable[[bytes], object]) -> int | None:
        """Runs the process to its end, and gives each line to `take`; returns its status, None if it did not start."""
        with self._lock:
            if self.state != "waiting":
                return None
            self.state, self.started = "running", time.monotonic()
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        with self._process as process:
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                with contextlib.suppress(msgspec.MsgspecError):
                    take(line)
        self.ended = time.monotonic()
        return process.returncode

    def finish(self) -> None:
        """Does what is to be done in its turn; an error is a text in `error`, an OSError one of the start."""
        raise NotImplementedError

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
        return self.nbytes if self.state == "ended" else min(self.at.nbytes, self.nbytes)

    @property
    def share(self) -> float:
        """The same from 0 to 1."""
        return self.done / self.nbytes if self.nbytes else float(not self.open)


J = TypeVar("J", bound=ProcessJob)


class JobQueue(Generic[J]):
    """The jobs of a server by key, one at a time."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, J] = OrderedDict()
        self._lock, self._working = threading.Lock(), threading.Lock()

    def add(self, key: str, make: Callable[[], J]) -> None:
        """Starts a job, unless one of this key waits or runs."""
        with self._lock:
            if (before := self._jobs.get(key)) is not None and before.open:
                return
            job = self._jobs[key] = make()
            self._jobs.move_to_end(key)
            for old in [old for old, one in self._jobs.items() if not one.open][: len(self._jobs) - MAX_JOBS]:
                del self._jobs[old]
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _work(self, job: J) -> None:
        with self._working:
            try:
                job.finish()
            except OSError as error:  # no process can be started
                job.error = f"{error}"
            # a page that shows the end shows the result, too
            job.state = "cancelled" if job.cancelled else "failed" if job.error else "ended"

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
