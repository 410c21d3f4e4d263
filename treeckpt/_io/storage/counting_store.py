"""Stores that count the bytes of files that are read through them, for progress bars."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from .far_store import for_reading
from .fetching import Consume, FileRange
from .store import Store
from .wrapped_store import WrappedStore

OnBytesRead = Callable[[int, int | None], object]
"""Takes how many bytes of files were read, and how many there are to read, None where that is not known."""


class CountedStores:
    """Gives stores whose reads are counted together, in any threads, or the stores themselves without `on_read`."""

    def __init__(self, on_read: OnBytesRead | None, total: int | None = None) -> None:
        self._on_read, self._total, self._done = on_read, total, 0
        self._lock = threading.RLock()

    def __call__(self, store: Store) -> Store:
        return store if self._on_read is None else CountingStore(for_reading(store), self._add, self._add_more)

    def expect(self, nbytes: Callable[[], int]) -> None:
        """Sets how many more bytes will be read, if they are counted; `nbytes` computes it."""
        if self._on_read is not None:
            more = nbytes()  # which may read
            self._total = self._done + more
            self._add(0)

    def _add_more(self, nbytes: int) -> None:
        """Counts bytes that no total has in it, as those of indexes, while none is known."""
        if self._total is None:
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        assert self._on_read is not None, "only then are reads counted"
        with self._lock:
            self._done += nbytes
            self._on_read(self._done, self._total)


class CountingStore(WrappedStore):
    """A store that calls `count` with the bytes of each read of a shard, and `count_more` with those of other files."""

    def __init__(
        self, inner: Store, count: Callable[[int], None], count_more: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(inner)
        self._count, self._count_more = count, count_more

    @contextlib.contextmanager
    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> Iterator[memoryview | None]:
        with self.inner.mapped(name, offset, nbytes, fetch=fetch) as memory:
            yield memory
            self._count(0 if memory is None else nbytes)

    def fetch(
        self,
        ranges: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        def counted(number: int, at: int, data: memoryview, size: int | None) -> None:
            consume(number, at, data, size)
            self._count(len(data))

        self.inner.fetch(ranges, counted, memory=memory, first=first, shared=shared)

    def read(self, name: str, *, limit: int) -> bytes:
        data = self.inner.read(name, limit=limit)
        if self._count_more is not None:
            self._count_more(len(data))
        return data

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self.inner.read_into(name, offset, out, shared=shared)
        self._count(len(out))

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        done = self.inner.read_parts(name, offset, parts, shared=shared)
        self._count(sum(map(len, parts)) if done else 0)
        return done
