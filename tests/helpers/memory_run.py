"""A run of checkpoints in memory, for tests that need no disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from treeckpt.io.storage.run_store import DirectoryEntry, Folder
from treeckpt.io.storage.store import MemoryStore, Writer

__all__ = ["MemoryRun"]


class _TimedStore(MemoryStore):
    """A memory store that records when its files were written."""

    def __init__(self, name: str, clock: Callable[[], int]) -> None:
        super().__init__(name)
        self.clock, self.times = clock, dict[str, int]()
        self.changed_ns: int | None = None

    def prepare(self) -> None:
        self.changed_ns = self.changed_ns or self.clock()

    def create(self, name: str, nbytes: int) -> Writer:
        writer = super().create(name, nbytes)
        self.times[name] = self.changed_ns = self.clock()
        return writer

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        super().publish(name, data, replace=replace)
        self.times[name] = self.changed_ns = self.clock()

    def delete(self, name: str) -> None:
        super().delete(name)
        self.changed_ns = self.clock()


class MemoryFolder(Folder):
    """The folder of one store of a `MemoryRun`."""

    def __init__(self, run: MemoryRun, name: str) -> None:
        new = _TimedStore(f"{run.url.partition('://')[2]}/{name}", run.clock)
        self._run, self._timed = run, run.stores.setdefault(name, new)
        super().__init__(self._timed)

    def modified_ns(self) -> int | None:
        return self._timed.changed_ns

    def entries(self) -> dict[str, DirectoryEntry]:
        sizes, times = self._timed.sizes(), self._timed.times
        return {name: DirectoryEntry(nbytes, times[name], times[name]) for name, nbytes in sizes.items()}

    def remove(self) -> bool:
        if self._timed.files:
            return False
        self._run.stores.pop(self.name, None)
        return True


class MemoryRun:
    """A run in this process's memory."""

    def __init__(self, name: str = "run", *, clock: Callable[[], int] = time.time_ns) -> None:
        self.url, self.clock = f"memory://{name}", clock
        self.stores: dict[str, _TimedStore] = {}

    def names(self) -> list[str]:
        return sorted(name for name, store in self.stores.items() if store.changed_ns is not None)

    def folder(self, name: str) -> MemoryFolder:
        return MemoryFolder(self, name)
