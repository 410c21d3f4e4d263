"""The store of one checkpoint: a flat directory of named files, local or in memory (`object_store` has it for objects).

A store writes large files in place under names that no other save uses, and publishes small files atomically. A shard
is durable after `Writer.commit`, a published file when `publish` returns.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import secrets
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..._core.format.file_names import is_step_name
from ..._core.format.seals import check_no_zeros
from ...errors import CheckpointExists, CorruptError, StoreError
from ..os_errors import shows_damage, wrap_read_error
from .fetching import Consume, FileRange
from .local_read import LocalReader, ReaderCache, follows_links, linked_file, open_regular, too_short
from .local_write import create_file, make_directory, sync_directory
from .os_files import sync_file
from .process_owner import this_process

TEXT = 32 << 20
"""Bytes of a text file that are read at a time: the first part of a larger file is checked before the rest is read."""

_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Options of mmap by which a map keeps no file descriptor open, from Python 3.13 on."""


class StoreTraits(msgspec.Struct, frozen=True):
    """In what stores differ that hold the same kind of files: callers ask for these, never for the class of a store."""

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

    @property
    def live(self) -> Store:
        """The store that is listed anew each time it is asked, where this one is as it was `listed`."""
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

    def compare_and_swap(self, name: str, data: bytes, *, holds: Callable[[bytes], bool], limit: int) -> None:
        """Replaces a file of a `conditional` store if `holds` returns True for its content, or creates it.

        Args:
            limit: the size of the present content in bytes, at most.

        Raises:
            CheckpointExists: the content is another one, or was replaced meanwhile.
        """
        try:
            found, version = self.read_version(name, limit=limit)
            if not holds(found):
                raise exists_error(self, name)
            self.publish(name, data, replace=version)
        except FileNotFoundError:
            self.publish(name, data, replace=False)

    def delete_if(self, name: str, *, holds: Callable[[bytes], bool], limit: int) -> None:
        """Deletes a file of a `conditional` store if `holds` returns True for its content.

        Args:
            limit: the size of the content in bytes, at most.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointExists: the content is another one, or was replaced meanwhile.
        """
        found, version = self.read_version(name, limit=limit)
        if not holds(found):
            raise exists_error(self, name)
        self.delete(name, version=version)

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


def _open_local(directory: Path) -> LocalStore:
    """Opens a store in the writer process, which has no public module to find the class in."""
    return LocalStore(directory)


def _where_links_lead(directory: Path, follow_links: bool) -> bool | Path:
    """Returns the argument `links` of `open_regular` for a directory."""
    real = Path(os.path.realpath(directory))
    return follow_links or (real.parent if is_step_name(real.name) else real)


class LocalStore(Store):
    """A directory of a local (or mounted) file system.

    `read_into`, `read_parts` and `mapped` all read bytes of shards: a subclass that changes one must change all three.
    One whose files hold other bytes than it gives has no `local_path` among its `traits`: that leads around it.

    Links to files are read where they lead to a place in the run, or, if the directory is not that of a step, in the
    directory. They are never written through, and where a file is deleted, the link goes.

    >>> tc.load(tc.LocalStore("run/step_00000100"))["step"]
    100

    Args:
        follow_links: reads links wherever they lead, as those of DVC and the cache of Hugging Face: for directories of
            people whom you trust. None does so where the environment has TREECKPT_FOLLOW_LINKS=1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.follow_links = follows_links(follow_links)
        self.readers = ReaderCache()
        # no method of this store: open files would keep it, and themselves, until the garbage collector comes
        self._links = partial(_where_links_lead, self.directory, self.follow_links)

    def address(self) -> bytes | None:
        if type(self) is not LocalStore:  # its own state may be of this process alone
            return super().address()
        return pickle.dumps(PickledCall(_open_local, self.directory))

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(renames=True, local_path=self.directory, follow_links=self.follow_links)

    def linked_stat(self, name: str) -> os.stat_result | None:
        """Returns the state of the file that a link leads to; None if the link is not followed, or leads to no file.

        Raises:
            OSError: it could not be read this time.
        """
        try:
            found = linked_file(self.directory / name, self._links()).lstat()  # takes no descriptor
        except (CorruptError, StoreError):
            return None
        except OSError as error:
            if not shows_damage(error):
                raise
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    @property
    def url(self) -> str:
        # undecodable bytes of the path are escaped: messages are text
        return os.fsencode(self.directory).decode("utf-8", "backslashreplace")

    @property
    def place(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name or str(self.directory)

    def prepare(self) -> None:
        make_directory(self.directory)

    def scan(self) -> dict[str, DirectoryEntry]:
        """Returns all entries by name; raises OSError if they could not be read."""
        found: dict[str, DirectoryEntry] = {}
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process may be deleting
                        found[entry.name] = self._entry(entry.name, entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found

    def _entry(self, name: str, found: os.stat_result) -> DirectoryEntry:
        link, modified_ns = stat.S_ISLNK(found.st_mode), found.st_mtime_ns
        if link and (linked := self.linked_stat(name)) is not None:
            found, modified_ns = linked, max(modified_ns, linked.st_mtime_ns)
        return DirectoryEntry(found.st_size, modified_ns, found.st_ino, stat.S_ISREG(found.st_mode), link)

    def entries(self) -> dict[str, DirectoryEntry]:
        """Returns all entries by name; raises StoreError if they could not be read."""
        try:
            return self.scan()
        except OSError as error:
            raise wrap_read_error(error, self.place) from error

    def entry(self, name: str) -> DirectoryEntry | None:
        try:
            return self._entry(name, (self.directory / name).lstat())
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, f"{self.place}/{name}") from error
            return None

    def sizes(self) -> dict[str, int]:
        """Returns the files that can be read and their sizes; raises OSError if they could not be listed."""
        return {name: entry.nbytes for name, entry in self.scan().items() if entry.regular}

    def modified_ns(self) -> int | None:
        try:
            found = self.directory.stat()
        except OSError as error:
            if not shows_damage(error):
                raise wrap_read_error(error, self.place) from error
            return None
        return found.st_mtime_ns if stat.S_ISDIR(found.st_mode) else None

    @property
    def is_link(self) -> bool:
        return self.directory.is_symlink()

    def remove_link(self) -> None:
        os.unlink(self.directory)
        sync_directory(self.directory.parent)

    def remove_directory(self) -> bool:
        try:
            os.rmdir(self.directory)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync_directory(self.directory.parent)
        return True

    def sync(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            sync_directory(self.directory)

    def read(self, name: str, *, limit: int) -> bytes:
        with open(open_regular(self.directory / name, links=self._links), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CorruptError(f"{self.url}/{name}", expected=f"at most {limit} bytes", found=f"{size}")
            # read(n) allocates n bytes at once, and a sparse file takes none
            parts, at = [file.read(min(size, TEXT) + 1)], 0
            while size > TEXT and parts[-1]:
                check_no_zeros(parts[-1], at, f"{self.url}/{name}")
                at += len(parts[-1])
                parts.append(file.read(TEXT))
        return b"".join(parts)

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        with self._reader(name) as reader:
            reader.read_into(offset, out, shared=shared)

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        with self._reader(name) as reader:
            return reader.read_parts(offset, parts, shared=shared)

    @contextlib.contextmanager
    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> Iterator[memoryview | None]:
        with self._reader(name) as reader, reader.mapped(offset, nbytes, fetch=fetch) as memory:
            yield memory

    def _reader(self, name: str) -> AbstractContextManager[LocalReader]:
        return self.readers.using(name, self.directory / name, self._links)

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        fd = open_regular(self.directory / name, links=self._links)
        try:
            if offset + nbytes > (size := os.fstat(fd).st_size):
                raise too_short(f"{self.url}/{name}", offset, nbytes, max(size - offset, 0))
            low = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            if not nbytes:
                return memoryview(bytearray())
            mapped = mmap.mmap(fd, offset + nbytes - low, access=mmap.ACCESS_COPY, offset=low, **_UNTRACKED)
            return memoryview(mapped)[offset - low :]
        finally:
            os.close(fd)

    def close(self) -> None:
        self.readers.close()

    def create(self, name: str, nbytes: int) -> Writer:
        return create_file(self.directory / name, nbytes)

    def publish(
        self, name: str, data: bytes, *, replace: bool | VersionTag, check: Callable[[], object] = lambda: None
    ) -> None:
        """As `Store.publish`.

        Args:
            check: called once a temporary file has the content, before it gets its name. A clean-up that takes this
                process for an ended one removes the temporary file first: so either `check` sees what it removed, or
                there is no file to rename (FileNotFoundError).
        """
        temporary = self.directory / f".{name}.{this_process().tag}{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                sync_file(file.fileno())
            check()
            if replace:
                os.replace(temporary, self.directory / name)
            else:
                _rename_new(temporary, self.directory / name)
        except FileExistsError as error:
            raise exists_error(self, name) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        sync_directory(self.directory)

    def delete(self, name: str, *, version: VersionTag | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / name)

    def rename(self, name: str, target: str, *, replace: bool) -> None:
        if replace:
            os.replace(self.directory / name, self.directory / target)
            return
        try:
            _rename_new(self.directory / name, self.directory / target)
        except FileExistsError as error:
            raise exists_error(self, target) from error
        sync_directory(self.directory)
        self.delete(name)


def _rename_new(source: Path, target: Path) -> None:
    """Renames a file to a name that must be free: by a hard link, which fails if the name exists, unlike a rename."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        # no hard links (FAT, some network and FUSE file systems): two writers at one moment may both succeed
        if os.path.lexists(target):
            raise FileExistsError(target) from error
        os.rename(source, target)


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
        """When each file was created or published, in Unix nanoseconds."""
        self._lock = threading.RLock()

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(in_process=True)

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def entries(self) -> dict[str, DirectoryEntry]:
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
