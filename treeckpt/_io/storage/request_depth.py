"""How many requests to a store are in flight: as many as its rate rewards. Pure arithmetic on times that are given."""

from __future__ import annotations

from typing import Literal

from .os_files import usable_cpus

START = 64
"""Requests in flight at first: 8 MiB each, at 40 ms and 90 MB/s a connection, come to 4 GB/s."""
PER_CPU = 16
"""Requests in flight at first for each processor, up to `START`: one sends or receives less than 1 GB/s. More of them
fill the buffers of the sockets: two processors read 0.54 GB in 0.59 s with 32 and in 0.73 s with 64, and sent them in
0.65 s and in 0.75 s."""
MAX_REQUESTS = 192
"""Requests in flight, at most."""
WINDOW = 0.25
"""Seconds over which a rate is measured, at least."""
GAIN = 1.1
"""Part by which the rate must rise for more requests in flight to stay."""
ENOUGH_RATE_SHARE = 0.95
"""Part of the rate that fewer requests in flight must reach to be enough."""
FEWEST = 8
"""Requests in flight below which none is tried to be saved."""
CHANGED = 2.0
"""The depth is looked for again when the rate has risen or fallen by this factor since it was found."""


def first_depth(per_cpu: int = PER_CPU) -> int:
    """Returns the requests in flight at first, on this machine."""
    return min(per_cpu * usable_cpus(), START)


class RequestDepth:
    """The number of requests in flight: raised while the rate rises with it, halved when the store throttles.

    Where more gain nothing, fewer are tried: near stores need few, and a store whose refusals are hidden by retries
    gets slower with too many.
    """

    def __init__(self, depth: int = START, *, most: int = MAX_REQUESTS) -> None:
        self.depth, self._most = depth, most
        self._begin, self._nbytes, self._ended = 0.0, 0, 0
        self._known: tuple[int, float] | None = None
        """Depth and rate before it was changed last; the rate of the largest that was worth it while it is lowered."""
        self._trying: Literal["more", "fewer", "none"] = "more"
        self._halved_at = -1.0

    def restart(self, now: float) -> None:
        """Begins to measure at time `now` in seconds: after a pause without requests, and with another depth."""
        self._begin, self._nbytes, self._ended = now, 0, 0

    def add(self, nbytes: int, now: float) -> None:
        """Counts a request that succeeded at time `now`."""
        self._nbytes += nbytes
        self._ended += 1
        if self._ended < self.depth or now - self._begin < WINDOW:
            return
        rate = self._nbytes / (now - self._begin)
        self.restart(now)
        if self._halved_at >= 0:
            self.depth = min(self.depth + 1, self._most)
        else:
            self._adapt(rate)

    def _adapt(self, rate: float) -> None:
        """Changes the depth after a window with a rate."""
        before, best = self._known or (self.depth, 0.0)
        if self._trying == "none":
            if not best / CHANGED < rate < best * CHANGED:
                self._trying, self._known = "more", None
        elif self._trying == "more" and rate >= best * GAIN:
            self._known = self.depth, rate
            self.depth = min(self.depth * 3 // 2, self._most)
            if self.depth == self._known[0]:
                self._trying = "none"
        elif self._trying == "more" or rate >= best * ENOUGH_RATE_SHARE:
            enough = before if self._trying == "more" else self.depth
            self._known = enough, best
            self.depth = max(enough * 2 // 3, min(FEWEST, enough))
            self._trying = "fewer" if self.depth < enough else "none"
        else:
            self.depth, self._trying = before, "none"

    def throttle(self, started: float, now: float, *, least: int = 1) -> None:
        """Halves the depth for a refusal, down to `least`; once for all requests in flight at the last time."""
        if started > self._halved_at:
            self.depth, self._halved_at = max(self.depth // 2, min(least, self.depth)), now
            self.restart(now)
