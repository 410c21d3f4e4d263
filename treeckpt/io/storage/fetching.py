"""What stores take and give that fetch many ranges at once, because each request takes long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

FETCH_MEMORY = 512 << 20
"""Bytes that are on their way from a store that fetches, by default: 64 requests of 8 MiB."""

FileRange = tuple[str, int, int]
"""(name, offset, bytes) of a part of a file."""
Consume = Callable[[int, int, memoryview, int | None], object]
"""Takes the number of a range, where in it bytes start, the bytes, and the size of the whole file if that is known.

The bytes of one range come in order and one call at a time, those of several ranges from several threads. They last
until the call ends. What lies behind the end of the file is left out; for a range without any byte in the file one call
has no bytes.
"""


@runtime_checkable
class SupportsFetching(Protocol):
    """A store whose requests take long, so that many ranges are fetched at once."""

    request_nbytes: int
    """Bytes of one request where any size would do."""

    def fetch(
        self,
        ranges: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        """Fetches ranges and hands their bytes to `consume` as they arrive.

        Args:
            memory: bytes of ranges that have been requested and not consumed, at most, unless one range is longer.
            first: the first so many ranges are consumed before any other, which may be on their way already.
            shared: keeps the bytes in the page cache, as `Store.read_into` does, where the store has one.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...
