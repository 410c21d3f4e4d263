"""Measures spans; the clock for timings is read only here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from .._core.format.timings import Span


class RecorderSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The spans of a recorder so far, with which a process of the same host continues."""

    created_ns: int
    origin: int
    """Unix nanoseconds at which the monotonic clock, which all processes share, read zero."""
    spans: tuple[Span, ...]
    open: tuple[int, ...]


class Recorder:
    """Collects one rank's spans.

    Args:
        rank: of the spans.
        wall: returns Unix nanoseconds, called once; durations are measured by `monotonic`.
    """

    def __init__(
        self,
        rank: int,
        *,
        wall: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._rank, self._monotonic = rank, monotonic
        self.created_ns = wall()
        self._origin = self.created_ns - monotonic()
        self._spans: list[Span] = []
        self._open: list[int] = []
        self._lock = threading.Lock()

    @classmethod
    def resumed(cls, rank: int, snapshot: RecorderSnapshot) -> Recorder:
        """Returns a recorder that continues from a snapshot; the other recorder `adopt`s the spans that it adds."""
        recorder = cls(rank)
        recorder.created_ns, recorder._origin = snapshot.created_ns, snapshot.origin
        recorder._spans, recorder._open = list(snapshot.spans), list(snapshot.open)
        return recorder

    @property
    def snapshot(self) -> RecorderSnapshot:
        """The state from which another recorder continues."""
        with self._lock:
            return RecorderSnapshot(self.created_ns, self._origin, tuple(self._spans), tuple(self._open))

    def adopt(self, spans: Sequence[Span]) -> None:
        """Adds the spans of a resumed recorder; this one must have added none meanwhile."""
        with self._lock:
            self._spans += spans

    def now(self) -> int:
        """Returns Unix nanoseconds, which never decrease."""
        return self._origin + self._monotonic()

    @contextlib.contextmanager
    def span(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Measures the body as a span, inside the open one."""
        start = self.now()
        with self._lock:
            parent = self._open[-1] if self._open else -1
            number = len(self._spans)
            # its place is taken at its begin: a reader of timings refuses a span that comes before its parent
            self._spans.append(Span(name, self._rank, start, start, nbytes, parent))
            self._open.append(number)
        try:
            yield
        finally:
            span = Span(name, self._rank, start, self.now(), nbytes, parent)
            with self._lock:
                # by its number, as spans of several threads end in any order
                self._open.remove(number)
                self._spans[number] = span

    def add(self, name: str, start_ns: int, stop_ns: int, nbytes: int = 0) -> None:
        """Records a span that was measured elsewhere, inside the open one."""
        with self._lock:
            parent = self._open[-1] if self._open else -1
            self._spans.append(Span(name, self._rank, start_ns, stop_ns, nbytes, parent))

    @property
    def spans(self) -> list[Span]:
        """All spans so far; an open one ends now."""
        now = self.now()
        with self._lock:
            return [
                msgspec.structs.replace(span, stop_ns=now) if number in self._open else span
                for number, span in enumerate(self._spans)
            ]

    @property
    def seconds(self) -> float:
        """Seconds since the recorder was created."""
        return (self.now() - self.created_ns) / 1e9


def steady_clock(
    wall: Callable[[], int] = time.time_ns, monotonic: Callable[[], int] = time.monotonic_ns
) -> Callable[[], int]:
    """Returns a clock in Unix nanoseconds that is never ahead of the monotonic time since its creation.

    A system clock that jumps forward then does not make the files of a save under way look old.
    """
    start = wall() - monotonic()
    return lambda: min(wall(), start + monotonic())
