"""Keeps the list of the checkpoints of one run up to date; a directory is inspected again only if it may have changed.

To inspect ten thousand directories takes seconds. A thread does it, the newest steps first, and requests get what is
known so far. Without requests nothing is inspected. A directory is skipped if its modification time is the same and
it held a complete checkpoint; `RECHECKED` of these are inspected all the same in each scan, so that damage inside a
file is found in the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from treeckpt.core.format.file_names import step_of
from treeckpt.errors import TreeckptError
from treeckpt.io.storage.run_store import RunStore, modified_times
from treeckpt.runs.checkpoint_info import CheckpointInfo, in_listing_order

FRESH = 1.0
"""Seconds after a scan during which no other one starts."""
RECHECKED = 64
ENOUGH = 100
"""Inspected directories after which a request hardly waits for the first scan: they fill a page."""
SOON = 0.3
"""Seconds for which every request waits for a scan; after that, or after the `wait` it gave, it gets what is known."""
HARDLY = 0.08
"""Seconds for which a request waits for a scan that has enough to show: the scan may be about to end."""


class DirectoryState(msgspec.Struct, frozen=True):
    """One directory, as it was when it was inspected."""

    info: CheckpointInfo
    modified_ns: int | None


class ScanProgress(msgspec.Struct, frozen=True):
    """Progress of the first scan of a run, in directories."""

    seen: int
    total: int
    complete: bool


class _Scan:
    """Events of a scan in progress.

    `enough` is set once all new directories are inspected, or a page of them if none was known before; `done` is set
    at the end.
    """

    def __init__(self) -> None:
        self.enough, self.done = threading.Event(), threading.Event()


class RunWatcher:
    """The directories of one run.

    Args:
        inspect: returns what the directory of a name is.
        clock: a monotonic clock in seconds.
        on_scanned: is called after each complete scan.
    """

    def __init__(
        self,
        store: RunStore,
        inspect: Callable[[str], DirectoryState],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_scanned: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._inspect, self._clock, self._on_scanned = store, inspect, clock, on_scanned
        self._lock = threading.Lock()
        self._known: dict[str, DirectoryState] = {}
        self._names: list[str] = []
        self._sorted: tuple[int, list[CheckpointInfo]] = (-1, [])
        self._scanned_at: float | None = None
        self._running: _Scan | None = None
        self._slow = False
        self._next_recheck = 0
        self.version = 0
        """Changes whenever `infos` or the end of the first scan does."""
        self.progress = ScanProgress(0, 0, False)

    def refresh(self, *, wait: float = 0.0) -> None:
        """Starts a scan unless the last one is fresh, and waits for it up to `wait` or SOON seconds.

        If scans of this run are slow, it waits only for the new directories, or for the first page of them.
        """
        with self._lock:
            running = self._running
            if running is None:
                if self._scanned_at is not None and self._clock() - self._scanned_at <= FRESH:
                    return
                running = self._running = _Scan()
                threading.Thread(target=self._run, args=(running,), daemon=True).start()
        wait = max(wait, SOON)
        if wait <= SOON and (self._slow or not self.progress.complete):
            wait = 0.0 if self._slow or running.enough.is_set() else HARDLY
            running.enough.wait(SOON)
        running.done.wait(wait)

    def _run(self, scan: _Scan) -> None:
        started = time.monotonic()
        try:
            if self.progress.complete:
                self._scan_again(scan)
            else:
                self._scan_first(scan)
            self._on_scanned()
        except (OSError, TreeckptError):  # the store is out of reach: the list stays, the next request tries again
            pass
        finally:
            with self._lock:
                self._scanned_at = self._clock()
                self._slow = self.progress.complete and time.monotonic() - started > SOON / 4
                self._running = None
            scan.enough.set()
            scan.done.set()

    def _scan_first(self, scan: _Scan) -> None:
        names = self._update_names(dict.fromkeys(self._store.names()))
        for seen, name in enumerate(names, 1):
            self._update(name)
            self.progress = ScanProgress(seen, len(names), False)
            if seen == ENOUGH:
                scan.enough.set()
        self.progress = ScanProgress(len(names), len(names), True)
        with self._lock:  # pages no longer show the progress
            self.version += 1

    def _scan_again(self, scan: _Scan) -> None:
        changes = modified_times(self._store)
        names = self._update_names(changes)
        for name in names:
            if name not in self._known:
                self._update(name)
        scan.enough.set()
        start = self._next_recheck if self._next_recheck < len(names) else 0
        self._next_recheck = start + RECHECKED
        rechecked = set(names[start : self._next_recheck])
        for name in names:
            if name in rechecked or not self._is_unchanged(name, changes[name]):
                self._update(name)
        self.progress = ScanProgress(len(names), len(names), True)

    def _update_names(self, found: Mapping[str, object]) -> list[str]:
        """Forgets directories that are gone; returns the names of those that exist, the newest steps first."""
        if found.keys() == self._known.keys() == set(self._names):
            return self._names
        names = self._names = sorted(found, key=lambda name: (-(step_of(name) or 0), name))
        with self._lock:
            gone = self._known.keys() - found.keys()
            for name in gone:
                del self._known[name]
            self.version += bool(gone)
        return names

    def _is_unchanged(self, name: str, modified_ns: int | None) -> bool:
        known = self._known[name]
        return known.modified_ns == modified_ns and known.info.status == "complete" and not known.info.saving

    def _update(self, name: str) -> None:
        before, now = self._known.get(name), self._inspect(name)
        if before is None or before != now:
            with self._lock:
                self._known[name] = now
                self.version += before is None or msgspec.structs.replace(before, modified_ns=now.modified_ns) != now

    def inspect(self, names: Sequence[str]) -> None:
        """Inspects these directories now, even if the last scan is fresh."""
        for name in names:
            if name in self._known:
                self._update(name)

    @property
    def infos(self) -> list[CheckpointInfo]:
        """The checkpoints found so far, newest first; the caller must not change the list."""
        with self._lock:
            version, infos = self._sorted
            if version != self.version:
                infos = in_listing_order(known.info for known in self._known.values())
                self._sorted = (self.version, infos)
            return infos
