"""The page of the timing of one save: phases, ranks, spans, stragglers, the critical path, and the data of its charts.

Times of the page are seconds from the start of the save, those of the charts are in columns of integers. Names of
phases and hosts are as stored; the template escapes them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from treeckpt._core.format.records import Index
from treeckpt._inspect.profile import COORDINATOR_PHASES, LATE_CALL, WAITING_PHASES, PhaseTime, RankTime, SaveProfile
from treeckpt._inspect.timing_report import (
    CriticalSegment,
    PhaseMatrix,
    RankGrouping,
    Straggler,
    TimingReport,
    group_phase_matrix,
    lost_scale_ns,
    rank_groupings,
)
from treeckpt._runs.reduced_timings import reduce_timings
from treeckpt._runs.save_trends import RECENT
from treeckpt.errors import TreeckptError, visible

from ..pages.checkpoints import CheckpointRow, checkpoint_row, next_start
from ..store.library import Library, OpenCheckpoint
from .diagnosis import Blame, PartRow, RestRow, blame_of, critical_parts, diagnosis, repeated, saves_before

RANKS = 32
"""Ranks listed on one page."""
GROUPS = 100
"""Groups of ranks listed on the page."""
STRAGGLERS = 50
"""Stragglers listed on the page, the worst first."""

Sort = Literal["slow", "rank"]
TICKS = 4_000_000
"""Units into which the time of a save is divided, so that columns are short integers."""


class PhaseRow(msgspec.Struct, frozen=True):
    """One phase over all ranks."""

    name: str
    ranks: int
    median: float
    p95: float
    """The time that 95 % of the ranks need at most."""
    longest: float
    slowest: int
    """The rank with the longest time."""
    nbytes: int
    rate: float | None
    """Bytes per second of the rank with the longest time."""
    waiting: bool
    """Whether ranks mostly wait for other ranks in it."""


class RankRow(msgspec.Struct, frozen=True):
    """The save of one rank."""

    rank: int
    seconds: float
    """Seconds from its first span to its last."""
    busy: float
    """Seconds of its own work: without waiting for other ranks, and without what only the coordinator does."""
    nbytes: int
    """Bytes that it wrote."""
    slowdown: float
    """Its own work, as a multiple of the median rank's."""
    blocked: float | None
    """Seconds until its call returned; None if that was the end of the save."""


class SpanRow(msgspec.Struct, frozen=True):
    """One span of one rank."""

    name: str
    rank: int
    start: float
    seconds: float
    nbytes: int
    rate: float | None
    depth: int
    lane: int


class StragglerRow(msgspec.Struct, frozen=True):
    """A rank that is much slower than the others."""

    rank: int
    at: int
    """Its position among the ranks."""
    phase: str
    """Empty if the time is all of its own work."""
    seconds: float
    median: float
    times: float | None
    """The time as a multiple of the median rank's; None if that is zero."""
    score: float | None
    """Modified z-score; None if the other ranks do not differ at all."""


class CriticalRow(msgspec.Struct, frozen=True):
    """A segment of the critical path."""

    rank: int
    phase: str
    start: float
    seconds: float
    share: float
    """Share of the time of the whole save."""


class HeatRow(msgspec.Struct, frozen=True):
    """One row of the heat map: the time in each phase, None if there is none, and the rank that took it."""

    label: str
    seconds: list[float | None]
    slowest: list[int]


class TimingPage(msgspec.Struct, frozen=True, kw_only=True):
    """The timing of one save; without timings only `checkpoint` and `problem` are set."""

    checkpoint: CheckpointRow
    problem: str | None = None
    """Why there is nothing to show."""
    error: str | None = None
    """What the save failed with."""
    seconds: float = 0.0
    blocked: float | None = None
    """Seconds until the last rank's call returned; None if the save was not in the background."""
    rate: float | None = None
    """Bytes per second that all ranks wrote, over the duration of the save."""
    slowest: int | None = None
    """The rank that the diagnosis names, else the one with the most work of its own; None without spans."""
    slowdown: float = 1.0
    """The work of that rank, as a multiple of the median rank's."""
    late: bool = False
    """Whether the diagnosis names that rank because it called save late."""
    world: int = 0
    start: int = 0
    next: int | None = None
    phases: list[PhaseRow] = []
    ranks: list[RankRow] = []
    spans: list[SpanRow] = []
    stragglers: list[StragglerRow] = []
    straggling: int = 0
    """Number of all stragglers, of which the worst are listed."""
    diagnosis: str = ""
    """The duration beside the saves before it, and what took the longest, as a sentence."""
    clocks: str = ""
    """Which clocks of hosts differ, and that times are corrected by that, as two sentences; empty if none do."""
    trend: str = ""
    """Whether what slowed it was there in the saves before it, as a sentence."""
    parts: list[PartRow] = []
    """The critical path by rank and phase, the longest first."""
    rest: RestRow | None = None
    """The parts of it that are too short to be listed."""
    critical: list[CriticalRow] = []
    """The segments of the critical path in order of time."""
    groups: list[str] = []
    """How ranks can be grouped: by host, and by the names of mesh dimensions."""
    by: str = "rank"
    sort: Sort = "slow"
    """The order of the tables of ranks and groups: the slowest first, or by number."""
    columns: list[str] = []
    """The phases of the heat map."""
    heat: list[HeatRow] = []
    rows: int = 0
    """Number of rows of the whole heat map."""


def timing_page(
    library: Library, checkpoint_id: str, start: int = 0, by: str = "rank", sort: Sort = "slow"
) -> TimingPage:
    """The spans of a save and their summary.

    Also of a failed one; with the spans of ranks from position `start` on.

    Args:
        by: the rows of the heat map: "rank", or one of the page's groups.
        sort: the order of ranks and groups in tables.

    Raises:
        UnknownGroupingError: there is no such group.
    """
    checkpoint = library.checkpoint(checkpoint_id)
    run, info = checkpoint.run, checkpoint.info
    row = checkpoint_row(checkpoint_id, run, info)
    if info.status == "foreign":
        return TimingPage(checkpoint=row, problem="This is no checkpoint.")
    try:
        study = library.study(checkpoint)
    except TreeckptError as error:
        return TimingPage(checkpoint=row, problem=visible(str(error)))
    page = _timing_page(row, study, groupings(library, checkpoint, study), start, by, sort)
    saves = [other for _, other in library.checkpoints(run)]
    before = [library.reduced_timings(run, other) for other in saves_before(info, saves)[-RECENT:]]
    blame = blame_of(page.parts, study)
    return msgspec.structs.replace(
        page,
        **_slowest(study.profile, blame),
        rate=row.rate if row.rate is not None else page.rate,
        diagnosis=diagnosis(info, saves, page.seconds, blame),
        trend=repeated(reduce_timings(study), [one for one in before if one is not None], blame),
    )


def _slowest(profile: SaveProfile, blame: Blame | None) -> dict[str, Any]:
    """Returns the fields of the page that name one rank: that of the diagnosis, where it names any."""
    named = [rank for rank in profile.ranks if blame is not None and rank.rank in blame.ranks] or profile.ranks
    if not named:
        return {}
    slowest = max(named, key=lambda rank: (rank.busy_ns, -rank.rank))
    slowdown = slowest.busy_ns / profile.median_ns if profile.median_ns else 1.0
    late = blame is not None and blame.phase == LATE_CALL and slowest.rank in blame.ranks
    return {"slowest": slowest.rank, "slowdown": slowdown, "late": late}


def groupings(library: Library, checkpoint: OpenCheckpoint, study: TimingReport) -> tuple[RankGrouping, ...]:
    """Returns the groupings of ranks of a save: by host, and by mesh dimension if its index is still there."""
    index: Index | None = None
    if checkpoint.info.leaves is not None:
        index = library.outline(checkpoint).index
        index = index if index.save_id == study.timings.save_id else None
    return rank_groupings(study.timings.world, study.timings.hosts, index)


class UnknownGroupingError(ValueError):
    """The ranks of a save cannot be grouped by what a request asks for."""


def group_rows(study: TimingReport, groups: Sequence[RankGrouping], by: str) -> tuple[PhaseMatrix, Sequence[str]]:
    """Returns the rows of the heat map and their labels.

    Raises:
        UnknownGroupingError: `by` is neither "rank" nor the name of a group.
    """
    if by == "rank":
        return study.matrix, [f"rank {rank}" for rank in study.matrix.ranks.tolist()]
    for group in groups:
        if group.name == by:
            return group_phase_matrix(study.matrix, group)
    names = ", ".join(visible(name) for name in ("rank", *(group.name for group in groups)))
    raise UnknownGroupingError(f"by: the ranks of this save are grouped by one of {names}, not by '{visible(by)}'")


def _timing_page(
    row: CheckpointRow, study: TimingReport, groups: Sequence[RankGrouping], start: int, by: str, sort: Sort
) -> TimingPage:
    profile = study.profile
    positions = list(range(len(profile.ranks)))
    if sort == "slow":
        positions.sort(key=lambda at: -profile.ranks[at].busy_ns)
    picked = positions[start : start + RANKS]
    matrix, labels = group_rows(study, groups, by)
    shown = picked if by == "rank" else _group_order(matrix, sort)[:GROUPS]
    origin = profile.start_ns
    parts, rest = critical_parts(study.critical, study.timings.hosts, profile.seconds)
    return TimingPage(
        checkpoint=row,
        problem=None if profile.ranks else "The timings of this save hold no spans.",
        error=visible(study.timings.error) if study.timings.error else None,
        seconds=profile.seconds,
        blocked=None if profile.blocked_ns is None else (profile.blocked_ns - origin) / 1e9,
        rate=profile.nbytes / profile.seconds if profile.nbytes and profile.seconds else None,
        slowest=profile.slowest,
        slowdown=profile.slowdown,
        world=len(profile.ranks),
        clocks=study.clocks,
        start=start,
        next=next_start(start, len(profile.ranks), RANKS),
        phases=[_phase_row(phase) for phase in profile.phases],
        sort=sort,
        ranks=[_rank_row(profile.ranks[at], profile.median_ns, origin) for at in picked],
        spans=_span_rows(study, picked),
        stragglers=[_straggler_row(straggler, profile) for straggler in study.stragglers[:STRAGGLERS]],
        straggling=len(study.stragglers),
        parts=parts,
        rest=rest,
        critical=[_critical_row(segment, origin, profile.seconds) for segment in study.critical],
        groups=[group.name for group in groups],
        by=by,
        columns=list(matrix.phases),
        heat=_heat_rows(matrix, labels, shown),
        rows=len(labels),
    )


def _phase_row(phase: PhaseTime) -> PhaseRow:
    seconds = phase.longest_ns / 1e9
    rate = phase.slowest_nbytes / seconds if phase.slowest_nbytes and seconds > 0 else None
    median, waiting = phase.median_ns / 1e9, phase.name in WAITING_PHASES
    return PhaseRow(
        phase.name,
        phase.ranks,
        median=median,
        p95=phase.p95_ns / 1e9,
        longest=seconds,
        slowest=phase.slowest,
        nbytes=phase.nbytes,
        rate=rate,
        waiting=waiting,
    )


def _rank_row(rank: RankTime, median: int, origin: int) -> RankRow:
    slowdown = rank.busy_ns / median if median else 1.0
    blocked = None if rank.blocked_ns is None else (rank.blocked_ns - origin) / 1e9
    return RankRow(rank.rank, (rank.stop_ns - rank.start_ns) / 1e9, rank.busy_ns / 1e9, rank.nbytes, slowdown, blocked)


def _straggler_row(straggler: Straggler, profile: SaveProfile) -> StragglerRow:
    times, score = straggler.times, straggler.score
    return StragglerRow(
        straggler.rank,
        bisect_left(profile.ranks, straggler.rank, key=lambda rank: rank.rank),
        phase=straggler.phase,
        seconds=straggler.ns / 1e9,
        median=straggler.median_ns / 1e9,
        # JSON has no infinity.
        times=times if math.isfinite(times) else None,
        score=score if math.isfinite(score) else None,
    )


def _critical_row(segment: CriticalSegment, origin: int, total: float) -> CriticalRow:
    seconds = (segment.stop_ns - segment.start_ns) / 1e9
    start = (segment.start_ns - origin) / 1e9
    return CriticalRow(segment.rank, segment.phase, start, seconds, seconds / total if total else 0.0)


def _group_order(matrix: PhaseMatrix, sort: Sort) -> list[int]:
    """Returns the rows of the heat map in order; the worst is the one whose work in any phase is the longest."""
    if sort == "rank":
        return list(range(len(matrix.times)))
    work = matrix.times[:, [name not in WAITING_PHASES | COORDINATOR_PHASES for name in matrix.phases]]
    return np.argsort(-work.max(axis=1, initial=-1), kind="stable").tolist()


def _heat_rows(matrix: PhaseMatrix, labels: Sequence[str], shown: Sequence[int]) -> list[HeatRow]:
    times, slowest = matrix.times[shown].tolist(), matrix.slowest[shown].tolist()
    return [
        HeatRow(labels[row], [None if ns < 0 else ns / 1e9 for ns in own], ranks)
        for row, own, ranks in zip(shown, times, slowest, strict=True)
    ]


def _span_rows(study: TimingReport, positions: Sequence[int]) -> list[SpanRow]:
    """Returns the spans of the ranks at these positions of the profile."""
    spans, origin = study.spans, study.profile.start_ns
    columns = (spans.name, spans.rank, spans.start, spans.stop, spans.nbytes, spans.depth, study.lanes)
    rows: list[SpanRow] = []
    for at in positions:
        part = slice(int(study.edges[at]), int(study.edges[at + 1]))
        for name, rank, start, stop, nbytes, depth, lane in zip(*(c[part].tolist() for c in columns), strict=True):
            seconds = (stop - start) / 1e9
            rate = nbytes / seconds if nbytes and seconds > 0 else None
            rows.append(
                SpanRow(
                    spans.names[name],
                    rank,
                    start=(start - origin) / 1e9,
                    seconds=seconds,
                    nbytes=nbytes,
                    rate=rate,
                    depth=depth,
                    lane=lane,
                )
            )
    return rows


class WaterfallData(msgspec.Struct, frozen=True):
    """Every span of a save in columns, sorted by rank; times in units of `unit` seconds."""

    unit: float
    total: int
    phases: list[str]
    waiting: list[bool]
    ranks: list[int]
    counts: list[int]
    """Number of spans of each rank."""
    busy: list[int]
    """Active time of each rank."""
    blocked: list[int | None]
    """When the call of each rank returned."""
    phase: list[int]
    start: list[int]
    length: list[int]
    lane: list[int]
    nbytes: list[int]
    critical: list[list[int]]
    """[position of the rank, start, length] of each segment."""
    stragglers: list[int]


class HeatData(msgspec.Struct, frozen=True):
    """The heat map in columns; times in units of `unit` seconds."""

    by: str
    phases: list[str]
    waiting: list[bool]
    unit: float
    labels: list[str]
    medians: list[int]
    """Time of the median rank, by phase."""
    most_lost: int
    """The end of the scale of lost time, by which a row took longer than the median rank: the longest, or a large one.

    Phases in which ranks wait for others do not count.
    """
    times: list[list[int]]
    """Time of each row, by phase; -1 if there is none."""
    slowest: list[list[int]]
    """The rank that took the time, by phase and row; empty if the rows are ranks."""


def waterfall_data(study: TimingReport, *, ranks: int | None = None, spans: int | None = None) -> WaterfallData:
    """Returns every span of a save.

    Args:
        ranks: how many there are at most, the slowest; None for all.
        spans: how many spans each of them has at most, the first.
    """
    profile, columns, origin = study.profile, study.spans, study.profile.start_ns
    unit = max(1, (profile.stop_ns - origin) // TICKS)
    shown = sorted(sorted(range(len(profile.ranks)), key=lambda at: -profile.ranks[at].busy_ns)[:ranks])
    place = {profile.ranks[at].rank: number for number, at in enumerate(shown)}
    edges = study.edges.tolist()
    parts = [range(edges[at], edges[at + 1])[:spans] for at in shown]
    kept = np.concatenate([np.arange(part.start, part.stop) for part in parts] or [np.empty(0, np.int64)])
    return WaterfallData(
        unit=unit / 1e9,
        total=(profile.stop_ns - origin) // unit,
        phases=list(columns.names),
        waiting=[name in WAITING_PHASES for name in columns.names],
        ranks=list(place),
        counts=[len(part) for part in parts],
        busy=[profile.ranks[at].busy_ns // unit for at in shown],
        blocked=[None if (ns := profile.ranks[at].blocked_ns) is None else (ns - origin) // unit for at in shown],
        phase=columns.name[kept].tolist(),
        start=((columns.start[kept] - origin) // unit).tolist(),
        length=((columns.stop[kept] - columns.start[kept]) // unit).tolist(),
        lane=study.lanes[kept].tolist(),
        nbytes=columns.nbytes[kept].tolist(),
        critical=[
            [place[s.rank], (s.start_ns - origin) // unit, (s.stop_ns - s.start_ns) // unit]
            for s in study.critical
            if s.rank in place
        ],
        stragglers=sorted({straggler.rank for straggler in study.stragglers}),
    )


def heat_data(study: TimingReport, groups: Sequence[RankGrouping], by: str) -> HeatData:
    """Returns the time of every rank, or group of ranks, in every phase."""
    matrix, labels = group_rows(study, groups, by)
    unit = max(1, (study.profile.stop_ns - study.profile.start_ns) // TICKS)
    median_of = {phase.name: phase.median_ns for phase in study.profile.phases}
    medians = np.array([median_of[name] for name in matrix.phases], np.int64)
    waiting = [name in WAITING_PHASES for name in matrix.phases]
    lost = np.where(waiting, 0, matrix.times - medians)
    return HeatData(
        by=by,
        phases=list(matrix.phases),
        waiting=waiting,
        unit=unit / 1e9,
        labels=list(labels),
        medians=(medians // unit).tolist(),
        most_lost=round(lost_scale_ns(lost.max(initial=0), study.profile.seconds) / unit),
        times=np.where(matrix.times < 0, -1, matrix.times // unit).T.tolist(),
        slowest=[] if by == "rank" else matrix.slowest.T.tolist(),
    )
