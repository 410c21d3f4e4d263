"""Keeps up with one run: what its directories are, looked at again only where something may have changed.

A look at ten thousand directories takes seconds, so it is done by a thread, the newest steps first, and whoever asks
meanwhile gets what is known so far. Nothing is looked at while nobody asks. A directory whose time of change is the
same, and that held a complete checkpoint, is passed over; `REVISED` of these are looked at all the same each time, so
that damage inside a file is found in the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from treeckpt.core.format.file_names import step_of
from treeckpt.errors import TreeckptError
from treeckpt.io.storage.run_store import RunStore, modified_times
from treeckpt.runs.catalog import CheckpointInfo, in_listing_order

__all__ = ["FRESH", "Known", "Progress", "Watch"]

FRESH = 1.0
"""Seconds for which a run is not looked at again."""
REVISED = 64
ENOUGH = 100
"""Directories that are known after which the first look is hardly waited for: a page is full."""
SOON = 0.3
"""Seconds for which any request waits for a look; past that, or what it asked for, it gets what is known."""
HARDLY = 0.08
"""Seconds for which a look that has enough to show is waited for still: it may be about to end."""


class Known(msgspec.Struct, frozen=True):
    """One directory, as it was when it was looked at."""

    info: CheckpointInfo
    modified_ns: int | None


class Progress(msgspec.Struct, frozen=True):
    """How far the first look at a run is."""

    seen: int
    total: int
    complete: bool


class _Look:
    """A look under way: whether there is enough to show, and whether all was seen.

    Enough is what is new, or a page full where nothing was known before.
    """

    def __init__(self) -> None:
        self.enough, self.done = threading.Event(), threading.Event()


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
        self._names: list[str] = []
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
        wait = max(wait, SOON)
        if wait <= SOON and (self._slow or not self.progress.complete):
            wait = 0.0 if self._slow or running.enough.is_set() else HARDLY
            running.enough.wait(SOON)
        running.done.wait(wait)

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
            look.enough.set()
            look.done.set()

    def _scan(self, look: _Look) -> None:
        if self.progress.complete:
            self._look_again(look)
        else:
            self._look_first(look)

    def _look_first(self, look: _Look) -> None:
        names = self._listed(dict.fromkeys(self._store.names()))
        for seen, name in enumerate(names, 1):
            self._see(name)
            self.progress = Progress(seen, len(names), False)
            if seen == ENOUGH:
                look.enough.set()
        self.progress = Progress(len(names), len(names), True)
        with self._lock:  # the note of the first look goes away
            self.version += 1

    def _look_again(self, look: _Look) -> None:
        changes = modified_times(self._store)
        names = self._listed(changes)
        for name in names:
            if name not in self._known:
                self._see(name)
        look.enough.set()
        revised = set(self._turn(names))
        for name in names:
            if name in revised or not self._is_settled(name, changes[name]):
                self._see(name)
        self.progress = Progress(len(names), len(names), True)

    def _listed(self, found: Mapping[str, object]) -> list[str]:
        """Forgets what is gone; gives the names that are there, the newest steps first."""
        if found.keys() == self._known.keys() == set(self._names):
            return self._names
        names = self._names = sorted(found, key=lambda name: (-(step_of(name) or 0), name))
        with self._lock:
            gone = self._known.keys() - found.keys()
            for name in gone:
                del self._known[name]
            self.version += bool(gone)
        return names

    def _turn(self, names: Sequence[str]) -> Sequence[str]:
        """The next few of all names."""
        start = self._revised if self._revised < len(names) else 0
        self._revised = start + REVISED
        return names[start : start + REVISED]

    def _is_settled(self, name: str, modified_ns: int | None) -> bool:
        known = self._known[name]
        return known.modified_ns == modified_ns and known.info.status == "complete" and not known.info.saving

    def _see(self, name: str) -> None:
        before, now = self._known.get(name), self._look(name)
        if before is None or before != now:
            with self._lock:
                self._known[name] = now
                self.version += before is None or msgspec.structs.replace(before, modified_ns=now.modified_ns) != now

    def see(self, names: Sequence[str]) -> None:
        """Looks at these now, however fresh the last look is."""
        for name in names:
            if name in self._known:
                self._see(name)

    @property
    def infos(self) -> list[CheckpointInfo]:
        """What is known, newest first. Not to be changed."""
        with self._lock:
            version, infos = self._sorted
            if version != self.version:
                infos = in_listing_order(known.info for known in self._known.values())
                self._sorted = (self.version, infos)
            return infos
