"""The critical path of a save: the segments of work that determined when it ended, found from its end backwards.

The innermost span at a time is what a rank was doing. Where a rank was waiting, the path continues on the rank whose
work was the last to end within the wait. Clocks of hosts differ a little; where no other rank ended work within the
wait, the path stays on the waiting rank and contains the wait. Where it comes to the call of save of a rank that called
later than the first one, it begins with that late call.
"""

from __future__ import annotations

import msgspec
import numpy as np

from .profile import LATE_CALL, WAITING_PHASES, SpanColumns

MAX_STEPS = 1000


class CriticalSegment(msgspec.Struct, frozen=True):
    """A part of the critical path: one phase of one rank."""

    rank: int
    phase: str
    start_ns: int
    stop_ns: int


def critical_path(spans: SpanColumns) -> tuple[CriticalSegment, ...]:
    """Returns the segments in order of time; neighbouring segments of one rank and phase are merged."""
    lasting = np.flatnonzero(spans.stop > spans.start)
    if not len(lasting):
        return ()
    waits, inner = spans.among(WAITING_PHASES), _leaves(spans)
    edges = np.searchsorted(spans.rank, np.arange(int(spans.rank[-1]) + 2))
    last = int(lasting[np.lexsort((-spans.depth[lasting], -spans.rank[lasting], spans.stop[lasting]))[-1]])
    rank, now = int(spans.rank[last]), int(spans.stop[last])
    found: list[CriticalSegment] = []
    for _ in range(MAX_STEPS):  # clocks that disagree can make the path go round in circles
        low, high = int(edges[rank]), int(edges[rank + 1])
        at = _innermost_span(spans, low, high, now)
        if at is None:
            earlier = spans.stop[low:high][spans.stop[low:high] < now]
            if not len(earlier):
                _append_segment(found, CriticalSegment(rank, LATE_CALL, int(spans.start.min()), now))
                break
            now = int(earlier.max())
            continue
        phase = spans.names[int(spans.name[at])]
        begin = _work_start(spans, low, high, at, now)
        if waits[at] and (other := _last_to_end(spans, inner & ~waits & (spans.rank != rank), begin, now)) is not None:
            _append_segment(found, CriticalSegment(rank, phase, int(spans.stop[other]), now))
            rank, now = int(spans.rank[other]), int(spans.stop[other])
            continue
        _append_segment(found, CriticalSegment(rank, phase, begin, now))
        now = begin
    return tuple(reversed(found))


def _leaves(spans: SpanColumns) -> np.ndarray:
    """Returns bool[n]: the spans without child spans, which are work itself and not a group of work."""
    deeper = np.zeros(len(spans.depth), bool)
    deeper[:-1] = (spans.depth[1:] > spans.depth[:-1]) & (spans.rank[1:] == spans.rank[:-1])
    return ~deeper


def _innermost_span(spans: SpanColumns, low: int, high: int, now: int) -> int | None:
    """Returns the innermost span of a rank that lasts until `now`; of several, the one that began last."""
    here = np.flatnonzero((spans.start[low:high] < now) & (spans.stop[low:high] >= now)) + low
    if not len(here):
        return None
    return int(here[np.lexsort((spans.start[here], spans.depth[here]))[-1]])


def _work_start(spans: SpanColumns, low: int, high: int, at: int, now: int) -> int:
    """Returns the time since which a rank did nothing but the span `at`."""
    stops, depths = spans.stop[low:high], spans.depth[low:high]
    inside = stops[(depths > spans.depth[at]) & (stops < now)]
    return max(int(spans.start[at]), int(inside.max(initial=spans.start[at])))


def _last_to_end(spans: SpanColumns, work: np.ndarray, begin: int, now: int) -> int | None:
    """Returns the span of `work` that was the last to end within a wait, None if there is none."""
    ended = np.flatnonzero(work & (spans.stop > begin) & (spans.stop <= now) & (spans.stop > spans.start))
    return int(ended[spans.stop[ended].argmax()]) if len(ended) else None


def _append_segment(found: list[CriticalSegment], segment: CriticalSegment) -> None:
    if segment.stop_ns <= segment.start_ns:
        return
    if found and (found[-1].rank, found[-1].phase) == (segment.rank, segment.phase):
        found[-1] = msgspec.structs.replace(found[-1], start_ns=segment.start_ns)
        return
    found.append(segment)
