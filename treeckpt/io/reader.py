"""Reading a local file by ranges, at the rate of whichever holds the bytes: the page cache or the device.

What is in the page cache is copied from there (a read that may not wait tells); the rest comes by O_DIRECT straight
into the caller's memory where offset and address are page-aligned, else by a plain read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import numpy as np

from ..core.errors import CorruptError

__all__ = ["LocalReader"]

PAGE = 4096
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_CAN_NOT = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class LocalReader:
    """One open file."""

    def __init__(self, path: Path) -> None:
        # O_NOFOLLOW and O_NONBLOCK: a link or a FIFO under a name of ours is refused, not followed or waited for
        self._flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._path = path
        self._fd = os.open(path, self._flags)
        self._direct: int | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` from `offset` on.

        Raises:
            CorruptError: the file ends before.
        """
        filled = self._from_cache(offset, out)
        if filled < len(out):
            filled = self._from_device(offset, out, filled)
        while filled < len(out):
            count = os.preadv(self._fd, [out[filled:]], offset + filled)
            if count == 0:
                raise CorruptError(
                    str(self._path),
                    expected=f"{len(out)} bytes at {offset}",
                    found=f"{filled} before the end of the file",
                    hint="The file was cut short; restore it from a copy",
                )
            filled += count

    def _from_cache(self, offset: int, out: memoryview) -> int:
        """Bytes that could be had without waiting for the device."""
        filled = 0
        while _NOWAIT and filled < len(out):
            try:
                count = os.preadv(self._fd, [out[filled:]], offset + filled, _NOWAIT)
            except OSError as error:
                if error.errno in _CAN_NOT:
                    break
                raise
            if count == 0:
                break
            filled += count
        return filled

    def _from_device(self, offset: int, out: memoryview, filled: int) -> int:
        """Reads whole pages past the page cache, as far as alignment allows; returns how much is filled."""
        start = filled // PAGE * PAGE
        stop = len(out) // PAGE * PAGE
        if stop <= start or offset % PAGE or np.frombuffer(out, np.uint8).ctypes.data % PAGE:
            return filled
        fd = self._direct_fd()
        if fd < 0:
            return filled
        while start < stop:
            try:
                count = os.preadv(fd, [out[start:stop]], offset + start)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    break
                raise
            if count <= 0 or count % PAGE:
                start += max(count, 0)
                break
            start += count
        return max(start, filled)

    def _direct_fd(self) -> int:
        with self._lock:
            if self._direct is None:
                try:
                    self._direct = os.open(self._path, self._flags | getattr(os, "O_DIRECT", 0))
                except OSError:
                    self._direct = -1
            return self._direct

    def close(self) -> None:
        """Closes the file."""
        for fd in (self._fd, self._direct):
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
