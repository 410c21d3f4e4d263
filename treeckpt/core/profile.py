"""What the spans of a save say: how long each phase took on the ranks, which rank was slowest, how fast bytes moved.

A rank is slow by the work that ranks share: time spent waiting for others is taken out, and so is what only the
coordinator does. Spans of a rank may overlap (threads), so lengths are of unions of intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .events import Span, Timings

__all__ = ["COORDINATING", "WAITING", "Phase", "Profile", "RankTime", "lanes_of", "profile_of"]

WAITING = frozenset({"agree", "gather", "wait", "barrier", "broadcast", "open"})
"""Phases in which a rank mostly waits for others."""
COORDINATING = frozenset({"publish"})
"""Phases of the coordinator alone."""


class Phase(msgspec.Struct, frozen=True):
    """One phase over all ranks that had it."""

    name: str
    ranks: int
    spans: int
    nbytes: int
    median_ns: int
    """Over ranks, of each rank's time in the phase."""
    longest_ns: int
    slowest: int
    """The rank with the longest time."""


class RankTime(msgspec.Struct, frozen=True):
    """One rank's time: from its first span to its last, and what of it was work that other ranks have too."""

    rank: int
    start_ns: int
    stop_ns: int
    busy_ns: int
    nbytes: int


class Profile(msgspec.Struct, frozen=True):
    """A save's spans, summed up."""

    start_ns: int
    stop_ns: int
    phases: tuple[Phase, ...]
    """In the order in which they first began."""
    ranks: tuple[RankTime, ...]
    slowest: int | None
    """The rank with the most work; None where there are no spans."""
    slowdown: float
    """Its work over the median rank's."""

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9


def profile_of(timings: Timings) -> Profile:
    """Sums up the spans of a save."""
    by_rank: dict[int, list[Span]] = {}
    for span in timings.spans:
        by_rank.setdefault(span.rank, []).append(span)
    if not by_rank:
        return Profile(0, 0, (), (), None, 1.0)
    phases = _phases(by_rank)
    ranks = tuple(_rank_time(rank, by_rank[rank]) for rank in sorted(by_rank))
    slowest = max(ranks, key=lambda r: (r.busy_ns, -r.rank))
    median = _median([r.busy_ns for r in ranks])
    return Profile(
        start_ns=min(r.start_ns for r in ranks),
        stop_ns=max(r.stop_ns for r in ranks),
        phases=phases,
        ranks=ranks,
        slowest=slowest.rank,
        slowdown=slowest.busy_ns / median if median else 1.0,
    )


def _rank_time(rank: int, spans: Sequence[Span]) -> RankTime:
    out = _union((s.start_ns, s.stop_ns) for s in spans if s.name in WAITING | COORDINATING)
    busy = _union((s.start_ns, s.stop_ns) for s in spans) - out
    # a span's bytes may be counted again by the spans inside it: the outermost that has any is the one that moved them
    moved = sum(span.nbytes for span in spans if span.nbytes and not _counted_above(span, spans))
    start = min(span.start_ns for span in spans)
    return RankTime(rank, start, max(span.stop_ns for span in spans), busy, moved)


def _counted_above(span: Span, spans: Sequence[Span]) -> bool:
    while span.parent >= 0:
        span = spans[span.parent]
        if span.nbytes:
            return True
    return False


def _phases(by_rank: dict[int, list[Span]]) -> tuple[Phase, ...]:
    found: dict[str, dict[int, list[Span]]] = {}
    for rank, spans in by_rank.items():
        for span in spans:
            found.setdefault(span.name, {}).setdefault(rank, []).append(span)
    phases: list[tuple[int, Phase]] = []
    for name, ranks in found.items():
        times = {rank: _union((s.start_ns, s.stop_ns) for s in spans) for rank, spans in ranks.items()}
        slowest = max(times, key=lambda rank: (times[rank], -rank))
        every = [span for spans in ranks.values() for span in spans]
        phase = Phase(
            name=name,
            ranks=len(ranks),
            spans=len(every),
            nbytes=sum(span.nbytes for span in every),
            median_ns=_median(list(times.values())),
            longest_ns=times[slowest],
            slowest=slowest,
        )
        phases.append((min(span.start_ns for span in every), phase))
    return tuple(phase for _, phase in sorted(phases, key=lambda pair: pair[0]))


def _union(intervals: Iterable[tuple[int, int]]) -> int:
    total, reach = 0, None
    for start, stop in sorted(intervals):
        if reach is None or start > reach:
            total, reach = total + max(0, stop - start), max(start, stop)
        elif stop > reach:
            total, reach = total + stop - reach, stop
    return total


def _median(numbers: list[int]) -> int:
    return sorted(numbers)[(len(numbers) - 1) // 2]


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """For each of one rank's spans the row to draw it in: below its parent, and beside what overlaps it."""
    lanes: list[int] = [0] * len(spans)
    reach: list[int] = []
    for at in sorted(range(len(spans)), key=lambda at: (spans[at].start_ns, -spans[at].stop_ns, at)):
        span = spans[at]
        lane = lanes[span.parent] + 1 if span.parent >= 0 else 0
        while lane < len(reach) and reach[lane] > span.start_ns:
            lane += 1
        reach += [0] * (lane + 1 - len(reach))
        reach[lane] = max(span.start_ns, span.stop_ns)
        lanes[at] = lane
    return lanes
