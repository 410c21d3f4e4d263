"""Where a checkpoint's files live: a flat directory of named files, local or in memory.

A store writes big files in place under names that no other save uses, and publishes small ones atomically. What is
durable when: a shard after `Writer.commit`, a published file when `publish` returns. Local shards are written with
O_DIRECT where the file system takes it, so that a save neither waits for nor fills the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import threading
from pathlib import Path
from typing import Protocol

from ..core.errors import CheckpointError, CheckpointExists, CorruptError
from .reader import LocalReader, open_regular

__all__ = ["PAGE", "LocalStore", "MemoryStore", "Store", "Writer", "aligned_buffer", "open_store"]

PAGE = 4096
HUGE = 2 << 20


def aligned_buffer(nbytes: int, *, huge: bool = False) -> memoryview:
    """Zeroed, page-aligned memory of its own; in huge pages if asked: page faults are half of a load otherwise."""
    # private: huge pages are mostly switched off for shared memory, which is what mmap makes by itself
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(nbytes, PAGE), **private)
    if huge and nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]


class Writer(Protocol):
    """A file being written, block by block, in any order."""

    def write(self, offset: int, data: memoryview) -> None:
        """Writes a block. Offsets are multiples of a page; only the block at the end may have an odd length."""
        ...

    def commit(self) -> None:
        """Makes the file durable and closes it."""
        ...

    def abort(self) -> None:
        """Closes the file and removes it; does nothing after `commit`."""
        ...


class Store(Protocol):
    """A directory of files."""

    @property
    def url(self) -> str:
        """What to call it in messages."""
        ...

    def prepare(self) -> None:
        """Makes the directory, and what is above it."""
        ...

    def sizes(self) -> dict[str, int]:
        """The files and their sizes in bytes; empty where there is no such directory."""
        ...

    def read(self, name: str, *, limit: int) -> bytes:
        """A whole small file. Raises CorruptError past `limit`, FileNotFoundError where there is none."""
        ...

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        """Fills `out` from the file. Raises CorruptError where the file ends before.

        Args:
            shared: the same bytes will be read again soon, here or by another process of the host: leave them in the
                page cache, if there is one.
        """
        ...

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of a file as memory, read when touched; writing to it changes the copy, not the file.

        Raises CorruptError where the file ends before.
        """
        ...

    def create(self, name: str, nbytes: int) -> Writer:
        """Starts a new file of `nbytes`."""
        ...

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        """Writes a small file atomically and durably. Raises CheckpointExists where one is not to be replaced."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file if it is there."""
        ...

    def close(self) -> None:
        """Lets go of what reading has opened; the store can be used again."""
        ...


def open_store(path: str | os.PathLike[str] | Store) -> Store:
    """The store of a path, or the store itself.

    Raises:
        CheckpointError: a URL of a kind that is not known.
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        scheme, separator, rest = text.partition("://")
        if separator and scheme != "file":
            raise CheckpointError(text, expected="a path or a file:// URL", found=f"{scheme}://")
        return LocalStore(rest if separator else text)
    return path


class LocalStore:
    """A directory of a local (or mounted) file system."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory).absolute()
        self._readers: dict[str, LocalReader] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return str(self._directory)

    @property
    def directory(self) -> Path:
        return self._directory

    def prepare(self) -> None:
        missing = [self._directory]
        while not missing[-1].exists() and missing[-1].parent != missing[-1]:
            missing.append(missing[-1].parent)
        self._directory.mkdir(parents=True, exist_ok=True)
        for directory in missing:  # a new name is durable once its parent is
            _sync_directory(directory)

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process may be deleting
                        if entry.is_file(follow_symlinks=False):
                            found[entry.name] = entry.stat(follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found

    def read(self, name: str, *, limit: int) -> bytes:
        with open(open_regular(self._directory / name), "rb") as file:
            # read(n) allocates n bytes at once, and the limit is far above what files have
            data = file.read(min(os.fstat(file.fileno()).st_size, limit) + 1)
        if len(data) > limit:
            raise CorruptError(f"{self.url}/{name}", expected=f"at most {limit} bytes", found="more")
        return data

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = LocalReader(self._directory / name)
            reader = self._readers[name]
        reader.read_into(offset, out, shared=shared)

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        fd = open_regular(self._directory / name)
        try:
            if offset + nbytes > (size := os.fstat(fd).st_size):
                raise _too_short(f"{self.url}/{name}", offset, nbytes, max(size - offset, 0))
            low = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            if not nbytes:
                return memoryview(bytearray())
            mapped = mmap.mmap(fd, offset + nbytes - low, access=mmap.ACCESS_COPY, offset=low)
            return memoryview(mapped)[offset - low :]
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the files that reads have opened."""
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def create(self, name: str, nbytes: int) -> Writer:
        return _LocalWriter(self._directory / name, nbytes)

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        temporary = self._directory / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.replace(temporary, self._directory / name)
            else:
                _rename_new(temporary, self._directory / name)
        except FileExistsError as error:
            raise CheckpointExists(
                f"{self.url}/{name}", expected="no such file", found="one, written meanwhile by another save"
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        _sync_directory(self._directory)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / name)


def _rename_new(source: Path, target: Path) -> None:
    """Gives a file a name that must be free: by a hard link, which fails if it is taken, unlike a rename."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # no hard links here (FAT, some network and FUSE file systems): two that publish at one moment may both succeed
        if os.path.lexists(target):
            raise FileExistsError(target) from error
        os.rename(source, target)


def _too_short(label: str, offset: int, nbytes: int, found: int) -> CorruptError:
    return CorruptError(
        label,
        expected=f"{nbytes} bytes at {offset}",
        found=f"{found} before the end of the file",
        hint="The file was cut short; restore it from a copy",
    )


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _LocalWriter:
    """A new file, written past the page cache where that is possible."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes = path, nbytes
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._direct = hasattr(os, "O_DIRECT")
        try:
            self._fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._direct = False
            self._fd = os.open(path, flags, 0o644)
        self._open = True
        if nbytes and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    self.abort()
                    raise

    def write(self, offset: int, data: memoryview) -> None:
        if self._direct and len(data) % PAGE:
            # the file's odd end: the block is a page longer in memory, and the file is cut to size at commit
            padded = aligned_buffer(-(-len(data) // PAGE) * PAGE)
            padded[: len(data)] = data
            data = padded
        written = 0
        while written < len(data):
            try:
                count = os.pwrite(self._fd, data[written:], offset + written)
                if not count:
                    raise OSError(errno.EIO, f"the disk wrote nothing of {len(data) - written} bytes", str(self._path))
                written += count
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._leave_direct()

    def _leave_direct(self) -> None:
        """Some file systems take O_DIRECT at open and refuse it at the first write."""
        import fcntl

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def commit(self) -> None:
        os.ftruncate(self._fd, self._nbytes)
        os.fsync(self._fd)
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close()
        _sync_directory(self._path.parent)

    def abort(self) -> None:
        if self._open:
            self._close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _close(self) -> None:
        self._open = False
        os.close(self._fd)


class MemoryStore:
    """Files in this process's memory: for tests, and for trees that never need a disk."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._files: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def files(self) -> dict[str, bytearray]:
        """The files themselves."""
        return self._files

    def prepare(self) -> None:
        pass

    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in list(self._files.items())}

    def _get(self, name: str) -> bytearray:
        try:
            return self._files[name]
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
            raise _too_short(f"{self.url}/{name}", offset, len(out), len(data))
        out[:] = data

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        data = bytearray(nbytes)
        self.read_into(name, offset, memoryview(data))
        return memoryview(data)

    def create(self, name: str, nbytes: int) -> Writer:
        with self._lock:
            if name in self._files:
                raise FileExistsError(f"{self.url}/{name}")
            self._files[name] = bytearray(nbytes)
        return _MemoryWriter(self, name)

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        with self._lock:
            if name in self._files and not replace:
                raise CheckpointExists(f"{self.url}/{name}", expected="no such file", found="one")
            self._files[name] = bytearray(data)

    def delete(self, name: str) -> None:
        self._files.pop(name, None)

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
