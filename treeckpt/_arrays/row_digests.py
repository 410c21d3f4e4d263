"""Digests of the rows of a table, by which an incremental save finds those that have changed.

A digest is 64 bits: each word of 8 bytes is mixed with its place in the row by the finalizer of MurmurHash3, and the
mixed words of all columns are added. Two different rows have one digest once in 2**64 pairs. Rows are mixed by numpy in
parts that stay in the cache, several at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from .._core.tree.keyed_table import Executor
from .base import ArraySource

PART_NBYTES = 128 << 10
"""The bytes of rows that are mixed at a time."""
TASK_ROWS = 1 << 16
"""The rows that a thread mixes in one task."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The odd number next to 2**64 over the golden ratio."""
_FIRST, _SECOND, _SHIFT = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53), np.uint64(33)


def row_digests(columns: Sequence[ArraySource], rows: int, together: Executor) -> np.ndarray:
    """Returns a digest of each row, uint64[rows].

    Args:
        columns: arrays [rows, *row], whole on this rank.
        together: runs parts of the work, possibly in parallel.
    """
    digests = np.zeros(rows, np.uint64)
    words = 0
    for column in columns:  # one after the other: their tasks add to the same digests
        together([partial(_mix, column, low, words, digests) for low in range(0, rows, TASK_ROWS)])
        words += -(-_row_nbytes(column) // 8)
    return digests


def _row_nbytes(column: ArraySource) -> int:
    return column.spec.nbytes // max(1, column.spec.shape[0])


def _mix(column: ArraySource, start: int, first_word: int, digests: np.ndarray) -> None:
    """Adds to digests of rows from `start` on what a column has in them; its words are numbered from `first_word`."""
    nbytes, stop = _row_nbytes(column), min(start + TASK_ROWS, len(digests))
    if not nbytes:
        return
    words = -(-nbytes // 8)
    with np.errstate(over="ignore"):
        places = np.arange(first_word + 1, first_word + 1 + words, dtype=np.uint64) * GOLDEN
        step = max(1, PART_NBYTES // nbytes)
        inner = tuple(slice(0, n) for n in column.spec.shape[1:])
        for low in range(start, stop, step):
            high = min(low + step, stop)
            read = np.ascontiguousarray(column.pieces[0].data.read((slice(low, high), *inner)))
            data = read.reshape(high - low, -1).view(np.uint8)
            if nbytes % 8:
                data = np.pad(data, ((0, 0), (0, 8 * words - nbytes)))
            mixed = data.view(np.uint64) ^ places
            mixed ^= mixed >> _SHIFT
            mixed *= _FIRST
            mixed ^= mixed >> _SHIFT
            mixed *= _SECOND
            mixed ^= mixed >> _SHIFT
            digests[low:high] += mixed.sum(1, dtype=np.uint64)
