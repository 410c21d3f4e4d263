"""Small files by which other processes see what this one does in a checkpoint's directory, for as long as it does it.

Such are the progress record of a save, a reader's lease and a lock on the index. The name of each is that of no other
process's file. It is replaced as a whole, and not made durable: behind a power loss no process is left that it speaks
of. A thread writes it again now and then, and it is deleted at the end. Of a killed process it stays, and names a
process that has ended.

*Leases*: a reader writes its lease before it reads the index; a deleter looks for leases after it has deleted the
index. So either the reader finds no index, or the deleter finds the lease and leaves the shards for later. This needs
no locks, only that what one process writes is seen by others within `LEASE` seconds, as on local file systems, NFS,
Lustre and object stores. It does not work where the reader has no write permission (a load from there is not
protected), nor where the clocks of hosts differ by more than `LEASE`. The lease of a process that is known to have
ended does not count.

*Progress records*: while bytes are written a record is renewed, from `FIRST_RENEWAL_SECONDS` on, at most every
`PROGRESS_PAUSE` seconds (`FAR_PROGRESS_PAUSE` in an object store), and in any case every `BEAT_SECONDS` seconds. An
error in renewing it never makes the save fail. A save whose coordinator cannot write the first one fails: deletions
would not see it, see `deletions`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from ..._core.format.decoding import decode_json
from ..._core.format.files import (
    MAX_PROGRESS,
    Owner,
    Progress,
    decode_progress,
    encode_progress,
    final_name,
    lease_name,
    parse_file_name,
    parse_progress_name,
    progress_name,
)
from ..._threads import start_unnamed_thread
from ...errors import TreeckptError
from ..os_errors import shows_damage
from ..process import delete_late, is_running, this_process
from .local_files import DIRECTORY_TRIES
from .store import Store, for_each

LAPSE = 600.0
"""Seconds after which a file that was not renewed counts as that of an ended process, where the process cannot be seen;
the clocks of hosts may differ by less."""
DELETE_PAUSES = (0.0, 0.05, 0.2)
"""Seconds before each try to delete a file."""
LATE_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each further try to delete a file, for which nobody waits."""
MAX_CLAIM = 4096
"""Bytes of a lock or lease, at most."""

_kept: set[str] = set()
"""The names of the files that this process keeps."""


class Claim(msgspec.Struct, frozen=True):
    """The content of a lock or lease."""

    owner: Owner
    alive_ns: int
    """Unix time at which the file was written, in nanoseconds."""


class KeptFile:
    """A file that this process keeps until `end`.

    Args:
        encode: returns the content of a write that follows.
    """

    def __init__(self, store: Store, name: str, encode: Callable[[], bytes]) -> None:
        self.name, self._store, self._encode = name, store, encode
        self._writing, self._ended = threading.Lock(), threading.Event()
        self.exists = False
        """Whether it may be there: a write that fails may have reached an object store."""

    def write(self, put: Callable[[str, bytes], object] | None = None) -> None:
        """Writes it, unless its end has begun; `put` does so in the place of `replace_file`.

        Raises:
            OSError | StoreError: it cannot be written.
        """
        with self._writing:
            if not self._ended.is_set():
                self.exists = True
                # before the file is there: other threads that read it ask here whether this process still keeps it
                _kept.add(self.name)
                (put or partial(replace_file, self._store))(self.name, self._encode())

    def try_write(self) -> bool:
        """Writes it as `write`; returns whether that was possible."""
        with contextlib.suppress(Exception):
            self.write()
            return True
        return False

    def create(self, make_directory: Callable[[], object]) -> None:
        """Writes it for the first time.

        Args:
            make_directory: called where a clean-up has removed the directory, which was empty, or the temporary file.

        Raises:
            OSError | StoreError: it cannot be written.
        """
        for tries_left in reversed(range(DIRECTORY_TRIES)):
            try:
                self.write()
                return
            except FileNotFoundError:
                if not tries_left:
                    raise
                make_directory()

    def renew(self, seconds: float, *, create: bool = False) -> bool:
        """Starts a thread that writes it again and again after so many seconds; returns whether one was started.

        Args:
            create: the thread writes it at once, and ends where that is not possible.
        """
        return start_unnamed_thread(partial(self._renew, seconds, create))

    def _renew(self, seconds: float, create: bool) -> None:
        if create and not self.try_write():
            self.forget()
            return
        while not self._ended.wait(seconds):
            self.try_write()

    def stop(self) -> None:
        """Writes it no more; what is being written is complete."""
        self._ended.set()
        with self._writing:
            pass

    def forget(self) -> None:
        """Leaves it to another process, or nowhere where it could not be written: `end` does not delete it."""
        self.exists = False
        _kept.discard(self.name)

    def end(self) -> bool:
        """Deletes it; returns whether it is gone."""
        self._ended.set()
        _kept.discard(self.name)
        return self._delete(DELETE_PAUSES)

    def end_late(self, pauses: Iterable[float] = DELETE_PAUSES) -> None:
        """Deletes it in a thread, for which the process waits, with a try behind each of the pauses, in seconds."""
        self._ended.set()
        _kept.discard(self.name)
        delete_late(self._store.url, self.name, partial(self._delete, pauses))

    def _delete(self, pauses: Iterable[float]) -> bool:
        with self._writing:  # a write that is under way would create it again
            exists = self.exists
        for pause in pauses if exists else ():
            if pause:
                time.sleep(pause)
            with contextlib.suppress(Exception):  # what it spoke of is over, and must not fail
                self._store.delete(self.name)
                self.exists = False
                break
        return not self.exists


def is_kept(name: str) -> bool:
    """Whether this process keeps the file of that name."""
    return name in _kept


def replace_file(store: Store, name: str, data: bytes) -> None:
    """Replaces a small file atomically; on a local file system without making it durable."""
    if (directory := store.traits.local_path) is None:
        store.publish(name, data, replace=True)
        return
    # by the tag clean-ups know the temporary files of a process that has ended
    temporary = directory / f".{name}.{this_process().tag}{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, directory / name)
    except BaseException:  # a full disk creates the name and refuses the content
        temporary.unlink(missing_ok=True)
        raise


def encode_claim() -> bytes:
    """Returns the content of a lock or lease of this process."""
    return msgspec.json.encode(Claim(this_process(), time.time_ns()))


def read_claim(store: Store, name: str, *, damaged: bool | None) -> tuple[Owner | None, bool | None]:
    """Returns the process that keeps a lock or lease, and whether it may still do so; None for what is not known here.

    Args:
        damaged: whether one that does not decode is kept. One that could not be read this time may be.

    Raises:
        FileNotFoundError: it was deleted since it was listed.
    """
    try:
        claim = decode_json(store.read(name, limit=MAX_CLAIM), Claim)
    except FileNotFoundError:
        raise
    except (msgspec.MsgspecError, TreeckptError, OSError) as error:
        return None, damaged if shows_damage(error) else True
    if claim.owner == this_process():
        return claim.owner, is_kept(name)
    return claim.owner, time.time_ns() - claim.alive_ns < LAPSE * 1e9 and is_running(claim.owner) is not False


_log = logging.getLogger("treeckpt")
LEASE = LAPSE
"""Seconds for which a lease is valid after it was renewed."""
RENEW_SECONDS = 60.0


@contextlib.contextmanager
def hold_lease(folder: Store, *, ahead: bool = False) -> Iterator[bool]:
    """Holds a lease while the body runs, renewed every `RENEW_SECONDS` seconds; gives False where none can be written.

    Args:
        ahead: in an object store the body begins while the lease is being written, for a reader that has read the index
            already and raises if it finds files gone: until the lease is written nothing protects it.

    In an object store the end of the body does not wait until the lease is deleted; the end of the process does.
    """
    if folder.traits.has_directory and not folder.entries():  # a lease would create it again
        yield False
        return
    far = folder.traits.far
    lease = KeptFile(folder, lease_name(secrets.token_hex(8)), encode_claim)
    try:
        held = (far and ahead) or lease.try_write()
        if not held:
            lease.forget()
        elif not lease.renew(RENEW_SECONDS, create=far and ahead) and lease.try_write():
            _log.warning(
                "%s: no thread can be started to renew the lease: a clean-up may delete this checkpoint after %g s",
                folder.url,
                LEASE,
            )
        yield held
    finally:
        lease.end_late() if far else lease.end()


def has_readers(folder: Store, now_ns: int) -> bool:
    """Whether a reader holds a valid lease."""
    entries = folder.entries().items()
    leases = [(name, entry) for name, entry in entries if (kind := parse_file_name(name)) and kind.kind == "lease"]
    recent = [name for name, entry in leases if now_ns - (entry.modified_ns or now_ns) < LEASE * 1e9]
    return any(_may_be_held(folder, name) for name in recent)


def _may_be_held(store: Store, name: str) -> bool:
    try:
        return read_lease(store, name)[1] is not False
    except FileNotFoundError:
        return False


def read_lease(store: Store, name: str) -> tuple[Owner | None, bool | None]:
    """Returns the process that a lease names, and whether it may still read, as `read_claim`."""
    return read_claim(store, name, damaged=None)


FIRST_RENEWAL_SECONDS = 0.5
"""Seconds that a save takes before its record is renewed at all."""
PROGRESS_PAUSE = 0.25
"""Seconds between two renewals of a progress record, at least."""
FAR_PROGRESS_PAUSE = 5.0
"""Seconds between two renewals, at least, where each one is a request that costs money."""
BEAT_SECONDS = 15.0
"""Seconds between renewals of a save that writes nothing new."""


def read_progress(store: Store, names: Iterable[str]) -> list[Progress]:
    """Reads the progress records among a directory's files, ordered by save and rank; unreadable ones are skipped."""

    def read(name: str) -> Progress | None:
        with contextlib.suppress(TreeckptError, OSError):
            return read_record(store, name)
        return None

    records = for_each(store, read, [name for name in names if parse_progress_name(name) is not None])
    readable = [record for record in records if record is not None]
    return sorted(readable, key=lambda record: (record.started_ns, record.save_id, record.rank))


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
        at_once: whether `begin` writes the record of a rank other than 0 too.
    """

    def __init__(
        self,
        store: Store,
        first: Progress,
        *,
        on_progress: Callable[[int], object] | None = None,
        at_once: bool = False,
    ) -> None:
        self._store, self._on_progress = store, on_progress
        self._record = msgspec.structs.replace(first, owner=this_process())
        self.name = progress_name(first.rank, first.save_id)
        self._file, self._lock = KeptFile(store, self.name, self._encoded), threading.Lock()
        self.started = self.renewed = time.monotonic()
        self._pause = FAR_PROGRESS_PAUSE if store.traits.far else 0.0
        self._written_at = -FAR_PROGRESS_PAUSE
        self._last_ns, self._gap_ns = time.time_ns(), 0
        """The time of the last renewal, and the longest time between two."""
        # a store in this process's memory ends with the process
        self._is_first = (first.rank == 0 or at_once) and not store.traits.in_process

    def begin(self) -> None:
        """Writes the record of rank 0, and starts to renew it. Of the other ranks it is written later.

        Raises:
            OSError | StoreError: it cannot be written.
        """
        if self._is_first:
            self._file.create(self._store.prepare)
        self._file.renew(BEAT_SECONDS)

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
            due = now - self.renewed >= PROGRESS_PAUSE
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
