"""Progress bars for what takes long: on the error stream, on a terminal only, and only after a while.

A bar counts the bytes that are read through stores, or things such as checkpoints. Where there is no terminal, stores
are used as they are, and rich is not imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
    store: Store, text: str, total: int | None = None, *, patience: float | None = None, stream: TextIO | None = None
) -> Iterator[Store]:
    """Gives a store to read from; while the body runs, a bar shows how many bytes were read.

    Args:
        text: the description of the bar.
        total: bytes to be read, None if not known.
        patience: seconds before the bar appears, by default `PATIENCE`.
        stream: by default stderr; a bar appears only if it is a terminal.
    """
    with stores_bar(text, total, patience=patience, stream=stream) as counted:
        yield counted(store)


@contextlib.contextmanager
def stores_bar(
    text: str,
    total: int | None = None,
    *,
    quiet: bool = False,
    patience: float | None = None,
    stream: TextIO | None = None,
) -> Iterator[Callable[[Store], Store]]:
    """Does what `reading_bar` does for several stores: gives a function that returns what to read from.

    Args:
        quiet: shows nothing, on a terminal neither.
    """
    with _shown_bar(text, total, True, quiet, patience, stream) as bar:
        yield (lambda store: store) if bar is None else (lambda store: CountingStore(for_reading(store), bar.add))


@contextlib.contextmanager
def counting_bar(
    text: str, *, quiet: bool = False, patience: float | None = None, stream: TextIO | None = None
) -> Iterator[Callable[[int, int], object]]:
    """Gives a function that takes how many things are done, and of how many; while the body runs, a bar shows that."""
    with _shown_bar(text, None, False, quiet, patience, stream) as bar:
        yield (lambda done, total: None) if bar is None else bar.set


@contextlib.contextmanager
def _shown_bar(
    text: str, total: int | None, of_bytes: bool, quiet: bool, patience: float | None, stream: TextIO | None
) -> Iterator[_Bar | None]:
    """Gives a bar, None where none is shown."""
    stream = stream or sys.stderr  # pyright: ignore[reportAssignmentType] (it is None where there is no console)
    if quiet or stream is None or not stream.isatty():
        yield None
        return
    patience = PATIENCE if patience is None else patience
    bar = _Bar(text, total, of_bytes, stream)
    timer = threading.Timer(patience, bar.show)  # a request that takes long has a bar before it has any bytes
    timer.daemon = True
    if patience:
        timer.start()
    else:
        bar.show()
    try:
        yield bar
    finally:
        timer.cancel()
        bar.close()


class _Bar:
    def __init__(self, text: str, total: int | None, of_bytes: bool, stream: TextIO) -> None:
        self._text, self._total, self._of_bytes, self._stream = text, total, of_bytes, stream
        self._begin, self._done, self._closed = time.monotonic(), 0, False
        self._lock = threading.Lock()
        self._shown: tuple[Progress, TaskID] | None = None

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._update()

    def set(self, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total = done, total
            self._update()

    def _update(self) -> None:
        if self._shown is not None:
            progress, task = self._shown
            done = self._done if self._total is None else min(self._done, self._total)
            rate = self._done / max(time.monotonic() - self._begin, 1e-9)
            progress.update(task, completed=done, total=self._total, rate=f"{rate:,.0f}/s" if self._done else "")

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        what = (DownloadColumn(), TransferSpeedColumn())
        if not self._of_bytes:
            what = (MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        time_left = TimeRemainingColumn() if self._total is not None or not self._of_bytes else TimeElapsedColumn()
        with self._lock:
            if self._closed:
                return
            console = Console(file=self._stream)
            columns = (TextColumn("{task.description}"), BarColumn(), *what, time_left)
            progress = Progress(*columns, console=console, transient=True)
            self._shown = progress, progress.add_task(self._text, total=self._total, rate="")
            progress.start()
            self._update()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._shown is not None:
                self._shown[0].stop()
