"""An opened checkpoint: its store, its index, and the headers of its shards, each read and decoded once per call.

Everything that is read through one `Checkpoint` belongs to one save, or the read fails. A save with `overwrite=True`
deletes the files of the save before: a reader of the previous index finds files missing, and must read the new version.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from ..._core.format.check_index import check_against_files
from ..._core.format.index import INDEX_NAME
from ..._core.format.records import File, Index
from ..._inspect.diff import Checksums
from ...errors import CheckpointError, CheckpointNotFound
from ..os_errors import wrap_read_error
from .fetching import FileRange
from .metadata_files import decode_and_check, read_index_bytes
from .shard_reader import OpenedShard, open_shard
from .store import Store

HEADERS = 64 << 20
"""Bytes of headers that are requested at a time."""


class Replaced(CheckpointError):
    """Another save has replaced the version that was being read."""


class Checkpoint:
    """One version of a checkpoint; `index` is given where the caller has decoded it already."""

    def __init__(self, store: Store, index: Index | None = None) -> None:
        self.store, self.url = store, store.url
        self._shards: dict[tuple[str, bool], OpenedShard] = {}
        self._checksums: dict[str, Checksums] = {}
        if index is not None:
            self.index = index

    @cached_property
    def index_bytes(self) -> bytes:
        """The index as it is stored, read when it is first needed, or set by a caller that has read this version."""
        return read_index_bytes(self.store)

    @cached_property
    def index(self) -> Index:
        """The index, read when it is first needed; raises as `read_index`."""
        return decode_and_check(self.store, self.index_bytes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Every file of the store and its size in bytes, listed once."""
        return self.store.sizes()

    def check_against_files(self) -> None:
        """Raises CorruptError for an index that describes far more bytes than the files can hold."""
        check_against_files(self.index, self.sizes, self.url)

    def shard(self, file: File, *, whole: bool = True) -> OpenedShard:
        """A shard whose header was read and checked; `whole` and errors as for `open_shard`."""
        key = (file.name, whole)
        if key not in self._shards:
            if self.store.traits.far:
                self.open_shards([file], whole=whole)
            else:
                self._shards[key] = open_shard(self.store, self.index, file, self.sizes.get(file.name), whole=whole)
        return self._shards[key]

    def add_shard(self, shard: OpenedShard, *, whole: bool) -> OpenedShard:
        """Keeps a shard that was opened elsewhere."""
        self._shards[shard.file.name, whole] = shard
        return shard

    def is_open(self, file: File, *, whole: bool) -> bool:
        """Whether the header of a shard was read."""
        return (file.name, whole) in self._shards

    def open_shards(self, files: Iterable[File], *, whole: bool) -> None:
        """Reads the headers of shards all at once, from a store that has `fetch`; errors as for `shard`."""
        headers = ArrivingHeaders(self, files, whole=whole)
        assert self.store.traits.far, "the caller has looked"
        with headers.named_errors():
            self.store.fetch(headers.ranges, headers.take, memory=HEADERS)

    def checksums(self, file: File) -> Checksums:
        """The checksums of a shard's blocks; raises as `shard`."""
        if file.name not in self._checksums:
            shard = self.shard(file)
            self._checksums[file.name] = Checksums(np.array(shard.hashes, np.uint64), shard.block)
        return self._checksums[file.name]

    def with_index(self, index: Index) -> Checkpoint:
        """The same files under another index."""
        found = copy.copy(self)
        found.index = index
        return found

    def own(self) -> Checkpoint:
        """Returns itself; raises FormatError for files of another program, which have no checksums of blocks."""
        return self

    def reopened(self) -> Checkpoint:
        """The version that is at the same place now."""
        return Checkpoint(self.store)

    @property
    def repeated_nbytes(self) -> int:
        """Bytes that its arrays may take beyond those of its files, where views in foreign files repeat bytes."""
        return 0

    def unverified(self, nbytes: int) -> int:
        """How many of so many bytes of arrays that were read have been compared with no checksum."""
        return 0

    def is_replaced(self) -> bool:
        """Whether another index was published since this one was read.

        Raises:
            CheckpointNotFound: none is left.
            StoreError: it could not be read.
        """
        if "index_bytes" not in vars(self):
            return False
        try:
            return self.store.read(INDEX_NAME, limit=len(self.index_bytes)) != self.index_bytes
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                self.url,
                expected=f"a checkpoint ({INDEX_NAME})",
                found="none: it was deleted while it was being read",
                hint="Load another step",
            ) from error
        except CheckpointError:  # longer than the one before
            return True
        except OSError as error:
            raise wrap_read_error(error, f"{self.url}/{INDEX_NAME}") from error


class ArrivingHeaders:
    """The headers of those of some shards that are not open yet: each is one range, and opens its shard.

    Args:
        whole: as for `Checkpoint.shard`.
    """

    def __init__(self, checkpoint: Checkpoint, files: Iterable[File], *, whole: bool) -> None:
        named = {file.name: file for file in files}
        self._checkpoint, self._whole, self._named = checkpoint, whole, named
        self._files = [file for file in named.values() if not checkpoint.is_open(file, whole=whole)]
        self._data = [bytearray() for _ in self._files]

    @property
    def ranges(self) -> list[FileRange]:
        return [(file.name, 0, file.header) for file in self._files]

    def take(self, number: int, at: int, data: memoryview, size: int | None) -> OpenedShard | None:
        """Takes bytes of the header with a number; returns the shard with the last of them.

        Raises:
            CorruptError: as `Checkpoint.shard`.
        """
        one, file, header = self._checkpoint, self._files[number], self._data[number]
        header += data
        if len(header) < min(file.header, file.header if size is None else size):
            return None
        size = one.sizes.get(file.name) if size is None else size
        shard = open_shard(one.store, one.index, file, size, whole=self._whole, header=header)
        return one.add_shard(shard, whole=self._whole)

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Has a shard that is missing named by the same error as where the store is listed first."""
        try:
            yield
        except FileNotFoundError:
            sizes = self._checkpoint.store.sizes()
            for file in self._named.values():
                if file.name not in sizes:
                    open_shard(self._checkpoint.store, self._checkpoint.index, file, None)
            raise
