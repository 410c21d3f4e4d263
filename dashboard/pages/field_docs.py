"""The docstrings of fields as descriptions in the OpenAPI document: they are in the source only, so it is parsed."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import msgspec


def describe_fields(components: dict[str, Any], types: Iterable[Any]) -> None:
    """Adds the docstrings of fields to the schemas of structs; without the source there are none.

    Args:
        components: the schemas by the name of their struct, as msgspec makes them.
        types: those that the schemas were made of.
    """
    structs: dict[str, type[msgspec.Struct]] = {}
    for kind in types:
        _collect(kind, structs)
    modules = {base.__module__ for struct in structs.values() for base in struct.__mro__}
    docs = {module: _field_docs(module) for module in modules}
    for name, struct in structs.items():
        properties = components.get(name, {}).get("properties", {})
        for base in reversed(struct.__mro__):
            for field, text in docs[base.__module__].get(base.__name__, {}).items():
                if field in properties:
                    properties[field]["description"] = text


def _collect(kind: Any, found: dict[str, type[msgspec.Struct]]) -> None:
    """Adds the structs that a type is made of, by name."""
    for part in get_args(kind):
        _collect(part, found)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__ not in found:
        found[kind.__name__] = kind
        for part in get_type_hints(kind).values():
            _collect(part, found)


def _field_docs(module: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings of fields in a module of the package, by class and field."""
    if not module.startswith("treeckpt"):
        return {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    found: dict[str, dict[str, str]] = {}
    for struct in tree.body:
        if isinstance(struct, ast.ClassDef):
            found[struct.name] = {
                field.target.id: inspect.cleandoc(text.value.value)
                for field, text in pairwise(struct.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(text.value.value, str)
            }
    return found
