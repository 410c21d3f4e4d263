"""The store of one checkpoint, a flat directory of named files, and that of a run, the directory of several.

A store writes large files in place under names that no other save uses, and publishes small files atomically. A shard
is durable after `Writer.commit`, a published file when `publish` returns. `local_store` has it for local directories,
`object_store` for objects.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from ..._threads import ThreadPool
from ...errors import CheckpointExists, CorruptError, StoreError
from .local_files import too_short

AT_A_TIME = 64
"""Calls at a time, each of which waits for one answer of the store or a few: at 40 ms an answer the headers of 100
shards are read, and their index is made, in 0.35 s, and one after the other in 4.5 s."""
FETCH_MEMORY = 512 << 20
"""Bytes that are on their way from a store that fetches, by default: 64 requests of 8 MiB."""

FileRange = tuple[str, int, int]
"""(name, offset, bytes) of a part of a file."""
Consume = Callable[[int, int, memoryview, int | None], object]
"""Takes the number of a range, where in it bytes start, the bytes, and the size of the whole file if that is known.

The bytes of one range come in order and one call at a time, those of several ranges from several threads. They last
until the call ends. What lies behind the end of the file is left out; for a range without any byte in the file one call
has no bytes.
"""
TEXT_PART_NBYTES = 32 << 20
"""Bytes of a text file that are read at a time: the first part of a larger file is checked before the rest is read."""

T = TypeVar("T")
F = TypeVar("F")


class StoreTraits(msgspec.Struct, frozen=True):
    """What differs between stores of the same kind of files: callers ask for it, never for the class of a store."""

    far: bool = False
    """Whether each request takes long. Then `fetch` reads many ranges at a time, and callers have many requests in
    flight and wait for answers in threads."""
    request_nbytes: int = 4 << 20
    """Bytes of one read where any size would do."""
    conditional: bool = False
    """Whether `read_version` tells versions, and `publish` and `delete` take one as their condition, atomically."""
    renames: bool = False
    """Whether `rename` gives a file another name in one step."""
    atomic_uploads: bool = False
    """Whether a file that is created has its name only once its writer is committed."""
    in_process: bool = False
    """Whether its files are in this process's memory: they end with it, and no other process has them."""
    local_path: Path | None = None
    """Its directory in a local or mounted file system, where the files have the names that they have in the store."""
    has_directory: bool = True
    """Whether it has a directory of its own, which stays without files and is gone when others remove it."""
    follow_links: bool = False
    """Whether links are followed wherever they lead."""
    joined: bool = False
    """Whether it also gives the files that other ranks see, of those that load together."""


class DirectoryEntry(msgspec.Struct, frozen=True):
    """One entry of a directory."""

    nbytes: int
    modified_ns: int
    """Unix time of the last write, by the clock of the file server or service; 0 if not known: then it may be new."""
    number: int = 0
    """Another number for another file of the same name, as an inode or a hash of the ETag."""
    regular: bool = True
    """Whether it is a regular file that is read, not a directory or pipe, nor a link that is not followed."""
    link: bool = False
    """Whether it is a link. It has no bytes of its own."""


VersionTag = Mapping[str, Any]
"""Identifies the version of a file that was read, for a write or deletion of only this version."""


class Writer(Protocol):
    """A file that is being written block by block, in any order unless it is `ordered`."""

    ordered: bool
    """Whether blocks are taken in order alone, from the first byte on, as by an upload."""

    def write(self, offset: int, data: memoryview) -> None:
        """Writes a block. Offsets are multiples of a page; only the last block may end within a page."""
        ...

    def commit(self) -> None:
        """Makes the file durable and closes it."""
        ...

    def abort(self) -> None:
        """Closes the file and removes it; does nothing after `commit`."""
        ...


class Store(ABC):
    """The files of one checkpoint, in one directory without directories below it.

    The abstract members are what a store must have; `treeckpt.testing.StoreSuite` tests them. All others have defaults,
    and are implemented by stores whose `traits` say so.
    """

    @property
    def traits(self) -> StoreTraits:
        """What callers may rely on."""
        return StoreTraits()

    @property
    @abstractmethod
    def url(self) -> str:
        """Its name in messages."""

    @property
    def place(self) -> str:
        """The path or URL by which it can be opened again, where it has one."""
        return self.url

    @property
    def name(self) -> str:
        """The last part of its path or URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    def address(self) -> bytes | None:
        """What `pickle.loads` opens the same store from in another process; None where only this process can."""
        if self.traits.in_process:  # what is saved to a copy of it would be lost
            return None
        try:
            return pickle.dumps(self)
        except Exception:
            return None

    # the directory ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:  # noqa: B027
        """Creates the directory and its parents, durably."""

    @abstractmethod
    def entries(self) -> dict[str, DirectoryEntry]:
        """Returns all entries by name; empty if there is no such directory."""

    def entry(self, name: str) -> DirectoryEntry | None:
        """Returns one entry, None if there is none of that name."""
        return self.entries().get(name)

    def sizes(self) -> dict[str, int]:
        """Returns the files that can be read and their sizes in bytes; empty if there is no such directory."""
        return {name: entry.nbytes for name, entry in self.entries().items() if entry.regular}

    def modified_ns(self) -> int | None:
        """Returns when an entry was last added or removed, as far as is known; None if there is no such directory."""
        return max((entry.modified_ns for entry in self.entries().values()), default=None)

    def listed(self) -> Store:
        """Returns the store as it is now: what is asked of its entries sends no more requests, where it is far."""
        return self

    def remove_directory(self) -> bool:
        """Removes the directory if it is empty, durably; returns whether it is gone."""
        return False

    @property
    def is_link(self) -> bool:
        """Whether its directory is a link to another one."""
        return False

    def remove_link(self) -> None:  # noqa: B027
        """Removes the link to the directory, durably; the directory stays."""

    def sharing(self, places: Mapping[str, str]) -> Store:
        """Returns the store with files of other directories of its run, which are read as those of its own.

        Args:
            places: the name of the directory of each such file, by the file's name.

        Raises:
            StoreError: it cannot read other directories.
        """
        raise self._alone()

    def _alone(self) -> StoreError:
        expected = "a directory, or a prefix of a bucket, beside which those of other checkpoints lie"
        hint = "Incremental saves need a path or URL below that of a run"
        return StoreError(self.url, expected=expected, found=f"a {type(self).__qualname__}", hint=hint)

    def run(self) -> RunStore:
        """Returns the run that its directory lies in; raises StoreError as `sharing`."""
        raise self._alone()

    # reads ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, name: str, *, limit: int) -> bytes:
        """Reads a whole small text file.

        Raises:
            CorruptError: it is longer than `limit` bytes, or large with zero bytes in it, such as a sparse file.
            FileNotFoundError: there is no such file.
        """

    def read_version(self, name: str, *, limit: int) -> tuple[bytes, VersionTag]:
        """Reads a small file and its version, where the store is `conditional`.

        Args:
            limit: of a longer file only the first `limit + 1` bytes are read.

        Raises:
            FileNotFoundError: there is no such file.
        """
        raise NotImplementedError(f"{self.url} knows no versions")

    @abstractmethod
    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        """Fills `out` from the file.

        Args:
            shared: keeps the bytes in the page cache, for other reads on this host soon.

        Raises:
            CorruptError: the file ends before.
        """

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        """Fills several buffers in order, as `read_into`; returns False, with nothing read, if they are not cached.

        Args:
            shared: also reads what is not cached, where the store has a page cache.
        """
        return False

    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> AbstractContextManager[memoryview | None]:
        """Gives bytes of a file as memory while the body runs, for callers that only read them or copy a part.

        It is None if they are not cached or cannot be mapped.

        Args:
            fetch: reads the bytes into the page cache, as `shared` of `read_into`.
        """
        return contextlib.nullcontext()

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Maps bytes of a file copy-on-write: they are read when touched, and writes do not reach the file.

        Raises:
            CorruptError: the file ends before.
            StoreError: the store cannot map files.
        """
        raise StoreError(
            f"{self.url}/{name}",
            expected="a file on a disk, which can be mapped into memory",
            found="an object",
            hint="Load without mmap",
        )

    def fetch(
        self,
        ranges: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        """Fetches ranges of a store that is `far`, and hands their bytes to `consume` as they arrive.

        Args:
            memory: bytes of ranges that have been requested and not consumed, at most, unless one range is longer.
            first: the first so many ranges are consumed before any other, which may be on their way already.
            shared: keeps the bytes in the page cache, as `read_into` does, where the store has one.

        Raises:
            FileNotFoundError: there is no such file.
        """
        raise NotImplementedError(f"{self.url} is not far")

    # writes -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def create(self, name: str, nbytes: int) -> Writer:
        """Creates a new file of `nbytes` bytes."""

    @abstractmethod
    def publish(
        self, name: str, data: bytes, *, replace: bool | VersionTag, check: Callable[[], object] = lambda: None
    ) -> None:
        """Writes a small file atomically and durably.

        Args:
            replace: True replaces any file, False writes a new one, and a version, in a `conditional` store, replaces
                only that version.
            check: called before the file gets its name, as late as the store can.

        Raises:
            CheckpointExists: the file exists, or has another version.
        """

    def publish_copy(self, name: str, data: bytes, *, of: str) -> None:
        """As `publish` of a new file, which is a copy of the file `of`; what a kill leaves has a name by that one.

        Raises:
            CheckpointExists: the file exists.
        """
        self.publish(name, data, replace=False)

    def compare_and_swap(self, name: str, data: bytes, *, holds: Callable[[bytes], bool], limit: int) -> None:
        """Replaces a file of a `conditional` store if `holds` returns True for its content, or creates it.

        Args:
            limit: the size of the present content in bytes, at most.

        Raises:
            CheckpointExists: the content is another one, or was replaced meanwhile.
        """
        try:
            present, version = self.read_version(name, limit=limit)
            if not holds(present):
                raise exists_error(self, name)
            self.publish(name, data, replace=version)
        except FileNotFoundError:
            self.publish(name, data, replace=False)

    def check_condition(self, name: str, data: bytes, *, replaces: bool) -> None:  # noqa: B027
        """Finds out by a file that is there whether the store keeps the conditions of `publish` that a save needs.

        Args:
            data: the file's content, which may be written again.
            replaces: whether the save replaces a checkpoint.

        Raises:
            StoreError: it does not.
        """

    def rename(self, name: str, target: str, *, replace: bool) -> None:
        """Gives a file another name in one step, where the store `renames`.

        Args:
            replace: replaces a file of that name. Without it the new name is durable when the call returns.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointExists: another file has the name; then both stay.
        """
        raise NotImplementedError(f"{self.url} renames no files")

    @abstractmethod
    def delete(self, name: str, *, version: VersionTag | None = None) -> None:
        """Deletes a file if it exists.

        Args:
            version: deletes only this version, in a `conditional` store.

        Raises:
            CheckpointExists: it has another version.
        """

    def sync(self) -> None:  # noqa: B027
        """Makes deletions durable, where they are not; a file that is back after a power loss is a leftover again."""

    def close(self) -> None:  # noqa: B027
        """Closes the files that reads have opened; the store can be used again."""


class PickledCall:
    """Is unpickled as the result of a call."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def exists_error(store: Store, name: str) -> CheckpointExists:
    """Returns the error for a file whose name or version does not admit a write."""
    return CheckpointExists(
        f"{store.url}/{name}", expected="no such file", found="one, written meanwhile by another save"
    )


class MemoryStore(Store):
    """Files in this process's memory, for tests and for trees that need no disk.

    >>> store = tc.MemoryStore()
    >>> report = tc.save(store, {"step": 1})
    >>> tc.load(store)
    {'step': 1}
    """

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self.files: dict[str, bytearray] = {}
        self._written_ns: dict[str, int] = {}
        """The time at which each file was created or published, in Unix nanoseconds."""
        self._lock = threading.RLock()

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(in_process=True)

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def entries(self) -> dict[str, DirectoryEntry]:
        # a copy, as other threads may create files meanwhile
        files = list(self.files.items())
        return {name: DirectoryEntry(len(data), self._written_ns.get(name, 0)) for name, data in files}

    def _get(self, name: str) -> bytearray:
        try:
            return self.files[name]
        except KeyError:
            raise FileNotFoundError(f"{self.url}/{name}") from None

    def read(self, name: str, *, limit: int) -> bytes:
        data = self._get(name)
        if len(data) > limit:
            raise CorruptError(f"{self.url}/{name}", expected=f"at most {limit} bytes", found=f"{len(data)}")
        return bytes(data)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        data = memoryview(self._get(name))[offset : offset + len(out)]
        if len(data) < len(out):
            raise too_short(f"{self.url}/{name}", offset, len(out), len(data))
        out[:] = data

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        for part in parts:
            self.read_into(name, offset, part)
            offset += len(part)
        return True

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        data = bytearray(nbytes)
        self.read_into(name, offset, memoryview(data))
        return memoryview(data)

    def create(self, name: str, nbytes: int) -> Writer:
        with self._lock:
            if name in self.files:
                raise FileExistsError(f"{self.url}/{name}")
            self.files[name], self._written_ns[name] = bytearray(nbytes), time.time_ns()
        return _MemoryWriter(self, name)

    def publish(
        self, name: str, data: bytes, *, replace: bool | VersionTag, check: Callable[[], object] = lambda: None
    ) -> None:
        check()
        with self._lock:
            if name in self.files and not replace:
                raise CheckpointExists(f"{self.url}/{name}", expected="no such file", found="one")
            self.files[name], self._written_ns[name] = bytearray(data), time.time_ns()

    def delete(self, name: str, *, version: VersionTag | None = None) -> None:
        self.files.pop(name, None)
        self._written_ns.pop(name, None)


class _MemoryWriter:
    ordered = False

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store, self._name, self._open = store, name, True

    def write(self, offset: int, data: memoryview) -> None:
        target = self._store.files[self._name]
        if offset + len(data) > len(target):
            raise ValueError(f"{self._name}: write of {len(data)} bytes at {offset} past {len(target)}")
        memoryview(target)[offset : offset + len(data)] = data

    def commit(self) -> None:
        self._open = False

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._store.delete(self._name)


class RunStore(ABC):
    """The directory of a run: each checkpoint is a `Store` in it, by name."""

    @property
    def traits(self) -> StoreTraits:
        """As those of a store: whether the run is `far`, and its `local_path`."""
        return StoreTraits()

    @property
    @abstractmethod
    def url(self) -> str:
        """Its path or URL."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of its directories, links to directories included, hidden ones excluded."""

    def has_directory(self, chosen: Callable[[str], bool]) -> bool:
        """Whether a directory has a name that is chosen; a local run is listed to the first one only."""
        return any(map(chosen, self.names()))

    @abstractmethod
    def folder(self, name: str) -> Store:
        """Returns the store of the directory of that name, whether or not it exists."""

    def folders(self) -> Sequence[Store]:
        """Returns the stores of all directories; those of a run that is `far` as they are now, see `Store.listed`."""
        return [self.folder(name) for name in self.names()]

    def modified_times(self) -> dict[str, int | None]:
        """Returns when each directory was last changed, by name; see `Store.modified_ns`."""
        return {folder.name: folder.modified_ns() for folder in self.folders()}

    def holds(self, name: str) -> bool:
        """Whether a file of this name lies in the run's own directory."""
        return False

    def linked_names(self) -> list[str]:
        """Returns the names of the symbolic links in it, also of those that lead nowhere.

        Raises:
            StoreError: it could not be read.
        """
        return []


def for_each(store: Store, call: Callable[[F], T], files: Sequence[F]) -> list[T]:
    """Returns the result of each call.

    Raises:
        Exception: that of the first file whose call raised; on a disk the calls for later files were not made.
    """
    if not store.traits.far or len(files) < 2:
        return [call(file) for file in files]
    with ThreadPool(min(AT_A_TIME, len(files)), "treeckpt-files") as pool:
        return [future.result() for future in [pool.submit(call, file) for file in files]]
