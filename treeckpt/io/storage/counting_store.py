"""A store that counts the bytes of shards that are read through it, for progress bars."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .store import Consume, FileRange, Store, SupportsFetching, SupportsMappedReads


class CountingStore:
    """A store that calls `count` with the bytes of each read of a shard."""

    def __init__(self, inner: Store, count: Callable[[int], None]) -> None:
        self._inner, self._count, self.url = inner, count, inner.url
        self.prepare, self.sizes, self.read, self.map = inner.prepare, inner.sizes, inner.read, inner.map
        self.create, self.publish, self.delete, self.close = inner.create, inner.publish, inner.delete, inner.close
        if isinstance(inner, SupportsMappedReads):
            self.mapped = partial(self._mapped, inner)
        if isinstance(inner, SupportsFetching):
            self.fetch, self.request_nbytes = partial(self._fetch, inner), inner.request_nbytes

    @contextlib.contextmanager
    def _mapped(
        self, inner: SupportsMappedReads, name: str, offset: int, nbytes: int, *, fetch: bool
    ) -> Iterator[memoryview | None]:
        with inner.mapped(name, offset, nbytes, fetch=fetch) as memory:
            yield memory
            self._count(0 if memory is None else nbytes)

    def _fetch(
        self,
        inner: SupportsFetching,
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

        inner.fetch(ranges, counted, memory=memory, first=first, shared=shared)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self._inner.read_into(name, offset, out, shared=shared)
        self._count(len(out))

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        done = self._inner.read_parts(name, offset, parts, shared=shared)
        self._count(sum(map(len, parts)) if done else 0)
        return done
