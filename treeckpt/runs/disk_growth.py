"""Estimates how fast a run fills its disk, from the times and sizes of its checkpoints alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Growth", "days_until", "growth_of"]

DAY_NS = 86_400 * 10**9


class Growth(msgspec.Struct, frozen=True):
    """The growth rate of a run by its newest saves, if nothing is deleted."""

    saves: int
    """How many saves the estimate is based on."""
    nbytes_per_day: float
    seconds_between: float


def growth_of(saves: Sequence[tuple[int, int]], *, count: int = 50) -> Growth | None:
    """Estimates the growth from the newest saves; None if there are fewer than two, or all have the same time.

    Args:
        saves: (Unix nanoseconds, bytes) of each checkpoint, in any order.
        count: how many of the newest to use.
    """
    newest = sorted(saves)[-count:]
    if len(newest) < 2 or newest[-1][0] <= newest[0][0]:
        return None
    span = newest[-1][0] - newest[0][0]
    written = sum(nbytes for _, nbytes in newest[1:])
    return Growth(len(newest), written * DAY_NS / span, span / 1e9 / (len(newest) - 1))


def days_until(free: int, growth: Growth | None) -> float | None:
    """Returns the days until the free bytes are used up; None if the run does not grow."""
    return free / growth.nbytes_per_day if growth is not None and growth.nbytes_per_day > 0 else None
