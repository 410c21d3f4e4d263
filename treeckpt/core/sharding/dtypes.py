"""Which element types exist, how wide they are, and how a safetensors file spells them.

Names are those of torch, numpy and ml_dtypes ("float32", "bfloat16"). safetensors has no tag for some of them;
such a *logical* dtype is stored under the tag of its parts, with one more trailing dimension where there are several
(complex128 is two F64, a fixed-width string of n bytes is n U8, a numpy datetime is one I64).
The header of the shard records the logical name, so that the reader puts the array back together.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np

from ...errors import FormatError, MismatchError

__all__ = ["USER_DEFINED", "DType", "dtype_of", "dtype_of_text", "dtype_text", "name_of", "numpy_dtype", "numpy_name"]


class DType(msgspec.Struct, frozen=True):
    """One element type. `tag` and `parts` say how safetensors sees it: `parts` > 1 adds a trailing dimension."""

    name: str
    itemsize: int
    """Bytes of one element."""
    tag: str
    parts: int = 1
    numpy: str | None = None
    """The dtype of numpy's own with the same meaning; None for those of ml_dtypes or torch alone, see `numpy_dtype`."""


def _plain(name: str, itemsize: int, tag: str, numpy: str | None = None) -> DType:
    return DType(name, itemsize, tag, 1, numpy)


_TABLE = {
    d.name: d
    for d in (
        _plain("bool", 1, "BOOL", "?"),
        _plain("uint8", 1, "U8", "u1"),
        _plain("int8", 1, "I8", "i1"),
        _plain("uint16", 2, "U16", "<u2"),
        _plain("int16", 2, "I16", "<i2"),
        _plain("uint32", 4, "U32", "<u4"),
        _plain("int32", 4, "I32", "<i4"),
        _plain("uint64", 8, "U64", "<u8"),
        _plain("int64", 8, "I64", "<i8"),
        _plain("float16", 2, "F16", "<f2"),
        _plain("bfloat16", 2, "BF16"),
        _plain("float32", 4, "F32", "<f4"),
        _plain("float64", 8, "F64", "<f8"),
        _plain("float8_e4m3fn", 1, "F8_E4M3"),
        _plain("float8_e5m2", 1, "F8_E5M2"),
        _plain("float8_e8m0fnu", 1, "F8_E8M0"),
        _plain("float8_e4m3fnuz", 1, "U8"),
        _plain("float8_e5m2fnuz", 1, "U8"),
        *(_plain(f"float8_{form}", 1, "U8") for form in ("e4m3", "e3m4", "e4m3b11fnuz")),
        # narrower elements of ml_dtypes take a byte each
        *(_plain(name, 1, "U8") for name in ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")),
        # two 4-bit values a byte; torch counts the bytes as its elements
        _plain("float4_e2m1fn_x2", 1, "U8"),
        DType("complex32", 4, "F16", 2),
        DType("bcomplex32", 4, "BF16", 2),
        DType("complex64", 8, "F32", 2, "<c8"),
        DType("complex128", 16, "F64", 2, "<c16"),
        *(_plain(f"{sign}int{bits}", 1, "U8") for sign in ("", "u") for bits in range(1, 8)),
    )
}

_TIME = re.compile(r"(datetime|timedelta)64(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_FIXED = re.compile(r"(bytes|str|void)([1-9][0-9]{0,8})")


@lru_cache(maxsize=1024)
def dtype_of(name: str) -> DType:
    """The element type called `name`.

    Besides the table: numpy's `datetime64[unit]` and `timedelta64[unit]`, and the fixed-width `bytesN`, `strN`
    (N characters of 4 bytes) and `voidN`.

    Raises:
        FormatError: no such dtype.
    """
    if (known := _TABLE.get(name)) is not None:
        return known
    if (time := _TIME.fullmatch(name)) is not None:
        return DType(name, 8, "I64", 1, ("<M8" if time[1] == "datetime" else "<m8") + (time[2] or ""))
    if (fixed := _FIXED.fullmatch(name)) is not None:
        width = int(fixed[2])
        if fixed[1] == "str" and 4 * width < 1 << 31:  # more is more than numpy has
            return DType(name, 4 * width, "U32", width, f"<U{width}")
        if fixed[1] != "str":
            return DType(name, width, "U8", width, ("S" if fixed[1] == "bytes" else "V") + str(width))
    raise FormatError(name, expected="a dtype that treeckpt knows", found=f"dtype {name[:64]!r}")


@lru_cache(maxsize=1024)
def numpy_dtype(name: str, path: str = "dtype") -> np.dtype[Any]:
    """The numpy dtype called `name`: numpy's own, or one of ml_dtypes, which is imported only for those.

    Raises:
        FormatError: no such dtype.
        MismatchError: at `path`; neither numpy nor the ml_dtypes of this environment has it.
    """
    known = dtype_of(name)
    if known.numpy is not None:
        return np.dtype(known.numpy)
    try:
        import ml_dtypes
    except ImportError as error:
        raise _lacking(
            name, path, "no ml_dtypes in this environment", "Install it (pip install ml_dtypes), or"
        ) from error
    found = getattr(ml_dtypes, name, None)
    if found is None:
        raise _lacking(name, path, f"none in ml_dtypes {ml_dtypes.__version__}", "")
    return np.dtype(found)


def _lacking(name: str, path: str, found: str, hint: str) -> MismatchError:
    expected = f"a dtype of numpy or of the package ml_dtypes, for {name}"
    return MismatchError(path, expected=expected, found=found, hint=f"{hint} load it as a tensor".strip().capitalize())


_WIDTHS: dict[type, tuple[str, int]] = {np.str_: ("str", 4), np.bytes_: ("bytes", 1), np.void: ("void", 1)}
"""numpy's dtypes of a width that the user chooses: our name, and the bytes of one character."""


def name_of(dtype: object) -> str:
    """Our name of a dtype that a caller gives: a name, torch's own (`torch.float32`), numpy's, or its scalar types.

    A name is not looked up: `dtype_of` does that.

    Raises:
        MismatchError: anything else.
    """
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    given = cast(Any, dtype)
    try:
        if type(given).__module__ == "torch" and (text := str(given)).startswith("torch."):
            return dtype_of(text.removeprefix("torch.")).name
        if isinstance(given, np.dtype) or (isinstance(given, type) and issubclass(given, np.generic)):
            return numpy_name(np.dtype(cast(Any, given)))
    except (FormatError, MismatchError) as error:
        raise _unknown(dtype) from error
    raise _unknown(dtype)


def numpy_name(dtype: np.dtype[Any]) -> str:
    """Our name for a numpy dtype.

    Raises:
        FormatError: no name stands for exactly this dtype: object, structured and extended-precision dtypes, those of
            packages other than ml_dtypes.
    """
    if dtype.names is not None:  # asked first: a dtype with fields may equal one without
        raise FormatError("dtype", expected="one without fields", found=f"{dtype}")
    return _plain_name(dtype)


@lru_cache(maxsize=1024)
def _plain_name(dtype: np.dtype[Any]) -> str:
    name = dtype.name
    if dtype.type in _WIDTHS:
        prefix, width = _WIDTHS[dtype.type]
        name = f"{prefix}{dtype.itemsize // width}"
    known = dtype_of(name)
    if numpy_dtype(name) != dtype.newbyteorder("="):
        raise FormatError("dtype", expected=f"{numpy_dtype(name)!r}, which {name} stands for", found=f"{dtype!r}")
    return known.name


_TEXT = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
"""numpy's codes of its own dtypes without fields and objects."""
USER_DEFINED = 2
"""What `isbuiltin` is for dtypes that another package adds to numpy."""


def dtype_text(dtype: np.dtype[Any]) -> str | None:
    """How values name a dtype: numpy's own by its code, one of ml_dtypes by its name; None for any other."""
    try:
        text = dtype.str if dtype.isbuiltin != USER_DEFINED else numpy_name(dtype)
        exact = dtype_of_text(text) == dtype and dtype.names is None
    except (FormatError, MismatchError, ValueError):
        return None
    # extended precision has the same code and other bytes on other machines
    return text if exact and dtype.itemsize <= {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize) else None


def dtype_of_text(text: str) -> np.dtype[Any]:
    """The inverse of `dtype_text`.

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


def _unknown(dtype: object) -> MismatchError:
    return MismatchError(
        "dtype",
        expected='the name of a dtype, as "bfloat16", or a dtype of torch or numpy that treeckpt knows',
        found=f"{dtype!r:.60}",
    )
