"""Has files of another program read as a checkpoint: its index is made of what they hold, its bytes stay in them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from .._core.format.records import File, Index
from .._core.tree.flatten import flatten
from .._inspect.checksum_diff import Checksums
from .._io.comm.comm import launched_rank
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.far_store import for_reading
from .._io.storage.foreign_formats import describe_foreign, names_text
from .._io.storage.memory import PAGE_NBYTES
from .._io.storage.open import open_store
from .._io.storage.shard_reader import OpenedShard
from .._io.storage.store import Store
from ..errors import FormatError
from .checksums import ArchiveStorages
from .files import FileRange, ForeignStore, foreign_at

if TYPE_CHECKING:
    from .foreign_index import ForeignIndex
    from .pickle_values import RefusedLeaf

_log = logging.getLogger("treeckpt")


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
        super().__init__(store)
        self._source: FileRange | ForeignStore = source
        self._files = cast(ForeignStore, store)  # as `foreign_at` gives it
        self.url = source.label if isinstance(source, FileRange) else source.url
        self._storages = ArchiveStorages(alone=False)

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
        if found.unread and ((launched := launched_rank()) is None or launched.rank == 0):
            text = "%s: files of %s are read, and beside them these are not: %s. Give the path of one to load it"
            _log.warning(text, self.url, kind, names_text(found.unread))
        sizes = {name: size for name, size in self.sizes.items() if not name.startswith(".")}
        for path, leaf in flatten(found.tree)[1]:
            self._storages.note(path, leaf)
        return index_files(found, sizes, self._files.modified_ns(), refused, self._files)

    def own(self) -> Checkpoint:
        found, _ = describe_foreign(self.url) or ("files of another program", "")
        raise FormatError(
            self.url,
            expected="a checkpoint of treeckpt, which has checksums of all its bytes",
            found=found,
            hint="A load compares the CRC-32s that files of torch.save and DCP have; convert writes all checksums",
        )

    def checksums(self, file: File) -> Checksums:
        return self.own().checksums(file)

    def reopened(self) -> Checkpoint:
        return ForeignCheckpoint(self._source)

    def check_against_files(self) -> None:
        pass

    @property
    def repeated_nbytes(self) -> int:
        return self._index.repeated_nbytes

    def shard(self, file: File, *, whole: bool = True) -> OpenedShard:
        return OpenedShard(
            file, (), PAGE_NBYTES, self.index, checks=_EntryChecks(self._storages, f"{self.store.url}/{file.name}")
        )

    def is_open(self, file: File, *, whole: bool) -> bool:
        return True

    def is_replaced(self) -> bool:
        return False

    def unverified(self, nbytes: int) -> int:
        return self._storages.unverified(nbytes)


def open_checkpoint(path: Any) -> tuple[Store, Callable[[], Checkpoint]]:
    """Opens a path, a URL or a store; returns its store, and a function that opens a version of the checkpoint there.

    Raises:
        StoreError, CheckpointError: as `open_store`.
    """
    if (found := foreign_at(path)) is not None:
        return (found.store if isinstance(found, FileRange) else found), partial(ForeignCheckpoint, found)
    store = for_reading(open_store(path))
    return store, partial(Checkpoint, store)
