"""Statistics of arrays that verifications have computed: of one array over the steps of its run, and as rows."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from treeckpt._core.text import json_number
from treeckpt._inspect.numbers import Moments
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.nan_scan import known_statistics
from treeckpt._runs.statistics_store import LeafStatistics

from ..pages.checkpoints import OpenTree, unix_time
from ..store.library import Library
from .chunks import leaf_of, stored_leaf

MAX_STEPS = 500
"""Checkpoints of a run that the chart of one array shows: the newest."""


class LeafNumbers(msgspec.Struct, frozen=True):
    """Statistics of the elements of an array; of complex ones, of their magnitudes. None for what no number holds."""

    count: int
    nan: int
    infinite: int
    minimum: float | str | None
    """Text for an integer beyond 2**53, as `maximum`."""
    maximum: float | str | None
    mean: float | None
    deviation: float | None
    norm: float | None
    """The Euclidean norm."""
    largest: float | None
    """The largest absolute value."""


class ContentsSummary(msgspec.Struct, frozen=True):
    """What the statistics of all arrays say."""

    arrays: int
    elements: int
    not_finite: int
    """Arrays with NaN or infinity."""
    nan: int
    """Elements that are NaN."""
    infinite: int
    unusual: int
    """Arrays that are unusual, those with NaN or infinity among them."""


class LeafSteps(msgspec.Struct, frozen=True):
    """The statistics of the array at one path in the checkpoints of a run, as far as they are known, by step."""

    path: str
    ids: list[str]
    leaves: list[int]
    """The number of the leaf in each of them."""
    step: list[int]
    created: list[float | None]
    """When each was saved, as Unix time in seconds."""
    numbers: list[LeafNumbers]
    unknown: int
    """Checkpoints of which no statistics are known."""


def summarize(found: LeafStatistics) -> ContentsSummary:
    """Returns what the statistics of all arrays say."""
    columns = found.columns
    count, nan, infinite = (int(columns[name].sum()) for name in ("count", "nan", "infinite"))
    not_finite = int(((columns["nan"] + columns["infinite"]) > 0).sum())
    return ContentsSummary(found.head.rows, count, not_finite, nan, infinite, int((columns["score"] > 0).sum()))


def summary_of(library: Library, info: CheckpointInfo) -> ContentsSummary | None:
    """Returns what the statistics of all arrays of a checkpoint say; None if none are known."""
    statistics = known_statistics(info, library.cache.statistics)
    return summarize(statistics) if statistics is not None else None


def leaf_numbers(moments: Moments) -> LeafNumbers:
    """Returns statistics as a page shows them."""
    known = moments.finite > 0
    values = (moments.low, moments.high, moments.mean, moments.deviation, moments.norm, float(moments.largest))
    numbers: list[Any] = [json_number(value) if known and math.isfinite(value) else None for value in values]
    return LeafNumbers(moments.count, moments.nan, moments.infinite, *numbers)


def leaf_steps(tree: OpenTree, number: int) -> LeafSteps:
    """The statistics of the array at the same path in all checkpoints of the run, as far as they are known."""
    library, path = tree.library, stored_leaf(tree.index, leaf_of(tree.index, number)).path
    steps = LeafSteps(path, ids=[], leaves=[], step=[], created=[], numbers=[], unknown=0)
    complete = [
        (i, info)
        for i, info in library.checkpoints(tree.checkpoint.run)
        if info.status == "complete" and not info.abandoned
    ]
    rows = [(info.step, i, info) for i, info in complete[:MAX_STEPS] if info.step is not None]
    for step, checkpoint_id, info in sorted(rows, key=lambda row: row[0]):
        statistics = known_statistics(info, library.cache.statistics)
        row = statistics.row_of(path) if statistics is not None else None
        if statistics is not None and row is not None:
            steps.ids.append(checkpoint_id)
            steps.leaves.append(int(statistics.columns["leaf"][row]))
            steps.step.append(step)
            steps.created.append(unix_time(info.created_ns))
            steps.numbers.append(leaf_numbers(statistics.row(row)))
    return msgspec.structs.replace(steps, unknown=len(rows) - len(steps.ids))
