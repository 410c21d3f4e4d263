"""Ranges of arrays in C order as boxes, and the starts of a rank's entries: what an index need not list one by one.

A rank that holds a range of all arrays laid end to end, as in ZeRO, has a range of the elements of each, which is up
to 2 * ndim - 1 boxes. `flat_boxes` computes them for many ranges at once, as `region.flat_regions` for one;
`stream_offsets` applies the order of `core.planning.stream_order` to the entries of all ranks.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["flat_boxes", "max_boxes", "stream_offsets"]


def max_boxes(shape: tuple[int, ...]) -> int:
    """Returns the largest number of boxes of one range of an array."""
    return max(1, 2 * len(shape) - 1)


def flat_boxes(
    shape: tuple[int, ...], starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the boxes of ranges `starts <= i < stops`, none empty, of an array, by range and then in C order.

    Returns:
        (the number of each box's range: int64[n], offsets: int64[n, ndim], shapes: int64[n, ndim]).
    """
    if not shape:
        nothing = np.empty((len(starts), 0), np.int64)
        return np.arange(len(starts)), nothing, nothing
    row = math.prod(shape[1:])
    first, head = np.divmod(starts, row)
    last, tail = np.divmod(stops, row)
    inside = first == last  # the range lies in one row
    opens, closes = (head > 0) & ~inside, (tail > 0) & ~inside
    full = (last - first - opens > 0) & ~inside
    parts = [
        _in_row(shape, first, head, np.where(inside, tail, row), inside | opens),
        _full_rows(shape, first + opens, last, full),
        _in_row(shape, last, np.zeros_like(tail), tail, closes),
    ]
    numbers, offsets, shapes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(numbers, kind="stable")  # the three parts of one range are in order already
    return numbers[order], offsets[order], shapes[order]


def _in_row(
    shape: tuple[int, ...], row: np.ndarray, low: np.ndarray, high: np.ndarray, which: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the boxes of elements `low <= i < high` of one row each, of the ranges where `which` is true."""
    picked = np.flatnonzero(which)
    if not len(picked):
        empty = np.empty((0, len(shape)), np.int64)
        return picked, empty, empty
    numbers, offsets, shapes = flat_boxes(shape[1:], low[picked], high[picked])
    rows = row[picked][numbers][:, None]
    return picked[numbers], np.hstack([rows, offsets]), np.hstack([np.ones_like(rows), shapes])


def _full_rows(
    shape: tuple[int, ...], first: np.ndarray, last: np.ndarray, which: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns one box of the full rows `first <= row < last` for each range where `which` is true."""
    picked = np.flatnonzero(which)
    offsets = np.zeros((len(picked), len(shape)), np.int64)
    shapes = np.tile(np.array(shape, np.int64), (len(picked), 1))
    offsets[:, 0], shapes[:, 0] = first[picked], (last - first)[picked]
    return picked, offsets, shapes


def stream_offsets(ranks: np.ndarray, classes: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Returns where entries, in the order of the leaves, start in their rank's stream of data bytes: int64[n]."""
    order = np.lexsort((classes, ranks))
    sums = np.cumsum(nbytes[order])
    before = sums - nbytes[order]
    opening = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    starts = np.empty(len(ranks), np.int64)
    starts[order] = before - np.repeat(before[opening], np.diff(np.append(opening, len(ranks))))
    return starts
