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
from typing import TextIO

from .._core.text import bytes_text, rate_text, seconds_text
from .._io.storage.store import Store
from .._io.storage.wrapped_store import CountedStores
from .._threads import start_thread
from ..errors import visible

BAR_DELAY_SECONDS = 1.0
"""Seconds before a bar or the first line appears."""
BAR_INTERVAL = 0.1
"""Seconds between two states of a bar."""
LINE_INTERVAL = 5.0
"""Seconds between the lines."""


@contextlib.contextmanager
def reading_bar(store: Store, text: str, total: int | None = None) -> Iterator[Store]:
    """Gives a store to read from; while the body runs, a bar shows how many bytes were read, if stderr is a terminal.

    Args:
        text: the description of the bar.
        total: bytes to be read, None if not known.
    """
    with _shown_progress(text, total, of_bytes=True, shown=None) as progress:
        yield store if progress is None else CountedStores(progress.set, total)(store)


@contextlib.contextmanager
def stores_bar(text: str, total: int | None = None, *, shown: bool | None = None) -> Iterator[CountedStores]:
    """Does what `reading_bar` does for several stores: gives what to read from instead of each.

    Args:
        shown: whether there is a bar, or lines where stderr is no terminal; None: a bar on a terminal only.
    """
    with _shown_progress(text, total, of_bytes=True, shown=shown) as progress:
        yield CountedStores(None if progress is None else progress.set, total)


@contextlib.contextmanager
def counting_bar(
    text: str, *, of_bytes: bool = False, shown: bool | None = None
) -> Iterator[Callable[[int, int | None], object]]:
    """Gives a function that takes how many things are done, and of how many; while the body runs, a bar shows that.

    The second is None where it is not known.

    Args:
        of_bytes: whether the things are bytes.
        shown: as for `stores_bar`.
    """
    with _shown_progress(text, None, of_bytes=of_bytes, shown=shown) as progress:
        yield (lambda done, total: None) if progress is None else progress.set


@contextlib.contextmanager
def _shown_progress(
    text: str, total: int | None, *, of_bytes: bool, shown: bool | None
) -> Iterator[_ShownProgress | None]:
    """Gives what shows the progress while the body runs, None where nothing is shown."""
    stream = sys.stderr
    # it is None where there is no console
    if stream is None or not (stream.isatty() if shown is None else shown):  # pyright: ignore[reportUnnecessaryComparison]
        yield None
        return
    progress = _ShownProgress(text, total, of_bytes, stream)
    thread = start_thread(progress.show, "treeckpt-progress")
    try:
        yield progress
    finally:
        progress.ended.set()
        if thread is not None:
            thread.join()


class _ShownProgress:
    """How many things are done, of how many, and how fast."""

    def __init__(self, text: str, total: int | None, of_bytes: bool, stream: TextIO) -> None:
        self._text, self._of_bytes, self._stream = visible(text), of_bytes, stream
        self._begin, self._state = time.monotonic(), (0, total)
        self.ended = threading.Event()

    def set(self, done: int, total: int | None) -> None:
        self._state = done, total

    def show(self) -> None:
        """Shows a bar or lines until the end; nothing if that comes before the delay."""
        if BAR_DELAY_SECONDS and self.ended.wait(BAR_DELAY_SECONDS):
            return
        if self._stream.isatty():
            self._show_bar()
            return
        self._print()
        while not self.ended.wait(LINE_INTERVAL):
            self._print()
        self._print()

    def _print(self) -> None:
        done, total = self._state
        seconds = max(time.monotonic() - self._begin, 1e-9)
        size = bytes_text if self._of_bytes else str
        parts = [size(done) if total is None else f"{size(min(done, total))} of {size(total)}"]
        parts.append(rate_text(done, seconds) if self._of_bytes else f"{done / seconds:,.0f}/s")
        if total is not None and 0 < done < total:
            parts.append(f"{seconds_text((total - done) * seconds / done)} left")
        else:
            parts.append(f"after {seconds_text(seconds)}")
        print(f"{self._text}: {', '.join(parts)}", file=self._stream, flush=True)

    def _show_bar(self) -> None:
        from rich import progress as rich
        from rich.console import Console

        what = (rich.DownloadColumn(), rich.TransferSpeedColumn())
        if not self._of_bytes:
            what = (rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[rate]}"))
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *what)
        elapsed, left = rich.TimeElapsedColumn(), rich.TimeRemainingColumn()
        console = Console(file=self._stream)
        with rich.Progress(*columns, elapsed, console=console, transient=True, auto_refresh=False) as bar:
            task, is_over = bar.add_task(self._text, total=self._state[1], rate=""), False
            while True:
                done, total = self._state
                bar.columns = (*columns, elapsed if total is None else left)
                rate = f"{done / max(time.monotonic() - self._begin, 1e-9):,.0f}/s" if done else ""
                done = done if total is None else min(done, total)
                bar.update(task, completed=done, total=total, rate=rate, refresh=True)
                if is_over:
                    return
                is_over = self.ended.wait(BAR_INTERVAL)
