"""Elements of any dtype as text, and statistics of many elements: counts, moments and a histogram.

Statistics are computed in batches of bounded size, so that 64 MiB of bytes never become half a GiB of float64.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from functools import lru_cache

import msgspec
import numpy as np

from .._core.sharding.dtypes import dtype_of, numpy_dtype

BATCH = 1 << 20
"""Elements that are converted to float64 at a time."""
BINS = 48


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


_TORCH_INTS = re.compile("u?int[3567]")
"""Dtypes of torch that ml_dtypes lacks; an element takes a byte."""


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
    """Of integers an int, as `maximum` is."""
    maximum: float | None
    mean: float | None
    deviation: float | None
    norm: float | None
    """Euclidean."""
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
    if elements_of(data[:0], dtype) is None:
        return None
    count = nan = infinite = zero = finite = 0
    total = 0.0
    low, high = math.inf, -math.inf
    for values, numbers in _batches(data, dtype):
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
        return ElementStats(
            count,
            nan,
            infinite=infinite,
            zero=zero,
            minimum=None,
            maximum=None,
            mean=None,
            deviation=None,
            norm=None,
            edges=(),
            bins=(),
        )
    ends, mean = (low, high), total / finite
    if (integers := wide_integers(data, dtype)) is not None:
        ends, mean = (int(integers.min()), int(integers.max())), sum_of(integers) / finite
    elif dtype.startswith(("int", "uint")):
        ends = int(low), int(high)
    edges = _bin_edges(low, high)
    bins = np.zeros(len(edges) - 1, np.int64)
    scale = max(abs(low), abs(high)) or 1.0
    squares = spread = 0.0
    for _, numbers in _batches(data, dtype):
        squares += float(np.square(numbers / scale).sum())
        spread += float(np.square((numbers - mean) / scale).sum())
        bins += np.histogram(numbers, edges)[0]
    deviation, norm = scale * math.sqrt(spread / finite), scale * math.sqrt(squares)
    edge_list, bin_list = tuple(edges.tolist()), tuple(bins.tolist())
    return ElementStats(count, nan, infinite, zero, *ends, mean, deviation, norm, edge_list, bin_list)


def _bin_edges(low: float, high: float) -> np.ndarray:
    if low == high:
        half, limit = max(abs(low), 1.0) / 2, sys.float_info.max
        low, high = max(low - half, -limit), min(high + half, limit)
    # weighted sums of both ends: the difference of the two overflows where they span all of float64
    parts = np.linspace(0.0, 1.0, BINS + 1)
    return np.maximum.accumulate(low * (1 - parts) + high * parts)


def _batches(data: np.ndarray, dtype: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the elements as float64 in batches: (all of them, the finite ones)."""
    for start in range(0, len(data), BATCH):
        values = elements_of(data[start : start + BATCH], dtype)
        assert values is not None, "called for numbers only"
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.abs(values) if values.dtype.kind == "c" else values.reshape(-1)
        yield numbers, numbers[np.isfinite(numbers)]
