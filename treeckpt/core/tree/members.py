"""Members of sets, keys of dicts and members of enums from a file: in time linear in its size, without calls to hooks.

A set or dict compares each object with all others of the same hash. The writer of a file can choose numbers, and tuples
of numbers, of one hash; text and bytes are hashed with a secret.
"""

# Enums of the program, and what a file holds, have any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import enum
from collections import Counter
from typing import Any, TypeVar

from ...errors import FormatError

__all__ = ["HASHED", "check_hashes", "named_member", "valued_member"]

MAX_ALIKE = 64
"""Members of one hash; -1 and -2 have one, and so have tuples of them."""
HASHED = {"set": 1, "frozenset": 1, "dict": 2, "OrderedDict": 2, "Counter": 2}
"""Kinds of values whose items are hashed: every one, or every second."""

Members = TypeVar("Members", bound="list[Any]")


def check_hashes(members: Members, path: str) -> Members:
    """The members of a set or keys of a dict, unless far more than chance allows have one hash.

    Raises:
        FormatError: naming `path`.
        TypeError: one cannot be hashed.
    """
    if len(members) > MAX_ALIKE:
        hashes = list(map(hash, members))
        if len(members) - len(set(hashes)) > MAX_ALIKE and (most := max(Counter(hashes).values())) > MAX_ALIKE:
            raise FormatError(path, expected="members whose hashes differ", found=f"{most} of one hash")
    return members


def named_member(kind: type[enum.Enum], name: str) -> enum.Enum:
    """The member of an enum of this name, without a call to the class or its metaclass.

    Raises:
        KeyError: there is none.
    """
    return type.__getattribute__(kind, "__dict__")["_member_map_"][name]


def valued_member(kind: type[enum.Enum], value: object) -> enum.Enum:
    """The member of an enum of this value, or the flags that make it up; `_missing_` of the class is not called.

    Raises:
        ValueError, LookupError, TypeError: there is none.
    """
    known = type.__getattribute__(kind, "__dict__")
    members: dict[object, Any] = known["_value2member_map_"]
    if value in members:
        return members[value]
    if known["_member_type_"] not in (object, int) or type(value) is not int or not issubclass(kind, enum.Flag):
        raise LookupError(value)
    missing: Any = enum.Flag.__dict__["_missing_"]
    return missing.__func__(kind, value)
