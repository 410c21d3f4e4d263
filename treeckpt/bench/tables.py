"""Measures a keyed table beside dense tensors of the same bytes, both saved by treeckpt.

The ids are all 64 bits in no order at all, so every row has to be moved, as in a table that has grown in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import treeckpt

from .checkpointers import select_by_name
from .measure import BenchError, Measurement, OnTrials, SingleProcess, alternate
from .results import Phase
from .states import Scenario, State, make_state, shapes_bytes

__all__ = ["DenseCheckpoint", "TableCheckpoint", "run_table"]


class DenseCheckpoint:
    """The same bytes as plain tensors."""

    name = "treeckpt dense"

    def prepare(self, state: State, ids: torch.Tensor) -> Any:
        """A flat dict."""
        return {"ids": ids, **state}

    def load(self, directory: Path) -> State:
        """As saved."""
        return treeckpt.load(directory / "step")

    def order(self, ids: torch.Tensor) -> torch.Tensor:
        """In which order rows come back."""
        return torch.arange(len(ids))


class TableCheckpoint:
    """A keyed table, loaded by an owner of all buckets."""

    name = "treeckpt"

    def prepare(self, state: State, ids: torch.Tensor) -> Any:
        """A table alone."""
        self._like = treeckpt.KeyedTable(ids[:0], {name: leaf[:0] for name, leaf in state.items()})
        return {"table": treeckpt.KeyedTable(ids, state)}

    def load(self, directory: Path) -> State:
        """As an owner of all buckets does."""
        table = treeckpt.load(directory / "step", {"table": self._like})["table"]
        return {"ids": table.ids, **table.slots}

    def order(self, ids: torch.Tensor) -> torch.Tensor:
        """By bucket, then by id as unsigned."""
        unsigned = ids.numpy().view(np.uint64)
        return torch.from_numpy(np.lexsort((unsigned, unsigned % np.uint64(65_536))))


def make_ids(rows: int) -> torch.Tensor:
    """So many distinct ids of 64 bits."""
    with np.errstate(over="ignore"):
        # odd multiples of a number, modulo a power of two, are a permutation
        return torch.from_numpy((np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))


def run_table(
    scenario: Scenario,
    directory: Path,
    *,
    scale: float,
    repetitions: int,
    on_trials: OnTrials,
    names: Sequence[str] = (),
) -> None:
    """Saves and loads, cold and warm."""
    shapes = scenario.shapes(scale)
    state = make_state(shapes, lambda full: full)
    ids = make_ids(len(next(iter(state.values()))))
    nbytes = shapes_bytes(shapes) + ids.nbytes
    turns = Measurement(scenario, directory, SingleProcess(), nbytes)
    contenders: list[DenseCheckpoint | TableCheckpoint] = [DenseCheckpoint(), TableCheckpoint()]
    for repetition, contender in alternate(select_by_name(contenders, names), repetitions):
        place, prepared = turns.begin(), contender.prepare(state, ids)

        def save(place: Path = place, prepared: Any = prepared) -> None:
            treeckpt.save(place / "step", prepared)

        def load(place: Path = place, contender: DenseCheckpoint | TableCheckpoint = contender) -> State:
            return contender.load(place)

        check = _checker(contender, state, ids) if repetition == 0 else None
        key = contender.name
        on_trials(turns.trial((key, "save", repetition), save, ("C", "W"), nbytes=nbytes))
        phases: tuple[Phase, ...] = ("load cold", "load warm")
        for phase in phases:
            limit = ("R_fresh",) if phase == "load cold" else ("plain_fresh",)
            on_trials(turns.trial((key, phase, repetition), load, limit, nbytes=nbytes, check=check))
        turns.end()


def _checker(contender: DenseCheckpoint | TableCheckpoint, state: State, ids: torch.Tensor) -> Callable[[State], None]:
    def check(made: State) -> None:
        order = contender.order(ids)
        for name, leaf in {"ids": ids, **state}.items():
            if not torch.equal(made[name], leaf[order]):
                raise BenchError(f"{contender.name}: table: {name} came back changed")

    return check
