"""Reads bytes of a file from a memory map of the page cache, without a copy.

A process that touches a mapped file is killed by the kernel if another process has truncated the file meanwhile. So a
map is guarded by the kernel's lease on the file: a process that opens it to write, or truncates it, waits for the
milliseconds until every map is closed (45 s at most, by default), and no new map is created meanwhile. Pages are mapped
by a call that fails where touching them would kill the process, as on a broken disk. Where one of these is not
available (files of other users, network and FUSE file systems, old kernels, other systems), nothing is mapped.
The kernel signals a waiting writer by SIGURG, which is ignored by default.

Bytes that are to be fetched into the page cache are mapped in huge pages: fewer and larger requests to the device, and
fewer page faults for later readers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from .memory import HUGE
from .os_files import fcntl
from .page_cache import is_cached

_leases: Any = fcntl if hasattr(fcntl, "F_SETLEASE") else None
SYSTEM_PAGE = mmap.PAGESIZE
POPULATE_READ = 22
"""MADV_POPULATE_READ: makes pages present, or fails."""
LEAST_MAPPED = 64 << 10
"""Bytes below which a copy is cheaper than a map."""
LOCAL = {0xEF53, 0x58465342, 0xF2F52010, 0x9123683E, 0x01021994}
"""Magic numbers of ext4, XFS, F2FS, Btrfs and tmpfs: only this kernel changes their files, so its leases are enough."""


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, this releases the GIL while pages are read
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def file_system(place: int | os.PathLike[str]) -> int:
    """Returns the magic number of the file system of an open file or of a path; 0 where it is not known."""
    if sys.platform != "linux":
        return 0
    facts = (ctypes.c_long * 64)()  # the kernel fills the first 15; the magic number comes first
    failed = _libc().fstatfs(place, facts) if isinstance(place, int) else _libc().statfs(os.fsencode(place), facts)
    return 0 if failed else facts[0] & 0xFFFFFFFF


class MappedReader:
    """Maps byte ranges of one open file, for several threads at once; `fd` is read-only, and is not closed here."""

    def __init__(self, fd: int) -> None:
        self.fd, self._lock = fd, threading.RLock()
        self._holders: set[object] = set()
        self._process = os.getpid()  # a lease belongs to the open file, which a forked child shares
        self._able = _leases is not None and file_system(fd) in LOCAL

    def close(self) -> None:
        """Ends the creation of maps. The lease that guards open maps ends with the last of them."""
        with self._lock:
            self.fd, self._able = -1, False

    @contextlib.contextmanager
    def mapped(self, offset: int, nbytes: int, *, fetch: bool = False) -> Iterator[memoryview | None]:
        """Gives bytes `offset:offset + nbytes` while the body runs; None if they cannot be mapped.

        Writes to the memory go to a private copy, not to the file.

        Args:
            fetch: reads bytes that are missing into the page cache; otherwise only cached bytes are mapped.
        """
        holder, mapped, memory = object(), None, None
        try:
            # checked first: a cold load should not take a lease for each of its reads
            cached = self._able and nbytes >= LEAST_MAPPED and is_cached(self.fd, offset, nbytes)
            if (cached or (fetch and nbytes >= HUGE)) and self.take(holder):
                mapped = self._map(offset, nbytes, cached)
            if mapped is not None:
                memory = memoryview(mapped)[offset % SYSTEM_PAGE :]
            yield memory
        finally:
            try:
                if mapped is not None:
                    with contextlib.suppress(BufferError):  # an error's traceback may still hold an array of it
                        memory = None if memory is None else memory.release()
                        mapped.close()
            finally:
                self._release(holder)

    def _map(self, offset: int, nbytes: int, cached: bool) -> mmap.mmap | None:
        if (fd := self.fd) < 0:  # closed by another thread; mmap with fd -1 would be anonymous memory full of zeros
            return None
        low = offset // SYSTEM_PAGE * SYSTEM_PAGE
        private = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        try:
            mapped = mmap.mmap(fd, offset + nbytes - low, offset=low, **private)
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

    def take(self, holder: object) -> bool:
        """Takes the lease on the file, which all open maps share; returns whether it is held."""
        if not self._able or os.getpid() != self._process:
            return False
        with self._lock:
            if not self._able:
                return False
            alone = not self._holders
            self._holders.add(holder)  # before the lease is taken, so that an interrupt in between still releases it
            try:
                if alone:
                    # the default signal of a lease would end the process
                    _leases.fcntl(self.fd, _leases.F_SETSIG, signal.SIGURG)
                    _leases.fcntl(self.fd, _leases.F_SETLEASE, _leases.F_RDLCK)
                    return True
                if _leases.fcntl(self.fd, _leases.F_GETLEASE) == _leases.F_RDLCK:
                    return True
            except OSError as error:
                # EAGAIN: another process has it open to write; any other error would come again
                self._able = error.errno == errno.EAGAIN
            self._holders.discard(holder)  # no lease, or another process waits to write
            return False

    def _release(self, holder: object) -> None:
        if os.getpid() != self._process:
            return  # a fork inside of the body: the lease is its parent's
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.discard(holder)
            if not self._holders and self.fd >= 0:
                with contextlib.suppress(OSError):
                    _leases.fcntl(self.fd, _leases.F_SETLEASE, _leases.F_UNLCK)
