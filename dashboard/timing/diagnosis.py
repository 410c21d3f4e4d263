"""Says in sentences how long a save took beside those before it, since when saves take longer, and what is slow.

The parts of a save are those of its critical path, added up by rank and phase: what had to be shorter for the save to
be shorter. A rank is named for a phase where it was slower there than the others; else the host whose ranks were, or
all ranks alike. Over many saves, levels of the durations are told apart (`treeckpt._inspect.change_points`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from treeckpt._core.format.timings import Host
from treeckpt._core.text import count_text, seconds_text
from treeckpt._inspect.change_points import levels_of
from treeckpt._inspect.profile import COORDINATOR_PHASES, LATE_CALL
from treeckpt._inspect.timing_report import MIN_LOSS_NS, MIN_SLOWDOWN, CriticalSegment, TimingReport
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.reduced_timings import ReducedTimings, host_names
from treeckpt._runs.save_trends import MIN_SAVES, OFTEN, RECENT, USUAL, place_of, rank_text, since_text, times_text
from treeckpt.errors import visible

MIN_SHOWN_SHARE = 0.01
"""The share of a save below which its parts are shown as one."""


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
    times: dict[tuple[int, str], list[int]] = {}
    for segment in path:
        times.setdefault((segment.rank, segment.phase), []).append(segment.stop_ns - segment.start_ns)
    rows = [
        PartRow(rank, names.get(rank), phase, sum(ns) / 1e9, sum(ns) / 1e9 / total if total else 0.0, len(ns))
        for (rank, phase), ns in times.items()
    ]
    rows.sort(key=lambda row: -row.seconds)
    shown = [row for row in rows if row.share >= MIN_SHOWN_SHARE]
    rest = rows[len(shown) :]
    if not rest:
        return shown, None
    return shown, RestRow(len(rest), sum(row.seconds for row in rest), sum(row.share for row in rest))


class Blame(msgspec.Struct, frozen=True):
    """What took the most of a save: a phase, on a rank or host that was slower in it than others, or on all ranks."""

    phase: str
    share: float
    """The share of the save that the phase has on the critical path."""
    ranks: tuple[int, ...] = ()
    """The ranks that were slower in it than the others; none where all took about as long."""
    host: str = ""
    """The host of these ranks, where it is that of all of them."""
    text: str = ""
    """Where it was, or who called late."""


def diagnosis(info: CheckpointInfo, saves: Sequence[CheckpointInfo], seconds: float, blame: Blame | None) -> str:
    """Returns the sentence; empty where there is nothing to say.

    Args:
        saves: the checkpoints of the run.
        seconds: the duration of this save.
        blame: what took the most of it.
    """
    part = "" if blame is None else f"{blame.share:.0%} of it is {blame.text}".replace("%", " %", 1)
    text = "; ".join(filter(None, (_beside(info, saves, seconds), part)))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def saves_before(info: CheckpointInfo, saves: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Returns the checkpoints with a duration that were saved before one on its branch, in the order of saving.

    Saves of other branches are left out: those that were abandoned, or of an abandoned one those after it.
    """
    at = info.created_ns or 0
    earlier = [
        other
        for other in saves
        if other.seconds and other.created_ns is not None and other.created_ns < at
        and (info.abandoned or not other.abandoned)
    ]  # fmt: skip
    return sorted(earlier, key=lambda other: other.created_ns or 0)


def _beside(info: CheckpointInfo, saves: Sequence[CheckpointInfo], seconds: float) -> str:
    if info.created_ns is None:
        return ""
    before = saves_before(info, saves)
    if len(before) < MIN_SAVES:
        return f"{seconds_text(seconds)}, with too few saves before it to compare with"
    levels = levels_of([*(other.seconds or 0.0 for other in before), seconds])
    level, first = levels[-1], ""
    last = before[level.start :]  # a level has several saves: one alone is an outlier of the level before
    usual = median(other.seconds or 0.0 for other in last)
    if len(levels) > 1:
        earlier = levels[-2].median
        more = "longer" if level.median > earlier else "less"
        first = (
            f"; since {since_text(last[0].step, last[0].created_ns)} saves take {more}, "
            f"{times_text(level.median / earlier)} x the {seconds_text(earlier)} before"
        )
    times = seconds / usual if usual else 1.0
    what = f"the median of the {count_text(len(last), 'save')} before it, {seconds_text(usual)}"
    if 1 / USUAL <= times <= USUAL:
        return f"as long as {'the last ones' if first else 'usual'}: {times_text(times)} x {what}{first}"
    return f"{times_text(times)} x {what}{first}"


def blame_of(parts: Sequence[PartRow], study: TimingReport) -> Blame | None:
    """Returns what took the most of a save; None for one without timings.

    Args:
        parts: of its critical path, the longest first.
    """
    phases: dict[str, float] = {}
    for part in parts:
        phases[part.phase] = phases.get(part.phase, 0.0) + part.share
    if not phases:
        return None
    phase = max(phases, key=lambda name: phases[name])
    share, name = phases[phase], visible(phase)
    if phase == LATE_CALL and study.late_call:
        late = tuple(straggler.rank for straggler in study.stragglers if straggler.phase == LATE_CALL)
        return Blame(phase, share, late, text=f"a late call: {study.late_call}")
    matrix = study.matrix
    column = matrix.times[:, matrix.phases.index(phase)] if phase in matrix.phases else np.zeros(0, np.int64)
    rows = np.flatnonzero(column >= 0)
    ranks, times = matrix.ranks[rows], column[rows]
    if len(ranks) <= 1 or phase in COORDINATOR_PHASES:
        where = f"rank {parts[0].rank if not len(ranks) else ranks[0]}"
        return Blame(phase, share, text=f"{name} on {where}, which does it alone" if len(column) > 1 else f"{name}")
    hosts = host_names(study.timings.hosts, ranks.tolist())
    slow = _slower(ranks, times, hosts)
    if not slow:
        low, high = (seconds_text(int(ns) / 1e9) for ns in (times.min(), times.max()))
        took = low if low == high else f"{low} to {high}"
        return Blame(phase, share, text=f"{name} on all {len(ranks)} ranks alike, {took}")
    host, where = place_of(slow, ranks.tolist(), hosts)
    others = seconds_text(int(np.median(times[~np.isin(ranks, slow)])) / 1e9)
    return Blame(phase, share, slow, host, f"{name} on {where}, where the others took {others}")


def _slower(ranks: np.ndarray, times: np.ndarray, hosts: dict[int, str]) -> tuple[int, ...]:
    """Returns the ranks that took longer than the others: by a fifth and a millisecond more than the fastest half.

    Of hosts the ranks are taken together: where every rank of one is slower than every rank of the others, these are.
    """

    def far(slow: np.ndarray) -> bool:
        usual = float(np.median(times[~slow]))
        return bool(times[slow].min() > max(MIN_SLOWDOWN * usual, usual + MIN_LOSS_NS))

    order = np.argsort(times, kind="stable")
    # the largest step between neighbours in the slower half divides slow ranks from the others
    half = (len(order) + 1) // 2
    steps = np.diff(times[order])[half - 1 :]
    slow = np.zeros(len(ranks), bool)
    slow[order[half + int(steps.argmax()) :]] = True
    if far(slow) and times[slow].min() > MIN_SLOWDOWN * times[~slow].max():
        return tuple(sorted(ranks[slow].tolist()))
    names = np.array([hosts.get(rank, "") for rank in ranks.tolist()])
    for name in sorted(set(names.tolist()) - {""}):
        of_host = names == name
        if not of_host.all() and far(of_host) and times[of_host].min() > times[~of_host].max():
            return tuple(sorted(ranks[of_host].tolist()))
    return ()


def repeated(save: ReducedTimings, before: Sequence[ReducedTimings], blame: Blame | None) -> str:
    """Says whether what took the most of a save was there in the saves before it; empty where there are too few.

    It is the rank that was slower than the others in the phase. Where all took as long, it is the phase itself, if the
    save took longer than those of its level; of that the diagnosis tells.

    Args:
        before: the saves before it in the order of saving.
    """
    before = before[-RECENT:]
    if len(before) < MIN_SAVES or blame is None:
        return ""
    slow = next((slow for slow in save.slow if slow.rank in blame.ranks), None)
    phase = blame.phase
    if slow is not None:
        count = sum(any(other.rank == slow.rank for other in one.slow) for one in before)
        what = f"{rank_text(slow.rank, slow.host)} stood out"
    elif (
        phase in save.phases
        and save.seconds > USUAL * levels_of([*(one.seconds for one in before), save.seconds])[-1].median
    ):
        count = sum(one.phases.get(phase, 0.0) * USUAL >= save.phases[phase] for one in before)
        what = f"{visible(phase)} took about as long"
    else:
        return ""
    kind = "A trend" if count >= OFTEN * len(before) else "It happens at times" if count > 1 else "Not a trend"
    return f"{kind}: {what} in {count} of the {len(before)} saves before."
