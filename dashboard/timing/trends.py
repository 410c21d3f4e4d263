"""The page of trends: how saves of a run changed from step to step, and which ranks were slow again and again.

The saves of the present branch count, in the order of saving; those of abandoned branches are drawn apart.

Thousands of saves do not fit a screen: the charts of phases and ranks have bins of consecutive saves. Phases are those
of the save with the median duration of a bin, so that a trend shows; work of ranks is the longest in the bin, so that
one slow save of many does not vanish. Each bin leads to its longest save.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from treeckpt._core.format.timings import Host
from treeckpt._core.text import json_number
from treeckpt._inspect.profile import WAITING_PHASES, nearest_rank
from treeckpt._inspect.timing_report import lost_scale_ns
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.reduced_timings import OTHER, ReducedTimings
from treeckpt._runs.save_trends import HostRow, TimedSave, offenders, saves_in_order, timed_saves, trend_text
from treeckpt.errors import TreeckptError, visible

from ..pages.checkpoints import branch_numbers, next_start, unix_time
from ..store.library import LastResult, Library, Listed, Run
from ..store.watch import RunWatcher, ScanProgress

BINS = 240
"""Bins of one view, at most."""
PHASES = 7
"""Phases that are shown apart, those with the most time in any bin; the others are added up."""
MAX_STEP = 1 << 62
ALL = (-MAX_STEP, MAX_STEP)
"""The first and the last step of all saves."""
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
    waiting: list[bool] = []
    """Whether ranks mostly wait for other ranks in the phase."""
    stack: list[list[float]] = []
    """Time of that save on the critical path, by phase and bin: the times of all phases add up to its duration."""
    block: int = 1
    """How many consecutive ranks a line is of."""
    world: int = 0
    unit: float = 1.0
    """Seconds of one unit of `work`."""
    work: list[list[int]] = []
    """Active time by bin and line: the longest of any save and rank; -1 for none."""
    lost: list[list[int]] = []
    """Time lost, in units too: by how much the work is longer than the median rank's in the same save, at most."""
    most_lost: int = 0
    """The end of the scale of lost time: the longest, or a large one for saves that take as long as these."""


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
    lost = np.fmax.reduceat(np.maximum(work - medians, 0), starts, axis=0)
    unit = max(float(np.nanmax(work, initial=0.0)), 1e-9) / UNITS
    most_lost = lost_scale_ns(float(np.nanmax(lost, initial=0.0)) * 1e9, float(np.median(seconds))) / 1e9
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
        waiting=[name in WAITING_PHASES for name in phases],
        stack=stack.T.tolist(),
        block=block,
        world=max(one.world for one in reduced),
        unit=unit,
        work=_integers(np.fmax.reduceat(work, starts, axis=0) / unit),
        lost=_integers(lost / unit),
        most_lost=round(most_lost / unit),
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


class DurationRow(msgspec.Struct, frozen=True):
    """How long the saves of the present branch took, or one of their phases, by percentiles of the nearest rank."""

    name: str
    """Of the phase; "duration" and "training blocked" for the whole save."""
    p50: float
    p95: float
    longest: float
    waiting: bool = False
    """Whether ranks mostly wait for other ranks in the phase."""


class TrendsPage(msgspec.Struct, frozen=True):
    """Saves of a run in columns, in the order of saving; the rows from `start` to `next` are also a table."""

    run: str
    name: str
    version: int
    """Another number for another list of checkpoints."""
    scan: ScanProgress
    """Until the first scan is complete, saves are still missing."""
    text: str
    """Since when saves take longer or less, in which phase, and which rank stands out, in sentences: of all saves."""
    total: int
    """Saves of the run. The fields below are about the saves between two steps, if these were asked for."""
    low: int | None
    high: int | None
    timed: int
    """Saves of the present branch whose timings could be read."""
    present: int
    """Saves of the present branch."""
    durations: list[DurationRow]
    """How long they took, the whole save first, then the phases of the critical path, the longest first."""
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
    """Bytes of the arrays that each has written."""
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


@dataclass(frozen=True, slots=True)
class TrendRow:
    """A complete checkpoint that has a step."""

    id: str
    info: CheckpointInfo
    reduced: ReducedTimings | None
    branch: int
    """As in `TrendsPage`."""


@dataclass
class RunTrends:
    """The complete checkpoints of a run that have a step, in the order of saving, and what is computed from them."""

    run: Run
    rows: list[TrendRow]
    text: str
    metrics: list[str]
    """The metrics that most of them have."""
    pages: dict[tuple[int, int], TrendsPage] = field(default_factory=dict)
    bins: dict[tuple[int, int], TrendBins] = field(default_factory=dict)

    def between(self, low: int, high: int) -> list[TrendRow]:
        """Returns the rows of the steps between two, both included."""
        return [row for row in self.rows if low <= (row.info.step or 0) <= high]


class TrendTables:
    """The trends of each run, computed once for each state of its list of checkpoints."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept = WeakKeyDictionary[RunWatcher, LastResult[Listed, RunTrends]]()
        """By what watches the run: they go with it."""

    def page(self, run_id: str, start: int, low: int, high: int) -> TrendsPage:
        """Returns the page of a run.

        Args:
            start: the first row of the page's table.
            low, high: the first and the last step that it shows.

        Raises:
            NotFound: there is no such run.
        """
        trends = self._trends(run_id)
        if (page := trends.pages.get((low, high))) is None:
            page = _trends_page(trends, low, high)
            # of all saves, and of the last view
            trends.pages = {key: one for key, one in trends.pages.items() if key == ALL} | {(low, high): page}
        watch = self._library.watch(trends.run)
        last = next_start(start, len(page.ids))
        return msgspec.structs.replace(page, start=start, next=last, scan=watch.progress, version=watch.version)

    def bins(self, run_id: str, low: int, high: int) -> TrendBins:
        """Returns the phases and ranks of the saves between two steps, in bins.

        Raises:
            NotFound: there is no such run.
        """
        trends = self._trends(run_id)
        if (bins := trends.bins.get((low, high))) is None:
            bins = trend_bins(_timed(trends.between(low, high)))
            trends.bins = {(low, high): bins}  # the last view alone is kept
        return bins

    def _trends(self, run_id: str) -> RunTrends:
        run = self._library.run(run_id)
        last = self._kept.setdefault(self._library.watch(run), LastResult())
        return last.of(self._library.checkpoints(run), partial(_run_trends, self._library, run))


def _run_trends(library: Library, run: Run, listed: Listed) -> RunTrends:
    complete = saves_in_order(listed)
    branches = branch_numbers([info for _, info in complete])
    rows = [
        TrendRow(checkpoint_id, info, library.reduced_timings(run, info), branch)
        for (checkpoint_id, info), branch in zip(complete, branches, strict=True)
    ]
    timed = _timed(rows)
    metrics = Counter(name for row in rows for name in row.info.metrics).most_common(MAX_METRICS)
    text = trend_text(timed, offenders(timed), partial(_hosts_of_last, library, run, rows))
    return RunTrends(run, rows, text, [name for name, _ in metrics])


def _timed(rows: Sequence[TrendRow]) -> list[TimedSave]:
    """Returns the saves of the present branch that have timings."""
    return timed_saves((row.id, row.info, row.reduced) for row in rows)


def _hosts_of_last(library: Library, run: Run, rows: Sequence[TrendRow]) -> Sequence[Host]:
    """Returns the hosts of the last save of the present branch that has timings; none if they cannot be read."""
    last = next((row for row in reversed(rows) if row.reduced is not None and not row.branch), None)
    try:
        return library.study(library.listed(last.id, run, last.info)).timings.hosts if last is not None else ()
    except TreeckptError:
        return ()


def _trends_page(trends: RunTrends, low: int, high: int) -> TrendsPage:
    rows = trends.between(low, high)
    infos, reduced, timed = [row.info for row in rows], [row.reduced for row in rows], _timed(rows)
    return TrendsPage(
        run=trends.run.id,
        name=trends.run.name,
        version=0,
        scan=ScanProgress(0, 0, False),
        text=trends.text,
        total=len(trends.rows),
        low=None if low == -MAX_STEP else low,
        high=None if high == MAX_STEP else high,
        timed=len(timed),
        present=sum(not row.branch for row in rows),
        durations=_durations(timed),
        hosts=offenders(timed),
        ids=[row.id for row in rows],
        step=[info.step or 0 for info in infos],
        created=[unix_time(info.created_ns) for info in infos],
        branch=[row.branch for row in rows],
        seconds=[info.seconds for info in infos],
        blocked=[info.blocked_seconds for info in infos],
        nbytes=[info.own_nbytes or 0 for info in infos],
        rate=[info.own_nbytes / info.seconds if info.own_nbytes and info.seconds else None for info in infos],
        dedupe=[info.held_nbytes / info.nbytes if info.nbytes and info.held_nbytes else None for info in infos],
        world=[info.world or 0 for info in infos],
        phase=_column(reduced, lambda one: None if one.longest_phase is None else visible(one.longest_phase)),
        slow=_column(reduced, lambda one: one.slow[0].rank if one.slow else None),
        metrics={name: [json_number(info.metrics.get(name)) for info in infos] for name in trends.metrics},
        start=0,
        next=None,
    )


def _durations(timed: Sequence[TimedSave]) -> list[DurationRow]:
    """Returns the percentiles of the whole save and of each phase of its critical path."""
    if not timed:
        return []
    reduced = [save.reduced for save in timed]
    names, times = _phases(reduced)
    whole = {
        "duration": np.array([one.seconds for one in reduced]),
        "training blocked": np.array([one.blocked_seconds for one in reduced]),
    }

    def row(name: str, values: np.ndarray, *, waiting: bool = False) -> DurationRow:
        p50, p95 = (nearest_rank(values, share) for share in (0.5, 0.95))
        return DurationRow(visible(name), p50, p95=p95, longest=float(values.max()), waiting=waiting)

    phases = [row(name, column, waiting=name in WAITING_PHASES) for name, column in zip(names, times.T, strict=True)]
    return [row(name, values) for name, values in whole.items()] + phases


def _column(reduced: list[ReducedTimings | None], value: Callable[[ReducedTimings], T | None]) -> list[T | None]:
    return [value(one) if one is not None else None for one in reduced]
