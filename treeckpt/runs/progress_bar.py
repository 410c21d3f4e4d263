"""Progress bars for long reads: on the error stream, on a terminal only, and only after a read has taken a while.

The bar counts the bytes that are read through a store. Where there is no terminal the store is returned as it is, and
rich is not imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from ..io.storage.counting_store import CountingStore
from ..io.storage.far_store import for_reading
from ..io.storage.store import Store

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE = 1.0
"""Seconds before a bar appears."""


@contextlib.contextmanager
def reading_bar(
    store: Store, text: str, total: int | None = None, *, patience: float = PATIENCE, stream: TextIO | None = None
) -> Iterator[Store]:
    """Gives a store to read from; while the body runs, a bar shows how many bytes were read.

    Args:
        text: the description of the bar.
        total: bytes to be read, None if not known.
        patience: seconds before the bar appears.
        stream: by default stderr; a bar appears only if it is a terminal.
    """
    stream = stream or sys.stderr  # pyright: ignore[reportAssignmentType] (it is None where there is no console)
    if stream is None or not stream.isatty():
        yield store
        return
    bar = _ReadingBar(text, total, patience, stream)
    try:
        yield CountingStore(for_reading(store), bar.add)
    finally:
        bar.close()


class _ReadingBar:
    def __init__(self, text: str, total: int | None, patience: float, stream: TextIO) -> None:
        self._text, self._total, self._stream = text, total, stream
        self._due, self._done = time.monotonic() + patience, 0
        self._lock = threading.Lock()
        self._shown: tuple[Progress, TaskID] | None = None

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._shown is None and time.monotonic() >= self._due:
                self._start()
            if self._shown is not None:
                progress, task = self._shown
                done = self._done if self._total is None else min(self._done, self._total)
                progress.update(task, completed=done)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = Console(file=self._stream)
        progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._shown = progress, progress.add_task(self._text, total=self._total)
        progress.start()

    def close(self) -> None:
        with self._lock:
            if self._shown is not None:
                self._shown[0].stop()
