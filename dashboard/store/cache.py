"""The dashboard's cache: files in the user's cache directory, never inside a run.

There are two kinds: one file for each index (`outline_file`), whose name is a hash of the index file's URL, size and
modification time, and one database of what lists of checkpoints and trends show: summaries and reduced timings.
Everything may be deleted at any time, and is then computed again; so is a damaged file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from treeckpt._io.storage.checkpoint import LruStatCache
from treeckpt._io.storage.store import DirectoryEntry
from treeckpt._runs.catalog import Summary
from treeckpt._runs.reduced_timings import ReducedTimings
from treeckpt._runs.run_end import RunEnd
from treeckpt._runs.statistics_store import ChangeStore, StatisticsStore
from treeckpt._runs.verification import VerificationStore, cache_directory

from .outline_file import VERSION, encodable

MAX_CACHE_NBYTES = 8 << 30
"""Bytes of the files of all indexes."""
MAX_SUMMARIES = 512 << 20
"""Bytes of the database of summaries; a larger one is deleted, for rows of files that are gone are never searched."""
BATCH = 256
"""Summaries that are written in one transaction."""

T = TypeVar("T")
_DECODERS: dict[str, Any] = {
    "summary": msgspec.json.Decoder(Summary, strict=False),  # as `encodable` writes metrics
    "took": msgspec.json.Decoder(ReducedTimings),
    "ended": msgspec.json.Decoder(RunEnd),
}


def key_of(url: str, entry: DirectoryEntry) -> str:
    """Returns a hash of a file's URL, size, modification time and inode number."""
    text = f"{url}\0{entry.nbytes}\0{entry.modified_ns}\0{entry.number}".encode("utf-8", "surrogateescape")
    return hashlib.blake2s(text, digest_size=16).hexdigest()


def tells_versions(entry: DirectoryEntry) -> bool:
    """Whether another file of the same name and size has another key; some stores know no times and no numbers."""
    return bool(entry.modified_ns or entry.number)


class Cache:
    """The cache directory. If there is none, or it cannot be written, a temporary one that is deleted at the end.

    Args:
        directory: None takes the default.
        limit: bytes of the files of all indexes; beyond it the least recently used are deleted.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, limit: int = MAX_CACHE_NBYTES) -> None:
        given = Path(directory) if directory is not None else cache_directory()
        wanted = given.absolute() if given is not None else None
        self.directory = self._usable(wanted / f"dashboard-{VERSION}" if wanted is not None else None)
        self.shared = wanted if wanted is not None and wanted == self.directory.parent else self.directory
        """The directory that `treeckpt verify` uses, too."""
        self.verifications = VerificationStore(self.shared)
        """What verifications found, here or by `treeckpt verify`."""
        self.statistics = StatisticsStore(self.shared)
        """The statistics of arrays that verifications computed."""
        self.changes = ChangeStore(self.shared)
        """By how much arrays of two saves differ."""
        self._limit = limit
        self._lock = threading.Lock()
        self._memory = LruStatCache(200_000)
        self._path = self.directory / "summaries.db"
        self._connection: sqlite3.Connection | None = None
        self._unwritten: list[tuple[str, bytes]] = []

    def _usable(self, directory: Path | None) -> Path:
        with contextlib.suppress(OSError):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                # A directory may exist that cannot be written to: only a file shows that.
                with tempfile.TemporaryFile(dir=directory):
                    return directory
        temporary = tempfile.mkdtemp(prefix="treeckpt-dashboard-")
        weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary)

    # files of indexes -----------------------------------------------------------------------------------------

    def outline_path(self, key: str) -> Path:
        """Returns the path of the file of a key, which need not exist, and marks it as used now."""
        path = self.directory / f"{key}.outline"
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def tidy(self) -> None:
        """Deletes the least recently used files of indexes until all of them are within the limit."""
        files: list[tuple[float, int, Path]] = []
        for path in self.directory.glob("*.outline"):
            with contextlib.suppress(OSError):
                at = path.stat()
                files.append((at.st_mtime, at.st_size, path))
        over = sum(nbytes for _, nbytes, _ in files) - self._limit
        for _, nbytes, path in sorted(files):
            if over <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            over -= nbytes

    # summaries ------------------------------------------------------------------------------------------------

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        """Returns `read()`, or its result from before, also of an earlier program. Errors are kept in memory only."""
        if not tells_versions(entry):
            return read()
        return self._memory.get_or_read(key, entry, lambda: self._recall_stored(key, entry, read))

    def _recall_stored(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        digest = key_of("\0".join(key), entry)
        query = "SELECT data FROM summary WHERE key = ?"
        row = self._transact(lambda database: database.execute(query, (digest,)).fetchone())
        if row:
            with contextlib.suppress(msgspec.MsgspecError):
                return _DECODERS[key[1]].decode(row[0])
        result = read()
        with self._lock:
            stored = encodable(result) if isinstance(result, Summary) else result
            self._unwritten.append((digest, msgspec.json.encode(stored)))
        if len(self._unwritten) >= BATCH:
            self.flush()
        return result

    def flush(self) -> None:
        """Writes the summaries that are not written yet."""
        with self._lock:
            rows, self._unwritten = self._unwritten, []
        if rows:
            self._transact(lambda database: database.executemany("INSERT OR REPLACE INTO summary VALUES (?, ?)", rows))

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Runs a transaction; None if it failed. A damaged database is deleted: it only saves time."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _open(self._path)
                with self._connection:
                    return work(self._connection)
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    if self._connection is not None:
                        self._connection.close()
                if not isinstance(error, sqlite3.OperationalError):  # this one means: busy, full or out of reach
                    with contextlib.suppress(OSError):
                        self._path.unlink(missing_ok=True)
                self._connection = None
                return None

    def close(self) -> None:
        """Writes the summaries that are not written yet, and closes the database."""
        self.flush()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


def _open(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_SUMMARIES:
            path.unlink()
    # Requests run in several threads, and `Cache._lock` lets one at a time use it.
    connection = sqlite3.connect(path, check_same_thread=False, timeout=2)
    connection.execute("PRAGMA journal_mode = WAL")
    # What a power failure takes away or damages is computed again.
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("CREATE TABLE IF NOT EXISTS summary (key TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID")
    return connection
