"""Summarizes the spans of a save: the time of each phase on the ranks, the slowest rank, the bytes moved.

Ranks are compared by the work that they have in common: time spent waiting for others does not count, nor does what
only the coordinator does. Spans of a rank may overlap (threads), so durations are those of unions of intervals. Spans
are stored as columns, so that the save of 16,384 ranks is summarized in a fraction of a second.

Their times are those of one clock. All ranks hear the result of the agreement on a save at one time, but for the time
that a message takes. So the earliest end of it on a host, beside that on the median host, is how far the clock of the
host is ahead, and times are corrected by that. A host on which every rank stood still just then counts as ahead, too;
no record tells the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .._core.format.timings import BLOCKING, MAX_TIME, Span, Timings
from .._core.sharding.int_runs import Runs, decode_runs
from .._core.text import seconds_text
from ..errors import visible

AGREEMENT = "agree"
"""The phase that ends on all ranks at one time."""
TOLERANCE_NS = 100_000_000
"""Nanoseconds: hosts whose clocks differ by less are left as they are, for a message can take as long."""
MAX_NAMED_HOSTS = 3
"""Hosts that a text names."""
ROOT_SPAN = "save"
"""The name of the span around all others."""
LATE_CALL = "late call"
"""The time from the first rank's call of save to another rank's. It is no span of a rank, but a phase of the save."""
WAITING_PHASES = frozenset({"agree", "gather", "wait", "barrier", "broadcast", "open"})
"""Phases in which a rank mostly waits for others."""
COORDINATOR_PHASES = frozenset({"publish"})
"""Phases of the coordinator alone."""
COPYING_PHASES = frozenset({"stage"})
"""Phases whose bytes are copied within memory: a later phase writes the same bytes, so those of a rank are without
them."""


class HostClock(msgspec.Struct, frozen=True):
    """A host whose clock differs from that of the median host."""

    name: str
    ranks: Runs
    ahead_ns: int
    """Nanoseconds by which the clock is ahead; negative if it is behind."""


def differing_clocks(timings: Timings) -> tuple[HostClock, ...]:
    """Returns the hosts whose clocks differ, those that differ the most first; none of a save that failed."""
    hosts = timings.hosts
    if len(hosts) < 2 or timings.error is not None:
        return ()
    host_of = np.full(timings.world, -1, np.int64)
    for number, host in enumerate(hosts):
        host_of[decode_runs(host.ranks)] = number
    agreed = [(span.rank, span.stop_ns) for span in timings.spans if span.name == AGREEMENT]
    rank, stop = np.array(agreed, np.int64).reshape(-1, 2).T
    earliest = np.full(len(hosts) + 1, MAX_TIME)  # the last is of the ranks that are on no host
    np.minimum.at(earliest, host_of[rank], stop)
    ends = [(end, host) for end, host in zip(earliest.tolist(), hosts, strict=False) if end < MAX_TIME]
    if len(ends) < 2:
        return ()
    # The lower median: it is the clock of a host, not the mean of two.
    usual = sorted(end for end, _ in ends)[(len(ends) - 1) // 2]
    reach = max(max(abs(span.start_ns), abs(span.stop_ns)) for span in timings.spans)
    clocks = [HostClock(host.name, host.ranks, end - usual) for end, host in ends]
    # Times that were corrected by more would be beyond MAX_TIME.
    differing = [clock for clock in clocks if TOLERANCE_NS <= abs(clock.ahead_ns) < MAX_TIME - reach]
    return tuple(sorted(differing, key=lambda clock: -abs(clock.ahead_ns)))


def ahead_by_rank(clocks: Sequence[HostClock]) -> dict[int, int]:
    """Returns by how many nanoseconds the clock of each rank on these hosts is ahead."""
    return {rank: clock.ahead_ns for clock in clocks for rank in decode_runs(clock.ranks).tolist()}


def clocks_text(clocks: Sequence[HostClock]) -> str:
    """Says in two sentences which clocks differ and that times are corrected; empty where none does."""
    if not clocks:
        return ""
    named = [
        f"that of {visible(clock.name)} is {seconds_text(abs(clock.ahead_ns) / 1e9)} "
        + ("ahead" if clock.ahead_ns > 0 else "behind")
        for clock in clocks[:MAX_NAMED_HOSTS]
    ]
    more = [f"{len(clocks) - MAX_NAMED_HOSTS} more differ"] if len(clocks) > MAX_NAMED_HOSTS else []
    return (
        f"The clocks of the hosts differ: {', '.join(named + more)}. "
        "All times are corrected by that, to the precision of a message between hosts."
    )


class PhaseTime(msgspec.Struct, frozen=True):
    """The time of one phase over all ranks that had it."""

    name: str
    ranks: int
    spans: int
    nbytes: int
    median_ns: int
    """Median over the ranks of a rank's time in the phase."""
    p95_ns: int
    """The time that 95 % of the ranks need at most."""
    longest_ns: int
    slowest: int
    """The rank with the longest time."""
    slowest_nbytes: int
    """The bytes of that rank in the phase."""


class RankTime(msgspec.Struct, frozen=True):
    """One rank's time from its first span to its last, and the part that was work which other ranks have too."""

    rank: int
    start_ns: int
    stop_ns: int
    busy_ns: int
    nbytes: int
    """The bytes that the rank wrote."""
    blocked_ns: int | None = None
    """When the call of a background save returned; None for a save in the foreground."""


class SaveProfile(msgspec.Struct, frozen=True):
    """The summary of a save's spans."""

    start_ns: int
    stop_ns: int
    phases: tuple[PhaseTime, ...]
    """The phases in the order in which they first began."""
    ranks: tuple[RankTime, ...]
    slowest: int | None
    """The rank with the most work; None where there are no spans."""
    slowdown: float
    """The work of the slowest rank divided by that of the median rank."""
    median_ns: int = 0
    """Nanoseconds of work of the median rank."""
    blocked_ns: int | None = None
    """When the call of the last rank returned; None for a save in the foreground."""

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9

    @property
    def blocked_seconds(self) -> float:
        """The time for which the training was blocked: all of a save in the foreground."""
        return self.seconds if self.blocked_ns is None else (self.blocked_ns - self.start_ns) / 1e9

    @property
    def nbytes(self) -> int:
        """Bytes that the ranks wrote."""
        return sum(rank.nbytes for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """Spans as columns, sorted by rank and then as recorded; without the spans named BLOCKING."""

    names: tuple[str, ...]
    """The names of spans, in the order in which spans with them first began."""
    name: np.ndarray
    """int64[n], as all columns below: position of the span's name in `names`."""
    rank: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    nbytes: np.ndarray
    depth: np.ndarray
    """Number of spans around it."""
    outermost: np.ndarray
    """bool[n]: whether no span around it has bytes. Inner spans may count the same bytes again, so only these count."""
    clocks: tuple[HostClock, ...] = ()
    """The hosts whose times are corrected."""

    @classmethod
    def of(cls, timings: Timings) -> SpanColumns:
        """Builds the columns of a save's spans."""
        rank, start, stop, nbytes, parent = (
            np.array([getattr(s, field) for s in timings.spans], np.int64)
            for field in ("rank", "start_ns", "stop_ns", "nbytes", "parent")
        )
        numbers = {BLOCKING: -1}
        name = np.array([numbers.setdefault(s.name, len(numbers) - 1) for s in timings.spans], np.int64)
        if clocks := differing_clocks(timings):
            ahead = ahead_by_rank(clocks)
            behind = np.array([ahead.get(one, 0) for one in rank.tolist()], np.int64)
            start, stop = start - behind, stop - behind
        # Stable, because `parent` counts the spans of a rank as they were recorded.
        order = np.argsort(rank, kind="stable")
        rank, start, stop, nbytes, parent, name = (c[order] for c in (rank, start, stop, nbytes, parent, name))
        first = np.searchsorted(rank, rank)  # where the spans of its rank begin
        depth, outermost = _nesting(np.where(parent < 0, -1, parent + first), nbytes)
        work, texts = np.flatnonzero(name >= 0), list(numbers)[1:]
        begun = np.full(len(texts), np.iinfo(np.int64).max)
        np.minimum.at(begun, name[work], start[work])
        by_time = sorted(range(len(texts)), key=lambda n: (int(begun[n]), n))
        place = np.empty(len(texts), np.int64)
        place[by_time] = np.arange(len(texts))
        columns = (rank, start, stop, nbytes, depth, outermost)
        names = tuple(texts[n] for n in by_time)
        return cls(names, place[name[work]], *(column[work] for column in columns), clocks=clocks)

    def among(self, names: frozenset[str]) -> np.ndarray:
        """Returns bool[n]: which spans have one of these names."""
        return np.array([name in names for name in self.names], bool)[self.name]


def _nesting(parent: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the depth of each span, and whether no span around it has bytes.

    Pointers to ancestors are doubled in each step, so that a chain of depth d takes log2(d) steps.
    """
    above = np.append(parent, -1)  # the last row stands for no parent
    depth = (above >= 0).astype(np.int64)
    moved = np.append(nbytes > 0, False)
    counted = moved[above]
    while (above >= 0).any():
        depth += np.where(above >= 0, depth[above], 0)
        counted |= counted[above]
        above = np.where(above >= 0, above[above], -1)
    return depth[:-1], ~counted[:-1]


def nearest_rank(values: np.ndarray, share: float) -> float:
    """Returns a percentile by the nearest rank: the least of the values that `share` of them do not exceed."""
    place = max(0, math.ceil(share * len(values) - 1e-9) - 1)
    return np.partition(values, place)[place].item()


def covered_ns(group: np.ndarray, start: np.ndarray, stop: np.ndarray, count: int) -> np.ndarray:
    """Computes the length that the union of each group's intervals covers.

    Args:
        group: int64[n], below `count`.
        start, stop: int64[n], in nanoseconds.

    Returns:
        int64[count].
    """
    total = np.zeros(count, np.int64)
    if not len(group):
        return total
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    # the latest stop so far, as a position among all stops: sums of stops and groups would overflow an int64
    stops, place = np.unique(stop, return_inverse=True)
    reach = stops[np.maximum.accumulate(group * len(stops) + place) % len(stops)]
    begin = start.copy()
    same = group[1:] == group[:-1]
    begin[1:][same] = np.maximum(start[1:], reach[:-1])[same]
    np.add.at(total, group, np.maximum(stop - begin, 0))
    return total


def profile_of(timings: Timings, spans: SpanColumns | None = None) -> SaveProfile:
    """Summarizes the spans of a save; `spans` are their columns, if the caller has them."""
    spans = SpanColumns.of(timings) if spans is None else spans
    if not len(spans.rank):
        return SaveProfile(0, 0, (), (), None, 1.0)
    numbers, row = np.unique(spans.rank, return_inverse=True)
    ahead = ahead_by_rank(spans.clocks)
    returned = {s.rank: s.stop_ns - ahead.get(s.rank, 0) for s in timings.spans if s.name == BLOCKING}
    ranks = _rank_times(spans, numbers, row, returned)
    slowest = max(ranks, key=lambda r: (r.busy_ns, -r.rank))
    median = int(nearest_rank(np.array([r.busy_ns for r in ranks]), 0.5))
    blocked = [r.blocked_ns for r in ranks if r.blocked_ns is not None]
    return SaveProfile(
        start_ns=min(r.start_ns for r in ranks),
        stop_ns=max(r.stop_ns for r in ranks),
        phases=_phases(spans, numbers, row),
        ranks=ranks,
        slowest=slowest.rank,
        slowdown=slowest.busy_ns / median if median else 1.0,
        median_ns=median,
        blocked_ns=max(blocked, default=None),
    )


def _rank_times(
    spans: SpanColumns, numbers: np.ndarray, row: np.ndarray, returned: dict[int, int]
) -> tuple[RankTime, ...]:
    count = len(numbers)
    out = spans.among(WAITING_PHASES | COORDINATOR_PHASES)
    busy = covered_ns(row, spans.start, spans.stop, count)
    busy -= covered_ns(row[out], spans.start[out], spans.stop[out], count)
    moved = np.zeros(count, np.int64)
    np.add.at(moved, row, np.where(spans.outermost & ~spans.among(COPYING_PHASES), spans.nbytes, 0))
    begin, end = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(begin, row, spans.start)
    np.maximum.at(end, row, spans.stop)
    columns = zip(*(c.tolist() for c in (numbers, begin, end, busy, moved)), strict=True)
    return tuple(RankTime(rank, b, e, work, nbytes, returned.get(rank)) for rank, b, e, work, nbytes in columns)


def _phases(spans: SpanColumns, numbers: np.ndarray, row: np.ndarray) -> tuple[PhaseTime, ...]:
    keys, group = np.unique(spans.name * len(numbers) + row, return_inverse=True)
    times = covered_ns(group, spans.start, spans.stop, len(keys))
    name, where = keys // len(numbers), keys % len(numbers)
    counts = np.bincount(spans.name, minlength=len(spans.names)).tolist()
    moved = np.zeros(len(keys), np.int64)
    np.add.at(moved, group, spans.nbytes)
    phases: list[PhaseTime] = []
    edges = np.searchsorted(name, np.arange(len(spans.names) + 1)).tolist()
    for number, text in enumerate(spans.names):
        part = slice(edges[number], edges[number + 1])
        ours, nbytes = times[part], moved[part]
        if not len(ours):
            continue
        slowest = int(ours.argmax())
        longest = int(ours.max())
        phases.append(
            PhaseTime(
                text,
                len(ours),
                spans=counts[number],
                nbytes=int(nbytes.sum()),
                median_ns=int(nearest_rank(ours, 0.5)),
                p95_ns=int(nearest_rank(ours, 0.95)),
                longest_ns=longest,
                slowest=int(numbers[where[part][slowest]]),
                slowest_nbytes=int(nbytes[slowest]),
            )
        )
    return tuple(phases)


def span_lanes(spans: Sequence[Span]) -> list[int]:
    """Returns for each of one rank's spans the row to draw it in: below its parent, and in no row that it overlaps."""
    lanes: list[int] = [0] * len(spans)
    reach: list[int] = []
    for at in sorted(range(len(spans)), key=lambda at: (spans[at].start_ns, -spans[at].stop_ns, at)):
        span = spans[at]
        if span.name == BLOCKING:  # drawn as a line, not as a bar
            continue
        lane = lanes[span.parent] + 1 if span.parent >= 0 else 0
        while lane < len(reach) and reach[lane] > span.start_ns:
            lane += 1
        reach += [0] * (lane + 1 - len(reach))
        reach[lane] = max(span.start_ns, span.stop_ns)
        lanes[at] = lane
    return lanes
