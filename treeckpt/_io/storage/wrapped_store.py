"""Stores around another store: what they do not change is done by the inner one."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec

from .local_store import for_reading
from .store import Consume, DirectoryEntry, FileRange, RunStore, Store, StoreTraits, VersionTag, Writer


class WrappedStore(Store):
    """Does everything by another store; a subclass changes what it is for.

    It has no `local_path`: that would lead around it.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def traits(self) -> StoreTraits:
        return msgspec.structs.replace(self.inner.traits, local_path=None)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def place(self) -> str:
        return self.inner.place

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def is_link(self) -> bool:
        return self.inner.is_link

    def address(self) -> bytes | None:
        return None if self.inner.address() is None else super().address()

    def sharing(self, places: Mapping[str, str]) -> Store:
        store = copy.copy(self)
        store.inner = self.inner.sharing(places)
        return store

    def run(self) -> RunStore:
        return self.inner.run()

    def prepare(self) -> None:
        self.inner.prepare()

    def entries(self) -> dict[str, DirectoryEntry]:
        return self.inner.entries()

    def entry(self, name: str) -> DirectoryEntry | None:
        return self.inner.entry(name)

    def sizes(self) -> dict[str, int]:
        return self.inner.sizes()

    def modified_ns(self) -> int | None:
        return self.inner.modified_ns()

    def listed(self) -> Store:
        listed = self.inner.listed()
        return self if listed is self.inner else ListedStore(self, listed.entries())

    def remove_directory(self) -> bool:
        return self.inner.remove_directory()

    def remove_link(self) -> None:
        self.inner.remove_link()

    def read(self, name: str, *, limit: int) -> bytes:
        return self.inner.read(name, limit=limit)

    def read_version(self, name: str, *, limit: int) -> tuple[bytes, VersionTag]:
        return self.inner.read_version(name, limit=limit)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self.inner.read_into(name, offset, out, shared=shared)

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        return self.inner.read_parts(name, offset, parts, shared=shared)

    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> AbstractContextManager[memoryview | None]:
        return self.inner.mapped(name, offset, nbytes, fetch=fetch)

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        return self.inner.map(name, offset, nbytes)

    def fetch(
        self,
        ranges: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        self.inner.fetch(ranges, consume, memory=memory, first=first, shared=shared)

    def create(self, name: str, nbytes: int) -> Writer:
        return self.inner.create(name, nbytes)

    def publish(
        self, name: str, data: bytes, *, replace: bool | VersionTag, check: Callable[[], object] = lambda: None
    ) -> None:
        self.inner.publish(name, data, replace=replace, check=check)

    def publish_copy(self, name: str, data: bytes, *, of: str) -> None:
        self.inner.publish_copy(name, data, of=of)

    def check_condition(self, name: str, data: bytes, *, replaces: bool) -> None:
        self.inner.check_condition(name, data, replaces=replaces)

    def rename(self, name: str, target: str, *, replace: bool) -> None:
        self.inner.rename(name, target, replace=replace)

    def delete(self, name: str, *, version: VersionTag | None = None) -> None:
        self.inner.delete(name, version=version)

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


class ListedStore(WrappedStore):
    """A store as it was listed: it says what it has by that listing, without another request."""

    def __init__(self, inner: Store, entries: Mapping[str, DirectoryEntry]) -> None:
        super().__init__(inner)
        self._entries = dict(entries)

    def entries(self) -> dict[str, DirectoryEntry]:
        return self._entries

    def entry(self, name: str) -> DirectoryEntry | None:
        return self._entries.get(name)

    def sizes(self) -> dict[str, int]:
        # the default, from `entries`: that of `WrappedStore` would ask the inner store
        return Store.sizes(self)

    def modified_ns(self) -> int | None:
        return Store.modified_ns(self)

    def listed(self) -> Store:
        return self.inner.listed()

    def sharing(self, places: Mapping[str, str]) -> Store:
        inner = self.inner.sharing(places)
        found = {name: entry for name in places if (entry := inner.entry(name)) is not None}
        return ListedStore(inner, {**self._entries, **found})


OnBytesRead = Callable[[int, int | None], object]
"""Takes how many bytes of files were read, and how many there are to read, None where that is not known."""


class CountedStores:
    """Gives stores whose reads are counted together, in any threads, or the stores themselves without `on_read`."""

    def __init__(self, on_read: OnBytesRead | None, total: int | None = None) -> None:
        self._on_read, self._total, self._done = on_read, total, 0
        self._lock = threading.RLock()

    def __call__(self, store: Store) -> Store:
        # `for_reading` looks at the class of the store, which the wrapper would hide
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
