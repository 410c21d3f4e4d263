"""What is computed of a list, kept as long as the list is the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class LastResult(Generic[S, T]):
    """The last result of a function of a list; it is valid until another list replaces this one."""

    def __init__(self) -> None:
        self._pair: tuple[S, T] | None = None

    def of(self, listed: S, compute: Callable[[S], T]) -> T:
        """Returns the result for a list; computes it for another list than that of the last call."""
        pair = self._pair
        if pair is None or pair[0] is not listed:
            pair = self._pair = (listed, compute(listed))
        return pair[1]
