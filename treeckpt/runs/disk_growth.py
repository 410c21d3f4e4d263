"""How fast does a run fill its disk? From when its checkpoints were made and how large they are, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Growth", "days_until", "growth_of"]

DAY_NS = 86_400 * 10**9


class Growth(msgspec.Struct, frozen=True):
    """What the newest saves of a run add, if nothing is deleted."""

    saves: int
    """That were looked at."""
    nbytes_per_day: float
    seconds_between: float


def growth_of(saves: Sequence[tuple[int, int]], *, count: int = 50) -> Growth | None:
    """The growth that the newest saves show; None where there are fewer than two, or all have the same time.

    Args:
        saves: (Unix nanoseconds, bytes) of each checkpoint, in any order.
        count: how many of the newest are looked at.
    """
    newest = sorted(saves)[-count:]
    if len(newest) < 2 or newest[-1][0] <= newest[0][0]:
        return None
    span = newest[-1][0] - newest[0][0]
    written = sum(nbytes for _, nbytes in newest[1:])
    return Growth(len(newest), written * DAY_NS / span, span / 1e9 / (len(newest) - 1))


def days_until(free: int, growth: Growth | None) -> float | None:
    """Days until so many free bytes are used up; None where nothing grows."""
    return free / growth.nbytes_per_day if growth is not None and growth.nbytes_per_day > 0 else None
