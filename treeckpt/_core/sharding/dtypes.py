"""Element types: their names, their sizes, and their tags in a safetensors file.

Names are those of torch, numpy and ml_dtypes ("float32", "bfloat16"). safetensors has no tag for some of them;
such a *logical* dtype is stored under the tag of its parts, with one more trailing dimension if there are several
(complex128 is two F64, a fixed-width string of n bytes is n U8, a numpy datetime is one I64).
The header of the shard records the logical name, from which the reader restores the array.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np

from ...errors import FormatError, MismatchError


class DType(msgspec.Struct, frozen=True):
    """An element type. `tag` and `parts` are its form in safetensors: `parts` > 1 adds a trailing dimension."""

    name: str
    itemsize: int
    """The bytes of one element."""
    tag: str
    numpy: str | None = None
    """numpy's own dtype with the same meaning; None where only ml_dtypes or torch has it, see `numpy_dtype`."""
    parts: int = 1


DTYPES = (
    DType("bool", 1, "BOOL", "?"),
    DType("uint8", 1, "U8", "u1"),
    DType("int8", 1, "I8", "i1"),
    DType("uint16", 2, "U16", "<u2"),
    DType("int16", 2, "I16", "<i2"),
    DType("uint32", 4, "U32", "<u4"),
    DType("int32", 4, "I32", "<i4"),
    DType("uint64", 8, "U64", "<u8"),
    DType("int64", 8, "I64", "<i8"),
    DType("float16", 2, "F16", "<f2"),
    DType("bfloat16", 2, "BF16"),
    DType("float32", 4, "F32", "<f4"),
    DType("float64", 8, "F64", "<f8"),
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("float8_e8m0fnu", 1, "F8_E8M0"),
    DType("float8_e4m3fnuz", 1, "U8"),
    DType("float8_e5m2fnuz", 1, "U8"),
    *(DType(f"float8_{form}", 1, "U8") for form in ("e4m3", "e3m4", "e4m3b11fnuz")),
    # narrower elements of ml_dtypes take a byte each
    *(DType(name, 1, "U8") for name in ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")),
    # two 4-bit values a byte; torch counts the bytes as its elements
    DType("float4_e2m1fn_x2", 1, "U8"),
    DType("complex32", 4, "F16", parts=2),
    DType("bcomplex32", 4, "BF16", parts=2),
    DType("complex64", 8, "F32", "<c8", parts=2),
    DType("complex128", 16, "F64", "<c16", parts=2),
    *(DType(f"{sign}int{bits}", 1, "U8") for sign in ("", "u") for bits in range(1, 8)),
)
"""All dtypes but those of a width that the user chooses; of those with one tag, the one that it means is the first."""
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}

_TIME = re.compile(r"(datetime|timedelta)64(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_FIXED = re.compile(r"(bytes|str|void)([1-9][0-9]{0,8})")


@lru_cache(maxsize=1024)
def dtype_of(name: str) -> DType:
    """Returns the element type called `name`.

    Besides the table there are numpy's `datetime64[unit]` and `timedelta64[unit]`, and the fixed-width `bytesN`, `strN`
    (N characters of 4 bytes) and `voidN`.

    Raises:
        FormatError: no such dtype.
    """
    if (known := _BY_NAME.get(name)) is not None:
        return known
    if (time := _TIME.fullmatch(name)) is not None:
        return DType(name, 8, "I64", ("<M8" if time[1] == "datetime" else "<m8") + (time[2] or ""))
    if (fixed := _FIXED.fullmatch(name)) is not None:
        width = int(fixed[2])
        if fixed[1] == "str" and 4 * width < 1 << 31:  # the limit of numpy
            return DType(name, 4 * width, "U32", f"<U{width}", width)
        if fixed[1] != "str":
            return DType(name, width, "U8", ("S" if fixed[1] == "bytes" else "V") + str(width), width)
    raise FormatError(name, expected="a dtype that treeckpt knows", found=f"dtype {name[:64]!r}")


def cast_hint(saved: str, wanted: str) -> str:
    """Returns what to do where another dtype was saved than is wanted."""
    fractions = ("float", "bfloat", "complex")
    if saved.startswith(fractions) and not wanted.startswith(fractions):
        return "Pass cast=True to convert, which cuts fractions off"
    if saved.startswith("complex") and not wanted.startswith("complex"):
        return "Pass cast=True to convert, which drops imaginary parts"
    return "Pass cast=True to convert"


@lru_cache(maxsize=1024)
def numpy_dtype(name: str, path: str = "dtype") -> np.dtype[Any]:
    """Returns the numpy dtype called `name`: numpy's own, or one of ml_dtypes, which is imported only for those.

    Raises:
        FormatError: no such dtype.
        MismatchError: at `path`; neither numpy nor the ml_dtypes of this environment has it.
    """
    known = dtype_of(name)
    if known.numpy is not None:
        return np.dtype(known.numpy)
    expected = f"a dtype of numpy or of the package ml_dtypes, for {name}"
    try:
        import ml_dtypes
    except ImportError as error:
        hint = "Install it (pip install ml_dtypes), or load it as a tensor"
        raise MismatchError(path, expected=expected, found="no ml_dtypes in this environment", hint=hint) from error
    found = getattr(ml_dtypes, name, None)
    if found is None:
        version = f"none in ml_dtypes {ml_dtypes.__version__}"
        raise MismatchError(path, expected=expected, found=version, hint="Load it as a tensor")
    return np.dtype(found)


_WIDTHS: dict[type, tuple[str, int]] = {np.str_: ("str", 4), np.bytes_: ("bytes", 1), np.void: ("void", 1)}
"""numpy's dtypes of a width that the user chooses: our prefix of the name, and the bytes of one character."""


def normalize_dtype(dtype: object) -> str:
    """Returns our name of a given dtype: a name, a dtype of torch (`torch.float32`), of numpy, or its scalar types.

    A name is returned without a check that it exists; `dtype_of` checks it.

    Raises:
        MismatchError: anything else.
    """
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    given = cast(Any, dtype)
    cause = None
    try:
        # known by name, as this room does not import torch
        if type(given).__module__ == "torch" and (text := str(given)).startswith("torch."):
            return dtype_of(text.removeprefix("torch.")).name
        if isinstance(given, np.dtype) or (isinstance(given, type) and issubclass(given, np.generic)):
            return numpy_name(np.dtype(cast(Any, given)))
    except (FormatError, MismatchError) as error:
        cause = error
    raise MismatchError(
        "dtype",
        expected='the name of a dtype, as "bfloat16", or a dtype of torch or numpy that treeckpt knows',
        found=f"{dtype!r:.60}",
    ) from cause


def numpy_name(dtype: np.dtype[Any]) -> str:
    """Returns our name of a numpy dtype.

    Raises:
        FormatError: no name stands for exactly this dtype: object, structured and extended-precision dtypes, those of
            packages other than ml_dtypes.
    """
    if dtype.names is not None:  # checked first: a dtype with fields may equal one without
        raise FormatError("dtype", expected="one without fields", found=f"{dtype}")
    return _fieldless_name(dtype)


@lru_cache(maxsize=1024)
def _fieldless_name(dtype: np.dtype[Any]) -> str:
    name = dtype.name
    if dtype.type in _WIDTHS:
        prefix, width = _WIDTHS[dtype.type]
        name = f"{prefix}{dtype.itemsize // width}"
    # the byte order is no part of a name: all arrays are stored in little-endian order
    if numpy_dtype(name) != dtype.newbyteorder("="):
        raise FormatError("dtype", expected=f"{numpy_dtype(name)!r}, which {name} stands for", found=f"{dtype!r}")
    return dtype_of(name).name


_TEXT = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
"""numpy's codes of its own dtypes without fields and objects."""
USER_DEFINED = 2
"""The value of `isbuiltin` for dtypes that another package adds to numpy."""


def dtype_text(dtype: np.dtype[Any]) -> str | None:
    """Returns the name of a dtype in values: numpy's own by code, one of ml_dtypes by name; None for any other."""
    try:
        text = dtype.str if dtype.isbuiltin != USER_DEFINED else numpy_name(dtype)
        exact = dtype_of_text(text) == dtype and dtype.names is None
    except (FormatError, MismatchError, ValueError):
        return None
    # extended precision has the same code but other bytes on other machines
    return text if exact and dtype.itemsize <= {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize) else None


def dtype_of_text(text: str) -> np.dtype[Any]:
    """Returns the dtype of a name as `dtype_text` returns it.

    Raises:
        ValueError: no such dtype.
        MismatchError: this program lacks it.
    """
    if _TEXT.fullmatch(text) is not None:
        return np.dtype(text)
    try:
        if dtype_of(text).numpy is not None:
            raise ValueError(text)  # numpy's own are named by code
        return numpy_dtype(text)
    except FormatError as error:
        raise ValueError(text) from error
