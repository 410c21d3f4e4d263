"""The timing report of one save: ranks by phases, stragglers, late calls, and the critical path.

A rank is a straggler in a phase where its modified z-score (Iglewicz and Hoaglin), 0.6745 (x - median) / MAD, is above
3.5. Where most ranks take the same time to the nanosecond, the deviation is zero and the score has no meaning, so a
straggler must also be slower than the median by a fifth. One that loses less than a hundredth of the save is none: to
be as fast as the median there would gain nothing.

The critical path is the segments of work that determined when the save ended, found from its end backwards. The
innermost span at a time is what a rank was doing. Where a rank was waiting, the path continues on the rank whose work
was the last to end within the wait. Clocks of hosts differ a little; where no other rank ended work within the wait,
the path stays on the waiting rank and contains the wait. Where it comes to the call of save of a rank that called later
than the first one, it begins with that late call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from .._core.format.records import Index
from .._core.format.timings import BLOCKING, Host, Timings
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.placements import Mesh, MeshLayout, mesh_ranks
from .._core.text import seconds_text
from ..errors import visible
from .profile import (
    COORDINATOR_PHASES,
    LATE_CALL,
    ROOT_SPAN,
    WAITING_PHASES,
    RankTime,
    SaveProfile,
    SpanColumns,
    clocks_text,
    covered_ns,
    nearest_rank,
    profile_of,
    span_lanes,
)

MAX_PHASES = 512
MIN_SCORE = 3.5
MIN_SLOWDOWN = 1.2
MIN_LOSS_NS = 1_000_000
"""Nanoseconds: a rank that loses less than a millisecond to the median is no straggler."""
MIN_SHARE = 0.01
"""The part of the duration of a save below which the loss of a rank makes no straggler of it."""
LOST_SCALE = 10
"""The multiple of the least loss that makes a straggler at which a scale of lost time ends, at least: noise is pale."""
MAX_STEPS = 1000
MIN_WAIT_SHARE = 0.1
"""The share of a save below which the wait for the last call is not worth a sentence."""


@dataclass(frozen=True, slots=True)
class PhaseMatrix:
    """The time of each row (a rank or a group of ranks) in each phase."""

    phases: tuple[str, ...]
    ranks: np.ndarray
    """int64[rows]: the rank of each row; the first rank of a group."""
    times: np.ndarray
    """int64[rows, phases]: nanoseconds, -1 where a row has no such phase."""
    slowest: np.ndarray
    """int64[rows, phases]: the rank whose time stands in `times`."""


class Straggler(msgspec.Struct, frozen=True):
    """A rank that was slow in a phase, or in all its work, or that called save late."""

    rank: int
    phase: str
    """The phase in which it was slow; empty for all the work that ranks have in common."""
    ns: int
    median_ns: int
    score: float
    """Modified z-score; infinite where the other ranks do not differ at all."""

    @property
    def lost_ns(self) -> int:
        return self.ns - self.median_ns

    @property
    def times(self) -> float:
        return self.ns / self.median_ns if self.median_ns else float("inf")


@dataclass(frozen=True, slots=True)
class RankGrouping:
    """A partition of the ranks: by host, or by their coordinate along one dimension of a mesh."""

    name: str
    labels: tuple[str, ...]
    of: np.ndarray
    """int64[world]: the group of each rank, -1 for none."""


def phase_matrix(spans: SpanColumns) -> PhaseMatrix:
    """Computes the time of each rank in each phase except the root span; phases in the order of their first start."""
    ranks, row = np.unique(spans.rank, return_inverse=True)
    shown = [n for n, name in enumerate(spans.names) if name != ROOT_SPAN and (spans.name == n).any()][:MAX_PHASES]
    column = np.full(len(spans.names), -1)
    column[shown] = np.arange(len(shown))
    mine = column[spans.name] >= 0 if len(spans.name) else np.zeros(0, bool)
    group = row[mine] * len(shown) + column[spans.name[mine]]
    times = covered_ns(group, spans.start[mine], spans.stop[mine], len(ranks) * len(shown))
    present = np.zeros(len(times), bool)
    present[group] = True
    times = np.where(present, times, -1).reshape(len(ranks), len(shown))
    slowest = np.broadcast_to(ranks[:, None], times.shape)
    return PhaseMatrix(tuple(spans.names[n] for n in shown), ranks, times, slowest)


def group_phase_matrix(matrix: PhaseMatrix, grouping: RankGrouping) -> tuple[PhaseMatrix, tuple[str, ...]]:
    """Reduces a matrix to one row for each group that has a rank: the longest time in each phase, and its rank.

    Returns:
        The matrix, and the labels of its rows.
    """
    of = grouping.of[matrix.ranks] if len(matrix.ranks) else np.zeros(0, np.int64)
    rows = [np.flatnonzero(of == group) for group in range(len(grouping.labels))]
    kept = [(label, row) for label, row in zip(grouping.labels, rows, strict=True) if len(row)]
    columns = np.arange(len(matrix.phases))
    firsts = np.array([row[0] for _, row in kept], np.int64)
    tops = np.array([row[matrix.times[row].argmax(0)] for _, row in kept], np.int64).reshape(len(kept), len(columns))
    grouped = PhaseMatrix(matrix.phases, matrix.ranks[firsts], matrix.times[tops, columns], matrix.ranks[tops])
    return grouped, tuple(label for label, _ in kept)


def rank_groupings(world: int, hosts: Sequence[Host], index: Index | None) -> tuple[RankGrouping, ...]:
    """Returns the groupings of the ranks: by host, then by each dimension of the meshes that arrays were placed on."""
    groupings: list[RankGrouping] = []
    if hosts:
        of = np.full(world, -1, np.int64)
        for number, host in enumerate(hosts):
            of[decode_runs(host.ranks)] = number
        groupings.append(RankGrouping("host", tuple(host.name for host in hosts), of))
    meshes = _named_meshes(index) if index is not None else []
    for name in dict.fromkeys(name for mesh in meshes for name in mesh.names):
        of = np.full(world, -1, np.int64)
        for mesh in meshes:
            if name not in mesh.names:
                continue
            ranks, dim = mesh_ranks(mesh), mesh.names.index(name)
            where = np.unravel_index(np.arange(len(ranks)), mesh.shape)[dim]
            known = (ranks >= 0) & (ranks < world)
            # Of several meshes with a dimension of this name, the first that has a rank, the largest, counts for it.
            free = known & (of[np.where(known, ranks, 0)] < 0)
            of[ranks[free]] = where[free]
        size = int(of.max(initial=-1)) + 1
        groupings.append(RankGrouping(name, tuple(f"{name} {n}" for n in range(size)), of))
    return tuple(groupings)


def _named_meshes(index: Index) -> list[Mesh]:
    """Returns the named meshes of an index, the largest first."""
    meshes = {layout.mesh for layout in index.layouts if isinstance(layout, MeshLayout) and layout.mesh.names}
    return sorted(meshes, key=lambda mesh: (-len(mesh_ranks(mesh)), -len(mesh.names), mesh.names, mesh.ranks))


def least_loss_ns(seconds: float) -> float:
    """Returns the nanoseconds below which the loss of a rank counts for nothing in a save that took so long."""
    return max(MIN_LOSS_NS, MIN_SHARE * seconds * 1e9)


def lost_scale_ns(longest_ns: float, seconds: float) -> float:
    """Returns where a scale of the time that ranks lost to the median rank ends: at the longest, or a large one.

    Args:
        longest_ns: the longest loss that is shown.
        seconds: the duration of the save.
    """
    return max(longest_ns, LOST_SCALE * least_loss_ns(seconds))


def find_stragglers(profile: SaveProfile, matrix: PhaseMatrix) -> tuple[Straggler, ...]:
    """Returns the stragglers, the largest loss of time first. Phases of waiting or of the coordinator have none.

    A rank that called save later than the others is one in the phase LATE_CALL.
    """
    stragglers: list[Straggler] = []
    least_ns = least_loss_ns(profile.seconds)
    for column, phase in enumerate(matrix.phases):
        if phase not in WAITING_PHASES | COORDINATOR_PHASES:
            rows = np.flatnonzero(matrix.times[:, column] >= 0)
            stragglers += _outliers(phase, matrix.ranks[rows], matrix.times[rows, column], least_ns)
    ranks = np.array([r.rank for r in profile.ranks], np.int64)
    starts = [r.start_ns - profile.start_ns for r in profile.ranks]
    stragglers += _outliers("", ranks, np.array([r.busy_ns for r in profile.ranks], np.int64), least_ns)
    stragglers += _outliers(LATE_CALL, ranks, np.array(starts, np.int64), least_ns)
    return tuple(sorted(stragglers, key=lambda s: (-s.lost_ns, s.rank, s.phase)))


def _outliers(phase: str, ranks: np.ndarray, times: np.ndarray, least_ns: float) -> list[Straggler]:
    if len(times) < 3:  # of two ranks none is the outlier
        return []
    median = int(nearest_rank(times, 0.5))
    deviation = float(np.median(np.abs(times - median)))
    far = (times > median * MIN_SLOWDOWN) & (times - median >= least_ns)
    scores = 0.6745 * (times - median) / deviation if deviation else np.full(len(times), np.inf)
    return [
        Straggler(int(ranks[row]), phase, int(times[row]), median, float(scores[row]))
        for row in np.flatnonzero(far & (scores > MIN_SCORE)).tolist()
    ]


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
    segments: list[CriticalSegment] = []
    for _ in range(MAX_STEPS):  # clocks that disagree can make the path go round in circles
        low, high = int(edges[rank]), int(edges[rank + 1])
        span = _innermost_span(spans, low, high, now)
        if span is None:
            earlier = spans.stop[low:high][spans.stop[low:high] < now]
            if not len(earlier):
                _append_segment(segments, CriticalSegment(rank, LATE_CALL, int(spans.start.min()), now))
                break
            now = int(earlier.max())
            continue
        phase = spans.names[int(spans.name[span])]
        begin = _work_start(spans, low, high, span, now)
        if (
            waits[span]
            and (other := _last_to_end(spans, inner & ~waits & (spans.rank != rank), begin, now)) is not None
        ):
            _append_segment(segments, CriticalSegment(rank, phase, int(spans.stop[other]), now))
            rank, now = int(spans.rank[other]), int(spans.stop[other])
            continue
        _append_segment(segments, CriticalSegment(rank, phase, begin, now))
        now = begin
    return tuple(reversed(segments))


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


def _append_segment(segments: list[CriticalSegment], segment: CriticalSegment) -> None:
    if segment.stop_ns <= segment.start_ns:
        return
    if segments and (segments[-1].rank, segments[-1].phase) == (segment.rank, segment.phase):
        segments[-1] = msgspec.structs.replace(segments[-1], start_ns=segment.start_ns)
        return
    segments.append(segment)


def late_call_text(profile: SaveProfile, hosts: Sequence[Host]) -> str:
    """Returns a sentence without a full stop; empty where the wait for the last call was short.

    A rank was late if it called in the second half of the time from the first call to the last.
    """
    calls = sorted(profile.ranks, key=lambda call: (call.start_ns, -call.rank))
    wait = calls[-1].start_ns - profile.start_ns if calls else 0
    if wait <= MIN_WAIT_SHARE * (profile.stop_ns - profile.start_ns):
        return ""
    on_time = [call for call in calls if 2 * (call.start_ns - profile.start_ns) < wait]
    last = _rank_text(calls[-1], hosts)
    if len(calls) - len(on_time) == 1:
        wait = calls[-1].start_ns - on_time[(len(on_time) - 1) // 2].start_ns
        others = "the others; they" if len(on_time) > 1 else f"rank {on_time[0].rank}, which"
        return f"{last} called save {seconds_text(wait / 1e9)} after {others} waited for it"
    late = f"{len(calls) - len(on_time)} of {len(calls)} ranks"
    return (
        f"{late} called save late, the last of them {last}, {seconds_text(wait / 1e9)} after the first rank; "
        "the others waited for them"
    )


def _rank_text(call: RankTime, hosts: Sequence[Host]) -> str:
    host = next((host.name for host in hosts if call.rank in decode_runs(host.ranks)), "")
    return f"rank {call.rank}" + (f" (host {visible(host)})" if host else "")


@dataclass(frozen=True)
class TimingReport:
    """The timings of a save and all analyses of them. Threads may share it."""

    timings: Timings

    @cached_property
    def spans(self) -> SpanColumns:
        return SpanColumns.of(self.timings)

    @cached_property
    def profile(self) -> SaveProfile:
        return profile_of(self.timings, self.spans)

    @cached_property
    def matrix(self) -> PhaseMatrix:
        return phase_matrix(self.spans)

    @cached_property
    def stragglers(self) -> tuple[Straggler, ...]:
        return find_stragglers(self.profile, self.matrix)

    @cached_property
    def critical(self) -> tuple[CriticalSegment, ...]:
        return critical_path(self.spans)

    @cached_property
    def late_call(self) -> str:
        """In a sentence: which rank called save late; empty if none did."""
        return late_call_text(self.profile, self.timings.hosts)

    @cached_property
    def clocks(self) -> str:
        """In two sentences: which clocks of hosts differ; empty if none do."""
        return clocks_text(self.spans.clocks)

    @cached_property
    def edges(self) -> np.ndarray:
        """int64[ranks + 1]: the first span of each rank of the profile, then the number of spans."""
        ranks = [r.rank for r in self.profile.ranks]
        return np.append(np.searchsorted(self.spans.rank, ranks), len(self.spans.rank))

    @cached_property
    def lanes(self) -> np.ndarray:
        """int64[spans]: the row of each span within its rank, as `span_lanes` returns it.

        It is the depth of the span on ranks where no two spans of one depth overlap, which is the case on most.
        """
        spans = self.spans
        lanes = spans.depth.copy()
        order = np.lexsort((-spans.stop, spans.start, spans.depth, spans.rank))
        same = (np.diff(spans.rank[order]) == 0) & (np.diff(spans.depth[order]) == 0)
        crowded = same & (spans.start[order][1:] < spans.stop[order][:-1])
        for rank in np.unique(spans.rank[order][1:][crowded]).tolist():
            mine = self.timings.of_rank(rank)
            found = [lane for lane, span in zip(span_lanes(mine), mine, strict=True) if span.name != BLOCKING]
            lanes[spans.rank == rank] = found
        return lanes
