"""Calls a function for each of many files: one after the other on a disk, many at a time in a remote store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..._threads import ThreadPool
from .store import Store

AT_A_TIME = 64
"""Calls at a time, each of which waits for one answer of the store or a few: at 40 ms an answer the headers of 100
shards are read, and their index is made, in 0.35 s, and one after the other in 4.5 s."""
T = TypeVar("T")
F = TypeVar("F")


def for_each(store: Store, call: Callable[[F], T], files: Sequence[F]) -> list[T]:
    """Returns the result of each call.

    Raises:
        Exception: that of the first file whose call raised; on a disk the calls for later files were not made.
    """
    if not store.traits.far or len(files) < 2:
        return [call(file) for file in files]
    with ThreadPool(min(AT_A_TIME, len(files)), "treeckpt-files") as pool:
        return [future.result() for future in [pool.submit(call, file) for file in files]]
