"""Measures spans: the one place where a clock is read for timings."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..core.format.timings import Span

__all__ = ["Recorder", "RecorderSnapshot"]


class RecorderSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """What a recorder has recorded so far, for another process of the same host to go on with."""

    created_ns: int
    origin: int
    """Unix nanoseconds at which the monotonic clock, which all processes share, read zero."""
    spans: tuple[Span, ...]
    open: tuple[int, ...]


class Recorder:
    """Collects one rank's spans.

    Args:
        rank: whose spans.
        wall: Unix nanoseconds, read once; lengths come from `monotonic`.
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
    def resumed(cls, rank: int, trail: RecorderSnapshot) -> Recorder:
        """A recorder that goes on where another one is; what it adds is for that one's `adopt`."""
        recorder = cls(rank)
        recorder.created_ns, recorder._origin = trail.created_ns, trail.origin
        recorder._spans, recorder._open = list(trail.spans), list(trail.open)
        return recorder

    @property
    def trail(self) -> RecorderSnapshot:
        """All that another recorder needs to go on."""
        with self._lock:
            return RecorderSnapshot(self.created_ns, self._origin, tuple(self._spans), tuple(self._open))

    def adopt(self, spans: Sequence[Span]) -> None:
        """Takes over what a resumed recorder has added, while this one added nothing."""
        with self._lock:
            self._spans += spans

    def now(self) -> int:
        """Unix nanoseconds, never going back."""
        return self._origin + self._monotonic()

    @contextlib.contextmanager
    def span(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Times a stretch of the calling thread, inside the span that is open."""
        start = self.now()
        with self._lock:
            parent = self._open[-1] if self._open else -1
            number = len(self._spans)
            self._spans.append(Span(name, self._rank, start, start, nbytes, parent))
            self._open.append(number)
        try:
            yield
        finally:
            span = Span(name, self._rank, start, self.now(), nbytes, parent)
            with self._lock:
                self._open.remove(number)
                self._spans[number] = span

    def add(self, name: str, start_ns: int, stop_ns: int, nbytes: int = 0) -> None:
        """Records a stretch that was timed elsewhere, inside the span that is open."""
        with self._lock:
            parent = self._open[-1] if self._open else -1
            self._spans.append(Span(name, self._rank, start_ns, stop_ns, nbytes, parent))

    @property
    def spans(self) -> list[Span]:
        """Every span so far; one that is still open is given as if it ended now."""
        now = self.now()
        with self._lock:
            return [
                msgspec.structs.replace(span, stop_ns=now) if number in self._open else span
                for number, span in enumerate(self._spans)
            ]

    @property
    def seconds(self) -> float:
        """Since the recorder was made."""
        return (self.now() - self.created_ns) / 1e9
