"""The cases of each phase, in the order in which they run. A case passes when it raises nothing on any rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

__all__ = ["PHASES", "WHOLE", "Case", "Phases", "Rank", "case", "of"]


@dataclasses.dataclass(frozen=True)
class Rank:
    """Where a case runs."""

    rank: int
    world: int
    directory: Path


Case = Callable[[Rank], None]
Phases = dict[str, tuple[int, dict[str, Case]]]
PHASES: Phases = {
    "eight": (8, {}),
    "four": (4, {}),
    "two": (2, {}),
    "three": (3, {}),
    "four again": (4, {}),
    "eight again": (8, {}),
    "background": (4, {}),
}
WHOLE: Phases = {f"whole {name}": (PHASES[name][0], {}) for name in ("eight", "four", "three", "eight again")}
"""The slow ones: every pair of layouts."""


def of(phase: str) -> dict[str, Case]:
    return (PHASES | WHOLE)[phase][1]


def case(phase: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        of(phase)[function.__name__.replace("_", " ")] = function
        return function

    return register
