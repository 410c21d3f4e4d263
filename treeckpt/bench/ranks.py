"""Scenarios in processes of their own: those of several ranks, and background saves.

`run_job` starts a process, which calls `do_task`; rank 0 prints results as lines of JSON that begin with `MARK`.
`python -m treeckpt.bench.ranks TASK` is the process of a scenario of several ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..demo.fork_ranks import fork_ranks
from ..demo.launch import started, worker_environment
from .checkpointers import SyncOneRank, sync_checkpointers
from .measure import BenchError, Measurement, RankGroup
from .results import Trial
from .states import BenchTask, State, different_leaf, make_state, shapes_bytes

T = TypeVar("T")
MARK = "@trials "


def run_job(module: str, task: BenchTask, result: type[T]) -> Iterator[T]:
    """Runs a module with a task as its argument; yields the results that it prints.

    Raises:
        BenchError: it failed; the message ends with its last output.
    """
    command = [sys.executable, "-m", module, msgspec.json.encode(task).decode()]
    printed: list[str] = []
    with started(command, worker_environment(os.environ)) as process:
        for line in process.stdout or ():
            if line.startswith(MARK):
                yield msgspec.json.decode(line[len(MARK) :], type=result)
            else:
                printed = [*printed[-100:], line]
        code = process.wait()
    if code:
        raise BenchError(f"{module}: the ranks ended with exit code {code}. They said last:\n{''.join(printed)}")


def do_task(work: Callable[[BenchTask], Iterator[Any]]) -> None:
    """Does the task on the command line on its ranks, in a process group; prints its results on rank 0."""
    task = msgspec.json.decode(sys.argv[1], type=BenchTask)
    if task.scenario.ranks > 1:
        fork_ranks(_work, task.scenario.ranks, work, task)
    else:  # not forked: a process that has asked for CUDA devices must not fork
        _work(work, task, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]


def _work(work: Callable[[BenchTask], Iterator[Any]], task: BenchTask, **group: Any) -> None:
    dist.init_process_group("gloo", **group)
    try:
        for result in work(task):
            if dist.get_rank() == 0:
                print(MARK + msgspec.json.encode(result).decode(), flush=True)
    finally:
        dist.destroy_process_group()


class _TorchrunGroup(RankGroup):
    """The ranks of this job."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things


def _measure_ranks(task: BenchTask) -> Iterator[list[Trial]]:
    group = _TorchrunGroup()
    mesh = init_device_mesh("cpu", (group.size,)) if task.scenario.columns else None
    make_target = partial(make_state, task.shapes, mesh, 1)
    state, target = make_state(task.shapes, mesh, 0), make_target()

    def difference(loaded: State) -> str | None:
        return different_leaf(loaded, make_target()) if loaded else None  # another rank loads

    measurement = Measurement(task, shapes_bytes(task.shapes), group)
    contenders = [*sync_checkpointers(group.size), *([SyncOneRank()] if task.scenario.one else [])]
    contenders = [c for c in contenders if task.selects(c.name)]
    for repetition, contender in task.turns(contenders):
        yield measurement.turn(contender, repetition, state, target, difference if repetition == 0 else None)


if __name__ == "__main__":
    do_task(_measure_ranks)
