"""Deletes small files of an object store without having the caller wait for the store's answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

_being_deleted: set[str] = set()
"""To a clean-up these files are gone already."""


def delete_later(name: str, delete: Callable[[], object]) -> None:
    """Calls `delete` in a thread, for which the end of the process waits; here where no thread can be started.

    Args:
        name: of the file that is deleted.
    """

    def call() -> None:
        try:
            delete()
        finally:
            _being_deleted.discard(name)

    _being_deleted.add(name)
    try:
        threading.Thread(target=call, name="treeckpt-delete", daemon=False).start()
    except RuntimeError:  # no thread can be started, as when the interpreter ends
        call()


def names_being_deleted() -> frozenset[str]:
    """Returns the names of the files that threads of this process are deleting."""
    return frozenset(_being_deleted)
