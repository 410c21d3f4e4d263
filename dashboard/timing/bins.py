"""The time of phases and ranks over many saves, in bins of consecutive saves.

Thousands of saves do not fit a screen. Phases are means over the saves of a bin, so that a trend shows; work of ranks
is the longest in the bin, so that one slow save of many does not vanish. Each bin leads to its longest save.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from treeckpt._core.text import visible

from ..store.reduced_timings import OTHER, ReducedTimings

BINS = 240
"""Bins of one view, at most."""
PHASES = 7
"""Phases that are shown apart, those with the most time in any bin; the others are added up."""
UNITS = 10_000
"""Units into which the longest work is divided, so that columns are short integers."""


class TrendBins(msgspec.Struct, frozen=True):
    """Saves of a run by step in bins; all times but `work` in seconds."""

    saves: int
    """Number of saves in all bins."""
    ids: list[str] = []
    """The longest save of each bin; its step and its duration follow."""
    step: list[int] = []
    longest: list[float] = []
    first: list[int] = []
    """The first step of each bin."""
    last: list[int] = []
    counts: list[int] = []
    """Number of saves of each bin."""
    seconds: list[float] = []
    """Mean duration."""
    phases: list[str] = []
    stack: list[list[float]] = []
    """Mean time on the critical path, by phase and bin: the times of all phases add up to the duration."""
    block: int = 1
    """How many consecutive ranks a line is of."""
    world: int = 0
    unit: float = 1.0
    """Seconds of one unit of `work`."""
    work: list[list[int]] = []
    """Active time by bin and line: the longest of any save and rank; -1 for none."""
    times: list[list[int]] = []
    """The same as hundredths of the work of the median rank in the same save."""


def trend_bins(ids: Sequence[str], steps: Sequence[int], reduced: Sequence[ReducedTimings]) -> TrendBins:
    """Returns saves in bins of equal numbers of them.

    Args:
        ids, steps, reduced: of each save, sorted by step. They are not one list of tuples: ten thousand new tuples a
            request let the collector of garbage visit all that the server holds, for 50 to 150 ms.
    """
    if not reduced:
        return TrendBins(0)
    starts = np.arange(0, len(reduced), -(-len(reduced) // BINS))
    counts = np.diff(np.append(starts, len(reduced)))
    seconds = np.array([one.seconds for one in reduced])
    worst = [int(start + seconds[start : start + count].argmax()) for start, count in zip(starts, counts, strict=True)]
    phases, stack = _phases(reduced, starts, counts)
    block, work = _work(reduced)
    medians = np.array([one.median for one in reduced], np.float32)[:, None]
    times = 100 * np.divide(work, medians, out=np.full_like(work, np.nan), where=medians > 0)
    unit = max(float(np.nanmax(work, initial=0.0)), 1e-9) / UNITS
    return TrendBins(
        saves=len(reduced),
        ids=[ids[n] for n in worst],
        step=[steps[n] for n in worst],
        longest=[reduced[n].seconds for n in worst],
        first=[steps[n] for n in starts.tolist()],
        last=[steps[n] for n in (starts + counts - 1).tolist()],
        counts=counts.tolist(),
        seconds=(np.add.reduceat(seconds, starts) / counts).tolist(),
        phases=[visible(name) for name in phases],
        stack=stack.T.tolist(),
        block=block,
        world=max(one.world for one in reduced),
        unit=unit,
        work=_integers(np.fmax.reduceat(work, starts, axis=0) / unit),
        times=_integers(np.fmax.reduceat(times, starts, axis=0)),
    )


def _phases(reduced: Sequence[ReducedTimings], starts: np.ndarray, counts: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Returns the names of the phases, and float64[bins, phases] with the mean time of each."""
    kinds = {one.names for one in reduced}
    column = {name: n for n, name in enumerate(sorted(set().union(*kinds)))}
    columns = {names: [column[name] for name in names] for names in kinds}
    matrix = np.zeros((len(reduced), len(column)))
    rows = np.repeat(np.arange(len(reduced)), [len(one.names) for one in reduced])
    found = np.fromiter(itertools.chain.from_iterable(columns[one.names] for one in reduced), np.intp, len(rows))
    matrix[rows, found] = np.frombuffer(b"".join(one.times for one in reduced), "<f8")
    means = np.add.reduceat(matrix, starts, axis=0) / counts[:, None]
    most = means.max(axis=0)
    names = sorted(column, key=lambda name: (name == OTHER, -most[column[name]]))
    if len(names) <= PHASES + 1:
        return names, means[:, [column[name] for name in names]]
    shown = means[:, [column[name] for name in names[:PHASES]]]
    rest = means[:, [column[name] for name in names[PHASES:]]].sum(axis=1, keepdims=True)
    return [*names[:PHASES], OTHER], np.hstack([shown, rest])


def _work(reduced: Sequence[ReducedTimings]) -> tuple[int, np.ndarray]:
    """Returns how many ranks a line is of, and float32[saves, lines] with the longest work of each line."""
    block = max(one.block for one in reduced)
    lines = -(-max(one.world for one in reduced) // block)
    if all(one.block == block and len(one.work) == 2 * lines for one in reduced):
        return block, np.frombuffer(b"".join(one.work for one in reduced), "<f2").reshape(-1, lines).astype(np.float32)
    work = np.full((len(reduced), lines), np.nan, np.float32)
    for row, one in zip(work, reduced, strict=True):
        own = one.lines(block)
        row[: len(own)] = own
    return block, work


def _integers(values: np.ndarray) -> list[list[int]]:
    return np.nan_to_num(np.minimum(values, 1e9), nan=-1.0).round().astype(np.int64).tolist()
