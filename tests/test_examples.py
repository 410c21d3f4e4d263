"""Every public function and class has an example in its docstring, and all of these run as they stand there."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc

PUBLIC = ("treeckpt", "treeckpt.training", "treeckpt.convert", "treeckpt.dcp", "treeckpt.trees", "treeckpt.arrays")
PARSER = doctest.DocTestParser()


def public_things() -> Iterator[tuple[str, Any]]:
    modules = {name: importlib.import_module(name) for name in PUBLIC} | {"treeckpt.rules": tc.rules}
    for name, module in modules.items():
        for member in module.__all__:
            thing = getattr(module, member)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                yield f"{name}.{member}", thing
    for policy in tc.policy.Policy.__args__:
        yield f"treeckpt.policy.{policy.__name__}", policy
    yield "treeckpt.stores.register", tc.stores.register


THINGS = dict(public_things())


def run(examples: list[doctest.Example], names: dict[str, Any], title: str) -> dict[str, Any]:
    """Runs examples one after the other; returns the names that they have then."""
    shown = io.StringIO()
    test = doctest.DocTest(examples, names, title, None, None, None)
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=shown.write, clear_globs=False)
    assert not failed, shown.getvalue()
    return test.globs


def examples_of(thing: Any) -> list[doctest.Example]:
    return PARSER.get_examples(inspect.getdoc(thing) or "")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory and names as the docstring of the package makes them for each example."""
    directory = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        return directory, run(examples_of(tc), {}, "treeckpt")


def test_each_public_function_and_class_has_an_example() -> None:
    assert len(THINGS) > 100
    assert [name for name, thing in THINGS.items() if not examples_of(thing)] == []


@pytest.mark.parametrize("name", THINGS)
def test_the_example_runs(
    name: str, start: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, names = start
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    model, optimizer = copy.deepcopy((names["model"], names["optimizer"]))
    run(examples_of(THINGS[name]), names | {"model": model, "optimizer": optimizer}, name)
