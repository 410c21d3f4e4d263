"""Measures a keyed table beside dense tensors of the same bytes, both saved by treeckpt.

The ids are all 64 bits in no order at all, so every row has to be moved, as in a table that has grown in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import treeckpt
from tests.bench.states import SpeedTask
from treeckpt._bench.checkpointers import SyncTreeckpt
from treeckpt._bench.measure import Measurement
from treeckpt._bench.results import Trial
from treeckpt._bench.states import State, make_state, shapes_bytes


class DenseCheckpoint(SyncTreeckpt):
    """Ids and columns as plain tensors, which come back in the same order."""

    name = "treeckpt dense"
    kinds = ("save", "load")

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.ids = ids

    def prepare(self, state: State) -> Any:
        return {"ids": self.ids, **state}

    def order(self) -> torch.Tensor:
        """Returns the order in which rows come back."""
        return torch.arange(len(self.ids))


class TableCheckpoint(DenseCheckpoint):
    """A keyed table, loaded by an owner of all buckets."""

    name = "treeckpt"

    def prepare(self, state: State) -> Any:
        self._like = treeckpt.KeyedTable(self.ids[:0], {name: leaf[:0] for name, leaf in state.items()})
        return {"table": treeckpt.KeyedTable(self.ids, state)}

    def load(self, directory: Path, like: State) -> State:
        table = treeckpt.load(directory / "step", {"table": self._like})["table"]
        return {"ids": table.ids, **table.slots}

    def order(self) -> torch.Tensor:
        """Returns the order by bucket, then by id as unsigned."""
        unsigned = self.ids.numpy().view(np.uint64)
        return torch.from_numpy(np.lexsort((unsigned, unsigned % np.uint64(65_536))))


def run_table(task: SpeedTask) -> Iterator[list[Trial]]:
    """Saves and loads, cold and warm; yields the trials of each turn."""
    state = make_state(task.shapes)
    rows = len(next(iter(state.values())))
    with np.errstate(over="ignore"):  # odd multiples of a number, modulo a power of two, are a permutation
        ids = torch.from_numpy((np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))
    measurement = Measurement(task, shapes_bytes(task.shapes) + ids.nbytes)
    contenders = [c for c in (DenseCheckpoint(ids), TableCheckpoint(ids)) if task.selects(c.name)]
    for repetition, contender in task.turns(contenders):
        difference = partial(_different_column, contender, state) if repetition == 0 else None
        yield measurement.turn(contender, repetition, state, {}, difference)


def _different_column(contender: DenseCheckpoint, state: State, loaded: State) -> str | None:
    order = contender.order()
    columns = {"ids": contender.ids, **state}
    return next((name for name, leaf in columns.items() if not torch.equal(loaded[name], leaf[order])), None)
