"""Says in sentences how long a save took beside those before it, what took the longest, and whether that is a trend.

The parts of a save are those of its critical path, added up by rank and phase: what had to be shorter for the save to
be shorter. Over many saves, hosts and ranks are listed that are slow again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import nlargest
from statistics import median

import msgspec

from treeckpt._core.format.timings import Host
from treeckpt._core.text import seconds_text
from treeckpt._inspect.profile import LATE_CALL
from treeckpt._inspect.timing_report import CriticalSegment
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt.errors import visible

from ..store.reduced_timings import ReducedTimings, SlowRank, host_names

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
TimedSave = tuple[str, int, ReducedTimings]
"""The id, step and timings of a checkpoint."""
BEFORE = 100
"""Saves with which the last SAVES are compared."""
HOSTS = 20
"""Hosts that are listed."""
RANKS = 8
"""Ranks of a host that are listed."""
OFTEN = 0.5
"""The share of saves from which on what is seen in them is a trend."""


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
    earlier = [other for other in saves if other.seconds and other.created_ns is not None and other.created_ns < at]
    return nlargest(SAVES, earlier, key=lambda other: other.created_ns or 0)[::-1]


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


class OffenderRow(msgspec.Struct, frozen=True):
    """A rank that was a straggler."""

    rank: int
    saves: int
    """The number of saves in which it was one."""
    recent: int
    """The number of such saves among the last ones, of which `HostRow.of` says how many they are."""
    worst: int
    """The number of saves in which it lost the most time."""
    times: float | None
    """The median of its time as a multiple of the median rank's."""
    phase: str
    """The phase in which it lost the most, in most saves in which it was a straggler; empty for all of its work."""
    id: str
    """The id of the last save in which it was a straggler."""
    step: int


class HostRow(msgspec.Struct, frozen=True):
    """A host, and its ranks that were stragglers."""

    host: str
    """Empty for ranks whose host is not recorded."""
    saves: int
    """Number of saves in which any of its ranks was a straggler."""
    share: float
    """The share of all saves in which any of its ranks was a straggler."""
    recent: int
    of: int
    """How many saves are the last ones."""
    ranks: list[OffenderRow]
    """The ranks that stood out, those of the most saves first."""
    more: int
    """How many other ranks of the host stood out."""


def offenders(saves: Sequence[TimedSave]) -> list[HostRow]:
    """Returns the hosts that had stragglers, those of the most saves first."""
    recent = max(0, len(saves) - SAVES)
    seen_by_host: dict[str, dict[int, list[tuple[int, SlowRank]]]] = {}
    for number, (_, _, reduced) in enumerate(saves):
        for slow in reduced.slow:
            seen_by_host.setdefault(slow.host, {}).setdefault(slow.rank, []).append((number, slow))
    rows: list[HostRow] = []
    for host, ranks in seen_by_host.items():
        numbers = {number for seen in ranks.values() for number, _ in seen}
        worst = sorted(ranks, key=lambda rank: (-len(ranks[rank]), rank))
        listed = [_offender(saves, rank, ranks[rank], recent) for rank in worst[:RANKS]]
        last = sum(number >= recent for number in numbers)
        share = len(numbers) / len(saves)
        rows.append(
            HostRow(
                host,
                len(numbers),
                share=share,
                recent=last,
                of=len(saves) - recent,
                ranks=listed,
                more=len(worst) - len(listed),
            )
        )
    return sorted(rows, key=lambda row: (-row.saves, row.host))[:HOSTS]


def _offender(saves: Sequence[TimedSave], rank: int, seen: list[tuple[int, SlowRank]], recent: int) -> OffenderRow:
    times = [slow.times for _, slow in seen if slow.times is not None]
    last, step, _ = saves[seen[-1][0]]
    return OffenderRow(
        rank=rank,
        saves=len(seen),
        recent=sum(number >= recent for number, _ in seen),
        worst=sum(saves[number][2].slow[0].rank == rank for number, _ in seen),
        times=median(times) if times else None,
        phase=visible(Counter(slow.phase for _, slow in seen).most_common(1)[0][0]),
        id=last,
        step=step,
    )


def trend_text(reduced: Sequence[ReducedTimings], hosts: Sequence[HostRow]) -> str:
    """Says how long the last saves took beside those before them, which phase changed the most, and who stood out."""
    last, before = reduced[-SAVES:], reduced[-SAVES - BEFORE : -SAVES]
    if len(before) < MIN_SAVES:
        return ""
    now, then = (median(one.seconds for one in saves) for saves in (last, before))
    text = f"The last {len(last)} saves took {seconds_text(now)} in the median"
    if not then or 1 / USUAL <= now / then <= USUAL:
        text += f", as long as usual: the {len(before)} before took {seconds_text(then)}."
    else:
        text += f", {now / then:.2g} x the {len(before)} before ({seconds_text(then)})."
        text += _changed_phase(last, before, slower=now > then)
    ranks = [(rank.recent, rank.rank, row.host) for row in hosts for rank in row.ranks]
    count, rank, host = max(ranks, default=(0, 0, ""), key=lambda found: (found[0], -found[1]))
    if count > 1:
        text += f" R{_rank_text(rank, host)[1:]} stood out in {count} of them."
    return text


def _changed_phase(last: Sequence[ReducedTimings], before: Sequence[ReducedTimings], *, slower: bool) -> str:
    def usual(saves: Sequence[ReducedTimings], name: str) -> float:
        return median(one.phases.get(name, 0.0) for one in saves)

    names = {name for one in (*last, *before) for name in one.phases}
    changes = {name: usual(last, name) - usual(before, name) for name in sorted(names)}
    name = max(changes, key=lambda name: changes[name] if slower else -changes[name], default=None)
    if name is None or changes[name] == 0:
        return ""
    texts = seconds_text(usual(before, name)), seconds_text(usual(last, name))
    return f" Of the phases, {visible(name)} changed the most, from {texts[0]} to {texts[1]}."


def _rank_text(rank: int, host: str) -> str:
    return f"rank {rank}" + (f" (host {host})" if host else "")


def repeated(save: ReducedTimings, before: Sequence[ReducedTimings]) -> str:
    """Says whether what slowed a save was there in the saves before it; empty where there are too few of them.

    It is the straggler that lost the most time. Without one it is the phase that takes most of the critical path, if
    the save took longer than usual.
    """
    before = before[-SAVES:]
    if len(before) < MIN_SAVES:
        return ""
    phase = save.longest_phase
    if save.slow:
        slow = save.slow[0]
        count = sum(any(other.rank == slow.rank for other in one.slow) for one in before)
        what = f"{_rank_text(slow.rank, slow.host)} stood out"
    elif phase is not None and save.seconds > USUAL * median(one.seconds for one in before):
        count = sum(one.phases.get(phase, 0.0) * USUAL >= save.phases[phase] for one in before)
        what = f"{visible(phase)} took about as long"
    else:
        return ""
    kind = "A trend" if count >= OFTEN * len(before) else "It happens at times" if count > 1 else "Not a trend"
    return f"{kind}: {what} in {count} of the {len(before)} saves before."
