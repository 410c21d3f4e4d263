"""Says in sentences since when saves of a run take longer or less, in which phase and on which ranks.

The saves of the present branch count, in the order of saving. Levels of their durations are told apart
(`treeckpt._inspect.change_points`); between two levels, the phase of the critical path whose median changed the most is
named, and the ranks whose work did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from .._core.format.timings import Host
from .._core.sharding.int_runs import encode_runs
from .._core.text import count_text, ranks_text, seconds_text, time_text
from .._inspect.change_points import Level, levels_of
from .._inspect.profile import COORDINATOR_PHASES, LATE_CALL
from ..errors import visible
from .catalog import CheckpointInfo
from .reduced_timings import ReducedTimings, SlowRank, host_names

RECENT = 20
"""The last saves, among which those are counted in which a rank stood out."""
MIN_SAVES = 3
"""Saves below which there is nothing to compare with."""
USUAL = 1.5
"""The multiple of the median, or its inverse, up to which a duration is as usual."""
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
    """Bytes that it has written."""
    reduced: ReducedTimings


def saves_in_order(listed: Iterable[tuple[str, CheckpointInfo]]) -> list[tuple[str, CheckpointInfo]]:
    """Returns the complete checkpoints that have a step with their ids, in the order of saving."""
    complete = [(i, info) for i, info in listed if info.files == "complete" and info.step is not None]
    return sorted(complete, key=lambda pair: (pair[1].sequence or 0, pair[1].step or 0, pair[1].created_ns or 0))


def timed_saves(saves: Iterable[tuple[str, CheckpointInfo, ReducedTimings | None]]) -> list[TimedSave]:
    """Returns those of the present branch that have timings, in the same order.

    Args:
        saves: ids, checkpoints and timings, in the order of saving.
    """
    return [
        TimedSave(id_, info.step or 0, info.created_ns, info.own_nbytes, reduced)
        for id_, info, reduced in saves
        if reduced is not None and not info.abandoned
    ]


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
        text += f" R{rank_text(rank, host)[1:]} stood out in {count} of the last {recent}."
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
    times = f"{times_text(longest / usual)} x as long."
    since = since_text(longer[0].step, longer[0].created_ns)
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
        f"Since {since_text(first.step, first.created_ns)} saves take {seconds_text(after.median)} in the median, "
        f"{times_text(factor)} x the {count_text(len(earlier), 'save')} before ({seconds_text(before.median)})."
    )
    text += _phase_text(earlier, later, hosts, slower=factor > 1)
    for what, value in (
        ("the ranks of a save", lambda save: save.reduced.world),
        ("its bytes", lambda save: save.nbytes or 0),
    ):
        old, new = (_median(group, value) for group in (earlier, later))
        if old and new and max(new / old, old / new) >= MIN_CHANGE:
            text += f" At the same time {what} became {times_text(new / old)} x as many."
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
    return f", on {place_of(ranks, range(world), host_names(hosts(), range(world)))[1]}"


def rank_text(rank: int, host: str) -> str:
    return f"rank {rank}" + (f" (host {host})" if host else "")


def times_text(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def since_text(step: int | None, created_ns: int | None) -> str:
    """Names a save by its step and time."""
    return f"step {step:,}" + (f" ({time_text(created_ns)})" if created_ns is not None else "")


def place_of(slow: Sequence[int], ranks: Sequence[int], hosts: Mapping[int, str]) -> tuple[str, str]:
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
