"""Bytes of a file lent as they lie in the page cache: memory to read from, without a copy.

A process that touches a mapped file is ended by the kernel if somebody cut the file short meanwhile. So what is lent
is guarded by the kernel's own lease on the file: whoever would open it to write, or cut it short, waits for the
milliseconds until everything is given back (45 s at most, by default), and nothing more is lent then. Pages are mapped
by a call that fails where touching would end the process, as on a broken disk. Where one of these is not to be had
(files of other users, network and FUSE file systems, old kernels, other systems), nothing is lent and bytes are read as
ever. The kernel tells of who waits by SIGURG, which nobody hears who does not ask for it.

What is to come into the cache on the way is asked for in huge pages: fewer and larger requests to the device, and less
work for whoever reads it afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from .memory import HUGE
from .page_cache import is_cached

try:
    import fcntl as _fcntl

    _leases: Any = _fcntl if hasattr(_fcntl, "F_SETLEASE") else None
except ImportError:
    _leases = None

__all__ = ["Lender"]

PAGE = mmap.PAGESIZE
POPULATE_READ = 22
"""MADV_POPULATE_READ: makes pages present, or fails."""
LEAST = 64 << 10
"""Bytes below which a copy is cheaper than a map."""
LOCAL = {0xEF53, 0x58465342, 0xF2F52010, 0x9123683E, 0x01021994}
"""Magic numbers of ext4, XFS, F2FS, Btrfs and tmpfs, whose files only this kernel changes, so that its leases count."""


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap's own, this lets other threads go on while pages are read
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _is_local(fd: int) -> bool:
    facts = (ctypes.c_long * 64)()  # of which the kernel fills the first 15; the magic number comes first
    return _libc().fstatfs(fd, facts) == 0 and facts[0] in LOCAL


class Lender:
    """Lends bytes of one open file, to several threads at once.

    Args:
        fd: a descriptor that is open for reading only; not closed by this.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()
        self._holders: set[object] = set()
        self._process = os.getpid()  # a lease belongs to the open file, which a fork has too
        self._able = _leases is not None and _is_local(fd)

    def close(self) -> None:
        """Lends nothing more. The lease on what still is lent goes with the last map of it."""
        with self._lock:
            self._fd, self._able = -1, False

    @contextlib.contextmanager
    def lend(self, offset: int, nbytes: int, *, fetch: bool = False) -> Iterator[memoryview | None]:
        """Bytes `offset:offset + nbytes` for as long as the body runs; None where they cannot be lent.

        What is written to them goes to a copy, not to the file.

        Args:
            fetch: brings them into the page cache; else nothing is lent that is not there.
        """
        holder, mapped, memory = object(), None, None
        try:
            # asked first: a cold load should not take a lease for each of its reads
            cached = self._able and nbytes >= LEAST and is_cached(self._fd, offset, nbytes)
            if (cached or (fetch and nbytes >= HUGE)) and self._take(holder):
                mapped = self._mapped(offset, nbytes, cached)
            if mapped is not None:
                memory = memoryview(mapped)[offset % PAGE :]
            yield memory
        finally:
            try:
                if mapped is not None:
                    with contextlib.suppress(BufferError):  # an error's traceback may still hold an array of it
                        memory = None if memory is None else memory.release()
                        mapped.close()
            finally:
                self._give_back(holder)

    def _mapped(self, offset: int, nbytes: int, cached: bool) -> mmap.mmap | None:
        if (fd := self._fd) < 0:  # closed just now, and a map of no file would be one of zeros
            return None
        low = offset // PAGE * PAGE
        way = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        try:
            mapped = mmap.mmap(fd, offset + nbytes - low, offset=low, **way)
        except (OSError, ValueError):  # past the end of the file, or a file system that does not map
            return None
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if not cached:
            _libc().madvise(address, len(mapped), mmap.MADV_HUGEPAGE)
        if _libc().madvise(address, len(mapped), POPULATE_READ):
            self._able &= ctypes.get_errno() != errno.EINVAL  # a kernel before 5.14
            mapped.close()
            return None
        return mapped

    def _take(self, holder: object) -> bool:
        """Guards the file, once for all that is lent at a time."""
        if not self._able or os.getpid() != self._process:
            return False
        with self._lock:
            if not self._able:
                return False
            alone = not self._holders
            self._holders.add(holder)  # first, so that it is given back whatever comes between
            try:
                if alone:
                    # what the kernel would send by default ends the process
                    _leases.fcntl(self._fd, _leases.F_SETSIG, signal.SIGURG)
                    _leases.fcntl(self._fd, _leases.F_SETLEASE, _leases.F_RDLCK)
                    return True
                if _leases.fcntl(self._fd, _leases.F_GETLEASE) == _leases.F_RDLCK:
                    return True
            except OSError as error:
                # EAGAIN: somebody has it open to write; all else will be the same next time
                self._able = error.errno == errno.EAGAIN
            self._holders.discard(holder)  # or somebody waits to write to it
            return False

    def _give_back(self, holder: object) -> None:
        if os.getpid() != self._process:
            return  # a fork inside of the body: the lease is its parent's
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.discard(holder)
            if not self._holders and self._fd >= 0:
                with contextlib.suppress(OSError):
                    _leases.fcntl(self._fd, _leases.F_SETLEASE, _leases.F_UNLCK)
