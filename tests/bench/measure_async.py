"""Measures background saves: how long they block, how much they slow training steps, and how long they hold the GIL.

In a process of its own, the only rank of a process group (DCP's writer process needs one): each contender in turn saves
a state in the background while this thread goes on with training steps on one core, or, for many small leaves, while a
thread ticks every millisecond.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from tests.bench.async_checkpointers import AsyncCheckpointer, async_checkpointers
from tests.bench.dcp_forms import async_dcp_forms
from tests.bench.device_limits import DeviceLimits
from tests.bench.ranks import do_task
from tests.bench.results import AsyncTrial
from tests.bench.states import SpeedTask, synchronize
from treeckpt._bench.measure import MIN_RATED_NBYTES, RawLimits, release_memory
from treeckpt._bench.states import make_state, shapes_bytes

TICK = 0.001
STEP = 0.02
"""Seconds of a training step, about."""
WIDTH, DEVICE_WIDTH = 256, 4096
"""Rows of the matrices that are multiplied, on the host and on a device."""


class _Trainer:
    """Training steps: matrix products on one core, or on a device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._a = torch.rand(2 * (WIDTH if self._device.type == "cpu" else DEVICE_WIDTH,), device=self._device)
        self._products = 20
        self._products = max(1, round(STEP * 20 / self.step()))
        self.idle = statistics.median(self.step() for _ in range(25))

    def step(self) -> float:
        """Returns the seconds that a step takes."""
        begin = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._a, self._a)
        synchronize(self._device)
        return time.perf_counter() - begin


class _Ticker:
    """A thread that runs every millisecond; records the longest time for which it did not get the GIL."""

    def __init__(self) -> None:
        self._gap = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._done.is_set():
            time.sleep(TICK)
            now = time.perf_counter()
            self._gap, last = max(self._gap, now - last), now

    def stop(self) -> float:
        """Ends the thread; returns the longest gap in seconds."""
        self._done.set()
        self._thread.join()
        return self._gap


class _AsyncMeasurement:
    """The state and the directory of all saves of a scenario."""

    def __init__(self, task: SpeedTask) -> None:
        self.scenario = task.scenario
        self.nbytes = shapes_bytes(task.shapes)
        self.device = task.device
        self.state = {name: leaf.to(task.device) for name, leaf in make_state(task.shapes).items()}
        self.directory = task.path / "beside"
        large = self.nbytes >= MIN_RATED_NBYTES
        self._raw = RawLimits(task.path / "raw.bin", self.nbytes) if large and not task.scenario.device else None
        self._limits = DeviceLimits(task.device, self.nbytes) if large and task.scenario.device else None

    def _copy_rate(self) -> float | None:
        """Measures a copy into warm memory: of a state on a device, from there to the host."""
        if self._limits is not None:
            return self._limits.measure()["D2H"]
        return self._raw.measure("C") if self._raw is not None else None

    def measure_save(self, checkpointer: AsyncCheckpointer, repetition: int) -> AsyncTrial:
        """Measures one save."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        if repetition == 0:
            checkpointer.prewarm(self.state)
        release_memory()
        copy = self._copy_rate()
        idle_gap = None
        if self.scenario.ticks:
            ticker = _Ticker()
            time.sleep(0.5)
            idle_gap = ticker.stop()
        trainer = _Trainer(self.device)
        begin = time.perf_counter()
        wait = checkpointer.start(self.directory, self.state)
        blocked = time.perf_counter() - begin
        lost, gap = self._run_beside(wait, trainer)
        durable = time.perf_counter() - begin
        shutil.rmtree(self.directory, ignore_errors=True)
        return AsyncTrial(
            scenario=self.scenario.name,
            contender=checkpointer.name,
            repetition=repetition,
            nbytes=self.nbytes,
            blocked=blocked,
            durable=durable,
            copy_rate=copy,
            interference=None if gap is not None else lost / durable,
            gap=gap,
            idle_gap=idle_gap,
        )

    def _run_beside(self, wait: Callable[[], object], trainer: _Trainer) -> tuple[float, float | None]:
        """Trains, or ticks, until the save is durable; returns (seconds lost by the steps, longest gap)."""
        ticker = _Ticker() if self.scenario.ticks else None
        lost = 0.0
        with ThreadPoolExecutor(1) as pool:
            saved = pool.submit(wait)
            while ticker is None and not saved.done():
                lost += trainer.step() - trainer.idle
            saved.result()
        return lost, ticker.stop() if ticker is not None else None


def _measure_async(task: SpeedTask) -> Iterator[AsyncTrial]:
    torch.set_num_threads(1)
    measurement = _AsyncMeasurement(task)
    contenders = async_dcp_forms() if task.scenario.dcp else async_checkpointers()
    checkpointers = [c for c in contenders if task.selects(c.name)]
    # one repetition more: the first save of each is reported by itself
    for repetition, checkpointer in msgspec.structs.replace(task, repetitions=task.repetitions + 1).turns(
        checkpointers
    ):
        yield measurement.measure_save(checkpointer, repetition)
    for checkpointer in checkpointers:
        checkpointer.close()


if __name__ == "__main__":
    do_task(_measure_async)
