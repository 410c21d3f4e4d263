"""The tasks of the demo's processes, their outcomes, and how these compare.

A task goes to the workers as JSON on their command line; rank 0 leaves the outcome as JSON in the run's `.demo`
folder. A leaf is equal if its digest after loading, on every rank, is the one that torch gave for it in memory when it
was saved. A loss is equal within `LOSS_TOLERANCE`: another layout adds floats in another order, and training amplifies
that. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from .._core.text import count_text

Layout = Literal["hsdp", "tp", "plain"]

RANKS: dict[Layout, int] = {"hsdp": 4, "tp": 2, "plain": 1}

LAYOUTS: dict[Layout, str] = {"hsdp": "FSDP2, 2x2 mesh", "tp": "tensor parallel", "plain": "plain"}
"""Descriptions, for the table."""


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Train from the start, save on the way, go on without a break."""

    run: str
    layout: Layout
    saves: tuple[int, ...]
    """The steps to save after."""
    stop: int
    """The last step."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the outcome's file."""
        return "train"

    @property
    def steps(self) -> int:
        """Number of steps of training."""
        return self.stop


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Start again from a checkpoint in a fresh process."""

    run: str
    layout: Layout
    step: int
    """The checkpoint to go on from."""
    stop: int
    earlier: tuple[int, ...] = ()
    """Checkpoints to read back as well, only to compare them."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the outcome's file."""
        return f"resume-{self.layout}"

    @property
    def steps(self) -> int:
        """Number of steps of training."""
        return self.stop - self.step


Task = Train | Resume

Digests = dict[str, str]
"""Path of a leaf -> SHA-256 of the whole leaf."""


class Saved(msgspec.Struct, frozen=True):
    """One checkpoint: how fast it was saved, and what was in memory at that moment."""

    step: int
    nbytes: int
    seconds: float
    digests: Digests
    """Of the tensors in memory, gathered by torch alone: it does not come from the checkpoint."""


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """Answer to `Train`."""

    saves: tuple[Saved, ...]
    losses: tuple[float, ...]
    """Of steps 1, 2, ..."""


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """Answer to `Resume`."""

    nbytes: int
    """Bytes of tensors that the ranks loaded, together."""
    seconds: float
    """Of the slowest rank."""
    digests: dict[int, tuple[Digests, ...]]
    """Step of a checkpoint -> what each rank found after it was loaded."""
    losses: tuple[float, ...]
    """Of the steps after the checkpoint's."""


Outcome = Trained | Resumed


def checkpoint_path(run: str | Path, step: int) -> Path:
    """Returns the path of a step's checkpoint."""
    return Path(run) / f"step_{step:08d}"


def outcome_path(task: Task) -> Path:
    """Returns the path of a task's outcome; its folder starts with a dot, so that it is not taken for a checkpoint."""
    return Path(task.run) / ".demo" / f"{task.name}.json"


# comparing them -------------------------------------------------------------------------------------------------------

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
