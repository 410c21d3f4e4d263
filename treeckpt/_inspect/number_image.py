"""Reduces a plane of numbers to a small picture in which the largest values stay visible, and so does one NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from .element_stats import BATCH, elements_of

ROWS, COLUMNS = 160, 320
"""Size of the largest picture."""
BAD = -128
"""A cell with an element that is NaN or infinite."""


class NumberImage(msgspec.Struct, frozen=True):
    """A picture of numbers."""

    rows: int
    columns: int
    limit: float
    """The absolute value that 127 stands for, the largest of all; 0 if all are zero."""
    cells: bytes
    """int8[rows, columns]: of each cell the element with the largest absolute value; -128 if one is not finite."""


def number_image(data: np.ndarray, dtype: str) -> NumberImage | None:
    """Draws a plane of elements; complex ones by magnitude.

    Args:
        data: uint8[rows, columns, itemsize].

    Returns:
        None where elements are no numbers, where one holds two numbers, and where there are none.
    """
    height, width, _ = data.shape
    probe = elements_of(data[:1, :1], dtype)
    if probe is None or not height or not width or probe.ndim != 1:
        return None
    down, across = (_edges(size, most) for size, most in ((height, ROWS), (width, COLUMNS)))
    found = np.zeros((len(down) - 1, len(across) - 1))
    for row in range(len(down) - 1):
        band = data[down[row] : down[row + 1]]
        for first, last in _spans(across, BATCH // len(band)):
            part = band[:, across[first] : across[last]]
            values = elements_of(part.reshape(-1, part.shape[-1]), dtype)
            assert values is not None, "the first of them is a number"
            real = np.abs(values) if values.dtype.kind == "c" else values
            starts = across[first:last] - across[first]
            found[row, first:last] = _extremes(real.reshape(len(band), -1), starts)
    finite = np.isfinite(found)
    limit = float(np.abs(found, where=finite, out=np.zeros_like(found)).max())
    with np.errstate(invalid="ignore", over="ignore"):
        shares = np.where(finite, found / limit if limit else 0.0, 0.0)
    cells = np.where(finite, np.rint(shares * 127), BAD).astype(np.int8)
    height, width = cells.shape
    return NumberImage(height, width, limit, cells.tobytes())


def _edges(size: int, most: int) -> np.ndarray:
    """Returns where each cell begins, and where the last one ends."""
    cells = min(size, most)
    return np.arange(cells + 1) * size // cells


def _spans(edges: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yields runs of cells, as (first, after the last), that have no more than `most` columns, or are one cell."""
    first = 0
    while first < len(edges) - 1:
        last = max(first + 1, int(np.searchsorted(edges, edges[first] + most, "right")) - 1)
        yield first, last
        first = last


def _extremes(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns of each run of columns the element with the largest absolute value; NaN if one is not finite."""
    low = np.minimum.reduceat(values.min(0), starts)
    high = np.maximum.reduceat(values.max(0), starts)
    found = np.where(-low > high, low, high)
    return np.where(np.isfinite(low) & np.isfinite(high), found, math.nan)
