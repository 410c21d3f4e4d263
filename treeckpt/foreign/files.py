"""Byte ranges of foreign files.

Sizes in a file are not trusted: a range that is not within its file is an error before memory is allocated for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..core.format.index import INDEX_NAME
from ..core.format.shard_header import parse_shard_name
from ..errors import CheckpointNotFound, CorruptError
from ..io.os_errors import shows_damage, wrap_read_error
from ..io.storage.foreign_formats import HEAD, PADDLE_METADATA, format_of_head, format_of_names
from ..io.storage.local_read import LocalReader, read_head
from ..io.storage.open import local_directory, open_store
from ..io.storage.store import DirectoryEntry, LocalStore, Store, StoreTraits

ReadComputed = Callable[[int, memoryview], object]
"""Fills memory with bytes of an array that is in no file as such, from an offset on."""


class FileRange(msgspec.Struct, frozen=True):
    """A byte range of a file."""

    store: Store
    name: str
    start: int
    size: int
    """Bytes."""

    @property
    def label(self) -> str:
        """The URL of the file, for errors."""
        return f"{self.store.url}/{self.name}"

    def within(self, start: int, size: int) -> FileRange:
        """Returns a part of this range.

        Raises:
            CorruptError: it is not inside.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise CorruptError(
                self.label,
                expected=f"a range of {size} bytes from {start} on",
                found=f"{self.size} bytes in all",
                hint="The file is damaged, was cut short, or lies; get it anew from where it was written",
            )
        return FileRange(self.store, self.name, self.start + start, size)

    def read(self, start: int, size: int) -> np.ndarray:
        """Returns bytes of it, as uint8[size]."""
        inner = self.within(start, size)
        data = np.empty(size, np.uint8)
        inner.read_into(0, data)
        return data

    def read_into(self, start: int, out: np.ndarray, *, shared: bool = False) -> None:
        """Fills a uint8 array with bytes of it; `shared` as in `Store.read_into`."""
        inner = self.within(start, len(out))
        if len(out):
            self.store.read_into(self.name, inner.start, out.data, shared=shared)


def file_window(path: str | os.PathLike[str]) -> FileRange:
    """Returns a whole local file.

    Raises:
        CheckpointNotFound: there is none.
    """
    file = Path(path).absolute()
    only = "" if PADDLE_METADATA.fullmatch(file.name) else file.name  # Paddle's names files beside it
    return store_window(ForeignStore(file.parent, only), file.name)


class ForeignStore(LocalStore):
    """A directory of another program; links are followed, because the cache of Hugging Face consists of them.

    Args:
        only: the one file that is meant, if it is not the whole directory.
    """

    def __init__(self, directory: str | os.PathLike[str], only: str = "") -> None:
        super().__init__(directory)
        self.only = only
        self._places: dict[str, str] = {}
        self.computed: dict[str, ReadComputed] = {}
        """Arrays that are read as if they were files, by a name that no file has: odd strides, values in a pickle."""

    @property
    def traits(self) -> StoreTraits:
        """As those of a directory, but for its path, which would lead around `computed`."""
        return msgspec.structs.replace(super().traits, local_path=None)

    def scan(self) -> dict[str, DirectoryEntry]:
        try:
            paths = [self.directory / self.only] if self.only else self.directory.iterdir()
            found = {path.name: path.stat() for path in paths if path.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {name: DirectoryEntry(at.st_size, at.st_mtime_ns, at.st_ino) for name, at in found.items()}

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        if name in self.computed:
            self.computed[name](offset, out)
        else:
            super().read_into(name, offset, out, shared=shared)

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        return name not in self.computed and super().read_parts(name, offset, parts, shared=shared)

    @contextlib.contextmanager
    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> Iterator[memoryview | None]:
        if name in self.computed:
            yield None
            return
        with super().mapped(name, offset, nbytes, fetch=fetch) as memory:
            yield memory

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        if name not in self.computed:
            return super().map(self._resolved(name), offset, nbytes)
        data = memoryview(bytearray(nbytes))
        self.computed[name](offset, data)
        return data

    def modified_ns(self) -> int:
        """Returns the time at which the newest file was changed, in nanoseconds; 0 if there is none."""
        return max((entry.modified_ns for entry in self.scan().values()), default=0)

    def read(self, name: str, *, limit: int) -> bytes:
        return super().read(self._resolved(name), limit=limit)

    def _reader(self, name: str) -> AbstractContextManager[LocalReader]:
        return super()._reader(self._resolved(name))

    def _resolved(self, name: str) -> str:
        if name not in self._places:  # links are followed once: it takes several requests to the file system
            self._places[name] = str((self.directory / name).resolve())
        return self._places[name]


def open_foreign(path: str | os.PathLike[str] | Store) -> Store:
    """Returns the store of a directory of another program."""
    store = open_store(path)
    return store if (place := store.traits.local_path) is None else ForeignStore(place)


def store_window(store: Store, name: str, sizes: dict[str, int] | None = None) -> FileRange:
    """Returns a whole file of a store.

    Raises:
        CheckpointNotFound: there is none.
    """
    size = (sizes if sizes is not None else store.sizes()).get(name)
    if size is None:
        raise CheckpointNotFound(f"{store.url}/{name}", expected="a file", found="none", hint="Check the path")
    return FileRange(store, name, 0, size)


def foreign_at(path: Any) -> FileRange | ForeignStore | None:
    """Returns the source at a local path, or in a local store, that another program wrote; None for anything else.

    Raises:
        StoreError: it could not be read, so that this is not known.
    """
    if (place := local_directory(path)) is None:
        return None
    try:
        if place.is_file():
            known = format_of_head(place.name, read_head(place, HEAD))
            return None if known in (None, "pickle") else file_window(place)
        if (place / INDEX_NAME).exists():
            return None
        names = [entry.name for entry in place.iterdir()]
    except (ValueError, CorruptError):  # what is wrong with the path is said where a checkpoint is expected
        return None
    except OSError as error:
        if not shows_damage(error):
            raise wrap_read_error(error, str(place)) from error
        return None
    known = format_of_names(names) is not None and not any(map(parse_shard_name, names))
    return ForeignStore(place) if known else None
