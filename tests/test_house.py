"""The order of the code: which modules stand where, what they may import, and how long and how named things are."""

from __future__ import annotations

import ast
import functools
import pkgutil
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"treeckpt": ROOT / "treeckpt", "treeckpt_dashboard": ROOT / "dashboard"}
MODULE_LINES = 800
FUNCTION_LINES = 60
POSITIONAL_ARGUMENTS = 6


@functools.cache
def modules() -> list[tuple[str, Path, ast.Module]]:
    """Not at the import of this file, which each worker does."""
    found: list[tuple[str, Path, ast.Module]] = []
    for name, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join([name, *parts]).removesuffix(".__init__"), path, ast.parse(path.read_text())))
    return found


@pytest.fixture(scope="module")
def contracts() -> list[dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


PUBLIC = {
    "arrays",
    "convert",
    "dcp",
    "demo",
    "errors",
    "integrations",
    "policy",
    "reports",
    "rules",
    "stores",
    "testing",
    "trees",
    "training",
}
PUBLIC_BELOW = {
    "dcp": {
        found.name
        for found in pkgutil.iter_modules(torch.distributed.checkpoint.__path__)
        if not found.name.startswith("_") and found.name != "resharding"  # it has private names alone
    },
    "integrations": {"accelerate", "lightning", "peft", "ray", "torchtitan", "transformers"},
    "demo": {"fork_ranks", "launch", "model", "tasks", "train"},
}


def test_what_is_not_public_lies_under_names_with_an_underscore():
    def public_in(folder: Path) -> set[str]:
        there = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        return {path.stem for path in there if not path.name.startswith("_")}

    root = FOLDERS["treeckpt"]
    assert public_in(root) == PUBLIC
    for name in PUBLIC:
        below = public_in(root / name) if (root / name).is_dir() else set()
        assert below == PUBLIC_BELOW.get(name, set()), name


def test_every_room_stands_in_the_order_and_no_imports_form_a_circle(contracts):
    """`exhaustive` makes import-linter itself fail for a room that is missing in the layers."""
    layered = {name for contract in contracts if contract.get("exhaustive") for name in contract["containers"]}
    acyclic = {
        name for contract in contracts if contract["type"] == "acyclic_siblings" for name in contract["ancestors"]
    }
    assert layered == acyclic == set(FOLDERS)


def test_packages_say_what_they_hold():
    packages = [(name, tree) for name, path, tree in modules() if path.name == "__init__.py"]
    assert [name for name, tree in packages if len((ast.get_docstring(tree) or "").splitlines()) < 3] == []


def test_a_class_name_is_defined_once():
    places = defaultdict(list)
    for name, _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


STORE_BASES = {"Store", "RunStore", "Writer", "ObjectBucket"}
STORE_MEMBERS = {"ordered", "fetch", "mapped", "map", "rename", "compare_and_swap", "read_version"}
STORE_MEMBERS |= {"request_nbytes", "sizes", "entries", "folder", "folders", "directory", "address", "traits"}


def store_classes() -> set[str]:
    """The classes of stores, runs of stores and what belongs to them, by inheritance."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for _, _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = set(STORE_BASES)
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def store_kind_checks(tree: ast.Module, classes: set[str]) -> Iterator[int]:
    """Lines that ask for the class of a store, or whether it has a member."""

    def names(node: ast.AST) -> set[str]:
        inner = list(ast.walk(node))
        return {one.id for one in inner if isinstance(one, ast.Name)} | {
            one.attr for one in inner if isinstance(one, ast.Attribute)
        }

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kind]) if names(kind) & classes:
                yield node.lineno
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[_, ast.Constant(value), *_]) if (
                value in STORE_MEMBERS
            ):
                yield node.lineno
            case ast.Compare(left=ast.Call(func=ast.Name("type")), comparators=others) if any(
                names(one) & classes for one in others
            ):
                yield node.lineno
            case ast.MatchClass(cls=kind) if names(kind) & classes:
                yield node.lineno


def test_outside_of_io_nothing_asks_for_the_kind_of_a_store():
    """What differs between stores is in their `traits`."""
    classes = store_classes()
    assert {"LocalStore", "MemoryStore", "ObjectStore", "CountingStore", "ForeignStore", "ObjectRun"} <= classes
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for name, path, tree in modules()
        if not name.startswith("treeckpt._io")
        for line in store_kind_checks(tree, classes)
    ]
    assert found == []


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text


def test_docstrings_are_statements():
    asking = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for _, path, tree in modules()
        for line, text in documented(tree)
        if text.split("\n\n")[0].rstrip().endswith("?")
    ]
    assert asking == []


def test_modules_and_functions_are_short():
    long = [f"{path.relative_to(ROOT)}" for _, path, _ in modules() if path.read_text().count("\n") > MODULE_LINES]
    for _, path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert long == []


def test_calls_name_their_arguments_where_there_are_many():
    """But those of `struct`, whose format says what each is, and those that pass on a sequence (`*values`)."""
    many = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.func)}"
        for _, path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) > POSITIONAL_ARGUMENTS
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
        and not ast.unparse(node.func).startswith("struct.")
    ]
    assert many == []


# tests ----------------------------------------------------------------------------------------------------------------
TESTS = ROOT / "tests"
WHOLE = {
    "browser",
    "crash",
    "dashboard",
    "fuzz",
    "golden",
    "gpu",
    "helpers",
    "integrity",
    "multirank",
    "mutate",
    "pytorch_dcp",
}
"""Folders of tests of several rooms, of another package, or of helpers; every other one mirrors a room."""


def test_folders_of_tests_are_those_of_the_rooms():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("__init__.py")} - {Path()}
    mirrored = {folder for folder in folders if folder.parts[0] not in WHOLE and folder != Path("bench/scale")}
    rooms = {path.name.removeprefix("_") for path in FOLDERS["treeckpt"].iterdir()}
    rooms |= {f"{path.parent.name.removeprefix('_')}/{path.name}" for path in FOLDERS["treeckpt"].glob("*/*/")}
    assert sorted(map(str, mirrored)) == sorted(str(folder) for folder in mirrored if str(folder) in rooms)


def test_test_modules_stand_in_the_folder_of_what_they_test():
    """At the root stand tests of the public functions, of errors, and of the project's own files."""
    there = {path.stem for path in TESTS.glob("test_*.py")}
    project = {"test_flows", "test_house", "test_notebooks", "test_readme", "test_scaffold"}
    assert there - project == {
        "test_error_classes",
        "test_errors",
        "test_examples",
        "test_exports",
        "test_mistakes",
        "test_options",
        "test_peers",
        "test_policy",
        "test_roundtrip",
    }


def test_no_test_module_imports_another():
    # to parse all of them takes seconds
    imports = re.compile(r"^[ \t]*from[ \t]+(?:\.|tests\b)[^\n(]*(?:\([^)]*\))?", re.MULTILINE)
    found = [(path, one[0]) for path in sorted(TESTS.rglob("*.py")) for one in imports.finditer(path.read_text())]
    assert len(found) > 500
    assert [f"{path.relative_to(ROOT)}: {text}" for path, text in found if re.search(r"\btest_", text)] == []
