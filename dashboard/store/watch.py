"""Keeps the list of the checkpoints of one run up to date; a directory is inspected again only if it may have changed.

To inspect ten thousand directories takes seconds. A thread does it, the newest steps first, and requests get what is
known so far. Without requests nothing is inspected. A directory is skipped if its modification time is the same and
it held a complete checkpoint; `RECHECKED` of these are inspected all the same in each scan, so that damage inside a
file is found in the end.

Of a remote run many directories are inspected at a time. Those of the first page are listed one by one, so that the
page does not wait until thousands of objects are listed; the others by one listing of the run, as in all later scans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TypeVar

import msgspec

from treeckpt._core.format.files import numbers_in
from treeckpt._io.storage.store import RunStore, Store
from treeckpt._runs.catalog import CONCURRENT_READS, CheckpointInfo, in_listing_order
from treeckpt.errors import TreeckptError, visible

FRESH = 1.0
"""Seconds after a scan during which no other one starts, at most for a local run, and at least for a remote one."""
FRESH_MULTIPLE = 4.0
"""A multiple of the time that a scan took, after which the next may start: of a small run that is a moment, so that a
save which lasts a second is seen; a scan of a remote run may list a million objects.

After a scan that failed, the next one may start as soon as that of a local run.
"""
RECHECKED = 64
ENOUGH = 100
"""Inspected directories after which a request hardly waits for the first scan: they fill a page."""
FIRST_WAIT_SECONDS = 0.3
"""Seconds from the start of a scan for which requests wait, if they give no `wait`; then they get what is known."""
REMOTE_SOON = 1.0
"""Seconds for which requests wait for the first scan of a remote run: its first page takes a few requests in a row."""
BATCH = 8
"""Directories of a local run that are inspected in one turn."""
GROWTH = 8
"""During the first scan `infos` has new directories once they are one in so many: the work of pages that are asked for
meanwhile stays in proportion to the directories, not to their square."""
HARDLY = 0.08
"""Seconds for which a request waits for a scan that has enough to show and is past the half: it may be about to end."""
TURN_SECONDS = 2.0
"""Seconds without the end of any turn after which a scan no longer waits for its own: a file system that hangs must not
hold up other runs."""

T = TypeVar("T")


class _Turns:
    """Lists local runs for their first scans, and inspects their batches, in turn: several at once delay requests."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "treeckpt-watch")
        self.ended = 0
        """The number of turns that have ended."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        def turn() -> T:
            try:
                return work()
            finally:
                self.ended += 1

        return self._pool.submit(turn)


_turns = _Turns()


class DirectoryState(msgspec.Struct, frozen=True, gc=False):
    """One directory, as it was when it was inspected."""

    info: CheckpointInfo
    modified_ns: int | None
    unread: Store | None = None
    """The folder as it was listed, if `info` waits for another process."""


class ScanProgress(msgspec.Struct, frozen=True):
    """Progress of the first scan of a run, in directories."""

    seen: int
    total: int
    """0 while the directories are being listed."""
    complete: bool
    problem: str | None = None
    """Why the last scan failed."""


class _Scan:
    """Events of a scan in progress.

    `enough` is set once all new directories are inspected, or a page of them if none was known before; `done` is set
    at the end.
    """

    def __init__(self) -> None:
        self.enough, self.done = threading.Event(), threading.Event()
        self.started = time.monotonic()


class RunWatcher:
    """The directories of one run.

    Args:
        inspect: returns what a directory is.
        clock: a monotonic clock in seconds.
        on_scanned: is called after each complete scan.
    """

    def __init__(
        self,
        store: RunStore,
        inspect: Callable[[Store], DirectoryState],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_scanned: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._inspect, self._clock, self._on_scanned = store, inspect, clock, on_scanned
        self._remote = store.traits.far
        self._lock = threading.Lock()
        self._known: dict[str, DirectoryState] = {}
        self._names: list[str] = []
        self._sorted: tuple[int, list[CheckpointInfo]] = (-1, [])
        self._fresh_until: float | None = None
        self._running: _Scan | None = None
        self._slow = False
        self._next_recheck = 0
        self._new = 0
        """Directories that are known, but not in `infos` yet."""
        self.version = 0
        """Changes whenever `infos` or the end of the first scan does."""
        self.changed_ns = time.time_ns()
        """When that was last."""
        self.progress = ScanProgress(0, 0, False)

    def start(self) -> _Scan | None:
        """Starts a scan unless one is running; returns it, or None if the last one is fresh."""
        with self._lock:
            if self._running is None:
                if self._fresh_until is not None and self._clock() <= self._fresh_until:
                    return None
                self._running = _Scan()
                threading.Thread(target=self._run, args=(self._running,), daemon=True).start()
            return self._running

    def refresh(self, *, wait: float = 0.0) -> None:
        """Starts a scan unless the last one is fresh, and waits for it up to `wait` or FIRST_WAIT_SECONDS seconds.

        If scans of this run are slow, it waits only for the new directories, or for the first page of them.
        """
        if (running := self.start()) is None:
            return
        wait = max(wait, FIRST_WAIT_SECONDS)
        if wait <= FIRST_WAIT_SECONDS and (self._slow or not self.progress.complete):
            wait = 0.0 if self._slow or running.enough.is_set() else HARDLY
            first = self._remote and not self.progress.complete
            running.enough.wait(running.started + (REMOTE_SOON if first else FIRST_WAIT_SECONDS) - time.monotonic())
            if 2 * self.progress.seen <= self.progress.total:
                return
        running.done.wait(wait)

    def _run(self, scan: _Scan) -> None:
        problem, began = None, self._clock()
        try:
            if self.progress.complete:
                self._scan_again(scan)
            else:
                self._scan_first(scan)
            self._on_scanned()
        # out of reach, or no thread can be started as the server ends: the list stays, the next request tries again
        except (OSError, TreeckptError, RuntimeError) as error:
            problem = visible(str(error))
        finally:
            took = self._clock() - began
            with self._lock:
                self._count_change(problem != self.progress.problem)
                self.progress = msgspec.structs.replace(self.progress, problem=problem)
                fresh = FRESH if problem else (max if self._remote else min)(FRESH, FRESH_MULTIPLE * took)
                self._fresh_until = self._clock() + fresh
                self._slow = self.progress.complete and took > FIRST_WAIT_SECONDS / 4
                self._running = None
            scan.enough.set()
            scan.done.set()

    def _scan_first(self, scan: _Scan) -> None:
        patience = TURN_SECONDS

        def in_turn(work: Callable[[], T]) -> T:
            nonlocal patience
            if self._remote:
                return work()
            ended, turn = _turns.ended, _turns.submit(work)
            while wait_for([turn], patience).not_done and patience and ended != _turns.ended:
                ended = _turns.ended
            if turn.cancel():  # it has not begun
                patience = 0.0  # another run hangs: this scan no longer waits for turns
                return work()
            return turn.result()

        def look(folder: Store) -> None:
            self._update(folder)
            with self._lock:
                seen = self.progress.seen + 1
                self.progress = msgspec.structs.replace(self.progress, seen=seen)
                self._count_change(seen == ENOUGH)
            if seen == ENOUGH:
                scan.enough.set()

        def begin() -> list[str]:
            names = self._update_names(dict.fromkeys(self._store.names()))
            self.progress = ScanProgress(0, len(names), False)
            if not self._remote:
                self._look_at_local(names[:BATCH], look)  # in the same turn: each of many runs soon has its newest rows
            return names

        names = in_turn(begin)
        if not self._remote:
            for start in range(BATCH, len(names), BATCH):
                in_turn(partial(self._look_at_local, names[start : start + BATCH], look))
        else:
            self._look_at_remote(names, look)
        self.progress = ScanProgress(len(names), len(names), True)
        with self._lock:  # pages no longer show the progress
            self._count_change(True)

    def _look_at_local(self, names: Sequence[str], look: Callable[[Store], None]) -> None:
        for name in names:
            look(self._store.folder(name))

    def _look_at_remote(self, names: Sequence[str], look: Callable[[Store], None]) -> None:
        """Looks at all folders: at those of the first page before the listing of the whole run has ended."""
        with ThreadPoolExecutor(CONCURRENT_READS, "treeckpt-watch") as pool:
            listing = pool.submit(self._store.folders) if len(names) > ENOUGH else None
            for _ in pool.map(lambda name: look(self._store.folder(name).listed()), names[:ENOUGH]):
                pass
            listed = {folder.name: folder for folder in listing.result()} if listing is not None else {}
            for _ in pool.map(look, [listed[name] for name in names[ENOUGH:] if name in listed]):
                pass

    def _scan_again(self, scan: _Scan) -> None:
        if not self._remote:
            changes, folder_of = self._store.modified_times(), self._store.folder
        else:
            listed = {folder.name: folder for folder in self._store.folders()}
            changes, folder_of = {name: folder.modified_ns() for name, folder in listed.items()}, listed.__getitem__
        names = self._update_names(changes)
        self._update_all(folder_of(name) for name in names if name not in self._known)
        scan.enough.set()
        start = self._next_recheck if self._next_recheck < len(names) else 0
        self._next_recheck = start + RECHECKED
        rechecked = set(names[start : self._next_recheck])
        known = self._known
        changed = [
            name
            for name in names
            if name in rechecked
            or (state := known[name]).modified_ns != changes[name]
            or state.info.files != "complete"
            or state.info.saving
        ]
        self._update_all(map(folder_of, changed))
        self.progress = ScanProgress(len(names), len(names), True, self.progress.problem)

    def _update_all(self, folders: Iterable[Store]) -> None:
        if not self._remote:
            for folder in folders:
                self._update(folder)
            return
        with ThreadPoolExecutor(CONCURRENT_READS, "treeckpt-watch") as pool:
            for _ in pool.map(self._update, folders):
                pass

    def _update_names(self, found: Mapping[str, object]) -> list[str]:
        """Forgets directories that are gone; returns the names of those that exist, the newest steps first."""
        if found.keys() == self._known.keys() == set(self._names):
            return self._names
        names = self._names = sorted(found, key=lambda name: (-max(numbers_in(name), default=0), name))
        with self._lock:
            gone = self._known.keys() - found.keys()
            for name in gone:
                del self._known[name]
            self._count_change(bool(gone))
        return names

    def _update(self, folder: Store) -> None:
        name = folder.name
        before, now = self._known.get(name), self._inspect(folder)
        if before is None or before != now:
            with self._lock:
                self._known[name] = now
                if before is not None:
                    self._count_change(before.info != now.info)
                    return
                self._new += 1
                self._count_change(self.progress.complete or self._new * GROWTH >= len(self._known))

    def _count_change(self, changed: bool) -> None:
        if changed:
            self._new = 0
            self.version, self.changed_ns = self.version + 1, time.time_ns()

    def inspect(self, names: Sequence[str]) -> None:
        """Inspects these directories now, even if the last scan is fresh."""
        for name in names:
            if (known := self._known.get(name)) is not None:
                self._update(known.unread or self._store.folder(name).listed())

    @property
    def names(self) -> Sequence[str]:
        """The directories of the last listing, the newest steps first."""
        return self._names

    @property
    def infos(self) -> list[CheckpointInfo]:
        """The checkpoints found so far, newest first; the caller must not change the list."""
        with self._lock:
            version, infos = self._sorted
            if version != self.version:
                infos = in_listing_order(known.info for known in self._known.values())
                self._sorted = (self.version, infos)
            return infos
