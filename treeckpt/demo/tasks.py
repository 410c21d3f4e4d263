"""The tasks of the demo's processes, and their outcomes.

A task goes to the workers as JSON on their command line; rank 0 leaves the outcome as JSON in the run's `.demo`
folder. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

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
