"""Requests to an object store for which no caller waits: they remove small files, and complete timings.

The end of the process waits for them, `MAX_WAIT_SECONDS` at most, and says so after `SILENT_SECONDS`. What does not
arrive harms nothing: the next clean-up removes the records and leases of a process that has ended.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

from ..._threads import start_thread
from ...errors import visible
from ..process_end import call_at_end, call_in_forks

SILENT_SECONDS = 1.0
MAX_WAIT_SECONDS = 30.0

_running: dict[threading.Event, str] = {}
"""Set when the request is over, with the URL of its store."""
_being_deleted: set[str] = set()
"""To a clean-up these files are gone already."""


def send_late(url: str, send: Callable[[], object]) -> threading.Event | None:
    """Calls a function in a thread; returns what is set at its end.

    Returns None, and calls nothing, where no thread can be started, or the end of the process does not wait any more.
    """
    over = threading.Event()

    def call() -> None:
        try:
            send()
        finally:
            _running.pop(over, None)
            over.set()

    _running[over] = url
    if call_at_end(_finish) and start_thread(call, "treeckpt-late") is not None:
        return over
    _running.pop(over)
    return None


def delete_late(url: str, name: str, delete: Callable[[], object]) -> None:
    """Calls `delete`, which deletes the file `name`, as `send_late` does; or here."""

    def call() -> None:
        try:
            delete()
        finally:
            _being_deleted.discard(name)

    _being_deleted.add(name)
    if send_late(url, call) is None:
        call()


def names_being_deleted() -> frozenset[str]:
    """Returns the names of the files that threads of this process are deleting."""
    return frozenset(_being_deleted)


def _finish() -> None:
    """Waits for the requests that are under way, at the end of the process."""
    begin, waiting = time.monotonic(), dict(_running)
    with contextlib.suppress(KeyboardInterrupt):
        for over, url in waiting.items():
            if over.wait(max(0.0, begin + SILENT_SECONDS - time.monotonic())):
                continue
            if sys.stderr is not None:
                text = f"treeckpt: waiting for the last requests to {url}, for at most {MAX_WAIT_SECONDS:.0f} s"
                print(visible(text), file=sys.stderr, flush=True)
            break
        for over in waiting:
            over.wait(max(0.0, begin + MAX_WAIT_SECONDS - time.monotonic()))


def _forget() -> None:
    """In a forked child: its parent sends them."""
    _running.clear()
    _being_deleted.clear()


call_in_forks(_forget)
