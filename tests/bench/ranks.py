"""Scenarios in processes of their own: those of several ranks, and background saves.

`run_job` starts a process, which calls `do_task`; rank 0 prints results as lines of JSON that begin with `MARK`.
`python -m tests.bench.ranks TASK` is the process of a scenario of several ranks.
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

from tests.bench.checkpointers import SyncOneRank, rank_checkpointers
from tests.bench.results import RankTrial
from tests.bench.states import SpeedTask, locals_of, make_cut_state
from treeckpt._bench.checkpointers import SyncCheckpointer, files_of
from treeckpt._bench.measure import Difference, Measurement, measure_work, new_nbytes, pretouch_memory
from treeckpt._bench.results import LIMITS, BenchError
from treeckpt._bench.states import State, different_leaf, shapes_bytes
from treeckpt.demo.fork_ranks import fork_ranks
from treeckpt.demo.launch import started, worker_environment

T = TypeVar("T")
MARK = "@trials "


def run_job(module: str, task: SpeedTask, result: type[T]) -> Iterator[T]:
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


def do_task(work: Callable[[SpeedTask], Iterator[Any]]) -> None:
    """Does the task on the command line on its ranks, in a process group; prints its results on rank 0."""
    task = msgspec.json.decode(sys.argv[1], type=SpeedTask)
    if task.scenario.ranks > 1:
        fork_ranks(_work, task.scenario.ranks, work, task)
    else:  # not forked: a process that has asked for CUDA devices must not fork
        _work(work, task, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]


def _work(work: Callable[[SpeedTask], Iterator[Any]], task: SpeedTask, **group: Any) -> None:
    dist.init_process_group("gloo", **group)
    try:
        for result in work(task):
            if dist.get_rank() == 0:
                print(MARK + msgspec.json.encode(result).decode(), flush=True)
    finally:
        dist.destroy_process_group()


def _gather(thing: Any) -> list[Any]:
    """Returns every rank's thing, on every rank; waits for all."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


class RankMeasurement(Measurement):
    """Measures turns that all ranks go through together; rank 0 measures the limits, and drops and fills the cache."""

    def __init__(self, task: SpeedTask) -> None:
        nbytes = shapes_bytes(task.shapes)
        super().__init__(task, nbytes if dist.get_rank() == 0 else 0)  # without raw limits on the others
        self.nbytes, self._columns = nbytes, task.scenario.columns

    def begin(self) -> None:
        if dist.get_rank() == 0:
            super().begin()
        _gather(None)

    def end(self) -> None:
        _gather(None)
        if dist.get_rank() == 0:
            super().end()

    def trial(
        self,
        contender: str,
        phase: str,
        repetition: int,
        work: Callable[[], State | None],
        nbytes: int,
        difference: Difference | None = None,
    ) -> RankTrial:
        rank, ranks = dist.get_rank(), 1 if contender == SyncOneRank.name else dist.get_world_size()
        if phase != "save" and not self._columns:
            nbytes *= ranks
        cached, rates = self.prepare(contender, phase) if rank == 0 else (0.0, {})
        _gather(None)
        pretouch_memory(new_nbytes(phase, nbytes) // ranks)
        _gather(None)

        def here() -> State | None:
            return None if (loaded := work()) is None else locals_of(loaded)

        usage, summed, loaded = measure_work(here)
        self.compare(contender, loaded, difference)
        del loaded
        found = _gather((usage, summed))
        return RankTrial(
            scenario=self.scenario,
            contender=contender,
            phase=phase,
            repetition=repetition,
            ranks=dist.get_world_size(),
            seconds=max(usage.seconds for usage, _ in found),
            summed=max(summed for _, summed in found),
            nbytes=nbytes,
            limit=LIMITS[phase],
            limits=rates,
            extra_rss=max(usage.extra_rss for usage, _ in found),
            read_bytes=sum(usage.read_bytes for usage, _ in found),
            write_bytes=sum(usage.write_bytes for usage, _ in found),
            files_bytes=sum(path.stat().st_size for path in files_of(self.directory)),
            cached=cached,
        )


def _measure_ranks(task: SpeedTask) -> Iterator[list[RankTrial]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if task.scenario.columns else None
    make_target = partial(make_cut_state, task.shapes, mesh, 1)
    state, target = make_cut_state(task.shapes, mesh, 0), make_target()

    def difference(loaded: State) -> str | None:
        return different_leaf(loaded, locals_of(make_target())) if loaded else None  # another rank loads

    measurement = RankMeasurement(task)
    contenders: list[SyncCheckpointer] = rank_checkpointers(one=task.scenario.one)
    for repetition, contender in task.turns([c for c in contenders if task.selects(c.name)]):
        yield measurement.turn(contender, repetition, state, target, difference if repetition == 0 else None)


if __name__ == "__main__":
    do_task(_measure_ranks)
