"""Reads byte ranges of local files, from the page cache or from the device, and writes new files.

Bytes that are in the page cache are copied from there. Other bytes are read by O_DIRECT straight into the caller's
memory if offset and address are page-aligned, otherwise by a plain read. The kernel tells first which bytes are cached:
a trial read that may not block would start its readahead, and every byte would be read twice. New files are written
past the page cache where the file system supports that, and made durable.

Bytes of the page cache are also given as a memory map, without a copy. A process that touches a mapped file is killed
by the kernel if another process has truncated the file meanwhile. So a map is guarded by the kernel's lease on the
file: a process that opens it to write, or truncates it, waits for the milliseconds until every map is closed (45 s at
most, by default), and no new map is created meanwhile. Pages are mapped by a call that fails where touching them would
kill the process, as on a broken disk. Where one of these is not available (files of other users, network and FUSE file
systems, old kernels, other systems), nothing is mapped. The kernel signals a waiting writer by SIGURG, which is ignored
by default. Bytes that are to be fetched into the page cache are mapped in huge pages: fewer and larger requests to the
device, and fewer page faults for later readers.

Windows has neither reads and writes at an offset nor directories that can be opened; macOS syncs a file to its device
only, whose cache loses it when the power fails, unless told otherwise. What stands in for such calls is here; which
there are is looked up at each call. Whether bytes of a file are in the page cache is told by Linux, without a read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import platform
import signal
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CorruptError, StoreError
from ..os_errors import shows_damage
from ..process import OwnProcess
from .memory import HUGE, PAGE_NBYTES, aligned_buffer

try:
    import fcntl as _fcntl

    fcntl: Any = _fcntl
except ImportError:  # Windows
    fcntl = None

BINARY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every open: a descriptor that child processes do not inherit, and bytes that are not translated."""

_seeking = threading.RLock()
"""Held between a seek and the read or write there: threads share the position of a descriptor."""


def read_at(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fills buffers in order from a file; returns the bytes read, fewer than asked for at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, parts, offset)
    filled = 0
    with _seeking, io.FileIO(fd, closefd=False) as file:
        file.seek(offset)
        for part in parts:
            count = file.readinto(part) or 0
            filled += count
            if count < len(part):
                break
    return filled


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


SYSTEM_PAGE = mmap.PAGESIZE
CACHESTAT = 451
"""The number of the system call cachestat, the same on all architectures of `has_cachestat`."""
has_cachestat = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x")


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    """Page counts of a range; only `cached` is used."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")]


@lru_cache(maxsize=1)
def _libc_with_gil() -> Any:
    try:
        libc = ctypes.PyDLL(None, use_errno=True)  # a call of 2 us is not worth releasing the GIL
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    except (OSError, AttributeError, TypeError):
        return None
    return libc


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether all pages of a byte range are in memory; False if that cannot be known."""
    if nbytes <= 0 or (libc := _libc_with_gil()) is None:
        return False
    low = offset // SYSTEM_PAGE * SYSTEM_PAGE
    length = offset + nbytes - low
    pages = -(-length // SYSTEM_PAGE)
    count = _count(libc, fd, low, length)
    return count >= pages if count is not None else _all_in_core(libc, fd, low, length)


def _count(libc: Any, fd: int, low: int, length: int) -> int | None:
    """Returns how many pages of a range are in the page cache; None without cachestat (Linux before 6.5)."""
    global has_cachestat
    if not has_cachestat:
        return None
    counts = _Counts()
    if libc.syscall(CACHESTAT, fd, ctypes.byref(_Range(low, length)), ctypes.byref(counts), 0) == 0:
        return int(counts.cached)
    if ctypes.get_errno() == errno.ENOSYS:
        has_cachestat = False
    return None


def _all_in_core(libc: Any, fd: int, low: int, length: int) -> bool:
    """Whether all pages are in memory by mincore on a map of the range, for kernels without cachestat."""
    # the kernel reports every page of another user's file as cached, to keep their use secret
    if not hasattr(mmap, "PROT_READ") or os.geteuid() not in (0, os.fstat(fd).st_uid):
        return False
    try:
        mapped = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=low)
    except (OSError, ValueError):  # past the end of the file, or a file system that does not map
        return False
    pages = np.zeros(-(-length // SYSTEM_PAGE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    failed = libc.mincore(address, length, pages.ctypes.data)
    mapped.close()
    return failed == 0 and bool((pages & 1).all())


_leases: Any = fcntl if hasattr(fcntl, "F_SETLEASE") else None
POPULATE_READ = 22
"""MADV_POPULATE_READ: makes pages present, or fails."""
LEAST_MAPPED = 64 << 10
"""Bytes below which a copy is cheaper than a map."""
LEASED_FILE_SYSTEMS = {0xEF53, 0x58465342, 0xF2F52010, 0x9123683E, 0x01021994}
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
        self._process = OwnProcess()  # a lease belongs to the open file, which a forked child shares
        self._able = _leases is not None and file_system(fd) in LEASED_FILE_SYSTEMS

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
        if not self._able or not self._process.is_this:
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
        if not self._process.is_this:
            return  # a fork inside of the body: the lease is its parent's
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.discard(holder)
            if not self._holders and self.fd >= 0:
                with contextlib.suppress(OSError):
                    _leases.fcntl(self.fd, _leases.F_SETLEASE, _leases.F_UNLCK)


FOLLOW_LINKS = "TREECKPT_FOLLOW_LINKS"
"""The variable of the environment by which all stores of a process, and of those it starts, follow links."""
DIRECT_IO_ALIGNMENT = 4096
MAX_VECTORS = 256
"""Buffers that one call fills, at most."""
MAX_OPEN_FILES = 128
"""Files of a directory that stay open, with two descriptors each; the usual limit of a process is 1,024."""
MIN_DIRECT_NBYTES = 64 << 10
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
    # called for a link alone: `links` resolves the whole path of the directory
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
        cached = shared or len(out) < MIN_DIRECT_NBYTES or is_cached(self.fd, offset, len(out))
        try:
            filled = 0 if cached else self._from_device(offset, out)
            self._copy(offset + filled, [out[filled:]], len(out) - filled)
        except OSError as error:
            # a call on a descriptor raises an error without a name
            error.filename = str(self._path)
            raise

    def read_parts(self, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        """Fills several buffers from the page cache; returns False if not all is cached. Raises as `read_into`.

        Of what is not cached, one buffer is filled past the page cache if file and memory are aligned alike.

        Args:
            shared: also brings there what is not cached.
        """
        nbytes, filled = sum(map(len, parts)), 0
        cached = shared or is_cached(self.fd, offset, nbytes)
        if not cached and (len(parts) > 1 or nbytes < MIN_DIRECT_NBYTES):
            return False
        try:
            if not cached and not (filled := self._from_device(offset, parts[0])):
                return False
            self._copy(offset + filled, [parts[0][filled:], *parts[1:]], nbytes - filled)
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
            count = read_at(self.fd, list(islice(rest, MAX_VECTORS)), offset + filled)
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
                # some file systems take O_DIRECT at open and refuse it here: the rest goes through the page cache
                if error.errno == errno.EINVAL:
                    break
                raise
            start += max(count, 0)
            # the end of the file: the next offset would not be aligned, which O_DIRECT refuses
            if count <= 0 or count % DIRECT_IO_ALIGNMENT:
                break
        return start

    def _direct_fd(self) -> int:
        with self._lock:
            if self._direct is None:
                try:
                    self._direct = open_regular(self._path, getattr(os, "O_DIRECT", 0), links=self._links)
                # no O_DIRECT there, or the name has gone: the descriptor that is open reads through the page cache
                except (OSError, CorruptError):
                    self._direct = -1
            return self._direct

    def close(self) -> None:
        """Closes the file."""
        if self._maps is not None:
            self._maps.close()
        # forgotten before they are closed: a second close, as by `__del__`, would close another file of that number
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


NEW_FILE_MODE = 0o666
"""The permissions of a new file, less those that the umask of the process takes away."""
DIRECTORY_TRIES = 5
"""How often the directory of a new file is made again, at most."""


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
        # another rank may create it at this moment
        directory.mkdir(exist_ok=True)
    # no save has created a directory on which a file system is mounted
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
            self._fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), NEW_FILE_MODE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Linux has made the file when it refuses the flag
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.direct = False
            self._fd = os.open(path, flags, NEW_FILE_MODE)
        self._open = True
        # a full disk is found before any byte is written
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
        # a file that was written without O_DIRECT leaves the page cache too; after the sync, as dirty pages would stay
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
