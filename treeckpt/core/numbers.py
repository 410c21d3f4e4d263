"""What raw elements mean as numbers, for dtypes that numpy lacks too: bfloat16 and the float8 family.

Elements come as they are stored, in a dtype that only knows their width; numbers are float64 or complex128, into which
all but the largest 64-bit integers go exactly. Formats of 8 bits: arXiv 2209.05433, and the OCP MX specification.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .dtypes import dtype_of

__all__ = ["as_numbers"]

_MINIFLOATS = {
    # exponent bits, mantissa bits, bias, whether the one NaN is the negative zero (and there is no infinity)
    "float8_e4m3fn": (4, 3, 7, False),
    "float8_e5m2": (5, 2, 15, False),
    "float8_e4m3fnuz": (4, 3, 8, True),
    "float8_e5m2fnuz": (5, 2, 16, True),
}


def as_numbers(raw: np.ndarray, dtype: str) -> np.ndarray | None:
    """The numbers of raw elements, float64 or complex128; None where they are none (text, times, packed bits).

    Args:
        raw: any shape, of the dtype's width.
    """
    if dtype == "bfloat16":
        raw, dtype = raw.view("<u2").astype("<u4") << 16, "float32"
    if dtype == "float8_e8m0fnu":
        return _powers()[raw.view("u1")]
    if dtype in _MINIFLOATS:
        return _minifloats(dtype)[raw.view("u1")]
    if dtype == "complex32":
        pairs = np.ascontiguousarray(raw).reshape(-1).view("<f2").astype(np.float64)
        return (pairs[0::2] + 1j * pairs[1::2]).reshape(raw.shape)
    kind = dtype_of(dtype).numpy
    if kind is None or np.dtype(kind).kind not in "biufc":
        return None
    numbers = np.ascontiguousarray(raw).view(kind)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


@lru_cache(maxsize=1)
def _powers() -> np.ndarray:
    powers = np.ldexp(1.0, np.arange(256) - 127)
    powers[255] = np.nan
    return powers


@lru_cache(maxsize=8)
def _minifloats(dtype: str) -> np.ndarray:
    """All 256 numbers of a format, by their bits."""
    exponents, mantissas, bias, unsigned_zero = _MINIFLOATS[dtype]
    bits = np.arange(256)
    exponent, mantissa = bits >> mantissas & (1 << exponents) - 1, bits & (1 << mantissas) - 1
    scale = np.maximum(exponent, 1) - bias - mantissas
    numbers = np.ldexp(mantissa + np.where(exponent > 0, 1 << mantissas, 0).astype(np.float64), scale)
    top = exponent == (1 << exponents) - 1
    if unsigned_zero:
        numbers[0x80] = np.nan
    elif dtype == "float8_e4m3fn":
        numbers[top & (mantissa == 7)] = np.nan
    else:
        numbers[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.where(bits < 0x80, numbers, -numbers)
