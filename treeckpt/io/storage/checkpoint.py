"""An opened checkpoint: its store, its index, and the headers of its shards, each read and decoded once per call.

Everything that is read through one `Checkpoint` belongs to one save, or the read fails. A save with `overwrite=True`
deletes the files of the save before: a reader of the previous index finds files missing, and must read the new version.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import numpy as np

from ...core.analysis.checksum_diff import Checksums
from ...core.format.check_index import check_against_files
from ...core.format.index import INDEX_NAME
from ...core.format.records import File, Index
from ...core.format.shard_header import BLOCK
from ...errors import CheckpointError, CheckpointNotFound
from ..os_errors import wrap_read_error
from ..timing import Recorder
from .fetching import FileRange
from .local_read import too_short
from .metadata_files import decode_and_check, read_index_bytes
from .shard_reader import (
    ArrivingBlocks,
    ByteRange,
    OpenedShard,
    check_blocks,
    check_checksum,
    check_parts,
    open_shard,
    read_range,
)
from .store import Store

HEADERS = 64 << 20
"""Bytes of headers that are requested at a time."""


class Replaced(CheckpointError):
    """Another save has replaced the version that was being read."""


class UnexpectedBlocks(Exception):
    """Reads were listed before a shard was opened whose checksums are those of blocks of another size."""


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


class ShardReader:
    """Reads byte ranges of a checkpoint's shards, and records a span for each.

    Args:
        verify: compares every block that is read with its checksum.
        whole: as for `Checkpoint.shard`.
        ahead: reads are listed before shards are open; `fetch` then opens them, and asks for the data meanwhile.
    """

    def __init__(
        self, checkpoint: Checkpoint, recorder: Recorder, *, verify: bool, whole: bool = True, ahead: bool = False
    ) -> None:
        self.checkpoint, self.store, self.verify, self._ahead = checkpoint, checkpoint.store, verify, ahead
        self._recorder, self._whole = recorder, whole

    def locate(self, rank: int, start: int, stop: int, path: str) -> tuple[OpenedShard, int]:
        """The shard with bytes `start:stop` of a rank's stream, and where they start in its data area."""
        file, position = self.checkpoint.index.locate(rank, start, stop, path)
        if self._ahead and not self.checkpoint.is_open(file, whole=self._whole):
            return OpenedShard(file, (), BLOCK, self.checkpoint.index), position - file.header
        return self.checkpoint.shard(file, whole=self._whole), position - file.header

    def read(self, wanted: ByteRange, out: memoryview, *, shared: bool = False) -> None:
        """Fills `out` with a range."""
        begin = self._recorder.now()
        read_range(self.store, wanted, out, verify=self.verify, shared=shared)
        self._recorder.add("read", begin, self._recorder.now(), len(out))

    def fetch(
        self,
        wanted: Sequence[ByteRange],
        consume: Callable[[int, int, memoryview], object],
        *,
        memory: int,
        shared: bool = False,
    ) -> None:
        """Reads many ranges at once, from a store that has `fetch`; opens their shards first.

        Args:
            consume: takes the number of a range, where in it bytes start, and the bytes, in order; blocks that end in
                them match their checksums.
            memory, shared: as for `Store.fetch`.

        Raises:
            UnexpectedBlocks: shards turn out to have other blocks than the ranges are made of; nothing was consumed.
        """
        headers = ArrivingHeaders(self.checkpoint, [one.shard.file for one in wanted], whole=self._whole)
        first = headers.ranges
        checks: dict[int, ArrivingBlocks] = {}
        begins: dict[int, int] = {}

        def take(number: int, at: int, data: memoryview, size: int | None) -> None:
            if number < len(first):
                shard = headers.take(number, at, data, size)
                if shard is not None and shard.block != BLOCK:
                    raise UnexpectedBlocks
                return
            number -= len(first)
            one = wanted[number]
            file, nbytes = one.shard.file, one.stop - one.start
            position = file.header + one.start
            if size is not None and size < position + nbytes:
                url = f"{self.store.url}/{file.name}"
                raise too_short(url, position, nbytes, max(size - position, 0), what="object")
            if not at:
                begins[number] = self._recorder.now()
                shard = self.checkpoint.shard(file, whole=self._whole)
                checks[number] = ArrivingBlocks(shard, one.start, partial(check_checksum, self.store, shard))
            if self.verify:
                checks[number].add(data)
            consume(number, at, data)
            if at + len(data) == nbytes:
                self._recorder.add("read", begins.pop(number), self._recorder.now(), nbytes)
                del checks[number]

        ranges = [(one.shard.file.name, one.shard.file.header + one.start, one.stop - one.start) for one in wanted]
        assert self.store.traits.far, "the caller has looked"
        with headers.named_errors():
            self.store.fetch([*first, *ranges], take, memory=memory, first=len(first), shared=shared)

    @contextlib.contextmanager
    def mapped(self, wanted: ByteRange, *, fetch: bool) -> Iterator[memoryview | None]:
        """A range as mapped memory while the body runs, verified as `read` does; None where it cannot be mapped."""
        begin = self._recorder.now()
        file = wanted.shard.file
        position, nbytes = file.header + wanted.start, wanted.stop - wanted.start
        with self.store.mapped(file.name, position, nbytes, fetch=fetch) as memory:
            if memory is not None:
                if self.verify:
                    check_blocks(self.store, wanted.shard, wanted.start, memory)
                self._recorder.add("read", begin, self._recorder.now(), len(memory))
            yield memory

    def read_parts(self, wanted: ByteRange, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        """Reads a range straight into its destinations if it is in the page cache; False, with nothing read, if not.

        Args:
            shared: also brings it into the page cache.
        """
        begin = self._recorder.now()
        shard = wanted.shard
        if not self.store.read_parts(shard.file.name, shard.file.header + wanted.start, parts, shared=shared):
            return False
        if self.verify:
            check_parts(self.store, shard, wanted.start, parts)
        self._recorder.add("read", begin, self._recorder.now(), wanted.stop - wanted.start)
        return True
