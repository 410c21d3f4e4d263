"""`treeckpt bench --only incremental`: saves of a model with frozen weights and small adapters, as in a LoRA training.

Between the saves the adapters and their moments change. Each contender saves in turn, in rounds, into a directory of
its own: what it writes and how long that takes are medians; the last checkpoints are loaded in turn too.
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
MIN_ROUNDS = 4
"""The first two saves of a run put what is frozen into files of its own, and are not counted."""


class Contender(Protocol):
    """A way to save a run of checkpoints."""

    name: str

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
        self.name = "treeckpt incremental" if incremental else "treeckpt"
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
    """The state: one flat dict of parameters and moments, frozen and trained ones in turn."""

    def __init__(self, scale: float) -> None:
        rows = max(1, round(FROZEN_SHAPE[0] * scale)), max(1, round(ADAPTER_SHAPE[0] * scale))
        self.tree: dict[str, torch.Tensor] = {}
        for layer in range(LAYERS):
            frozen = torch.nn.Parameter(torch.randn(rows[0], FROZEN_SHAPE[1]), requires_grad=False)
            self.tree[f"layer{layer}.base"] = frozen
            for name in ("adapter", "exp_avg", "exp_avg_sq"):
                self.tree[f"layer{layer}.{name}"] = torch.randn(rows[1], ADAPTER_SHAPE[1])

    @property
    def trained_nbytes(self) -> int:
        return sum(leaf.nbytes for name, leaf in self.tree.items() if not name.endswith("base"))

    def train(self) -> None:
        with torch.no_grad():
            for name, leaf in self.tree.items():
                if not name.endswith("base"):
                    leaf += 1


def run_incremental(directory: Path, scale: float, repetitions: int) -> list[IncrementalSummary]:
    """Measures each contender and prints the table."""
    state = Adapted(scale)
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
        state.train()
        for one in contenders:
            seconds = _seconds(partial(one.save, step, state.tree))
            saved[one.name] += [seconds] if step > 2 else []
            print(f"{one.name}: {seconds:.3f} s, {one.written() / 1e6:.1f} MB", file=sys.stderr)
    for _ in range(repetitions):
        for one in contenders:
            loaded[one.name].append(_seconds(one.load))
    trained = state.trained_nbytes
    rows = [
        IncrementalSummary(
            contender=one.name,
            saves=len(saved[one.name]),
            nbytes=one.written(),
            per_trained=one.written() / trained,
            save=median(saved[one.name]),
            load=median(loaded[one.name]),
        )
        for one in contenders
    ]
    print_incremental(rows, trained)
    return rows


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
