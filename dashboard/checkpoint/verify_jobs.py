"""Verifications that the dashboard runs: one at a time, each in a process of its own, cancelled by killing it.

What they find is kept in the cache, as what `treeckpt verify` finds; damage also if the rest was never compared.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import msgspec

from treeckpt.core.text import visible
from treeckpt.io.storage.run_store import Folder, LocalFolder
from treeckpt.runs.checkpoint_info import CheckpointInfo
from treeckpt.runs.verification import DamagedPart, Verification, fingerprint_of, this_user

from ..pages.checkpoints import CheckpointRow, checkpoint_row
from ..store.library import Library, NotFound, Run
from .leaf_numbers import ContentsSummary, summary_of
from .verify_process import PROGRAM, BytesRead, Found, Message, Result, Unreadable

JobState = Literal["waiting", "running", "ended", "cancelled", "failed"]
MAX_JOBS = 256
"""Jobs that are remembered; those that have ended are dropped first."""
_MESSAGE = msgspec.json.Decoder(Message)


class VerifyJob(msgspec.Struct, frozen=True):
    """A verification that was started here since the server began."""

    state: JobState
    done: int
    """Bytes read."""
    nbytes: int
    """Bytes to read."""
    share: float
    shards: int
    """Shards that were compared."""
    seconds: float
    rate: float | None
    """Bytes per second."""
    eta: float | None
    """Seconds until all bytes are compared."""
    total: int
    """Problems found so far."""
    problems: list[DamagedPart]
    """The first of them."""
    error: str | None
    """Why it failed."""


class VerifyPage(msgspec.Struct, frozen=True):
    """A checkpoint, what the last verification of it found (`checkpoint.verification`), and the present one."""

    checkpoint: CheckpointRow
    shards: int | None
    running: bool
    """Whether a job waits or runs: ask again."""
    job: VerifyJob | None
    contents: ContentsSummary | None
    """What the statistics that it computed say; None if none are known."""


class _Job:
    def __init__(self, run: Run, info: CheckpointInfo, folder: Folder, cache: Path) -> None:
        self.run, self.name, self.folder, self.cache = run, info.name, folder, cache
        self.save_id, self.nbytes = info.save_id or "", info.nbytes or 0
        self.fingerprint = fingerprint_of(folder.entries(), self.save_id)
        self.state: JobState = "waiting"
        self.cancelled = False
        self.at = BytesRead(0, 0)
        self.problems: list[DamagedPart] = []
        self.total = 0
        self.error: str | None = None
        self.started = self.ended = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        return self.state in ("waiting", "running")

    def work(self) -> Verification | None:
        """Runs the process to its end; returns what is to be kept, if there is anything."""
        with self._lock:
            if self.state != "waiting":
                return None
            self.state, self.started = "running", time.monotonic()
            local = isinstance(self.folder, LocalFolder)
            place = ["", self.folder.url] if local else [self.run.url, self.name]
            command = [sys.executable, "-I", "-c", PROGRAM, json.dumps(sys.path), *place, str(self.cache)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        found: Verification | None = None
        with self._process as process:
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                with contextlib.suppress(msgspec.MsgspecError):
                    found = self._take(_MESSAGE.decode(line)) or found
        self.ended = time.monotonic()
        if found is None and not self.cancelled and not self.error:
            self.error = f"the process that verified it ended with status {process.returncode}"
        return found or self._partial()

    def _take(self, message: Message) -> Verification | None:
        if isinstance(message, BytesRead):
            self.at = message
        elif isinstance(message, Found):
            self.problems, self.total = self.problems + message.problems, self.total + message.total
        elif isinstance(message, Unreadable):
            self.error = message.text
        elif isinstance(message, Result):
            self.problems, self.total = message.verification.problems, message.verification.total
            return message.verification
        return None

    def _partial(self) -> Verification:
        found = _partial_verification(self.save_id, self.fingerprint, self.problems, self.total)
        return msgspec.structs.replace(found, files=self.at.shards, seconds=self.ended - self.started)

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = self.cancelled or self.open
            if self.state == "waiting":
                self.state = "cancelled"
            if self._process is not None:
                self._process.kill()

    def shown(self) -> VerifyJob:
        seconds = (self.ended or time.monotonic()) - self.started if self.started else 0.0
        rate = self.at.nbytes / seconds if seconds > 0.5 and self.at.nbytes else None
        done = self.nbytes if self.state == "ended" else min(self.at.nbytes, self.nbytes)
        return VerifyJob(
            state=self.state,
            done=done,
            nbytes=self.nbytes,
            share=done / self.nbytes if self.nbytes else float(not self.open),
            shards=self.at.shards,
            seconds=seconds,
            rate=rate,
            eta=(self.nbytes - done) / rate if rate and self.open else None,
            total=self.total,
            problems=[DamagedPart(visible(one.file), visible(one.text)) for one in self.problems],
            error=visible(self.error) if self.error else None,
        )


def _partial_verification(save_id: str, fingerprint: str, problems: list[DamagedPart], total: int) -> Verification:
    """Returns what is kept of the problems that were found before every byte was compared."""
    by = this_user("dashboard")
    return Verification(save_id, False, time.time_ns(), by, 0, 0, 0.0, total, problems, fingerprint)


def keep_damage(library: Library, checkpoint_id: str, file: str, text: str) -> None:
    """Keeps that a shard is damaged, which was found while something else was done with it."""
    run, info = library.checkpoint(checkpoint_id)
    folder = run.store.folder(info.name)
    fingerprint = fingerprint_of(folder.entries(), info.save_id or "")
    found = _partial_verification(info.save_id or "", fingerprint, [DamagedPart(file, text)], 1)
    library.cache.verifications.record(folder, found)


class VerifyJobs:
    """The jobs of a server, one at a time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._lock, self._working = threading.Lock(), threading.Lock()

    def start(self, checkpoint_id: str) -> None:
        """Starts a job for a checkpoint, unless one waits or runs.

        Raises:
            NotFound: there is no such checkpoint, or none with an index that another process can open.
        """
        run, info = self._library.checkpoint(checkpoint_id)
        folder = run.store.folder(info.name)
        if info.save_id is None or info.leaves is None:
            raise NotFound(f"There is nothing to verify: {info.error or 'it has no index'}")
        if not isinstance(folder, LocalFolder) and ("://" not in run.url or run.url.startswith("memory://")):
            raise NotFound("This store is in the memory of this process: no other one can read it.")
        with self._lock:
            if (before := self._jobs.get(checkpoint_id)) is not None and before.open:
                return
            job = self._jobs[checkpoint_id] = _Job(run, info, folder, self._library.cache.shared)
            self._jobs.move_to_end(checkpoint_id)
            for key in [key for key, one in self._jobs.items() if not one.open][: len(self._jobs) - MAX_JOBS]:
                del self._jobs[key]
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _work(self, job: _Job) -> None:
        with self._working:
            try:
                found = job.work()
            except OSError as error:  # no process can be started
                job.error, found = f"{error}", None
            if found is not None and not self._library.cache.verifications.record(job.folder, found):
                job.error = "the result could not be written to the cache"
            # a page that shows the end shows the result, too
            job.state = "cancelled" if job.cancelled else "failed" if job.error else "ended"

    def cancel(self, checkpoint_id: str) -> None:
        """Ends the job of a checkpoint, if there is one."""
        if (job := self._jobs.get(checkpoint_id)) is not None:
            job.cancel()

    def page(self, checkpoint_id: str) -> VerifyPage:
        """Returns what is known of a checkpoint's bytes.

        Raises:
            NotFound: there is no such checkpoint.
        """
        job = self._jobs.get(checkpoint_id)
        shown = job.shown() if job is not None else None
        run, info = self._library.checkpoint(checkpoint_id)
        shards = len(self._library.outline(info).index.file_list) if info.leaves is not None else None
        running = shown is not None and shown.state in ("waiting", "running")
        row = checkpoint_row(checkpoint_id, run, info)
        return VerifyPage(row, shards, running, shown, summary_of(self._library, info))

    def close(self) -> None:
        """Kills all jobs."""
        for job in list(self._jobs.values()):
            job.cancel()
