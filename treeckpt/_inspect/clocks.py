"""The clocks of hosts: which of them differ from the others, by the end of the agreement on a save.

All ranks hear the result of the agreement at one time, but for the time that a message takes. So the earliest end of it
on a host, beside that on the median host, is how far the clock of the host is ahead. A host on which every rank stood
still just then counts as ahead, too; no record tells the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .._core.format.timings import MAX_TIME, Timings
from .._core.sharding.int_runs import Runs, decode_runs
from .._core.text import seconds_text, visible

AGREEMENT = "agree"
"""The phase that ends on all ranks at one time."""
TOLERANCE_NS = 100_000_000
"""Nanoseconds: hosts whose clocks differ by less are left as they are, for a message can take as long."""
MAX_NAMES = 3
"""Hosts that a text names."""


class HostClock(msgspec.Struct, frozen=True):
    """A host whose clock differs from that of the median host."""

    name: str
    ranks: Runs
    ahead_ns: int
    """Negative if it is behind."""


def differing_clocks(timings: Timings) -> tuple[HostClock, ...]:
    """Returns the hosts whose clocks differ, those that differ the most first; none of a save that failed."""
    hosts = timings.hosts
    if len(hosts) < 2 or timings.error is not None:
        return ()
    host_of = np.full(timings.world, -1, np.int64)
    for number, host in enumerate(hosts):
        host_of[decode_runs(host.ranks)] = number
    agreed = [(span.rank, span.stop_ns) for span in timings.spans if span.name == AGREEMENT]
    rank, stop = np.array(agreed, np.int64).reshape(-1, 2).T
    earliest = np.full(len(hosts) + 1, MAX_TIME)  # the last is of the ranks that are on no host
    np.minimum.at(earliest, host_of[rank], stop)
    ends = [(end, host) for end, host in zip(earliest.tolist(), hosts, strict=False) if end < MAX_TIME]
    if len(ends) < 2:
        return ()
    usual = sorted(end for end, _ in ends)[(len(ends) - 1) // 2]
    reach = max(max(abs(span.start_ns), abs(span.stop_ns)) for span in timings.spans)
    found = [HostClock(host.name, host.ranks, end - usual) for end, host in ends]
    differing = [clock for clock in found if TOLERANCE_NS <= abs(clock.ahead_ns) < MAX_TIME - reach]
    return tuple(sorted(differing, key=lambda clock: -abs(clock.ahead_ns)))


def ahead_by_rank(clocks: Sequence[HostClock]) -> dict[int, int]:
    """Returns by how many nanoseconds the clock of each rank on these hosts is ahead."""
    return {rank: clock.ahead_ns for clock in clocks for rank in decode_runs(clock.ranks).tolist()}


def clocks_text(clocks: Sequence[HostClock]) -> str:
    """Says in two sentences which clocks differ and that times are corrected; empty where none does."""
    if not clocks:
        return ""
    named = [
        f"that of {visible(clock.name)} is {seconds_text(abs(clock.ahead_ns) / 1e9)} "
        + ("ahead" if clock.ahead_ns > 0 else "behind")
        for clock in clocks[:MAX_NAMES]
    ]
    more = [f"{len(clocks) - MAX_NAMES} more differ"] if len(clocks) > MAX_NAMES else []
    return (
        f"The clocks of the hosts differ: {', '.join(named + more)}. "
        "All times are corrected by that, to the precision of a message between hosts."
    )
