"""The directory of a run, with a directory for each checkpoint (`object_store` has it for objects).

A link in place of a step's directory is followed only with `follow_links`, or if the caller requests it; of links to
files see `LocalStore`.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from ..os_errors import shows_damage, wrap_read_error
from .store import LocalStore, Store, StoreTraits


class RunStore(ABC):
    """The directory of a run: each checkpoint is a `Store` in it, by name."""

    @property
    def traits(self) -> StoreTraits:
        """As those of a store: whether the run is `far`, and its `local_path`."""
        return StoreTraits()

    @property
    @abstractmethod
    def url(self) -> str:
        """Its path or URL."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of its directories, links to directories included, hidden ones excluded."""

    @abstractmethod
    def folder(self, name: str) -> Store:
        """Returns the store of the directory of that name, whether or not it exists."""

    def folders(self) -> Sequence[Store]:
        """Returns the stores of all directories; those of a run that is `far` as they are now, see `Store.listed`."""
        return [self.folder(name) for name in self.names()]

    def modified_times(self) -> dict[str, int | None]:
        """Returns when each directory was last changed, by name; see `Store.modified_ns`."""
        return {folder.name: folder.modified_ns() for folder in self.folders()}

    def holds(self, name: str) -> bool:
        """Whether a file of this name lies in the run's own directory."""
        return False

    def linked_names(self) -> list[str]:
        """Returns the names of the symbolic links in it, also of those that lead nowhere.

        Raises:
            StoreError: it could not be read.
        """
        return []


class LocalRun(RunStore):
    """A run in a local directory. The path is absolute, so it survives a change of the working directory."""

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        self.path = Path(path).absolute()
        self.follow_links = follow_links

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(local_path=self.path)

    @property
    def url(self) -> str:
        return str(self.path)

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

    def holds(self, name: str) -> bool:
        return (self.path / name).is_file()

    def linked_names(self) -> list[str]:
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

    def folder(self, name: str) -> LocalStore:
        return LocalStore(self.path / name, follow_links=self.follow_links)
