"""Keeps up with one run: what its directories are, looked at again only where something may have changed.

A look at ten thousand directories takes seconds, so it is done by a thread, the newest steps first, and whoever asks
meanwhile gets what is known so far. Nothing is looked at while nobody asks. A directory whose time of change is the
same, and that held a complete checkpoint, is passed over; `REVISED` of these are looked at all the same each time, so
that damage inside a file is found in the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treeckpt.catalog import CheckpointInfo, newest_first
from treeckpt.core.errors import TreeckptError
from treeckpt.core.files import step_of
from treeckpt.io.runs import RunStore

__all__ = ["FRESH", "Known", "Progress", "Watch"]

FRESH = 1.0
"""Seconds for which a run is not looked at again."""
REVISED = 64
ENOUGH = 100
"""Directories that are known after which the first look is not waited for: a page is full."""
SOON = 0.3
"""Seconds for which any request waits for a look; past that, or what it asked for, it gets what is known."""


@dataclass(frozen=True, slots=True)
class Known:
    """One directory, as it was when it was looked at."""

    info: CheckpointInfo
    modified_ns: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the first look at a run is."""

    seen: int
    total: int
    complete: bool


class _Look:
    """A look under way: whether what is new was seen, and all of it."""

    def __init__(self) -> None:
        self.listed, self.done = threading.Event(), threading.Event()


class Watch:
    """One run.

    Args:
        look: what a directory is, by its name.
        clock: seconds, never going back.
        settled: is called whenever every directory was looked at.
    """

    def __init__(
        self,
        store: RunStore,
        look: Callable[[str], Known],
        *,
        clock: Callable[[], float] = time.monotonic,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._look, self._clock, self._settled = store, look, clock, settled
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}
        self._sorted: tuple[int, list[CheckpointInfo]] = (-1, [])
        self._looked: float | None = None
        self._running: _Look | None = None
        self._slow = False
        self._revised = 0
        self.version = 0
        """Changes with what is known."""
        self.progress = Progress(0, 0, False)

    def refresh(self, *, wait: float = 0.0) -> None:
        """Starts a look if the last one is not fresh any more, and waits for it if that is not for long.

        Of a run that takes longer to look at, only what is new is waited for, or the first page of it.
        """
        with self._lock:
            running = self._running
            if running is None:
                if self._looked is not None and self._clock() - self._looked <= FRESH:
                    return
                running = self._running = _Look()
                threading.Thread(target=self._run, args=(running,), daemon=True).start()
            enough = not self.progress.complete and len(self._known) >= ENOUGH
        if wait > SOON or not (enough or self._slow):
            running.done.wait(max(wait, SOON))
        elif not enough:
            running.listed.wait(SOON)

    def _run(self, look: _Look) -> None:
        started = time.monotonic()
        try:
            self._scan(look)
            self._settled()
        except (OSError, TreeckptError):  # a store out of reach: what was known stays, the next request tries again
            pass
        finally:
            with self._lock:
                self._looked = self._clock()
                self._slow = self.progress.complete and time.monotonic() - started > SOON / 4
                self._running = None
            look.listed.set()
            look.done.set()

    def _scan(self, look: _Look) -> None:
        names = sorted(self._store.names(), key=lambda name: (-(step_of(name) or 0), name))
        with self._lock:
            gone = self._known.keys() - set(names)
            for name in gone:
                del self._known[name]
            self.version += bool(gone)
        complete = self.progress.complete
        if complete:
            for name in names:
                if name not in self._known:
                    self._see(name)
            look.listed.set()
        revised = set(self._turn(names))
        for seen, name in enumerate(names, 1):
            self._see(name, always=name in revised)
            self.progress = Progress(seen, len(names), complete)
        self.progress = Progress(len(names), len(names), True)
        if not complete:  # the note of the first look goes away
            with self._lock:
                self.version += 1

    def _turn(self, names: Sequence[str]) -> Sequence[str]:
        """The next few of all names."""
        start = self._revised if self._revised < len(names) else 0
        self._revised = start + REVISED
        return names[start : start + REVISED]

    def _see(self, name: str, *, always: bool = False) -> None:
        before = self._known.get(name)
        settled = before is not None and before.info.status == "complete" and not before.info.saving
        if settled and not always and before is not None and before.modified_ns == self._modified(name):
            return
        now = self._look(name)
        if before is None or before != now:
            with self._lock:
                self._known[name] = now
                self.version += before is None or replace(before, modified_ns=now.modified_ns) != now

    def _modified(self, name: str) -> int | None:
        return self._store.folder(name).modified_ns()

    def see(self, names: Sequence[str]) -> None:
        """Looks at these now, however fresh the last look is."""
        for name in names:
            if name in self._known:
                self._see(name, always=True)

    @property
    def infos(self) -> list[CheckpointInfo]:
        """What is known, newest first. Not to be changed."""
        with self._lock:
            version, infos = self._sorted
            if version != self.version:
                infos = sorted((known.info for known in self._known.values()), key=newest_first)
                self._sorted = (self.version, infos)
            return infos
