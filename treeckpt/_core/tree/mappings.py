"""Mapping classes of other libraries: subclasses of dict, OrderedDict and UserDict, as transformers' ModelOutput.

Items and attributes are read from, and put into, an instance's storage. Nothing of its class is called, neither at save
nor at load. Attributes are those that are also items of the same name, and plain values.
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import collections
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...errors import TreeError
from .value_codec import encode_value, type_name

MARK = "treeckpt mapping"
"""The first item of the auxiliary data of nodes of such classes; the names of attributes and their values follow."""
_HEAP_TYPE = 1 << 9
"""Flag of classes that Python code defines; those of C can have a state that only they know."""
Mapping = dict[Any, Any]


@lru_cache(maxsize=1024)
def mapping_base(kind: type) -> Any:
    """Returns the class that stores the items of a mapping class: dict, OrderedDict or UserDict; None for others."""
    bases: tuple[type, ...] = (collections.OrderedDict, dict, collections.UserDict)
    base = next((base for base in bases if issubclass(kind, base)), None)
    if base is None or kind in (dict, collections.OrderedDict, collections.Counter):
        return None
    for one in type.__getattribute__(kind, "__mro__"):
        names = type.__getattribute__(one, "__dict__")
        if "__treeckpt_leaf__" in names or names.get("__slots__"):
            return None
        if one not in (object, dict, collections.OrderedDict) and not one.__flags__ & _HEAP_TYPE:
            return None
    return None if "<locals>" in type_name(kind) else base


def mapping_state(tree: Any, path: str) -> tuple[Mapping, tuple[object, ...]] | None:
    """Returns the items of an instance of a mapping class, and its other state as plain data; None for all else."""
    base = mapping_base(type(tree))
    if base is None:
        return None
    attributes: dict[str, Any] = dict(object.__getattribute__(tree, "__dict__"))
    items = attributes.pop("data", None) if base is collections.UserDict else dict(base.items(tree))
    if type(items) is not dict:
        return None
    both = tuple(name for name, value in attributes.items() if name in items and items[name] is value)
    others = {name: value for name, value in attributes.items() if name not in both}
    try:
        encode_value(others, path)
    except TreeError:
        return None
    return items, (MARK, both, others)


def new_mapping(kind: type, state: Any, keys: Sequence[object], children: Sequence[object]) -> object:
    """Returns an instance of a mapping class.

    Args:
        state: as `mapping_state` returned it.

    Raises:
        TypeError, ValueError, KeyError: the class is no mapping class, or the state is not one of it.
    """
    base = mapping_base(kind)
    _, both, others = state
    if base is None or not all(type(name) is str for name in (*both, *others)):
        raise TypeError("no subclass of dict or UserDict whose state is its items and attributes")
    items = dict(zip(keys, children, strict=True))
    made = object.__new__(kind) if base is collections.UserDict else base.__new__(kind)
    attributes: dict[str, Any] = object.__getattribute__(made, "__dict__")
    attributes.update(others)
    attributes.update((name, items[name]) for name in both)
    if base is collections.UserDict:
        attributes["data"] = items
        return made
    for key, child in items.items():
        base.__setitem__(made, key, child)
    return made


def set_item(tree: Any, key: Any, child: object) -> None:
    """Replaces an item of an instance of a mapping class, and the attribute of the same name that is the item."""
    base, attributes = mapping_base(type(tree)), object.__getattribute__(tree, "__dict__")
    items = attributes["data"] if base is collections.UserDict else tree
    setter = dict if base is collections.UserDict else base
    if type(key) is str and key in attributes and attributes[key] is setter.__getitem__(items, key):
        attributes[key] = child
    setter.__setitem__(items, key, child)
