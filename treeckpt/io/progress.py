"""Keeps the record of a save under way in its directory: small, replaced as a whole, never a reason to fail.

A record is put up only once a save has taken `PATIENCE` seconds, so that quick saves cost nothing, and then at most
every `PAUSE` seconds (`FAR_PAUSE` in an object store); it is not made durable. `counting` gives a store through which
bytes are counted as they are written.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from ..core.errors import TreeckptError
from ..core.progress import (
    MAX_PROGRESS,
    Progress,
    decode_progress,
    encode_progress,
    parse_progress_name,
    progress_name,
)
from .objects import ObjectStore
from .store import LocalStore, Store, Writer

__all__ = ["ProgressNote", "put_note", "read_progress"]

PATIENCE = 0.5
PAUSE = 0.25
FAR_PAUSE = 5.0
"""Seconds between renewals where each is a request that costs."""


def put_note(store: Store, name: str, data: bytes) -> None:
    """Replaces a small file atomically, without making it durable where the store can do without."""
    if not isinstance(store, LocalStore):
        store.publish(name, data, replace=True)
        return
    temporary = store.directory / f".{name}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, store.directory / name)


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

    Args:
        first: what it says at the start.
        heard: is told the bytes written so far, as often as the record is renewed, from the first block on.
    """

    def __init__(self, store: Store, first: Progress, *, heard: Callable[[int], None] = lambda written: None) -> None:
        self._store, self._now, self._heard = store, first, heard
        self._name = progress_name(first.rank, first.save_id)
        self._lock = threading.Lock()
        self._started = self._renewed = time.monotonic()
        self._pause = FAR_PAUSE if isinstance(store, ObjectStore) else 0.0
        self._noted = -FAR_PAUSE
        self._up = False

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
            if self._up:
                self._renew(time.monotonic(), last=True)

    def _renew(self, now: float, *, last: bool = False) -> None:
        self._heard(self._now.written)
        if now - self._started >= PATIENCE and (last or now - self._noted >= self._pause):
            self._up, self._noted = True, now
            with contextlib.suppress(Exception):
                record = msgspec.structs.replace(self._now, updated_ns=time.time_ns())
                put_note(self._store, self._name, encode_progress(record))

    def end(self) -> None:
        """Removes the record."""
        if self._up:
            with contextlib.suppress(Exception):
                self._store.delete(self._name)


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
