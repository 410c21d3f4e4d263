"""Calls functions at the same time, in the caller's thread and a few others.

Worth it for what leaves Python's lock alone for long, as numpy's copies and sorts do.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

__all__ = ["WorkerThreads"]


class WorkerThreads:
    """Some threads, which start with the first work and end when nobody has the team any more.

    Args:
        threads: the caller's among them.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "treeckpt-team")

    def __call__(self, works: Sequence[Callable[[], object]]) -> None:
        """Calls all of them, in about their order; when none is running any more, returns or raises the first error."""
        left = deque(works)

        def work() -> None:
            while left:
                try:
                    one = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    one()
                except BaseException:
                    left.clear()
                    raise

        helpers: list[Future[None]] = []
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more: less help then
            helpers.extend(self._pool.submit(work) for _ in range(min(self._threads, len(works)) - 1))
        try:
            work()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
