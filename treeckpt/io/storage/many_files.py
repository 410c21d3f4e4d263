"""Calls a function for each of many files: one after the other on a disk, many at a time in a remote store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from .fetching import SupportsFetching
from .store import Store

AT_A_TIME = 64
"""Calls at a time, each of which waits for one answer of the store or a few."""
T = TypeVar("T")
F = TypeVar("F")


def for_each(store: Store, call: Callable[[F], T], files: Sequence[F]) -> list[T]:
    """Returns the result of each call.

    Raises:
        Exception: that of the first file whose call raised; on a disk the calls for later files were not made.
    """
    if not isinstance(store, SupportsFetching) or len(files) < 2:
        return [call(file) for file in files]
    with ThreadPoolExecutor(min(AT_A_TIME, len(files)), "treeckpt-files") as pool:
        return [future.result() for future in [submit_or_call(pool, partial(call, file)) for file in files]]


def call_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Starts a call in a thread with this name, for which the end of the process waits."""
    pool = ThreadPoolExecutor(1, name)
    try:
        return submit_or_call(pool, call)
    finally:
        pool.shutdown(wait=False)


def submit_or_call(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """Submits a call to a pool; makes it here where no thread can be started, as when the interpreter ends.

    After an error of the pool a thread of it may make the same call once more.
    """
    try:
        return pool.submit(call)
    except RuntimeError:
        done = Future[T]()
        done.set_result(call())
        return done
