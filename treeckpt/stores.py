"""Stores: where the files of a checkpoint, or of a run, lie. Functions take a store in place of a path.

    tc.load(tc.LocalStore("run/step_00000100"))
    tc.Manager(tc.ObjectRun("s3://bucket/run"))

A store of one's own subclasses `Store`, and `RunStore` for `Manager`; `treeckpt.testing.StoreSuite` tests it, and
`register` has the URLs of a scheme open it.
"""

from __future__ import annotations

from ._core.public_names import publish
from ._io.storage.local_store import LocalRun, LocalStore
from ._io.storage.object_store import ObjectRun, ObjectStore
from ._io.storage.open import register
from ._io.storage.store import DirectoryEntry, MemoryStore, RunStore, Store, StoreTraits, VersionTag, Writer

__all__ = [
    "DirectoryEntry",
    "LocalRun",
    "LocalStore",
    "MemoryStore",
    "ObjectRun",
    "ObjectStore",
    "RunStore",
    "Store",
    "StoreTraits",
    "VersionTag",
    "Writer",
    "register",
]

publish(__name__, __all__, globals())
