"""One contender's turn: save, then load and fill, cold and warm, each beside the raw limits of that moment.

All ranks go through a turn together; rank 0 measures the limits, drops and fills the page cache, and keeps the trials.
Turns come in the order A B C, then C B A, and so on, so that what drifts on the machine touches all alike.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from .checkpointers import ComparingCheckpointer, SliceReader, SyncCheckpointer, select_by_name, slice_readers
from .meter import Meter, Usage, cached_fraction, drop_cache, files_of, fill_cache, pretouch_memory, release_memory
from .raw_limits import LEAST, RawLimits
from .results import HUGE, Limit, Phase, Trial
from .states import Scenario, State, bytes_equal, make_leaf, make_state, shapes_bytes, sum_bytes, touch

__all__ = ["BenchError", "Measurement", "RankGroup", "SingleProcess", "alternate", "run_alone", "run_slice"]

OnTrials = Callable[[Sequence[Trial]], None]


class BenchError(Exception):
    """A contender gave back something else than was saved, or there is no room."""


class RankGroup(Protocol):
    """The ranks that are measured together."""

    rank: int
    size: int

    def gather(self, thing: Any) -> list[Any]:
        """Every rank's thing, on every rank; waits for all."""
        ...


class SingleProcess:
    """One process."""

    rank, size = 0, 1

    def gather(self, thing: Any) -> list[Any]:
        """Its own."""
        return [thing]


def alternate(contenders: Sequence[Any], repetitions: int) -> Iterator[tuple[int, Any]]:
    """(repetition, contender): forwards and backwards by turns."""
    for repetition in range(repetitions):
        for contender in contenders if repetition % 2 == 0 else reversed(contenders):
            yield repetition, contender


class OperationCost(msgspec.Struct, frozen=True):
    """What an operation took on one rank, with the time when every byte was added up."""

    usage: Usage
    summed: float


class Measurement:
    """What stays the same over the turns of a scenario.

    Args:
        directory: for the checkpoints; on several ranks the same for all.
        nbytes: unique bytes of the whole state.
    """

    def __init__(self, scenario: Scenario, directory: Path, group: RankGroup, nbytes: int) -> None:
        self.scenario, self.directory, self.group, self.nbytes = scenario, directory, group, nbytes
        self._place = directory / "checkpoint"
        self._raw = RawLimits(directory / "raw.bin", nbytes) if group.rank == 0 and nbytes >= LEAST else None

    def limits(self, *names: Limit) -> dict[Limit, float]:
        """Measures raw rates, on rank 0."""
        raw = self._raw
        if raw is None:
            return {}
        measures: dict[Limit, Callable[[], float]] = {
            "W": raw.write,
            "R": raw.read,
            "R_fresh": raw.read_fresh,
            "C": raw.copy,
            "plain": raw.plain,
            "plain_fresh": raw.plain_fresh,
            "W_huge": raw.write_huge,
            "R_huge": raw.read_huge,
        }
        return {name: measures[name]() for name in names}

    def begin(self) -> Path:
        """An empty directory for a checkpoint."""
        if self.group.rank == 0:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place.mkdir(parents=True)
        self.group.gather(None)
        return self._place

    def end(self) -> None:
        """Removes the checkpoint and the raw file."""
        self.group.gather(None)
        if self.group.rank == 0:
            shutil.rmtree(self._place, ignore_errors=True)
            if self._raw is not None:
                self._raw.remove()

    def trial(
        self,
        key: tuple[str, Phase, int],
        work: Callable[[], State | None],
        limits: Sequence[Limit],
        *,
        nbytes: int,
        check: Callable[[State], None] | None = None,
    ) -> list[Trial]:
        """Measures one operation on all ranks; the trial is on rank 0."""
        release_memory()
        cached = 0.0
        if self.group.rank == 0:
            self._cache(key[1])
            cached = cached_fraction(self._place)
        rates = self.limits(*limits)
        self.group.gather(None)
        # new arrays, and the page cache of who reads through it
        if needed := nbytes * (key[1].startswith("load") + key[1].endswith("cold")):
            pretouch_memory(needed // self.group.size)
            self.group.gather(None)
        took, made = _measure(work)
        if made is not None and check is not None:
            check(made)
        del made
        all_took: list[OperationCost] = self.group.gather(took)
        if self.group.rank:
            return []
        usages = [t.usage for t in all_took]
        contender, phase, repetition = key
        return [
            Trial(
                scenario=self.scenario.name,
                contender=contender,
                phase=phase,
                repetition=repetition,
                ranks=self.group.size,
                seconds=max(u.seconds for u in usages),
                summed=max(t.summed for t in all_took),
                nbytes=nbytes,
                limits=rates,
                extra_rss=max(u.extra_rss for u in usages),
                read_bytes=sum(u.read_bytes for u in usages),
                write_bytes=sum(u.write_bytes for u in usages),
                files_bytes=sum(path.stat().st_size for path in files_of(self._place)),
                cached=cached,
            )
        ]

    def _cache(self, phase: Phase) -> None:
        if phase.endswith("cold"):
            drop_cache(self._place)
        elif phase.endswith("warm"):
            fill_cache(self._place)

    def turn(
        self,
        contender: SyncCheckpointer,
        repetition: int,
        state: State,
        target: State,
        expected: Callable[[], State] | None,
    ) -> list[Trial]:
        """Saves, loads and fills.

        Args:
            target: what is filled; a new state is made like it.
            expected: gives what must come back; None does not compare.
        """
        trials: list[Trial] = []
        place = self.begin()
        wanted = self.nbytes * (1 if self.scenario.columns else self.group.size)

        def check(made: State) -> None:
            if expected is not None and (name := bytes_equal(made, expected())):
                raise BenchError(f"{contender.name}: {self.scenario.name}: {name} came back changed")

        def fill() -> State:
            contender.load_into(place, target)
            return target

        def first() -> State:
            cast(ComparingCheckpointer, contender).compare_and_fill(place, target)
            return target

        prepared = contender.prepare(state)
        trials += self.trial(
            (contender.name, "save", repetition),
            lambda: contender.save(place, prepared),
            ("C", "W", *_beside(contender, "W")),
            nbytes=self.nbytes,
        )
        phases: list[tuple[Phase, str, Callable[[], State], Limit]] = [
            ("load cold", "load", lambda: contender.load(place, target), "R_fresh"),
            ("load warm", "load", lambda: contender.load(place, target), "plain_fresh"),
            ("fill cold", "fill", fill, "R"),
            ("fill warm", "fill", fill, "plain"),
            ("first cold", "first", first, "R"),
            ("first warm", "first", first, "plain"),
        ]
        for phase, kind, work, limit in phases:
            if kind in contender.kinds:
                if kind in ("fill", "first") and expected is not None:
                    _clear(target)
                key = (contender.name, phase, repetition)
                limits = (limit, *_beside(contender, limit))
                trials += self.trial(key, work, limits, nbytes=wanted, check=check)
        self.end()
        return trials


def _beside(contender: SyncCheckpointer, limit: Limit) -> tuple[Limit, ...]:
    """What else is measured beside treeckpt, whose buffers lie in huge pages."""
    return (HUGE[limit],) if limit in HUGE and contender.name == "treeckpt" else ()


def _clear(state: State) -> None:
    for leaf in state.values():
        leaf.fill_(0)


def _measure(work: Callable[[], State | None]) -> tuple[OperationCost, State | None]:
    with Meter() as meter:
        made = work()
        if made is not None:
            touch(made)
        usage = meter.lap()
    start = time.perf_counter()
    if made is not None:
        sum_bytes(made)
        return OperationCost(usage, usage.seconds + time.perf_counter() - start), made
    return OperationCost(usage, usage.seconds), None


def run_alone(
    scenario: Scenario,
    directory: Path,
    contenders: Sequence[SyncCheckpointer],
    *,
    scale: float,
    repetitions: int,
    on_trials: OnTrials,
) -> None:
    """A scenario of one process."""
    shapes = scenario.shapes(scale)
    state = make_state(shapes, lambda full: full)
    target = {name: leaf.clone() for name, leaf in state.items()}
    turns = Measurement(scenario, directory, SingleProcess(), shapes_bytes(shapes))
    for repetition, contender in alternate(contenders, repetitions):
        expected = (lambda: state) if repetition == 0 else None
        on_trials(turns.turn(contender, repetition, state, target, expected))


def run_slice(
    scenario: Scenario,
    directory: Path,
    *,
    scale: float,
    repetitions: int,
    on_trials: OnTrials,
    names: Sequence[str] = (),
) -> None:
    """Loads some of the rows of a leaf, cold: what counts is how much is read."""
    [(name, shape)] = scenario.shapes(scale).items()
    state = {name: make_leaf(shape, 0)}
    start = shape[0] * 3 // scenario.part
    stop = start + max(1, shape[0] // scenario.part)
    turns = Measurement(scenario, directory, SingleProcess(), shapes_bytes({name: shape}))
    nbytes = shapes_bytes({name: (stop - start, *shape[1:])})
    for repetition, contender in alternate(select_by_name(slice_readers(), names), repetitions):
        place = turns.begin()
        contender.save(place, state)
        turns.limits("W")  # makes the file for the limit of the load

        def work(reader: SliceReader = contender, place: Path = place) -> State:
            return {name: reader.load_rows(place, name, shape, start, stop)}

        def check(made: State, who: str = contender.name) -> None:
            if bytes_equal(made, {name: state[name][start:stop]}):
                raise BenchError(f"{who}: slice: {name} came back changed")

        key: tuple[str, Phase, int] = (contender.name, "load cold", repetition)
        on_trials(turns.trial(key, work, ("R_fresh",), nbytes=nbytes, check=check if repetition == 0 else None))
        turns.end()
