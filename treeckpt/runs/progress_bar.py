"""Progress bars for long reads: on a terminal only, on the error stream, and only once a read has taken a while.

The bar follows a store: what is read through it is counted, whoever asks for it. Elsewhere the store is passed through
as it is, and rich is not even imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TextIO

from ..io.storage.store import Lending, Store

__all__ = ["PATIENCE", "reading_bar"]

PATIENCE = 1.0
"""Seconds before a bar appears."""


@contextlib.contextmanager
def reading_bar(
    store: Store, text: str, total: int | None = None, *, patience: float = PATIENCE, stream: TextIO | None = None
) -> Iterator[Store]:
    """A store to read from; while the body does so, a bar says how far it is.

    Args:
        text: what is done.
        total: bytes to be read, None where that is not known.
        patience: seconds before the bar appears.
        stream: by default stderr; a bar appears only if it is a terminal.
    """
    stream = stream or sys.stderr  # pyright: ignore[reportAssignmentType] (it is None where there is no console)
    if stream is None or not stream.isatty():
        yield store
        return
    bar = _Bar(text, total, patience, stream)
    try:
        yield _Counted(store, bar.add)
    finally:
        bar.close()


class _Bar:
    def __init__(self, text: str, total: int | None, patience: float, stream: TextIO) -> None:
        self._text, self._total, self._stream = text, total, stream
        self._due, self._done = time.monotonic() + patience, 0
        self._lock = threading.Lock()
        self._progress: Any = None
        self._task: Any = None

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is None and time.monotonic() >= self._due:
                self._start()
            if self._progress is not None:
                done = self._done if self._total is None else min(self._done, self._total)
                self._progress.update(self._task, completed=done)

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
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._task = self._progress.add_task(self._text, total=self._total)
        self._progress.start()

    def close(self) -> None:
        with self._lock:
            if self._progress is not None:
                self._progress.stop()


class _Counted:
    """A store whose reads are counted."""

    def __init__(self, inner: Store, count: Callable[[int], None]) -> None:
        self._inner, self._count, self.url = inner, count, inner.url
        self.prepare, self.sizes, self.read, self.map = inner.prepare, inner.sizes, inner.read, inner.map
        self.create, self.publish, self.delete, self.close = inner.create, inner.publish, inner.delete, inner.close
        if isinstance(inner, Lending):
            self.lend = partial(self._lend, inner)

    @contextlib.contextmanager
    def _lend(self, inner: Lending, name: str, offset: int, nbytes: int, *, fetch: bool) -> Iterator[memoryview | None]:
        with inner.lend(name, offset, nbytes, fetch=fetch) as memory:
            yield memory
            self._count(0 if memory is None else nbytes)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self._inner.read_into(name, offset, out, shared=shared)
        self._count(len(out))

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview]) -> bool:
        done = self._inner.read_parts(name, offset, parts)
        self._count(sum(map(len, parts)) if done else 0)
        return done
