"""Writes new local files past the page cache where the file system supports that, and makes them durable."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from .memory import PAGE_NBYTES, aligned_buffer
from .os_files import BINARY, fcntl, sync_file, write_at

DIRECTORY_TRIES = 5
"""How often the directory of a new file is made again."""


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable; does nothing on Windows, where no directory can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | BINARY)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Creates a directory and its missing parents; each one is durable before anything is created in it.

    An existing directory may have been created by a process that was killed before it could sync the parent, so the
    parent is synced again.
    """
    exists = directory.is_dir()
    if not exists:
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
    elif os.path.ismount(directory):
        return
    with contextlib.suppress(*[PermissionError] if exists else []):  # the parent may belong to another user
        sync_directory(directory.parent)


def create_file(path: Path, nbytes: int) -> LocalWriter:
    """Creates a file; makes its directory again where clean-ups of other processes remove it while it is empty."""
    for _ in range(DIRECTORY_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return LocalWriter(path, nbytes)
        make_directory(path.parent)
    return LocalWriter(path, nbytes)


class LocalWriter:
    """A new file, written past the page cache where the file system supports that."""

    ordered = False

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes = path, nbytes
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
        self.direct = hasattr(os, "O_DIRECT")
        try:
            self._fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.direct = False
            self._fd = os.open(path, flags, 0o644)
        self._open = True
        if nbytes and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    self.abort()
                    error.filename = str(path)
                    raise

    def write(self, offset: int, data: memoryview) -> None:
        if self.direct and len(data) % PAGE_NBYTES:
            # the end of the file: the block is padded to a page, and `commit` truncates the file to its size
            padded = aligned_buffer(-(-len(data) // PAGE_NBYTES) * PAGE_NBYTES)
            padded[: len(data)] = data
            data = padded
        written = 0
        while written < len(data):
            direct = self.direct  # of this call: another thread may switch it off meanwhile
            try:
                count = write_at(self._fd, data[written:], offset + written)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    error.filename = str(self._path)
                    raise
                # some file systems accept O_DIRECT at open and refuse it at the first write
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.direct = False
                continue
            if not count:
                raise OSError(errno.EIO, f"the disk wrote nothing of {len(data) - written} bytes", str(self._path))
            written += count

    def commit(self) -> None:
        os.ftruncate(self._fd, self._nbytes)
        sync_file(self._fd)
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close()
        sync_directory(self._path.parent)

    def abort(self) -> None:
        if self._open:
            self._close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _close(self) -> None:
        self._open = False
        os.close(self._fd)
