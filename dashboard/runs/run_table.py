"""The columns of metrics in the table of runs: which there are, and the last and the best value of each in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import msgspec

from treeckpt._core.text import json_number
from treeckpt._runs.run_metrics import MetricValue, Mode, agreed_mode, metrics_among, run_metric

from ..pages.checkpoints import shorten
from ..store.library import LastResult, LastResults, Library, Listed, Run
from .summary import choice_of, first_metric, policies_of, summarize_run

MAX_COLUMNS = 8
"""Metrics that have columns."""
DEFAULT_COLUMNS = 2
"""Metrics that have columns where none is chosen."""
MAX_KNOWN = 200
"""Metrics that can be chosen from."""


class MetricColumn(msgspec.Struct, frozen=True):
    """A metric that has columns in the table of runs."""

    metric: str
    mode: Mode | None
    """Whether the lowest or the highest value is the best: by the user's choice, else by the policies of the runs."""
    chosen: bool
    """Whether the user has chosen the mode."""
    best_runs: Sequence[str] = ()
    """The ids of the runs with the best value, among those of the page; none where only one has a value."""

    @property
    def choice(self) -> str:
        """The metric and the mode, as `TableQuery.best` has them."""
        return f"{self.metric}:{self.mode}"


class MetricCell(msgspec.Struct, frozen=True):
    """The last and the best value of a metric in a run; "NaN", "Infinity" or "-Infinity" of one that is not finite."""

    last: float | str | None = None
    """Of the newest complete checkpoint of the present branch that has the metric; its step and id follow."""
    last_step: int | None = None
    last_id: str | None = None
    best: float | str | None = None
    """Of the good checkpoints; None where it is not known which way is better. Its step and id follow."""
    best_step: int | None = None
    best_id: str | None = None


class TableQuery(msgspec.Struct, frozen=True):
    """Which runs the table has, with which metrics, and in which order."""

    q: str = ""
    metric: Sequence[str] = ()
    """The metrics that have columns; without any, those that stand for the runs."""
    best: Sequence[str] = ()
    """Metrics and directions, as `loss:min`; of a metric without one the direction is that of a policy."""
    sort: str = ""
    """The order of the runs, as `RUN_SORTS` has it; empty for that in which they were given."""
    run: Sequence[str] = ()
    """The runs that are ticked."""


@lru_cache(512)
def _last_known(run_id: str) -> LastResult[Listed, Counter[str]]:
    return LastResult()


def known_metrics(library: Library, runs: Sequence[Run]) -> list[str]:
    """Returns the metrics of the runs, those of the most runs first."""
    counts = Counter[str]()
    for run in runs:
        found = _last_known(run.id).of(library.checkpoints(run), lambda all_: metrics_among(info for _, info in all_))
        counts.update(found.keys())
    return sorted(counts, key=lambda name: (-counts[name], name))


def metric_columns(library: Library, query: TableQuery) -> list[MetricColumn]:
    """Returns the columns of a query.

    Raises:
        KeepError: a part of `query.best` names no direction.
    """
    chosen: dict[str, Mode] = {one.metric: one.mode for one in map(choice_of, query.best) if one is not None}
    names = [name for name in dict.fromkeys(query.metric) if name]
    listed = [(run, library.checkpoints(run)) for run in library.runs]
    policies = [policies_of(library, each) for _, each in listed]
    if not names:
        summaries = (summarize_run(run, each, own) for (run, each), own in zip(listed, policies, strict=True))
        standing = Counter(name for one in summaries if (name := first_metric(one.metrics)) is not None)
        names = [*chosen, *(name for name, _ in standing.most_common(DEFAULT_COLUMNS))]
    return [
        MetricColumn(name, chosen.get(name) or agreed_mode(name, policies), name in chosen)
        for name in list(dict.fromkeys(names))[:MAX_COLUMNS]
    ]


@lru_cache(512)
def _last_cells(run_id: str) -> LastResults[Listed, tuple[str, Mode | None], MetricCell]:
    return LastResults(64)


def metric_cells(run: Run, listed: Listed, columns: Sequence[MetricColumn]) -> list[MetricCell]:
    """Returns the cells of a run, one for each column; computed once for a list of checkpoints."""
    last = _last_cells(run.id)
    return [last.of(listed, (one.metric, one.mode), partial(_cell, listed, one.metric, one.mode)) for one in columns]


def _cell(listed: Listed, metric: str, mode: Mode | None) -> MetricCell:
    found = run_metric([info for _, info in listed], metric, mode)

    def parts(value: MetricValue | None) -> tuple[float | str | None, int | None, str | None]:
        if value is None:
            return None, None, None
        checkpoint_id = next(i for i, info in listed if info is value.info)
        return json_number(value.value), value.info.step, checkpoint_id

    return MetricCell(*parts(found.last), *parts(found.best))


def shown_columns(columns: Sequence[MetricColumn], cells: Mapping[str, Sequence[MetricCell]]) -> list[MetricColumn]:
    """Returns the columns with the runs that have the best value, and with names of a length that a page can show.

    Args:
        cells: of each run, by its id.
    """
    shown: list[MetricColumn] = []
    for at, one in enumerate(columns):
        rated = {run: float(row[at].best or 0) for run, row in cells.items() if row[at].best is not None}
        best = (max if one.mode == "max" else min)(rated.values(), default=0.0)
        best_runs = [run for run, value in rated.items() if value == best and len(rated) > 1]
        shown.append(msgspec.structs.replace(one, metric=shorten(one.metric), best_runs=best_runs))
    return shown
