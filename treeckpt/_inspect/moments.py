"""Statistics of many elements, computed in parts and in any order: those of the parts merge to those of the whole.

Elements of every dtype are converted to float64, so that neither sums of 16 bits nor squares of 8 bits overflow. Not
sums of squares are kept, but their roots: they overflow only where the result itself does.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np

from .._core.sharding.dtypes import dtype_of
from .element_stats import as_numbers, sum_of, wide_integers

BATCH = 1 << 16
"""Elements that are converted at a time: as float64 they stay in a processor's cache."""
SHORT = 8192
"""Elements of a dot product that BLAS computes in one thread."""
TINY, EXACT = 1e-280, 1e-3
"""A sum of squares below TINY has lost elements to underflow. A sum of squared deviations below EXACT times the sum of
squares has lost digits if it was computed from that."""

WIDE = 2.0**53
"""Beyond it float64 does not hold all integers."""


class Moments(msgspec.Struct, frozen=True):
    """Statistics of elements. Complex elements count by magnitude; all but the counts leave out NaN and infinity."""

    count: int = 0
    nan: int = 0
    infinite: int = 0
    low: float = math.inf
    """The smallest element; infinity where none is finite. It is an int if float64 does not hold all of the array."""
    high: float = -math.inf
    mean: float = 0.0
    spread: float = 0.0
    """Root of the sum of squared differences from the mean."""
    norm: float = 0.0
    """Euclidean."""

    @property
    def finite(self) -> int:
        """How many elements are neither NaN nor infinite."""
        return self.count - self.nan - self.infinite

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        return self.spread / math.sqrt(self.finite) if self.finite else 0.0

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high)) if self.finite else 0.0


def merged(a: Moments, b: Moments) -> Moments:
    """Returns the statistics of the elements of both."""
    n = a.finite + b.finite
    mean = spread = 0.0
    if n:
        share = b.finite / n
        mean = a.mean * (1 - share) + b.mean * share
        apart = 2 * (b.mean / 2 - a.mean / 2) if a.finite and b.finite else 0.0
        spread = math.hypot(a.spread, b.spread, apart * math.sqrt(a.finite * share))
    return Moments(
        count=a.count + b.count,
        nan=a.nan + b.nan,
        infinite=a.infinite + b.infinite,
        low=min(a.low, b.low),
        high=max(a.high, b.high),
        mean=mean,
        spread=spread,
        norm=math.hypot(a.norm, b.norm),
    )


def moments_of(data: np.ndarray, dtype: str) -> Moments | None:
    """Computes the statistics of elements.

    Args:
        data: uint8[n * itemsize].

    Returns:
        None where elements are no numbers.
    """
    itemsize = dtype_of(dtype).itemsize
    found = Moments()
    with np.errstate(all="ignore"):
        for start in range(0, max(len(data), 1), BATCH * itemsize):
            numbers = _numbers(data[start : start + BATCH * itemsize], dtype, itemsize)
            if numbers is None:
                return None
            part = _batch(np.abs(numbers) if numbers.dtype.kind == "c" else numbers.reshape(-1))
            if part.largest >= WIDE:
                part = _exact(part, data[start : start + BATCH * itemsize], dtype)
            found = merged(found, part) if start else part
    return found


def _exact(part: Moments, data: np.ndarray, dtype: str) -> Moments:
    """Returns the statistics of one batch with ends and a mean that no conversion to float64 has rounded."""
    if (integers := wide_integers(data, dtype)) is None:
        return part
    low, high, mean = int(integers.min()), int(integers.max()), sum_of(integers) / len(integers)
    return msgspec.structs.replace(part, low=low, high=high, mean=mean)


def _numbers(data: np.ndarray, dtype: str, itemsize: int) -> np.ndarray | None:
    """Converts raw elements to numbers: float64, or float32 that holds all of them."""
    if dtype == "float32":
        return data.view("<f4")
    if dtype == "bfloat16":  # the upper half of a float32
        return np.left_shift(data.view("<u2"), 16, dtype=np.uint32).view(np.float32)
    if dtype == "float16":
        return _halves().take(data.view("<u2"))
    return as_numbers(data.view(f"V{itemsize}"), dtype)


@lru_cache(maxsize=1)
def _halves() -> np.ndarray:
    """Returns the number that each 16 bits encode, float32[65536]: to look up is faster than to convert."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _batch(numbers: np.ndarray) -> Moments:
    """Computes the statistics of one batch of real numbers."""
    count = len(numbers)
    if not count:
        return Moments()
    low, high = float(numbers.min()), float(numbers.max())  # NaN if any is
    nan = infinite = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        nan = int(np.isnan(numbers).sum())
        infinite = int(np.isinf(numbers).sum())
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return Moments(count, nan, infinite)
        low, high = float(numbers.min()), float(numbers.max())
    values = numbers.astype(np.float64)
    n, scale = len(values), 1.0
    squares = _sum_of_squares(values)
    if not TINY < squares < math.inf and (low or high):
        scale = max(abs(low), abs(high))
        values = values / scale
        squares = _sum_of_squares(values)
    mean = float(values.sum()) / n
    spread = squares - mean * mean * n
    if spread < EXACT * squares:
        values -= mean
        spread = _sum_of_squares(values)
    return Moments(
        count,
        nan,
        infinite=infinite,
        low=low,
        high=high,
        mean=scale * mean,
        spread=scale * math.sqrt(spread),
        norm=scale * math.sqrt(squares),
    )


def norm_of(values: np.ndarray) -> float:
    """Computes the Euclidean norm of float64[n] without overflow and underflow of the squares."""
    squares = _sum_of_squares(values)
    if TINY < squares < math.inf or not len(values):
        return math.sqrt(squares)
    scale = float(np.abs(values).max())
    return scale * math.sqrt(_sum_of_squares(values / scale)) if 0 < scale < math.inf else scale


def _sum_of_squares(values: np.ndarray) -> float:
    """Returns a sum in this thread: BLAS, three times as fast as numpy, divides longer arrays among threads."""
    parts = (values[start : start + SHORT] for start in range(0, len(values), SHORT))
    return float(sum(part @ part for part in parts))
