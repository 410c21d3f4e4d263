"""Keeps the record of a save under way in its directory: small, replaced as a whole, never a reason to fail.

As bytes are written a record is renewed, from `PATIENCE` seconds on, at most every `PAUSE` seconds (`FAR_PAUSE` in an
object store), and in any case every `BEAT` seconds; it is not made durable. `counting` gives a store through which
bytes are counted as they are written.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from ...core.format.save_progress import (
    MAX_PROGRESS,
    Progress,
    decode_progress,
    encode_progress,
    parse_progress_name,
    progress_name,
)
from ...errors import TreeckptError
from .object_store import ObjectStore
from .process_owner import is_running, this_process
from .store import LocalStore, MemoryStore, Store, Writer

__all__ = ["LAPSE", "ProgressNote", "is_alive", "put_note", "read_progress"]

PATIENCE = 0.5
PAUSE = 0.25
FAR_PAUSE = 5.0
"""Seconds between renewals where each is a request that costs."""
BEAT = 15.0
"""Seconds between renewals of a save that writes nothing new."""
LAPSE = 600.0
"""Seconds after which a record that was not renewed means that its process has ended, where that cannot be seen; hosts'
clocks may differ by less."""


def put_note(store: Store, name: str, data: bytes) -> None:
    """Replaces a small file atomically, without making it durable where the store can do without."""
    if not isinstance(store, LocalStore):
        store.publish(name, data, replace=True)
        return
    temporary = store.directory / f".{name}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, store.directory / name)
    except BaseException:  # a full disk takes the name and not the content
        temporary.unlink(missing_ok=True)
        raise


def read_progress(store: Store, names: Iterable[str]) -> list[Progress]:
    """The records among a directory's files, by save and rank; those that cannot be read are left out.

    A save that was killed leaves its record behind: look at `updated_ns`.
    """
    found: list[Progress] = []
    for name in names:
        parsed = parse_progress_name(name)
        if parsed is None:
            continue
        with contextlib.suppress(TreeckptError, OSError):  # it may be gone by now
            progress = decode_progress(store.read(name, limit=MAX_PROGRESS), name)
            if (progress.rank, progress.save_id) == parsed:
                found.append(progress)
    return sorted(found, key=lambda progress: (progress.started_ns, progress.save_id, progress.rank))


class ProgressNote:
    """One rank's record of one save.

    Rank 0's stands before its first shard is made and until the save has ended: it proves that the save is alive, and,
    once its process has ended, that the save is dead. In an object store it is put up beside the writing, and stands
    when `commit` returns. The others put theirs up once the save has taken `PATIENCE` seconds. All are renewed.

    Args:
        first: what it says at the start.
        heard: is told the bytes written so far, as often as the record is renewed, from the first block on.
    """

    def __init__(self, store: Store, first: Progress, *, heard: Callable[[int], None] = lambda written: None) -> None:
        self._store, self._now, self._heard = store, msgspec.structs.replace(first, owner=this_process()), heard
        self._name = progress_name(first.rank, first.save_id)
        self._lock, self._putting = threading.Lock(), threading.Lock()
        self._started = self._renewed = time.monotonic()
        far = isinstance(store, ObjectStore)
        self._pause = FAR_PAUSE if far else 0.0
        self._noted = -FAR_PAUSE
        self._up, self._stands, self._ended = False, threading.Event(), threading.Event()
        # what is in this process's memory goes with it
        at_once = first.rank == 0 and not isinstance(store, MemoryStore)
        self._at_once, self._soon = at_once and not far, at_once and far

    def begin(self) -> None:
        """The save begins to write."""
        if self._at_once:
            self._put()
        try:
            _thread.start_new_thread(self._keep, ())  # a Thread's start waits for the thread, which takes milliseconds
        except RuntimeError:  # no thread can be started, as when the interpreter ends
            self._stands.set()

    def _keep(self) -> None:
        """Renews the record until the save has ended."""
        if self._soon:
            self._put()
        self._stands.set()
        while not self._ended.wait(BEAT):
            self._put()

    def _put(self) -> None:
        with self._putting, contextlib.suppress(Exception):
            if not self._ended.is_set():
                self._up = True
                _held.add(self._name)
                record = msgspec.structs.replace(self._now, alive_ns=time.time_ns())
                put_note(self._store, self._name, encode_progress(record))

    def counting(self) -> Store:
        """The store, with all that is written to new files counted."""
        return _Counting(self._store, self.add)

    def add(self, nbytes: int) -> None:
        """So many bytes more are written."""
        with self._lock:
            now = time.monotonic()
            due = now - self._renewed >= PAUSE
            self._now = msgspec.structs.replace(self._now, written=self._now.written + nbytes)
            if due:
                self._renewed = now
                self._renew(now)

    def commit(self) -> None:
        """This rank's shards are durable."""
        with self._lock:
            self._now = msgspec.structs.replace(self._now, phase="commit", written=self._now.planned)
            self._stands.wait()
            if self._up:
                self._renew(time.monotonic(), last=True)

    def _renew(self, now: float, *, last: bool = False) -> None:
        self._heard(self._now.written)
        if now - self._started >= PATIENCE and (last or now - self._noted >= self._pause):
            self._noted = now
            self._now = msgspec.structs.replace(self._now, updated_ns=time.time_ns())
            self._put()

    def end(self) -> None:
        """Removes the record."""
        self._ended.set()
        _held.discard(self._name)
        with self._putting:  # what is being put up now stands before it is removed
            up, self._up = self._up, False
        if up:
            with contextlib.suppress(Exception):
                self._store.delete(self._name)


_held: set[str] = set()
"""The names of this process's records of saves that have not ended."""


def is_alive(name: str, record: Progress, now_ns: int) -> bool | None:
    """Whether the process that keeps a record may still be at its save; None where the record does not say.

    Where the process cannot be seen from here, the record must have been renewed within `LAPSE`.
    """
    if record.owner is None:
        return None
    if record.owner == this_process():
        return name in _held
    running = is_running(record.owner)
    return running if running is not None else now_ns - record.alive_ns < LAPSE * 1e9


class _Counting:
    """A store whose new files are counted as they are written."""

    def __init__(self, inner: Store, count: Callable[[int], None]) -> None:
        self._inner, self._count, self.url = inner, count, inner.url
        self.prepare, self.sizes, self.read, self.read_into = inner.prepare, inner.sizes, inner.read, inner.read_into
        self.read_parts, self.map, self.publish = inner.read_parts, inner.map, inner.publish
        self.delete, self.close = inner.delete, inner.close

    def create(self, name: str, nbytes: int) -> Writer:
        return _CountingWriter(self._inner.create(name, nbytes), self._count)


class _CountingWriter:
    def __init__(self, inner: Writer, count: Callable[[int], None]) -> None:
        self._inner, self._count = inner, count
        self.ordered = getattr(inner, "ordered", False)
        self.commit, self.abort = inner.commit, inner.abort

    def write(self, offset: int, data: memoryview) -> None:
        self._inner.write(offset, data)
        if offset:  # the header is no part of what is planned
            self._count(len(data))
