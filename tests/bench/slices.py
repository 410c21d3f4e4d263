"""Measures loads of some of the rows of a leaf, cold: what counts is how much is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import treeckpt
from tests.bench.states import SpeedTask
from treeckpt._bench.checkpointers import SyncCheckpointer, SyncSafetensors, SyncTorchSave, SyncTreeckpt
from treeckpt._bench.measure import Measurement
from treeckpt._bench.results import Trial
from treeckpt._bench.states import State, different_leaf, make_leaf, shapes_bytes

LoadRows = Callable[[Path, str, tuple[int, ...], int, int], torch.Tensor]
"""Returns rows from a start to before a stop of a leaf of a shape."""


def _rows_of_treeckpt(directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    piece = torch.empty((stop - start, *shape[1:]))
    wanted = treeckpt.Sharded(piece, shape, (start, *(0 for _ in shape[1:])))
    return treeckpt.load(directory / "step", {name: wanted})[name].local


def _rows_of_torch(directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    return torch.load(directory / "state.pt", mmap=True)[name][start:stop].clone()


def _rows_of_safetensors(directory: Path, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(directory / "state.safetensors", framework="pt") as file:
        return file.get_slice(name)[start:stop]


WAYS: tuple[tuple[SyncCheckpointer, LoadRows], ...] = (
    (SyncTreeckpt(), _rows_of_treeckpt),
    (SyncTorchSave(), _rows_of_torch),
    (SyncSafetensors(), _rows_of_safetensors),
)


def run_slice(task: SpeedTask) -> Iterator[list[Trial]]:
    """Yields the trials of each turn."""
    [(name, shape)] = task.shapes.items()
    state = {name: make_leaf(shape, 0)}
    part = task.scenario.part
    start = shape[0] * 3 // part
    stop = start + max(1, shape[0] // part)
    rows = {name: state[name][start:stop]}
    measurement = Measurement(task, shapes_bytes(task.shapes))
    for repetition, (contender, load_rows) in task.turns([way for way in WAYS if task.selects(way[0].name)]):
        measurement.begin()
        contender.save(measurement.directory, state)
        measurement.limits(["W"])  # writes the file for the limit of the load
        difference = partial(different_leaf, rows) if repetition == 0 else None

        def load(load_rows: LoadRows = load_rows) -> State:
            return {name: load_rows(measurement.directory, name, shape, start, stop)}

        yield [measurement.trial(contender.name, "load cold", repetition, load, rows[name].nbytes, difference)]
        measurement.end()
