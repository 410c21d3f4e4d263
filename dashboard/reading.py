"""Reads indexes into tables: small ones at once, large ones in a process of their own, with progress to be seen.

A large index takes seconds and most of a gigabyte to decode. In a process of its own it neither blocks the server nor
stays in its memory; a page says how far it is meanwhile. One such process runs at a time, for `PATIENCE` at most.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from treeckpt import errors
from treeckpt.core.format.index import INDEX_NAME
from treeckpt.errors import CorruptError, TreeckptError
from treeckpt.io.storage import metadata_files
from treeckpt.io.storage.open import open_run
from treeckpt.io.storage.run_store import DirectoryEntry, Folder, LocalFolder

from .cache import Cache, key_of
from .stored import StoredOutline
from .tables import build_table

__all__ = ["MAX_INDEX", "Reading", "StillReading", "TableReader", "is_large", "main"]

LARGE = 1 << 20
"""Bytes of an index from which it is read by another process."""
MAX_INDEX = 512 << 20
"""Bytes of an index from which it is not read at all."""
PATIENCE = 300.0
"""Seconds after which a process that reads is ended."""
KEPT = 8
"""Tables that are kept open."""


class Reading(msgspec.Struct, frozen=True):
    """How far the reading of an index is."""

    phase: str
    done: int
    total: int
    seconds: float


class StillReading(Exception):
    """The index of the folder `url` is being read; ask again."""

    def __init__(self, url: str, progress: Reading) -> None:
        self.url, self.progress = url, progress
        super().__init__("The index is still being read.")


class _Failed(msgspec.Struct, tag="error"):
    kind: str
    path: str
    expected: str
    found: str
    hint: str


class _Told(msgspec.Struct, tag="told"):
    phase: str
    done: int
    total: int


_MESSAGE = msgspec.json.Decoder(_Failed | _Told)
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from treeckpt_dashboard.reading import main
sys.exit(main(sys.argv[2:]))
"""


class _Job:
    """One process that reads one index."""

    def __init__(self, run: str, name: str, key: str, target: Path) -> None:
        self.key, self.error, self.done = key, None, threading.Event()
        self._started, self._told = time.monotonic(), _Told("wait", 0, 0)
        self._arguments = [run, name, str(target)]
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self.error = self._run()
        except OSError as error:
            self.error = _broken(self._arguments[1], f"{error}")
        self.done.set()

    def _run(self) -> TreeckptError | None:
        self._told = _Told("start", 0, 0)
        command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), *self._arguments]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            self._process = process
            assert process.stdout is not None, "a pipe was asked for"
            ender = threading.Timer(PATIENCE, process.kill)
            ender.daemon = True
            ender.start()
            failed: TreeckptError | None = None
            try:
                for line in process.stdout:
                    with contextlib.suppress(msgspec.MsgspecError):
                        message = _MESSAGE.decode(line)
                        if isinstance(message, _Failed):
                            failed = _revived(message)
                        else:
                            self._told = message
                code = process.wait()
            finally:
                ender.cancel()
        return failed if failed or not code else _broken(self._arguments[1], _end_text(code))

    def kill(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()

    @property
    def progress(self) -> Reading:
        return Reading(self._told.phase, self._told.done, self._told.total, time.monotonic() - self._started)


def _end_text(code: int) -> str:
    return "the reader was killed, for want of memory or time" if code in (-9, 137) else f"the reader ended with {code}"


def _broken(name: str, found: str) -> TreeckptError:
    return CorruptError(name, expected="an index that can be read here", found=found)


def _revived(failed: _Failed) -> TreeckptError:
    kind = getattr(errors, failed.kind, CorruptError)
    return kind(failed.path, expected=failed.expected, found=failed.found, hint=failed.hint)


class TableReader:
    """Tables of indexes by what is in a folder now."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._building, self._reading = threading.Lock(), threading.Lock()
        """Of small indexes here, and of large ones by processes: the small do not wait for the large."""
        self._open: OrderedDict[str, StoredOutline] = OrderedDict()
        self._failed: OrderedDict[str, TreeckptError] = OrderedDict()
        self._jobs: dict[str, _Job] = {}

    def outline(self, run: str, folder: Folder, entry: DirectoryEntry) -> StoredOutline:
        """The tree of the index in a folder.

        Args:
            run: where the folder is, as `open_run` takes it; empty for a local path of its own.
            entry: the index file, as it is now.

        Raises:
            StillReading: it is large, and read by another process now.
            CheckpointError: it cannot be read.
        """
        key = key_of(folder.url, entry)
        if entry.nbytes > MAX_INDEX:
            found = f"{entry.nbytes} bytes"
            raise CorruptError(folder.url, expected=f"an index of at most {MAX_INDEX} bytes", found=found)
        with self._lock:
            if key in self._open:
                self._open.move_to_end(key)
                return self._open[key]
            if key in self._failed:
                raise self._failed[key].with_traceback(None)
        if (found := self._opened(key)) is not None:
            return found
        if not is_large(entry) or not _is_reachable(folder, run):
            return self._build(key, folder)
        raise StillReading(folder.url, self._job(key, run, folder).progress)

    def _opened(self, key: str) -> StoredOutline | None:
        path = self._cache.table(key)
        if not path.exists():
            return None
        try:
            outline = StoredOutline(path)
        except (sqlite3.Error, msgspec.MsgspecError, TypeError):  # damaged, or of another version
            path.unlink(missing_ok=True)
            return None
        with self._lock:
            self._open[key] = outline
            while len(self._open) > KEPT:
                self._open.popitem(last=False)
        return outline

    def _build(self, key: str, folder: Folder) -> StoredOutline:
        with self._building:
            if (found := self._opened(key)) is None:
                try:
                    build_table(metadata_files.read_index(folder.store), self._cache.table(key))
                except TreeckptError as error:
                    self._fail(key, error)
                    raise
                self._cache.tidy()
                found = self._opened(key)
        assert found is not None, "it was built now"
        return found

    def _fail(self, key: str, error: TreeckptError) -> None:
        with self._lock:
            self._failed[key] = error
            while len(self._failed) > 1000:
                self._failed.popitem(last=False)

    def _job(self, key: str, run: str, folder: Folder) -> _Job:
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                place, name = (run, folder.name) if run else ("", folder.url)
                job = self._jobs[key] = _Job(place, name, key, self._cache.table(key))
                threading.Thread(target=self._run, args=(job,), daemon=True).start()
            return job

    def _run(self, job: _Job) -> None:
        with self._reading:
            job.run()
        if job.error is not None:
            self._fail(job.key, job.error)
        self._cache.tidy()
        with self._lock:
            self._jobs.pop(job.key, None)

    def close(self) -> None:
        """Ends what is being read."""
        with self._lock:
            for job in self._jobs.values():
                job.kill()


def is_large(entry: DirectoryEntry) -> bool:
    """Whether an index is to be decoded by another process."""
    return entry.nbytes >= LARGE


def _is_reachable(folder: Folder, run: str) -> bool:
    """Whether another process can open it by its name."""
    return isinstance(folder, LocalFolder) or ("://" in run and not run.startswith("memory://"))


def main(arguments: Sequence[str]) -> int:
    """The process: reads the index of `run name`, or of a local path `"" path`, into the table `target`."""
    run, name, target = arguments
    gc.disable()  # millions of objects are made, and none is garbage
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process

    def tell(message: _Told | _Failed) -> None:
        os.write(1, msgspec.json.encode(message) + b"\n")

    try:
        folder = open_run(run).folder(name) if run else LocalFolder(name)
        nbytes = folder.entries()[INDEX_NAME].nbytes
        tell(_Told("read", 0, nbytes))
        index = metadata_files.read_index(folder.store)
        build_table(index, Path(target), lambda done, total: tell(_Told("write", done, total)))
    except TreeckptError as error:
        tell(_Failed(type(error).__name__, error.path, error.expected, error.found, error.hint))
    except (OSError, sqlite3.Error, KeyError) as error:
        tell(_Failed("CorruptError", name, "an index that can be read here", f"{error}"[:300], ""))
    return 0
