"""Compares the outcomes of the jobs, and builds the table that the demo prints.

A leaf is equal if its digest after loading, on every rank, is the one that torch gave for it in memory when it was
saved. A loss is equal within `LOSS_TOLERANCE`: another layout adds floats in another order, and training amplifies
that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .._core.text import count_text
from .tasks import LAYOUTS, RANKS, Digests, Layout, Resume, Resumed, Saved, Trained

LOSS_TOLERANCE = 1e-4
"""Relative."""


@dataclass(frozen=True, slots=True)
class DemoComparison:
    """What one fresh start found."""

    task: Resume
    nbytes: int
    seconds: float
    leaves: int
    """How many leaves were compared: each once a checkpoint and rank."""
    different: tuple[str, ...]
    """Those that were not as saved."""
    gap: float
    """The largest relative distance of a loss from that of the run that never stopped."""

    @property
    def ok(self) -> bool:
        """Whether all leaves are equal, and the losses within the tolerance."""
        return not self.different and self.gap <= LOSS_TOLERANCE and self.leaves > 0

    def complaints(self) -> list[str]:
        """Describes what differs."""
        layout = LAYOUTS[self.task.layout]
        found: list[str] = []
        if self.different:
            more = f" and {len(self.different) - 5} more" if len(self.different) > 5 else ""
            found.append(f"{layout}: not as saved: {', '.join(self.different[:5])}{more}")
        if not self.gap <= LOSS_TOLERANCE:
            found.append(f"{layout}: losses expected within {LOSS_TOLERANCE:g}, found a gap of {self.gap:.3g}")
        return found


def compare_runs(trained: Trained, resumed: Resumed, task: Resume) -> DemoComparison:
    """Compares a fresh start with the run that never stopped."""
    oracle = {saved.step: saved.digests for saved in trained.saves}
    different: list[str] = []
    leaves = 0
    for step in (*task.earlier, task.step):
        ranks = resumed.digests.get(step, ())
        for rank, found in enumerate(ranks):
            leaves += len(found)
            different += [f"step {step} {path} on rank {rank}" for path in differing(oracle[step], found)]
        if len(ranks) != RANKS[task.layout]:
            different.append(f"step {step}: {count_text(len(ranks), 'rank')} answered")
    gap = largest_gap(trained.losses[task.step :], resumed.losses)
    return DemoComparison(task, resumed.nbytes, resumed.seconds, leaves, tuple(different), gap)


def differing(expected: Digests, found: Digests) -> list[str]:
    """Returns the paths whose digests differ, or that only one side has."""
    return sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))


def largest_gap(expected: Sequence[float], found: Sequence[float]) -> float:
    """Returns the largest relative difference of two series; infinite if they cannot be compared."""
    if not expected or len(expected) != len(found):
        return math.inf
    gaps = [abs(a - b) / abs(a) if a else math.inf for a, b in zip(expected, found, strict=True)]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def build_table(saves: Sequence[Saved], source: Layout, verdicts: Sequence[DemoComparison]) -> Table:
    """Builds the table that the demo prints last; it fits into 80 columns."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("what", no_wrap=True)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for name in ("MB", "seconds", "GB/s", "bit-equal", "loss gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for saved in saves:
        table.add_row(f"save {saved.step}", *_cost(source, saved.nbytes, saved.seconds), "", "")
    for found in verdicts:
        equal = f"{found.leaves - len(found.different)}/{found.leaves}"
        cost = _cost(found.task.layout, found.nbytes, found.seconds)
        style = "green" if found.ok else "bold red"
        table.add_row(f"load {found.task.step}", *cost, equal, f"{found.gap:.1e}", style=style)
    return table


def _cost(layout: Layout, nbytes: int, seconds: float) -> tuple[str, str, str, str, str]:
    rate = f"{nbytes / 1e9 / seconds:.3f}" if seconds > 0 else "-"
    return f"{RANKS[layout]}", LAYOUTS[layout], f"{nbytes / 1e6:.1f}", f"{seconds:.3f}", rate
