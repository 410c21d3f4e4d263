"""An opened checkpoint, its small files (index, timings, sidecar files), and the index made again from the shards.

Caches keep what was read of small files until the files change.

Everything that is read through one `Checkpoint` belongs to one save, or the read fails: its index, and the headers of
its shards, are each read and decoded once per call. A save with `overwrite=True` deletes the files of the save before:
a reader of the previous index finds files missing, and must read the new version.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import count
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from ..._core.format.check_index import check_against_files, needs_file_sizes
from ..._core.format.files import PIN_NAME, checksum, is_undecided, parse_file_name, stored_name
from ..._core.format.index import INDEX_NAME, MAX_INDEX, decode_index, rebuild
from ..._core.format.records import File, Index
from ..._core.format.references import SharedFile, decode_shared
from ..._core.format.shard_header import ShardHeader, parse_shard_name, shard_name
from ..._core.format.table_deltas import join_tables
from ..._core.format.timings import Timings, decode_timings, timings_name
from ..._core.text import count_text
from ..._inspect.diff import Checksums
from ...errors import CheckpointError, CheckpointNotFound, CorruptError, MismatchError, StoreError, TreeckptError
from ..os_errors import wrap_read_error
from .foreign_formats import describe_foreign, describe_place
from .shard_reader import OpenedShard, open_shard, read_header
from .store import DirectoryEntry, FileRange, Store, for_each

T = TypeVar("T")
OnShardsRead = Callable[[int, int], object]
"""Takes how many shards were read, and of how many."""


class KnownIndex(msgspec.Struct, frozen=True):
    """An index that was read a moment ago."""

    url: str
    """The URL of the checkpoint."""
    data: bytes
    """The bytes of the index as it is stored."""
    index: Index


class NewestIndex:
    """Keeps, of the indexes that are offered by several threads, the one that was created last, as it was read last.

    Args:
        local: whether it is offered those of local files too, which take no round trip to be read again.
    """

    def __init__(self, *, local: bool = False) -> None:
        self.local, self._lock = local, threading.RLock()
        self.found: KnownIndex | None = None

    def offer(self, known: KnownIndex) -> None:
        with self._lock:
            kept = self.found
            if kept is None or kept.url == known.url or kept.index.created_ns < known.index.created_ns:
                self.found = known


def read_index(store: Store) -> Index:
    """Returns the index of a checkpoint; raises as `read_index_bytes` and `decode_and_check`."""
    return decode_and_check(store, read_index_bytes(store))


def decode_and_check(store: Store, data: bytes) -> Index:
    """Decodes an index.

    Raises:
        CorruptError, FormatError: it is damaged, or lists more than the files can hold.
        StoreError: the files could not be listed.
    """
    index = decode_index(data, f"{store.url}/{INDEX_NAME}")
    if needs_file_sizes(index, len(data)):
        check_against_files(index, _listed(with_shared_files(store, index)), store.url)
    return index


def with_shared_files(store: Store, index: Index) -> Store:
    """Returns the store of a checkpoint with those of its shards that lie in the directories of others.

    Raises:
        StoreError: there are such, and the store cannot read them.
    """
    return store.sharing(index.shared_names) if index.shared_names else store


def read_index_bytes(store: Store) -> bytes:
    """Returns the content of a checkpoint's `index.json`.

    Raises:
        CheckpointNotFound: there is none; says whether shards are there.
        CorruptError: it is no file, or too long.
        StoreError: it could not be read.
    """
    try:
        return store.read(INDEX_NAME, limit=MAX_INDEX)
    except (FileNotFoundError, NotADirectoryError) as error:
        expected, names = f"a checkpoint ({INDEX_NAME})", _listed(store)
        if (taken := taken_index(store, names)) is not None:
            return taken[1]
        if shards := sum(parse_shard_name(name) is not None for name in names):
            found = f"{count_text(shards, 'shard')} of a save that never finished, or lost its index"
            hint = "Load another step; if the index was lost, treeckpt verify --repair makes it again"
        elif (foreign := describe_foreign(store.url)) is not None:
            expected, (found, hint) = f"a checkpoint of treeckpt ({INDEX_NAME})", foreign
        else:
            found, hint = describe_place(store.url)
        raise CheckpointNotFound(store.url, expected=expected, found=found, hint=hint) from error
    except OSError as error:
        raise wrap_read_error(error, f"{store.url}/{INDEX_NAME}", kind=CorruptError) from error


def _listed(store: Store) -> dict[str, int]:
    """Returns the files of a store and their sizes in bytes; raises StoreError if they could not be listed."""
    try:
        return store.listed().sizes()
    except OSError as error:
        raise wrap_read_error(error, store.url) from error


def taken_index(store: Store, names: Iterable[str]) -> tuple[str, bytes] | None:
    """Returns the name and content of an index that a deletion must put back that was killed; None if there is none.

    It is that of another save, where the deletion was stopped for minutes, or has been pinned meanwhile, and the
    deletion had not decided yet; see `deletions`.
    """
    names = list(names)
    for name in filter(is_undecided, names):
        with contextlib.suppress(TreeckptError, OSError):  # a mark without content, or it is back by now
            data = store.read(name, limit=MAX_INDEX)
            if decode_index(data, f"{store.url}/{name}").save_id != name.split(".")[1] or PIN_NAME in names:
                return name, data
    return None


def _index_content(store: Store) -> bytes | None:
    """Returns the content of a checkpoint's index, whatever it is; None if there is none, or it cannot be read."""
    try:
        return read_index_bytes(store)
    except CheckpointError:
        return None


def replaced_meanwhile(store: Store) -> CheckpointError:
    """Returns the error for a checkpoint that another save has replaced while it was repaired."""
    return CheckpointError(
        f"{store.url}/{INDEX_NAME}",
        expected="the index that was read first",
        found="another one, as another save was committed meanwhile",
        hint="It is as that save has written it. Verify it again",
    )


def read_timings(store: Store, save_id: str) -> Timings | None:
    """Returns the timings of a save, None if there are none; raises CorruptError or FormatError if they are damaged."""
    name = timings_name(save_id)
    try:
        data = store.read(name, limit=MAX_INDEX)
    except FileNotFoundError:
        return None
    timings = decode_timings(data, f"{store.url}/{name}")
    if timings.save_id != save_id:
        raise CorruptError(
            f"{store.url}/{name}",
            expected=f"timings of save {save_id}",
            found=f"those of save {timings.save_id}",
            hint="The file belongs to another save; restore the right one from a copy",
        )
    return timings


def read_sidecar(store: Store, index: Index, name: str) -> bytes:
    """Returns the content of a sidecar file.

    Raises:
        MismatchError: the checkpoint has none of that name.
        CorruptError: it is missing, cut short, or differs from its checksum.
    """
    sidecar = next((listed for listed in index.sidecars if listed.name == name), None)
    if sidecar is None:
        names = ", ".join(listed.name for listed in index.sidecars[:20]) or "none"
        raise MismatchError(f"{store.url}: {name}", expected="a file that was saved with it", found=f"files: {names}")
    stored = stored_name(index.save_id, name)
    url, data = f"{store.url}/{stored}", bytearray(sidecar.nbytes)
    try:
        if data:
            store.read_into(stored, 0, memoryview(data))
    except FileNotFoundError as error:
        raise CorruptError(url, expected=f"{sidecar.nbytes} bytes", found="no such file") from error
    if (found := checksum(data)) != sidecar.xxh3:
        raise CorruptError(
            url,
            expected=f"content with the checksum {sidecar.xxh3}",
            found=found,
            hint="The file was changed after it was written; restore it from a copy",
        )
    return bytes(data)


def rebuild_from_shards(
    store: Store, *, save_id: str | None = None, whole: bool = True, on_read: OnShardsRead | None = None
) -> Index:
    """Returns the index that the newest complete set of shards describes.

    Args:
        save_id: rebuilds the index of this save only, if it has shards there.
        whole: refuses shards and sidecar files that are missing, cut short or too long, as those of a save that never
            finished are.
        on_read: takes how many shards were read, and of how many, from any thread.

    Raises:
        CheckpointNotFound: there are no shards, or those of a checkpoint that was deleted.
        CorruptError, FormatError: no set of shards is complete and intact.
        CheckpointError: another save has published an index meanwhile, which must stay.
    """
    before = _index_content(store)
    saves: dict[str, list[str]] = {}
    kinds, first = set[str](), False
    for name in store.sizes():
        kinds |= {kind.kind} if (kind := parse_file_name(name)) is not None else set()
        if (parsed := parse_shard_name(name)) is not None:
            saves.setdefault(parsed[0], []).append(name)
            first |= parsed[1] == parsed[3] == 0
    if "index" not in kinds and ("deleted" in kinds or ("shared" in kinds and not first)):
        found = "one that was deleted; of its files those stay that other checkpoints share"
        raise CheckpointNotFound(store.url, expected="a checkpoint", found=found, hint="Load another step")
    if not saves:
        raise CheckpointNotFound(store.url, expected="shards", found="none", hint="Check the path")
    if save_id in saves:
        saves = {save_id: saves[save_id]}
    rebuilt: list[Index] = []
    errors: list[CheckpointError] = []
    for names in saves.values():
        try:
            rebuilt.append(_rebuild(store, sorted(names), whole, on_read))
        except CheckpointError as error:
            errors.append(error)
    if not rebuilt:
        raise errors[0]
    if _index_content(store) != before:
        raise replaced_meanwhile(store)
    return max(rebuilt, key=lambda index: index.created_ns)


def _rebuild(store: Store, names: list[str], whole: bool, on_read: OnShardsRead | None) -> Index:
    sizes, done = store.sizes(), count(1)

    def read(name: str) -> tuple[int, ShardHeader]:
        header = read_header(store, name, file_size=sizes.get(name))
        if on_read is not None:
            on_read(next(done), len(names))
        return header

    headers = for_each(store, read, names)
    shared = shared_files(headers, store.url)
    for rank, files in shared.items():
        headers += [_shared_header(store, rank, headers[0][1], file) for file in files]
    index = rebuild(headers, store.url, shared=shared)
    missing = sorted(set(range(index.world)) - {header.rank for _, header in headers})
    if missing:
        raise CorruptError(
            store.url,
            expected=f"shards of all {index.world} ranks",
            found=f"none of rank {', '.join(map(str, missing[:8]))}",
            hint="The save never finished, shards were lost, or they lie on the disks of other hosts: then copy the "
            "index.json of one of these here",
        )
    sizes = with_shared_files(store, index).sizes() if index.shared_names else sizes
    written = [(file.name, file.header + file.nbytes) for file in index.file_list]
    written += [(stored_name(index.save_id, sidecar.name), sidecar.nbytes) for sidecar in index.sidecars]
    for name, nbytes in written if whole else ():
        if sizes.get(name) != nbytes:
            raise CorruptError(
                f"{store.url}/{name}",
                expected=f"{nbytes} bytes",
                found="no such file" if name not in sizes else f"{sizes[name]}",
                hint="The save never finished, or the file was lost or cut short",
            )
    return index


def shared_files(headers: Iterable[tuple[int, ShardHeader]], name: str) -> dict[int, tuple[SharedFile, ...]]:
    """Returns by rank the files in other directories that the headers of own shards list.

    Those that have been copied here since are none of them. Raises FormatError.
    """
    headers = list(headers)
    own = {(header.rank, header.part) for _, header in headers}
    listed = {header.rank: decode_shared(header.shared, name) for _, header in headers if header.shared}
    return {rank: tuple(file for file in files if (rank, file.part) not in own) for rank, files in listed.items()}


def _shared_header(store: Store, rank: int, one: ShardHeader, file: SharedFile) -> tuple[int, ShardHeader]:
    """Reads the header of a file in another directory, as `rebuild` takes it; `one` is of any shard of the save.

    Raises:
        CorruptError, FormatError: it is missing or damaged.
    """
    name = shard_name(file.home.save_id, rank, one.world, file.home_part)
    try:
        size, header = read_header(store.run().folder(file.home.directory), name)
    except FileNotFoundError as error:
        raise missing_home(store, file.home.directory, name) from error
    return size, _as_part(header, one.save_id, file.part, file.stream)


def header_here(index: Index, file: File, header: ShardHeader) -> ShardHeader:
    """Returns the header of a shard with the save id, the part and the stream that it has in a checkpoint."""
    return _as_part(header, index.save_id, file.part, file.stream) if file.directory else header


def _as_part(header: ShardHeader, save_id: str, part: int, stream: int) -> ShardHeader:
    return msgspec.structs.replace(header, save_id=save_id, part=part, stream=stream, shared="")


def missing_home(store: Store, directory: str, name: str) -> CorruptError:
    """Returns the error for a shard that is not in the directory of the checkpoint that has written it."""
    return CorruptError(
        f"{store.url}/../{directory}/{name}",
        expected="a shard that this checkpoint shares with another one of its run",
        found="no such file",
        hint=f"Copy the directory {directory} beside this one too. Where the run is, treeckpt flatten gives a "
        "checkpoint files of its own",
    )


HEADERS_NBYTES = 64 << 20
"""Bytes of headers that are requested at a time."""


class Replaced(CheckpointError):
    """Another save has replaced the version that was being read."""


class Checkpoint:
    """One version of a checkpoint.

    Args:
        index: given where the caller has decoded it already.
        joined: its index has tables that were saved as deltas as loads see them; see `format.table_deltas`.
    """

    has_checksums = True
    """Whether it has a checksum of each of its blocks; files of another program have none."""

    def __init__(self, store: Store, index: Index | None = None, *, joined: bool = False) -> None:
        self.place, self.url, self._joined = store, store.url, joined
        self.store = store
        """Its files; once the index is known, with the shards that lie in other directories than its `place`."""
        self._shards: dict[tuple[str, bool], OpenedShard] = {}
        self._checksums: dict[str, Checksums] = {}
        if index is not None:
            self.take_index(index)

    @cached_property
    def index_bytes(self) -> bytes:
        """The index as it is stored, read when it is first needed, or set by a caller that has read this version."""
        return read_index_bytes(self.store)

    @cached_property
    def index(self) -> Index:
        """The index, read when it is first needed; raises as `read_index`."""
        index = decode_and_check(self.place, self.index_bytes)
        self.store = with_shared_files(self.place, index)
        return self._as_read(index)

    def take_index(self, index: Index) -> None:
        """Takes an index that the caller has decoded as its own."""
        self.index, self.store = self._as_read(index), with_shared_files(self.place, index)

    def _as_read(self, index: Index) -> Index:
        return join_tables(index) if self._joined and index.tables else index

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Every file of the store and its size in bytes, listed once, with shards in other directories."""
        return with_shared_files(self.place, self.index).sizes()

    def check_against_files(self) -> None:
        """Raises CorruptError for an index that describes far more bytes than the files can hold."""
        check_against_files(self.index, self.sizes, self.url)

    def shard(self, file: File, *, whole: bool = True) -> OpenedShard:
        """A shard whose header was read and checked; `whole` and errors as for `open_shard`."""
        # the size of a shard that was opened without `whole` was not compared
        key = (file.name, whole)
        if key not in self._shards:
            if self.store.traits.far:
                self.open_shards([file], whole=whole)
            else:
                self._shards[key] = open_shard(self.store, self.index, file, self.sizes.get(file.name), whole=whole)
        shard = self._shards[key]
        # it may have been opened under the index of `with_index`, or the one before: errors name leaves by that
        return shard if shard.index is self.index else msgspec.structs.replace(shard, index=self.index)

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
            self.store.fetch(headers.ranges, headers.take, memory=HEADERS_NBYTES)

    def checksums(self, file: File) -> Checksums:
        """The checksums of a shard's blocks; raises as `shard`."""
        if file.name not in self._checksums:
            shard = self.shard(file)
            self._checksums[file.name] = Checksums(np.array(shard.hashes, np.uint64), shard.block)
        return self._checksums[file.name]

    def with_index(self, index: Index) -> Checkpoint:
        """The same files under another index."""
        # shallow: both have the shards that were opened, and the sizes that were listed
        other = copy.copy(self)
        other.index = index
        return other

    def own(self) -> Checkpoint:
        """Returns itself; raises FormatError for files of another program, which have no checksums of blocks."""
        return self

    def reopened(self) -> Checkpoint:
        """The version that is at the same place now."""
        return Checkpoint(self.place, joined=self._joined)

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
        # looked for, not asked: the property would read the index that is there now
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
        checkpoint, file, header = self._checkpoint, self._files[number], self._data[number]
        header += data
        # nothing more comes of a file that is shorter than its header should be
        if len(header) < min(file.header, file.header if size is None else size):
            return None
        size = checkpoint.sizes.get(file.name) if size is None else size
        shard = open_shard(checkpoint.store, checkpoint.index, file, size, whole=self._whole, header=header)
        return checkpoint.add_shard(shard, whole=self._whole)

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


class StatCache(Protocol):
    """A cache of results read from files, which are valid until the file changes."""

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        """Returns the cached result or raises the cached error; calls `read` if there is none, or the file has changed.

        Args:
            entry: the file that `read` reads, as it is now.
        """
        ...


class LruStatCache:
    """A cache in memory; a file counts as changed if its inode, modification time or size differs.

    Args:
        entries: the least recently used is dropped beyond this number.
    """

    def __init__(self, entries: int = 4096) -> None:
        self._entries = entries
        self._found: OrderedDict[tuple[str, str], tuple[tuple[int, ...], Any]] = OrderedDict()
        self._lock = threading.RLock()

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        """Returns the cached result or error, or calls `read`; a `StoreError` is raised and not cached.

        Nothing is cached of a file of which the store knows neither a time nor a number.
        """
        if not entry.modified_ns and not entry.number:
            return read()
        stamp = (entry.modified_ns, entry.nbytes, entry.number)
        with self._lock:
            kept = self._found.get(key)
            if kept is not None and kept[0] == stamp:
                self._found.move_to_end(key)
                return _result(kept[1])
        try:
            # Without the lock, so that several threads read at a time.
            result: T | TreeckptError = read()
        except StoreError:
            raise
        except TreeckptError as error:
            result = error
        with self._lock:
            self._found[key] = (stamp, result)
            while len(self._found) > self._entries:
                self._found.popitem(last=False)
        return _result(result)


def _result(kept: Any) -> Any:
    if isinstance(kept, TreeckptError):
        # It is raised again for each caller: each time its traceback would grow, and keep the frames of the one before.
        raise kept.with_traceback(None)
    return kept
