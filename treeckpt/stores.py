"""Stores: where the files of a checkpoint, or of a run, lie. All functions take one in place of a path.

tc.load(tc.stores.LocalStore("run/step_00000100"))
tc.Manager(tc.stores.ObjectRun("s3://bucket/run"))
"""

from __future__ import annotations

from ._io.storage.object_store import ObjectRun, ObjectStore
from ._io.storage.run_store import LocalRun, RunStore
from ._io.storage.store import LocalStore, MemoryStore, Store

__all__ = ["LocalRun", "LocalStore", "MemoryStore", "ObjectRun", "ObjectStore", "RunStore", "Store"]
