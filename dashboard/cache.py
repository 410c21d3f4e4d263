"""What the dashboard has worked out before, in files of its own: in the user's cache directory, never inside a run.

Two kinds: a table for each index (`tables`), found by what the file was when it was read, and one database of the
summaries that lists of checkpoints show. Everything here can be deleted at any time and is then made again; a damaged
file is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from treeckpt.io.storage.run_store import DirectoryEntry
from treeckpt.runs.catalog import LruStatCache, SaveDuration, Summary

from .tables import SCHEMA

__all__ = ["Cache", "default_directory", "key_of"]

LIMIT = 8 << 30
"""Bytes of tables that are kept."""
MAX_SUMMARIES = 512 << 20
"""Bytes of the database of summaries past which it is begun anew: those of files that are gone are never looked for."""
BATCH = 256
"""Summaries that are written together."""

T = TypeVar("T")
_TYPES: dict[str, Any] = {"summary": Summary, "took": SaveDuration}


def default_directory() -> Path:
    """Where the cache is if nobody says: $TREECKPT_CACHE, else the platform's place for caches."""
    if given := os.environ.get("TREECKPT_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "treeckpt" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "treeckpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeckpt"


def key_of(url: str, entry: DirectoryEntry) -> str:
    """Names a file as it is now: where it is, its size, its time and its number."""
    text = f"{url}\0{entry.nbytes}\0{entry.modified_ns}\0{entry.number}".encode("utf-8", "surrogateescape")
    return hashlib.blake2s(text, digest_size=16).hexdigest()


class Cache:
    """The directory. Where it cannot be written, one that is gone when the program ends.

    Args:
        directory: None takes the default.
        limit: bytes of tables; the least recently used are deleted beyond it.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, limit: int = LIMIT) -> None:
        wanted = Path(directory) if directory is not None else default_directory()
        self.directory = self._usable(wanted.absolute() / f"dashboard-{SCHEMA}")
        self._limit = limit
        self._lock = threading.Lock()
        self._memory = LruStatCache(200_000)
        self._path = self.directory / "summaries.db"
        self._connection: sqlite3.Connection | None = None
        self._waiting: list[tuple[str, bytes]] = []

    def _usable(self, directory: Path) -> Path:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError:
            temporary = tempfile.mkdtemp(prefix="treeckpt-dashboard-")
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            return Path(temporary)

    # tables ---------------------------------------------------------------------------------------------------

    def table(self, key: str) -> Path:
        """The file of an index, whether or not it is there; one that is counts as used now."""
        path = self.directory / f"{key}.sqlite"
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def tidy(self) -> None:
        """Deletes the tables that were not used for longest, as far as there are too many bytes."""
        found: list[tuple[float, int, Path]] = []
        for path in self.directory.glob("*.sqlite"):
            with contextlib.suppress(OSError):
                at = path.stat()
                found.append((at.st_mtime, at.st_size, path))
        over = sum(nbytes for _, nbytes, _ in found) - self._limit
        for _, nbytes, path in sorted(found):
            if over <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            over -= nbytes

    # summaries ------------------------------------------------------------------------------------------------

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        """`read()`, or its result from before, of this program or an earlier one. Errors are forgotten at its end."""
        return self._memory.get_or_read(key, entry, lambda: self._stored(key, entry, read))

    def _stored(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        digest, kind = _digest(key, entry), _TYPES[key[1]]
        if (data := self._load(digest)) is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(data, type=kind)
        result = read()
        with self._lock:
            self._waiting.append((digest, msgspec.json.encode(result)))
        if len(self._waiting) >= BATCH:
            self.flush()
        return result

    def _load(self, digest: str) -> bytes | None:
        query = "SELECT data FROM summary WHERE key = ?"
        row = self._ask(lambda database: database.execute(query, (digest,)).fetchone())
        return row[0] if row else None

    def flush(self) -> None:
        """Writes what is not written yet."""
        with self._lock:
            rows, self._waiting = self._waiting, []
        if rows:
            self._ask(lambda database: _add(database, rows))

    def _ask(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Works with the database. A damaged one is made anew: it only saves time."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _open(self._path)
                return work(self._connection)
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    if self._connection is not None:
                        self._connection.close()
                if not isinstance(error, sqlite3.OperationalError):  # that one says: busy, full or out of reach
                    with contextlib.suppress(OSError):
                        self._path.unlink(missing_ok=True)
                self._connection = None
                return None

    def close(self) -> None:
        """Writes what is not written yet and lets go of the files."""
        self.flush()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


def _digest(key: tuple[str, str], entry: DirectoryEntry) -> str:
    return key_of("\0".join(key), entry)


def _add(database: sqlite3.Connection, rows: list[tuple[str, bytes]]) -> None:
    with database:
        database.executemany("INSERT OR REPLACE INTO summary VALUES (?, ?)", rows)


def _open(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_SUMMARIES:
            path.unlink()
    connection = sqlite3.connect(path, check_same_thread=False, timeout=2)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("CREATE TABLE IF NOT EXISTS summary (key TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID")
    return connection
