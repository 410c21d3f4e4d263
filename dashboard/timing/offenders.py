"""Which hosts and ranks are slow again and again, and whether what slowed one save is a trend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import msgspec

from treeckpt._core.text import seconds_text, visible

from ..store.reduced_timings import ReducedTimings, SlowRank
from .diagnosis import MIN_SAVES, SAVES, USUAL

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


class OffenderRow(msgspec.Struct, frozen=True):
    """A rank that was a straggler."""

    rank: int
    saves: int
    """In how many saves."""
    recent: int
    """In how many of the last ones; see `HostRow.of`."""
    worst: int
    """In how many of them it lost the most time."""
    times: float | None
    """The median of its time as a multiple of the median rank's."""
    phase: str
    """The phase in which it lost the most, in most of these saves; empty for all of its work."""
    id: str
    """The last of these saves."""
    step: int


class HostRow(msgspec.Struct, frozen=True):
    """A host, and its ranks that were stragglers."""

    host: str
    """Empty for ranks whose host is not recorded."""
    saves: int
    """Number of saves in which any of its ranks was a straggler."""
    share: float
    """The same as a share of all saves."""
    recent: int
    of: int
    """How many saves are the last ones."""
    ranks: list[OffenderRow]
    """Those of the most saves first."""
    more: int
    """How many others there are."""


def offenders(saves: Sequence[TimedSave]) -> list[HostRow]:
    """Returns the hosts that had stragglers, those of the most saves first."""
    recent = max(0, len(saves) - SAVES)
    found: dict[str, dict[int, list[tuple[int, SlowRank]]]] = {}
    for number, (_, _, reduced) in enumerate(saves):
        for slow in reduced.slow:
            found.setdefault(slow.host, {}).setdefault(slow.rank, []).append((number, slow))
    rows: list[HostRow] = []
    for host, ranks in found.items():
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
