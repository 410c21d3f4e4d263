"""The parts of uploads that are in flight to one bucket: as many as its rate rewards.

obstore takes the content of an upload in order, keeps the memory of each part until its request has ended, and repeats
a request that fails by itself, after a pause that grows while the store throttles. A part so ends when nothing refers
to its memory any more; its bytes are not copied. That the store throttles is seen by parts that take far longer than
the fastest one: then half as many are in flight.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Iterable

import numpy as np

from .request_depth import FEWEST, START, RequestDepth, first_depth

MAX_PARTS_IN_FLIGHT = 128
"""Parts in flight, at most. obstore looks for parts that failed when so many have been started, and at the end."""
LATE, LATE_SECONDS = 4.0, 1.0
"""A part is late that takes so many times as long as the fastest of about its size, and so many seconds longer: it was
refused, or parts in flight share a rate that far fewer would reach. To a store that takes 8 requests at a time, 128
parts of 5 MiB take 15 s with half as many in flight after each late one, and 58 s with all of them."""
NEAR, NEAR_PER_CPU = 0.006, 4
"""Seconds within which an answer is that of a store so near that few parts in flight, for each processor, keep it busy:
537 MB at 1 ms and 1,000 MB/s a connection took two of them 0.57 s with 32 and 0.54 s with 8."""
FAR_ANSWER_SECONDS = 0.1
"""Seconds after which an answer is that of a store so far away that processors wait even with `START` parts in flight:
537 MB at 150 ms and 30 MB/s a connection took two of them 1.9 s with 32 and 1.5 s with 64."""


class _UploadPart:
    """One part: done when all of it was taken and nothing refers to any of its pieces."""

    def __init__(self, window: UploadWindow) -> None:
        self._window, self._nbytes, self._pieces, self._whole = window, 0, 0, False
        self._sent = 0.0
        """When all of it was taken."""

    def take(self, piece: np.ndarray) -> np.ndarray:
        with self._window.changed:
            self._nbytes += len(piece)
            self._pieces += 1
        weakref.finalize(piece, self._let_go).atexit = False
        return piece

    def close(self) -> None:
        with self._window.changed:
            self._whole, self._sent = True, time.monotonic()
            if not self._pieces:
                self._window.leave(self._nbytes, self._sent)

    def _let_go(self) -> None:
        with self._window.changed:
            self._pieces -= 1
            if self._whole and not self._pieces:
                self._window.leave(self._nbytes, self._sent)


class UploadWindow:
    """Counts the parts in flight of all uploads to one bucket."""

    def __init__(self) -> None:
        self.depth = RequestDepth(first_depth(), most=MAX_PARTS_IN_FLIGHT)
        # an RLock: the last reference to a piece may end in a thread that holds the lock
        self.changed = threading.Condition(threading.RLock())
        self.in_flight = 0
        self._fastest: dict[int, float] = {}
        """Seconds of the fastest part, by the power of two of its bytes."""

    def expect(self, seconds: float) -> None:
        """Takes how long a small request took; before the first part it says how many to begin with."""
        with self.changed:
            if not self._fastest and not self.in_flight and not NEAR < seconds < FAR_ANSWER_SECONDS:
                depth = START if seconds >= FAR_ANSWER_SECONDS else first_depth(NEAR_PER_CPU)
                self.depth = RequestDepth(depth, most=MAX_PARTS_IN_FLIGHT)

    def stream(self, blocks: Iterable[memoryview], part_nbytes: int) -> Generator[np.ndarray]:
        """Yields the blocks, uint8[n], cut where a part ends; waits before each part until it may be in flight."""
        part, room = None, 0
        try:
            for block in blocks:
                data, at = np.frombuffer(block, np.uint8), 0
                while at < len(data):
                    if part is None:
                        part, room = self._enter(), part_nbytes
                    size = min(room, len(data) - at)
                    at, room = at + size, room - size
                    yield part.take(data[at - size : at])
                    if not room:
                        part.close()
                        part = None
                del data, block  # nothing may refer to memory that is sent while the next block is waited for
        finally:
            if part is not None:
                part.close()

    def _enter(self) -> _UploadPart:
        with self.changed:
            while self.in_flight >= self.depth.depth:
                self.changed.wait()
            if not self.in_flight:
                self.depth.restart(time.monotonic())
            self.in_flight += 1
        return _UploadPart(self)

    def leave(self, nbytes: int, sent: float) -> None:
        """Counts a part of `nbytes` bytes, all taken at `sent`, that is in flight no longer."""
        now = time.monotonic()
        seconds, size = now - sent, nbytes.bit_length()
        fastest = self._fastest[size] = min(self._fastest.get(size, seconds), seconds)
        self.in_flight -= 1
        self.depth.add(nbytes, now)
        if seconds > max(LATE * fastest, fastest + LATE_SECONDS):
            self.depth.throttle(sent, now, least=FEWEST)
        self.changed.notify_all()
