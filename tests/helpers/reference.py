"""Writes the reference of the public names: `make docs` calls it with pdoc's arguments.

pdoc looks annotations up in the module that a function says it is of. That is the public one, which lacks most of their
names: they are evaluated here, where the function is defined.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from types import FunctionType

import treeckpt


def evaluate_annotations(module: str) -> None:
    """Puts types in the place of the texts by which the public functions of a module are annotated."""
    public = importlib.import_module(module)
    for name in getattr(public, "__all__", ()):
        function = getattr(public, name)
        while isinstance(function, FunctionType):
            function.__annotations__ = inspect.get_annotations(inspect.unwrap(function), eval_str=True)
            function = getattr(function, "__wrapped__", None)


def main(arguments: Sequence[str]) -> None:
    from pdoc.__main__ import cli

    for module in pkgutil.iter_modules(treeckpt.__path__, "treeckpt."):
        if "._" not in module.name and "__" not in module.name:
            evaluate_annotations(module.name)
    evaluate_annotations("treeckpt")
    cli(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
