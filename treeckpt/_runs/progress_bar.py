"""Progress of what takes long: on the error stream, only after a while, and only on a terminal or on request.

It counts the bytes that are read through stores, or things such as checkpoints. A terminal shows a bar; elsewhere a
line is printed every few seconds, if that was asked for. Otherwise stores are used as they are, and rich is not
imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from .._core.text import bytes_text, rate_text, seconds_text
from .._io.storage.store import Store
from .._io.storage.wrapped_store import CountedStores
from .._threads import start_thread
from ..errors import visible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_DELAY_SECONDS = 1.0
"""Seconds before a bar or the first line appears."""
LINE_INTERVAL = 5.0
"""Seconds between the lines."""


@contextlib.contextmanager
def reading_bar(
    store: Store, text: str, total: int | None = None, *, patience: float | None = None, stream: TextIO | None = None
) -> Iterator[Store]:
    """Gives a store to read from; while the body runs, a bar shows how many bytes were read.

    Args:
        text: the description of the bar.
        total: bytes to be read, None if not known.
        patience: seconds before the bar appears, by default `BAR_DELAY_SECONDS`.
        stream: by default stderr; a bar appears only if it is a terminal.
    """
    with stores_bar(text, total, patience=patience, stream=stream) as counted:
        yield counted(store)


@contextlib.contextmanager
def stores_bar(
    text: str,
    total: int | None = None,
    *,
    shown: bool | None = None,
    patience: float | None = None,
    stream: TextIO | None = None,
) -> Iterator[CountedStores]:
    """Does what `reading_bar` does for several stores: gives what to read from instead of each.

    Args:
        shown: whether there is a bar, or lines where the stream is no terminal; None: a bar on a terminal only.
    """
    with _shown_bar(text, total, True, shown, patience, stream) as bar:
        yield CountedStores(None if bar is None else bar.set, total)


@contextlib.contextmanager
def counting_bar(
    text: str,
    *,
    of_bytes: bool = False,
    shown: bool | None = None,
    patience: float | None = None,
    stream: TextIO | None = None,
) -> Iterator[Callable[[int, int | None], object]]:
    """Gives a function that takes how many things are done, and of how many; while the body runs, a bar shows that.

    The second is None where it is not known.

    Args:
        of_bytes: whether the things are bytes.
        shown: as for `stores_bar`.
    """
    with _shown_bar(text, None, of_bytes, shown, patience, stream) as bar:
        yield (lambda done, total: None) if bar is None else bar.set


@contextlib.contextmanager
def _shown_bar(
    text: str, total: int | None, of_bytes: bool, shown: bool | None, patience: float | None, stream: TextIO | None
) -> Iterator[_ShownProgress | None]:
    """Gives a bar, or lines, None where nothing is shown."""
    stream = stream or sys.stderr  # pyright: ignore[reportAssignmentType] (it is None where there is no console)
    if stream is None or not (stream.isatty() if shown is None else shown):
        yield None
        return
    patience = BAR_DELAY_SECONDS if patience is None else patience
    bar = (_Bar if stream.isatty() else _Lines)(text, total, of_bytes, stream)
    over = threading.Event()
    if patience:  # a request that takes long has a bar before it has any bytes
        start_thread(lambda: over.wait(patience) or bar.show(), "treeckpt-patience")
    else:
        bar.show()
    try:
        yield bar
    finally:
        over.set()
        bar.close()


class _ShownProgress:
    """What is done of a total, and how fast."""

    def __init__(self, text: str, total: int | None, of_bytes: bool, stream: TextIO) -> None:
        self._text, self._total, self._of_bytes, self._stream = visible(text), total, of_bytes, stream
        self._begin, self._done, self._closed = time.monotonic(), 0, False
        self._lock = threading.Lock()

    def set(self, done: int, total: int | None) -> None:
        with self._lock:
            self._done, self._total = done, total
            self._update()

    def _update(self) -> None:
        """Shows the new numbers; called with the lock."""

    def show(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _Lines(_ShownProgress):
    """A line every few seconds."""

    def __init__(self, text: str, total: int | None, of_bytes: bool, stream: TextIO) -> None:
        super().__init__(text, total, of_bytes, stream)
        self._ended = threading.Event()
        self._shown: threading.Thread | None = None

    def show(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._shown = start_thread(self._run, "treeckpt-progress")

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._ended.set()
        if self._shown is not None:
            self._shown.join()
            self._print()

    def _run(self) -> None:
        self._print()
        while not self._ended.wait(LINE_INTERVAL):
            self._print()

    def _print(self) -> None:
        with self._lock:
            done, total = self._done, self._total
        seconds = max(time.monotonic() - self._begin, 1e-9)
        size = bytes_text if self._of_bytes else str
        parts = [size(done) if total is None else f"{size(min(done, total))} of {size(total)}"]
        parts.append(rate_text(done, seconds) if self._of_bytes else f"{done / seconds:,.0f}/s")
        if total is not None and 0 < done < total:
            parts.append(f"{seconds_text((total - done) * seconds / done)} left")
        else:
            parts.append(f"after {seconds_text(seconds)}")
        print(f"{self._text}: {', '.join(parts)}", file=self._stream, flush=True)


class _Bar(_ShownProgress):
    """A bar on a terminal."""

    def __init__(self, text: str, total: int | None, of_bytes: bool, stream: TextIO) -> None:
        super().__init__(text, total, of_bytes, stream)
        self._shown: tuple[Progress, TaskID] | None = None

    def _update(self) -> None:
        if self._shown is not None:
            progress, task = self._shown
            done = self._done if self._total is None else min(self._done, self._total)
            rate = self._done / max(time.monotonic() - self._begin, 1e-9)
            if self._total is not None:
                progress.columns = (*progress.columns[:-1], self._time_left)
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
        with self._lock:
            if self._closed or start_thread(lambda: None, "treeckpt-progress") is None:  # rich needs a thread
                return
            console = Console(file=self._stream)
            columns = (TextColumn("{task.description}"), BarColumn(), *what, TimeElapsedColumn())
            self._time_left = TimeRemainingColumn()
            progress = Progress(*columns, console=console, transient=True)
            self._shown = progress, progress.add_task(self._text, total=self._total, rate="")
            progress.start()
            self._update()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._shown is not None:
                self._shown[0].stop()
