"""The timings of one save, reduced to what trends over many saves need.

The scan that lists a checkpoint reads its timings for the duration of the save. Whoever wants them reduced does so in
the same pass, by a cache that keeps the result, so that the file is read once. It takes about a kilobyte, whatever the
number of spans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from .._core.format.timings import Host, timings_name
from .._core.sharding.int_runs import decode_runs
from .._inspect.profile import RankTime
from .._inspect.timing_report import CriticalSegment, Straggler, TimingReport
from .._io.storage.open import open_store
from .._io.storage.store import DirectoryEntry, Store
from ..errors import CorruptError, visible
from . import catalog

T = TypeVar("T")
MAX_PHASES = 16
"""Phases that are kept of a save, those with the longest times; the others are added up under OTHER."""
OTHER = "other phases"
MAX_LINES = 256
"""Lines of `ReducedTimings.work`; beyond it each line is of several ranks."""
MAX_SLOW = 16
"""Stragglers that are kept of a save, those that lose the most time."""
MAX_TEXT = 200
"""Characters that are kept of the name of a phase or host."""


class SlowRank(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A straggler of a save."""

    rank: int
    host: str
    """Empty if it is not recorded."""
    phase: str
    """The phase in which it lost the most; empty if it stands out in none of them, but in all of its work."""
    times: float | None
    """Its time there as a multiple of the median rank's; None if that is zero."""

    def __post_init__(self) -> None:
        for name in ("host", "phase"):  # the same in thousands of saves
            msgspec.structs.force_setattr(self, name, sys.intern(getattr(self, name)))


class ReducedTimings(catalog.SaveDuration, frozen=True):
    """The reduced timings of a save."""

    world: int
    names: tuple[str, ...]
    """The names of the phases on the critical path, sorted; one object for all saves with equal ones."""
    times: bytes
    """float64[phases], little-endian: seconds of each phase on the critical path."""
    median: float
    """Seconds of own work of the median rank."""
    block: int
    """How many consecutive ranks a line is of: a power of two."""
    work: bytes
    """float16[lines], little-endian: seconds of own work of each rank, or the longest of the line; NaN for none."""
    slow: tuple[SlowRank, ...]
    """The stragglers, the largest loss of time first."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "names", _shared(self.names))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase on the critical path."""
        return dict(zip(self.names, np.frombuffer(self.times, "<f8").tolist(), strict=True))

    @property
    def longest_phase(self) -> str | None:
        """The phase that takes most of the critical path; None if it is empty."""
        phases = self.phases
        return max(phases, key=phases.__getitem__, default=None)

    def lines(self, block: int) -> np.ndarray:
        """Returns float16[lines] of `work` in lines of so many ranks, a multiple of this save's own block."""
        own = np.frombuffer(self.work, "<f2")
        return own if block == self.block else _longest(own, block // self.block)


@lru_cache(1024)
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the first tuple of these that was given: saves of a run have the same phases."""
    return tuple(map(sys.intern, names))


def read_reduced(folder: Store, name: str) -> ReducedTimings:
    """Reads and reduces the timings in a file.

    Raises:
        CheckpointNotFound, CheckpointError: it is gone, or it cannot be read.
    """
    timings = catalog.read_timings_file(folder, name)
    try:
        return reduce_timings(TimingReport(timings))
    except (ArithmeticError, LookupError) as error:
        raise CorruptError(visible(f"{folder.place}/{name}"), expected="spans of a save", found=f"{error}") from error


class ReducedTimingsCache:
    """The cache of a scan of one run or several that keeps nothing but the reduced timings of the saves."""

    def __init__(self) -> None:
        self._found: dict[str, ReducedTimings] = {}

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        """Calls `read`, or of timings reads and reduces them."""
        if key[1] != "took":
            return read()
        folder, _, name = key[0].rpartition("/")
        timings: Any = read_reduced(open_store(folder), name)
        self._found[key[0]] = timings
        return timings

    def of(self, info: catalog.CheckpointInfo) -> ReducedTimings | None:
        """Returns the timings of a checkpoint that was listed; None if it has none that can be read."""
        return self._found.get(f"{info.path}/{timings_name(info.save_id)}") if info.save_id else None


def reduce_timings(study: TimingReport) -> ReducedTimings:
    """Reduces the timings of a save."""
    timings, profile = study.timings, study.profile
    phases = dict(sorted(_phase_seconds(study.critical).items()))
    block = 1
    while timings.world > MAX_LINES * block:
        block *= 2
    return ReducedTimings(
        seconds=profile.seconds,
        blocked_seconds=profile.blocked_seconds,
        error=timings.error,
        world=timings.world,
        names=tuple(phases),
        times=np.array([*phases.values()], "<f8").tobytes(),
        median=profile.median_ns / 1e9,
        block=block,
        work=_longest(_work_of_ranks(profile.ranks, timings.world), block).astype("<f2").tobytes(),
        slow=_slow_ranks(study.stragglers, timings.hosts),
    )


def host_names(hosts: Sequence[Host], ranks: Iterable[int]) -> dict[int, str]:
    """Returns the names of the hosts of these ranks, where they are known; characters without a glyph are escaped."""
    wanted = np.array(sorted(set(ranks)), np.int64)
    return {
        rank: visible(host.name) for host in hosts for rank in np.intersect1d(wanted, decode_runs(host.ranks)).tolist()
    }


def _work_of_ranks(ranks: Sequence[RankTime], world: int) -> np.ndarray:
    """Returns float64[world]: seconds of own work of each rank, at most what a float16 holds, NaN without spans."""
    work = np.full(world, np.nan)
    seconds = np.array([rank.busy_ns for rank in ranks], np.float64) / 1e9
    work[[rank.rank for rank in ranks]] = np.minimum(seconds, np.finfo(np.float16).max)
    return work


def _longest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the largest of each `count` consecutive values; NaN where all are NaN."""
    padded = np.pad(values, (0, -len(values) % count), constant_values=np.nan)
    return np.fmax.reduce(padded.reshape(-1, count), axis=1)


def _phase_seconds(path: Sequence[CriticalSegment]) -> dict[str, float]:
    times: dict[str, int] = {}
    for segment in path:
        name = segment.phase[:MAX_TEXT]
        times[name] = times.get(name, 0) + segment.stop_ns - segment.start_ns
    names = sorted(times, key=lambda name: -times[name])
    seconds = {name: times[name] / 1e9 for name in names[:MAX_PHASES]}
    if rest := sum(times[name] for name in names[MAX_PHASES:]):
        seconds[OTHER] = seconds.get(OTHER, 0.0) + rest / 1e9
    return seconds


def _slow_ranks(stragglers: Sequence[Straggler], hosts: Sequence[Host]) -> tuple[SlowRank, ...]:
    worst: dict[int, Straggler] = {}
    for straggler in stragglers:  # the largest loss first: of a rank, its worst phase rather than all of its work
        if straggler.rank not in worst or not worst[straggler.rank].phase:
            worst[straggler.rank] = straggler
    kept = list(worst.values())[:MAX_SLOW]
    names = host_names(hosts, (straggler.rank for straggler in kept))
    return tuple(
        SlowRank(s.rank, names.get(s.rank, "")[:MAX_TEXT], s.phase[:MAX_TEXT], s.times if s.median_ns else None)
        for s in kept
    )
