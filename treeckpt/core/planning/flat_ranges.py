"""Ranges of arrays in C order as boxes, and where a rank's entries start: what an index need not list one by one.

A rank that holds a range of all arrays laid end to end, as ZeRO's do, has a range of the elements of each, which is up
to 2 * ndim - 1 boxes. `flat_boxes` finds those of many ranges at once, as `region.flat_regions` those of one;
`starts_of` is the rule of `core.planning.stream_order` for entries of all ranks.
"""

from __future__ import annotations

import math

import numpy as np

from .stream_order import LINE, PAGE, order_class

__all__ = ["classes_of", "flat_boxes", "most_boxes", "starts_of"]


def most_boxes(shape: tuple[int, ...]) -> int:
    """How many boxes one range of an array can be."""
    return max(1, 2 * len(shape) - 1)


def flat_boxes(
    shape: tuple[int, ...], starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The boxes of ranges `starts <= i < stops`, none empty, of an array of `shape`, by range and then in C order.

    Returns:
        (the number of each box's range: int64[n], offsets: int64[n, ndim], shapes: int64[n, ndim]).
    """
    if not shape:
        nothing = np.empty((len(starts), 0), np.int64)
        return np.arange(len(starts)), nothing, nothing
    row = math.prod(shape[1:])
    first, head = np.divmod(starts, row)
    last, tail = np.divmod(stops, row)
    inside = first == last  # of one row
    opens, closes = (head > 0) & ~inside, (tail > 0) & ~inside
    full = (last - first - opens > 0) & ~inside
    parts = [
        _in_row(shape, first, head, np.where(inside, tail, row), inside | opens),
        _full_rows(shape, first + opens, last, full),
        _in_row(shape, last, np.zeros_like(tail), tail, closes),
    ]
    numbers, offsets, shapes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(numbers, kind="stable")  # the parts of one range are in order
    return numbers[order], offsets[order], shapes[order]


def _in_row(
    shape: tuple[int, ...], row: np.ndarray, low: np.ndarray, high: np.ndarray, which: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    picked = np.flatnonzero(which)
    offsets, shapes = (
        np.zeros((len(picked), len(shape)), np.int64),
        np.tile(np.array(shape, np.int64), (len(picked), 1)),
    )
    offsets[:, 0], shapes[:, 0] = first[picked], (last - first)[picked]
    return picked, offsets, shapes


def classes_of(nbytes: np.ndarray, align: int) -> np.ndarray:
    """The order class of entries of one alignment, see `placing.order_class`."""
    return np.where(nbytes % PAGE == 0, 0, np.where(nbytes % LINE == 0, 1, order_class(1, align)))


def starts_of(ranks: np.ndarray, classes: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Where entries, given in the order of the leaves, start in their rank's stream of data bytes: int64[n]."""
    order = np.lexsort((classes, ranks))
    sums = np.cumsum(nbytes[order])
    before = sums - nbytes[order]
    opens = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    starts = np.empty(len(ranks), np.int64)
    starts[order] = before - np.repeat(before[opens], np.diff(np.append(opens, len(ranks))))
    return starts
