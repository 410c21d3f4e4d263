"""System calls that not every system has, most of them on open files, with what stands in for them.

Windows has neither reads and writes at an offset nor directories that can be opened; macOS syncs a file to its device
only, whose cache loses it when the power fails, unless told otherwise. Which calls there are is looked up at each call.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Sequence
from typing import Any

try:
    import fcntl as _fcntl

    fcntl: Any = _fcntl
except ImportError:  # Windows
    fcntl = None

BINARY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every open: a descriptor that child processes do not inherit, and bytes that are not translated."""

_seeking = threading.RLock()
"""Held between a seek and the read or write there: threads share the position of a descriptor."""


def usable_cpus() -> int:
    """Returns the number of processors that this process may run on; of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_at(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fills buffers in order from a file; returns the bytes read, fewer than asked for at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, parts, offset)
    found = 0
    with _seeking, io.FileIO(fd, closefd=False) as file:
        file.seek(offset)
        for part in parts:
            count = file.readinto(part) or 0
            found += count
            if count < len(part):
                break
    return found


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Writes bytes into a file; returns how many, which may be fewer than were given."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def sync_file(fd: int) -> None:
    """Makes a file durable: it is on the device, beyond the device's own cache too."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # file systems without it, such as network ones
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)
