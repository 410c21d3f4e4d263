"""The page of disk usage: bytes by run and by policy, what a run will take, and what a clean-up would free.

The numbers of a run's growth are those of `treeckpt._runs.usage`. To plan a clean-up every directory is listed, which
takes seconds for thousands: a thread does it, and pages say that it has not ended. Nothing is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache, partial

import msgspec

from treeckpt._inspect.deletion import CleanReport, Removal, RetainedDirectory
from treeckpt._runs.catalog import CheckpointInfo, retained_nbytes, sum_nbytes
from treeckpt._runs.run import RunDirectory
from treeckpt._runs.usage import RunUsage, UsageFigures, disk_of, usage_figures, usage_of_run
from treeckpt.errors import TreeckptError, visible
from treeckpt.policy import All, Policy, keep_text, parse_keep

from ..pages.checkpoints import PAGE_ROWS, filled, iso_time, next_start
from ..store.background_results import BackgroundResults
from ..store.foreign_trees import ForeignInfo
from ..store.library import LastResults, Library, Listed, Run
from ..store.watch import ScanProgress
from .summary import RunSummary, policies_of, summarize_run

PLAN_WAIT = 0.2
"""Seconds for which a page waits for a plan; then it says that it is being made."""
PLAN_FRESH = 30.0
"""Seconds after which a plan is made again, though no checkpoint has changed: a save may have died."""
MAX_PLANS = 64
"""Plans that are remembered."""
MAX_PENDING = 16
"""Plans that wait to be made."""


class ReasonRow(msgspec.Struct, frozen=True):
    """One reason for which checkpoints are kept."""

    reason: str
    steps: int
    nbytes: int
    """Bytes of their files, with those that they share with others."""
    alone: int
    """Bytes that would go without this reason."""


class RemovalRow(msgspec.Struct, frozen=True):
    """A file or directory that a clean-up would delete, or leave."""

    name: str
    what: str
    reason: str
    nbytes: int


class PlanRow(msgspec.Struct, frozen=True):
    """What a clean-up of a run would do."""

    made: str
    freed: int
    """Bytes that it would free."""
    removals: int
    rows: list[RemovalRow]
    next: int | None
    left: list[RemovalRow]
    """What it leaves although no policy keeps it, and why."""
    problem: str | None


class UsageRow(UsageFigures, frozen=True, kw_only=True):
    """Disk usage of one run; as long as its directories are still being read, of those that were."""

    run: str
    name: str
    path: str
    scan: ScanProgress
    checkpoints: int
    """Directories that hold one, also those of other programs."""
    nbytes: int
    """Bytes of all files of its checkpoints, as every count of bytes here."""
    share: float
    """Share of the bytes of all runs."""
    statuses: dict[str, int]
    """Bytes by status."""
    keep: str
    """The policies by which it is pruned: those that were asked for, else its own; empty if none are known."""
    reasons: list[ReasonRow]
    """Empty until all directories are read."""
    plan: PlanRow | None
    """None while it is being made."""


class UsagePage(msgspec.Struct, frozen=True):
    """Disk usage of every run, and what a clean-up would free."""

    keep: str
    """The policies that were asked for."""
    as_of: str
    complete: bool
    """Whether all directories are read, and all plans are made."""
    nbytes: int
    freed: int | None
    start: int
    runs: list[UsageRow]


class Plan(msgspec.Struct, frozen=True):
    """The plan of a clean-up."""

    made_ns: int
    report: CleanReport | None
    problem: str | None


class CleanUpPlans(BackgroundResults[tuple[str, tuple[Policy, ...]], Plan]):
    """Plans of clean-ups, by run and policies."""

    def __init__(self, library: Library) -> None:
        super().__init__("treeckpt-usage", most=MAX_PLANS, pending=MAX_PENDING)
        self._library = library

    def plan(self, run: Run, policies: tuple[Policy, ...]) -> Plan | None:
        """Returns the last plan; starts to make one unless it is fresh; None while there is none."""
        version = self._library.watch(run).version
        make = partial(self._make, run, policies)
        return self.of((run.id, policies), version, make, fresh=PLAN_FRESH, seconds=PLAN_WAIT)

    def _make(self, run: Run, policies: Sequence[Policy]) -> Plan:
        report, problem = None, None
        if not self._library.is_run(run):
            problem = "A checkpoint by itself: policies decide about runs."
        else:
            try:
                cache, known = self._library.summary_cache(run), self._library.cache.verifications
                directory = RunDirectory(run.store, cache=cache, verifications=known)
                report = directory.clean(policies or (All(),), dry_run=True)
            except (TreeckptError, OSError, ArithmeticError, RecursionError) as error:
                problem = visible(str(error))
        return Plan(time.time_ns(), report, problem)


def usage_page(
    library: Library, plans: CleanUpPlans, keep: str | None = None, start: int = 0, *, now_ns: int | None = None
) -> UsagePage:
    """Bytes by run and by policy, what each run will take, and what a clean-up would free. Nothing is deleted.

    Raises:
        KeepError: `keep` is not valid.
    """
    given, now_ns = parse_keep(keep or ""), time.time_ns() if now_ns is None else now_ns
    library.start_scans(library.runs)
    listed = {run.id: library.checkpoints(run) for run in library.runs}
    total = sum(sum_nbytes([info for _, info in found]) for found in listed.values())
    usages = [_usage(library, run, listed[run.id], given, now_ns) for run in library.runs]
    figures = usage_figures(usages, [None if run.url else disk_of(run.path) for run in library.runs])
    rows = [
        _usage_row(library, plans, run, listed[run.id], known, given=given, total=total, start=start)
        for run, known in zip(library.runs, figures, strict=True)
    ]
    made = [row.plan.freed for row in rows if row.plan is not None]
    ready = len(made) == len(rows)
    freed = sum(made) if ready else None
    return UsagePage(
        keep=keep_text(given),
        as_of=iso_time(now_ns) or "",
        complete=ready,
        nbytes=total,
        freed=freed,
        start=start,
        runs=rows,
    )


@lru_cache(512)
def _last_usages(run_id: str) -> LastResults[Listed, tuple[Sequence[Policy], Sequence[Policy]], RunUsage]:
    return LastResults(16)


def _usage(library: Library, run: Run, listed: Listed, given: Sequence[Policy], now_ns: int) -> RunUsage | None:
    """Returns how a run grows; None until all of its directories are read. It is projected once for a list."""
    if not library.watch(run).progress.complete:
        return None
    infos = [info for _, info in listed]
    project = partial(usage_of_run, infos, now_ns, given=given, default=library.policies)
    return _last_usages(run.id).of(listed, (given, library.policies), project).at(infos, now_ns)


def _is_checkpoint(info: CheckpointInfo) -> bool:
    return info.status != "foreign" or isinstance(info, ForeignInfo)


def _usage_row(
    library: Library,
    plans: CleanUpPlans,
    run: Run,
    listed: Listed,
    figures: UsageFigures,
    *,
    given: tuple[Policy, ...],
    total: int,
    start: int,
) -> UsageRow:
    infos = [info for _, info in listed]
    policies = given or policies_of(library, listed)
    summary = summarize_run(run, listed, policies)
    statuses = dict[str, int]()
    for info in filter(_is_checkpoint, infos):
        statuses[info.status] = statuses.get(info.status, 0) + (info.disk_nbytes or 0)
    known = figures.live is not None
    plan = plans.plan(run, policies) if known else None
    return filled(
        UsageRow,
        figures,
        run=run.id,
        name=run.name,
        path=visible(run.store.url),
        scan=library.watch(run).progress,
        checkpoints=sum(map(_is_checkpoint, infos)),
        nbytes=summary.nbytes,
        share=summary.nbytes / total if total else 0.0,
        statuses=statuses,
        keep=keep_text(policies),
        reasons=_reasons(infos, summary) if known else [],
        plan=_plan_row(plan, start) if plan is not None else None,
    )


def _plan_row(plan: Plan, start: int) -> PlanRow:
    removed, left = (plan.report.removed, plan.report.left) if plan.report else ((), ())
    return PlanRow(
        made=iso_time(plan.made_ns) or "",
        freed=plan.report.nbytes if plan.report else 0,
        removals=len(removed),
        rows=[_removal_row(one) for one in removed[start : start + PAGE_ROWS]],
        next=next_start(start, len(removed)),
        left=[_removal_row(one) for one in left[:PAGE_ROWS]],
        problem=plan.problem,
    )


def _removal_row(one: Removal | RetainedDirectory) -> RemovalRow:
    if isinstance(one, RetainedDirectory):
        return RemovalRow(visible(one.name), "left", visible(one.why), 0)
    return RemovalRow(visible(one.name), one.what, visible(one.reason), one.nbytes)


def _reasons(infos: Sequence[CheckpointInfo], summary: RunSummary) -> list[ReasonRow]:
    kept = [info for info in infos if info.name in summary.reasons]
    every, rows = retained_nbytes(kept), list[ReasonRow]()
    for reason in {reason: None for reasons in summary.reasons.values() for reason in reasons}:
        by = [info for info in kept if reason in summary.reasons[info.name]]
        others = [info for info in kept if summary.reasons[info.name] != (reason,)]
        rows.append(ReasonRow(visible(reason), len(by), retained_nbytes(by), every - retained_nbytes(others)))
    return sorted(rows, key=lambda row: -row.nbytes)
