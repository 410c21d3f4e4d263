"""Public classes and functions say that they are of the public module, and not of the one that defines them.

So what is printed and pickled of them names no private module, which may move.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any


def publish(module: str, names: Iterable[str], namespace: dict[str, Any]) -> None:
    """Makes a public module that of its classes and functions; what another one has published stays of that one.

    Args:
        module: its name.
        names: those that it exports.
        namespace: where they are.
    """
    for name in names:
        one = namespace.get(name)
        if isinstance(one, (type, FunctionType)) and "._" in one.__module__:
            if isinstance(one, type):
                _resolve_annotations(one, namespace)
            one.__module__, one.__name__, one.__qualname__ = module, name, name


def _resolve_annotations(kind: type, namespace: dict[str, Any]) -> None:
    """Puts types in the place of annotations whose names another module has: the lookup by name is in that of a class.

    msgspec and typing look them up when they are first needed.
    """
    try:
        inspect.get_annotations(kind, globals=namespace, eval_str=True)
    except NameError:
        kind.__annotations__ = inspect.get_annotations(kind, eval_str=True)
