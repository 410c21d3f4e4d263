"""Reads indexes into tables: small ones in the server, others in another process, which reports its progress.

A large index takes seconds and most of a gigabyte to decode, and the files of other programs hold pickles, with which
one that means harm could keep the interpreter's lock. In another process they neither block the server nor stay in its
memory; pages show the progress meanwhile. One such process runs at a time, for `TIMEOUT` seconds at most, and of
another program's files for `FOREIGN_SECONDS` of computing, with `MEMORY` bytes of memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from treeckpt import errors
from treeckpt.core.format.index import INDEX_NAME
from treeckpt.core.format.records import Index
from treeckpt.errors import CorruptError, StoreError, TreeckptError
from treeckpt.foreign.files import foreign_at
from treeckpt.io.os_errors import shows_damage
from treeckpt.io.storage import metadata_files
from treeckpt.io.storage.open import open_run
from treeckpt.io.storage.store import DirectoryEntry, LocalStore, Store
from treeckpt.threads import start_thread

from .cache import Cache, key_of
from .index_table import build_table
from .stored_index import StoredOutline

LARGE = 1 << 20
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
WAIT = 1.0
"""Seconds for which a request waits for the process: most files are read by then, and their page needs no other."""
MAX_OPEN = 8
"""Tables that stay open."""


class ReadProgress(msgspec.Struct, frozen=True):
    """Progress of the first read of a large index."""

    phase: str
    done: int
    total: int
    share: float | None
    """From 0 to 1; None if it is not known."""
    seconds: float


class StillReading(Exception):
    """The index of the folder `url` is being read; the client requests again later."""

    def __init__(self, url: str, progress: ReadProgress) -> None:
        self.url, self.progress = url, progress
        super().__init__("The index is still being read.")


class _Failure(msgspec.Struct, tag="error"):
    """An error, as the reading process prints it."""

    kind: str
    path: str
    expected: str
    found: str
    hint: str


class _Progress(msgspec.Struct, tag="progress"):
    """How far the reading process is, as it prints it."""

    phase: str
    done: int
    total: int


_MESSAGE = msgspec.json.Decoder(_Failure | _Progress)
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from treeckpt_dashboard.store.index_reader import main
sys.exit(main(sys.argv[2:]))
"""


class _ReadProcess:
    """A process that reads one index."""

    def __init__(self, run: str, name: str, key: str, target: Path) -> None:
        self.key, self.error, self.done = key, None, threading.Event()
        self._started, self._progress = time.monotonic(), _Progress("wait", 0, 0)
        self._arguments = [run, name, str(target)]
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self.error = self._run()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread for the timer
            self.error = _unreadable(self._arguments[1], f"{error}")

    def _run(self) -> TreeckptError | None:
        self._progress = _Progress("start", 0, 0)
        command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), *self._arguments]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            self._process = process
            assert process.stdout is not None, "it is a pipe"
            timer = threading.Timer(TIMEOUT, process.kill)
            timer.daemon = True
            failure: TreeckptError | None = None
            try:
                timer.start()
                for line in process.stdout:
                    with contextlib.suppress(msgspec.MsgspecError):
                        message = _MESSAGE.decode(line)
                        if isinstance(message, _Failure):
                            kind = getattr(errors, message.kind, CorruptError)
                            failure = kind(
                                message.path, expected=message.expected, found=message.found, hint=message.hint
                            )
                        else:
                            self._progress = message
                code = process.wait()
            except BaseException:
                process.kill()
                raise
            finally:
                timer.cancel()
        if failure or not code:
            return failure
        killed = "the reader was killed: it takes more time than it may, or more memory than there is"
        return _unreadable(self._arguments[1], killed if code in (-9, 137, -24) else f"the reader ended with {code}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    @property
    def progress(self) -> ReadProgress:
        at = self._progress
        share = at.done / at.total if at.phase == "write" and at.total else None
        return ReadProgress(at.phase, at.done, at.total, share, time.monotonic() - self._started)


def _unreadable(name: str, found: str) -> TreeckptError:
    hint = "It says nothing of the checkpoint: treeckpt show has no such limits, if you trust where it is from"
    return StoreError(name, expected="a tree that can be read within the limits of this page", found=found, hint=hint)


def place_for_process(run: str, folder: Store) -> tuple[str, str] | None:
    """Returns how another process opens a folder; None where only this process can.

    Args:
        run: the URL of the folder's run; empty for a local run.

    Returns:
        The URL of the run and the name of the folder in it; without a URL the path of the folder.
    """
    if folder.traits.local_path is not None:
        return "", folder.place
    return (run, folder.name) if "://" in run and not run.startswith("memory://") else None


class IndexReader:
    """The tables of the indexes of folders; a table that does not exist yet is built."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._building, self._reading = threading.Lock(), threading.Lock()
        """Held while a small index is read here, or a large one by a process: small ones do not wait for large ones."""
        self._opened: OrderedDict[str, StoredOutline] = OrderedDict()
        """Tables by key, the last used one last."""
        self._failed: OrderedDict[str, tuple[TreeckptError, float]] = OrderedDict()
        """Errors by key, and until when they hold, by the monotonic clock: damage as long as the file is the same."""
        self._processes: dict[str, _ReadProcess] = {}

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
        key = key_of(folder.place, entry)
        if (found := self._known(key)) is not None:
            return found
        if entry.nbytes > MAX_INDEX:
            found = f"{entry.nbytes} bytes"
            raise CorruptError(folder.place, expected=f"an index of at most {MAX_INDEX} bytes", found=found)
        if is_large(entry) and (place := place_for_process(run, folder)) is not None:
            raise StillReading(folder.place, self._process(key, *place).progress)
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
        if (found := self._known(key)) is not None:
            return found
        process = self._process(key, "", path)
        process.done.wait(WAIT)
        if (found := self._known(key)) is None:
            raise StillReading(path, process.progress)
        return found

    def _known(self, key: str) -> StoredOutline | None:
        """Returns the table of a key, if there is one; raises the error of the last read, if that failed."""
        with self._lock:
            if key in self._opened:
                self._opened.move_to_end(key)
                return self._opened[key]
            error, until = self._failed.pop(key, (None, 0.0))
            if error is not None and until > time.monotonic():
                self._failed[key] = error, until
                raise error.with_traceback(None)
        return self._open_table(key)

    def _open_table(self, key: str) -> StoredOutline | None:
        path = self._cache.table(key)
        if not path.exists():
            return None
        try:
            outline = StoredOutline(path)
        except (sqlite3.Error, msgspec.MsgspecError, TypeError):  # damaged, or written by another version
            path.unlink(missing_ok=True)
            return None
        with self._lock:
            self._opened[key] = outline
            while len(self._opened) > MAX_OPEN:
                self._opened.popitem(last=False)
        return outline

    def _build(self, key: str, folder: Store) -> StoredOutline:
        with self._building:
            if (found := self._open_table(key)) is None:
                try:
                    build_table(metadata_files.read_index(folder), self._cache.table(key))
                except TreeckptError as error:
                    self._fail(key, error)
                    raise
                self._cache.tidy()
                found = self._open_table(key)
        assert found is not None, "it was built now"
        return found

    def _fail(self, key: str, error: TreeckptError) -> None:
        until = math.inf if shows_damage(error) else time.monotonic() + RETRY
        with self._lock:
            self._failed[key] = error, until
            while len(self._failed) > 1000:
                self._failed.popitem(last=False)

    def _process(self, key: str, run: str, name: str) -> _ReadProcess:
        with self._lock:
            process = self._processes.get(key)
            if process is None:
                process = _ReadProcess(run, name, key, self._cache.table(key))
                if start_thread(partial(self._run, process), "treeckpt-index") is None:
                    raise _unreadable(name, "no thread could be started to read it")
                self._processes[key] = process
            return process

    def _run(self, process: _ReadProcess) -> None:
        try:
            with self._reading:
                process.run()
            if process.error is not None:
                self._fail(process.key, process.error)
            self._cache.tidy()
        finally:
            with self._lock:
                self._processes.pop(process.key, None)
            process.done.set()

    def close(self) -> None:
        """Kills the processes that read indexes."""
        with self._lock:
            for process in self._processes.values():
                process.kill()


def is_large(entry: DirectoryEntry) -> bool:
    """Whether an index is decoded by another process."""
    return entry.nbytes >= LARGE


def _line(message: _Progress | _Failure) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _send(message: _Progress | _Failure) -> None:
    os.write(1, _line(message))


def _limit() -> None:
    """Limits the memory and the time of this process, where the system can."""
    try:
        import resource
    except ImportError:  # on Windows
        return
    statm = Path("/proc/self/statm")
    held = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = held + MEMORY if hard == resource.RLIM_INFINITY else min(held + MEMORY, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (FOREIGN_SECONDS, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _read(run: str, name: str) -> Index:
    if not run and foreign_at(name) is not None:
        from treeckpt.foreign.foreign_checkpoint import ForeignCheckpoint  # not for the start of the server
        from treeckpt.foreign.foreign_index import with_found_chunks

        _limit()
        _send(_Progress("read", 0, 0))
        source = foreign_at(name)
        assert source is not None, "it was there just now"
        index: Any = ForeignCheckpoint(source).index
        return with_found_chunks(index)
    folder = open_run(run).folder(name) if run else LocalStore(name)
    _send(_Progress("read", 0, folder.entries()[INDEX_NAME].nbytes))
    return metadata_files.read_index(folder)


def main(arguments: Sequence[str]) -> int:
    """Reads an index into a table; this is what the other process runs. It prints one JSON message per line.

    Args:
        arguments: the URL of a run, the name of a folder in it, and the path of the table to write; for a local
            folder, or files of another program, the URL is empty and the name is the path.
    """
    run, name, target = arguments
    limit = _unreadable(name, f"one that takes more than {MEMORY >> 20} MiB of memory")
    too_large = _line(_Failure("StoreError", name, limit.expected, limit.found, limit.hint))  # while there is memory
    gc.disable()  # millions of objects are created, and none is garbage
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which kills this process

    try:
        build_table(_read(run, name), Path(target), lambda done, total: _send(_Progress("write", done, total)))
    except TreeckptError as error:
        _send(_Failure(type(error).__name__, error.path, error.expected, error.found, error.hint))
    except ModuleNotFoundError as error:  # pickles of torch hold some values that only torch has
        found = "no such package in this environment"
        _send(_Failure("FormatError", name, f"the package {error.name}, which made it", found, "Install it"))
    except MemoryError:
        os.write(1, too_large)
    except (OSError, sqlite3.Error, KeyError) as error:
        failed = _unreadable(name, f"{type(error).__name__}: {error}"[:300])
        _send(_Failure("StoreError", name, failed.expected, failed.found, failed.hint))
    return 0
