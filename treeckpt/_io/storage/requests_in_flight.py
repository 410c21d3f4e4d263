"""Requests to a remote store: as many in flight as its rate rewards, for ranges that are read and parts that are sent.

A remote store answers one request after tens of milliseconds and gives each connection a part of its rate, so the rate
of a load is the number of requests in flight times the bytes of one, over the time that one takes. `RangeFetcher` keeps
that many in flight within a budget of memory, gives up places when the store throttles, repeats what is missing of
requests that fail for a moment, and sends a second one for a request that takes far longer than the others. Bytes are
consumed piece by piece as they arrive: hardly any memory is needed beyond where they go, and each byte is in the cache
of the processor while it is copied and hashed.

obstore takes the content of an upload in order, keeps the memory of each part until its request has ended, and repeats
a request that fails by itself, after a pause that grows while the store throttles. To `UploadWindow` a part so ends
when nothing refers to its memory any more; its bytes are not copied. That the store throttles is seen by parts that
take far longer than the fastest one: then half as many are in flight.
"""

from __future__ import annotations

import bisect
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np

from ..._threads import start_thread
from ...errors import StoreError
from ..process import usable_cpus
from .bucket import FetchFailure, RangeResponse
from .store import Consume, FileRange

START = 64
"""Requests in flight at first: 8 MiB each, at 40 ms and 90 MB/s a connection, come to 4 GB/s."""
PER_CPU = 16
"""Requests in flight at first for each processor, up to `START`: one sends or receives less than 1 GB/s. More of them
fill the buffers of the sockets: two processors read 0.54 GB in 0.59 s with 32 and in 0.73 s with 64, and sent them in
0.65 s and in 0.75 s."""
MAX_REQUESTS = 192
"""Requests in flight, at most."""
WINDOW_SECONDS = 0.25
"""Seconds over which a rate is measured, at least."""
MIN_RATE_GAIN = 1.1
"""Part by which the rate must rise for more requests in flight to stay."""
ENOUGH_RATE_SHARE = 0.95
"""Part of the rate that fewer requests in flight must reach to be enough."""
FEWEST = 8
"""Requests in flight below which none is tried to be saved."""
RATE_CHANGE_FACTOR = 2.0
"""The depth is looked for again when the rate has risen or fallen by this factor since it was found."""


def first_depth(per_cpu: int = PER_CPU) -> int:
    """Returns the requests in flight at first, on this machine."""
    return min(per_cpu * usable_cpus(), START)


class RequestDepth:
    """The number of requests in flight: raised while the rate rises with it, halved when the store throttles.

    Where more gain nothing, fewer are tried: near stores need few, and a store whose refusals are hidden by retries
    gets slower with too many.
    """

    def __init__(self, depth: int = START, *, most: int = MAX_REQUESTS) -> None:
        self.depth, self._most = depth, most
        self._begin, self._nbytes, self._ended = 0.0, 0, 0
        self._known: tuple[int, float] | None = None
        """The depth before its last change, and its rate; while it is lowered, the rate of the best depth before."""
        self._trying: Literal["more", "fewer", "none"] = "more"
        self._halved_at = -1.0

    def restart(self, now: float) -> None:
        """Begins to measure at time `now` in seconds: after a pause without requests, and with another depth."""
        self._begin, self._nbytes, self._ended = now, 0, 0

    def add(self, nbytes: int, now: float) -> None:
        """Counts a request that succeeded at time `now`."""
        self._nbytes += nbytes
        self._ended += 1
        if self._ended < self.depth or now - self._begin < WINDOW_SECONDS:
            return
        rate = self._nbytes / (now - self._begin)
        self.restart(now)
        if self._halved_at >= 0:
            # a store that has throttled gets one more request a window: half as many more would throttle it again
            self.depth = min(self.depth + 1, self._most)
        else:
            self._adapt(rate)

    def _adapt(self, rate: float) -> None:
        """Changes the depth after a window with a rate."""
        before, best = self._known or (self.depth, 0.0)
        if self._trying == "none":
            if not best / RATE_CHANGE_FACTOR < rate < best * RATE_CHANGE_FACTOR:
                self._trying, self._known = "more", None
        # more were worth it: half as many more are tried
        elif self._trying == "more" and rate >= best * MIN_RATE_GAIN:
            self._known = self.depth, rate
            self.depth = min(self.depth * 3 // 2, self._most)
            if self.depth == self._known[0]:
                self._trying = "none"
        # more have gained nothing, or fewer are enough: fewer are tried
        elif self._trying == "more" or rate >= best * ENOUGH_RATE_SHARE:
            enough = before if self._trying == "more" else self.depth
            self._known = enough, best
            self.depth = max(enough * 2 // 3, min(FEWEST, enough))
            self._trying = "fewer" if self.depth < enough else "none"
        else:
            self.depth, self._trying = before, "none"

    def throttle(self, started: float, now: float, *, least: int = 1) -> None:
        """Halves the depth for a refusal, down to `least`; once for all requests in flight at the last time."""
        if started > self._halved_at:
            self.depth, self._halved_at = max(self.depth // 2, min(least, self.depth)), now
            self.restart(now)


MAX_PARTS_IN_FLIGHT = 128
"""Parts in flight, at most. obstore looks for parts that failed when so many have been started, and at the end."""
LATE_FACTOR, LATE_SECONDS = 4.0, 1.0
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
        """The moment at which all of it was taken, on the monotonic clock."""

    def take(self, piece: np.ndarray) -> np.ndarray:
        with self._window.changed:
            self._nbytes += len(piece)
            self._pieces += 1
        # at the end of the process nobody waits for a place any more
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
                data, taken = np.frombuffer(block, np.uint8), 0
                while taken < len(data):
                    if part is None:
                        part, room = self._enter(), part_nbytes
                    size = min(room, len(data) - taken)
                    taken, room = taken + size, room - size
                    yield part.take(data[taken - size : taken])
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
        if seconds > max(LATE_FACTOR * fastest, fastest + LATE_SECONDS):
            self.depth.throttle(sent, now, least=FEWEST)
        self.changed.notify_all()


SMALL_REQUEST_DIVISOR = 4096
"""A request for less than one part of so many of the memory, as for a header or the end of a shard, takes no place of
large ones, and no memory: the last of 64 would wait for it, and be late by a round trip."""
SAMPLES = 16
"""Requests that must have ended before a slow one is known to be slow."""
SLOW_FACTOR = 1.5
"""A request is sent again after so many times the 99th percentile of the others."""
MIN_SLOW_SECONDS = 0.2
"""Seconds below which no request is slow."""
HEDGED = 20
"""One of so many requests may be sent again for being slow."""
RETRY_SECONDS = 180.0
"""Seconds after which a request that keeps failing is given up."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds before the first retry, and before any, at most; at least it is half as many."""
HEDGE_SECONDS = 0.05
"""Seconds between two looks at the requests in flight."""
_DRAWS = random.Random()
"""A generator of its own: draws from that of the program would change the numbers of a training."""


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
        return max(SLOW_FACTOR * self._sorted[-(-99 * len(self._sorted) // 100) - 1], MIN_SLOW_SECONDS)


class _CutShort(StoreError):
    """The answer to a request ended before its last byte."""


class _InFlight(msgspec.Struct):
    """One range that is being fetched."""

    number: int
    started: float
    position: int = 0
    """Bytes of the range that were consumed."""
    tries: int = 1
    """Requests that were sent for the range and have not ended."""
    hedged: bool = False
    done: bool = False
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    """Held while bytes of the range are consumed."""


class RangeFetcher:
    """Fetches ranges from one store. What it learns of the store stays for the next call.

    Args:
        fetch: makes one request.
        judge: what may be done about an error of `fetch` or of the pieces that it returns.
        tries: requests for one range that may fail, at most.
        depth: requests in flight at first.
    """

    def __init__(
        self,
        fetch: Callable[[FileRange], RangeResponse],
        judge: Callable[[Exception], FetchFailure],
        tries: int,
        depth: RequestDepth | None = None,
    ) -> None:
        self.fetch, self.judge, self.tries = fetch, judge, tries
        self.depth, self.times = depth or RequestDepth(first_depth()), RequestTimes()
        self.lock = threading.RLock()

    def run(
        self,
        requests: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
    ) -> None:
        """Fetches all ranges and hands their bytes to `consume` as they arrive, from several threads.

        After an error nothing is handed over any more; requests that are still in flight then end unheard.

        Args:
            memory: bytes of ranges that have been requested and not consumed, at most, unless one range is longer;
                small ones beside large ones are not counted.
            first: the first so many ranges are consumed before any other, which may be on their way already.

        Raises:
            Exception: the first error of a request or of `consume`.
        """
        _Run(self, requests, consume, memory, first).run()


class _Run:
    """One call of `RangeFetcher.run`."""

    def __init__(
        self,
        fetcher: RangeFetcher,
        requests: Sequence[FileRange],
        consume: Consume,
        memory: int,
        first: int,
    ) -> None:
        self._fetcher, self._requests, self._consume, self._memory = fetcher, requests, consume, memory
        self._changed = threading.Condition(fetcher.lock)
        self._left = deque(range(len(requests)))
        self._small = sum(map(self._is_small, self._left))
        """Small requests that have not been answered."""
        self._large = len(requests) - self._small
        self._in_flight: list[_InFlight] = []
        self._held = self._workers = self._consuming = 0
        """Bytes of requests in flight; threads that take requests; calls of `consume`."""
        self._reserved = 0
        """Bytes that new requests leave free for a second request for a slow range."""
        self._done = self._hedged = 0
        self._first, self._first_left = first, first
        self._error: BaseException | None = None

    def run(self) -> None:
        """Starts threads while there is room for requests, and hedges slow ones, until all is consumed."""
        with self._changed:
            self._fetcher.depth.restart(time.monotonic())
        try:
            while not self._is_over():
                self._start_workers()
                with self._changed:
                    self._hedge()
                    if self._error is None and self._done < len(self._requests):
                        self._changed.wait(HEDGE_SECONDS)
        except BaseException as error:  # a signal
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        with self._changed:
            # the memory that `consume` fills belongs to the caller again when this call ends
            while self._consuming:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def _is_over(self) -> bool:
        with self._changed:
            return self._error is not None or self._done == len(self._requests)

    def _start_workers(self) -> None:
        with self._changed:
            if not self._left:
                return
            nbytes = max(self._held_by(self._left[0]), 1)
            # where nothing is in flight one range is fetched, even if it is longer than the memory
            room = max((self._memory - self._held - self._reserved) // nbytes, 0 if self._held else 1)
            count = max(min(self._places() - self._workers, len(self._left), room), 0)
            self._workers += count
        for started in range(count):  # without the lock: the first ones send their requests meanwhile
            if start_thread(self._work, "treeckpt-fetch") is None:
                with self._changed:
                    # the threads that were started; without any this one fetches all by itself
                    others = self._workers - (count - started)
                    self._workers = max(others, 1)
                if not others:
                    self._work()
                return

    def _places(self) -> int:
        """Returns the requests that may be in flight."""
        depth = self._fetcher.depth.depth
        return depth + min(self._small, self._large, depth)

    def _is_small(self, number: int) -> bool:
        return self._requests[number][2] < self._memory // SMALL_REQUEST_DIVISOR

    def _held_by(self, number: int) -> int:
        """Returns the memory that is counted for a request, in bytes."""
        return 0 if self._is_small(number) else self._requests[number][2]

    def _hedge(self) -> None:
        """Sends a second request for each one that is slow, when the memory has room for it."""
        slow, now = self._fetcher.times.slow(), time.monotonic()
        self._reserved = 0
        if slow is None:
            return
        for request in self._in_flight:
            if request.hedged or now - request.started <= slow or self._hedged > self._done // HEDGED:
                continue
            nbytes = self._held_by(request.number)
            if self._held + nbytes > self._memory:
                self._reserved = nbytes
                return
            request.hedged = True
            self._hedged += 1
            request.tries += 1
            self._held += nbytes
            if start_thread(partial(self._try, request, 1), "treeckpt-hedge") is None:
                request.tries -= 1
                self._held -= nbytes

    def _work(self) -> None:
        """Fetches one range after the other while there is room."""
        while (request := self._take()) is not None:
            self._try(request, self._fetcher.tries)
        with self._changed:
            self._workers -= 1

    def _take(self) -> _InFlight | None:
        with self._changed:
            if not self._left or self._error is not None or self._workers > self._places():
                return None
            nbytes = self._held_by(self._left[0])
            if self._held and self._held + self._reserved + nbytes > self._memory:
                return None
            self._held += nbytes
            request = _InFlight(self._left.popleft(), time.monotonic())
            self._in_flight.append(request)
            return request

    def _try(self, request: _InFlight, tries: int) -> None:
        """Fetches a range, from where its consumed bytes end, with retries; then frees its memory."""
        begin = time.monotonic()
        while True:
            started = time.monotonic()
            try:
                self._stream(request)
                break
            except Exception as error:
                tries -= 1
                pause = self._pause_after(error, request, tries, started, begin)
                if pause is None:
                    break
                time.sleep(pause)
        with self._changed:
            self._held -= self._held_by(request.number)

    def _stream(self, request: _InFlight) -> None:
        """Makes one request for what is missing of a range, and consumes it unless another request was faster."""
        name, offset, nbytes = self._requests[request.number]
        started, position, size = time.monotonic(), request.position, None
        if nbytes > position:
            response = self._fetcher.fetch((name, offset + position, nbytes - position))
            size = response.size
            if size is not None:
                nbytes = max(min(nbytes, size - offset), 0)
            pieces = map(memoryview, response.pieces)
            while position < nbytes and len(piece := next(pieces, memoryview(b""))):
                if not self._put(request, position, piece, size):
                    return
                position += len(piece)
            if position < nbytes:
                raise _CutShort(name, expected=f"{nbytes} bytes from {offset} on", found=f"{position}, then the end")
        if not nbytes and not self._put(request, 0, memoryview(b""), size):
            return
        self._end(request, nbytes, started)

    def _put(self, request: _InFlight, at: int, piece: memoryview, size: int | None) -> bool:
        """Consumes the bytes that start at `at` of a range, less those it has had; False if none are wanted any more.

        Raises:
            Exception: never that of `consume`, which ends the run.
        """
        # of two requests for one range each goes on where the other has come to
        with request.lock:
            with self._changed:
                while self._first_left and request.number >= self._first and self._error is None:
                    self._changed.wait()
                if request.done or self._error is not None:
                    return False
                self._consuming += 1
            error: BaseException | None = None
            try:
                if (skip := request.position - at) < len(piece) or not len(piece):
                    self._consume(request.number, request.position, piece[skip:], size)
                    request.position += len(piece) - skip
            except BaseException as failed:
                error = failed
            with self._changed:
                self._error = self._error or error
                self._consuming -= 1
                if self._error is not None:
                    self._changed.notify_all()
        return error is None

    def _pause_after(
        self, error: Exception, request: _InFlight, left: int, started: float, begin: float
    ) -> float | None:
        """Returns the seconds to the next of the tries that are left; None if there is none."""
        # `_CutShort` is raised here: `judge` knows the errors of the store alone
        failure, now = FetchFailure(throttled=False, temporary=True), time.monotonic()
        if not isinstance(error, _CutShort):
            failure = self._fetcher.judge(error)
        with self._changed:
            if failure.throttled:
                self._fetcher.depth.throttle(started, now)
            if request.done or self._error is not None:
                return None
            if failure.temporary and left and now - begin < RETRY_SECONDS:
                tried = self._fetcher.tries - left
                # drawn, so that requests that were refused together are not sent together again
                return min(FIRST_PAUSE * 2 ** (tried - 1), LONGEST_PAUSE) * _DRAWS.uniform(0.5, 1)
            request.tries -= 1
            if not request.tries:
                self._error = error
                self._changed.notify_all()
            return None

    def _end(self, request: _InFlight, nbytes: int, started: float) -> None:
        """Counts a range as fetched, once; its last request was sent at `started`."""
        now = time.monotonic()
        with self._changed:
            if request.done or self._error is not None:
                return
            request.done = True
            self._in_flight.remove(request)
            self._fetcher.times.add(now - started)
            self._fetcher.depth.add(nbytes, now)
            self._done += 1
            self._first_left -= request.number < self._first
            self._small -= self._is_small(request.number)
            self._changed.notify_all()
