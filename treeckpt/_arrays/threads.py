"""Calls functions in parallel, in the caller's thread and in those of an executor.

It is of use for functions that release Python's global lock for long, as numpy's copies and sorts. A pool alone does
not suffice: after an error it leaves other functions running, which may write to memory that the caller reuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from .._threads import ThreadPool


class WorkerThreads:
    """A group of threads, which start with the first call and end when the object is deleted.

    Args:
        threads: their number, including the caller's thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPool(max(1, threads - 1), "treeckpt-team")

    def __call__(self, functions: Sequence[Callable[[], object]]) -> None:
        """Calls all functions, in about their order; once none runs any more, returns or raises the first error."""
        left = deque(functions)

        def work() -> None:
            while left:
                try:
                    function = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    function()
                except BaseException:
                    left.clear()
                    raise

        helpers: list[Future[None]] = []
        helpers.extend(self._pool.submit(work) for _ in range(min(self._threads, len(functions)) - 1))
        try:
            work()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
