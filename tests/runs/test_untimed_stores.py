"""Stores that do not know when their files were written: these may be new."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import treeckpt as tc
from treeckpt._io.storage.store import DirectoryEntry, MemoryStore, RunStore


class UntimedStore(MemoryStore):
    def entries(self) -> dict[str, DirectoryEntry]:
        return {name: msgspec.structs.replace(entry, modified_ns=0) for name, entry in super().entries().items()}


class UntimedRun(RunStore):
    def __init__(self) -> None:
        self.stores: dict[str, UntimedStore] = {}

    @property
    def url(self) -> str:
        return "memory://untimed"

    def names(self) -> list[str]:
        return sorted(name for name, store in self.stores.items() if store.files)

    def folder(self, name: str) -> UntimedStore:
        return self.stores.setdefault(name, UntimedStore(name))


def test_what_is_being_read_or_written_stays() -> None:
    run = UntimedRun()
    shard = "shard-00000-of-00002.0123456789abcdef.safetensors"
    run.folder("step_00000009").files[shard] = bytearray(b"of another host")
    with tc.Manager(run, keep=None, background=False) as manager:
        manager.save(1, {"step": 1})
        manager.save(2, {"step": 2})
        with manager.reading(1) as store:
            with pytest.raises(tc.CheckpointError, match="it is being read"):
                manager.delete(1)
            assert tc.load(store) == {"step": 1}
        manager.delete(1)
        manager.clean()
        assert manager.steps() == [2] and shard in run.folder("step_00000009").files


def test_a_step_that_was_saved_again_is_read_again() -> None:
    run = UntimedRun()
    with tc.Manager(run, keep=None, background=False, overwrite=True) as manager:
        for loss in (5.0, 5.0):
            manager.save(1, {"step": 1}, metrics={"loss": loss})
            manager.save(2, {"step": 2}, metrics={"loss": 2.0})
        with tc.Manager(run) as other:
            assert other.best("loss") == 2
            manager.save(1, {"step": 1}, metrics={"loss": 1.0})
            assert other.best("loss") == 1 and other.restore(step=1) == {"step": 1}


def test_what_was_put_into_a_memory_store_is_repaired() -> None:
    saved, store = tc.MemoryStore(), tc.MemoryStore()
    tc.save(saved, {"w": np.arange(9.0)})
    store.files.update(saved.files)
    [shard] = [name for name in store.files if name.startswith("shard")]
    store.files[shard][30] ^= 1
    report = tc.verify(store, repair=True)
    assert report.ok and report.repairs[0].file == shard
