"""Writes the reference of the public names: `make docs` calls it with pdoc's arguments.

Public classes and functions say that they are of a public module. pdoc looks there for the names in their annotations
and for the source of a class, which has the order and the docstrings of its fields: both are found here where the
object is defined.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from types import FunctionType

from pdoc import doc_ast
from pdoc.__main__ import cli

import treeckpt


def evaluate_annotations(module: str) -> None:
    """Puts types in the place of the texts by which the public functions of a module are annotated."""
    public = importlib.import_module(module)
    for name in getattr(public, "__all__", ()):
        function = getattr(public, name)
        while isinstance(function, FunctionType):
            function.__annotations__ = inspect.get_annotations(inspect.unwrap(function), eval_str=True)
            function = getattr(function, "__wrapped__", None)


@cache
def source_of(thing: object) -> str:
    """Returns the source of a class, function or module; empty where none is found."""
    if not isinstance(thing, type) or not thing.__module__.startswith("treeckpt"):
        with suppress(OSError, TypeError):
            return inspect.getsource(thing)
        return ""
    for module in [module for name, module in sys.modules.items() if name.startswith("treeckpt")]:
        for name in [name for name, value in vars(module).items() if value is thing]:
            stand_in = type(name, (), {"__module__": module.__name__})
            with suppress(OSError, TypeError):
                return inspect.getsource(stand_in)
    return ""


def main(arguments: Sequence[str]) -> None:
    modules = [module.name for module in pkgutil.iter_modules(treeckpt.__path__, "treeckpt.")]
    for module in ["treeckpt", *(name for name in modules if not name.startswith("treeckpt._"))]:
        evaluate_annotations(module)
    doc_ast.get_source = source_of
    cli(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
