"""Formats the numbers of one column alike: in one unit, with as many digits after the point in every row.

Each function takes the values of a column, of which None and texts (`NaN`) are passed over, and returns what formats
one of them. The largest has at least three digits and the smallest but zero at least two, in the largest unit for which
two digits after the point are enough. Where they are more than four powers of ten apart, each has a unit of its own.

dashboard/static/columns.js follows the same rules: both round the exact value of a float, ties away from zero. Single
numbers, in sentences, are those of `text`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from typing import TypeGuard

from .text import BYTE_UNITS, bytes_text, json_number, rounded, seconds_text, whole

_BYTES = tuple((1000.0**n, name, 2 if n else 0) for n, name in enumerate(BYTE_UNITS))
"""Each unit with its name, and how many digits after the point it has at most."""
_SECONDS = ((1e-6, "µs", 3), (1e-3, "ms", 2), (1.0, "s", 2))
_SPREAD = 1e4
"""How many times the smallest value the largest is, at most, where both are in one unit."""
_WHOLE = 2**53
"""Whole numbers up to it are written out with separators; JSON has larger ones as texts."""

Values = Iterable[float | str | None]


def bytes_column(values: Values, per: str = "") -> Callable[[float], str]:
    """Formats the bytes of a column, `1.20 MB`, or its rates with `per` behind each unit; in B they are whole."""
    low, high = _extent(values)
    if high > low * _SPREAD:
        return lambda nbytes: bytes_column([nbytes], per)(nbytes)
    if not high:
        return lambda nbytes: bytes_text(nbytes) + per
    return partial(_in_unit, scale=_scale(_BYTES, low, high), per=per)


def seconds_column(values: Values) -> Callable[[float], str]:
    """Formats the durations of a column: `1.20 s`, or `2 min 05 s` or `3 h 05 min` where the longest is as long."""
    low, high = _extent(values)
    if high > low * _SPREAD:
        return lambda seconds: seconds_column([seconds])(seconds)
    if not high:
        return seconds_text
    if high >= 3599.5 and low >= 600:
        return partial(_in_sixties, size=60, names=("h", "min"))
    if high >= 99.95 and low >= 10:
        return partial(_in_sixties, size=1, names=("min", "s"))
    return partial(_in_unit, scale=_scale(_SECONDS, low, high))


def numbers_column(values: Values, digits: int = 5) -> Callable[[float | str], str]:
    """Formats numbers without a unit, the largest with so many digits; texts stay as they are."""
    values = [value for value in values if _is_finite(value)]
    low, high = _extent(values)
    needed = max((_decimals(value, digits) for value in values), default=0)
    decimals = min(needed, max(digits - 1 - _exponent(high), 1 - _exponent(low), 0))
    alike = high <= low * _SPREAD and decimals <= 8 and high <= _WHOLE
    return partial(_number, decimals=decimals if alike else None, digits=digits)


def _is_finite(value: float | str | None) -> TypeGuard[float]:
    return value is not None and not isinstance(value, str) and math.isfinite(value)


def _extent(values: Values) -> tuple[float, float]:
    """Returns the smallest magnitude that is not zero, and the largest; zeros where there is none."""
    sizes = [abs(float(value)) for value in values if _is_finite(value) and value]
    return min(sizes, default=0.0), max(sizes, default=0.0)


def _exponent(value: float) -> int:
    """Returns the power of ten of a value that is rounded to three digits."""
    return int(f"{value:.2e}".partition("e")[2])


def _decimals(value: float, digits: int) -> int:
    """Returns how many digits after the point a value has that is rounded to so many digits."""
    mantissa, _, exponent = f"{rounded(value, digits):.{digits - 1}e}".partition("e")
    return max(len(mantissa.partition(".")[2].rstrip("0")) - int(exponent), 0)


def _scale(units: Sequence[tuple[float, str, int]], low: float, high: float) -> tuple[float, str, int]:
    """Returns the unit of a column, its name, and the number of digits after the point."""
    for size, name, most in reversed(units):
        decimals = max(2 - _exponent(high / size), 1 - _exponent(low / size), 0)
        if size == units[0][0] or (high >= 0.9995 * size and decimals <= 2):
            return size, name, min(decimals, most)
    raise AssertionError("no units")


def _fixed(value: float, decimals: int) -> str:
    """Formats a value with separators of thousands, and so many digits after the point."""
    exact = Decimal(value or 0)
    return f"{exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP):,f}"


def _in_unit(value: float, scale: tuple[float, str, int], per: str = "") -> str:
    size, name, decimals = scale
    return f"{_fixed(value / size, decimals)} {name}{per}"


def _in_sixties(seconds: float, size: int, names: tuple[str, str]) -> str:
    count = whole(abs(seconds) / size)
    return f"{'-' * (seconds < 0)}{count // 60:,} {names[0]} {count % 60:02} {names[1]}"


def _number(value: float | str, decimals: int | None, digits: int) -> str:
    """Formats a number of a column; without `decimals` they have nothing in common, and a whole one is written out."""
    if not _is_finite(value):
        return str(json_number(value))
    if decimals is not None:
        return _fixed(value, decimals)
    if float(value).is_integer() and abs(value) <= _WHOLE:
        return f"{int(value):,}"
    if isinstance(value, int):
        return str(value)
    return f"{rounded(value, digits):.{digits}g}"
