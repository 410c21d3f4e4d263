"""Verifications that the dashboard runs, one at a time, and the page about them.

The process of one reads every byte without holding up the server, and can be killed. It prints how many bytes it has
read, what it found in each shard, and its result. What it finds is kept in the cache, as what `treeckpt verify` finds;
damage also if the rest was never compared. It is not written beside the checkpoint, as the dashboard only reads: the
page says which command does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from treeckpt._inspect.outline import Outline
from treeckpt._io.storage.local_store import for_reading
from treeckpt._io.storage.wrapped_store import CountingStore
from treeckpt._runs.statistics_store import StatisticsStore
from treeckpt._runs.verification import (
    DamagedPart,
    Verification,
    fingerprint_of,
    found_part,
    shown_parts,
    this_user,
    verify_folder,
)
from treeckpt.errors import visible
from treeckpt.reports import Problem

from ..pages.checkpoints import (
    PAGE_ROWS,
    CheckpointRow,
    OpenTree,
    OwnTree,
    checkpoint_row,
    filled,
    next_start,
    shorten,
)
from ..pages.damage import NO_DAMAGE, Damage
from ..store.cache import Cache
from ..store.jobs import Failed, JobProgress, JobQueue, JobState, ProcessJob, ReadPrinter, folder_at, place_of, send
from ..store.library import Library, NotFound, OpenCheckpoint
from .leaf_numbers import ContentsSummary, summary_of


class Found(msgspec.Struct, tag="found"):
    """Problems of one shard."""

    problems: list[DamagedPart]
    total: int


class Result(msgspec.Struct, tag="result"):
    """The verification has ended."""

    verification: Verification


Message = JobProgress | Found | Result | Failed


class _Printer(ReadPrinter):
    def add_shard(self, problems: Sequence[Problem]) -> None:
        self.shards += 1
        if problems:
            send(Found(shown_parts(problems), len(problems)))
        self.print()


def main(arguments: Sequence[str]) -> None:
    """Verifies a checkpoint.

    Args:
        arguments: the URL of a run, empty for a local folder; the name of the folder in it, or its path; the cache
            directory, in which the statistics of all arrays are kept.
    """
    run, name, cache = arguments
    printer = _Printer()
    folder = folder_at(run, name)
    folder = CountingStore(for_reading(folder), printer.add)
    by, statistics = this_user("dashboard"), StatisticsStore(Path(cache))
    report, verification = verify_folder(folder, by, on_shard=printer.add_shard, statistics=statistics)
    send(Result(verification))
    if report.unread:
        first, more = report.unread[0], ". ".join(report.notes)
        send(Failed(f"{report.state}, first {first.file}: {first.text}. {more}"))
    if verification.ok and statistics.find(folder.place, verification.save_id) is None:
        send(Failed("the statistics of its arrays could not be written to the cache"))


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
    """The first of the problems."""
    error: str | None
    """Why it failed."""

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ("waiting", "running")


class DamageRow(msgspec.Struct, frozen=True):
    """Damaged bytes, and one of the leaves that they make unreadable."""

    file: str
    number: int | None
    """The number of the shard; None for another file, as the index."""
    start: int
    stop: int
    leaf: int | None
    """None where no leaf needs the bytes."""
    path: str
    text: str
    """What is wrong."""


class VerifyPage(msgspec.Struct, frozen=True):
    """A checkpoint, what the last verification of it found (`checkpoint.verification`), and the present one."""

    checkpoint: CheckpointRow
    shards: int | None
    running: bool
    """Whether a job waits or runs: ask again."""
    job: VerifyJob | None
    contents: ContentsSummary | None
    """What the statistics that it computed say; None if none are known."""
    start: int
    next: int | None
    total: int
    """How many rows there are."""
    rows: list[DamageRow]
    """All that is known to be damaged."""
    located: bool
    """Whether it is known which leaves are; until then a row stands for each range of bytes."""


class _Job(ProcessJob):
    messages = msgspec.json.Decoder(Message)
    task = "verified it"

    def __init__(self, cache: Cache, checkpoint: OpenCheckpoint) -> None:
        info, self.folder = checkpoint.info, checkpoint.folder
        if (place := place_of(checkpoint.run.url, self.folder)) is None:
            raise NotFound("This store is in the memory of this process: no other one can read it.")
        super().__init__("checkpoint.verify", [*place, str(cache.shared)], info.nbytes or 0)
        self._cache, self.save_id = cache, info.save_id or ""
        # Before the process reads: files that change meanwhile have another fingerprint.
        self.fingerprint = fingerprint_of(self.folder.entries(), self.save_id)
        self.problems: list[DamagedPart] = []
        self.total = 0
        self._result: Verification | None = None

    def finish(self) -> None:
        super().finish()
        if not self.started:
            return
        failed = self._cache.verifications.record(self.folder, self._result or self._partial(), beside=False)
        self.error = "; ".join(failed) or self.error

    def take(self, message: Message) -> None:
        super().take(message)
        if isinstance(message, Found):
            self.problems, self.total = self.problems + message.problems, self.total + message.total
        elif isinstance(message, Result):
            self._result = message.verification
            self.problems, self.total = self._result.problems, self._result.total

    def _partial(self) -> Verification:
        damage = found_part(self.save_id, self.fingerprint, self.problems, by=this_user("dashboard"))
        seconds = self.ended - self.started
        return msgspec.structs.replace(damage, total=self.total, files=self.at.shards, seconds=seconds)

    def shown(self) -> VerifyJob:
        rate = self.at.done / self.seconds if self.seconds > 0.5 and self.at.done else None
        return filled(
            VerifyJob,
            self,
            shards=self.at.shards,
            rate=rate,
            eta=(self.nbytes - self.done) / rate if rate and self.open else None,
            problems=[
                DamagedPart(visible(o.file), visible(o.text), o.start, o.stop) for o in self.problems[:PAGE_ROWS]
            ],
            error=visible(self.error) if self.error else None,
        )


def keep_damage(tree: OwnTree, part: DamagedPart) -> None:
    """Keeps that bytes of a shard are damaged, which was found while something else was done with it."""
    checkpoint, save_id = tree.checkpoint, tree.checkpoint.info.save_id or ""
    fingerprint = fingerprint_of(checkpoint.folder.entries(), save_id)
    damage = found_part(save_id, fingerprint, [part], by=this_user("dashboard"))
    tree.library.cache.verifications.record(checkpoint.folder, damage, beside=False)


def _damage_rows(
    damage: Damage, outline: Outline | None, found: Verification | None, first: int
) -> tuple[list[DamageRow], int]:
    """Returns a page of rows, one for each damaged range and leaf, and how many there are in all.

    Those of other files than shards come last.
    """
    rows, shards = list[DamageRow](), {one.file for one in damage.bad}
    if outline is not None:
        index = outline.index
        numbers = {file.name: number for number, file in enumerate(index.file_list)}
        rows = [
            DamageRow(
                file=visible(one.file),
                number=numbers[one.file],
                start=one.start,
                stop=one.stop,
                leaf=leaf,
                path="" if leaf is None else shorten(index.entries[leaf].path),
                text=visible(one.why),
            )
            for one, leaf in damage.rows_from(first, PAGE_ROWS)
        ]
    others = [part for part in (found.problems if found is not None else ()) if part.file not in shards]
    start = max(0, first - damage.rows)
    rows += [
        filled(DamageRow, part, file=visible(part.file), number=None, leaf=None, path="", text=visible(part.text))
        for part in others[start : start + PAGE_ROWS - len(rows)]
    ]
    return rows, damage.rows + len(others)


class VerifyJobs(JobQueue[_Job]):
    """The verifications of a server, one at a time."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library

    def shown(self, checkpoint_id: str) -> VerifyJob | None:
        """Returns the last job of a checkpoint; a page asks before it opens that, to show the end with the result."""
        job = self.get(checkpoint_id)
        return job.shown() if job is not None else None

    def page(self, checkpoint_id: str, first: int = 0, *, start: bool = False) -> VerifyPage:
        """Returns what is known of a checkpoint's bytes.

        Args:
            first: the first row of the damage.
            start: starts a job for the checkpoint, unless one waits or runs.

        Raises:
            NotFound: there is no such checkpoint; nor, with `start`, one with an index that another process can open.
        """
        shown = self.shown(checkpoint_id)
        checkpoint = self._library.checkpoint(checkpoint_id)
        info = checkpoint.info
        if start and (shown is None or not shown.open):
            if info.save_id is None or info.leaves is None:
                raise NotFound(f"There is nothing to verify: {info.error or 'it has no index'}")
            shown = self.add(checkpoint_id, lambda: _Job(self._library.cache, checkpoint)).shown()
        row = checkpoint_row(checkpoint_id, checkpoint.run, info)
        outline = self._library.outline(checkpoint) if info.leaves is not None else None
        damage = OpenTree(self._library, checkpoint, row, outline).damage if outline is not None else NO_DAMAGE
        rows, total = _damage_rows(damage, outline, info.verification, first)
        return VerifyPage(
            checkpoint=row,
            shards=len(outline.index.file_list) if outline is not None else None,
            start=first,
            next=next_start(first, total),
            total=total,
            rows=rows,
            located=damage.located,
            running=shown is not None and shown.open,
            job=shown,
            contents=summary_of(self._library, info),
        )
