"""What the metrics of a run say: the last value of each, and the best where it is known which way is better.

Checkpoints of the present branch alone count. The last value may be of any complete one; the best is of a good one:
complete, not known to be damaged, and healthy. Which way is better is never guessed from the name of a metric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ..policy import Best, Policy, best_among
from .catalog import CheckpointInfo

Mode = Literal["min", "max"]
MAX_METRIC_NAME = 200
"""Characters of the name of a metric that has a column; a longer one has none."""


class MetricValue(msgspec.Struct, frozen=True):
    """A value of a metric, and the checkpoint that was saved with it."""

    value: float
    info: CheckpointInfo


class RunMetric(msgspec.Struct, frozen=True):
    """One metric of a run."""

    metric: str
    mode: Mode | None
    """Whether the lowest or the highest value is the best; None where that is not known."""
    last: MetricValue | None
    """Of the newest complete checkpoint that has the metric; it may be NaN."""
    best: MetricValue | None
    """Of the good checkpoints; of equal ones the newest. None without a mode."""


def is_good(info: CheckpointInfo) -> bool:
    """Whether a run can be resumed from it: complete, intact and healthy as far as known, and not abandoned."""
    return info.status == "complete" and not info.abandoned and not info.unhealthy


def best_checkpoint(infos: Iterable[CheckpointInfo], policy: Best) -> CheckpointInfo | None:
    """Returns the good checkpoint with the best metric, of equal ones the first; None if none has the metric.

    Args:
        infos: of a run, newest first.
    """
    rated = [info for info in infos if policy.metric in info.metrics and is_good(info)]
    pick = min if policy.mode == "min" else max
    return pick(rated, key=lambda info: info.metrics[policy.metric], default=None)


def agreed_mode(metric: str, policies: Iterable[Sequence[Policy]]) -> Mode | None:
    """Returns which way is better by the policies of several runs; None where none says that, or they differ."""
    modes: set[Mode] = set()
    for each in policies:
        modes |= {one.mode for one in best_among(each) if one.metric == metric}
    return modes.pop() if len(modes) == 1 else None


def run_metric(infos: Sequence[CheckpointInfo], metric: str, mode: Mode | None) -> RunMetric:
    """Returns the last and the best value of a metric.

    Args:
        infos: of a run, newest first.
    """
    present = (info for info in infos if info.files == "complete" and not info.abandoned)
    last = next((info for info in present if metric in info.metrics), None)
    best = best_checkpoint(infos, Best(metric, mode=mode)) if mode is not None else None
    return RunMetric(metric, mode, _value(last, metric), _value(best, metric))


def _value(info: CheckpointInfo | None, metric: str) -> MetricValue | None:
    return MetricValue(info.metrics[metric], info) if info is not None else None


def metrics_among(infos: Iterable[CheckpointInfo]) -> Counter[str]:
    """Counts the checkpoints that have each metric; names that are too long for a column are left out."""
    return Counter(name for info in infos for name in info.metrics if len(name) <= MAX_METRIC_NAME)


def parse_metric(text: str) -> tuple[str, Mode | None]:
    """Parses a metric and which way is better, as `loss:min`; a name alone says nothing of that."""
    name, _, mode = text.rpartition(":")
    if name and mode == "min":
        return name, "min"
    return (name, "max") if name and mode == "max" else (text, None)


def in_value_order(values: Sequence[float | str | None], *, largest_first: bool = False) -> list[int]:
    """Returns the positions of values in the order of a sorted table: what is missing or NaN is last either way."""
    known: list[int] = []
    rest: list[int] = []
    for at, value in enumerate(values):
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        (rest if missing else known).append(at)
    return sorted(known, key=lambda at: values[at], reverse=largest_first) + rest  # pyright: ignore
