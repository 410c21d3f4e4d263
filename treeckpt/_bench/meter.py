"""Measures the time, peak memory and device traffic of an operation, and controls the page cache.

The peak is the kernel's own high-water mark, reset right before; where that is refused, a thread samples
/proc/self/statm. Files can be dropped from the page cache, read into it, and their cached part can be measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from .._io.storage.memory import advise_huge_pages

SYSTEM_PAGE = mmap.PAGESIZE
SAMPLE = 0.002
"""Seconds between samples of the memory, where the kernel's mark cannot be set back."""


class Usage(msgspec.Struct, frozen=True):
    """The time, memory and device traffic of an operation on one rank."""

    seconds: float
    extra_rss: int
    read_bytes: int
    write_bytes: int


class Meter:
    """Measures from `with` until `lap`."""

    def __enter__(self) -> Meter:
        self._peak = _KernelPeak() if _KernelPeak.works() else _SampledPeak()
        self._io = _io_bytes()
        self._start = time.perf_counter()
        return self

    def lap(self) -> Usage:
        """Returns what was measured since the start."""
        seconds = time.perf_counter() - self._start
        extra = self._peak.stop()
        (r0, w0), (r1, w1) = self._io, _io_bytes()
        return Usage(seconds, extra, r1 - r0, w1 - w0)

    def __exit__(self, *raised: object) -> None:
        self._peak.stop()


class _KernelPeak:
    """The kernel's high-water mark of resident memory (files and shared memory included)."""

    def __init__(self) -> None:
        self._before = _status("VmRSS")

    @staticmethod
    def works() -> bool:
        """Resets the mark; returns False if that is not possible."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
            return _status("VmHWM") >= 0
        except (OSError, KeyError):
            return False

    def stop(self) -> int:
        return max(0, _status("VmHWM") - self._before)


class _SampledPeak:
    """A thread that samples the resident memory."""

    def __init__(self) -> None:
        self._before = self._peak = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(SAMPLE):
            self._peak = max(self._peak, _resident())

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._peak, _resident()) - self._before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * SYSTEM_PAGE
    except OSError:  # not Linux
        return 0


def _io_bytes() -> tuple[int, int]:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # not Linux, or not allowed
        return 0, 0
    counts = {name: int(number) for name, _, number in (line.partition(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


def release_memory() -> None:
    """Returns freed memory to the system, so that every contender starts without warm memory."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def pretouch_memory(nbytes: int) -> None:
    """Touches new memory and frees it, right before an operation that allocates new memory is measured.

    A virtual machine may have returned its free memory to its host, and getting it again takes many times as long as
    a load, which the first contender would pay for all. After this call every contender, and the raw limit, starts
    alike.
    """
    memory = mmap.mmap(-1, max(nbytes, SYSTEM_PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(memory)
    np.frombuffer(memory, np.uint8)[::SYSTEM_PAGE] = 1
    memory.close()


# the page cache ---------------------------------------------------------------------------------------------------


def files_of(directory: Path) -> list[Path]:
    """The files below a directory."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens a file, or a directory, and closes it at the end."""
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def drop_cache(directory: Path) -> None:
    """Drops the files' pages from the page cache; pages that are not on the device yet stay."""
    for path in files_of(directory):
        with opened(path) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(directory: Path) -> None:
    """Reads the files into the page cache."""
    buffer = memoryview(bytearray(8 << 20))
    for path in files_of(directory):
        with opened(path) as fd:
            offset = 0
            while count := os.preadv(fd, [buffer], offset):
                offset += count


def cached_fraction(directory: Path) -> float:
    """The part of the files' pages that is in the page cache: 0 to 1."""
    there = total = 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for path in files_of(directory):
        size = path.stat().st_size
        if not size:
            continue
        with opened(path) as fd, mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            marks = np.zeros(-(-size // SYSTEM_PAGE), np.uint8)
            if libc.mincore(view.ctypes.data, size, marks.ctypes.data) != 0:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            there, total = there + int((marks & 1).sum()), total + len(marks)
            del view
    return there / total if total else 0.0


def sync_files(directory: Path) -> None:
    """Makes files durable, and the names of files."""
    for path in [*files_of(directory), *(p for p in directory.rglob("*") if p.is_dir()), directory]:
        with opened(path) as fd:
            os.fsync(fd)
