"""`treeckpt bench --only incremental`: saves of states of which little changes between them.

One is a model with frozen weights and small adapters, as in a LoRA training; the other a keyed table of which one row
in a hundred changes. Each contender saves in turn, in rounds, into a directory of its own: what it writes and how long
that takes are medians; the last checkpoints are loaded in turn too.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

import treeckpt

from .checkpointers import SyncDcp, SyncTorchSave
from .results import IncrementalSummary, print_incremental
from .states import State

LAYERS = 24
FROZEN_SHAPE, ADAPTER_SHAPE = (2_300, 2_048), (48, 2_048)
"""Shapes in each layer: of the frozen weight, and of the adapter and each of its two moments. 452 and 28 MB in all."""
ROWS, ROW = 2_000_000, 64
"""Rows of the table, and the numbers in each: 528 MB with the ids."""
CHANGED = 0.01
"""The share of the rows that changes between two saves."""
MIN_ROUNDS = 4
"""The first two saves of a run put what is frozen into files of its own, and are not counted."""


class ChangingState(Protocol):
    """A state of which little changes."""

    name: str
    tree: dict[str, Any]
    """As treeckpt saves it."""
    plain: dict[str, torch.Tensor]
    """The same for libraries that know no tables."""
    changed_nbytes: int
    """Bytes of what changes."""

    def change(self) -> None: ...


class Contender(Protocol):
    """A way to save a run of checkpoints."""

    name: str
    takes_tables: bool

    def save(self, step: int, tree: Any) -> None:
        """Saves a step, durably."""
        ...

    def load(self) -> object:
        """Loads the step that was saved last."""
        ...

    def written(self) -> int:
        """Returns the bytes of the files that the last save has written."""
        ...


class TreeckptRun:
    """A run of treeckpt: `incremental` or not."""

    def __init__(self, directory: Path, *, incremental: bool) -> None:
        self.name, self.takes_tables = "treeckpt incremental" if incremental else "treeckpt", True
        self.directory = directory / self.name.replace(" ", "-")
        self.manager = treeckpt.Manager(self.directory, keep=1, background=False, incremental=incremental)

    def save(self, step: int, tree: Any) -> None:
        self.manager.save(step, tree)

    def load(self) -> object:
        return treeckpt.load(self._newest)

    def written(self) -> int:
        return _nbytes_of(Path(self._newest))

    @property
    def _newest(self) -> str:
        return self.manager.path(self.manager.steps()[-1])


class Peer:
    """A library that writes all: each save replaces the one before."""

    def __init__(self, directory: Path, library: SyncDcp | SyncTorchSave) -> None:
        self.name, self.directory, self._library = library.name, directory / library.name, library
        self._like: State = {}
        self.takes_tables = False

    def save(self, step: int, tree: Any) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        self._like = {name: leaf.detach() for name, leaf in tree.items()}
        self._library.save(self.directory, self._like)

    def load(self) -> object:
        return self._library.load(self.directory, self._like)

    def written(self) -> int:
        return _nbytes_of(self.directory)


def _nbytes_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


class Adapted:
    """One flat dict of parameters and moments, frozen and trained ones in turn."""

    def __init__(self, scale: float) -> None:
        self.name = "frozen weights"
        rows = max(1, round(FROZEN_SHAPE[0] * scale)), max(1, round(ADAPTER_SHAPE[0] * scale))
        self.tree: dict[str, torch.Tensor] = {}
        for layer in range(LAYERS):
            frozen = torch.nn.Parameter(torch.randn(rows[0], FROZEN_SHAPE[1]), requires_grad=False)
            self.tree[f"layer{layer}.base"] = frozen
            for name in ("adapter", "exp_avg", "exp_avg_sq"):
                self.tree[f"layer{layer}.{name}"] = torch.randn(rows[1], ADAPTER_SHAPE[1])
        self.plain, self.trained = self.tree, [leaf for name, leaf in self.tree.items() if not name.endswith("base")]
        self.changed_nbytes = sum(leaf.nbytes for leaf in self.trained)

    def change(self) -> None:
        with torch.no_grad():
            for leaf in self.trained:
                leaf += 1


class Table:
    """A keyed table in no order."""

    def __init__(self, scale: float) -> None:
        self.name, count = "a keyed table", max(1000, round(ROWS * scale))
        ids, rows = torch.randperm(1 << 24)[:count].clone(), torch.randn(count, ROW)
        self.tree = {"table": treeckpt.KeyedTable(ids, {"embedding": rows})}
        self.plain = {"ids": ids, "embedding": rows}
        self.changed_nbytes = round(CHANGED * count) * (8 + 4 * ROW)

    def change(self) -> None:
        rows = self.plain["embedding"]
        rows[torch.randperm(len(rows))[: round(CHANGED * len(rows))]] += 1


def run_incremental(directory: Path, scale: float, repetitions: int) -> list[IncrementalSummary]:
    """Measures each contender with each state, and prints the tables."""
    states: Sequence[Callable[[float], ChangingState]] = (Adapted, Table)
    return [
        row for number, make in enumerate(states) for row in _run(directory / f"{number}", make(scale), repetitions)
    ]


def _run(directory: Path, state: ChangingState, repetitions: int) -> list[IncrementalSummary]:
    directory.mkdir()
    makers: Sequence[Callable[[], Contender]] = (
        lambda: TreeckptRun(directory, incremental=True),
        lambda: TreeckptRun(directory, incremental=False),
        lambda: Peer(directory, SyncDcp()),
        lambda: Peer(directory, SyncTorchSave()),
    )
    contenders = [make() for make in makers]
    saved: dict[str, list[float]] = {one.name: [] for one in contenders}
    loaded: dict[str, list[float]] = {one.name: [] for one in contenders}
    for step in range(1, max(repetitions, MIN_ROUNDS) + 3):
        state.change()
        for one in contenders:
            seconds = _seconds(partial(one.save, step, state.tree if one.takes_tables else state.plain))
            saved[one.name] += [seconds] if step > 2 else []
            print(f"{one.name}: {seconds:.3f} s, {one.written() / 1e6:.1f} MB", file=sys.stderr)
    for repetition in range(repetitions):
        # each is the first one in turn: what it finds in memory is left by the one before
        first = repetition % len(contenders)
        for one in contenders[first:] + contenders[:first]:
            loaded[one.name].append(_seconds(one.load))
    changed = state.changed_nbytes
    rows = [
        IncrementalSummary(
            state=state.name,
            contender=one.name,
            saves=len(saved[one.name]),
            nbytes=one.written(),
            per_changed=one.written() / changed,
            save=median(saved[one.name]),
            load=median(loaded[one.name]),
        )
        for one in contenders
    ]
    print_incremental(rows, changed)
    return rows


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
