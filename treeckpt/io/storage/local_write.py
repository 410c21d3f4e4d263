"""Writing a new local file, past the page cache where the file system takes that, and making it durable."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from .memory import PAGE, aligned_buffer

__all__ = ["LocalWriter", "make_directory", "sync_directory"]


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Makes a directory and what is missing above it, each one durable before anything is made in it.

    One that is there may have been made by a process that was killed before it could sync the parent, so that is done
    again.
    """
    there = directory.is_dir()
    if not there:
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
    elif os.path.ismount(directory):
        return
    with contextlib.suppress(*[PermissionError] if there else []):  # a parent of somebody else's, not to be read
        sync_directory(directory.parent)


class LocalWriter:
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
                    error.filename = str(path)
                    raise

    def write(self, offset: int, data: memoryview) -> None:
        if self._direct and len(data) % PAGE:
            # the file's odd end: the block is a page longer in memory, and the file is cut to size at commit
            padded = aligned_buffer(-(-len(data) // PAGE) * PAGE)
            padded[: len(data)] = data
            data = padded
        written = 0
        while written < len(data):
            direct = self._direct  # as it is for this call: others may leave it meanwhile
            try:
                count = os.pwrite(self._fd, data[written:], offset + written)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    error.filename = str(self._path)
                    raise
                self._leave_direct()
                continue
            if not count:
                raise OSError(errno.EIO, f"the disk wrote nothing of {len(data) - written} bytes", str(self._path))
            written += count

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
        sync_directory(self._path.parent)

    def abort(self) -> None:
        if self._open:
            self._close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _close(self) -> None:
        self._open = False
        os.close(self._fd)
