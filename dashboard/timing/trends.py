"""The page of trends: how saves of a run changed from step to step, and which ranks were slow again and again.

The saves of the present branch count, in the order of saving; those of abandoned branches are drawn apart.

Thousands of saves do not fit a screen: the charts of phases and ranks have bins of consecutive saves. Phases are those
of the save with the median duration of a bin, so that a trend shows; work of ranks is the longest in the bin, so that
one slow save of many does not vanish. Each bin leads to its longest save.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from treeckpt._core.text import json_number
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt.errors import visible

from ..pages.checkpoints import lineage_branches, next_start
from ..store.library import LastResult, Library, Listed, Run
from ..store.reduced_timings import OTHER, ReducedTimings
from ..store.watch import ScanProgress
from .diagnosis import HostRow, TimedSave, offenders, trend_text

BINS = 240
"""Bins of one view, at most."""
PHASES = 7
"""Phases that are shown apart, those with the most time in any bin; the others are added up."""
MAX_STEP = 1 << 62
UNITS = 10_000
"""Units into which the longest work is divided, so that columns are short integers."""
T = TypeVar("T")
MAX_METRICS = 8
"""Metrics that have a chart."""


class TrendBins(msgspec.Struct, frozen=True):
    """Saves of the present branch of a run in bins; all times but `work` in seconds."""

    saves: int
    """Number of saves in all bins."""
    ids: list[str] = []
    """The longest save of each bin; its step, the time at which it was saved, and its duration follow."""
    step: list[int] = []
    created: list[float | None] = []
    """Unix time, as in `TrendsPage`."""
    longest: list[float] = []
    first: list[int] = []
    """The first step of each bin."""
    last: list[int] = []
    counts: list[int] = []
    """Number of saves of each bin."""
    seconds: list[float] = []
    """The median of the durations: that of a save, the shorter of two in the middle."""
    phases: list[str] = []
    stack: list[list[float]] = []
    """Time of that save on the critical path, by phase and bin: the times of all phases add up to its duration."""
    block: int = 1
    """How many consecutive ranks a line is of."""
    world: int = 0
    unit: float = 1.0
    """Seconds of one unit of `work`."""
    work: list[list[int]] = []
    """Active time by bin and line: the longest of any save and rank; -1 for none."""
    times: list[list[int]] = []
    """The work as hundredths of the median rank's in the same save."""


def trend_bins(saves: Sequence[TimedSave]) -> TrendBins:
    """Returns saves, in their order, in bins of equal numbers of them, but for one save."""
    if not saves:
        return TrendBins(0)
    reduced = [save.reduced for save in saves]
    edges = np.linspace(0, len(saves), min(BINS, len(saves)) + 1).round().astype(np.int64)
    starts, counts = edges[:-1], np.diff(edges)
    seconds = np.array([one.seconds for one in reduced])
    order = [
        start + np.argsort(seconds[start : start + count], kind="stable")
        for start, count in zip(starts, counts, strict=True)
    ]
    worst, middle = [int(one[-1]) for one in order], [int(one[(len(one) - 1) // 2]) for one in order]
    phases, stack = _phases([reduced[n] for n in middle])
    block, work = _work(reduced)
    medians = np.array([one.median for one in reduced], np.float32)[:, None]
    times = 100 * np.divide(work, medians, out=np.full_like(work, np.nan), where=medians > 0)
    unit = max(float(np.nanmax(work, initial=0.0)), 1e-9) / UNITS
    return TrendBins(
        saves=len(saves),
        ids=[saves[n].id for n in worst],
        step=[saves[n].step for n in worst],
        created=[unix_time(saves[n].created_ns) for n in worst],
        longest=seconds[worst].tolist(),
        first=[saves[n].step for n in starts.tolist()],
        last=[saves[n].step for n in (starts + counts - 1).tolist()],
        counts=counts.tolist(),
        seconds=seconds[middle].tolist(),
        phases=[visible(name) for name in phases],
        stack=stack.T.tolist(),
        block=block,
        world=max(one.world for one in reduced),
        unit=unit,
        work=_integers(np.fmax.reduceat(work, starts, axis=0) / unit),
        times=_integers(np.fmax.reduceat(times, starts, axis=0)),
    )


def _phases(reduced: Sequence[ReducedTimings]) -> tuple[list[str], np.ndarray]:
    """Returns the names of the phases of these saves, and float64[saves, phases] with the time of each."""
    kinds = {one.names for one in reduced}
    column = {name: n for n, name in enumerate(sorted(set().union(*kinds)))}
    columns = {names: [column[name] for name in names] for names in kinds}
    matrix = np.zeros((len(reduced), len(column)))
    rows = np.repeat(np.arange(len(reduced)), [len(one.names) for one in reduced])
    places = np.fromiter(itertools.chain.from_iterable(columns[one.names] for one in reduced), np.intp, len(rows))
    matrix[rows, places] = np.frombuffer(b"".join(one.times for one in reduced), "<f8")
    most = matrix.max(axis=0)
    names = sorted(column, key=lambda name: (name == OTHER, -most[column[name]]))
    if len(names) <= PHASES + 1:
        return names, matrix[:, [column[name] for name in names]]
    shown = matrix[:, [column[name] for name in names[:PHASES]]]
    rest = matrix[:, [column[name] for name in names[PHASES:]]].sum(axis=1, keepdims=True)
    return [*names[:PHASES], OTHER], np.hstack([shown, rest])


def _work(reduced: Sequence[ReducedTimings]) -> tuple[int, np.ndarray]:
    """Returns how many ranks a line is of, and float32[saves, lines] with the longest work of each line."""
    block = max(one.block for one in reduced)
    lines = -(-max(one.world for one in reduced) // block)
    if all(one.block == block and len(one.work) == 2 * lines for one in reduced):
        return block, np.frombuffer(b"".join(one.work for one in reduced), "<f2").reshape(-1, lines).astype(np.float32)
    work = np.full((len(reduced), lines), np.nan, np.float32)
    for row, one in zip(work, reduced, strict=True):
        own = one.lines(block)
        row[: len(own)] = own
    return block, work


def _integers(values: np.ndarray) -> list[list[int]]:
    return np.nan_to_num(np.minimum(values, 1e9), nan=-1.0).round().astype(np.int64).tolist()


def unix_time(created_ns: int | None) -> float | None:
    """Returns a Unix time in seconds, None for one that is not known, or beyond what a chart can draw."""
    return created_ns / 1e9 if created_ns is not None and abs(created_ns) < MAX_STEP else None


class TrendsPage(msgspec.Struct, frozen=True):
    """The saves of a run in columns, in the order of saving; the rows from `start` to `next` are also a table."""

    run: str
    name: str
    scan: ScanProgress
    """Until the first scan is complete, saves are still missing."""
    text: str
    """Since when saves take longer or less, in which phase, and which rank stands out, in sentences."""
    timed: int
    """Saves of the present branch whose timings could be read."""
    present: int
    """Saves of the present branch."""
    hosts: list[HostRow]
    """Hosts with stragglers, those of the most saves first."""
    ids: list[str]
    step: list[int]
    created: list[float | None]
    """When each was saved, as Unix time in seconds."""
    branch: list[int]
    """0 for a save of the present branch; those of abandoned ones have the number of theirs, the newest is 1."""
    seconds: list[float | None]
    blocked: list[float | None]
    nbytes: list[int]
    rate: list[float | None]
    dedupe: list[float | None]
    """The bytes that all ranks held together, as a multiple of those written: 1 where no rank held what another had."""
    world: list[int]
    phase: list[str | None]
    """The phase that takes most of the critical path."""
    slow: list[int | None]
    """The straggler that lost the most time."""
    metrics: dict[str, list[float | str | None]]
    """The metrics that most checkpoints have, by name; "NaN", "Infinity" or "-Infinity" for no finite value."""
    start: int
    next: int | None


@dataclass
class RunTrends:
    """The complete checkpoints of a run that have a step, in the order of saving, and what is computed from them."""

    page: TrendsPage
    timed: list[TimedSave]
    """The saves of the present branch that have timings."""
    bins: dict[tuple[int, int], TrendBins] = field(default_factory=dict)


class TrendTables:
    """The trends of each run, computed once for each state of its list of checkpoints."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept = defaultdict[str, LastResult[Listed, RunTrends]](LastResult)

    def page(self, run_id: str, start: int) -> TrendsPage:
        """Returns the page of a run.

        Args:
            start: the first row of the page's table.

        Raises:
            NotFound: there is no such run.
        """
        trends = self._trends(run_id)
        scan = self._library.watches[trends.page.run].progress
        last = next_start(start, len(trends.page.ids))
        return msgspec.structs.replace(trends.page, start=start, next=last, scan=scan)

    def bins(self, run_id: str, low: int, high: int) -> TrendBins:
        """Returns the phases and ranks of the saves between two steps, in bins.

        Raises:
            NotFound: there is no such run.
        """
        trends = self._trends(run_id)
        if (bins := trends.bins.get((low, high))) is None:
            bins = trend_bins([save for save in trends.timed if low <= save.step <= high])
            trends.bins = {(low, high): bins}  # the last view alone is kept
        return bins

    def _trends(self, run_id: str) -> RunTrends:
        run = self._library.run(run_id)
        return self._kept[run_id].of(self._library.checkpoints(run), partial(_run_trends, self._library, run))


def _run_trends(library: Library, run: Run, listed: Listed) -> RunTrends:
    complete = [(i, c) for i, c in listed if c.files == "complete" and c.step is not None]
    complete.sort(key=lambda pair: (pair[1].sequence or 0, pair[1].step or 0, pair[1].created_ns or 0))
    ids, infos = [checkpoint_id for checkpoint_id, _ in complete], [info for _, info in complete]
    reduced = [library.reduced_timings(run, info) for info in infos]
    timed = [
        TimedSave(checkpoint_id, info.step or 0, info.created_ns, info.nbytes, one)
        for (checkpoint_id, info), one in zip(complete, reduced, strict=True)
        if one is not None and not info.abandoned
    ]
    hosts = offenders(timed)
    page = TrendsPage(
        run=run.id,
        name=run.name,
        scan=library.watches[run.id].progress,
        text=trend_text(timed, hosts),
        timed=len(timed),
        present=sum(not info.abandoned for info in infos),
        hosts=hosts,
        ids=ids,
        step=[info.step or 0 for info in infos],
        created=[unix_time(info.created_ns) for info in infos],
        branch=_branch_numbers(infos),
        seconds=[info.seconds for info in infos],
        blocked=[info.blocked_seconds for info in infos],
        nbytes=[info.nbytes or 0 for info in infos],
        rate=[info.nbytes / info.seconds if info.nbytes and info.seconds else None for info in infos],
        dedupe=[info.held_nbytes / info.nbytes if info.nbytes and info.held_nbytes else None for info in infos],
        world=[info.world or 0 for info in infos],
        phase=_column(reduced, lambda one: None if one.longest_phase is None else visible(one.longest_phase)),
        slow=_column(reduced, lambda one: one.slow[0].rank if one.slow else None),
        metrics={
            name: [json_number(info.metrics.get(name)) for info in infos]
            for name, _ in Counter(name for info in infos for name in info.metrics).most_common(MAX_METRICS)
        },
        start=0,
        next=None,
    )
    return RunTrends(page, timed)


def _branch_numbers(infos: Sequence[CheckpointInfo]) -> list[int]:
    """Returns the number of the branch of each checkpoint: 0 for the present one, then the newest abandoned one."""
    branches = lineage_branches(infos)
    abandoned = [branch for branch in reversed(branches) if branch[-1].abandoned]
    numbers = {info.name: n for n, branch in enumerate(abandoned, 1) for info in branch if info.abandoned}
    return [numbers.get(info.name, 0) for info in infos]


def _column(reduced: list[ReducedTimings | None], value: Callable[[ReducedTimings], T | None]) -> list[T | None]:
    return [value(one) if one is not None else None for one in reduced]
