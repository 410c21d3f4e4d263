"""The files of a checkpoint as a reader from outside gets them, and what it returns as those of this package do."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .._arrays.base import LazyArray
from .._arrays.registry import adapter_of
from .._core.tree.flatten import flatten
from ..errors import FormatError, TreeckptError
from .files import FileRange, ForeignStore, ForeignTree, store_window


class SourceFiles:
    """The files that a function reads which is registered for a format: see `treeckpt.convert.register`.

    >>> def read(files):
    ...     with files.open(files.names[0]) as file:
    ...         return {"text": file.read().decode()}

    Attributes:
        names: of the files: of the one that is meant, or of all in its directory.
        path: where they are, the path of the one file or of the directory; None where they are in no local directory.
    """

    def __init__(self, store: ForeignStore) -> None:
        self._store = store
        self.names = tuple(sorted(store.sizes()))
        local = store.traits.local_path
        self.path: Path | None = local / store.file if local is not None and store.file else local

    def open(self, name: str) -> BinaryIO:
        """Opens a file to read its bytes, which come from its store when they are asked for.

        Raises:
            CheckpointNotFound: there is none of this name.
        """
        return io.BufferedReader(_StoredFile(store_window(self._store, name)))


class _StoredFile(io.RawIOBase):
    """A file in a store, as a stream of Python."""

    def __init__(self, window: FileRange) -> None:
        self._window, self._position = window, 0
        self.name = window.label

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._window.size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, f"a position before the file: {start + offset}", self.name)
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = np.frombuffer(buffer, np.uint8)
        count = max(0, min(len(out), self._window.size - self._position))
        self._window.read_into(self._position, out[:count])
        self._position += count
        return count


def read_registered(name: str, read: Callable[[SourceFiles], Any], store: ForeignStore) -> ForeignTree:
    """Returns the tree that a function from outside reads.

    Raises:
        FormatError: it raises an error, or returns arrays of another library than numpy.
    """
    try:
        tree = read(SourceFiles(store))
        leaves = flatten(tree)[1]
    except TreeckptError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(store.label, expected=f"a checkpoint of format {name}", found=found) from error
    for path, leaf in leaves:
        if adapter_of(type(leaf)) is not None and type(leaf) not in (np.ndarray, np.memmap, LazyArray):
            raise FormatError(
                f"{path}: {store.label}",
                expected=f"arrays of numpy from the reader of {name}",
                found=f"a {type(leaf).__qualname__}",
            )
    return ForeignTree(tree)
