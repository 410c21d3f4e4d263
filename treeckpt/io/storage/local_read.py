"""Reading a local file by ranges, at the rate of whichever holds the bytes: the page cache or the device.

What is in the page cache is copied from there; the rest comes by O_DIRECT straight into the caller's memory where
offset and address are page-aligned, else by a plain read. The kernel is asked first which it is: to try a read that
may not wait would start its readahead, and every byte would be read twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from ...errors import CorruptError
from .mapped_read import Lender
from .page_cache import is_cached

__all__ = ["LocalReader", "Readers", "open_regular"]

PAGE = 4096
VECTORS = 256
"""Pieces of memory that one call fills, at most."""
MOST = 128
"""Files of a directory that stay open, with two descriptors each; processes may often have no more than 1,024."""
DIRECT = 64 << 10
"""Bytes below which a read goes through the page cache: the device would not be faster."""


def open_regular(path: Path, flags: int = 0) -> int:
    """A descriptor to read a regular file; a link or a FIFO under a name of ours is neither followed nor waited for.

    Raises:
        FileNotFoundError: there is nothing of that name.
        CorruptError: there is something else.
    """
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # somebody's lease, a Samba server's say, which is given back when it is waited for
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _irregular(path, "a link" if error.errno == errno.ELOOP else "a device or socket") from error
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path, "a directory" if stat.S_ISDIR(mode) else "a FIFO or device")
    return fd


def _irregular(path: Path, found: str) -> CorruptError:
    return CorruptError(
        str(path), expected="a regular file", found=found, hint="No save leaves this; put the file itself there"
    )


class LocalReader:
    """One open file; closed when it is dropped, if not before: stores are often read and forgotten."""

    _fd: int = -1
    _direct: int | None = None
    _lender: Lender | None = None
    users = 0
    """Who are reading just now; `Readers` counts them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = open_regular(path)
        if hasattr(os, "posix_fadvise"):
            # ranges are read as they are wanted: what lies behind one is not
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._lock = threading.Lock()
        self._lender = Lender(self._fd)

    def read_into(self, offset: int, out: memoryview, *, shared: bool = False) -> None:
        """Fills `out` from `offset` on; what is `shared` comes through the page cache, and stays there.

        Raises:
            CorruptError: the file ends before.
            OSError: it cannot be read; with its name.
        """
        try:
            self._fill(offset, out, shared)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def read_parts(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Fills pieces of memory one after the other from the page cache; False where the file is not all there.

        Raises:
            CorruptError: the file ends before.
            OSError: it cannot be read; with its name.
        """
        nbytes = sum(map(len, parts))
        if not is_cached(self._fd, offset, nbytes):
            return False
        try:
            self._copy(offset, parts, nbytes)
        except OSError as error:
            error.filename = str(self._path)
            raise
        return True

    @contextlib.contextmanager
    def lend(self, offset: int, nbytes: int, *, fetch: bool) -> Iterator[memoryview | None]:
        """Bytes of the file where they lie in the page cache, or come into it; None where they cannot be lent."""
        assert self._lender is not None, "made with the reader"
        with self._lender.lend(offset, nbytes, fetch=fetch) as memory:  # and this reader stays open meanwhile
            yield memory

    def _fill(self, offset: int, out: memoryview, shared: bool) -> None:
        cached = shared or len(out) < DIRECT or is_cached(self._fd, offset, len(out))
        filled = 0 if cached else self._from_device(offset, out)
        self._copy(offset + filled, [out[filled:]], len(out) - filled)

    def _copy(self, offset: int, parts: Sequence[memoryview], nbytes: int) -> None:
        """Reads through the page cache."""
        rest, filled = deque(parts), 0
        while filled < nbytes:
            count = os.preadv(self._fd, list(islice(rest, VECTORS)), offset + filled)
            if count == 0:
                raise CorruptError(
                    str(self._path),
                    expected=f"{nbytes} bytes at {offset}",
                    found=f"{filled} before the end of the file",
                    hint="The file was cut short; restore it from a copy",
                )
            filled += count
            while rest and count >= len(rest[0]):
                count -= len(rest.popleft())
            if count:
                rest[0] = rest[0][count:]

    def _from_device(self, offset: int, out: memoryview) -> int:
        """Reads whole pages past the page cache, as far as alignment allows; returns how much is filled."""
        start, stop = 0, len(out) // PAGE * PAGE
        if offset % PAGE or np.frombuffer(out, np.uint8).ctypes.data % PAGE or (fd := self._direct_fd()) < 0:
            return 0
        while start < stop:
            try:
                count = os.preadv(fd, [out[start:stop]], offset + start)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    break
                raise
            start += max(count, 0)
            if count <= 0 or count % PAGE:
                break
        return start

    def _direct_fd(self) -> int:
        with self._lock:
            if self._direct is None:
                try:
                    self._direct = open_regular(self._path, getattr(os, "O_DIRECT", 0))
                except (OSError, CorruptError):
                    self._direct = -1
            return self._direct

    def close(self) -> None:
        """Closes the file."""
        if self._lender is not None:
            self._lender.close()
        fds = (self._fd, self._direct)
        self._fd = self._direct = -1
        for fd in fds:
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def __del__(self) -> None:
        self.close()


class Readers:
    """Open files by name, for several threads. Too many, and `close`, close those that nobody is reading from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, LocalReader] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def using(self, name: str, path: Path) -> Iterator[LocalReader]:
        """The reader of a file, which stays open while the body runs."""
        with self._lock:
            reader = self._open.pop(name, None)
            if reader is None:
                self._let_go(MOST - 1)
                reader = LocalReader(path)
            self._open[name] = reader  # the newest is the last one
            reader.users += 1
        try:
            yield reader
        finally:
            with self._lock:
                reader.users -= 1
                if not reader.users and self._open.get(name) is not reader:
                    reader.close()

    def close(self) -> None:
        """Closes the files, those that are being read from when that is done."""
        with self._lock:
            for reader in self._open.values():
                if not reader.users:
                    reader.close()
            self._open.clear()

    def _let_go(self, most: int) -> None:
        idle = [name for name, reader in self._open.items() if not reader.users]
        for name in idle[: max(len(self._open) - most, 0)]:
            self._open.pop(name).close()
