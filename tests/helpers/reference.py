"""Writes the reference of the public names: `make docs` calls it with pdoc's arguments.

Public classes and functions say that they are of a public module. pdoc looks there for the names in their annotations
and for the source of a class, which has the order and the docstrings of its fields: both are found here where the
object is defined.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import iter_modules
from types import FunctionType, ModuleType
from typing import Any

from pdoc import doc_ast
from pdoc.__main__ import cli

import treeckpt.integrations

PACKAGES = treeckpt, treeckpt.integrations

FRAMEWORKS = ("accelerate", "lightning", "peft", "ray", "torchtitan", "transformers")


class Nothing:
    """What the names of a framework that is not installed stand for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, thing: Any = None, *_: Any, **__: Any) -> Any:
        return thing


class Absent(ModuleType):
    """A module of a framework that is not installed: every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {"__module__": self.__name__})


class AbsentFrameworks(MetaPathFinder, Loader):
    """Finds every module of the frameworks that are not installed."""

    def __init__(self) -> None:
        self._absent = [name for name in FRAMEWORKS if find_spec(name) is None]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def evaluate_annotations(module: str) -> None:
    """Puts types in the place of the texts by which the public functions of a module are annotated."""
    public = importlib.import_module(module)
    for name in getattr(public, "__all__", ()):
        function = getattr(public, name)
        setattr(public, name, function)  # pdoc does not ask a module's __getattr__
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
    sys.meta_path.append(AbsentFrameworks())
    modules = [module.name for package in PACKAGES for module in iter_modules(package.__path__, f"{package.__name__}.")]
    for module in ["treeckpt", *(name for name in modules if "._" not in name)]:
        evaluate_annotations(module)
    doc_ast.get_source = source_of
    cli(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
