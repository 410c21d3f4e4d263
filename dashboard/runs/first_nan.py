"""The page of the first NaN of a run: its step, its arrays, where in them it is, and the scan that finds it.

The process of a scan reads checkpoints one after the other, as `treeckpt show --stats` does, and keeps what it finds in
the cache. So a scan that is cancelled, or ends with the server, goes on where it was, and the page needs no scan for
what verifications have found before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from treeckpt._io.storage.store import Store
from treeckpt._io.storage.wrapped_store import CountingStore
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.nan_scan import NanReport, nan_report, scan_for_nan, steps_of_run
from treeckpt._runs.statistics_store import StatisticsStore
from treeckpt._runs.verification import VerificationStore, this_user
from treeckpt.errors import visible

from ..pages.answers import check_same_site
from ..pages.checkpoints import filled
from ..store.jobs import Failed, JobProgress, JobQueue, JobState, ProcessJob, ReadPrinter, send
from ..store.library import Library, NotFound, Run
from ..store.watch import ScanProgress


class StepBegun(msgspec.Struct, tag="step"):
    """A checkpoint is being read from now on."""

    name: str
    nbytes: int


class NotRead(msgspec.Struct, tag="not read"):
    """Why checkpoints could not be read, by name."""

    why: dict[str, str]


Message = JobProgress | StepBegun | NotRead | Failed


def main(arguments: Sequence[str]) -> None:
    """Scans a run.

    Args:
        arguments: the path or URL of the run, and the cache directory.
    """
    run, cache = arguments
    known, statistics = VerificationStore(Path(cache)), StatisticsStore(Path(cache))

    def begin(info: CheckpointInfo, folder: Store) -> Store:
        send(StepBegun(info.name, info.nbytes or 0))
        return CountingStore(folder, ReadPrinter().add)

    _, failed = scan_for_nan(steps_of_run(run, known), known, statistics, this_user("dashboard"), begin)
    send(NotRead(failed))


class NanJob(msgspec.Struct, frozen=True):
    """A scan that was started here since the server began."""

    state: JobState
    step: str
    """The name of the checkpoint that is being read."""
    share: float
    """How much of that is read, from 0 to 1."""
    read: int
    """Checkpoints that were read before it."""
    seconds: float
    error: str | None
    """Why it failed."""


class NanPage(msgspec.Struct, frozen=True):
    """What is known of NaN and infinity in the checkpoints of a run."""

    run: str
    name: str
    running: bool
    """Whether a scan waits or runs: ask again."""
    job: NanJob | None
    report: NanReport
    ids: dict[str, str]
    """The ids of the checkpoints that the report names."""
    scan: ScanProgress
    """Of the directories of the run."""


class _NanScan(ProcessJob):
    messages = msgspec.json.Decoder(Message)
    task = "looked for NaN"

    def __init__(self, library: Library, run: Run) -> None:
        place = run.url or str(run.path)
        if place.startswith("memory://"):
            raise NotFound("This store is in the memory of this process: no other one can read it.")
        super().__init__("runs.first_nan", [place, str(library.cache.shared)])
        self.step, self.begun = "", 0
        self.failed: dict[str, str] = {}

    def take(self, message: Message) -> None:
        super().take(message)
        if isinstance(message, StepBegun):
            self.step, self.nbytes, self.at = visible(message.name), message.nbytes, JobProgress(0)
            self.begun += 1
        elif isinstance(message, NotRead):
            self.failed = message.why

    def shown(self) -> NanJob:
        read = self.begun - self.open * (self.begun > 0)
        return filled(NanJob, self, read=read, error=visible(self.error) if self.error else None)


class NanJobs(JobQueue[_NanScan]):
    """The scans of a server, one at a time."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library

    def page(self, run_id: str) -> NanPage:
        """Returns what is known of a run.

        Raises:
            NotFound: there is no such run.
        """
        library, run, job = self.library, self.library.run(run_id), self.get(run_id)
        shown = job.shown() if job is not None else None
        listed = library.checkpoints(run)
        opened = {info.name: (checkpoint_id, info) for checkpoint_id, info in listed}
        report = nan_report(
            (info for _, info in listed),
            library.cache.statistics,
            lambda info: library.outline(library.listed(opened[info.name][0], run, info)).index,
            job.failed if job is not None and not job.open else None,
        )
        named = {one.name for one in (report.nan, report.infinite, *report.unread) if one is not None}
        ids = {name: i for i, info in listed if (name := visible(info.name)) in named}
        running = shown is not None and shown.state in ("waiting", "running")
        return NanPage(
            run.id,
            visible(run.name),
            running=running,
            job=shown,
            report=report,
            ids=ids,
            scan=library.watch(run).progress,
        )


def get_first_nan(
    request: Request, jobs: NanJobs, run_id: str, action: Literal["", "start", "cancel"] = ""
) -> NanPage | Response:
    """The first step with NaN, its arrays and where in them it is; `action` starts or cancels the scan for it."""
    check_same_site(request, action)
    if action == "start" and not jobs.page(run_id).report.complete:
        jobs.add(run_id, lambda: _NanScan(jobs.library, jobs.library.run(run_id)))
    elif action == "cancel":
        jobs.cancel(run_id)
    if action and not request.scope["path"].startswith("/api/"):  # so that a reload does not repeat it
        return RedirectResponse("first-nan", 303)
    return jobs.page(run_id)
