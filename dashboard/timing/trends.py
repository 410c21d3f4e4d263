"""The page of trends: how saves of a run changed from step to step, and which ranks were slow again and again.

Thousands of saves do not fit a screen: the charts of phases and ranks have bins of consecutive saves. Phases are means
over the saves of a bin, so that a trend shows; work of ranks is the longest in the bin, so that one slow save of many
does not vanish. Each bin leads to its longest save.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from treeckpt._core.text import json_number
from treeckpt.errors import visible

from ..pages.checkpoints import next_start
from ..store.library import LastResult, Library, Listed, Run
from ..store.reduced_timings import OTHER, ReducedTimings
from ..store.watch import ScanProgress
from .diagnosis import HostRow, offenders, trend_text

BINS = 240
"""Bins of one view, at most."""
PHASES = 7
"""Phases that are shown apart, those with the most time in any bin; the others are added up."""
UNITS = 10_000
"""Units into which the longest work is divided, so that columns are short integers."""


class TrendBins(msgspec.Struct, frozen=True):
    """Saves of a run by step in bins; all times but `work` in seconds."""

    saves: int
    """Number of saves in all bins."""
    ids: list[str] = []
    """The longest save of each bin; its step and its duration follow."""
    step: list[int] = []
    longest: list[float] = []
    first: list[int] = []
    """The first step of each bin."""
    last: list[int] = []
    counts: list[int] = []
    """Number of saves of each bin."""
    seconds: list[float] = []
    """Mean duration."""
    phases: list[str] = []
    stack: list[list[float]] = []
    """Mean time on the critical path, by phase and bin: the times of all phases add up to the duration."""
    block: int = 1
    """How many consecutive ranks a line is of."""
    world: int = 0
    unit: float = 1.0
    """Seconds of one unit of `work`."""
    work: list[list[int]] = []
    """Active time by bin and line: the longest of any save and rank; -1 for none."""
    times: list[list[int]] = []
    """The same as hundredths of the work of the median rank in the same save."""


def trend_bins(ids: Sequence[str], steps: Sequence[int], reduced: Sequence[ReducedTimings]) -> TrendBins:
    """Returns saves in bins of equal numbers of them.

    Args:
        ids, steps, reduced: of each save, sorted by step. They are not one list of tuples: ten thousand new tuples a
            request let the collector of garbage visit all that the server holds, for 50 to 150 ms.
    """
    if not reduced:
        return TrendBins(0)
    starts = np.arange(0, len(reduced), -(-len(reduced) // BINS))
    counts = np.diff(np.append(starts, len(reduced)))
    seconds = np.array([one.seconds for one in reduced])
    worst = [int(start + seconds[start : start + count].argmax()) for start, count in zip(starts, counts, strict=True)]
    phases, stack = _phases(reduced, starts, counts)
    block, work = _work(reduced)
    medians = np.array([one.median for one in reduced], np.float32)[:, None]
    times = 100 * np.divide(work, medians, out=np.full_like(work, np.nan), where=medians > 0)
    unit = max(float(np.nanmax(work, initial=0.0)), 1e-9) / UNITS
    return TrendBins(
        saves=len(reduced),
        ids=[ids[n] for n in worst],
        step=[steps[n] for n in worst],
        longest=[reduced[n].seconds for n in worst],
        first=[steps[n] for n in starts.tolist()],
        last=[steps[n] for n in (starts + counts - 1).tolist()],
        counts=counts.tolist(),
        seconds=(np.add.reduceat(seconds, starts) / counts).tolist(),
        phases=[visible(name) for name in phases],
        stack=stack.T.tolist(),
        block=block,
        world=max(one.world for one in reduced),
        unit=unit,
        work=_integers(np.fmax.reduceat(work, starts, axis=0) / unit),
        times=_integers(np.fmax.reduceat(times, starts, axis=0)),
    )


def _phases(reduced: Sequence[ReducedTimings], starts: np.ndarray, counts: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Returns the names of the phases, and float64[bins, phases] with the mean time of each."""
    kinds = {one.names for one in reduced}
    column = {name: n for n, name in enumerate(sorted(set().union(*kinds)))}
    columns = {names: [column[name] for name in names] for names in kinds}
    matrix = np.zeros((len(reduced), len(column)))
    rows = np.repeat(np.arange(len(reduced)), [len(one.names) for one in reduced])
    found = np.fromiter(itertools.chain.from_iterable(columns[one.names] for one in reduced), np.intp, len(rows))
    matrix[rows, found] = np.frombuffer(b"".join(one.times for one in reduced), "<f8")
    means = np.add.reduceat(matrix, starts, axis=0) / counts[:, None]
    most = means.max(axis=0)
    names = sorted(column, key=lambda name: (name == OTHER, -most[column[name]]))
    if len(names) <= PHASES + 1:
        return names, means[:, [column[name] for name in names]]
    shown = means[:, [column[name] for name in names[:PHASES]]]
    rest = means[:, [column[name] for name in names[PHASES:]]].sum(axis=1, keepdims=True)
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


T = TypeVar("T")
MAX_METRICS = 8
"""Metrics that have a chart."""


class TrendsPage(msgspec.Struct, frozen=True):
    """The saves of a run by step, oldest first, in columns; the rows from `start` to `next` are also a table."""

    run: str
    name: str
    scan: ScanProgress
    """Until the first scan is complete, saves are still missing."""
    text: str
    """In a sentence: how long the last saves took beside those before them, and which rank stood out."""
    timed: int
    """Saves whose timings could be read."""
    hosts: list[HostRow]
    """Hosts with stragglers, those of the most saves first."""
    ids: list[str]
    step: list[int]
    seconds: list[float | None]
    blocked: list[float | None]
    nbytes: list[int]
    rate: list[float | None]
    dedupe: list[float | None]
    """Bytes written, as a share of the bytes that all ranks held together."""
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
    """The complete checkpoints of a run that have a step, sorted by step, and what is computed from them."""

    page: TrendsPage
    reduced: list[ReducedTimings | None]
    bins: dict[tuple[int, int], TrendBins] = field(default_factory=dict)


class TrendTables:
    """The trends of each run, computed once for each state of its list of checkpoints."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept = {run.id: LastResult[Listed, RunTrends]() for run in library.runs}

    def page(self, run_id: str, start: int) -> TrendsPage:
        """Returns the page of a run.

        Args:
            start: the first row of the page's table.

        Raises:
            NotFound: there is no such run.
        """
        found = self._trends(run_id)
        scan = self._library.watches[found.page.run].progress
        last = next_start(start, len(found.page.ids))
        return msgspec.structs.replace(found.page, start=start, next=last, scan=scan)

    def bins(self, run_id: str, low: int, high: int) -> TrendBins:
        """Returns the phases and ranks of the saves between two steps, in bins.

        Raises:
            NotFound: there is no such run.
        """
        found = self._trends(run_id)
        if (bins := found.bins.get((low, high))) is None:
            page, reduced = found.page, found.reduced
            shown = [n for n, step in enumerate(page.step) if low <= step <= high and reduced[n] is not None]
            ids, steps = [page.ids[n] for n in shown], [page.step[n] for n in shown]
            bins = trend_bins(ids, steps, [one for n in shown if (one := reduced[n]) is not None])
            found.bins = {(low, high): bins}  # the last view alone is kept
        return bins

    def _trends(self, run_id: str) -> RunTrends:
        run = self._library.run(run_id)
        return self._kept[run_id].of(self._library.checkpoints(run), partial(_run_trends, self._library, run))


def _run_trends(library: Library, run: Run, listed: Listed) -> RunTrends:
    found = [(i, c) for i, c in listed if c.status == "complete" and c.step is not None]
    found.sort(key=lambda pair: (pair[1].step or 0, pair[1].created_ns or 0))
    infos = [info for _, info in found]
    reduced = [library.reduced_timings(run, info) for info in infos]
    ids = [checkpoint_id for checkpoint_id, _ in found]
    step = [info.step or 0 for info in infos]
    timed = [(ids[n], step[n], one) for n, one in enumerate(reduced) if one is not None]
    hosts = offenders(timed)
    page = TrendsPage(
        run=run.id,
        name=run.name,
        scan=library.watches[run.id].progress,
        text=trend_text([one for _, _, one in timed], hosts),
        timed=len(timed),
        hosts=hosts,
        ids=ids,
        step=step,
        seconds=[info.seconds for info in infos],
        blocked=[info.blocked_seconds for info in infos],
        nbytes=[info.nbytes or 0 for info in infos],
        rate=[info.nbytes / info.seconds if info.nbytes and info.seconds else None for info in infos],
        dedupe=[info.nbytes / info.held_nbytes if info.nbytes and info.held_nbytes else None for info in infos],
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
    return RunTrends(page, reduced)


def _column(reduced: list[ReducedTimings | None], value: Callable[[ReducedTimings], T | None]) -> list[T | None]:
    return [value(one) if one is not None else None for one in reduced]
