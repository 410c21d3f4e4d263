"""Measures background saves: how long they block, how much they slow training steps, and how long they hold the GIL.

In a process of its own, under torchrun with one rank (DCP's writer process needs a process group): each contender in
turn saves a state in the background while this thread goes on with training steps on one core, or, for many small
leaves, while a thread ticks every millisecond. `run_async` starts the process; rank 0 prints each stay as JSON.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from .async_checkpointers import AsyncCheckpointer, async_checkpointers
from .checkpointers import select_by_name
from .measure import alternate
from .meter import release_memory
from .ranks import MARK, BenchTask, do_task, run_job
from .raw_limits import LEAST, RawLimits
from .results import AsyncTrial
from .states import SCENARIOS, Scenario, make_state, shapes_bytes

__all__ = ["run_async"]

TICK = 0.001
STEP = 0.02
"""Seconds of a training step, about."""


def run_async(
    scenario: Scenario,
    directory: Path,
    *,
    scale: float,
    repetitions: int,
    on_trial: Callable[[AsyncTrial], None],
    names: Sequence[str] = (),
) -> None:
    """Runs a scenario in a process of its own.

    Raises:
        BenchError: it failed; the message ends with what it said.
    """
    task = BenchTask(scenario.name, str(directory.absolute()), scale, repetitions, tuple(names))
    run_job(
        "treeckpt.bench.measure_async",
        task,
        ranks=1,
        on_line=lambda line: on_trial(msgspec.json.decode(line, type=AsyncTrial)),
    )


class _Trainer:
    """Training steps: matrix products on one core."""

    def __init__(self) -> None:
        self._a = torch.rand(256, 256)
        begin = time.perf_counter()
        for _ in range(20):
            torch.mm(self._a, self._a)
        self._products = max(1, round(STEP * 20 / (time.perf_counter() - begin)))
        self.idle = statistics.median(self.step() for _ in range(25))

    def step(self) -> float:
        """Seconds."""
        begin = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._a, self._a)
        return time.perf_counter() - begin


class _Ticker:
    """A thread that runs every millisecond; records the longest time for which it did not get the GIL."""

    def __init__(self) -> None:
        self.gap = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._done.is_set():
            time.sleep(TICK)
            now = time.perf_counter()
            self.gap, last = max(self.gap, now - last), now

    def stop(self) -> float:
        """Seconds."""
        self._done.set()
        self._thread.join()
        return self.gap


def _idle_gap() -> float:
    ticker = _Ticker()
    time.sleep(0.5)
    return ticker.stop()


class _AsyncMeasurement:
    """The state and the directory of all saves of a scenario."""

    def __init__(self, task: BenchTask) -> None:
        [self.scenario] = [s for s in SCENARIOS if s.name == task.scenario]
        shapes = self.scenario.shapes(task.scale)
        self.nbytes = shapes_bytes(shapes)
        self.state = make_state(shapes, lambda full: full)
        self.place = Path(task.directory) / "beside"
        self._raw = RawLimits(Path(task.directory) / "raw.bin", self.nbytes) if self.nbytes >= LEAST else None

    def measure_save(self, checkpointer: AsyncCheckpointer, repetition: int) -> AsyncTrial:
        """One save."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        if repetition == 0:
            checkpointer.prewarm(self.state)
        release_memory()
        copy = self._raw.copy() if self._raw is not None else None
        idle_gap = _idle_gap() if self.scenario.ticks else None
        trainer = _Trainer()
        begin = time.perf_counter()
        wait = checkpointer.start(self.place, self.state)
        blocked = time.perf_counter() - begin
        slower, gap = self._meanwhile(wait, trainer)
        durable = time.perf_counter() - begin
        shutil.rmtree(self.place, ignore_errors=True)
        return AsyncTrial(
            scenario=self.scenario.name,
            contender=checkpointer.name,
            repetition=repetition,
            nbytes=self.nbytes,
            blocked=blocked,
            durable=durable,
            copy_rate=copy,
            interference=None if gap is not None else slower / durable,
            gap=gap,
            idle_gap=idle_gap,
        )

    def _meanwhile(self, wait: Callable[[], object], trainer: _Trainer) -> tuple[float, float | None]:
        """Trains, or ticks, until the save is durable; returns (seconds lost by the steps, longest gap)."""
        done = threading.Event()
        errors: list[BaseException] = []

        def waiting() -> None:
            try:
                wait()
            except BaseException as error:
                errors.append(error)
            done.set()

        ticker = _Ticker() if self.scenario.ticks else None
        thread = threading.Thread(target=waiting, daemon=True)
        thread.start()
        lost = 0.0
        if ticker is None:
            while not done.is_set():
                lost += trainer.step() - trainer.idle
        thread.join()
        gap = ticker.stop() if ticker is not None else None
        if errors:
            raise errors[0]
        return lost, gap


def work(task: BenchTask) -> None:
    """Runs the task in this process."""
    torch.set_num_threads(1)
    measurement, checkpointers = _AsyncMeasurement(task), select_by_name(async_checkpointers(), task.names)
    for repetition, checkpointer in alternate(checkpointers, task.repetitions + 1):
        trial = measurement.measure_save(checkpointer, repetition)
        print(MARK + msgspec.json.encode(trial).decode(), flush=True)
    for checkpointer in checkpointers:
        checkpointer.close()


if __name__ == "__main__":
    do_task(work)
