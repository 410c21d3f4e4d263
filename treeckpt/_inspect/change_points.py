"""Finds since when durations are longer or shorter than before.

A series of durations is a sequence of levels. The levels are those with the least sum of two costs: each number costs
the square of its distance from its level, at most that of `OUTLIER` times the noise, and each change of the level costs
`CHANGE_COST` of such outliers. So a single slow save changes nothing, however slow it is, and a row of slow saves is a
level. Distances are those of logarithms: a level twice as high counts the same at a millisecond and at a minute.
The least sum is found exactly for levels on a grid, by dynamic programming over the numbers (Fearnhead and Rigaill,
2019, "Changepoint detection in the presence of outliers").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from .profile import nearest_rank

OUTLIER = 3.0
"""The distance from which on all distances count the same, in units of the noise."""
CHANGE_COST = 2.5
"""The number of outliers that cost as much as a change of the level: three slow saves at the end are a level."""
MIN_RATIO = 1.25
"""The factor by which neighbouring levels differ at least."""
MIN_NOISE = float(np.log(MIN_RATIO)) / OUTLIER
"""The least noise that is assumed: with less, levels that differ by less than MIN_RATIO would be told apart."""
GRID = 512
"""The number of levels that are tried, at most."""


class Level(msgspec.Struct, frozen=True):
    """A part of a series of durations in which they stay the same, but for noise and outliers."""

    start: int
    """The position of its first number."""
    stop: int
    median: float


def levels_of(seconds: Sequence[float]) -> list[Level]:
    """Returns the levels of a series of durations, in its order; neighbours differ by MIN_RATIO at least."""
    values = np.log(np.maximum(np.asarray(seconds, np.float64), 1e-9))
    if not len(values):
        return []
    levels: list[Level] = []
    edges = [0, *_changes(values), len(values)]
    for start, stop in itertools.pairwise(edges):
        level = _level(values, start, stop)
        if levels and max(level.median / levels[-1].median, levels[-1].median / level.median) < MIN_RATIO:
            level = _level(values, levels.pop().start, stop)
        levels.append(level)
    return levels


def _level(values: np.ndarray, start: int, stop: int) -> Level:
    return Level(start, stop, float(np.exp(nearest_rank(values[start:stop], 0.5))))


def _changes(values: np.ndarray) -> list[int]:
    """Returns the positions at which the level changes."""
    steps = np.abs(np.diff(values))
    # of neighbours, which have the same level but for a few of them: the noise of a difference is that of two numbers
    noise = max(MIN_NOISE, 1.4826 / np.sqrt(2) * float(np.median(steps))) if len(steps) else MIN_NOISE
    low, high = float(values.min()), float(values.max())
    grid = np.linspace(low, high, min(GRID, 1 + int(2 * (high - low) / noise)))
    most = (OUTLIER * noise) ** 2
    cost = np.zeros(len(grid))
    """The least cost of the numbers so far, by the level of the last one."""
    since = np.zeros(len(grid), np.int64)
    """Where that level begins."""
    before: list[int] = []
    """For each position, where the level that ends there begins."""
    for position, value in enumerate(values.tolist()):
        if position:
            best = int(cost.argmin())
            before.append(int(since[best]))
            changed = cost[best] + CHANGE_COST * most < cost
            cost[changed], since[changed] = cost[best] + CHANGE_COST * most, position
        cost += np.minimum((grid - value) ** 2, most)
    changes: list[int] = []
    position = int(since[cost.argmin()])
    while position:
        changes.append(position)
        position = before[position - 1]
    return changes[::-1]
