"""Where a run's checkpoints live: a directory of directories, local or in memory; or objects, see `objects`.

A folder is one of those directories: it gives the store of its files, and what a store does not need to know: times,
and what is no regular file. Retention and the catalog go through this protocol alone. Links are told apart and never
followed unless the caller asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from ..os_errors import wrap_read_error
from .local_write import sync_directory
from .store import LocalStore, MemoryStore, Store, Writer

__all__ = [
    "Entry",
    "Folder",
    "LocalFolder",
    "LocalRun",
    "MemoryRun",
    "Remote",
    "RunStore",
    "changes_of",
    "folders_of",
]


class Entry(msgspec.Struct, frozen=True):
    """One name in a folder."""

    nbytes: int
    modified_ns: int
    """Unix time of the last write, by the clock of whoever holds the files."""
    number: int = 0
    """Changes when another file takes the name."""
    regular: bool = True
    """Whether it is a file, not a directory, a link, a pipe or the like."""


class Folder(Protocol):
    """One directory of a run."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str:
        """What to call it in messages; a path where there is one."""
        ...

    @property
    def store(self) -> Store: ...

    @property
    def is_link(self) -> bool: ...

    def modified_ns(self) -> int | None:
        """When a name was last added or removed; None where there is no such directory."""
        ...

    def entries(self) -> dict[str, Entry]:
        """Everything in it; empty where it cannot be listed."""
        ...

    def entry(self, name: str) -> Entry | None:
        """One name in it, None where there is no such file."""
        ...

    def sync(self) -> None:
        """Makes deletions durable."""
        ...

    def remove(self) -> bool:
        """Removes the directory if it is empty, durably; says whether it is gone."""
        ...


class RunStore(Protocol):
    """A directory of folders."""

    @property
    def url(self) -> str: ...

    def names(self) -> list[str]:
        """Of the directories in it, links to directories too; without hidden ones. Empty where it cannot be listed."""
        ...

    def folder(self, name: str) -> Folder:
        """The folder of that name, whether or not it is there."""
        ...


@runtime_checkable
class Remote(Protocol):
    """A run whose folders are far away: they are listed together, and several are looked at at a time."""

    def folders(self) -> Sequence[Folder]:
        """The folders of all names, with what is in them now."""
        ...


def folders_of(run: RunStore) -> Sequence[Folder]:
    """The folders of all names of a run."""
    return run.folders() if isinstance(run, Remote) else [run.folder(name) for name in run.names()]


def changes_of(run: RunStore) -> dict[str, int | None]:
    """When each folder of a run was last changed, by name; see `Folder.modified_ns`."""
    if isinstance(run, LocalRun):
        return run.changes()
    return {folder.name: folder.modified_ns() for folder in folders_of(run)}


def _entry(found: os.stat_result) -> Entry:
    return Entry(found.st_size, found.st_mtime_ns, found.st_ino, stat.S_ISREG(found.st_mode))


class LocalFolder:
    """A directory of a local (or mounted) file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name or str(self.path)
        self.url = str(self.path)
        self.store = LocalStore(self.path)

    @property
    def is_link(self) -> bool:
        return self.path.is_symlink()

    def modified_ns(self) -> int | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns if stat.S_ISDIR(found.st_mode) else None

    def entries(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process may be deleting
                        found[entry.name] = _entry(entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise wrap_read_error(error, self.url) from error
        return found

    def sync(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            sync_directory(self.path)

    def entry(self, name: str) -> Entry | None:
        try:
            return _entry((self.path / name).lstat())
        except OSError:
            return None

    def remove(self) -> bool:
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync_directory(self.path.parent)
        return True


class LocalRun:
    """A directory of checkpoint directories. It stays where it was when the process moves to another one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.url = str(self.path)

    def names(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # not as if there were nothing: whoever asks would start anew
            raise wrap_read_error(error, self.url) from error

    def changes(self) -> dict[str, int | None]:
        """When each directory was last changed, by name: a few microseconds for each."""
        found: dict[str, int | None] = {}
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                try:
                    at = entry.stat()
                except OSError:  # another process may be deleting, a link may lead nowhere
                    continue
                if stat.S_ISDIR(at.st_mode) and not entry.name.startswith("."):
                    found[entry.name] = at.st_mtime_ns
        return found

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)


class _TimedStore(MemoryStore):
    """Files in memory that know when they were written."""

    def __init__(self, name: str, clock: Callable[[], int]) -> None:
        super().__init__(name)
        self.clock, self.times = clock, dict[str, int]()
        self.changed_ns: int | None = None

    def prepare(self) -> None:
        self.changed_ns = self.changed_ns or self.clock()

    def create(self, name: str, nbytes: int) -> Writer:
        writer = super().create(name, nbytes)
        self.times[name] = self.changed_ns = self.clock()
        return writer

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        super().publish(name, data, replace=replace)
        self.times[name] = self.changed_ns = self.clock()

    def delete(self, name: str) -> None:
        super().delete(name)
        self.changed_ns = self.clock()


class _MemoryFolder:
    """A store of a `MemoryRun`."""

    is_link = False

    def __init__(self, run: MemoryRun, name: str) -> None:
        self._run, self.name, self.url = run, name, f"{run.url}/{name}"
        self.store = run.stores.setdefault(name, _TimedStore(f"{run.url.partition('://')[2]}/{name}", run.clock))

    def modified_ns(self) -> int | None:
        return self.store.changed_ns

    def entries(self) -> dict[str, Entry]:
        sizes, times = self.store.sizes(), self.store.times
        return {name: Entry(nbytes, times[name], times[name]) for name, nbytes in sizes.items()}

    def entry(self, name: str) -> Entry | None:
        return self.entries().get(name)

    def sync(self) -> None:
        pass

    def remove(self) -> bool:
        if self.store.files:
            return False
        self._run.stores.pop(self.name, None)
        return True


class MemoryRun:
    """A run in this process's memory: for tests, and for checkpoints that never need a disk."""

    def __init__(self, name: str = "run", *, clock: Callable[[], int] = time.time_ns) -> None:
        self.url, self.clock = f"memory://{name}", clock
        self.stores: dict[str, _TimedStore] = {}

    def names(self) -> list[str]:
        return sorted(name for name, store in self.stores.items() if store.changed_ns is not None)

    def folder(self, name: str) -> _MemoryFolder:
        return _MemoryFolder(self, name)
