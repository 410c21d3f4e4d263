"""Reads byte ranges of local files, from the page cache or from the device.

Bytes that are in the page cache are copied from there. Other bytes are read by O_DIRECT straight into the caller's
memory if offset and address are page-aligned, otherwise by a plain read. The kernel tells first which bytes are cached:
a trial read that may not block would start its readahead, and every byte would be read twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from ...errors import CorruptError, StoreError
from ..os_errors import shows_damage
from .mapped_read import MappedReader
from .os_files import BINARY, read_at
from .page_cache import is_cached

FOLLOW_LINKS = "TREECKPT_FOLLOW_LINKS"
"""The variable of the environment by which all stores of a process, and of those it starts, follow links."""
DIRECT_IO_ALIGNMENT = 4096
VECTORS = 256
"""Buffers that one call fills, at most."""
MAX_OPEN_FILES = 128
"""Files of a directory that stay open, with two descriptors each; the usual limit of a process is 1,024."""
DIRECT = 64 << 10
"""Bytes below which a read uses the page cache: the device would not be faster."""


def follows_links(given: bool | None) -> bool:
    """Whether links are followed wherever they lead: as given, else as the environment of this process says."""
    return os.environ.get(FOLLOW_LINKS, "") == "1" if given is None else given


def open_regular(path: Path, flags: int = 0, *, links: bool | Path | Callable[[], bool | Path] = False) -> int:
    """Opens a regular file for reading; returns the descriptor. A FIFO does not block.

    Args:
        links: whether a link to a file is followed; a directory: if it leads to a place below that; or what returns
            this where there is a link.

    Raises:
        FileNotFoundError: there is no file of that name.
        CorruptError: it is not a regular file.
    """
    try:
        return _open_regular(path, flags)
    except CorruptError:
        if links is False or not path.is_symlink():
            raise
    return _open_regular(linked_file(path, links() if callable(links) else links), flags)


def linked_file(path: Path, links: bool | Path) -> Path:
    """Returns the path of what a link leads to, through no other link.

    Args:
        links: as for `open_regular`.

    Raises:
        CorruptError: it leads nowhere.
        StoreError: it is not followed, which says nothing of what it leads to.
        OSError: where it leads could not be read this time.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if not shows_damage(error):
            raise
        hint = "Put the file itself there"
        found = "a link that leads nowhere"
        raise CorruptError(str(path), expected="a regular file", found=found, hint=hint) from error
    if links is not True and not (links and real.is_relative_to(os.path.realpath(links))):
        hint = "follow_links=True (loads: of ReadOptions; --follow-links) reads it, if you trust who made the link"
        found = f"a link to {real}, which is not in {links}"
        raise StoreError(str(path), expected="a regular file", found=found, hint=hint)
    return real


def _open_regular(path: Path, flags: int) -> int:
    if not hasattr(os, "O_NOFOLLOW") and not stat.S_ISREG(mode := os.lstat(path).st_mode):
        raise _irregular(path, kind_of_file(mode))  # Windows: an open follows links
    flags |= os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | BINARY
    try:
        fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    except BlockingIOError:  # another process, such as a Samba server, holds a lease; a blocking open waits for it
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _irregular(path, kind_of_file(os.lstat(path).st_mode)) from error
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path, kind_of_file(mode))
    return fd


def read_head(path: Path, nbytes: int) -> bytes:
    """Returns the first bytes of a file; links are followed. Raises as `open_regular`."""
    with open(open_regular(path, links=True), "rb") as file:
        return file.read(nbytes)


def kind_of_file(mode: int) -> str:
    """Names what is not a regular file, by its `st_mode`."""
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"))
    return "a " + next((name for test, name in kinds if test(mode)), "device")


def _irregular(path: Path, found: str) -> CorruptError:
    return CorruptError(
        str(path), expected="a regular file", found=found, hint="No save leaves this; put the file itself there"
    )


def too_short(label: str, offset: int, nbytes: int, found: int, *, what: str = "file") -> CorruptError:
    """Returns the error for a file that ends `found` bytes after `offset`."""
    return CorruptError(
        label,
        expected=f"{nbytes} bytes at {offset}",
        found=f"{found} before the end of the {what}",
        hint=f"The {what} was cut short; restore it from a copy",
    )


class LocalReader:
    """One open file. It is closed at the latest when it is garbage-collected: stores are often read and not closed."""

    fd: int = -1
    _direct: int | None = None
    _maps: MappedReader | None = None
    users = 0
    """How many calls are reading now; `ReaderCache` counts them."""

    def __init__(self, path: Path, links: bool | Path | Callable[[], bool | Path] = False) -> None:
        self._path, self._links = path, links
        self.fd = open_regular(path, links=links)
        if hasattr(os, "posix_fadvise"):
            # no readahead: the bytes behind a range are not needed
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._lock = threading.RLock()

    def read_into(self, offset: int, out: memoryview, *, shared: bool = False) -> None:
        """Fills `out` with the bytes from `offset` on.

        Args:
            shared: reads through the page cache, where the bytes stay.

        Raises:
            CorruptError: the file ends before.
            OSError: it cannot be read; with its name.
        """
        cached = shared or len(out) < DIRECT or is_cached(self.fd, offset, len(out))
        try:
            filled = 0 if cached else self._from_device(offset, out)
            self._copy(offset + filled, [out[filled:]], len(out) - filled)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def read_parts(self, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        """Fills several buffers from the page cache; returns False if not all is cached. Raises as `read_into`.

        Args:
            shared: also brings there what is not cached.
        """
        nbytes = sum(map(len, parts))
        if not shared and not is_cached(self.fd, offset, nbytes):
            return False
        try:
            self._copy(offset, parts, nbytes)
        except OSError as error:
            error.filename = str(self._path)
            raise
        return True

    @contextlib.contextmanager
    def mapped(self, offset: int, nbytes: int, *, fetch: bool) -> Iterator[memoryview | None]:
        """Gives bytes of the file as a map of the page cache; None if they cannot be mapped."""
        with self._lock:
            if self._maps is None:
                self._maps = MappedReader(self.fd)
            maps = self._maps
        with maps.mapped(offset, nbytes, fetch=fetch) as memory:  # this generator keeps the reader open meanwhile
            yield memory

    def _copy(self, offset: int, parts: Sequence[memoryview], nbytes: int) -> None:
        """Reads through the page cache."""
        rest, filled = deque(parts), 0
        while filled < nbytes:
            count = read_at(self.fd, list(islice(rest, VECTORS)), offset + filled)
            if count == 0:
                raise too_short(str(self._path), offset, nbytes, filled)
            filled += count
            while rest and count >= len(rest[0]):
                count -= len(rest.popleft())
            if count:
                rest[0] = rest[0][count:]

    def _from_device(self, offset: int, out: memoryview) -> int:
        """Reads whole pages past the page cache, as far as alignment allows; returns the number of bytes read."""
        start, stop = 0, len(out) // DIRECT_IO_ALIGNMENT * DIRECT_IO_ALIGNMENT
        if (
            offset % DIRECT_IO_ALIGNMENT
            or np.frombuffer(out, np.uint8).ctypes.data % DIRECT_IO_ALIGNMENT
            or (fd := self._direct_fd()) < 0
        ):
            return 0
        while start < stop:
            try:
                count = read_at(fd, [out[start:stop]], offset + start)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    break
                raise
            start += max(count, 0)
            if count <= 0 or count % DIRECT_IO_ALIGNMENT:
                break
        return start

    def _direct_fd(self) -> int:
        with self._lock:
            if self._direct is None:
                try:
                    self._direct = open_regular(self._path, getattr(os, "O_DIRECT", 0), links=self._links)
                except (OSError, CorruptError):
                    self._direct = -1
            return self._direct

    def close(self) -> None:
        """Closes the file."""
        if self._maps is not None:
            self._maps.close()
        fds = (self.fd, self._direct)
        self.fd = self._direct = -1
        for fd in fds:
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def __del__(self) -> None:
        self.close()


class ReaderCache:
    """Keeps files open by name, for several threads; past `MAX_OPEN_FILES` the least recently used are closed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[str, LocalReader] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def using(self, name: str, path: Path, links: bool | Path | Callable[[], bool | Path]) -> Iterator[LocalReader]:
        """Gives the reader of a file, which stays open while the body runs; `links` as for `open_regular`."""
        with self._lock:
            reader = self._open.pop(name, None)
            if reader is None:
                idle = [other for other, opened in self._open.items() if not opened.users]
                for other in idle[: max(len(self._open) - MAX_OPEN_FILES + 1, 0)]:
                    self._open.pop(other).close()
                reader = LocalReader(path, links)
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
        """Closes the files; those that are being read are closed when the read is done."""
        with self._lock:
            for reader in self._open.values():
                if not reader.users:
                    reader.close()
            self._open.clear()
