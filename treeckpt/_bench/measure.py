"""Measures a contender's turn: save, then load and fill, cold and warm, each beside the raw limits of that moment."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .checkpointers import SyncCheckpointer
from .meter import Meter, Usage, cached_fraction, drop_cache, files_of, fill_cache, pretouch_memory, release_memory
from .raw_limits import MIN_RATED_NBYTES, RawLimits
from .results import HUGE, LIMITS, BenchError, Limit, Trial
from .states import BenchTask, State, different_leaf, make_state, shapes_bytes, sum_bytes, touch

Difference = Callable[[State], str | None]
"""Returns the name of a leaf that differs from what must come back."""


class Measurement:
    """Measures the turns of a scenario in one directory.

    Args:
        nbytes: unique bytes of the whole state.
    """

    def __init__(self, task: BenchTask, nbytes: int) -> None:
        self.scenario, self.nbytes = task.name, nbytes
        self.directory = task.path / "checkpoint"
        self._raw = RawLimits(task.path / "raw.bin", nbytes) if nbytes >= MIN_RATED_NBYTES else None

    def limits(self, names: Sequence[Limit]) -> dict[str, float]:
        """Measures raw rates; none of a state that is too small for them."""
        return {name: self._raw.measure(name) for name in names} if self._raw is not None else {}

    def begin(self) -> None:
        """Creates the empty directory of a checkpoint."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)

    def end(self) -> None:
        """Removes the checkpoint and the raw file."""
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
        trials = [self.trial(contender.name, "save", repetition, save, self.nbytes)]
        for phase in [*LIMITS][1:]:
            kind = phase.split()[0]
            if kind in contender.kinds:
                if kind != "load" and difference is not None:
                    for leaf in target.values():
                        leaf.fill_(0)
                load = partial(self._load, contender, kind, target)
                trials.append(self.trial(contender.name, phase, repetition, load, self.nbytes, difference))
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
        phase: str,
        repetition: int,
        work: Callable[[], State | None],
        nbytes: int,
        difference: Difference | None = None,
    ) -> Trial:
        """Measures one operation.

        Raises:
            BenchError: what came back differs from what was saved.
        """
        cached, rates = self.prepare(contender, phase)
        pretouch_memory(new_nbytes(phase, nbytes))
        usage, summed, loaded = measure_work(work)
        self.compare(contender, loaded, difference)
        del loaded
        return Trial(
            scenario=self.scenario,
            contender=contender,
            phase=phase,
            repetition=repetition,
            seconds=usage.seconds,
            summed=summed,
            nbytes=nbytes,
            limit=LIMITS[phase],
            limits=rates,
            extra_rss=usage.extra_rss,
            read_bytes=usage.read_bytes,
            write_bytes=usage.write_bytes,
            files_bytes=sum(path.stat().st_size for path in files_of(self.directory)),
            cached=cached,
        )

    def prepare(self, contender: str, phase: str) -> tuple[float, dict[str, float]]:
        """Brings the page cache into the state of a phase; returns the part of the files in it, and raw rates."""
        release_memory()
        if phase.endswith("cold"):
            drop_cache(self.directory)
        elif phase.endswith("warm"):
            fill_cache(self.directory)
        cached, limit = cached_fraction(self.directory), LIMITS[phase]
        limits: list[Limit] = ["C", limit] if phase == "save" else [limit]
        if limit in HUGE and contender == "treeckpt":  # its buffers lie in huge pages
            limits.append(HUGE[limit])
        return cached, self.limits(limits)

    def compare(self, contender: str, loaded: State | None, difference: Difference | None) -> None:
        """Raises BenchError where what came back differs from what was saved."""
        if loaded is not None and difference is not None and (name := difference(loaded)):
            raise BenchError(f"{contender}: {self.scenario}: {name} came back changed")


def new_nbytes(phase: str, nbytes: int) -> int:
    """Returns the bytes of new memory that a phase takes: new arrays, and the page cache of who reads through it."""
    return nbytes * (phase.startswith("load") + phase.endswith("cold"))


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
    yield from run_turns(task, contenders, Measurement(task, shapes_bytes(task.shapes)), make_state(task.shapes))


def run_turns(
    task: BenchTask, contenders: Sequence[SyncCheckpointer], measurement: Measurement, state: State
) -> Iterator[list[Trial]]:
    """Measures the turns of contenders with a state; what comes back in the first repetition is compared."""
    target = {name: leaf.clone() for name, leaf in state.items()}
    for repetition, contender in task.turns(contenders):
        difference = partial(different_leaf, state) if repetition == 0 else None
        yield measurement.turn(contender, repetition, state, target, difference)
