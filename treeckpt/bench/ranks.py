"""Scenarios of several ranks: real processes under torchrun, which go through all turns together.

`run_ranks` starts them and waits; `python -m treeckpt.bench.ranks TASK` is what each process does. Rank 0 prints the
trials of each turn as one line of JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..demo.launch import started, worker_environment
from .checkpointers import select_by_name, sync_checkpointers
from .measure import BenchError, Measurement, OnTrials, alternate
from .results import Trial
from .states import SCENARIOS, Scenario, State, local_of, make_state, shapes_bytes

__all__ = ["MARK", "BenchTask", "do_task", "run_job", "run_ranks"]

MARK = "@trials "


class BenchTask(msgspec.Struct, frozen=True):
    """What the processes are told."""

    scenario: str
    directory: str
    scale: float
    repetitions: int
    names: tuple[str, ...] = ()
    """Of contenders; all if there are none."""


def run_ranks(
    scenario: Scenario,
    directory: Path,
    *,
    scale: float,
    repetitions: int,
    on_trials: OnTrials,
    names: Sequence[str] = (),
) -> None:
    """A scenario of several processes.

    Raises:
        BenchError: they failed; the message ends with what they said.
    """
    task = BenchTask(scenario.name, str(directory.absolute()), scale, repetitions, tuple(names))

    def on_line(line: str) -> None:
        on_trials(msgspec.json.decode(line, type=list[Trial]))

    run_job("treeckpt.bench.ranks", task, ranks=scenario.ranks, on_line=on_line)


def run_job(module: str, task: object, *, ranks: int, on_line: Callable[[str], None]) -> None:
    """Runs a module under torchrun, with a task as its argument; `on_line` gets the results that it prints.

    Raises:
        BenchError: it failed; the message ends with what it said.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, "-m", module, msgspec.json.encode(task).decode()]
    said: list[str] = []
    with started(command, worker_environment(os.environ)) as process:
        for line in process.stdout or ():
            if line.startswith(MARK):
                on_line(line[len(MARK) :])
            else:
                said = [*said[-100:], line]
        code = process.wait()
    if code:
        raise BenchError(f"{module}: the ranks ended with exit code {code}. They said last:\n{''.join(said)}")


class _TorchrunGroup:
    """The ranks of this job."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things


def work(task: BenchTask) -> None:
    """What each process does."""
    [scenario] = [s for s in SCENARIOS if s.name == task.scenario]
    group = _TorchrunGroup()
    mesh = init_device_mesh("cpu", (group.size,))
    shapes = scenario.shapes(task.scale)

    def rows(full: torch.Tensor) -> torch.Tensor:
        return local_of(full, mesh, 0) if scenario.columns else full

    def columns(full: torch.Tensor) -> torch.Tensor:
        return local_of(full, mesh, 1) if scenario.columns else full

    def expected() -> State:
        return make_state(shapes, columns)

    state, target = make_state(shapes, rows), expected()
    turns = Measurement(scenario, Path(task.directory), group, shapes_bytes(shapes))
    for repetition, contender in alternate(
        select_by_name(sync_checkpointers(group.size), task.names), task.repetitions
    ):
        trials = turns.turn(contender, repetition, state, target, expected if repetition == 0 else None)
        if group.rank == 0:
            print(MARK + msgspec.json.encode(trials).decode(), flush=True)


def do_task(work: Callable[[BenchTask], None]) -> None:
    """Does the task on the command line, with the default process group up."""
    dist.init_process_group("gloo")
    try:
        work(msgspec.json.decode(sys.argv[1], type=BenchTask))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    do_task(work)
