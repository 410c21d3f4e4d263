"""What a leaf is without its data, and how a Python value becomes JSON and comes back with its type.

`ArraySpec` describes an array as jax.ShapeDtypeStruct does, and serves as a target of load. A value that JSON has
itself (None, bool, int of 64 bits, finite float, str) is stored as such; every other one becomes a `Typed` record, in
JSON `["kind", [items...]]`. Decoding builds values from a fixed list of kinds; it imports and calls nothing that a
file names, except that an enum's class is looked up, by the caller's `resolve`, among classes that exist already.
"""

# What a file holds has any type: a decoder that is given a wrong one raises, and that is caught.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import base64
import collections
import datetime as dt
import decimal
import enum
import fractions
import math
import operator
import pathlib
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ...errors import FormatError, MismatchError, TreeError
from ..sharding.dtypes import dtype_of_text, dtype_text, name_of
from ..sharding.region import Region
from .members import HASHED, check_hashes, named_member, valued_member

__all__ = [
    "ArraySpec",
    "Resolver",
    "StridedView",
    "TableSpec",
    "Typed",
    "Value",
    "ValueSpec",
    "decode_value",
    "encode_value",
    "type_name",
]

Resolver = Callable[[str], type]
"""Gives the class called `module:qualname` if the program has it already; raises LookupError otherwise."""


class Typed(msgspec.Struct, frozen=True, array_like=True):
    """A value that JSON lacks: its kind and what it is made of."""

    kind: str
    items: tuple[bool | int | float | str | Typed | None, ...]


Value = None | bool | int | float | str | Typed


class StridedView(msgspec.Struct, frozen=True, array_like=True):
    """A strided window into another leaf's elements, in elements of it in C order."""

    offset: int
    strides: tuple[int, ...]


class ArraySpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """An array without its data; an abstract target for `load`, as jax.ShapeDtypeStruct.

    Args:
        shape: of the whole (global) array; any sequence of integers becomes a tuple.
        dtype: its name, see `core.sharding.dtypes`; a dtype of torch, numpy or ml_dtypes becomes its name.
        regions: what of it is wanted or held; None is all of it.
        device: where it was, or is to be, e.g. "cuda:0"; None is the host.
        requires_grad: as torch means it.
        kind: "tensor", "parameter", "buffer" or "numpy": what load makes of it.
    """

    shape: tuple[int, ...]
    dtype: str
    regions: tuple[Region, ...] | None = None
    device: str | None = None
    requires_grad: bool = False
    kind: str = "tensor"

    def __post_init__(self) -> None:
        dtype, shape = self.dtype, self.shape
        if type(dtype) is str and type(shape) is tuple and dtype[:6] != "torch.":
            for n in shape:  # an index has a million of them: nothing shorter is as fast
                if type(n) is not int:
                    break
            else:
                return
        msgspec.structs.force_setattr(self, "dtype", name_of(dtype))
        msgspec.structs.force_setattr(self, "shape", _shape(shape))


def _shape(given: Any) -> tuple[int, ...]:
    """A shape as a caller gives it, as a tuple of ints.

    Raises:
        MismatchError: it is none.
    """
    try:
        return tuple(operator.index(n) for n in given)
    except TypeError as error:
        raise MismatchError(
            "shape", expected="a shape: a sequence of integers", found=f"{given!r:.60}", hint="One number n is (n,)"
        ) from error


class ValueSpec(msgspec.Struct, frozen=True):
    """A Python value, encoded."""

    value: Value


class TableSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a keyed table's ids are parted into buckets; its slots are arrays with specs of their own."""

    function: str
    version: int
    """Of the function."""
    buckets: int


MAX_DEPTH = 100
_INT64 = 1 << 63


def type_name(kind: type) -> str:
    """How files name a class: `module:qualname`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def encode_value(value: object, path: str, extra: Callable[[object], Typed | None] | None = None) -> Value:
    """The JSON form of a Python value.

    Args:
        path: the leaf, for errors.
        extra: knows the values of other libraries; returns None for what it does not know.

    Raises:
        TreeError: the value is of no kind that can be stored.
    """
    return _encode(value, path, extra, 0)


def _encode(value: object, path: str, extra: Callable[[object], Typed | None] | None, depth: int) -> Value:
    if depth > MAX_DEPTH:
        raise TreeError(path, expected=f"values nested at most {MAX_DEPTH} deep", found="deeper ones")
    kind = type(value)
    if value is None or kind is bool:
        return value  # pyright: ignore[reportReturnType]
    if kind is int:
        number: int = value  # pyright: ignore[reportAssignmentType]
        return number if -_INT64 <= number < _INT64 else Typed("int", (hex(number),))
    if kind is float:
        real: float = value  # pyright: ignore[reportAssignmentType]
        return real if math.isfinite(real) else Typed("float", (repr(real),))
    if kind is str:
        return _encode_str(value)  # pyright: ignore[reportArgumentType]
    if (encode := _ENCODERS.get(kind)) is not None:
        items = [_encode(item, path, extra, depth + 1) for item in encode[1](value)]
        if kind in (set, frozenset):
            # a set's order changes from process to process: sorting makes equal sets equal bytes
            items.sort(key=msgspec.json.encode)
        return Typed(encode[0], tuple(items))
    if isinstance(value, enum.Enum):
        return _encode_enum(value, path, extra, depth)
    if (typed := _encode_numpy(value)) is not None:
        return typed
    if extra is not None and (typed := extra(value)) is not None:
        return typed
    raise _unknown(value, path)


def _unknown(value: object, path: str) -> TreeError:
    return TreeError(
        path,
        expected="an array, a container or a plain Python value",
        found=f"{type_name(type(value))}: {_short(value)}",
        hint="Convert it to one of these, register its class with optree.register_pytree_node, "
        "or pass allow_pickle=True",
    )


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _encode_str(text: str) -> Value:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, as os.fsdecode makes them
        return Typed("str", (base64.b64encode(text.encode("utf-8", "surrogatepass")).decode(),))
    return text


def _encode_enum(value: enum.Enum, path: str, extra: Callable[[object], Typed | None] | None, depth: int) -> Typed:
    """By name, and by value for those without one (combined flags)."""
    kind = type(value)
    if value.name not in kind.__members__:
        return Typed("enum", (type_name(kind), None, _encode(value.value, path, extra, depth + 1)))
    try:
        inner = _encode(value.value, path, extra, depth + 1)
    except TreeError:  # a function, say: the name is enough
        inner = None
    return Typed("enum", (type_name(kind), value.name, inner))


def _encode_numpy(value: object) -> Typed | None:
    if isinstance(value, np.str_):  # as an array it would lose trailing zeros
        return Typed("numpy.str", (_encode_str(value[:]),))
    if isinstance(value, np.bytes_):
        return Typed("numpy.bytes", _b64(bytes(value)))
    if isinstance(value, np.generic) and (text := dtype_text(value.dtype)) is not None:
        return Typed("numpy", (text, *_b64(value.tobytes())))
    if isinstance(value, np.dtype) and (text := dtype_text(value)) is not None:
        return Typed("numpy.dtype", (text,))
    return None


def _b64(data: bytes | bytearray) -> tuple[str]:
    return (base64.b64encode(data).decode(),)


def _moment(moment: Any) -> tuple[object, ...]:
    return (moment.replace(tzinfo=None).isoformat(), moment.tzinfo, moment.fold)


def _pairs(mapping: Any) -> list[object]:
    return [item for pair in mapping.items() for item in pair]


_ENCODERS: dict[type, tuple[str, Callable[[Any], Sequence[object]]]] = {
    complex: ("complex", lambda v: (v.real, v.imag)),
    bytes: ("bytes", _b64),
    bytearray: ("bytearray", _b64),
    range: ("range", lambda v: (v.start, v.stop, v.step)),
    slice: ("slice", lambda v: (v.start, v.stop, v.step)),
    set: ("set", list),
    frozenset: ("frozenset", list),
    list: ("list", list),
    tuple: ("tuple", list),
    dict: ("dict", _pairs),
    collections.OrderedDict: ("OrderedDict", _pairs),
    collections.Counter: ("Counter", _pairs),
    type(...): ("ellipsis", lambda v: ()),
    dt.datetime: ("datetime", _moment),
    dt.time: ("time", _moment),
    dt.date: ("date", lambda v: (v.isoformat(),)),
    dt.timedelta: ("timedelta", lambda v: (v.days, v.seconds, v.microseconds)),
    dt.timezone: ("timezone", lambda v: v.__getinitargs__()),
    zoneinfo.ZoneInfo: ("ZoneInfo", lambda v: (v.key,)),
    decimal.Decimal: ("Decimal", lambda v: (str(v),)),
    fractions.Fraction: ("Fraction", lambda v: (v.numerator, v.denominator)),
    uuid.UUID: ("UUID", lambda v: (str(v),)),
    **{
        p: (p.__name__, lambda v: (str(v),))
        for p in (
            pathlib.PurePosixPath,
            pathlib.PureWindowsPath,
            pathlib.PosixPath,
            pathlib.WindowsPath,
        )
    },
}


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _path(windows: bool, pure: bool) -> Callable[..., pathlib.PurePath]:
    """A path of this machine's own flavour comes back concrete, one of the other flavour pure."""
    flavour = pathlib.PureWindowsPath if windows else pathlib.PurePosixPath
    return lambda text: flavour(text) if pure or type(pathlib.Path()) not in _CONCRETE[windows] else pathlib.Path(text)


_CONCRETE = {False: (pathlib.PosixPath,), True: (pathlib.WindowsPath,)}

_DECODERS: dict[str, Callable[..., object]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "str": lambda text: _bytes(text).decode("utf-8", "surrogatepass"),
    "complex": complex,
    "bytes": lambda text: _bytes(text),
    "bytearray": lambda text: bytearray(_bytes(text)),
    "range": range,
    "slice": slice,
    "set": lambda *members: set(members),
    "frozenset": lambda *members: frozenset(members),
    "list": lambda *members: list(members),
    "tuple": lambda *members: tuple(members),
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "OrderedDict": lambda *pairs: collections.OrderedDict(zip(pairs[::2], pairs[1::2], strict=True)),
    "Counter": lambda *pairs: collections.Counter(dict(zip(pairs[::2], pairs[1::2], strict=True))),
    "ellipsis": lambda: ...,
    "datetime": lambda text, zone, fold: dt.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold),
    "time": lambda text, zone, fold: dt.time.fromisoformat(text).replace(tzinfo=zone, fold=fold),
    "date": dt.date.fromisoformat,
    "timedelta": dt.timedelta,
    "timezone": dt.timezone,
    "ZoneInfo": zoneinfo.ZoneInfo,
    "Decimal": decimal.Decimal,
    # of two integers only: of a text like "1e999999999" it would compute the power
    "Fraction": lambda numerator, denominator: fractions.Fraction(numerator, denominator),
    "UUID": uuid.UUID,
    "PurePosixPath": _path(windows=False, pure=True),
    "PureWindowsPath": _path(windows=True, pure=True),
    "PosixPath": _path(windows=False, pure=False),
    "WindowsPath": _path(windows=True, pure=False),
    "numpy": lambda name, data: np.frombuffer(_bytes(data), dtype_of_text(name))[0],
    "numpy.str": np.str_,
    "numpy.bytes": lambda text: np.bytes_(_bytes(text)),
    "numpy.dtype": dtype_of_text,
}


def decode_value(
    value: Value,
    path: str,
    *,
    resolve: Resolver | None = None,
    extra: Callable[[Typed], object] | None = None,
) -> object:
    """The Python value of a JSON form.

    Args:
        resolve: finds the class of an enum.
        extra: builds the values of other libraries; raises LookupError for a kind it does not know.

    Raises:
        FormatError: an unknown kind, or parts that do not make up a value of theirs.
        MismatchError: the class of an enum is not to be had, or has no such member.
    """
    return _decode(value, path, resolve, extra, 0)


def _decode(
    value: Value, path: str, resolve: Resolver | None, extra: Callable[[Typed], object] | None, depth: int
) -> object:
    if not isinstance(value, Typed):
        return value
    if depth > MAX_DEPTH:
        raise FormatError(path, expected=f"values nested at most {MAX_DEPTH} deep", found="deeper ones")
    if value.kind == "enum":
        return _decode_enum(value, path, resolve, extra, depth)
    items = [_decode(item, path, resolve, extra, depth + 1) for item in value.items]
    try:
        if value.kind in HASHED:
            check_hashes(items[:: HASHED[value.kind]], path)
        if (decode := _DECODERS.get(value.kind)) is not None:
            return decode(*items)
        if extra is not None:
            return extra(value)
        raise LookupError(value.kind)
    except MismatchError as error:  # of a dtype that this program lacks
        raise MismatchError(path, expected=error.expected, found=error.found, hint=error.hint) from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError, RuntimeError) as error:
        raise FormatError(path, expected="a value of a known kind", found=f"{value!r:.80} ({error!s:.200})") from error


def _decode_enum(
    value: Typed, path: str, resolve: Resolver | None, extra: Callable[[Typed], object] | None, depth: int
) -> object:
    name, member, inner = value.items if len(value.items) == 3 else (None, None, None)
    if not isinstance(name, str):
        raise FormatError(path, expected="an enum", found=f"{value!r:.80}")
    try:
        kind = resolve(name) if resolve is not None else None
        if kind is None or not issubclass(kind, enum.Enum):
            raise LookupError(name)
        if isinstance(member, str):
            return named_member(kind, member)
        return valued_member(kind, _decode(inner, path, resolve, extra, depth + 1))
    except (LookupError, ValueError, TypeError) as error:
        raise MismatchError(
            path,
            expected=f"the enum {name} with {member or inner!r}",
            found="no such class or member in this program",
            hint="Import the module that defines it before loading, or leave this leaf out",
        ) from error
