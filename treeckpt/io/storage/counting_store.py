"""A store that counts the bytes of shards that pass through it, for progress bars and progress records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .store import Store, SupportsMappedReads, Writer

__all__ = ["CountingStore"]


class CountingStore:
    """A store that calls `count` with the bytes of each read, and of each block written behind a header."""

    def __init__(self, inner: Store, count: Callable[[int], None]) -> None:
        self._inner, self._count, self.url = inner, count, inner.url
        self.prepare, self.sizes, self.read, self.map = inner.prepare, inner.sizes, inner.read, inner.map
        self.publish, self.delete, self.close = inner.publish, inner.delete, inner.close
        if isinstance(inner, SupportsMappedReads):
            self.mapped = partial(self._mapped, inner)

    @contextlib.contextmanager
    def _mapped(
        self, inner: SupportsMappedReads, name: str, offset: int, nbytes: int, *, fetch: bool
    ) -> Iterator[memoryview | None]:
        with inner.mapped(name, offset, nbytes, fetch=fetch) as memory:
            yield memory
            self._count(0 if memory is None else nbytes)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self._inner.read_into(name, offset, out, shared=shared)
        self._count(len(out))

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview]) -> bool:
        done = self._inner.read_parts(name, offset, parts)
        self._count(sum(map(len, parts)) if done else 0)
        return done

    def create(self, name: str, nbytes: int) -> Writer:
        return _CountingWriter(self._inner.create(name, nbytes), self._count)


class _CountingWriter:
    def __init__(self, inner: Writer, count: Callable[[int], None]) -> None:
        self._inner, self._count = inner, count
        self.ordered = getattr(inner, "ordered", False)
        self.commit, self.abort = inner.commit, inner.abort

    def write(self, offset: int, data: memoryview) -> None:
        self._inner.write(offset, data)
        if offset:  # the header is not part of the planned bytes
            self._count(len(data))
