"""Elements of any dtype as numbers, and what a person wants to know of many of them, with numpy alone.

numpy lacks bfloat16 and the 8- and 4-bit floats. A bfloat16 is the upper half of a float32; of the small ones, every
value there is stands in a table that follows from their bits. Statistics run over pieces of bounded size, so that
64 MiB of bytes never become half a GiB of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from .dtypes import dtype_of

__all__ = ["Statistics", "element_texts", "elements_of", "statistics_of"]

PIECE = 1 << 20
"""Elements that are made numbers of at a time."""
BINS = 48


@lru_cache(maxsize=8)
def _small_floats(name: str) -> np.ndarray:
    """The value of each byte of an 8-bit float, float32[256]."""
    if name == "float8_e8m0fnu":
        values = np.ldexp(1.0, np.arange(256) - 127)
        values[255] = np.nan
        return values.astype(np.float64)
    exponent_bits = 4 if "e4m3" in name else 5
    mantissa_bits = 7 - exponent_bits
    own_zero = name.endswith("fnuz")
    bias = (1 << (exponent_bits - 1)) - (0 if own_zero else 1)
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    half = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    if name == "float8_e4m3fn":
        half[127] = np.nan
    elif name == "float8_e5m2":
        half[124:] = [np.inf, np.nan, np.nan, np.nan]
    values = np.concatenate([half, -half])
    if own_zero:
        values[128] = np.nan
    return values


def elements_of(data: np.ndarray, dtype: str) -> np.ndarray | None:
    """The elements of raw bytes, as numbers that numpy can reckon with; None for texts, times and raw bytes.

    Args:
        data: uint8[n, itemsize].

    Returns:
        [n], of a float, complex, integer or bool dtype; [n, 2] where an element holds two numbers.
    """
    known = dtype_of(dtype)
    flat = np.ascontiguousarray(data).reshape(-1)
    if known.numpy is not None:
        kind = np.dtype(known.numpy)
        if kind.kind == "b":  # a byte beyond 0 and 1 is true, too
            return flat != 0
        return flat.view(kind) if kind.kind in "iufc" else None
    if dtype == "bfloat16":
        return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        pairs = flat.view("<f2").astype(np.float32).reshape(-1, 2)
        return pairs.view(np.complex64).reshape(-1)
    if dtype.startswith("float8"):
        return _small_floats(dtype)[flat]
    if dtype == "float4_e2m1fn_x2":
        magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = np.concatenate([magnitude, -magnitude])
        return np.stack([table[flat & 15], table[flat >> 4]], 1)
    return flat.view(np.int8) if dtype.startswith("int") else flat


def element_texts(data: np.ndarray, dtype: str) -> list[str]:
    """Each element in few characters, exact where that is short.

    Args:
        data: uint8[n, itemsize], few of them.
    """
    values = elements_of(data, dtype)
    if values is None:
        known = np.dtype(dtype_of(dtype).numpy)
        return [_text(value) for value in np.ascontiguousarray(data).reshape(-1).view(known).tolist()]
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
        if values.dtype.kind == "c":
            with np.errstate(over="ignore", invalid="ignore"):
                values = np.abs(values)
        with np.errstate(invalid="ignore"):
            numbers = values.reshape(-1).astype(np.float64)
        yield numbers, numbers[np.isfinite(numbers)]
