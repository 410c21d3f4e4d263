"""The page that lays metrics of several runs over each other: a line for each branch of each run, by step or by time.

A line has few enough points to be drawn: of each bin of consecutive saves, the one with the lowest and the one with the
highest value, so that no spike vanishes, and the first whose value is no finite number.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge
from itertools import pairwise

import msgspec
import numpy as np

from treeckpt._core.text import json_number
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.save_trends import saves_in_order

from ..pages.checkpoints import PAGE_ROWS, branch_numbers, iso_time, next_start, shorten, unix_time
from ..store.library import Library, Run
from .run_table import MetricCell, MetricColumn, TableQuery, known_metrics, metric_cells, metric_columns, shown_columns

MAX_RUNS = 8
"""Runs that are drawn: so many colours can be told apart."""
MAX_METRICS = 2
"""Metrics that are drawn."""
BINS = 240
"""Bins of a line, at most."""
BRANCHES = 8
"""Abandoned branches of a run that are drawn, the newest."""
MAX_STEP = 1 << 62


class OverlayRun(msgspec.Struct, frozen=True):
    """A run whose metrics are drawn."""

    id: str
    name: str
    saves: int
    """Complete checkpoints that have a step."""
    abandoned: int
    """How many of them are on abandoned branches."""
    values: list[MetricCell]
    """The last and the best value of each metric."""


class OverlayRow(msgspec.Struct, frozen=True):
    """The metrics of one save."""

    run: str
    run_name: str
    id: str
    step: int
    created: str | None
    abandoned: bool
    values: dict[str, float | str | None]
    """By metric; "NaN", "Infinity" or "-Infinity" of one that is not finite."""


class OverlayPage(msgspec.Struct, frozen=True):
    """Metrics of several runs."""

    columns: list[MetricColumn]
    """The metrics that are drawn, at most MAX_METRICS."""
    known: list[str]
    """The metrics of these runs, those of the most runs first."""
    runs: list[OverlayRun]
    left_out: list[str]
    """The names of the runs that were asked for beyond MAX_RUNS."""
    unknown: int
    """Ids of runs that are not here."""
    total: int
    """Saves of these runs that have one of the metrics."""
    start: int
    next: int | None
    rows: list[OverlayRow]
    """The saves by step, and of one step in the order of the runs; from `start` to `next`."""


class OverlayLine(msgspec.Struct, frozen=True):
    """One metric on one branch of a run, in columns in the order of saving."""

    run: str
    metric: str
    branch: int
    """0 for the present branch; those of abandoned ones have the number of theirs, the newest is 1."""
    saves: int
    """How many saves the line stands for."""
    ids: list[str]
    step: list[int]
    created: list[float | None]
    """Unix times in seconds."""
    values: list[float | str]
    """ "NaN", "Infinity" or "-Infinity" of one that is not finite."""


class OverlayLines(msgspec.Struct, frozen=True):
    """The lines of several runs."""

    lines: list[OverlayLine]


def spikes_kept(values: Sequence[float], bins: int = BINS) -> list[int]:
    """Returns the positions of the values that are drawn, in order: the lowest and the highest of each bin.

    All, if there are no more than two a bin. The first and the last value are among them, and of each bin the first
    one that is not finite.
    """
    if len(values) <= 2 * bins:
        return list(range(len(values)))
    numbers = np.array(values)
    finite = np.isfinite(numbers)
    low, high = np.where(finite, numbers, np.inf), np.where(finite, numbers, -np.inf)
    edges = np.linspace(0, len(values), bins + 1).round().astype(np.int64).tolist()
    kept = {0, len(values) - 1}
    for start, stop in pairwise(edges):
        inside = finite[start:stop]
        if inside.any():
            kept |= {start + int(low[start:stop].argmin()), start + int(high[start:stop].argmax())}
        if not inside.all():
            kept.add(start + int(inside.argmin()))
    return sorted(kept)


def _asked(library: Library, query: TableQuery) -> tuple[list[Run], list[str], int]:
    """Returns the runs of a query, the names of those beyond MAX_RUNS, and how many ids are of no run here."""
    runs = [run for run in library.runs if run.id in query.run]
    return runs[:MAX_RUNS], [run.name for run in runs[MAX_RUNS:]], len(set(query.run)) - len(runs)


def _columns(library: Library, runs: Sequence[Run], query: TableQuery) -> tuple[list[MetricColumn], list[str]]:
    """Returns the metrics that are drawn, and all of the runs; of those that are asked for, the ones that there are."""
    known = known_metrics(library, runs)
    asked = [name for name in query.metric if name in known]
    standing = [one.metric for one in metric_columns(library, TableQuery()) if one.metric in known]
    names = (asked or standing or known)[:MAX_METRICS]
    return metric_columns(library, TableQuery(metric=names, best=query.best))[: len(names)], known


def overlay_page(library: Library, query: TableQuery, start: int = 0) -> OverlayPage:
    """Returns the runs of a query, and a page of their saves.

    Raises:
        KeepError: the query is not valid.
    """
    library.start_scans(library.runs)
    runs, left_out, unknown = _asked(library, query)
    columns, known = _columns(library, runs, query)
    names = [one.metric for one in columns]
    shown: list[OverlayRun] = []
    saves: list[list[tuple[int, int, str, CheckpointInfo]]] = []
    for at, run in enumerate(runs):
        listed = library.checkpoints(run)
        ordered = saves_in_order(listed)
        abandoned = sum(info.abandoned for _, info in ordered)
        shown.append(OverlayRun(run.id, run.name, len(ordered), abandoned, metric_cells(run, listed, columns)))
        having = ((info.step or 0, at, i, info) for i, info in ordered if any(name in info.metrics for name in names))
        saves.append(sorted(having, key=lambda save: save[0]))
    rows = list(merge(*saves, key=lambda save: save[:2]))
    return OverlayPage(
        columns=shown_columns(columns, {one.id: one.values for one in shown}),
        known=known,
        runs=shown,
        left_out=left_out,
        unknown=unknown,
        total=len(rows),
        start=start,
        next=next_start(start, len(rows)),
        rows=[
            OverlayRow(
                run=runs[at].id,
                run_name=runs[at].name,
                id=checkpoint_id,
                step=step,
                created=iso_time(info.created_ns),
                abandoned=info.abandoned,
                values={shorten(name): json_number(info.metrics.get(name)) for name in names},
            )
            for step, at, checkpoint_id, info in rows[start : start + PAGE_ROWS]
        ],
    )


def overlay_lines(library: Library, query: TableQuery, *, low: int, high: int) -> OverlayLines:
    """Returns the lines of the runs of a query between two steps."""
    runs, _, _ = _asked(library, query)
    columns, _ = _columns(library, runs, query)
    lines: list[OverlayLine] = []
    for run in runs:
        saves = saves_in_order(library.checkpoints(run))
        branches = branch_numbers([info for _, info in saves])
        for metric in (one.metric for one in columns):
            for branch in sorted(set(branches) & set(range(BRANCHES + 1))):
                line = [
                    pair
                    for pair, number in zip(saves, branches, strict=True)
                    if number == branch and metric in pair[1].metrics and low <= (pair[1].step or 0) <= high
                ]
                if line:
                    lines.append(_line(run, metric, branch, line))
    return OverlayLines(lines)


def _line(run: Run, metric: str, branch: int, saves: Sequence[tuple[str, CheckpointInfo]]) -> OverlayLine:
    drawn = [saves[at] for at in spikes_kept([info.metrics[metric] for _, info in saves])]
    return OverlayLine(
        run=run.id,
        metric=shorten(metric),
        branch=branch,
        saves=len(saves),
        ids=[checkpoint_id for checkpoint_id, _ in drawn],
        step=[info.step or 0 for _, info in drawn],
        created=[unix_time(info.created_ns) for _, info in drawn],
        values=[json_number(info.metrics[metric]) for _, info in drawn],
    )
