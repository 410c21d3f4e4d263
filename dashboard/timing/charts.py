"""The data of the charts of one save, in columns: the waterfall and the heat map."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from treeckpt._inspect.profile import WAITING_PHASES
from treeckpt._inspect.timing_report import RankGrouping, TimingReport

from .model import group_rows

TICKS = 4_000_000
"""Units into which the time of a save is divided, so that columns are short integers."""


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
