"""Which runs and checkpoints may be asked for, and their decoded indexes while they are being browsed.

Clients know runs and checkpoints by ids made here from what a scan found; no path, and no part of one, ever comes from
a request. What is decoded is kept for as long as the file stays the same, a few at a time.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from treeckpt import catalog
from treeckpt.catalog import CheckpointInfo, FileCache
from treeckpt.core.events import Timings, timings_name
from treeckpt.core.index import INDEX_NAME
from treeckpt.core.outline import Outline
from treeckpt.core.wording import visible
from treeckpt.io.bucket import is_url
from treeckpt.io.runs import open_folder

__all__ = ["Library", "Missing", "Run"]

T = TypeVar("T")
FRESH = 1.0
"""Seconds for which a scan of a run is not repeated."""


class Missing(Exception):
    """Nothing is known under the id, or not the part of it that was asked for."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that the dashboard was given."""

    id: str
    name: str
    path: Path | str
    """A string where it is a URL."""


def _id(*parts: str) -> str:
    text = "\0".join(parts).encode("utf-8", "surrogateescape")
    return hashlib.blake2s(text, digest_size=6).hexdigest()


class Library:
    """Runs by id, checkpoints by id, and what was decoded of them.

    Args:
        paths: of runs, or of checkpoints by themselves.
        clock: seconds, never going back.
    """

    def __init__(self, paths: Sequence[str | Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        absolute = [path.rstrip("/") if is_url(path) else Path(path).absolute() for path in paths]
        self.runs = tuple(Run(_id(str(p)), visible(Path(p).name or str(p)), p) for p in dict.fromkeys(absolute))
        self._clock = clock
        self._lock = threading.Lock()
        self._scans: dict[str, tuple[float, list[CheckpointInfo]]] = {}
        self._known: dict[str, tuple[Run, str]] = {}
        self._summaries = FileCache(100_000)
        self._outlines = FileCache(6)
        self._timings = FileCache(6)

    def run(self, run_id: str) -> Run:
        """The run of an id.

        Raises:
            Missing: there is none.
        """
        for run in self.runs:
            if run.id == run_id:
                return run
        raise Missing("There is no such run here.")

    def checkpoints(self, run: Run) -> list[tuple[str, CheckpointInfo]]:
        """A run's checkpoints with their ids, newest first."""
        with self._lock:
            kept = self._scans.get(run.id)
        if kept is None or self._clock() - kept[0] > FRESH:
            kept = (self._clock(), catalog.scan(run.path, cache=self._summaries))
            with self._lock:
                self._scans[run.id] = kept
                self._known.update({_id(str(run.path), i.name): (run, i.path) for i in kept[1]})
        return [(_id(str(run.path), info.name), info) for info in kept[1]]

    def checkpoint(self, checkpoint_id: str) -> tuple[Run, CheckpointInfo]:
        """The checkpoint of an id, as it is now.

        Raises:
            Missing: there is none.
        """
        if checkpoint_id not in self._known:
            for run in self.runs:
                self.checkpoints(run)
        if checkpoint_id not in self._known:
            raise Missing("There is no such checkpoint here; it may have been removed.")
        run, path = self._known[checkpoint_id]
        if not catalog.is_there(path):
            raise Missing("This checkpoint is gone.")
        return run, catalog.look(path, cache=self._summaries, follow=path == str(run.path))

    def outline(self, info: CheckpointInfo) -> Outline:
        """The tree of a checkpoint.

        Raises:
            CheckpointError: the index is not to be read.
        """
        if is_url(info.path):
            return _recall(self._outlines, info.path, INDEX_NAME, lambda: Outline(catalog.read_index(info.path)))
        return self._outlines.get(Path(info.path) / INDEX_NAME, _outline)

    def timings(self, info: CheckpointInfo) -> Timings:
        """The timings of a checkpoint.

        Raises:
            CheckpointError: there are none, or not to be read.
        """
        if is_url(info.path):
            name = timings_name(info.save_id) if info.save_id else ""
            return _recall(self._timings, info.path, name, lambda: catalog.read_timings(info.path))
        return self._timings.get(Path(info.path), catalog.read_timings)


def _recall(cache: FileCache, url: str, name: str, read: Callable[[], T]) -> T:
    """What was made of an object, for as long as it stays the same."""
    entry = open_folder(url).entries().get(name)
    return read() if entry is None else cache.recall((url, name), entry, read)


def _outline(path: Path) -> Outline:
    return Outline(catalog.read_index(path.parent))
