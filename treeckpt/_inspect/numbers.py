"""The elements of arrays as numbers: as text, as statistics with a histogram, and as a small picture.

`Moments` are computed in parts and in any order: those of the parts merge to those of the whole. Elements of every
dtype are converted to float64, in batches of bounded size, so that neither sums of 16 bits nor squares of 8 bits
overflow, and 64 MiB of bytes never become half a GiB. Not sums of squares are kept, but their roots: they overflow only
where the result itself does.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec
import numpy as np

from .._core.sharding.dtypes import dtype_of, numpy_dtype

BATCH = 1 << 16
"""Elements that are converted at a time: as float64 they stay in a processor's cache."""
BINS = 48
_TORCH_INTS = re.compile("u?int[3567]")
"""Dtypes of torch that ml_dtypes lacks; an element takes a byte."""
DOT_ELEMENTS = 8192
"""Elements of a dot product that BLAS computes in one thread."""
MIN_SQUARES = 1e-280
"""A sum of squares below this has lost elements to underflow."""
MIN_SPREAD_SHARE = 1e-3
"""A sum of squared deviations below this share of the sum of squares has lost digits if it was computed from that."""
MAX_EXACT_INTEGER = 2.0**53
"""Beyond it float64 does not hold all integers."""
IMAGE_ROWS, IMAGE_COLUMNS = 160, 320
"""The size of the largest picture."""
NOT_FINITE_CELL = -128
"""A cell with an element that is NaN or infinite."""


def as_numbers(raw: np.ndarray, dtype: str) -> np.ndarray | None:
    """Converts raw elements to float64 or complex128.

    All are exact but the largest 64-bit integers.

    Args:
        raw: any shape, of the dtype's width.

    Returns:
        The shape of `raw`, with another dimension of 2 at the end where an element holds two numbers. None for
        elements that are no numbers: text, times and raw bytes.
    """
    raw = np.ascontiguousarray(raw)
    if dtype == "float4_e2m1fn_x2":
        # A byte holds two numbers, the first in its lower half.
        codes = raw.view("u1")
        return _byte_values("float4_e2m1fn")[np.stack([codes & 15, codes >> 4], -1)]
    if _TORCH_INTS.fullmatch(dtype):
        return raw.view("i1" if dtype.startswith("i") else "u1").astype(np.float64)
    known = dtype_of(dtype)
    if known.numpy is not None and np.dtype(known.numpy).kind not in "biufc":
        return None
    if known.numpy is None and known.itemsize == 1:
        return _byte_values(dtype)[raw.view("u1")]
    return _widen(raw.view(numpy_dtype(dtype)))


@lru_cache(maxsize=32)
def _byte_values(dtype: str) -> np.ndarray:
    """Returns the number that each byte encodes, float64[256].

    Looking up a million float8 elements takes 2.7 ms, converting them by ml_dtypes 9 ms.
    """
    return _widen(np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)))


def _widen(elements: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return elements.astype(np.complex128 if elements.dtype.kind in "cW" else np.float64)


def wide_integers(data: np.ndarray, dtype: str) -> np.ndarray | None:
    """Returns raw bytes as the 64-bit integers that they are, not all of which float64 holds; None for other dtypes."""
    return np.ascontiguousarray(data).reshape(-1).view(dtype) if dtype in ("int64", "uint64") else None


def sum_of(integers: np.ndarray) -> int:
    """Adds up 64-bit integers exactly."""
    total = 0
    for start in range(0, len(integers), BATCH):  # the sum of so many halves fits 64 bits
        part = integers[start : start + BATCH]
        total += (int((part >> 32).sum()) << 32) + int((part & 0xFFFFFFFF).sum())
    return total


def elements_of(data: np.ndarray, dtype: str) -> np.ndarray | None:
    """Converts raw bytes to float64 or complex128.

    Args:
        data: uint8[n, itemsize].

    Returns:
        [n], or [n, 2] where an element holds two numbers. None for text, times and raw bytes.
    """
    itemsize = dtype_of(dtype).itemsize
    return as_numbers(np.ascontiguousarray(data).reshape(-1).view(f"V{itemsize}"), dtype)


def element_texts(data: np.ndarray, dtype: str) -> list[str]:
    """Returns each element as a short text, exact where that is short.

    Args:
        data: uint8[n, itemsize].
    """
    kind = dtype_of(dtype).numpy
    if kind is not None and np.dtype(kind).kind not in "bfc":  # integers exactly, and elements that are no numbers
        return [_element_text(value) for value in np.ascontiguousarray(data).reshape(-1).view(kind).tolist()]
    values = elements_of(data, dtype)
    assert values is not None, "elements without a numpy dtype are numbers"
    if dtype == "bool":
        values = values != 0
    if values.ndim == 2:
        return [" ".join(map(_element_text, pair)) for pair in values.tolist()]
    return [_element_text(value) for value in values.tolist()]


def _element_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return str(value) if isinstance(value, (int, str)) else repr(value)


class ElementStats(msgspec.Struct, frozen=True):
    """Statistics of elements. Complex elements count by magnitude; nan and inf are left out of all but the counts."""

    count: int
    nan: int
    infinite: int
    zero: int
    minimum: float | None
    """The smallest element; an int for elements that are integers, as `maximum` is."""
    maximum: float | None
    mean: float | None
    deviation: float | None
    norm: float | None
    """The Euclidean norm."""
    edges: tuple[float, ...]
    """Edges of the bins, one more than there are bins; empty where no element is finite."""
    bins: tuple[int, ...]


def element_stats(data: np.ndarray, dtype: str) -> ElementStats | None:
    """Computes counts, moments and a histogram.

    Args:
        data: uint8[n, itemsize].

    Returns:
        None where elements are no numbers.
    """
    moments = moments_of(np.ascontiguousarray(data).reshape(-1), dtype)
    if moments is None:
        return None
    counts = {"count": moments.count, "nan": moments.nan, "infinite": moments.infinite}
    if not moments.finite:
        nothing = dict.fromkeys(("minimum", "maximum", "mean", "deviation", "norm"))
        return ElementStats(**counts, zero=0, **nothing, edges=(), bins=())
    edges, zero = _bin_edges(float(moments.low), float(moments.high)), 0
    bins = np.zeros(len(edges) - 1, np.int64)
    for start in range(0, len(data), BATCH):
        values = elements_of(data[start : start + BATCH], dtype)
        assert values is not None, "their moments are computed"
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.abs(values) if values.dtype.kind == "c" else values.reshape(-1)
        zero += int((numbers == 0).sum())
        bins += np.histogram(numbers[np.isfinite(numbers)], edges)[0]
    end = int if dtype.startswith(("int", "uint")) else float
    integers = wide_integers(data, dtype)
    return ElementStats(
        **counts,
        zero=zero,
        minimum=end(moments.low),
        maximum=end(moments.high),
        mean=moments.mean if integers is None else sum_of(integers) / moments.finite,
        deviation=moments.deviation,
        norm=moments.norm,
        edges=tuple(edges.tolist()),
        bins=tuple(bins.tolist()),
    )


def _bin_edges(low: float, high: float) -> np.ndarray:
    if low == high:
        half, limit = max(abs(low), 1.0) / 2, sys.float_info.max
        low, high = max(low - half, -limit), min(high + half, limit)
    # weighted sums of both ends: the difference of the two overflows where they span all of float64
    parts = np.linspace(0.0, 1.0, BINS + 1)
    return np.maximum.accumulate(low * (1 - parts) + high * parts)


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
    """The Euclidean norm."""
    first_nan: int = -1
    """The position of the first element that is NaN, in C order; -1 where none is."""
    first_infinite: int = -1
    """The position of the first infinite element."""

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
        # By halves, because the difference of the two sums may be beyond float64 in between.
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
        first_nan=_first(a.first_nan, b.first_nan),
        first_infinite=_first(a.first_infinite, b.first_infinite),
    )


def _first(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def placed(moments: Moments, place: Callable[[int], int]) -> Moments:
    """Returns the same with other positions: those that `place` gives for the positions in a part."""
    if moments.first_nan < 0 and moments.first_infinite < 0:
        return moments
    first = {name: getattr(moments, name) for name in ("first_nan", "first_infinite")}
    return msgspec.structs.replace(moments, **{name: at if at < 0 else place(at) for name, at in first.items()})


def moments_of(data: np.ndarray, dtype: str) -> Moments | None:
    """Computes the statistics of elements.

    Args:
        data: uint8[n * itemsize].

    Returns:
        None where elements are no numbers.
    """
    itemsize = dtype_of(dtype).itemsize
    moments = Moments()
    with np.errstate(all="ignore"):
        for start in range(0, max(len(data), 1), BATCH * itemsize):
            numbers = _numbers(data[start : start + BATCH * itemsize], dtype, itemsize)
            if numbers is None:
                return None
            part = _batch(np.abs(numbers) if numbers.dtype.kind == "c" else numbers.reshape(-1))
            if part.largest >= MAX_EXACT_INTEGER:
                part = _exact(part, data[start : start + BATCH * itemsize], dtype)
            # an element that holds two numbers is one position
            each, before = 1 if numbers.ndim == 1 else numbers.shape[-1], start // itemsize
            part = placed(part, lambda at, each=each, before=before: before + at // each)
            moments = merged(moments, part) if start else part
    return moments


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
    first = {"first_nan": -1, "first_infinite": -1}
    if not (math.isfinite(low) and math.isfinite(high)):
        is_nan, is_infinite = np.isnan(numbers), np.isinf(numbers)
        nan, infinite = int(is_nan.sum()), int(is_infinite.sum())
        first["first_nan"] = int(is_nan.argmax()) if nan else -1
        first["first_infinite"] = int(is_infinite.argmax()) if infinite else -1
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return Moments(count, nan, infinite, **first)
        low, high = float(numbers.min()), float(numbers.max())
    values = numbers.astype(np.float64)
    n, scale = len(values), 1.0
    squares = _sum_of_squares(values)
    if not MIN_SQUARES < squares < math.inf and (low or high):
        # Divided by the largest one, no square overflows, and those that count do not underflow.
        scale = max(abs(low), abs(high))
        values = values / scale
        squares = _sum_of_squares(values)
    mean = float(values.sum()) / n
    spread = squares - mean * mean * n
    if spread < MIN_SPREAD_SHARE * squares:
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
        **first,
    )


def norm_of(values: np.ndarray) -> float:
    """Computes the Euclidean norm of float64[n] without overflow and underflow of the squares."""
    squares = _sum_of_squares(values)
    if MIN_SQUARES < squares < math.inf or not len(values):
        return math.sqrt(squares)
    scale = float(np.abs(values).max())
    return scale * math.sqrt(_sum_of_squares(values / scale)) if 0 < scale < math.inf else scale


def _sum_of_squares(values: np.ndarray) -> float:
    """Returns a sum in this thread: BLAS, three times as fast as numpy, divides longer arrays among threads."""
    parts = (values[start : start + DOT_ELEMENTS] for start in range(0, len(values), DOT_ELEMENTS))
    return float(sum(part @ part for part in parts))


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
    down, across = (_edges(size, most) for size, most in ((height, IMAGE_ROWS), (width, IMAGE_COLUMNS)))
    extremes = np.zeros((len(down) - 1, len(across) - 1))
    for row in range(len(down) - 1):
        band = data[down[row] : down[row + 1]]
        for first, last in _spans(across, BATCH // len(band)):
            part = band[:, across[first] : across[last]]
            values = elements_of(part.reshape(-1, part.shape[-1]), dtype)
            assert values is not None, "the first of them is a number"
            real = np.abs(values) if values.dtype.kind == "c" else values
            starts = across[first:last] - across[first]
            extremes[row, first:last] = _extremes(real.reshape(len(band), -1), starts)
    finite = np.isfinite(extremes)
    limit = float(np.abs(extremes, where=finite, out=np.zeros_like(extremes)).max())
    with np.errstate(invalid="ignore", over="ignore"):
        shares = np.where(finite, extremes / limit if limit else 0.0, 0.0)
    cells = np.where(finite, np.rint(shares * 127), NOT_FINITE_CELL).astype(np.int8)
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
    extremes = np.where(-low > high, low, high)
    return np.where(np.isfinite(low) & np.isfinite(high), extremes, math.nan)
