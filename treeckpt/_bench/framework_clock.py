"""What the loops of `framework_jobs` are given: the task of a process, and the clock that measures its saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

import treeckpt as tc

from .checkpointers import is_installed, sync_files
from .results import BenchError

Side = Literal["own", "treeckpt"]
"""Whose checkpoints a process saves: the framework's own, or treeckpt's."""
MAX_SECONDS = 300.0
"""For which a save in the background is waited for."""


class FrameworkTask(msgspec.Struct, frozen=True):
    """The saves of one process."""

    framework: str
    side: Side
    directory: str
    """An empty directory for checkpoints, and for the file of `SaveClock`."""
    saves: int
    scale: float

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.directory)


class FrameworkSave(msgspec.Struct, frozen=True):
    """A save: seconds until the training went on, and until its bytes were on the device."""

    blocked: float
    durable: float


class SaveClock:
    """Measures the saves of one process; on several ranks, of rank 0. Made anew in processes of a framework's own."""

    def __init__(self, task: FrameworkTask) -> None:
        self._task, self._path = task, task.path / "saves.jsonl"

    def measure(self, save: Callable[[], Any], wait: Callable[[], Any]) -> None:
        """Measures a save, and writes the result down.

        Args:
            save: returns when the training may go on.
            wait: returns when all is written. Files of a framework's own are then made durable, if they are not.
        """
        begin = time.perf_counter()
        save()
        blocked = time.perf_counter() - begin
        wait()
        if self._task.side == "own":
            sync_files(self._task.path)
        found = FrameworkSave(blocked, time.perf_counter() - begin)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(found) + b"\n")

    def wait_for(self, path: Path) -> None:
        """Waits until a checkpoint of treeckpt is committed at a path; a framework's own is there when `save` returns.

        Raises:
            BenchError: it is not there after `MAX_SECONDS`.
        """
        end = time.perf_counter() + MAX_SECONDS
        while self._task.side != "own" and not tc.exists(path):
            if time.perf_counter() > end:
                raise BenchError(f"{path}: not committed after {MAX_SECONDS:.0f} s")
            time.sleep(0.001)


class Framework(msgspec.Struct, frozen=True):
    """A framework, by the packages that it needs and the loop that saves."""

    name: str
    packages: tuple[str, ...]
    job: Callable[[FrameworkTask, SaveClock], None]

    @property
    def installed(self) -> bool:
        """Whether its packages are installed."""
        return all(is_installed(package) for package in self.packages)
