"""Keeps what was read from files as long as they do not change.

A file counts as changed by what the store says of it, as its listing has it: no file is opened to find out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .._io.storage.store import DirectoryEntry
from ..errors import StoreError, TreeckptError

T = TypeVar("T")


class StatCache(Protocol):
    """A cache of results read from files, which are valid until the file changes."""

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        """Returns the cached result or raises the cached error; calls `read` if there is none, or the file has changed.

        Args:
            entry: the file that `read` reads, as it is now.
        """
        ...


class LruStatCache:
    """A cache in memory; a file counts as changed if its inode, modification time or size differs.

    Args:
        entries: the least recently used is dropped beyond this number.
    """

    def __init__(self, entries: int = 4096) -> None:
        self._entries = entries
        self._found: OrderedDict[tuple[str, str], tuple[tuple[int, ...], Any]] = OrderedDict()
        self._lock = threading.RLock()

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        """Returns the cached result or error, or calls `read`; a `StoreError` is raised and not cached.

        Nothing is cached of a file of which the store knows neither a time nor a number.
        """
        if not entry.modified_ns and not entry.number:
            return read()
        stamp = (entry.modified_ns, entry.nbytes, entry.number)
        with self._lock:
            kept = self._found.get(key)
            if kept is not None and kept[0] == stamp:
                self._found.move_to_end(key)
                return _result(kept[1])
        try:
            # Without the lock, so that several threads read at a time.
            result: T | TreeckptError = read()
        except StoreError:
            raise
        except TreeckptError as error:
            result = error
        with self._lock:
            self._found[key] = (stamp, result)
            while len(self._found) > self._entries:
                self._found.popitem(last=False)
        return _result(result)


def _result(kept: Any) -> Any:
    if isinstance(kept, TreeckptError):
        # It is raised again for each caller: each time its traceback would grow, and keep the frames of the one before.
        raise kept.with_traceback(None)
    return kept
