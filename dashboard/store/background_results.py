"""Results that a thread computes, so that no page waits long for them: the last one of each key is shown meanwhile."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

import msgspec

from treeckpt._threads import ThreadPool

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Result(msgspec.Struct, Generic[T], frozen=True):
    version: int
    made: float
    """By the monotonic clock."""
    value: T


class BackgroundResults(Generic[K, T]):
    """The last results of a function, which a thread calls for one key after the other.

    Args:
        name: of the thread.
        most: results that are kept; beyond them those that were computed first are dropped.
        pending: keys that wait for the thread, at most; others are computed when they are asked for again.
    """

    def __init__(self, name: str, *, most: int = 64, pending: int = 16) -> None:
        self._thread, self._most, self._most_pending = ThreadPool(1, name), most, pending
        self._results: OrderedDict[K, _Result[T]] = OrderedDict()
        self._pending: dict[K, Future[_Result[T]]] = {}
        self._lock = threading.RLock()

    def close(self) -> None:
        """Ends the thread after the result that it computes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def of(self, key: K, version: int, compute: Callable[[], T], *, fresh: float, seconds: float) -> T | None:
        """Returns the last result; starts to compute one unless that is fresh; None while there is none.

        Args:
            version: what the result is of: one of another version is not fresh.
            compute: it raises no error.
            fresh: seconds for which a result of the same version is fresh.
            seconds: for which this call waits for a result that it starts to compute.
        """

        def result() -> _Result[T]:
            return _Result(version, time.monotonic(), compute())

        with self._lock:
            last = self._last(key)
            if last is not None and last.version == version and time.monotonic() - last.made < fresh:
                return last.value
            if key in self._pending or len(self._pending) >= self._most_pending:
                return last.value if last is not None else None
            started = self._pending[key] = self._thread.submit(result)
        wait([started], seconds)
        with self._lock:
            last = self._last(key)
        return last.value if last is not None else None

    def _last(self, key: K) -> _Result[T] | None:
        """Returns the last result, after it has taken those that were computed meanwhile."""
        for one in [one for one, pending in self._pending.items() if pending.done()]:
            self._results[one] = self._pending.pop(one).result()
            self._results.move_to_end(one)
        while len(self._results) > self._most:
            self._results.popitem(last=False)
        return self._results.get(key)
