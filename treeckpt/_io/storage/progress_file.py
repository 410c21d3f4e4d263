"""Keeps the progress record of a save in the checkpoint's directory, see `kept_file`.

While bytes are written a record is renewed, from `FIRST_RENEWAL_SECONDS` on, at most every `PAUSE` seconds
(`FAR_PAUSE` in an object store), and in any case every `BEAT` seconds. An error in renewing it never makes the save
fail. A save whose coordinator cannot write the first one fails: deletions would not see it, see `index_lock`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from ..._core.format.files import (
    MAX_PROGRESS,
    Progress,
    decode_progress,
    encode_progress,
    final_name,
    parse_progress_name,
    progress_name,
)
from ..._threads import start_unnamed_thread
from ...errors import TreeckptError
from ..os_errors import shows_damage
from .kept_file import LAPSE, KeptFile, is_kept
from .many_files import for_each
from .process_owner import is_running, this_process
from .store import Store

FIRST_RENEWAL_SECONDS = 0.5
"""Seconds that a save takes before its record is renewed at all."""
PAUSE = 0.25
"""Seconds between renewals."""
FAR_PAUSE = 5.0
"""Seconds between renewals where each one is a request that costs money."""
BEAT = 15.0
"""Seconds between renewals of a save that writes nothing new."""


def read_progress(store: Store, names: Iterable[str]) -> list[Progress]:
    """Reads the progress records among a directory's files, ordered by save and rank; unreadable ones are skipped."""

    def read(name: str) -> Progress | None:
        with contextlib.suppress(TreeckptError, OSError):
            return read_record(store, name)
        return None

    records = for_each(store, read, [name for name in names if parse_progress_name(name) is not None])
    found = [record for record in records if record is not None]
    return sorted(found, key=lambda record: (record.started_ns, record.save_id, record.rank))


def read_record(store: Store, name: str) -> Progress | None:
    """Reads one progress record, also a temporary one; None if it is gone, damaged, or that of another save.

    Raises:
        OSError | StoreError: it could not be read this time.
    """
    try:
        record = decode_progress(store.read(name, limit=MAX_PROGRESS), name)
    except (TreeckptError, OSError) as error:
        if not shows_damage(error):
            raise
        return None
    return record if (record.rank, record.save_id) == parse_progress_name(final_name(name)) else None


class ProgressRecorder:
    """Writes the progress record of one rank in one save.

    The record of rank 0 exists from the agreement, before any rank creates a shard and before the path is looked at,
    until the save has ended: it proves that the save is alive, and, once its process has ended, that the save is dead.
    The other ranks write theirs once the save has taken `FIRST_RENEWAL_SECONDS` seconds. All are renewed.

    Args:
        first: the record at the start of the save.
        on_progress: called with the bytes written so far, as often as the record is renewed, from the first block on.
    """

    def __init__(
        self,
        store: Store,
        first: Progress,
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        self._store, self._on_progress = store, on_progress
        self._record = msgspec.structs.replace(first, owner=this_process())
        self.name = progress_name(first.rank, first.save_id)
        self._file, self._lock = KeptFile(store, self.name, self._encoded), threading.Lock()
        self.started = self.renewed = time.monotonic()
        self._pause = FAR_PAUSE if store.traits.far else 0.0
        self._written_at = -FAR_PAUSE
        self._last_ns, self._gap_ns = time.time_ns(), 0
        """Of the last renewal, and the longest time between two."""
        # a store in this process's memory ends with the process
        self._is_first = first.rank == 0 and not store.traits.in_process

    def begin(self) -> None:
        """Writes the record of rank 0, and starts to renew it. Of the other ranks it is written later.

        Raises:
            OSError | StoreError: it cannot be written.
        """
        if self._is_first:
            self._file.create(self._store.prepare)
        self._file.renew(BEAT)

    def check_condition(self, *, replaces: bool) -> None:
        """Finds out by the record whether an object store has the conditional writes by which the save is committed.

        Raises:
            StoreError: it has none, or cannot be reached.
        """
        if self._store.traits.conditional and self._is_first:
            self._file.write(partial(self._store.check_condition, replaces=replaces))

    def expect(self, planned: int) -> None:
        """Sets how many bytes this rank writes, or at most writes as far as is known."""
        with self._lock:
            self._record = msgspec.structs.replace(self._record, planned=planned)

    def _encoded(self) -> bytes:
        """Returns the record for a write that follows."""
        now_ns = time.time_ns()
        self._gap_ns, self._last_ns = max(self._gap_ns, now_ns - self._last_ns), now_ns
        return encode_progress(msgspec.structs.replace(self._record, alive_ns=now_ns))

    @property
    def has_lapsed(self) -> bool:
        """Whether the record may have been taken for that of an ended process: this one was stopped for minutes."""
        return max(self._gap_ns, time.time_ns() - self._last_ns) > LAPSE / 2 * 1e9

    def add(self, nbytes: int) -> None:
        """Adds written bytes to the record; they are not visible in the store yet."""
        with self._lock:
            now = time.monotonic()
            due = now - self.renewed >= PAUSE
            self._record = msgspec.structs.replace(self._record, written=self._record.written + nbytes)
            if due:
                self.renewed = now
                self._renew(now)

    def commit(self) -> None:
        """Records that the shards of this rank are durable."""
        with self._lock:
            self._record = msgspec.structs.replace(self._record, phase="commit", written=self._record.planned)
            if self._file.exists:
                self._renew(time.monotonic(), last=True)

    def _renew(self, now: float, *, last: bool = False) -> None:
        if self._on_progress is not None:
            self._on_progress(self._record.written)
        if now - self.started >= FIRST_RENEWAL_SECONDS and (last or now - self._written_at >= self._pause):
            self._written_at = now
            self._record = msgspec.structs.replace(self._record, updated_ns=time.time_ns())
            if last and self._pause:  # the commit goes on meanwhile; `end` waits. Without a thread: it is removed soon
                start_unnamed_thread(self._file.try_write)
            else:
                self._file.try_write()

    def end(self, *, wait: bool = True) -> None:
        """Removes the record; unless `wait`, a thread does so, for which the process waits."""
        self._file.end() if wait else self._file.end_late()

    def stop(self) -> None:
        """Renews the record no more, as another process of the save is about to; `end` removes it unless `forget`."""
        self._file.stop()

    def forget(self) -> None:
        """Leaves the record to the other process, which has written it."""
        self._file.forget()


def is_alive(name: str, record: Progress, now_ns: int) -> bool | None:
    """Whether the process that keeps a record may still run its save; None if the record names no process.

    A process that cannot be seen from here counts as alive if it renewed the record within `LAPSE`.
    """
    if record.owner is None:
        return None
    if record.owner == this_process():
        return is_kept(name)
    running = is_running(record.owner)
    return running if running is not None else now_ns - record.alive_ns < LAPSE * 1e9
