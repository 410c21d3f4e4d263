"""The page of trends: how saves of a run changed from step to step, and which ranks were slow again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from treeckpt._core.text import json_number, visible

from ..pages.checkpoints import next_start
from ..store.last_result import LastResult
from ..store.library import Library, Listed, Run
from ..store.reduced_timings import ReducedTimings
from ..store.watch import ScanProgress
from .bins import TrendBins, trend_bins
from .offenders import HostRow, offenders, trend_text

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
