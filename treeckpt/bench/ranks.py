"""Scenarios of several ranks: real processes under torchrun, which go through all turns together.

`run_ranks` starts them and waits; `python -m treeckpt.bench.ranks TASK` is what each process does. Rank 0 prints the
trials of each turn as one line of JSON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..demo.launch import started, worker_environment
from .contenders import contenders_for
from .results import Trial
from .states import SCENARIOS, Scenario, State, local_of, make_state, shapes_bytes
from .turns import BenchError, OnTrials, Turns, in_turns

__all__ = ["run_ranks"]

MARK = "@trials "


class Task(msgspec.Struct, frozen=True):
    """What the processes are told."""

    scenario: str
    directory: str
    scale: float
    repetitions: int


def run_ranks(scenario: Scenario, directory: Path, *, scale: float, repetitions: int, on_trials: OnTrials) -> None:
    """A scenario of several processes.

    Raises:
        BenchError: they failed; the message ends with what they said.
    """
    task = msgspec.json.encode(Task(scenario.name, str(directory.absolute()), scale, repetitions)).decode()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={scenario.ranks}"]
    command = [sys.executable, *launcher, "-m", "treeckpt.bench.ranks", task]
    said: list[str] = []
    with started(command, worker_environment(os.environ)) as process:
        for line in process.stdout or ():
            if line.startswith(MARK):
                on_trials(msgspec.json.decode(line[len(MARK) :], type=list[Trial]))
            else:
                said = [*said[-40:], line]
        code = process.wait()
    if code:
        raise BenchError(f"{scenario.name}: the ranks ended with exit code {code}. They said last:\n{''.join(said)}")


class _Torchrun:
    """The ranks of this job."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things


def work(task: Task) -> None:
    """What each process does."""
    [scenario] = [s for s in SCENARIOS if s.name == task.scenario]
    group = _Torchrun()
    mesh = init_device_mesh("cpu", (group.size,))
    shapes = scenario.shapes(task.scale)

    def rows(full: torch.Tensor) -> torch.Tensor:
        return local_of(full, mesh, 0) if scenario.columns else full

    def columns(full: torch.Tensor) -> torch.Tensor:
        return local_of(full, mesh, 1) if scenario.columns else full

    def expected() -> State:
        return make_state(shapes, columns)

    state, target = make_state(shapes, rows), expected()
    turns = Turns(scenario, Path(task.directory), group, shapes_bytes(shapes))
    for repetition, contender in in_turns(contenders_for(group.size), task.repetitions):
        trials = turns.turn(contender, repetition, state, target, expected if repetition == 0 else None)
        if group.rank == 0:
            print(MARK + msgspec.json.encode(trials).decode(), flush=True)


def main() -> None:
    """Reads the task from the command line."""
    dist.init_process_group("gloo")
    try:
        work(msgspec.json.decode(sys.argv[1], type=Task))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
