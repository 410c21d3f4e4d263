"""Encodes Python values as JSON, and decodes them with their type.

A value that JSON has itself (None, bool, int of 64 bits, finite float, str) is stored as such; every other one becomes
a `TypedValue` record, in JSON `["kind", [items...]]`. Decoding builds values from a fixed list of kinds; it imports and
calls nothing that a file names, except that an enum's class is looked up, by the caller's `resolve`, among classes
that exist already.

Decoding takes time linear in the size of the file. A set or dict compares each object with all others of the same
hash, and the writer of a file can choose numbers, and tuples of numbers, of one hash (text and bytes are hashed with a
secret), so such collisions are refused.
"""

# What a file holds has any type: a decoder that is given a wrong one raises, and that is caught.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import argparse
import base64
import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import math
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import msgspec
import numpy as np

from ...errors import FormatError, MismatchError, TreeckptError, TreeError
from ..sharding.dtypes import dtype_of_text, dtype_text

Resolver = Callable[[str], type]
"""Returns the class called `module:qualname` if the program has it already; raises LookupError otherwise."""
FunctionResolver = Callable[[str], object]
"""Returns the class or function called `module:qualname` likewise."""

MAX_VALUE_DEPTH = 100
"""Levels of a value, at most: it is encoded and decoded by recursive calls."""
MAX_COLLISIONS = 64
"""Members of one set that may have the same hash; -1 and -2 have one hash, and so have tuples of them."""
_INT64 = 1 << 63


class TypedValue(msgspec.Struct, frozen=True, array_like=True):
    """A value that JSON lacks: its kind, and the items to build it from."""

    kind: str
    items: tuple[bool | int | float | str | TypedValue | None, ...]


Value = None | bool | int | float | str | TypedValue


def type_name(kind: type) -> str:
    """Returns the name of a class in files: `module:qualname`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def encode_function(value: object) -> TypedValue | None:
    """Returns the stored form of a function or class that a module has: its name, `module:qualname`; None for others.

    It is stored as auxiliary data of a node, as of `optree.functools.partial`.
    """
    name = getattr(value, "__qualname__", None)
    if not callable(value) or type(name) is not str:
        return None
    own = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
    # a function of C code may not know its module: that of a library has it under its name, as torch.add
    simple = name.rpartition(".")[2]
    for module, path in ((own, name), (own.partition(".")[0], simple)):
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, "__dict__", {}).get(part)
        if found is value:
            return TypedValue("function", (f"{module}:{path}",))
    return None


# encoding ------------------------------------------------------------------------------------------------------------


def encode_value(value: object, path: str, extra: Callable[[object], TypedValue | None] | None = None) -> Value:
    """Returns the JSON form of a Python value.

    Args:
        path: the leaf, for errors.
        extra: encodes the values of other libraries; returns None for a value that it does not know.

    Raises:
        TreeError: the value is of no kind that can be stored.
    """
    return _encode(value, path, extra, 0)


def _encode(value: object, path: str, extra: Callable[[object], TypedValue | None] | None, depth: int) -> Value:
    if depth > MAX_VALUE_DEPTH:
        raise TreeError(path, expected=f"values nested at most {MAX_VALUE_DEPTH} deep", found="deeper ones")
    kind = type(value)
    if value is None or kind is bool:
        return value  # pyright: ignore[reportReturnType]
    if kind is int:
        number: int = value  # pyright: ignore[reportAssignmentType]
        return number if -_INT64 <= number < _INT64 else TypedValue("int", (hex(number),))
    if kind is float:
        real: float = value  # pyright: ignore[reportAssignmentType]
        return real if math.isfinite(real) else TypedValue("float", (repr(real),))
    if kind is str:
        return _encode_str(value)  # pyright: ignore[reportArgumentType]
    if (encoder := _ENCODERS.get(kind)) is not None:
        name, items_of = encoder
        if kind in _HASHED:
            refuse_hash_collisions(list(value), path)  # pyright: ignore[reportArgumentType]
        try:
            parts = list(items_of(value))
        except ValueError as error:  # a buffer that was closed
            raise TreeError(path, expected=f"a {name} to be open", found=f"{error}"[:200]) from error
        paths = [path] * len(parts)
        if kind in NAMESPACES.values():
            # names and values in turn: an error names the attribute
            paths = [f"{path}.{parts[at - at % 2]}" for at in range(len(parts))]
        items = [_encode(item, at, extra, depth + 1) for item, at in zip(parts, paths, strict=True)]
        if kind in (set, frozenset):
            # the order of a set differs between processes: sorting gives equal sets equal bytes
            items.sort(key=msgspec.json.encode)
        return TypedValue(name, tuple(items))
    if isinstance(value, enum.Enum):
        return _encode_enum(value, path, extra, depth)
    if (typed := _encode_numpy(value)) is not None:
        return typed
    try:
        typed = extra(value) if extra is not None else None
    except TreeError as error:  # of a container in the structure of a tree
        below = "/".join(filter(None, (path, error.path)))
        raise TreeError(below, expected=error.expected, found=error.found, hint=error.hint) from error
    if typed is not None:
        return typed
    raise TreeError(
        path,
        expected="an array, a container or a plain Python value",
        found=f"{type_name(kind)}: {_short_repr(value)}",
        hint=_hint(value),
    )


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def _hint(value: object) -> str:
    """Returns how to save a value of an unknown class: a mapping, a random generator, a function, or something else."""
    name = type(value).__name__
    if isinstance(value, Mapping):
        return (
            f"Save dict(...) of it, or register its class: optree.register_pytree_node({name}, "
            f"lambda m: (list(m.values()), tuple(m), tuple(m)), lambda keys, values: {name}(zip(keys, values)), "
            "namespace='mine'), and pass namespace='mine' wherever the tree is passed"
        )
    if state := next((one for one in ("get_state", "getstate", "bit_generator") if hasattr(value, one)), None):
        return f"Save its state, from .{state}, in tc.PerRank(...) if each rank has its own"
    if isinstance(value, _FUNCTIONS):
        return "Save its name, and find it by that after the load; a registered container can keep one of a module"
    return "Convert it to one of these, or register its class with optree.register_pytree_node"


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _encode_str(text: str) -> Value:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, as os.fsdecode returns them
        return TypedValue("str", _base64(text.encode("utf-8", "surrogatepass")))
    return text


def _encode_enum(
    value: enum.Enum, path: str, extra: Callable[[object], TypedValue | None] | None, depth: int
) -> TypedValue:
    """Encodes a member by name, and by value where it has no name (combined flags)."""
    kind = type(value)
    if value.name not in kind.__members__:
        return TypedValue("enum", (type_name(kind), None, _encode(value.value, path, extra, depth + 1)))
    try:
        inner = _encode(value.value, path, extra, depth + 1)
    except TreeError:  # a function, for example: the name is enough
        inner = None
    return TypedValue("enum", (type_name(kind), value.name, inner))


def _encode_numpy(value: object) -> TypedValue | None:
    if isinstance(value, np.str_):  # as an array it would lose trailing zeros
        return TypedValue("numpy.str", (_encode_str(value[:]),))
    if isinstance(value, np.bytes_):
        return TypedValue("numpy.bytes", _base64(bytes(value)))
    if isinstance(value, np.generic) and (text := dtype_text(value.dtype)) is not None:
        return TypedValue("numpy", (text, *_base64(value.tobytes())))
    if isinstance(value, np.dtype) and (text := dtype_text(value)) is not None:
        return TypedValue("numpy.dtype", (text,))
    return None


def _base64(data: bytes | bytearray) -> tuple[str]:
    return (base64.b64encode(data).decode(),)


def _text(value: object) -> tuple[str]:
    return (str(value),)


def _time_items(time: dt.datetime | dt.time) -> tuple[object, ...]:
    return (time.replace(tzinfo=None).isoformat(), time.tzinfo, time.fold)


def _keys_and_values(mapping: Mapping[Any, Any]) -> list[object]:
    return [item for pair in mapping.items() for item in pair]


NAMESPACES: dict[str, type] = {"Namespace": argparse.Namespace, "SimpleNamespace": types.SimpleNamespace}
"""Classes whose objects are attributes and nothing else."""
BUFFERS: dict[str, type] = {"BytesIO": io.BytesIO, "StringIO": io.StringIO}
"""Files in memory: bytes, or text and how lines end; the position; attributes or None."""


_ENCODERS: dict[type, tuple[str, Callable[[Any], Sequence[object]]]] = {
    complex: ("complex", attrgetter("real", "imag")),
    bytes: ("bytes", _base64),
    bytearray: ("bytearray", _base64),
    range: ("range", attrgetter("start", "stop", "step")),
    slice: ("slice", attrgetter("start", "stop", "step")),
    set: ("set", list),
    frozenset: ("frozenset", list),
    list: ("list", list),
    tuple: ("tuple", list),
    dict: ("dict", _keys_and_values),
    collections.OrderedDict: ("OrderedDict", _keys_and_values),
    collections.Counter: ("Counter", _keys_and_values),
    **{kind: (name, lambda space: _keys_and_values(vars(space))) for name, kind in NAMESPACES.items()},
    **{kind: (name, methodcaller("__getstate__")) for name, kind in BUFFERS.items()},
    type(...): ("ellipsis", lambda _: ()),
    dt.datetime: ("datetime", _time_items),
    dt.time: ("time", _time_items),
    dt.date: ("date", _text),
    dt.timedelta: ("timedelta", attrgetter("days", "seconds", "microseconds")),
    dt.timezone: ("timezone", methodcaller("__getinitargs__")),
    zoneinfo.ZoneInfo: ("ZoneInfo", lambda zone: (zone.key,)),
    decimal.Decimal: ("Decimal", _text),
    fractions.Fraction: ("Fraction", attrgetter("numerator", "denominator")),
    uuid.UUID: ("UUID", _text),
    pathlib.PurePosixPath: ("PurePosixPath", _text),
    pathlib.PureWindowsPath: ("PureWindowsPath", _text),
    pathlib.PosixPath: ("PosixPath", _text),
    pathlib.WindowsPath: ("WindowsPath", _text),
}
"""The kind of a class in files, and the function that returns the items to build a value from, by class."""
_HASHED = frozenset((set, frozenset, dict, collections.OrderedDict, collections.Counter))
"""Classes whose members, or keys, are found by their hashes."""


# decoding ------------------------------------------------------------------------------------------------------------


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def decode_path(kind: type[pathlib.PurePath], *parts: str) -> pathlib.PurePath:
    """Builds a path: a concrete one if its flavour is this machine's, a pure one of the same flavour otherwise."""
    if issubclass(kind, pathlib.Path) and type(pathlib.Path()) is not kind:
        kind = pathlib.PureWindowsPath if issubclass(kind, pathlib.PureWindowsPath) else pathlib.PurePosixPath
    return kind(*parts)


def new_namespace(kind: type, attributes: dict[Any, Any]) -> object:
    """Builds an object of one of `NAMESPACES`.

    Raises:
        TypeError: a name of an attribute is no text.
    """
    if not all(type(name) is str for name in attributes):
        raise TypeError("an attribute whose name is no text")
    made = kind()
    vars(made).update(attributes)
    return made


def new_buffer(kind: Any, *state: object) -> object:
    """Builds an object of one of `BUFFERS` from its state, as pickle does.

    Raises:
        TypeError, ValueError: it is none.
    """
    made = kind()
    if kind is io.BytesIO and (not state or type(state[0]) not in (bytes, bytearray)):
        raise TypeError("a buffer of bytes without bytes")
    made.__setstate__(state)
    return made


_DECODERS: dict[str, Callable[..., object]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "str": lambda text: _bytes(text).decode("utf-8", "surrogatepass"),
    "complex": complex,
    "bytes": _bytes,
    "bytearray": lambda text: bytearray(_bytes(text)),
    "range": range,
    "slice": slice,
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
    **{
        kind.__name__: partial(decode_path, kind)
        for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
    },
    **{name: partial(new_buffer, kind) for name, kind in BUFFERS.items()},
    "numpy": lambda name, data: np.frombuffer(_bytes(data), dtype_of_text(name))[0],
    "numpy.str": np.str_,
    "numpy.bytes": lambda text: np.bytes_(_bytes(text)),
    "numpy.dtype": dtype_of_text,
}
"""The function that builds a value of its items, by kind."""
_SEQUENCES: dict[str, Callable[[list[object]], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], object]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    **{name: partial(new_namespace, kind) for name, kind in NAMESPACES.items()},
}


def decode_value(
    value: Value,
    path: str,
    *,
    resolve: Resolver | None = None,
    extra: Callable[[TypedValue], object] | None = None,
) -> object:
    """Returns the Python value of a JSON form.

    Args:
        resolve: finds the class of an enum.
        extra: builds the values of other libraries of a kind and items that are decoded already; raises LookupError for
            a kind that it does not know.

    Raises:
        FormatError: an unknown kind, or items from which no value of the kind can be built.
        MismatchError: the class of an enum does not exist in this program, or has no such member.
    """
    return _decode(value, path, resolve, extra, 0)


def _decode(
    value: Value, path: str, resolve: Resolver | None, extra: Callable[[TypedValue], object] | None, depth: int
) -> object:
    if not isinstance(value, TypedValue):
        return value
    if depth > MAX_VALUE_DEPTH:
        raise FormatError(path, expected=f"values nested at most {MAX_VALUE_DEPTH} deep", found="deeper ones")
    if value.kind == "enum":
        return _decode_enum(value, path, resolve, extra, depth)
    items = [_decode(item, path, resolve, extra, depth + 1) for item in value.items]
    try:
        if (sequence := _SEQUENCES.get(value.kind)) is not None:
            return sequence(items if sequence in (list, tuple) else check_hash_collisions(items, path))
        if (mapping := _MAPPINGS.get(value.kind)) is not None:
            keys = check_hash_collisions(items[::2], path)
            return mapping(dict(zip(keys, items[1::2], strict=True)))
        if (decode := _DECODERS.get(value.kind)) is not None:
            return decode(*items)
        if extra is not None:
            return extra(TypedValue(value.kind, tuple(items)))  # pyright: ignore[reportArgumentType]
        raise LookupError(value.kind)
    except (MismatchError, FormatError) as error:  # a dtype or class that this program lacks
        raise type(error)(path, expected=error.expected, found=error.found, hint=error.hint) from error
    except TreeckptError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError, RuntimeError) as error:
        found = f"{value.kind:.40} ({error!s:.200})"
        raise FormatError(path, expected="a value of a known kind", found=found) from error


def check_hash_collisions(members: list[Any], path: str) -> list[Any]:
    """Returns the members of a set or keys of a dict, unless far more than chance allows have one hash.

    Raises:
        FormatError: naming `path`.
        TypeError: a member cannot be hashed.
    """
    if (most := _most_of_one_hash(members)) > MAX_COLLISIONS:
        raise FormatError(path, expected="members whose hashes differ", found=f"{most} of one hash")
    return members


def refuse_hash_collisions(members: Sequence[object], path: str) -> None:
    """Checks a set or the keys of a dict before it is stored, as a load would refuse it.

    Raises:
        TreeError: more than `MAX_COLLISIONS` have one hash.
    """
    if (most := _most_of_one_hash(members)) > MAX_COLLISIONS:
        raise TreeError(
            path,
            expected=f"at most {MAX_COLLISIONS} members of a set, or keys of a dict, of one hash",
            found=f"{most}",
            hint="Numbers and tuples of numbers can have one hash, as -1 and -2 do: use strings, or a list",
        )


def _most_of_one_hash(members: Sequence[object]) -> int:
    """Returns how many members have the most frequent hash; 0 where these are few for certain."""
    if len(members) <= MAX_COLLISIONS:
        return 0
    hashes = list(map(hash, members))
    if len(members) - len(set(hashes)) < MAX_COLLISIONS:  # all but one member of each hash
        return 0
    return max(collections.Counter(hashes).values())


def decode_function(value: TypedValue, find: FunctionResolver | None, path: str) -> object:
    """Returns the function of a stored form that `encode_function` made.

    Args:
        find: returns the function called `module:qualname`; None refuses.

    Raises:
        MismatchError: it is refused, or not in this program.
        LookupError: the value is of another kind.
    """
    if value.kind != "function":
        raise LookupError(value.kind)
    (name,) = value.items
    if find is None:
        raise MismatchError(
            path,
            expected="a container that keeps no function",
            found=f"the function {name!s:.200}",
            hint="Pass like= with a tree that has it; or, if you trust whoever wrote this, allow_pickle=True",
        )
    try:
        return find(str(name))
    except LookupError as error:
        hint = "Import the module that defines it before loading, or pass like= with a tree of your own"
        raise MismatchError(
            path, expected=f"the function {name!s:.200}", found="none of that name in this program", hint=hint
        ) from error


def _decode_enum(
    value: TypedValue, path: str, resolve: Resolver | None, extra: Callable[[TypedValue], object] | None, depth: int
) -> object:
    name, member, inner = value.items if len(value.items) == 3 else (None, None, None)
    if not isinstance(name, str):
        raise FormatError(path, expected="an enum", found="one without the name of its class")
    try:
        kind = resolve(name) if resolve is not None else None
        if kind is None or not issubclass(kind, enum.Enum):
            raise LookupError(name)
        # read from the class's own dict: a metaclass of the program, or `_missing_`, is never called
        known: Mapping[str, Any] = type.__getattribute__(kind, "__dict__")
        if isinstance(member, str):
            return known["_member_map_"][member]
        return _enum_member_by_value(kind, known, _decode(inner, path, resolve, extra, depth + 1))
    except TreeckptError:
        raise
    except (LookupError, ValueError, TypeError) as error:
        raise MismatchError(
            path,
            expected=f"the enum {name} with {member or inner!r}",
            found="no such class or member in this program",
            hint="Import the module that defines it before loading, or leave this leaf out",
        ) from error


def _enum_member_by_value(kind: type[enum.Enum], known: Mapping[str, Any], value: object) -> enum.Enum:
    """Returns the member of an enum with this value, or the flags that combine to it, without the class's `_missing_`.

    Raises:
        ValueError, LookupError, TypeError: there is none.
    """
    members: dict[object, Any] = known["_value2member_map_"]
    if value in members:
        return members[value]
    if known["_member_type_"] not in (object, int) or type(value) is not int or not issubclass(kind, enum.Flag):
        raise LookupError(value)
    missing: Any = enum.Flag.__dict__["_missing_"]
    return missing.__func__(kind, value)
