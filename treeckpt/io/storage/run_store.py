"""The directory of a run, with a directory for each checkpoint (`object_store` has it for objects).

A `Folder` is the directory of one checkpoint: it holds the store of the checkpoint's files, and adds modification times
and entries that are not regular files. Retention and the catalog use it alone. A link in place of a step's directory is
followed only with `follow_links`, or if the caller requests it; of links to files see `LocalStore`.
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

from ..os_errors import shows_damage, wrap_read_error
from .local_write import sync_directory
from .store import DirectoryEntry, LocalStore, Store


class Folder:
    """One directory of a run. This one knows only its store: no modification times, so all files count as new."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url
        """Its name in messages; a path if it has one."""
        self.name = store.url.rstrip("/").rpartition("/")[2]

    has_directory = True
    """Whether there is a directory of its own, which stays without files."""

    follow_links = False
    """Whether links are followed wherever they lead."""

    @property
    def is_link(self) -> bool:
        return False

    def modified_ns(self) -> int | None:
        """Returns when an entry was last added or removed; None if there is no such directory."""
        return time.time_ns()

    def entries(self) -> dict[str, DirectoryEntry]:
        """Returns all entries by name; empty if there is no such directory."""
        now = time.time_ns()
        return {name: DirectoryEntry(nbytes, now) for name, nbytes in self.store.sizes().items()}

    def entry(self, name: str) -> DirectoryEntry | None:
        """Returns one entry, None if there is none of that name."""
        return self.entries().get(name)

    def listed(self) -> Folder:
        """Returns the folder as it is now. A remote one has its entries: asking it for them sends no more requests."""
        return self

    def sync(self) -> None:
        """Makes deletions durable, where they are not; a file that is back after a power loss is a leftover again."""

    def remove(self) -> bool:
        """Removes the directory if it is empty, durably; returns whether it is gone."""
        return False

    def remove_link(self) -> None:
        """Removes the link to the directory, durably; the directory stays."""


class RunStore(Protocol):
    """The directory of a run."""

    @property
    def url(self) -> str: ...

    def names(self) -> list[str]:
        """Returns the names of its directories, links to directories included, hidden ones excluded."""
        ...

    def folder(self, name: str) -> Folder:
        """Returns the folder of that name, whether or not it exists."""
        ...


@runtime_checkable
class SupportsBulkListing(Protocol):
    """A remote run: its folders are listed together, and several are read at a time."""

    def folders(self) -> Sequence[Folder]:
        """Returns all folders with their present content."""
        ...


def all_folders(run: RunStore) -> Sequence[Folder]:
    """Returns all folders of a run."""
    return run.folders() if isinstance(run, SupportsBulkListing) else [run.folder(name) for name in run.names()]


def modified_times(run: RunStore) -> dict[str, int | None]:
    """Returns when each folder of a run was last changed, by name; see `Folder.modified_ns`."""
    if isinstance(run, LocalRun):
        return run.modified_times()
    return {folder.name: folder.modified_ns() for folder in all_folders(run)}


def linked_names(run: RunStore) -> list[str]:
    """Returns the names of the symbolic links in a local run; raises StoreError if it could not be read."""
    return run.linked_names() if isinstance(run, LocalRun) else []


class LocalFolder(Folder):
    """A directory of a local (or mounted) file system."""

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        self.path = Path(path)
        self._local = LocalStore(self.path, follow_links=follow_links)
        self.follow_links = self._local.follow_links
        super().__init__(self._local)
        self.name, self.url = self.path.name or str(self.path), str(self.path)

    @property
    def is_link(self) -> bool:
        return self.path.is_symlink()

    def modified_ns(self) -> int | None:
        try:
            found = self.path.stat()
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, self.url) from error
            return None
        return found.st_mtime_ns if stat.S_ISDIR(found.st_mode) else None

    def remove_link(self) -> None:
        os.unlink(self.path)
        sync_directory(self.path.parent)

    def entries(self) -> dict[str, DirectoryEntry]:
        found: dict[str, DirectoryEntry] = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process may be deleting
                        found[entry.name] = self._entry(entry.name, entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise wrap_read_error(error, self.url) from error
        return found

    def sync(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            sync_directory(self.path)

    def entry(self, name: str) -> DirectoryEntry | None:
        try:
            return self._entry(name, (self.path / name).lstat())
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, f"{self.url}/{name}") from error
            return None

    def _entry(self, name: str, found: os.stat_result) -> DirectoryEntry:
        link, modified_ns = stat.S_ISLNK(found.st_mode), found.st_mtime_ns
        if link and (linked := self._local.linked_stat(name)) is not None:
            found, modified_ns = linked, max(modified_ns, linked.st_mtime_ns)
        return DirectoryEntry(found.st_size, modified_ns, found.st_ino, stat.S_ISREG(found.st_mode), link)

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
    """A run in a local directory. The path is absolute, so it survives a change of the working directory."""

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        self.path = Path(path).absolute()
        self.url = str(self.path)
        self.follow_links = follow_links

    def _names(self, chosen: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        """Returns the names of the entries that are chosen; none if there is no such directory.

        Raises:
            StoreError: it could not be read. Taken for an empty run, the caller would start training from scratch.
        """
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if chosen(entry))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise wrap_read_error(error, self.url) from error

    def names(self) -> list[str]:
        return self._names(lambda entry: not entry.name.startswith(".") and entry.is_dir())

    def linked_names(self) -> list[str]:
        """Returns the names of the symbolic links in it, also of those that lead nowhere."""
        return self._names(lambda entry: entry.is_symlink())

    def modified_times(self) -> dict[str, int | None]:
        """Returns when each checkpoint was last changed, by name; takes a few microseconds for each.

        Raises:
            StoreError: as `names`.
        """
        found: dict[str, int | None] = {}

        def is_listed(entry: os.DirEntry[str]) -> bool:
            try:
                at = entry.stat()
            except OSError as error:  # another process may be deleting, a link may lead nowhere
                if not shows_damage(error):
                    raise
                return False
            listed = stat.S_ISDIR(at.st_mode) or self.is_checkpoint_file(entry, at)
            found[entry.name] = at.st_mtime_ns
            return listed

        names = self._names(lambda entry: not entry.name.startswith(".") and is_listed(entry))
        return {name: found[name] for name in names}

    def is_checkpoint_file(self, entry: os.DirEntry[str], at: os.stat_result) -> bool:
        """Whether an entry that is no directory is listed as a checkpoint too."""
        return False

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name, follow_links=self.follow_links)
