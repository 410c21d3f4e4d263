"""Reads indexes into files: small ones in the server, others in another process, which reports its progress.

A large index takes seconds and most of a gigabyte to decode, and the files of other programs hold pickles, with which
one that means harm could keep the interpreter's lock. In another process they neither block the server nor stay in its
memory; pages show the progress meanwhile. One such process runs at a time, for `TIMEOUT` seconds at most, and of
another program's files for `FOREIGN_SECONDS` of computing, with `MEMORY` bytes of memory.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.records import Index
from treeckpt._foreign.files import foreign_at
from treeckpt._io.os_errors import shows_damage
from treeckpt._io.storage import checkpoint
from treeckpt._io.storage.foreign_formats import describe_foreign
from treeckpt._io.storage.store import DirectoryEntry, Store
from treeckpt.errors import CorruptError, FormatError, StoreError, TreeckptError

from .cache import Cache, key_of, tells_versions
from .jobs import KILLED, Failed, JobProgress, JobQueue, ProcessJob, folder_at, limit_resources, line_of, place_of, send
from .outline_file import StoredOutline, write_outline

LARGE_INDEX_NBYTES = 1 << 20
"""Bytes from which an index is read by another process."""
MAX_INDEX = 512 << 20
"""Bytes beyond which an index is not read at all."""
TIMEOUT = 300.0
"""Seconds after which a process that reads an index is killed."""
RETRY = 60.0
"""Seconds for which an index that could not be read is not tried again."""
FOREIGN_SECONDS = 60
"""Seconds of computing after which a process that reads files of another program is killed."""
MEMORY = 4 << 30
"""Bytes of address space that a process may take beyond what it has at its start."""
REQUEST_WAIT_SECONDS = 0.3
"""Seconds for which a request waits for the process, before its page shows that it reads, and how far it is."""
MAX_OPEN = 8
"""Tables that stay open."""


class ReadProgress(msgspec.Struct, frozen=True):
    """Progress of the first read of a large index."""

    phase: str
    done: int
    total: int
    share: float | None
    """The done part of it, from 0 to 1; None if it is not known."""
    seconds: float


class StillReading(Exception):
    """The index of the folder `url` is being read; the client requests again later."""

    def __init__(self, url: str, progress: ReadProgress) -> None:
        self.url, self.progress = url, progress
        super().__init__("The index is still being read.")


class _ReadJob(ProcessJob):
    """Reads one index into its file."""

    def __init__(self, reader: IndexReader, key: str, place: Sequence[str], target: Path) -> None:
        super().__init__("store.index_reader", [*place, str(target)], seconds=TIMEOUT)
        self._reader, self._key, self._name = reader, key, place[1]
        self._made = time.monotonic()
        self._failure: TreeckptError | None = None

    def take(self, message: JobProgress | Failed) -> None:
        super().take(message)
        if isinstance(message, Failed):
            self._failure = message.error()

    def finish(self) -> None:
        self.at = JobProgress(0, phase="start")
        try:
            status = self.run()
        except (OSError, RuntimeError) as error:
            self._failure, status = _unreadable(self._name, f"{error}"), 0
        if status and self._failure is None:
            killed = "the reader was killed: it takes more time than it may, or more memory than there is"
            ending = killed if status in KILLED else f"the reader ended with {status}"
            self._failure = _unreadable(self._name, ending)
        self._reader.take_result(self._key, self._failure)

    @property
    def progress(self) -> ReadProgress:
        at = self.at
        share = at.done / at.total if at.phase == "write" and at.total else None
        return ReadProgress(at.phase or "wait", at.done, at.total, share, time.monotonic() - self._made)


def _unreadable(name: str, found: str) -> TreeckptError:
    hint = "It says nothing of the checkpoint: treeckpt show has no such limits, if you trust where it is from"
    return StoreError(name, expected="a tree that can be read within the limits of this page", found=found, hint=hint)


class IndexReader:
    """The outlines of the indexes of folders; a file that does not exist yet is written."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._building = threading.Lock()
        """Held while a small index is read here: small ones do not wait for large ones."""
        self._opened: OrderedDict[str, StoredOutline] = OrderedDict()
        """Tables by key, the last used one last."""
        self._failed: OrderedDict[str, tuple[TreeckptError, float]] = OrderedDict()
        """Errors by key, and until when they hold, by the monotonic clock: damage as long as the file is the same."""
        self._jobs: JobQueue[_ReadJob] = JobQueue()

    def outline(self, run: str, folder: Store, entry: DirectoryEntry) -> StoredOutline:
        """Returns the tree of the index in a folder.

        Args:
            run: the URL of the folder's run; empty for a local folder.
            entry: the index file, as it is now.

        Raises:
            StillReading: it is large, and another process is reading it.
            CheckpointError: it is damaged.
            StoreError: it could not be read.
        """
        if entry.nbytes > MAX_INDEX:
            found = f"{entry.nbytes} bytes"
            raise CorruptError(folder.place, expected=f"an index of at most {MAX_INDEX} bytes", found=found)
        if not tells_versions(entry):  # what is in it stands for its version
            data = folder.read(INDEX_NAME, limit=MAX_INDEX)
            number = int.from_bytes(hashlib.blake2s(data, digest_size=8).digest(), "little")
            entry = msgspec.structs.replace(entry, number=number)
        key = key_of(folder.place, entry)
        if (found := self._known(key)) is not None:
            return found
        if is_large(entry) and (place := place_of(run, folder)) is not None:
            raise StillReading(folder.place, self._job(key, place).progress)
        return self._build(key, folder)

    def foreign_outline(self, path: str, version: DirectoryEntry) -> StoredOutline:
        """Returns the tree of files of another program.

        Args:
            version: what changes when they do.

        Raises:
            StillReading: another process is reading them.
            CheckpointError: they cannot be read.
            StoreError: they could not be read this time, or not within the limits.
        """
        key = key_of(f"foreign:{path}", version)
        if (known := self._known(key)) is not None:
            return known
        job = self._job(key, ["", path])
        job.over.wait(REQUEST_WAIT_SECONDS)
        if (known := self._known(key)) is None:
            raise StillReading(path, job.progress)
        return known

    def _known(self, key: str) -> StoredOutline | None:
        """Returns the outline of a key, if there is one; raises the error of the last read, if that failed."""
        with self._lock:
            if key in self._opened:
                self._opened.move_to_end(key)
                return self._opened[key]
            error, until = self._failed.pop(key, (None, 0.0))
            if error is not None and until > time.monotonic():
                self._failed[key] = error, until
                # It is raised again for each request: each time its traceback would grow.
                raise error.with_traceback(None)
        return self._open_file(key)

    def _open_file(self, key: str) -> StoredOutline | None:
        path = self._cache.outline_path(key)
        if not path.exists():
            return None
        try:
            outline = StoredOutline(path)
        except (OSError, ValueError, KeyError, msgspec.MsgspecError):  # damaged, or written by another version
            path.unlink(missing_ok=True)
            return None
        with self._lock:
            self._opened[key] = outline
            while len(self._opened) > MAX_OPEN:
                self._opened.popitem(last=False)
        return outline

    def _build(self, key: str, folder: Store) -> StoredOutline:
        with self._building:
            # Another request may have built it while this one waited for the lock.
            if (outline := self._open_file(key)) is None:
                try:
                    write_outline(checkpoint.read_index(folder), self._cache.outline_path(key))
                except TreeckptError as error:
                    self._fail(key, error)
                    raise
                self._cache.tidy()
                outline = self._open_file(key)
        assert outline is not None, "it was built now"
        return outline

    def _fail(self, key: str, error: TreeckptError) -> None:
        until = math.inf if shows_damage(error) else time.monotonic() + RETRY
        with self._lock:
            self._failed[key] = error, until
            while len(self._failed) > 1000:
                self._failed.popitem(last=False)

    def _job(self, key: str, place: Sequence[str]) -> _ReadJob:
        try:
            return self._jobs.add(key, lambda: _ReadJob(self, key, place, self._cache.outline_path(key)))
        except StoreError as error:
            raise _unreadable(place[1], "no thread could be started to read it") from error

    def take_result(self, key: str, error: TreeckptError | None) -> None:
        """Takes the end of a job."""
        if error is not None:
            self._fail(key, error)
        self._cache.tidy()

    def close(self) -> None:
        """Kills the processes that read indexes, and forgets the files that are open."""
        self._jobs.close()
        with self._lock:
            self._opened.clear()


def is_large(entry: DirectoryEntry) -> bool:
    """Whether an index is decoded by another process."""
    return entry.nbytes >= LARGE_INDEX_NBYTES


def _read(run: str, name: str, too_large: bytes) -> Index:
    if not run and (files := foreign_at(name)) is not None:
        from treeckpt._foreign.foreign_checkpoint import (  # not for the server's start
            ForeignCheckpoint,
            with_found_chunks,
        )

        limit_resources(MEMORY, FOREIGN_SECONDS, too_large)
        send(JobProgress(0, phase="read"))
        return with_found_chunks(ForeignCheckpoint(files).index)
    folder = folder_at(run, name)
    if not run and INDEX_NAME not in folder.entries() and (described := describe_foreign(name)) is not None:
        what, hint = described
        raise FormatError(name, expected="files whose tree can be read as they are", found=what, hint=hint)
    send(JobProgress(0, folder.entries()[INDEX_NAME].nbytes, "read"))
    return checkpoint.read_index(folder)


def main(arguments: Sequence[str]) -> None:
    """Reads an index into a file; this is what the other process runs.

    Args:
        arguments: the URL of a run, the name of a folder in it, and the path of the file to write; for a local
            folder, or files of another program, the URL is empty and the name is the path.
    """
    run, name, target = arguments
    too_large = line_of(Failed.of(_unreadable(name, f"one that takes more than {MEMORY >> 20} MiB of memory")))
    gc.disable()  # millions of objects are created, and none is garbage
    try:
        write_outline(
            _read(run, name, too_large), Path(target), lambda done, total: send(JobProgress(done, total, "write"))
        )
    except ModuleNotFoundError as error:  # pickles of torch hold some values that only torch has
        expected, found = f"the package {error.name}, which made it", "no such package in this environment"
        raise FormatError(name, expected=expected, found=found, hint="Install it") from error
    except MemoryError:
        os.write(1, too_large)  # made while there was memory
    except (OSError, KeyError) as error:
        raise _unreadable(name, f"{type(error).__name__}: {error}"[:300]) from error
