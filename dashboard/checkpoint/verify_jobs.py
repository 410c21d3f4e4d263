"""Verifications that the dashboard runs, one at a time.

What they find is kept in the cache, as what `treeckpt verify` finds; damage also if the rest was never compared. It is
not written beside the checkpoint, as the dashboard only reads: the page says which command does that.
"""

from __future__ import annotations

import msgspec

from treeckpt.core.text import visible
from treeckpt.io.storage.store import Store
from treeckpt.runs.checkpoint_info import CheckpointInfo
from treeckpt.runs.verification import DamagedPart, Verification, fingerprint_of, found_part, this_user

from ..pages.checkpoints import CheckpointRow, checkpoint_row
from ..store import jobs
from ..store.cache import Cache
from ..store.index_reader import place_for_process
from ..store.jobs import BytesRead, JobQueue, JobState, ProcessJob, Unreadable
from ..store.library import Library, NotFound
from .leaf_numbers import ContentsSummary, summary_of
from .verify_process import Found, Message

PROGRAM = jobs.PROGRAM.format("checkpoint.verify_process")
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


class _Job(ProcessJob):
    def __init__(self, cache: Cache, place: tuple[str, str], info: CheckpointInfo, folder: Store) -> None:
        super().__init__(PROGRAM, [*place, str(cache.shared)], info.nbytes or 0)
        self.folder, self._cache, self.save_id = folder, cache, info.save_id or ""
        self.fingerprint = fingerprint_of(folder.entries(), self.save_id)
        self.problems: list[DamagedPart] = []
        self.total = 0

    def finish(self) -> None:
        found: list[Verification] = []
        status = self.run(lambda line: found.extend(self._take(_MESSAGE.decode(line))))
        if status is None:
            return
        if not found and not self.cancelled and not self.error:
            self.error = f"the process that verified it ended with status {status}"
        failed = self._cache.verifications.record(self.folder, found[0] if found else self._partial(), beside=False)
        self.error = "; ".join(failed) or self.error

    def _take(self, message: Message) -> list[Verification]:
        """Takes a message; returns what is to be kept, if the message has it."""
        if isinstance(message, BytesRead):
            self.at = message
        elif isinstance(message, Found):
            self.problems, self.total = self.problems + message.problems, self.total + message.total
        elif isinstance(message, Unreadable):
            self.error = message.text
        else:
            self.problems, self.total = message.verification.problems, message.verification.total
            return [message.verification]
        return []

    def _partial(self) -> Verification:
        found = found_part(self.save_id, self.fingerprint, self.problems, by=this_user("dashboard"))
        seconds = self.ended - self.started
        return msgspec.structs.replace(found, total=self.total, files=self.at.shards, seconds=seconds)

    def shown(self) -> VerifyJob:
        rate = self.at.nbytes / self.seconds if self.seconds > 0.5 and self.at.nbytes else None
        return VerifyJob(
            state=self.state,
            done=self.done,
            nbytes=self.nbytes,
            share=self.share,
            shards=self.at.shards,
            seconds=self.seconds,
            rate=rate,
            eta=(self.nbytes - self.done) / rate if rate and self.open else None,
            total=self.total,
            problems=[DamagedPart(visible(one.file), visible(one.text)) for one in self.problems],
            error=visible(self.error) if self.error else None,
        )


def keep_damage(library: Library, checkpoint_id: str, file: str, text: str) -> None:
    """Keeps that a shard is damaged, which was found while something else was done with it."""
    run, info = library.checkpoint(checkpoint_id)
    folder = run.store.folder(info.name)
    fingerprint = fingerprint_of(folder.entries(), info.save_id or "")
    found = found_part(info.save_id or "", fingerprint, [DamagedPart(file, text)], by=this_user("dashboard"))
    library.cache.verifications.record(folder, found, beside=False)


class VerifyJobs(JobQueue[_Job]):
    """The verifications of a server, one at a time."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library

    def start(self, checkpoint_id: str) -> None:
        """Starts a job for a checkpoint, unless one waits or runs.

        Raises:
            NotFound: there is no such checkpoint, or none with an index that another process can open.
        """
        run, info = self._library.checkpoint(checkpoint_id)
        folder = run.store.folder(info.name)
        if info.save_id is None or info.leaves is None:
            raise NotFound(f"There is nothing to verify: {info.error or 'it has no index'}")
        if (place := place_for_process(run.url, folder)) is None:
            raise NotFound("This store is in the memory of this process: no other one can read it.")
        self.add(checkpoint_id, lambda: _Job(self._library.cache, place, info, folder))

    def page(self, checkpoint_id: str) -> VerifyPage:
        """Returns what is known of a checkpoint's bytes.

        Raises:
            NotFound: there is no such checkpoint.
        """
        job = self.get(checkpoint_id)
        shown = job.shown() if job is not None else None
        run, info = self._library.checkpoint(checkpoint_id)
        shards = len(self._library.outline(info).index.file_list) if info.leaves is not None else None
        running = shown is not None and shown.state in ("waiting", "running")
        row = checkpoint_row(checkpoint_id, run, info)
        return VerifyPage(row, shards, running, shown, summary_of(self._library, info))
