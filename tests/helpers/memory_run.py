"""A run of checkpoints in memory, for tests that need no disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from treeckpt._io.storage.store import DirectoryEntry, MemoryStore, RunStore, Store, Writer

__all__ = ["MemoryRun"]


class _TimedStore(MemoryStore):
    """A memory store that records when its files were written."""

    def __init__(self, run: MemoryRun, name: str) -> None:
        super().__init__(f"{run.url.partition('://')[2]}/{name}")
        self.run, self.clock, self.times = run, run.clock, dict[str, int]()
        self.changed_ns: int | None = None

    def modified_ns(self) -> int | None:
        return self.changed_ns

    def entries(self) -> dict[str, DirectoryEntry]:
        found, times = list(self.files.items()), self.times
        return {name: DirectoryEntry(len(data), times[name], times[name]) for name, data in found}

    def remove_directory(self) -> bool:
        if self.files:
            return False
        self.run.stores.pop(self.name, None)
        return True

    def prepare(self) -> None:
        self.changed_ns = self.changed_ns or self.clock()

    def create(self, name: str, nbytes: int) -> Writer:
        writer = super().create(name, nbytes)
        self.times[name] = self.changed_ns = self.clock()
        return writer

    def publish(self, name: str, data: bytes, **options: Any) -> None:
        super().publish(name, data, **options)
        self.times[name] = self.changed_ns = self.clock()

    def delete(self, name: str, **options: Any) -> None:
        super().delete(name, **options)
        self.changed_ns = self.clock()


class MemoryRun(RunStore):
    """A run in this process's memory."""

    def __init__(self, name: str = "run", *, clock: Callable[[], int] = time.time_ns) -> None:
        self._name, self.clock = name, clock
        self.stores: dict[str, _TimedStore] = {}

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def names(self) -> list[str]:
        made = (name for name, store in self.stores.items() if store.changed_ns is not None)
        return sorted(name for name in made if not name.startswith("."))

    def folder(self, name: str) -> Store:
        return self.stores.setdefault(name, _TimedStore(self, name))
