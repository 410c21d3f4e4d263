"""Measures a contender's turn: save, then load and fill, cold and warm, each beside the raw limits of that moment.

All ranks go through a turn together; rank 0 measures the limits, drops and fills the page cache, and keeps the trials.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from .checkpointers import SyncCheckpointer, sync_checkpointers
from .device_limits import DeviceLimits
from .meter import Meter, Usage, cached_fraction, drop_cache, files_of, fill_cache, pretouch_memory, release_memory
from .raw_limits import LEAST, RawLimits
from .results import HUGE, LIMITS, PHASES, AnyLimit, DiskPhase, Limit, Trial
from .states import BenchTask, State, different_leaf, make_leaf, make_state, shapes_bytes, sum_bytes, touch

Difference = Callable[[State], str | None]
"""Returns the name of a leaf that differs from what must come back."""


class BenchError(Exception):
    """A contender returned other bytes than were saved, or the processes of a scenario failed."""


class RankGroup:
    """The ranks that are measured together: this process alone."""

    rank, size = 0, 1

    def gather(self, thing: Any) -> list[Any]:
        """Returns every rank's thing, on every rank; waits for all."""
        return [thing]


class Measurement:
    """Measures the turns of a scenario in one directory.

    Args:
        nbytes: unique bytes of the whole state.
    """

    def __init__(self, task: BenchTask, nbytes: int, group: RankGroup | None = None) -> None:
        self.scenario, self.nbytes, self.group = task.scenario, nbytes, group or RankGroup()
        self.directory = task.path / "checkpoint"
        measured = self.group.rank == 0 and nbytes >= LEAST
        self._raw = RawLimits(task.path / "raw.bin", nbytes) if measured else None
        self._device = DeviceLimits(task.device, nbytes) if measured and task.scenario.device else None

    def limits(self, names: Sequence[Limit]) -> dict[AnyLimit, float]:
        """Measures raw rates, on rank 0; of a state on a device, none is above the rate of the copy."""
        rates: dict[AnyLimit, float] = {name: self._raw.measure(name) for name in names} if self._raw else {}
        if self._device is not None:
            copies: dict[AnyLimit, float] = {**self._device.measure()}
            for name in names:
                if name != "C":
                    rates[name] = min(rates[name], copies["D2H" if name.startswith("W") else "H2D"])
            rates.update(copies)
        return rates

    def begin(self) -> None:
        """Creates the empty directory of a checkpoint."""
        if self.group.rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
        self.group.gather(None)

    def end(self) -> None:
        """Removes the checkpoint and the raw file."""
        self.group.gather(None)
        if self.group.rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            if self._raw is not None:
                self._raw.remove()

    def turn(
        self,
        contender: SyncCheckpointer,
        repetition: int,
        state: State,
        target: State,
        difference: Difference | None = None,
    ) -> list[Trial]:
        """Saves, loads and fills.

        Args:
            target: what is filled; a new state has its shapes and layouts.
            difference: compares what comes back; None does not compare.
        """
        self.begin()
        save = partial(contender.save, self.directory, contender.prepare(state))
        trials = self.trial(contender.name, "save", repetition, save, self.nbytes)
        wanted = self.nbytes * (1 if self.scenario.columns or contender.loads_alone else self.group.size)
        for phase in PHASES[1:]:
            kind = phase.split()[0]
            if kind in contender.kinds and (kind == "load" or not self.scenario.one):
                if kind != "load" and difference is not None:
                    for leaf in target.values():
                        leaf.fill_(0)
                load = partial(self._load, contender, kind, target)
                ranks = 1 if contender.loads_alone else self.group.size
                trials += self.trial(contender.name, phase, repetition, load, wanted, difference, ranks=ranks)
        self.end()
        return trials

    def _load(self, contender: SyncCheckpointer, kind: str, target: State) -> State:
        if kind == "load":
            return contender.load(self.directory, target)
        if kind == "fill":
            contender.load_into(self.directory, target)
        else:
            contender.compare_and_fill(self.directory, target)
        return target

    def trial(
        self,
        contender: str,
        phase: DiskPhase,
        repetition: int,
        work: Callable[[], State | None],
        nbytes: int,
        difference: Difference | None = None,
        *,
        ranks: int = 1,
    ) -> list[Trial]:
        """Measures one operation on all ranks; the trial is on rank 0.

        Args:
            ranks: how many of them get a part of `nbytes`.

        Raises:
            BenchError: what came back differs from what was saved.
        """
        release_memory()
        cached = 0.0
        if self.group.rank == 0:
            if phase.endswith("cold"):
                drop_cache(self.directory)
            elif phase.endswith("warm"):
                fill_cache(self.directory)
            cached = cached_fraction(self.directory)
        rates = self.limits(_limits_beside(contender, phase))
        self.group.gather(None)
        # new arrays, and the page cache of who reads through it
        if needed := nbytes * (phase.startswith("load") + phase.endswith("cold")):
            pretouch_memory(needed // ranks)
            self.group.gather(None)
        usage, summed, loaded = measure_work(work)
        if loaded is not None and difference is not None and (name := difference(loaded)):
            raise BenchError(f"{contender}: {self.scenario.name}: {name} came back changed")
        del loaded
        usages: list[Usage] = self.group.gather(usage)
        sums: list[float] = self.group.gather(summed)
        if self.group.rank:
            return []
        return [
            Trial(
                scenario=self.scenario.name,
                contender=contender,
                phase=phase,
                repetition=repetition,
                ranks=self.group.size,
                seconds=max(u.seconds for u in usages),
                summed=max(sums),
                nbytes=nbytes,
                limits=rates,
                extra_rss=max(u.extra_rss for u in usages),
                read_bytes=sum(u.read_bytes for u in usages),
                write_bytes=sum(u.write_bytes for u in usages),
                files_bytes=sum(path.stat().st_size for path in files_of(self.directory)),
                cached=cached,
            )
        ]


def _limits_beside(contender: str, phase: DiskPhase) -> list[Limit]:
    """Returns what is measured beside an operation; beside treeckpt, whose buffers lie in huge pages, these too."""
    limit = LIMITS[phase]
    limits: list[Limit] = ["C", limit] if phase == "save" else [limit]
    return [*limits, HUGE[limit]] if limit in HUGE and contender == "treeckpt" else limits


def measure_work(work: Callable[[], State | None]) -> tuple[Usage, float, State | None]:
    """Returns what an operation took, its time when every byte was added up, and its result."""
    with Meter() as meter:
        loaded = work()
        if loaded is not None:
            touch(loaded)
        usage = meter.lap()
    start = time.perf_counter()
    if loaded is None:
        return usage, usage.seconds, None
    sum_bytes(loaded)
    return usage, usage.seconds + time.perf_counter() - start, loaded


def run_alone(task: BenchTask, contenders: Sequence[SyncCheckpointer]) -> Iterator[list[Trial]]:
    """Measures a scenario of one process; yields the trials of each turn.

    Raises:
        BenchError: what came back differs from what was saved.
    """
    state = make_state(task.shapes, device=task.device)
    target = {name: leaf.clone() for name, leaf in state.items()}
    measurement = Measurement(task, shapes_bytes(task.shapes))
    for repetition, contender in task.turns(contenders):
        difference = partial(different_leaf, state) if repetition == 0 else None
        yield measurement.turn(contender, repetition, state, target, difference)


def run_slice(task: BenchTask) -> Iterator[list[Trial]]:
    """Loads some of the rows of a leaf, cold: what counts is how much is read."""
    [(name, shape)] = task.shapes.items()
    state = {name: make_leaf(shape, 0)}
    part = task.scenario.part
    start = shape[0] * 3 // part
    stop = start + max(1, shape[0] // part)
    rows = {name: state[name][start:stop]}
    measurement = Measurement(task, shapes_bytes(task.shapes))
    contenders = [c for c in sync_checkpointers() if "rows" in c.kinds and task.selects(c.name)]
    for repetition, contender in task.turns(contenders):
        measurement.begin()
        contender.save(measurement.directory, state)
        measurement.limits(["W"])  # writes the file for the limit of the load
        difference = partial(different_leaf, rows) if repetition == 0 else None
        load = partial(_load_rows, contender, measurement, name, shape, start, stop)
        yield measurement.trial(contender.name, "load cold", repetition, load, rows[name].nbytes, difference)
        measurement.end()


def _load_rows(
    contender: SyncCheckpointer, measurement: Measurement, name: str, shape: tuple[int, ...], start: int, stop: int
) -> State:
    return {name: contender.load_rows(measurement.directory, name, shape, start, stop)}
