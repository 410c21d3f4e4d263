"""Says in one sentence how long a save took beside those before it, and which part of it took the longest.

The parts are those of the critical path, added up by rank and phase: what had to be shorter for the save to be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from statistics import median

import msgspec

from treeckpt._core.format.timings import Host
from treeckpt._core.text import seconds_text, visible
from treeckpt._inspect.profile import LATE_CALL
from treeckpt._inspect.timing_report import CriticalSegment
from treeckpt._runs.catalog import CheckpointInfo

from ..store.reduced_timings import host_names

SAVES = 20
"""Saves before this one that it is compared with."""
MIN_SAVES = 3
"""Saves below which there is nothing to compare with."""
USUAL = 1.5
"""The multiple of the median, or its inverse, up to which a duration is as usual."""
MIN_SHOWN_SHARE = 0.01
"""The share of a save below which its parts are shown as one."""
NAMED_RANK_SHARE = 0.7
"""The share of a phase's time from which a rank alone is named for it."""


class PartRow(msgspec.Struct, frozen=True):
    """The time of one phase on one rank within the critical path."""

    rank: int
    host: str | None
    phase: str
    seconds: float
    share: float
    """Share of the time of the whole save."""
    segments: int


class RestRow(msgspec.Struct, frozen=True):
    """The parts that each take less than MIN_SHOWN_SHARE of the save."""

    parts: int
    seconds: float
    share: float


def critical_parts(
    path: Sequence[CriticalSegment], hosts: Sequence[Host], total: float
) -> tuple[list[PartRow], RestRow | None]:
    """Returns the parts of a critical path, the longest first, and the sum of the small ones.

    Args:
        total: seconds of the whole save.
    """
    names = host_names(hosts, (segment.rank for segment in path))
    found: dict[tuple[int, str], list[int]] = {}
    for segment in path:
        found.setdefault((segment.rank, segment.phase), []).append(segment.stop_ns - segment.start_ns)
    rows = [
        PartRow(rank, names.get(rank), phase, sum(ns) / 1e9, sum(ns) / 1e9 / total if total else 0.0, len(ns))
        for (rank, phase), ns in found.items()
    ]
    rows.sort(key=lambda row: -row.seconds)
    shown = [row for row in rows if row.share >= MIN_SHOWN_SHARE]
    rest = rows[len(shown) :]
    if not rest:
        return shown, None
    return shown, RestRow(len(rest), sum(row.seconds for row in rest), sum(row.share for row in rest))


def diagnosis(
    info: CheckpointInfo, saves: Sequence[CheckpointInfo], seconds: float, parts: Sequence[PartRow], late_call: str
) -> str:
    """Returns the sentence; empty where there is nothing to say.

    Args:
        saves: the checkpoints of the run.
        seconds: the duration of this save.
        parts: of its critical path, the longest first.
        late_call: who called save late; empty if nobody did.
    """
    text = "; ".join(filter(None, (_beside(info, saves, seconds), _longest(parts, late_call))))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def saves_before(info: CheckpointInfo, saves: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Returns the last SAVES checkpoints of a run, oldest first, that were saved before one and have a duration."""
    at = info.created_ns or 0
    found = [other for other in saves if other.seconds and other.created_ns is not None and other.created_ns < at]
    return nlargest(SAVES, found, key=lambda other: other.created_ns or 0)[::-1]


def _beside(info: CheckpointInfo, saves: Sequence[CheckpointInfo], seconds: float) -> str:
    if info.created_ns is None:
        return ""
    before = [other.seconds for other in saves_before(info, saves) if other.seconds]
    if len(before) < MIN_SAVES or not (usual := median(before)):
        return f"{seconds_text(seconds)}, with too few saves before it to compare with"
    times = seconds / usual
    what = f"the median of the last {len(before)} saves, {seconds_text(usual)}"
    if 1 / USUAL <= times <= USUAL:
        return f"as long as usual: {times:.2g} x {what}"
    return f"{times:,.0f} x {what}" if times >= 10 else f"{times:.2g} x {what}"


def _longest(parts: Sequence[PartRow], late_call: str) -> str:
    """Says which phase takes the most of the critical path, and on which rank; or who called late, if that does."""
    phases: dict[str, float] = {}
    for part in parts:
        phases[part.phase] = phases.get(part.phase, 0.0) + part.share
    if not phases:
        return ""
    phase = max(phases, key=lambda name: phases[name])
    if phase == LATE_CALL and late_call:
        return f"{phases[phase]:.0%} of it is a late call: {late_call}".replace("%", " %", 1)
    ranks = [part for part in parts if part.phase == phase]
    first = ranks[0]
    where = f"rank {first.rank}" + (f" (host {first.host})" if first.host else "")
    if first.share < NAMED_RANK_SHARE * phases[phase]:
        where = f"{len(ranks)} ranks, the longest on {where}"
    return f"{phases[phase]:.0%} of it is {visible(phase)} on {where}".replace("%", " %")
