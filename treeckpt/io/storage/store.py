"""The store of one checkpoint: a flat directory of named files, local or in memory (`object_store` has it for objects).

A store writes large files in place under names that no other save uses, and publishes small files atomically. A shard
is durable after `Writer.commit`, a published file when `publish` returns.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ...core.format.file_names import is_step_name
from ...core.format.seals import check_no_zeros
from ...errors import CheckpointExists, CorruptError, StoreError
from ..os_errors import shows_damage
from .local_read import LocalReader, ReaderCache, follows_links, linked_file, open_regular, too_short
from .local_write import create_file, make_directory, sync_directory
from .os_files import sync_file
from .process_owner import this_process

TEXT = 32 << 20
"""Bytes of a text file that are read at a time: the first part of a larger file is checked before the rest is read."""

_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Options of mmap by which a map keeps no file descriptor open, from Python 3.13 on."""


class Writer(Protocol):
    """A file that is being written block by block, in any order.

    A writer with a true attribute `ordered` (an upload) needs its blocks in order, from the first byte on.
    """

    def write(self, offset: int, data: memoryview) -> None:
        """Writes a block. Offsets are multiples of a page; only the last block may end within a page."""
        ...

    def commit(self) -> None:
        """Makes the file durable and closes it."""
        ...

    def abort(self) -> None:
        """Closes the file and removes it; does nothing after `commit`."""
        ...


class Store(Protocol):
    """The files of one checkpoint."""

    @property
    def url(self) -> str:
        """Its name in messages."""
        ...

    def prepare(self) -> None:
        """Creates the directory and its parents, durably."""
        ...

    def sizes(self) -> dict[str, int]:
        """Returns the files and their sizes in bytes; empty if there is no such directory."""
        ...

    def read(self, name: str, *, limit: int) -> bytes:
        """Reads a whole small text file.

        Raises:
            CorruptError: it is longer than `limit` bytes, or large with zero bytes in it, such as a sparse file.
            FileNotFoundError: there is no such file.
        """
        ...

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        """Fills `out` from the file.

        Args:
            shared: keeps the bytes in the page cache, for other reads on this host soon.

        Raises:
            CorruptError: the file ends before.
        """
        ...

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        """Fills several buffers in order, as `read_into`; returns False, with nothing read, if they are not cached.

        Args:
            shared: also reads what is not cached, where the store has a page cache.
        """
        ...

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Maps bytes of a file copy-on-write: they are read when touched, and writes do not reach the file.

        Raises:
            CorruptError: the file ends before.
        """
        ...

    def create(self, name: str, nbytes: int) -> Writer:
        """Creates a new file of `nbytes` bytes."""
        ...

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        """Writes a small file atomically and durably.

        Raises:
            CheckpointExists: the file exists, and `replace` is False.
        """
        ...

    def delete(self, name: str) -> None:
        """Deletes a file if it exists."""
        ...

    def close(self) -> None:
        """Closes the files that reads have opened; the store can be used again."""
        ...


@runtime_checkable
class SupportsCompareAndSwap(Protocol):
    """A store with conditional writes: it replaces a file only if its content is as expected, atomically."""

    def compare_and_swap(self, name: str, data: bytes, *, holds: Callable[[bytes], bool], limit: int) -> None:
        """Replaces a file if `holds` returns True for its content; creates it if there is none.

        Args:
            limit: the size of the present content in bytes, at most.

        Raises:
            CheckpointExists: the content is another one, or was replaced meanwhile.
        """
        ...


@runtime_checkable
class SupportsMappedReads(Protocol):
    """A store that can map bytes without a copy, for callers that only read them or copy a part."""

    def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> AbstractContextManager[memoryview | None]:
        """Gives bytes of a file as memory while the body runs; None if they are not cached or cannot be mapped.

        Args:
            fetch: reads the bytes into the page cache, as `shared` of `Store.read_into`.
        """
        ...


class LocalStore:
    """A directory of a local (or mounted) file system.

    `read_into`, `read_parts` and `mapped` all read bytes of shards: a subclass that changes one must change all three.
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

    @property
    def _links(self) -> bool | Path:
        """The argument `links` of `open_regular`."""
        real = Path(os.path.realpath(self.directory))
        return self.follow_links or (real.parent if is_step_name(real.name) else real)

    def linked_stat(self, name: str) -> os.stat_result | None:
        """Returns the state of the file that a link leads to; None if the link is not followed, or leads to no file.

        Raises:
            OSError: it could not be read this time.
        """
        try:
            found = linked_file(self.directory / name, self._links).lstat()  # takes no descriptor
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

    def prepare(self) -> None:
        make_directory(self.directory)

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process may be deleting
                        if entry.is_file(follow_symlinks=False):
                            found[entry.name] = entry.stat(follow_symlinks=False).st_size
                        elif entry.is_symlink() and (linked := self.linked_stat(entry.name)) is not None:
                            found[entry.name] = linked.st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found

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

    def publish(self, name: str, data: bytes, *, replace: bool, check: Callable[[], object] = lambda: None) -> None:
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
            raise _exists(self, name) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        sync_directory(self.directory)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / name)

    def take_away(self, name: str, aside: str) -> None:
        """Gives a file another, new name, in one step; raises FileNotFoundError if there is none."""
        os.rename(self.directory / name, self.directory / aside)

    def put_back(self, aside: str, name: str) -> None:
        """Gives a file its name back, durably, unless another file has it: then that stays, and this one too.

        Raises:
            CheckpointExists: another file has the name.
        """
        try:
            _rename_new(self.directory / aside, self.directory / name)
        except FileExistsError as error:
            raise _exists(self, name) from error
        sync_directory(self.directory)
        self.delete(aside)


def _exists(store: Store, name: str) -> CheckpointExists:
    return CheckpointExists(
        f"{store.url}/{name}", expected="no such file", found="one, written meanwhile by another save"
    )


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


class MemoryStore:
    """Files in this process's memory, for tests and for trees that need no disk.

    >>> store = tc.MemoryStore()
    >>> report = tc.save(store, {"step": 1})
    >>> tc.load(store)
    {'step': 1}
    """

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self.files: dict[str, bytearray] = {}
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def prepare(self) -> None:
        pass

    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in list(self.files.items())}

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
            self.files[name] = bytearray(nbytes)
        return _MemoryWriter(self, name)

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        with self._lock:
            if name in self.files and not replace:
                raise CheckpointExists(f"{self.url}/{name}", expected="no such file", found="one")
            self.files[name] = bytearray(data)

    def delete(self, name: str) -> None:
        self.files.pop(name, None)

    def close(self) -> None:
        pass


class _MemoryWriter:
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
