"""Columns of integers as nested arithmetic runs: how an index of 16,384 ranks stays small.

A run is `(start, step, count, step, count, ...)`, innermost first: the numbers `start + i * step` for i < count,
that whole block again moved by the next step, and so on. The file of every cell of a regular 2-D sharding, or its
transpose, is one run; an irregular column is still exact, at most 1.5 integers an entry.

Encoding finds maximal arithmetic runs from left to right, then does the same with the starts of neighbouring
runs that have equal tails, until nothing gets shorter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...errors import FormatError

__all__ = [
    "Run",
    "Runs",
    "bounds_of",
    "check_rising",
    "check_runs",
    "constant",
    "decode_runs",
    "encode_runs",
    "length_of",
    "value_at",
]

Run = tuple[int, ...]
Runs = tuple[Run, ...]

MAX_LENGTH = 1 << 24
"""A column longer than this is refused before it is expanded: a hostile index may claim any count."""
MAX_VALUE = 1 << 62
"""Numbers of a column are below this, so that sums of two fit an int64."""
_FEW = 64
"""Numbers up to which plain integers are faster than vectors."""
_MAX_LEVELS = MAX_LENGTH.bit_length()
"""Each level of a run at least doubles its length."""


def constant(value: int, count: int) -> Runs:
    """The column of `count` equal numbers."""
    return encode_runs(np.full(count, value, np.int64)) if count < 2 else ((value, 0, count),)


def encode_runs(values: Sequence[int] | np.ndarray) -> Runs:
    """The runs whose expansion is `values`."""
    column = np.asarray(values, dtype=np.int64)
    runs: list[Run] = [(start, step, count) if count > 1 else (start,) for start, step, count in _arithmetic(column)]
    while True:
        folded = _fold(runs)
        if len(folded) == len(runs):
            return tuple(folded)
        runs = folded


def _arithmetic(column: np.ndarray) -> list[tuple[int, int, int]]:
    """Maximal arithmetic runs, greedily from the left: (start, step, count)."""
    n = len(column)
    if n <= _FEW:
        return _arithmetic_few(column.tolist())
    steps = np.diff(column)
    # the last position of each stretch of equal steps
    ends = np.append(np.flatnonzero(steps[1:] != steps[:-1]), n - 2)
    runs: list[tuple[int, int, int]] = []
    at = 0
    for end in ends.tolist():
        if end < at:
            continue
        runs.append((int(column[at]), int(steps[at]), end - at + 2))
        at = end + 2
    if at == n - 1:
        runs.append((int(column[at]), 0, 1))
    return runs


def _arithmetic_few(values: list[int]) -> list[tuple[int, int, int]]:
    """The same for a column that is not worth vectors."""
    runs: list[tuple[int, int, int]] = []
    at, n = 0, len(values)
    while at < n - 1:
        end, step = at + 1, values[at + 1] - values[at]
        while end + 1 < n and values[end + 1] - values[end] == step:
            end += 1
        runs.append((values[at], step, end - at + 1))
        at = end + 1
    if at < n:
        runs.append((values[at], 0, 1))
    return runs


def _fold(runs: list[Run]) -> list[Run]:
    """Joins neighbours with equal tails whose starts are arithmetic."""
    folded: list[Run] = []
    at = 0
    while at < len(runs):
        tail = runs[at][1:]
        end = at + 1
        while end < len(runs) and runs[end][1:] == tail:
            end += 1
        if end - at == 1 or not tail:
            folded += runs[at:end]
        else:
            starts = np.array([run[0] for run in runs[at:end]], dtype=np.int64)
            for start, step, count in _arithmetic(starts):
                folded.append((start, *tail, step, count) if count > 1 else (start, *tail))
        at = end
    return folded


def _run_length(run: Run) -> int:
    return math.prod(run[2::2])


def length_of(runs: Runs) -> int:
    """How many numbers the column holds."""
    return sum(map(_run_length, runs))


def bounds_of(runs: Runs) -> tuple[int, int]:
    """The smallest and the largest number of a column that has any, without expanding it."""
    return min(_run_bounds(run)[0] for run in runs), max(_run_bounds(run)[1] for run in runs)


def _run_bounds(run: Run) -> tuple[int, int]:
    reach = [step * (count - 1) for step, count in zip(run[1::2], run[2::2], strict=True)]
    return run[0] + sum(r for r in reach if r < 0), run[0] + sum(r for r in reach if r > 0)


def check_runs(
    runs: Runs, *, path: str, length: int | None = None, low: int = -MAX_VALUE, high: int = MAX_VALUE
) -> None:
    """Refuses a column that is malformed, not `length` long or not within `low <= number < high`; expands nothing.

    Raises:
        FormatError: naming `path`.
    """
    if len(runs) == 1 and len(runs[0]) == 3:  # nearly all columns of an index are one such run
        start, step, count = runs[0]
        last = start + step * (count - 1)
        fits = length is None or length == count
        if fits and 2 <= count <= MAX_LENGTH and low <= start < high and low <= last < high:
            return
    total = 0
    for run in runs:
        if len(run) == 3:
            start, step, count = run
            last = start + step * (count - 1)
            if count >= 2 and low <= start < high and low <= last < high:
                total += count
                continue
        counts = run[2::2]
        if len(run) % 2 == 0 or len(counts) > _MAX_LEVELS or any(count < 2 for count in counts):
            raise FormatError(path, expected="runs (start, step, count, ...)", found=f"{run[:8]!r:.80}")
        least, most = _run_bounds(run)
        if least < low or most >= high:
            raise FormatError(path, expected=f"numbers from {low} to {high - 1}", found=f"{least} to {most}")
        total += _run_length(run)
    if total > MAX_LENGTH or (length is not None and total != length):
        wanted = f"at most {MAX_LENGTH}" if length is None else length
        raise FormatError(path, expected=f"a column of {wanted} numbers", found=f"{total}")


def check_rising(runs: Runs, first: int, last: int) -> bool:
    """Whether the column rises strictly from `first` to `last`; expands nothing."""
    before = first - 1
    for run in runs:
        reach = 0
        for step, count in zip(run[1::2], run[2::2], strict=True):
            if step <= reach:
                return False
            reach += step * (count - 1)
        if run[0] <= before:
            return False
        before = run[0] + reach
    return bool(runs) and runs[0][0] == first and before == last


def decode_runs(runs: Runs) -> np.ndarray:
    """The column, int64[length]."""
    parts: list[np.ndarray] = []
    for run in runs:
        part = np.full(1, run[0], dtype=np.int64)
        for step, count in zip(run[1::2], run[2::2], strict=True):
            part = (np.arange(count, dtype=np.int64)[:, None] * step + part).reshape(-1)
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def value_at(runs: Runs, index: int) -> int:
    """One number of the column, without expanding it."""
    if len(runs) != 1:
        ends = list(accumulate(map(_run_length, runs)))
        which = bisect_right(ends, index)
        if which == len(runs):
            raise IndexError(index)
        index -= ends[which - 1] if which else 0
        run = runs[which]
    else:
        [run] = runs
    value = run[0]
    for step, count in zip(run[1::2], run[2::2], strict=True):
        index, i = divmod(index, count)
        value += i * step
    if index:
        raise IndexError(index)
    return value
