"""Says in sentences how long a save took beside those before it, since when saves take longer, and what is slow.

The parts of a save are those of its critical path, added up by rank and phase: what had to be shorter for the save to
be shorter. A rank is named for a phase where it was slower there than the others; else the host whose ranks were, or
all ranks alike. Over many saves, levels of the durations are told apart (`treeckpt._inspect.change_points`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from treeckpt._core.format.timings import Host
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.text import count_text, ranks_text, seconds_text, time_text
from treeckpt._inspect.change_points import Level, levels_of
from treeckpt._inspect.profile import COORDINATOR_PHASES, LATE_CALL
from treeckpt._inspect.timing_report import MIN_LOSS_NS, MIN_SLOWDOWN, CriticalSegment, TimingReport
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt.errors import visible

from ..store.reduced_timings import ReducedTimings, SlowRank, host_names

RECENT = 20
"""The last saves, among which those are counted in which a rank stood out."""
MIN_SAVES = 3
"""Saves below which there is nothing to compare with."""
USUAL = 1.5
"""The multiple of the median, or its inverse, up to which a duration is as usual."""
MIN_SHOWN_SHARE = 0.01
"""The share of a save below which its parts are shown as one."""
MIN_CHANGE = 1.25
"""The factor from which on the bytes of saves count as changed, and the work of a rank as grown."""
MOST = 0.8
"""The share of ranks from which on a change is on all of them."""
HOSTS = 20
"""Hosts that are listed."""
RANKS = 8
"""Ranks of a host that are listed."""
HostsOfLast = Callable[[], Sequence[Host]]
"""Reads the hosts of the last save."""
OFTEN = 0.5
"""The share of saves from which on what is seen in them is a trend."""


class TimedSave(msgspec.Struct, frozen=True):
    """A save of the present branch of a run, with its timings."""

    id: str
    step: int
    created_ns: int | None
    nbytes: int | None
    reduced: ReducedTimings


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
            f"; since {_since(last[0].step, last[0].created_ns)} saves take {more}, "
            f"{_times(level.median / earlier)} x the {seconds_text(earlier)} before"
        )
    times = seconds / usual if usual else 1.0
    what = f"the median of the {count_text(len(last), 'save')} before it, {seconds_text(usual)}"
    if 1 / USUAL <= times <= USUAL:
        return f"as long as {'the last ones' if first else 'usual'}: {_times(times)} x {what}{first}"
    return f"{_times(times)} x {what}{first}"


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def _since(step: int | None, created_ns: int | None) -> str:
    """Names a save by its step and time."""
    return f"step {step:,}" + (f" ({time_text(created_ns)})" if created_ns is not None else "")


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
    host, where = _place_of(slow, ranks.tolist(), hosts)
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


def _place_of(slow: Sequence[int], ranks: Sequence[int], hosts: Mapping[int, str]) -> tuple[str, str]:
    """Returns the host that all these slow ranks are on, empty where there is none, and them in words.

    Args:
        ranks: all that have the phase.
        hosts: their names, where they are known.
    """
    on = {hosts.get(rank, "") for rank in slow}
    host = on.pop() if len(on) == 1 else ""
    if host and len(slow) > 1 and sum(hosts.get(rank) == host for rank in ranks) == len(slow):
        return host, f"all {len(slow)} ranks of host {host}"
    return host, ranks_text(encode_runs(slow)) + f" (host {host})" * bool(host)


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
    recent = max(0, len(saves) - RECENT)
    seen_by_host: dict[str, dict[int, list[tuple[int, SlowRank]]]] = {}
    for number, save in enumerate(saves):
        for slow in save.reduced.slow:
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
    last = saves[seen[-1][0]]
    return OffenderRow(
        rank=rank,
        saves=len(seen),
        recent=sum(number >= recent for number, _ in seen),
        worst=sum(saves[number].reduced.slow[0].rank == rank for number, _ in seen),
        times=median(times) if times else None,
        phase=visible(Counter(slow.phase for _, slow in seen).most_common(1)[0][0]),
        id=last.id,
        step=last.step,
    )


def trend_text(saves: Sequence[TimedSave], rows: Sequence[HostRow], hosts: HostsOfLast) -> str:
    """Says since when saves take longer or less, in which phase and on which ranks, and which rank stands out often.

    Args:
        rows: the stragglers of the saves.
        hosts: reads those of the last save.
    """
    if len(saves) <= MIN_SAVES:
        return ""
    levels = levels_of([save.reduced.seconds for save in saves])
    text = _change_text(saves, levels[-2], levels[-1], hosts) if len(levels) > 1 else ""
    text += _outliers_text(saves[levels[-1].start :], levels[-1].median, hosts, first=not text)
    recent = min(len(saves), RECENT)
    ranks = [(rank.recent, rank.rank, row.host) for row in rows for rank in row.ranks]
    count, rank, host = max(ranks, default=(0, 0, ""), key=lambda found: (found[0], -found[1]))
    if count > 1:
        text += f" R{_rank_text(rank, host)[1:]} stood out in {count} of the last {recent}."
    return text


def _outliers_text(saves: Sequence[TimedSave], usual: float, hosts: HostsOfLast, *, first: bool) -> str:
    """Says how many saves of a level took longer than its median, and in which phase and on which ranks.

    Args:
        first: whether nothing is said of the level yet.
    """
    longer = [save for save in saves if save.reduced.seconds > USUAL * usual]
    others = [save for save in saves if save.reduced.seconds <= USUAL * usual]
    took = f"took about as long, {seconds_text(usual)} in the median."
    if not longer:
        return f"All {len(saves):,} saves {took}" if first else ""
    text = f"{len(others):,} of {len(saves):,} saves {took}" if first else ""
    longest = median(save.reduced.seconds for save in longer)
    times = f"{_times(longest / usual)} x as long."
    since = _since(longer[0].step, longer[0].created_ns)
    if len(longer) == 1:
        text += f" S{since[1:]} alone took {seconds_text(longest)}, {times}"
    else:
        text += f" {len(longer):,} {'others' if first else 'of them'} took longer, the first of them {since}: "
        text += f"{seconds_text(longest)} in the median, {times}"
    return text + _phase_text(others, longer, hosts, slower=True)


def _phase_text(earlier: Sequence[TimedSave], later: Sequence[TimedSave], hosts: HostsOfLast, *, slower: bool) -> str:
    """Says which phase changed the most between two groups of saves, and on which ranks."""
    name, changed = _changed_phase(earlier, later, slower=slower)
    if not name:
        return ""
    where = _changed_ranks(earlier, later, name, hosts, slower=slower)
    return f" Of the phases, {visible(name)} changed the most, {changed}{where}."


def _change_text(saves: Sequence[TimedSave], before: Level, after: Level, hosts: HostsOfLast) -> str:
    """Says what changed between two levels of the durations."""
    earlier, later = ([saves[n] for n in range(level.start, level.stop)] for level in (before, after))
    first, factor = later[0], after.median / before.median
    text = (
        f"Since {_since(first.step, first.created_ns)} saves take {seconds_text(after.median)} in the median, "
        f"{_times(factor)} x the {count_text(len(earlier), 'save')} before ({seconds_text(before.median)})."
    )
    text += _phase_text(earlier, later, hosts, slower=factor > 1)
    for what, value in (
        ("the ranks of a save", lambda save: save.reduced.world),
        ("its bytes", lambda save: save.nbytes or 0),
    ):
        old, new = (_median(group, value) for group in (earlier, later))
        if old and new and max(new / old, old / new) >= MIN_CHANGE:
            text += f" At the same time {what} became {_times(new / old)} x as many."
    return text


def _median(saves: Sequence[TimedSave], value: Callable[[TimedSave], float]) -> float:
    return median(map(value, saves))


def _changed_phase(earlier: Sequence[TimedSave], later: Sequence[TimedSave], *, slower: bool) -> tuple[str, str]:
    """Returns the phase whose median changed the most, and from what to what; two empty texts where none did."""
    names = sorted({name for save in (*earlier, *later) for name in save.reduced.names})
    both = [[save.reduced.phases for save in saves] for saves in (earlier, later)]
    usual = {name: [median(phases.get(name, 0.0) for phases in each) for each in both] for name in names}
    change = {name: (new - old) * (1 if slower else -1) for name, (old, new) in usual.items()}
    name = max(change, key=lambda name: change[name], default="")
    if not name or change[name] <= 0:
        return "", ""
    old, new = map(seconds_text, usual[name])
    return name, f"from {old} to {new}"


def _changed_ranks(
    earlier: Sequence[TimedSave], later: Sequence[TimedSave], phase: str, hosts: HostsOfLast, *, slower: bool
) -> str:
    """Says on which ranks the work changed, or which call late since then; empty where it is not known."""
    if phase == LATE_CALL:
        late = Counter(slow.rank for save in later for slow in save.reduced.slow if slow.phase == LATE_CALL)
        often = sorted(rank for rank, count in late.items() if count >= OFTEN * len(later))
        return f", by {ranks_text(encode_runs(often))}" if often else ""
    if phase in COORDINATOR_PHASES:
        return ", which one rank does alone"
    block = max(save.reduced.block for save in (*earlier, *later))
    if len({len(save.reduced.lines(block)) for save in (*earlier, *later)}) > 1:
        return ""
    old, new = (
        np.nanmedian(np.stack([save.reduced.lines(block) for save in saves]).astype(np.float64), axis=0)
        for saves in (earlier, later)
    )
    changed = (new > MIN_CHANGE * old) if slower else (old > MIN_CHANGE * new)
    world = later[-1].reduced.world
    if not changed.any() or changed.mean() >= MOST:
        return f", on all {world} ranks" if changed.any() and world > 1 else ""
    ranks = np.flatnonzero(np.repeat(changed, block)[:world]).tolist()
    if block > 1:  # of the ranks of a line the slowest is known
        return f", among {ranks_text(encode_runs(ranks))}"
    return f", on {_place_of(ranks, range(world), host_names(hosts(), range(world)))[1]}"


def _rank_text(rank: int, host: str) -> str:
    return f"rank {rank}" + (f" (host {host})" if host else "")


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
        what = f"{_rank_text(slow.rank, slow.host)} stood out"
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
