"""Elements of any dtype as text, and what a person wants to know of many of them: counts, moments, a histogram.

Statistics run over pieces of bounded size, so that 64 MiB of bytes never become half a GiB of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from ..sharding.dtypes import dtype_of, numpy_dtype

__all__ = ["Statistics", "as_numbers", "element_texts", "elements_of", "statistics_of"]

PIECE = 1 << 20
"""Elements that are made numbers of at a time."""
BINS = 48


def as_numbers(raw: np.ndarray, dtype: str) -> np.ndarray | None:
    """The numbers of raw elements, float64 or complex128; None where they are none (text, times, raw bytes).

    All but the largest 64-bit integers are exact.

    Args:
        raw: any shape, of the dtype's width.

    Returns:
        in the shape of `raw`, with a last dimension of 2 more where an element holds two numbers.
    """
    raw = np.ascontiguousarray(raw)
    if dtype == "float4_e2m1fn_x2":
        codes = raw.view("u1")
        return _all_numbers("float4_e2m1fn")[np.stack([codes & 15, codes >> 4], -1)]
    if _OTHER_BITS.fullmatch(dtype):
        return raw.view("i1" if dtype.startswith("i") else "u1").astype(np.float64)
    known = dtype_of(dtype)
    if known.numpy is not None and np.dtype(known.numpy).kind not in "biufc":
        return None
    if known.numpy is None and known.itemsize == 1:
        return _all_numbers(dtype)[raw.view("u1")]
    return _widened(raw.view(numpy_dtype(dtype)))


_OTHER_BITS = re.compile("u?int[3567]")
"""What torch has and ml_dtypes has not."""


@lru_cache(maxsize=32)
def _all_numbers(dtype: str) -> np.ndarray:
    """What each byte means as an element: to look it up is faster than to convert it."""
    return _widened(np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)))


def _widened(elements: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return elements.astype(np.complex128 if elements.dtype.kind in "cW" else np.float64)


def elements_of(data: np.ndarray, dtype: str) -> np.ndarray | None:
    """The elements of raw bytes as float64 or complex128; None for texts, times and raw bytes.

    Args:
        data: uint8[n, itemsize].

    Returns:
        [n], or [n, 2] where an element holds two numbers.
    """
    itemsize = dtype_of(dtype).itemsize
    return as_numbers(np.ascontiguousarray(data).reshape(-1).view(f"V{itemsize}"), dtype)


def element_texts(data: np.ndarray, dtype: str) -> list[str]:
    """Each element in few characters, exact where that is short.

    Args:
        data: uint8[n, itemsize], few of them.
    """
    kind = dtype_of(dtype).numpy
    if kind is not None and np.dtype(kind).kind not in "bfc":  # integers exactly, and what is no number
        return [_text(value) for value in np.ascontiguousarray(data).reshape(-1).view(kind).tolist()]
    values = elements_of(data, dtype)
    assert values is not None, "what numpy has no dtype for is a number"
    if dtype == "bool":
        values = values != 0
    if values.ndim == 2:
        return [" ".join(map(_text, pair)) for pair in values.tolist()]
    return [_text(value) for value in values.tolist()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return str(value) if isinstance(value, (int, str)) else repr(value)


class Statistics(msgspec.Struct, frozen=True):
    """What elements are like. Of complex ones, the magnitudes; min to deviation and the bins leave out nan and inf."""

    count: int
    nan: int
    infinite: int
    zero: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    deviation: float | None
    norm: float | None
    """The Euclidean one."""
    edges: tuple[float, ...]
    """Of the bins: one more than there are bins; empty where no element is finite."""
    bins: tuple[int, ...]


def statistics_of(data: np.ndarray, dtype: str) -> Statistics | None:
    """Counts, moments and a histogram; None where elements are no numbers.

    Args:
        data: uint8[n, itemsize].
    """
    if elements_of(data[:0], dtype) is None:
        return None
    count = nan = infinite = zero = finite = 0
    total = 0.0
    low, high = math.inf, -math.inf
    for values, numbers in _pieces(data, dtype):
        count += len(values)
        nan += int(np.isnan(values).sum())
        infinite += int(np.isinf(values).sum())
        zero += int((numbers == 0).sum())
        finite += len(numbers)
        if len(numbers):
            low, high = min(low, float(numbers.min())), max(high, float(numbers.max()))
            with np.errstate(over="ignore"):  # then the mean is infinite, too
                total += float(numbers.sum())
    if not finite:
        return Statistics(count, nan, infinite, zero, None, None, None, None, None, (), ())
    return _moments(data, dtype, (count, nan, infinite, zero), finite, total / finite, low, high)


def _moments(
    data: np.ndarray, dtype: str, counts: tuple[int, int, int, int], finite: int, mean: float, low: float, high: float
) -> Statistics:
    edges = _edges(low, high)
    bins = np.zeros(len(edges) - 1, np.int64)
    scale = max(abs(low), abs(high)) or 1.0
    squares = spread = 0.0
    for _, numbers in _pieces(data, dtype):
        squares += float(np.square(numbers / scale).sum())
        spread += float(np.square((numbers - mean) / scale).sum())
        bins += np.histogram(numbers, edges)[0]
    return Statistics(
        *counts,
        low,
        high,
        mean,
        scale * math.sqrt(spread / finite),
        scale * math.sqrt(squares),
        tuple(edges.tolist()),
        tuple(bins.tolist()),
    )


def _edges(low: float, high: float) -> np.ndarray:
    if low == high:
        low, high = low - max(abs(low), 1.0) / 2, high + max(abs(high), 1.0) / 2
    # as a sum of halves: the width of all of float64 overflows
    parts = np.linspace(0.0, 1.0, BINS + 1)
    return np.maximum.accumulate(low * (1 - parts) + high * parts)


def _pieces(data: np.ndarray, dtype: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of the elements as float64, all of them and the finite ones."""
    for start in range(0, len(data), PIECE):
        values = elements_of(data[start : start + PIECE], dtype)
        assert values is not None, "asked only for numbers"
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.abs(values) if values.dtype.kind == "c" else values.reshape(-1)
        yield numbers, numbers[np.isfinite(numbers)]
