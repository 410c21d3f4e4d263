"""Columns of integers as nested arithmetic runs. They keep the index of 16,384 ranks small.

A run is `(start, step, count, step, count, ...)`, innermost first: the numbers `start + i * step` for i < count,
then this block repeated `count` times at the next step, and so on. The file of every cell of a regular 2-D sharding,
or its transpose, is one run; an irregular column is still exact, with at most 1.5 integers an entry.

Encoding finds maximal arithmetic runs from left to right, then does the same with the starts of neighbouring
runs that have the same steps and counts, until the list gets no shorter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...errors import FormatError

Run = tuple[int, ...]
Runs = tuple[Run, ...]

MAX_LENGTH = 1 << 24
"""A longer column is refused before it is expanded: a hostile index may contain any count."""
MAX_VALUE = 1 << 62
"""The numbers of a column are below this, so that the sum of two fits an int64."""
_SHORT_COLUMN = 64
"""The length up to which Python integers are faster than numpy."""
_MAX_LEVELS = MAX_LENGTH.bit_length()
"""The largest number of levels of a run: each at least doubles its length."""


def encode_runs(values: Sequence[int] | np.ndarray) -> Runs:
    """Returns the runs whose expansion is `values`."""
    if len(values) == 1:  # most columns of a small index; the rest takes eight times as long for it
        return ((int(values[0]),),)
    column = np.asarray(values, dtype=np.int64)
    runs: list[Run] = [
        (start, step, count) if count > 1 else (start,) for start, step, count in _arithmetic_runs(column)
    ]
    while True:
        folded = _nest_runs(runs)
        if len(folded) == len(runs):
            return tuple(folded)
        runs = folded


def _arithmetic_runs(column: np.ndarray) -> list[tuple[int, int, int]]:
    """Returns maximal arithmetic runs, found greedily from the left, as (start, step, count)."""
    n = len(column)
    if n <= _SHORT_COLUMN:
        return _arithmetic_runs_short(column.tolist())
    steps = np.diff(column)
    # the last position of each range of equal steps
    ends = np.append(np.flatnonzero(steps[1:] != steps[:-1]), n - 2)
    runs: list[tuple[int, int, int]] = []
    start = 0
    for end in ends.tolist():
        # a single step from a number that the run before has taken
        if end < start:
            continue
        runs.append((int(column[start]), int(steps[start]), end - start + 2))
        start = end + 2
    if start == n - 1:
        runs.append((int(column[start]), 0, 1))
    return runs


def _arithmetic_runs_short(values: list[int]) -> list[tuple[int, int, int]]:
    """As `_arithmetic_runs`, for a short column."""
    runs: list[tuple[int, int, int]] = []
    first, n = 0, len(values)
    while first < n - 1:
        end, step = first + 1, values[first + 1] - values[first]
        while end + 1 < n and values[end + 1] - values[end] == step:
            end += 1
        runs.append((values[first], step, end - first + 1))
        first = end + 1
    if first < n:
        runs.append((values[first], 0, 1))
    return runs


def _nest_runs(runs: list[Run]) -> list[Run]:
    """Joins neighbours with equal steps and counts whose starts are arithmetic into runs of one more level."""
    folded: list[Run] = []
    first = 0
    while first < len(runs):
        tail = runs[first][1:]
        end = first + 1
        while end < len(runs) and runs[end][1:] == tail:
            end += 1
        if end - first == 1 or not tail:
            folded += runs[first:end]
        else:
            starts = np.array([run[0] for run in runs[first:end]], dtype=np.int64)
            for start, step, count in _arithmetic_runs(starts):
                folded.append((start, *tail, step, count) if count > 1 else (start, *tail))
        first = end
    return folded


def _run_length(run: Run) -> int:
    return math.prod(run[2::2])


def length_of(runs: Runs) -> int:
    """Returns the number of integers in the column."""
    return sum(map(_run_length, runs))


def check_runs(
    runs: Runs, *, path: str, length: int | None = None, low: int = -MAX_VALUE, high: int = MAX_VALUE
) -> None:
    """Refuses a column that is malformed, not `length` long or not within `low <= number < high`; expands nothing.

    Raises:
        FormatError: naming `path`.
    """
    if len(runs) == 1 and len(runs[0]) == 3:  # most columns of an index are one such run
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
        reach = [step * (count - 1) for step, count in zip(run[1::2], counts, strict=True)]
        least, most = run[0] + sum(r for r in reach if r < 0), run[0] + sum(r for r in reach if r > 0)
        if least < low or most >= high:
            raise FormatError(path, expected=f"numbers from {low} to {high - 1}", found=f"{least} to {most}")
        total += _run_length(run)
    if total > MAX_LENGTH or (length is not None and total != length):
        wanted = f"at most {MAX_LENGTH}" if length is None else length
        raise FormatError(path, expected=f"a column of {wanted} numbers", found=f"{total}")


def rises_strictly(runs: Runs, first: int, last: int) -> bool:
    """Returns whether the column rises strictly from `first` to `last`; expands nothing."""
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
    """Returns the column, int64[length]."""
    parts: list[np.ndarray] = []
    for run in runs:
        part = np.array(run[:1], dtype=np.int64)
        for step, count in zip(run[1::2], run[2::2], strict=True):
            part = (np.arange(count, dtype=np.int64)[:, None] * step + part).reshape(-1)
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def value_at(runs: Runs, index: int) -> int:
    """Returns one number of the column, without expanding it."""
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
