"""Fetches many byte ranges of remote objects at once: as many requests in flight as the store rewards.

A remote store answers one request after tens of milliseconds and gives each connection a part of its rate, so the rate
of a load is the number of requests in flight times the bytes of one, over the time that one takes. `RangeFetcher` keeps
that many in flight within a budget of memory, gives up places when the store throttles, repeats requests that fail for
a moment, and sends a second one for a request that takes far longer than the others.
"""

from __future__ import annotations

import bisect
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from .bucket import FetchFailure
from .store import Consume, FileRange

START = 64
"""Requests in flight at first: 8 MiB each, at 40 ms and 90 MB/s a connection, come to 4 GB/s."""
MOST = 192
"""Requests in flight, at most."""
WINDOW = 0.25
"""Seconds over which a rate is measured, at least."""
GAIN = 1.1
"""Part by which the rate must rise for more requests in flight to stay."""
SAMPLES = 16
"""Requests that must have ended before a slow one is known to be slow."""
SLOW = 1.5
"""A request is sent again after so many times the 99th percentile of the others."""
LEAST = 0.2
"""Seconds below which no request is slow."""
HEDGED = 20
"""One of so many requests may be sent again for being slow."""
RETRY_SECONDS = 180.0
"""Seconds after which a request that keeps failing is given up."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the first retry, and before any."""
HEDGE_SECONDS = 0.05
"""How often requests in flight are looked at."""


class RequestDepth:
    """The number of requests in flight: raised while the rate rises with it, halved when the store throttles."""

    def __init__(self, depth: int = START, *, most: int = MOST) -> None:
        self.depth, self._most = depth, most
        self._begin, self._nbytes, self._ended = 0.0, 0, 0
        self._before: tuple[int, float] | None = None
        """Depth and rate before it was raised last."""
        self._settled = False
        self._halved_at = -1.0

    def restart(self, now: float) -> None:
        """Begins to measure at time `now` in seconds: after a pause without requests, and with another depth."""
        self._begin, self._nbytes, self._ended = now, 0, 0

    def add(self, nbytes: int, now: float) -> None:
        """Counts a request that succeeded at time `now`."""
        self._nbytes += nbytes
        self._ended += 1
        if self._ended < self.depth or now - self._begin < WINDOW:
            return
        rate = self._nbytes / (now - self._begin)
        self.restart(now)
        if self._halved_at >= 0:
            self.depth = min(self.depth + 1, self._most)
        elif self._before is not None and rate < self._before[1] * GAIN:
            self.depth, self._settled = self._before[0], True
        elif not self._settled and self.depth < self._most:
            self._before = self.depth, rate
            self.depth = min(self.depth * 3 // 2, self._most)

    def throttle(self, started: float, now: float) -> None:
        """Halves the depth for a refusal; once for all requests that were in flight at the last time."""
        if started > self._halved_at:
            self.depth, self._halved_at = max(self.depth // 2, 1), now
            self.restart(now)


class RequestTimes:
    """How long the last requests took, in seconds."""

    def __init__(self, most: int = 400) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        self._most = most

    def add(self, seconds: float) -> None:
        if len(self._order) == self._most:
            del self._sorted[bisect.bisect_left(self._sorted, self._order.popleft())]
        self._order.append(seconds)
        bisect.insort(self._sorted, seconds)

    def slow(self) -> float | None:
        """The seconds after which a request is slow; None while too few are known."""
        if len(self._sorted) < SAMPLES:
            return None
        return max(SLOW * self._sorted[-(-99 * len(self._sorted) // 100) - 1], LEAST)


class _InFlight(msgspec.Struct):
    """One range that is being fetched."""

    number: int
    started: float
    tries: int = 1
    """Requests that were sent for it and have not ended."""
    hedged: bool = False
    done: bool = False


class RangeFetcher:
    """Fetches ranges from one store. What it learns of the store stays for the next call.

    Args:
        fetch: makes one request; returns fewer bytes at the end of the object.
        judge: what may be done about an error of `fetch`.
        tries: requests for one range that may fail, at most.
    """

    def __init__(
        self, fetch: Callable[[FileRange], memoryview], judge: Callable[[Exception], FetchFailure], tries: int
    ) -> None:
        self.fetch, self.judge, self.tries = fetch, judge, tries
        self.depth, self.times = RequestDepth(), RequestTimes()
        self.lock = threading.Lock()

    def run(self, requests: Sequence[FileRange], consume: Consume, *, memory: int) -> None:
        """Fetches all ranges and hands each one to `consume`, in the order of arrival and from several threads.

        After an error nothing is handed over any more; requests that are still in flight then end unheard.

        Args:
            consume: takes the number of a range, its bytes, and the seconds that its request took.
            memory: bytes that are in flight or not consumed yet, at most, unless one range is longer.

        Raises:
            Exception: the first error of a request or of `consume`.
        """
        _Run(self, requests, consume, memory).run()


class _Run:
    """One call of `RangeFetcher.run`."""

    def __init__(
        self,
        fetcher: RangeFetcher,
        requests: Sequence[FileRange],
        consume: Consume,
        memory: int,
    ) -> None:
        self._fetcher, self._requests, self._consume, self._memory = fetcher, requests, consume, memory
        self._changed = threading.Condition(fetcher.lock)
        self._left = deque(range(len(requests)))
        self._in_flight: list[_InFlight] = []
        self._held = self._workers = self._consuming = 0
        """Bytes in flight or being consumed; threads that take requests; calls of `consume`."""
        self._done = self._hedged = 0
        self._error: BaseException | None = None

    def run(self) -> None:
        """Starts threads while there is room for requests, and hedges slow ones, until all is consumed."""
        with self._changed:
            self._fetcher.depth.restart(time.monotonic())
            try:
                while self._error is None and self._done < len(self._requests):
                    self._start_workers()
                    self._hedge()
                    self._changed.wait(HEDGE_SECONDS)
            except BaseException as error:  # a signal
                self._error = self._error or error
            while self._consuming:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def _start_workers(self) -> None:
        if not self._left:
            return
        nbytes = max(self._requests[self._left[0]][2], 1)
        room = max((self._memory - self._held) // nbytes, 0 if self._held else 1)
        for _ in range(min(self._fetcher.depth.depth - self._workers, len(self._left), room)):
            self._workers += 1
            threading.Thread(target=self._work, name="treeckpt-fetch", daemon=True).start()

    def _hedge(self) -> None:
        """Sends a second request for each one that is slow."""
        slow, now = self._fetcher.times.slow(), time.monotonic()
        if slow is None:
            return
        for one in self._in_flight:
            if not one.hedged and now - one.started > slow and self._hedged <= self._done // HEDGED:
                one.hedged = True
                self._hedged += 1
                one.tries += 1
                threading.Thread(target=self._try, args=(one, 1), name="treeckpt-hedge", daemon=True).start()

    def _work(self) -> None:
        """Fetches one range after the other while there is room."""
        while (one := self._take()) is not None:
            self._try(one, self._fetcher.tries)
        with self._changed:
            self._workers -= 1

    def _take(self) -> _InFlight | None:
        with self._changed:
            if not self._left or self._error is not None or self._workers > self._fetcher.depth.depth:
                return None
            nbytes = self._requests[self._left[0]][2]
            if self._held and self._held + nbytes > self._memory:
                return None
            self._held += nbytes
            one = _InFlight(self._left.popleft(), time.monotonic())
            self._in_flight.append(one)
            return one

    def _try(self, one: _InFlight, tries: int) -> None:
        """Fetches a range, with retries, and consumes it unless another thread has it already."""
        request, begin = self._requests[one.number], time.monotonic()
        for tried in range(1, tries + 1):
            started = time.monotonic()
            try:
                data = self._fetcher.fetch(request)
            except Exception as error:
                pause = self._pause_after(error, one, tries - tried, started, begin)
                if pause is None:
                    return
                time.sleep(pause)
            else:
                self._take_over(one, data, started)
                return

    def _pause_after(self, error: Exception, one: _InFlight, left: int, started: float, begin: float) -> float | None:
        """Returns the seconds to the next of the tries that are left; None if there is none."""
        failure, now = self._fetcher.judge(error), time.monotonic()
        with self._changed:
            if failure.throttled:
                self._fetcher.depth.throttle(started, now)
            if one.done or self._error is not None:
                return None
            if failure.temporary and left and now - begin < RETRY_SECONDS:
                tried = self._fetcher.tries - left
                return min(FIRST_PAUSE * 2**tried, LONGEST_PAUSE) * random.uniform(0.5, 1)
            one.tries -= 1
            if not one.tries:
                self._error = error
                self._changed.notify_all()
            return None

    def _take_over(self, one: _InFlight, data: memoryview, started: float) -> None:
        now = time.monotonic()
        with self._changed:
            if one.done or self._error is not None:
                return
            one.done = True
            self._in_flight.remove(one)
            self._fetcher.times.add(now - started)
            self._fetcher.depth.add(len(data), now)
            self._consuming += 1
        error: BaseException | None = None
        try:
            self._consume(one.number, data, now - started)
        except BaseException as failed:
            error = failed
        with self._changed:
            self._error = self._error or error
            self._consuming -= 1
            self._done += 1
            self._held -= self._requests[one.number][2]
            self._changed.notify_all()
