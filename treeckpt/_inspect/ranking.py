"""Ranks arrays: by how unusual their numbers are, and with their layers by how far they moved.

Unusual are NaN and infinity first, then zeros, then others. An array is compared with those whose paths differ in
numbers only, as the weights of one kind in all layers. How large its numbers are, and how far the largest one stands
out, is measured by decimal logarithms, against the group's medians. How far an array moved is measured relative to its
size. What an optimizer keeps is ranked apart from the parameters: its moments change by far more from step to step, and
would hide what the parameters do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from numpy.typing import ArrayLike

MIN_GROUP = 4
"""Arrays that a group needs to be compared with."""
UNUSUAL_FACTOR = 4.0
"""A root mean square so many times the group's median, or one part in so many of it, is unusual."""
UNUSUAL_PEAK = 50.0
"""A largest value so many times the root mean square is unusual where it is UNUSUAL_FACTOR times that of the group."""
ZERO_SCORE, NOT_FINITE_SCORE = 1e3, 1e6
_LAYER = re.compile(r"(.*?(?:^|[/._])[0-9]+)(?:[/.]|$)")
"""A path up to its first key or module name that is a number."""
_OPTIMIZER = re.compile(
    r"(?:^|[/.])(?:optim\w*|opt_state\w*|(?:max_)?exp_avg(?:_sq)?|exp_inf|momentum_buffer|(?:square|grad)_avg|acc_delta)"
    r"(?:[/.]|$)",
    re.IGNORECASE,
)
"""A key or module name of the state of an optimizer, or the name of a moment."""


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
        # The quotient is at most the root of the count: what is above that is an error of rounding.
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
    score = np.where(apart >= np.log10(UNUSUAL_FACTOR), apart, 0.0)
    score = np.maximum(
        score, np.where((peak >= UNUSUAL_PEAK) & (stands_out >= np.log10(UNUSUAL_FACTOR)), stands_out, 0.0)
    )
    score += ZERO_SCORE * (zero & (np.nan_to_num(zeros) < 0.5) & (columns["count"] > 1))
    bad = columns["nan"] + columns["infinite"]
    score += np.where(bad > 0, NOT_FINITE_SCORE * (1 + bad / np.maximum(columns["count"], 1)), 0.0)
    # among those that are as expected, the ones furthest from their group come first
    return Ranking(np.lexsort((-np.nan_to_num(apart), -score)), score, factor, peak)


def _typical(values: np.ndarray, group: np.ndarray, groups: int, use: np.ndarray) -> np.ndarray:
    """Returns the median of each row's group; NaN where fewer than MIN_GROUP rows of it are used."""
    rows = np.flatnonzero(use)
    rows = rows[np.lexsort((values[rows], group[rows]))]
    starts = np.searchsorted(group[rows], np.arange(groups))
    counts = np.diff(np.append(starts, len(rows)))
    medians = np.full(groups, np.nan)
    enough = counts >= MIN_GROUP
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
    if max(factor, 1 / factor) >= UNUSUAL_FACTOR:
        many = f"{_times(factor)} ×" if factor > 1 else f"1/{_times(1 / factor)} of"
        return f"RMS {many} that of like arrays"
    return f"largest value {_times(peak)} × the RMS"


def _times(factor: float) -> str:
    """Formats a factor to three digits, below a billion without an exponent."""
    return f"{factor:.3g}" if factor < 999.5 or factor >= 1e9 else f"{float(f'{factor:.3g}'):,.0f}"


class LayerChange(msgspec.Struct, frozen=True):
    """How far the arrays of one layer moved together, as one vector."""

    layer: str
    arrays: int
    changed: int
    """Arrays of which a bit differs."""
    before: float
    """The Euclidean norm before; `after` likewise."""
    after: float
    change: float
    """The Euclidean norm of the difference."""
    cosine: float | None
    """The cosine of the angle between the values before and after; None where one of them is zero."""
    not_finite: int
    """Changed elements of which one is infinite or not a number."""

    @property
    def relative(self) -> float:
        """The norm of the difference over the norm; infinity if that is zero, or if elements are not finite."""
        return float(relative_changes(self.before, self.change, self.not_finite))


def layer_of(path: str) -> str:
    """Returns the part of a path that names its layer: up to the first number, or else up to the last key."""
    match = _LAYER.match(path)
    return match[1] if match is not None else path.rpartition("/")[0]


def is_optimizer_state(path: str) -> bool:
    """Whether an array is state of an optimizer by its path, as `optimizer/state/0/exp_avg` or `emb/slots/exp_avg`."""
    return _OPTIMIZER.search(path) is not None


def relative_changes(before: ArrayLike, change: ArrayLike, not_finite: ArrayLike) -> np.ndarray:
    """Returns change over norm; infinity where elements became or were not finite, or where zeros changed."""
    with np.errstate(all="ignore"):
        relative = np.where(np.equal(change, 0), 0.0, np.divide(change, before))
    return np.where(np.greater(not_finite, 0) | np.isnan(relative), np.inf, relative)


def layer_changes(paths: Iterable[str], columns: Mapping[str, np.ndarray]) -> list[LayerChange]:
    """Returns the changes of all layers, the largest relative one first.

    Args:
        paths: of the rows.
        columns: `changed`, `not_finite`, `before`, `after`, `change` and `cosine` of each array.
    """
    numbers: dict[str, int] = {}
    group = np.array([numbers.setdefault(layer_of(path), len(numbers)) for path in paths], np.int64)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(group, values, len(numbers))

    if not len(group):
        return []
    with np.errstate(all="ignore"):
        norms = {name: np.sqrt(total(np.square(columns[name]))) for name in ("before", "after", "change")}
        dots = np.where(np.isnan(columns["cosine"]), 0.0, columns["cosine"]) * columns["before"] * columns["after"]
        cosine = np.clip(total(dots) / (norms["before"] * norms["after"]), -1.0, 1.0)
    changes = [
        LayerChange(
            layer=layer,
            arrays=int(arrays),
            changed=int(changed),
            before=float(norms["before"][number]),
            after=float(norms["after"][number]),
            change=float(norms["change"][number]),
            cosine=float(cosine[number]) if np.isfinite(cosine[number]) else None,
            not_finite=int(not_finite),
        )
        for (layer, number), arrays, changed, not_finite in zip(
            numbers.items(),
            total(np.ones(len(group))),
            total(columns["changed"] > 0),
            total(columns["not_finite"]),
            strict=True,
        )
    ]
    return sorted(changes, key=lambda one: (-one.relative, one.layer))
