"""The queries of the time of one save: its pages, and the columns that waterfall and heat map are drawn from."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from treeckpt.core.analysis.critical_path import CriticalSegment
from treeckpt.core.analysis.perfetto import encode_trace
from treeckpt.core.analysis.profile import WAITING_PHASES, PhaseTime, RankTime, SaveProfile
from treeckpt.core.analysis.stragglers import PhaseMatrix, RankGrouping, Straggler, group_phase_matrix, rank_groupings
from treeckpt.core.analysis.timing_report import TimingReport
from treeckpt.core.format.records import Index
from treeckpt.core.text import visible
from treeckpt.errors import TreeckptError
from treeckpt.runs.catalog import CheckpointInfo

from .library import Library, Missing
from .pages import CheckpointRow
from .pages_time import (
    CriticalRow,
    HeatData,
    HeatRow,
    PhaseRow,
    RankRow,
    SpanRow,
    StragglerRow,
    TimingPage,
    WaterfallData,
)
from .queries import checkpoint_row

__all__ = ["heat_data", "timing_page", "trace_of", "waterfall_data"]

RANKS = 32
"""Ranks listed on one page."""
STRAGGLERS = 50
STEPS = 4_000_000
"""Into which the time of a save is cut, for columns of short integers."""


def timing_page(library: Library, checkpoint_id: str, start: int, by: str) -> TimingPage:
    """Where the time of a save went, with the spans of ranks from number `start` on. Failed saves have one, too.

    Args:
        by: what the rows of the heat map are: "rank", or one of the page's groups.
    """
    run, info = library.checkpoint(checkpoint_id)
    row = checkpoint_row(checkpoint_id, run, info)
    if info.status == "foreign":
        return _no_timing(row, "This is no checkpoint.")
    try:
        study = library.study(info)
    except TreeckptError as error:
        return _no_timing(row, visible(str(error)))
    return _timing_page(row, study, _groups(library, info, study), start, by)


def _no_timing(row: CheckpointRow, problem: str) -> TimingPage:
    return TimingPage(
        row, problem, None, 0.0, None, None, None, 1.0, 0, 0, None, [], [], [], [], 0, [], [], "rank", [], [], 0
    )


def _studied(library: Library, checkpoint_id: str) -> tuple[CheckpointInfo, TimingReport]:
    """A checkpoint with timings.

    Raises:
        Missing: there are none.
    """
    _, info = library.checkpoint(checkpoint_id)
    if info.status == "foreign":
        raise Missing("This is no checkpoint.")
    return info, library.study(info)


def _groups(library: Library, info: CheckpointInfo, study: TimingReport) -> tuple[RankGrouping, ...]:
    index: Index | None = None
    if info.leaves is not None:
        index = library.outline(info).index
        index = index if index.save_id == study.timings.save_id else None
    return rank_groupings(study.timings.world, study.timings.hosts, index)


def _rows(study: TimingReport, groups: Sequence[RankGrouping], by: str) -> tuple[str, PhaseMatrix, Sequence[str]]:
    """By what the heat map's rows are, the rows, and their labels; an unknown grouping falls back to ranks."""
    for group in groups:
        if group.name == by:
            return by, *group_phase_matrix(study.matrix, group)
    return "rank", study.matrix, [f"rank {rank}" for rank in study.matrix.ranks.tolist()]


def _timing_page(
    row: CheckpointRow, study: TimingReport, groups: Sequence[RankGrouping], start: int, by: str
) -> TimingPage:
    profile = study.profile
    picked = profile.ranks[start : start + RANKS]
    by, matrix, labels = _rows(study, groups, by)
    shown = slice(start, start + RANKS) if by == "rank" else slice(0, 100)
    origin = profile.start_ns
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
        start=start,
        next=start + RANKS if start + RANKS < len(profile.ranks) else None,
        phases=[_phase_row(phase) for phase in profile.phases],
        ranks=[_rank_row(rank, profile.median_ns, origin) for rank in picked],
        spans=_span_rows(study, start, start + len(picked)),
        stragglers=[_straggler_row(straggler, profile) for straggler in study.stragglers[:STRAGGLERS]],
        straggling=len(study.stragglers),
        critical=[_critical_row(stretch, origin, profile.seconds) for stretch in study.critical],
        groups=[group.name for group in groups],
        by=by,
        columns=list(matrix.phases),
        heat=_heat_rows(matrix, labels, shown),
        rows=len(labels),
    )


def _phase_row(phase: PhaseTime) -> PhaseRow:
    seconds = phase.longest_ns / 1e9
    rate = phase.nbytes / phase.ranks / seconds if phase.nbytes and seconds > 0 else None
    median, waiting = phase.median_ns / 1e9, phase.name in WAITING_PHASES
    return PhaseRow(phase.name, phase.ranks, median, seconds, phase.slowest, phase.nbytes, rate, waiting)


def _rank_row(rank: RankTime, median: int, origin: int) -> RankRow:
    slowdown = rank.busy_ns / median if median else 1.0
    blocked = None if rank.blocked_ns is None else (rank.blocked_ns - origin) / 1e9
    return RankRow(rank.rank, (rank.stop_ns - rank.start_ns) / 1e9, rank.busy_ns / 1e9, rank.nbytes, slowdown, blocked)


def _straggler_row(straggler: Straggler, profile: SaveProfile) -> StragglerRow:
    times, score = straggler.times, straggler.score
    return StragglerRow(
        straggler.rank,
        bisect_left(profile.ranks, straggler.rank, key=lambda rank: rank.rank),
        straggler.phase,
        straggler.ns / 1e9,
        straggler.median_ns / 1e9,
        times if math.isfinite(times) else None,
        score if math.isfinite(score) else None,
    )


def _critical_row(stretch: CriticalSegment, origin: int, total: float) -> CriticalRow:
    seconds = (stretch.stop_ns - stretch.start_ns) / 1e9
    start = (stretch.start_ns - origin) / 1e9
    return CriticalRow(stretch.rank, stretch.phase, start, seconds, seconds / total if total else 0.0)


def _heat_rows(matrix: PhaseMatrix, labels: Sequence[str], shown: slice) -> list[HeatRow]:
    return [
        HeatRow(label, [None if ns < 0 else ns / 1e9 for ns in times], slowest)
        for label, times, slowest in zip(
            labels[shown], matrix.times[shown].tolist(), matrix.slowest[shown].tolist(), strict=True
        )
    ]


def _span_rows(study: TimingReport, first: int, last: int) -> list[SpanRow]:
    """The spans of some of the profile's ranks, by number."""
    if first >= last:
        return []
    spans, origin = study.spans, study.profile.start_ns
    part = slice(int(study.edges[first]), int(study.edges[last]))
    columns = (spans.name, spans.rank, spans.start, spans.stop, spans.nbytes, spans.depth, study.lanes)
    rows: list[SpanRow] = []
    for name, rank, start, stop, nbytes, depth, lane in zip(*(c[part].tolist() for c in columns), strict=True):
        seconds = (stop - start) / 1e9
        rate = nbytes / seconds if nbytes and seconds > 0 else None
        rows.append(SpanRow(spans.names[name], rank, (start - origin) / 1e9, seconds, nbytes, rate, depth, lane))
    return rows


def waterfall_data(library: Library, checkpoint_id: str) -> WaterfallData:
    """Every span of a save.

    Raises:
        Missing: there is no such checkpoint.
        CheckpointError: it has no timings.
    """
    _, study = _studied(library, checkpoint_id)
    profile, spans, origin = study.profile, study.spans, study.profile.start_ns
    unit = max(1, (profile.stop_ns - origin) // STEPS)
    ranks = [rank.rank for rank in profile.ranks]
    place = {rank: number for number, rank in enumerate(ranks)}
    return WaterfallData(
        unit=unit / 1e9,
        total=(profile.stop_ns - origin) // unit,
        phases=list(spans.names),
        waiting=[name in WAITING_PHASES for name in spans.names],
        ranks=ranks,
        counts=np.diff(study.edges).tolist(),
        busy=[rank.busy_ns // unit for rank in profile.ranks],
        blocked=[None if r.blocked_ns is None else (r.blocked_ns - origin) // unit for r in profile.ranks],
        phase=spans.name.tolist(),
        start=((spans.start - origin) // unit).tolist(),
        length=((spans.stop - spans.start) // unit).tolist(),
        lane=study.lanes.tolist(),
        nbytes=spans.nbytes.tolist(),
        critical=[
            [place[s.rank], (s.start_ns - origin) // unit, (s.stop_ns - s.start_ns) // unit] for s in study.critical
        ],
        stragglers=sorted({straggler.rank for straggler in study.stragglers}),
    )


def heat_data(library: Library, checkpoint_id: str, by: str) -> HeatData:
    """The time of every rank, or group of ranks, in every phase.

    Raises:
        Missing: there is no such checkpoint.
        CheckpointError: it has no timings.
    """
    info, study = _studied(library, checkpoint_id)
    by, matrix, labels = _rows(study, _groups(library, info, study), by)
    unit = max(1, (study.profile.stop_ns - study.profile.start_ns) // STEPS)
    medians = {phase.name: phase.median_ns for phase in study.profile.phases}
    return HeatData(
        by=by,
        phases=list(matrix.phases),
        waiting=[name in WAITING_PHASES for name in matrix.phases],
        unit=unit / 1e9,
        labels=list(labels),
        medians=[medians[name] // unit for name in matrix.phases],
        times=np.where(matrix.times < 0, -1, matrix.times // unit).T.tolist(),
        slowest=[] if by == "rank" else matrix.slowest.T.tolist(),
    )


def trace_of(library: Library, checkpoint_id: str) -> tuple[str, bytes]:
    """A name for the file, and the save as a trace that Perfetto opens.

    Raises:
        Missing: there is no such checkpoint.
        CheckpointError: it has no timings.
    """
    _, study = _studied(library, checkpoint_id)
    return f"trace.{study.timings.save_id}.json", encode_trace(study.timings)
