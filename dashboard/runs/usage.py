"""The page of disk usage: bytes by run and by retention policy, and what a clean-up would free. Nothing is deleted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import msgspec

from treeckpt._inspect.deletion import CleanReport, Removal, RetainedDirectory
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.run import RunDirectory
from treeckpt.errors import TreeckptError, visible
from treeckpt.policy import All, Policy, keep_text

from ..pages.checkpoints import PAGE_ROWS, next_start
from ..store.foreign_trees import ForeignInfo
from ..store.library import Library, Run
from .summary import policies_of, reasons_of, sum_nbytes

DAY_NS = 86_400 * 10**9


class ReasonRow(msgspec.Struct, frozen=True):
    """One reason for which checkpoints are kept."""

    reason: str
    steps: int
    nbytes: int
    alone: int
    """Bytes that are kept for this reason only."""


class RemovalRow(msgspec.Struct, frozen=True):
    """A file or directory that a clean-up would delete, or leave."""

    name: str
    what: str
    reason: str
    nbytes: int


class UsageRow(msgspec.Struct, frozen=True):
    """Disk usage of one run."""

    run: str
    name: str
    path: str
    checkpoints: int
    nbytes: int
    """Bytes of all files of its checkpoints, as every count of bytes here."""
    share: float
    """Share of the bytes of all runs."""
    statuses: dict[str, int]
    """Bytes by status."""
    reasons: list[ReasonRow]
    freed: int
    """Bytes that a clean-up would free."""
    removals: int
    rows: list[RemovalRow]
    next: int | None
    left: list[RemovalRow]
    """What a clean-up leaves although no policy keeps it, and why."""
    disk_free: int | None
    disk_total: int | None
    per_day: float | None
    """Bytes that the newest saves add per day."""
    between: float | None
    """Seconds between two saves."""
    disk_runs: int
    """Runs of the dashboard on the same disk, this one included."""
    disk_per_day: float | None
    """Bytes that the newest saves of all these runs add per day."""
    days: float | None
    """Days until the disk is full if nothing is deleted, with all runs on it growing as they did."""
    days_after: float | None
    """Days until the disk is full after a clean-up of all these runs."""
    disk: int | None
    """Equal for runs on the same disk; None if that is not known, as of object stores."""
    problem: str | None


class UsagePage(msgspec.Struct, frozen=True):
    """Disk usage of every run, and what a clean-up would free."""

    keep: str
    nbytes: int
    freed: int
    start: int
    runs: list[UsageRow]


def usage_page(library: Library, keep: str | None = None, start: int = 0) -> UsagePage:
    """Bytes by run and by policy, and what a clean-up would free. Nothing is deleted.

    Raises:
        KeepError: `keep` is not valid.
    """
    policies = policies_of(library, keep)
    library.start_scans(library.runs)
    infos = {run.id: [info for _, info in library.checkpoints(run)] for run in library.runs}
    total = sum(sum_nbytes(found) for found in infos.values())
    rows = _count_by_disk([_usage_row(library, run, infos[run.id], policies, total, start) for run in library.runs])
    return UsagePage(keep_text(policies), total, sum(row.freed for row in rows), start, rows)


def _is_checkpoint(info: CheckpointInfo) -> bool:
    return info.status != "foreign" or isinstance(info, ForeignInfo)


def _usage_row(
    library: Library, run: Run, infos: Sequence[CheckpointInfo], policies: tuple[Policy, ...], total: int, start: int
) -> UsageRow:
    nbytes, statuses = sum_nbytes(infos), dict[str, int]()
    for info in infos:
        if _is_checkpoint(info):
            statuses[info.status] = statuses.get(info.status, 0) + (info.disk_nbytes or 0)
    report, problem = _dry_run(library, run, policies or (All(),))
    freed = report.nbytes if report else 0
    removed = report.removed if report else ()
    growth = growth_of(
        [(i.created_ns, i.disk_nbytes) for i in infos if i.files == "complete" and i.created_ns and i.disk_nbytes]
    )
    free, disk, number = disk_of(run)
    return UsageRow(
        run=run.id,
        name=run.name,
        path=visible(run.store.url),
        checkpoints=sum(map(_is_checkpoint, infos)),
        nbytes=nbytes,
        share=nbytes / total if total else 0.0,
        statuses=statuses,
        reasons=_reasons(infos, policies),
        freed=freed,
        removals=len(removed),
        rows=[_removal_row(one) for one in removed[start : start + PAGE_ROWS]],
        next=next_start(start, len(removed)),
        left=[_removal_row(one) for one in (report.left if report else ())[:PAGE_ROWS]],
        disk_free=free,
        disk_total=disk,
        per_day=growth.nbytes_per_day if growth else None,
        between=growth.seconds_between if growth else None,
        disk_runs=1,
        disk_per_day=None,
        days=None,
        days_after=None,
        disk=number,
        problem=problem,
    )


def _count_by_disk(rows: Sequence[UsageRow]) -> list[UsageRow]:
    """Adds to each run how fast its disk fills: by all runs of the dashboard that are on it."""
    return [_with_disk(row, [other for other in rows if other.disk == row.disk]) for row in rows]


def _with_disk(row: UsageRow, beside: Sequence[UsageRow]) -> UsageRow:
    if row.disk is None or row.disk_free is None:
        return row
    growing = [other.per_day for other in beside if other.per_day is not None]
    per_day = sum(growing) if growing else None
    return msgspec.structs.replace(
        row,
        disk_runs=len(beside),
        disk_per_day=per_day,
        days=days_until(row.disk_free, per_day),
        days_after=days_until(row.disk_free + sum(other.freed for other in beside), per_day),
    )


def _dry_run(library: Library, run: Run, policies: Sequence[Policy]) -> tuple[CleanReport | None, str | None]:
    if not library.is_run(run):
        return None, "A checkpoint by itself: policies decide about runs."
    try:
        run_cache, known = library.summary_cache(run), library.cache.verifications
        directory = RunDirectory(run.store, cache=run_cache, verifications=known)
        return directory.clean(policies, dry_run=True), None
    except (TreeckptError, OSError) as error:
        return None, visible(str(error))


def _removal_row(one: Removal | RetainedDirectory) -> RemovalRow:
    if isinstance(one, RetainedDirectory):
        return RemovalRow(visible(one.name), "left", visible(one.why), 0)
    return RemovalRow(visible(one.name), one.what, visible(one.reason), one.nbytes)


def _reasons(infos: Sequence[CheckpointInfo], policies: tuple[Policy, ...]) -> list[ReasonRow]:
    by_name = {info.name: info for info in infos}
    counts: dict[str, list[int]] = {}
    for name, reasons in reasons_of(infos, policies).items():
        nbytes = by_name[name].disk_nbytes or 0
        for reason in reasons:
            row = counts.setdefault(reason, [0, 0, 0])
            row[0], row[1], row[2] = row[0] + 1, row[1] + nbytes, row[2] + (nbytes if len(reasons) == 1 else 0)
    return [ReasonRow(visible(reason), *row) for reason, row in sorted(counts.items(), key=lambda pair: -pair[1][1])]


def disk_of(run: Run) -> tuple[int | None, int | None, int | None]:
    """Returns the free and the total bytes and the number of the file system that holds a local run, else None."""
    if run.url:
        return None, None, None
    try:
        usage, number = shutil.disk_usage(run.path), run.path.stat().st_dev
    except OSError:
        return None, None, None
    return usage.free, usage.total, number


class Growth(msgspec.Struct, frozen=True):
    """The growth rate of a run by its newest saves, if nothing is deleted."""

    saves: int
    """How many saves the estimate is based on."""
    nbytes_per_day: float
    seconds_between: float


def growth_of(saves: Sequence[tuple[int, int]], *, count: int = 50) -> Growth | None:
    """Estimates the growth from the newest saves; None if there are fewer than two, or all have the same time.

    Args:
        saves: (Unix nanoseconds, bytes) of each checkpoint, in any order.
        count: how many of the newest to use.
    """
    newest = sorted(saves)[-count:]
    if len(newest) < 2 or newest[-1][0] <= newest[0][0]:
        return None
    span = newest[-1][0] - newest[0][0]
    written = sum(nbytes for _, nbytes in newest[1:])
    return Growth(len(newest), written * DAY_NS / span, span / 1e9 / (len(newest) - 1))


def days_until(free: int, per_day: float | None) -> float | None:
    """Returns the days until the free bytes are used up; None if nothing grows."""
    return free / per_day if per_day is not None and per_day > 0 else None
