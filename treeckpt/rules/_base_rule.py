"""The base of all load rules: plain data whose fields have the types that they say."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import msgspec
import numpy as np

from .._core.sharding.dtypes import normalize_dtype
from ..errors import MismatchError

_DTYPES = ("dtype", "of")
"""The fields of rules that are dtypes."""


class BaseRule(
    msgspec.Struct, frozen=True, tag_field="rule", omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """The base of all rules.

    A list becomes a tuple, a name in the place of several a tuple of it, a number of numpy one of Python, and a dtype
    its name.

    Args:
        optional: whether the rule may match no leaf; otherwise that is an error, as a misspelt name looks the same.

    Raises:
        MismatchError: an argument is of another type.
    """

    optional: bool = False

    def __post_init__(self) -> None:
        for name, kind, text in _fields(type(self)):
            given = getattr(self, name)
            try:
                value = normalize_dtype(given) if name in _DTYPES and given is not None else given
                value = _converted(value, kind)
            except (msgspec.ValidationError, MismatchError) as error:
                raise MismatchError(
                    f"rules.{type(self).__name__}",
                    expected=f"{error.expected if isinstance(error, MismatchError) else text} as {name}",
                    found=f"{given!r:.80}",
                    hint=f"help(treeckpt.rules.{type(self).__name__}) says what it takes",
                ) from error
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)


@cache
def _fields(kind: type[BaseRule]) -> list[tuple[str, Any, str]]:
    """Returns the name, the type and the text of the type of each field."""
    texts = {name: text for base in reversed(kind.__mro__) for name, text in inspect.get_annotations(base).items()}
    return [(field.name, field.type, texts[field.name]) for field in msgspec.structs.fields(kind)]


def _converted(value: Any, kind: Any) -> Any:
    if isinstance(value, str) and kind == tuple[str, ...]:
        value = (value,)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return msgspec.convert(_plain(value), kind)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, range)):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value
