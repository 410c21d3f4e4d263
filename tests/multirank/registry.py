"""The cases of each phase, in the order in which they run. A case passes when it raises nothing on any rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

__all__ = ["PHASES", "Case", "Rank", "case", "of"]


@dataclasses.dataclass(frozen=True)
class Rank:
    """Where a case runs."""

    rank: int
    world: int
    directory: Path


Case = Callable[[Rank], None]
PHASES: dict[str, tuple[int, dict[str, Case]]] = {
    "four": (4, {}),
    "two": (2, {}),
    "three": (3, {}),
    "four again": (4, {}),
    "background": (4, {}),
}


def of(phase: str) -> dict[str, Case]:
    return PHASES[phase][1]


def case(phase: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        of(phase)[function.__name__.replace("_", " ")] = function
        return function

    return register
