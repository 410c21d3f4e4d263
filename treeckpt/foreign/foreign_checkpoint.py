"""Has files of another program read as a checkpoint: its index is made of what they hold, its bytes stay in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..core.format.records import File, Index
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.far_store import for_reading
from ..io.storage.memory import PAGE
from ..io.storage.open import open_store
from ..io.storage.shard_reader import OpenedShard
from ..io.storage.store import Store
from .checksums import ArchiveStorages
from .files import FileRange, ForeignStore, foreign_at

if TYPE_CHECKING:
    from .foreign_index import ForeignIndex
    from .pickle_values import RefusedLeaf


class _EntryChecks(msgspec.Struct, frozen=True):
    """The checksums of one file: those of entries of zip archives in it."""

    storages: ArchiveStorages
    url: str

    def take(self, start: int, data: memoryview) -> None:
        self.storages.take_range(self.url, start, data)


class ForeignCheckpoint(Checkpoint):
    """Files of another program that are read in place.

    They have no version: what another process changes meanwhile is not noticed, unless a CRC-32 shows it.
    """

    def __init__(self, source: FileRange | ForeignStore) -> None:
        store = source.store if isinstance(source, FileRange) else source
        assert isinstance(store, ForeignStore), "as `foreign_at` gives it"
        super().__init__(store)
        self._source: FileRange | ForeignStore = source
        self._files = store
        self.url = source.label if isinstance(source, FileRange) else source.url
        self._storages = ArchiveStorages()

    @cached_property
    def index_bytes(self) -> bytes:
        return b""

    @cached_property
    def index(self) -> Index:
        return self._index

    @cached_property
    def _index(self) -> ForeignIndex:
        """Made of the files.

        Raises:
            CheckpointNotFound, FormatError, CorruptError: the state of the files.
        """
        from .foreign_index import index_files  # importing the readers takes as long as all the rest of a load
        from .sources import directory_format, file_format, read_foreign

        source = self._source
        if isinstance(source, FileRange):
            kind = file_format(self._files.directory / source.name)
        else:
            kind = directory_format(source)
        refused: list[RefusedLeaf] = []
        found = read_foreign(self._source, kind, self._storages, refused)
        sizes = {name: size for name, size in self.sizes.items() if not name.startswith(".")}
        return index_files(found, sizes, self._files.modified_ns(), refused, self._files)

    def reopened(self) -> Checkpoint:
        return ForeignCheckpoint(self._source)

    def check_against_files(self) -> None:
        pass

    @property
    def repeated_nbytes(self) -> int:
        return self._index.repeated_nbytes

    def shard(self, file: File, *, whole: bool = True) -> OpenedShard:
        return OpenedShard(
            file, (), PAGE, self.index, checks=_EntryChecks(self._storages, f"{self.store.url}/{file.name}")
        )

    def is_open(self, file: File, *, whole: bool) -> bool:
        return True

    def is_replaced(self) -> bool:
        return False

    def unverified(self, nbytes: int) -> int:
        return max(0, nbytes - self._storages.compared_nbytes)


def open_checkpoint(path: Any) -> tuple[Store, Callable[[], Checkpoint]]:
    """Opens a path, a URL or a store; returns its store, and a function that opens a version of the checkpoint there.

    Raises:
        StoreError, CheckpointError: as `open_store`.
    """
    if (found := foreign_at(path)) is not None:
        return (found.store if isinstance(found, FileRange) else found), partial(ForeignCheckpoint, found)
    store = for_reading(open_store(path))
    return store, partial(Checkpoint, store)
