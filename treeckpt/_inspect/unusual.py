"""Orders the arrays of a checkpoint by how unusual their numbers are: NaN and infinity first, then zeros, then others.

An array is compared with those whose paths differ in numbers only, as the weights of one kind in all layers. How large
its numbers are, and how far the largest one stands out, is measured by decimal logarithms, against the group's medians.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

ALIKE = 4
"""Arrays that a group needs to be compared with."""
FACTOR = 4.0
"""A root mean square so many times the group's median, or one part in so many of it, is unusual."""
PEAK = 50.0
"""So is a largest value so many times the root mean square, where it is FACTOR times that of the group."""
ZERO_SCORE, NOT_FINITE_SCORE = 1e3, 1e6


class Ranking(msgspec.Struct, frozen=True):
    """The rows of a table of statistics, the most unusual first."""

    order: np.ndarray
    """int64[rows]: the numbers of the rows."""
    score: np.ndarray
    """float64[rows], by row number: 0 for what is as expected."""
    factor: np.ndarray
    """float64[rows]: root mean square over that of the group; 1 where there is no group."""
    peak: np.ndarray
    """float64[rows]: largest absolute value over root mean square; 0 for zeros."""


def group_of(path: str) -> str:
    """Returns a path with each number in it replaced by `#`."""
    return re.sub("[0-9]+", "#", path)


def rank_unusual(paths: Iterable[str], columns: Mapping[str, np.ndarray]) -> Ranking:
    """Ranks rows of statistics.

    Args:
        paths: of the rows.
        columns: `count`, `nan`, `infinite`, `low`, `high` and `norm` of each row, see `Moments`.
    """
    groups: dict[str, int] = {}
    group = np.array([groups.setdefault(group_of(path), len(groups)) for path in paths], np.int64)
    finite = columns["count"] - columns["nan"] - columns["infinite"]
    some = np.maximum(finite, 1)
    with np.errstate(all="ignore"):
        rms = np.where(finite > 0, columns["norm"] / np.sqrt(some), 0.0)
        largest = np.where(finite > 0, np.maximum(np.abs(columns["low"]), np.abs(columns["high"])), 0.0)
        peak = np.where(rms > 0, np.minimum(largest / rms, np.sqrt(some)), 0.0)
        zero = (finite > 0) & (largest == 0)
        size_typical, peak_typical, zeros = (
            _typical(values, group, len(groups), use)
            for values, use in ((np.log10(rms), rms > 0), (np.log10(peak), peak > 0), (zero * 1.0, finite > 0))
        )
        distance = np.where((rms > 0) & np.isfinite(size_typical), np.log10(rms) - size_typical, 0.0)
        factor = 10.0 ** np.clip(distance, -300, 300)  # the distance of two float64 reaches 632
        apart = np.abs(distance)
        stands_out = np.log10(np.maximum(peak, 1e-300)) - np.nan_to_num(peak_typical)
    score = np.where(apart >= np.log10(FACTOR), apart, 0.0)
    score = np.maximum(score, np.where((peak >= PEAK) & (stands_out >= np.log10(FACTOR)), stands_out, 0.0))
    score += ZERO_SCORE * (zero & (np.nan_to_num(zeros) < 0.5) & (columns["count"] > 1))
    bad = columns["nan"] + columns["infinite"]
    score += np.where(bad > 0, NOT_FINITE_SCORE * (1 + bad / np.maximum(columns["count"], 1)), 0.0)
    # among those that are as expected, the ones furthest from their group come first
    return Ranking(np.lexsort((-np.nan_to_num(apart), -score)), score, factor, peak)


def _typical(values: np.ndarray, group: np.ndarray, groups: int, use: np.ndarray) -> np.ndarray:
    """Returns the median of each row's group; NaN where fewer than ALIKE rows of it are used."""
    rows = np.flatnonzero(use)
    rows = rows[np.lexsort((values[rows], group[rows]))]
    starts = np.searchsorted(group[rows], np.arange(groups))
    counts = np.diff(np.append(starts, len(rows)))
    medians = np.full(groups, np.nan)
    enough = counts >= ALIKE
    middle = starts[enough] + counts[enough] // 2
    medians[enough] = values[rows[middle]]
    return medians[group]


def reason_of(ranking: Ranking, row: int, nan: int, infinite: int) -> str:
    """Returns why a row is unusual, in a few words; empty if it is not."""
    if nan or infinite:
        parts = [f"{count:,} {name}" for count, name in ((nan, "NaN"), (infinite, "Inf")) if count]
        return ", ".join(parts)
    if ranking.score[row] >= ZERO_SCORE:
        return "all zero"
    if not ranking.score[row]:
        return ""
    factor, peak = float(ranking.factor[row]), float(ranking.peak[row])
    if max(factor, 1 / factor) >= FACTOR:
        many = f"{_times(factor)} ×" if factor > 1 else f"1/{_times(1 / factor)} of"
        return f"RMS {many} that of like arrays"
    return f"largest value {_times(peak)} × the RMS"


def _times(factor: float) -> str:
    """Formats a factor to three digits, below a billion without an exponent."""
    return f"{factor:.3g}" if factor < 999.5 or factor >= 1e9 else f"{float(f'{factor:.3g}'):,.0f}"
