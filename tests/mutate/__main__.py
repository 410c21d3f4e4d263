"""Mutation testing of `treeckpt/_core`: small changes to its code, drawn at random, that the tests should notice.

`python -m tests.mutate` (`make mutate`) lists all mutations that cosmic-ray knows, draws `--count` of them by `--seed`,
no two on one line, and runs the tests against each in a copy of the checkout: first the test module named after the
changed one, then all tests of the core, then the suites of `INTEGRATION`. No mutation is begun after `--seconds`. The
exit code is 1 where less than `--least` of those tried were noticed. Mutations of annotations, docstrings, the sizes of
caches and the garbage collector's tracking are left out, since they change no result.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("treeckpt", "dashboard", "tests", "pyproject.toml")
INTEGRATION = (
    "tests/test_roundtrip.py",
    "tests/loading/test_reshard.py",
    "tests/loading/test_keyed_tables.py",
    "tests/rules/test_apply_rules.py",
    "tests/io/comm/test_failures.py",
    "tests/runs/test_manager.py",
    "tests/integrity/test_hostile.py",
)
_IDENTITY = re.compile(r"_(Is|IsNot)$|_(Is|IsNot)_")
"""Operators that exchange equality and identity, which are the same for small numbers, types and None."""
TEST_SECONDS = 300
"""Limit of one run of tests. A mutation that makes them hang is noticed."""


@dataclass(frozen=True)
class Mutation:
    """One change of one module."""

    module: str
    """Path from the root of the checkout."""
    line: int
    operator: str
    occurrence: int


def mutations_of(module: str) -> Iterator[Mutation]:
    """Every mutation of a module that cosmic-ray's operators without arguments can do."""
    nodes = list(ast_nodes(get_ast((ROOT / module).read_text())))
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments() or _IDENTITY.search(name):
            continue
        operator = kind()
        positions = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, ((line, _), _) in enumerate(positions):
            yield Mutation(module, line, name, occurrence)


class _Bare(ast.NodeTransformer):
    """Removes annotations, docstrings, `lru_cache`, and `gc` of structs."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        node.decorator_list = [one for one in node.decorator_list if not ast.unparse(one).startswith("lru_cache")]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.keywords = [one for one in node.keywords if one.arg != "gc"]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def behaviour_of(source: str) -> str:
    """A text that is equal for two sources which differ only in what `_Bare` removes."""
    return ast.dump(_Bare().visit(ast.parse(source)))


def mutated(mutation: Mutation) -> str | None:
    """The source of the changed module; None where its behaviour is the same or it is no Python."""
    source = (ROOT / mutation.module).read_text()
    changed = mutate_code(source, get_operator(mutation.operator)(), mutation.occurrence)
    try:
        return None if changed is None or behaviour_of(changed) == behaviour_of(source) else changed
    except SyntaxError:
        return None


def suites_for(module: str) -> Iterator[list[str]]:
    """The tests that may notice a change of a module, those that are most likely to first."""
    path = Path(module)
    own = Path("tests", *path.parts[1:-1], f"test_{path.name}")
    if (ROOT / own).exists():
        yield [str(own)]
    yield ["tests/core"]
    yield list(INTEGRATION)


def fails(copy: Path, suites: Iterable[Sequence[str]]) -> bool:
    """Whether a test fails in a copy of the checkout.

    Raises:
        RuntimeError: there was no test to run.
    """
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    for suite in suites:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *suite]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=TEST_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:  # a package that cannot be imported is a usage error
            raise RuntimeError(f"{' '.join(command)} ran no test:\n{done.stdout.decode()}{done.stderr.decode()}")
        if done.returncode:
            return True
    return False


def is_noticed(copy: Path, mutation: Mutation, source: str) -> bool:
    """Whether a test fails with a changed module."""
    file = copy / mutation.module
    original = file.read_text()
    file.write_text(source)
    try:
        return fails(copy, suites_for(mutation.module))
    finally:
        file.write_text(original)


def describe(mutation: Mutation, source: str) -> str:
    """The changed lines."""
    before = (ROOT / mutation.module).read_text().splitlines()
    lines = difflib.unified_diff(before, source.splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join([f"{mutation.module}:{mutation.line} {mutation.operator}", *changed])


def copies(number: int, directory: str) -> SimpleQueue[Path]:
    """Copies of the checkout, one for each mutation that is tried at the same time."""
    queue: SimpleQueue[Path] = SimpleQueue()
    for index in range(number):
        copy = Path(directory) / str(index)
        copy.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy)
        queue.put(copy)
    return queue


def run(drawn: Sequence[tuple[Mutation, str]], jobs: int, until: float) -> dict[Mutation, bool]:
    """Tries mutations until a time (of `time.monotonic`); returns whether each that was tried was noticed."""
    results: dict[Mutation, bool] = {}
    with tempfile.TemporaryDirectory(prefix="treeckpt-mutate-") as directory, ThreadPoolExecutor(jobs) as pool:
        free = copies(jobs, directory)
        unchanged = free.get()
        if fails(unchanged, suites_for("")):
            raise RuntimeError("tests fail without a mutation, or take too long: mend that first")
        free.put(unchanged)

        def attempt(mutation: Mutation, source: str) -> None:
            if time.monotonic() > until:
                return
            copy = free.get()
            try:
                results[mutation] = is_noticed(copy, mutation, source)
            finally:
                free.put(copy)
            print("noticed  " if results[mutation] else "UNNOTICED", describe(mutation, source), flush=True)

        for future in [pool.submit(attempt, *one) for one in drawn]:
            future.result()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description="Mutation testing of treeckpt/_core.")
    parser.add_argument("--count", type=int, default=60, help="mutations to try (default: 60)")
    parser.add_argument("--seconds", type=float, default=1800, help="no new one is begun after these (default: 1800)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time (default: 2)")
    parser.add_argument("--least", type=float, default=0.95, help="part that must be noticed (default: 0.95)")
    parser.add_argument("--only", default="*", metavar="GLOB", help="of modules' names below treeckpt/_core")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    modules = [
        path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "treeckpt/_core").rglob(f"{options.only}.py"))
    ]
    every = [mutation for module in modules for mutation in mutations_of(module)]
    random.Random(options.seed).shuffle(every)
    drawn: dict[tuple[str, int], tuple[Mutation, str]] = {}
    for mutation in every:
        if len(drawn) == options.count:
            break
        place = mutation.module, mutation.line
        if place not in drawn and (source := mutated(mutation)) is not None:
            drawn[place] = mutation, source
    print(f"{len(drawn)} of {len(every)} mutations of {len(modules)} modules, seed {options.seed}", flush=True)
    results = run(list(drawn.values()), options.jobs, until)
    noticed = sum(results.values())
    print(f"{noticed} of {len(results)} noticed")
    return 0 if results and noticed >= options.least * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
