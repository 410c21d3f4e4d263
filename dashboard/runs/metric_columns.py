"""The metrics of a run's checkpoints: which ones are columns, which values are the best, and the search by value."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from treeckpt._runs.catalog import CheckpointInfo
from treeckpt.policy import Best, Policy

COLUMNS = 4
"""Metrics that have a column in a list of checkpoints."""
MAX_NAME = 200
"""Characters of the name of a metric that has a column."""
_CONDITION = re.compile(r"(.+?)(<=|>=|<|>|=)([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|inf|nan))")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "=": lambda a, b: a == b or (math.isnan(a) and math.isnan(b)),
}


def metric_names(infos: Iterable[CheckpointInfo], policies: Sequence[Policy]) -> list[str]:
    """Returns the metrics that have columns: those that policies name, then those that most checkpoints have."""
    found = Counter(name for info in infos for name in info.metrics if len(name) <= MAX_NAME)
    named = [policy.metric for policy in policies if isinstance(policy, Best) and policy.metric in found]
    return list(dict.fromkeys([*named, *(name for name, _ in found.most_common(COLUMNS))]))[:COLUMNS]


def first_metric(names: Sequence[str]) -> str | None:
    """Returns the metric that stands for a run: its loss, or the first that has a column."""
    return "loss" if "loss" in names else next(iter(names), None)


def best_marks(
    infos: Sequence[CheckpointInfo], names: Sequence[str], policies: Sequence[Policy]
) -> dict[str, dict[str, str]]:
    """Returns, by the name of a checkpoint and of a metric, what its value is among those of the complete checkpoints.

    It is "best" by a policy for the metric. Where no policy says which way is better, it is "lowest" or "highest".
    Abandoned branches, and metrics that have one value only, are left out.
    """
    marks: dict[str, dict[str, str]] = {}
    for name in names:
        rated = [
            (info.metrics[name], info.name)
            for info in infos
            if info.status == "complete" and not info.abandoned and not math.isnan(info.metrics.get(name, math.nan))
        ]
        if len({value for value, _ in rated}) < 2:
            continue
        modes = {policy.mode for policy in policies if isinstance(policy, Best) and policy.metric == name}
        for mode, pick, text in (("min", min, "lowest"), ("max", max, "highest")):
            if not modes or mode in modes:
                # of equal ones the newest, which is the first in a list
                value = pick(value for value, _ in rated)
                best = next(one for other, one in rated if other == value)
                marks.setdefault(best, {})[name] = "best" if modes else text
    return marks


def metric_value(info: CheckpointInfo, name: str) -> float | None:
    """Returns a metric of a checkpoint; None if it has none, or NaN."""
    value = info.metrics.get(name, math.nan)
    return None if math.isnan(value) else value


def condition_of(word: str) -> Callable[[CheckpointInfo], bool] | None:
    """Parses a word of a search that compares a metric, as `loss<2.5`; None for any other word."""
    if (match := _CONDITION.fullmatch(word)) is None:
        return None
    try:
        wanted = float(match[3])
    except ValueError:
        return None
    name, compare = match[1].casefold(), _COMPARISONS[match[2]]
    return lambda info: any(compare(value, wanted) for key, value in info.metrics.items() if key.casefold() == name)
