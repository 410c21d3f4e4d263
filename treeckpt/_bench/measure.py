"""Measures a contender's turn: save, then load and fill, cold and warm, each beside the raw limits of that moment.

Memory at the peak is the kernel's own high-water mark, reset right before; where that is refused, a thread samples
/proc/self/statm. Files are dropped from the page cache, or read into it, before a load.

The limits of this machine that every trial is compared with, in bytes per second: W: durable O_DIRECT write (8 MiB
blocks, file preallocated, fsync), R: O_DIRECT read into touched memory, R_fresh: the same into new memory in huge
pages, each the better of one and two threads; C: copy into touched shared memory; plain, plain_fresh: one thread's
buffered read of a file in the page cache, into touched and into new memory. W_huge, R_huge: W and R with two blocks in
huge pages that are used again and again: the device gets fewer requests. Where the file system refuses O_DIRECT,
buffered calls with fsync, and reads after dropping the pages, take its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from .._io.storage.memory import advise_huge_pages, aligned_buffer
from .checkpointers import SyncCheckpointer, files_of, opened
from .results import HUGE, LIMITS, BenchError, Limit, Trial
from .states import BenchTask, State, different_leaf, make_state, shapes_bytes, sum_bytes, touch

SYSTEM_PAGE = mmap.PAGESIZE
SAMPLE = 0.002
"""Seconds between samples of the memory, where the kernel's mark cannot be set back."""
BLOCK = 8 << 20
THREADS = (1, 2)
LARGEST = 1 << 30
"""Bytes of the file, at most."""
MIN_RATED_NBYTES = BLOCK
"""Bytes below which a rate says nothing."""
Difference = Callable[[State], str | None]
"""Returns the name of a leaf that differs from what must come back."""


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
    # Only glibc has it.
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
            # A map cannot be closed as long as an array refers to it.
            del view
    return there / total if total else 0.0


class RawLimits:
    """Measures with one file and one buffer.

    Args:
        path: of the file; `remove` deletes it.
        nbytes: of the payload that is compared.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = min(max(nbytes, MIN_RATED_NBYTES), LARGEST) // BLOCK * BLOCK
        self._path = path
        self._memory = aligned_buffer(self.nbytes)
        self._array = np.frombuffer(self._memory, np.uint8)
        block = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
        for index, start in enumerate(range(0, self.nbytes, BLOCK)):  # no two blocks alike, for devices that compare
            self._array[start : start + BLOCK] = block + np.uint8(index)
            self._array[start : start + 8] = np.frombuffer(index.to_bytes(8, "little"), np.uint8)
        self._shared: np.ndarray | None = None
        self._ring = aligned_buffer(2 * BLOCK, huge=True)
        self._ring[:] = bytes(self._memory[:BLOCK]) * 2
        self._direct: int = getattr(os, "O_DIRECT", 0)
        try:
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._direct) as fd:
                os.pwrite(fd, self._memory[:BLOCK], 0)
        except OSError:
            self._direct = 0
        self.remove()

    def remove(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)

    def measure(self, limit: Limit) -> float:
        """Returns a rate. The writes leave the file that the reads read."""
        if limit == "C":
            return max(map(self._copy, THREADS))
        if limit in ("plain", "plain_fresh"):
            self._read(1, self._memory, cached=True)
            return self._read(1, self._memory if limit == "plain" else None, cached=True)
        memory = None if limit == "R_fresh" else self._ring if limit.endswith("huge") else self._memory
        if memory is not None and limit.startswith("W"):
            return max(self._write(threads, memory) for threads in THREADS)
        return max(self._read(threads, memory) for threads in THREADS)

    def _write(self, threads: int, memory: memoryview) -> float:
        self.remove()
        start = time.perf_counter()
        with opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct) as fd:
            with contextlib.suppress(OSError):
                # Not every file system can do that.
                os.posix_fallocate(fd, 0, self.nbytes)
            self._each_block(threads, lambda at: _transfer(os.pwrite, fd, memory, at))
            os.fsync(fd)
        return self.nbytes / (time.perf_counter() - start)

    def _read(self, threads: int, memory: memoryview | None, *, cached: bool = False) -> float:
        """Reads the file into memory; None allocates new memory, which counts.

        Args:
            cached: reads through the page cache.
        """
        with opened(self._path, os.O_RDONLY if cached else os.O_RDONLY | self._direct) as fd:
            # Where O_DIRECT is refused the read is buffered, and must not find the pages that the write left.
            if not cached:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if memory is None:
                pretouch_memory(self.nbytes)
            start = time.perf_counter()
            into = aligned_buffer(self.nbytes, huge=not cached) if memory is None else memory
            self._each_block(threads, lambda at: _transfer(_pread, fd, into, at))
            return self.nbytes / (time.perf_counter() - start)

    def _copy(self, threads: int) -> float:
        if self._shared is None:
            self._shared = np.frombuffer(mmap.mmap(-1, self.nbytes), np.uint8)  # anonymous and shared by default
            self._shared[:] = 1
        shared = self._shared
        start = time.perf_counter()
        self._each_block(threads, lambda at: np.copyto(shared[at : at + BLOCK], self._array[at : at + BLOCK]))
        return self.nbytes / (time.perf_counter() - start)

    def _each_block(self, threads: int, work: Callable[[int], None]) -> None:
        """Calls `work` with the offset of each block."""
        starts = range(0, self.nbytes, BLOCK)
        if threads == 1:
            for start in starts:
                work(start)
            return
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, starts):
                pass


def _pread(fd: int, data: memoryview, at: int) -> int:
    return os.preadv(fd, [data], at)


def _transfer(call: Callable[[int, memoryview, int], int], fd: int, memory: memoryview, at: int) -> None:
    """Reads or writes the block at an offset, in as many calls as it takes; memory that is shorter is used again."""
    low = at % len(memory)
    data, done = memory[low : low + BLOCK], 0
    while done < BLOCK:
        count = call(fd, data[done:], at + done)
        if not count:
            raise OSError(f"the file for raw limits ends at {at + done}")
        done += count


class Measurement:
    """Measures the turns of a scenario in one directory.

    Args:
        nbytes: unique bytes of the whole state.
    """

    def __init__(self, task: BenchTask, nbytes: int) -> None:
        self.scenario, self.nbytes = task.name, nbytes
        self.directory = task.path / "checkpoint"
        self._raw = RawLimits(task.path / "raw.bin", nbytes) if nbytes >= MIN_RATED_NBYTES else None

    def limits(self, names: Sequence[Limit]) -> dict[str, float]:
        """Measures raw rates; none of a state that is too small for them."""
        return {name: self._raw.measure(name) for name in names} if self._raw is not None else {}

    def begin(self) -> None:
        """Creates the empty directory of a checkpoint."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)

    def end(self) -> None:
        """Removes the checkpoint and the raw file."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._raw is not None:
            self._raw.remove()

    def turn(
        self,
        contender: SyncCheckpointer,
        repetition: int,
        state: State,
        target: State,
        difference: Difference | None = None,
    ) -> list[Trial]:
        """Saves, loads and fills.

        Args:
            target: what is filled; a new state has its shapes and layouts.
            difference: compares what comes back; None does not compare.
        """
        self.begin()
        save = partial(contender.save, self.directory, contender.prepare(state))
        trials = [self.trial(contender.name, "save", repetition, save, self.nbytes)]
        # The first phase is the save, which was measured above.
        for phase in [*LIMITS][1:]:
            kind = phase.split()[0]
            if kind in contender.kinds:
                if kind != "load" and difference is not None:
                    for leaf in target.values():
                        leaf.fill_(0)
                load = partial(self._load, contender, kind, target)
                trials.append(self.trial(contender.name, phase, repetition, load, self.nbytes, difference))
        self.end()
        return trials

    def _load(self, contender: SyncCheckpointer, kind: str, target: State) -> State:
        if kind == "load":
            return contender.load(self.directory, target)
        if kind == "fill":
            contender.load_into(self.directory, target)
        else:
            contender.compare_and_fill(self.directory, target)
        return target

    def trial(
        self,
        contender: str,
        phase: str,
        repetition: int,
        work: Callable[[], State | None],
        nbytes: int,
        difference: Difference | None = None,
    ) -> Trial:
        """Measures one operation.

        Raises:
            BenchError: what came back differs from what was saved.
        """
        cached, rates = self.prepare(contender, phase)
        pretouch_memory(new_nbytes(phase, nbytes))
        usage, summed, loaded = measure_work(work)
        self.compare(contender, loaded, difference)
        del loaded
        return Trial(
            scenario=self.scenario,
            contender=contender,
            phase=phase,
            repetition=repetition,
            seconds=usage.seconds,
            summed=summed,
            nbytes=nbytes,
            limit=LIMITS[phase],
            limits=rates,
            extra_rss=usage.extra_rss,
            read_bytes=usage.read_bytes,
            write_bytes=usage.write_bytes,
            files_bytes=sum(path.stat().st_size for path in files_of(self.directory)),
            cached=cached,
        )

    def prepare(self, contender: str, phase: str) -> tuple[float, dict[str, float]]:
        """Brings the page cache into the state of a phase; returns the part of the files in it, and raw rates."""
        release_memory()
        if phase.endswith("cold"):
            drop_cache(self.directory)
        elif phase.endswith("warm"):
            fill_cache(self.directory)
        cached, limit = cached_fraction(self.directory), LIMITS[phase]
        limits: list[Limit] = ["C", limit] if phase == "save" else [limit]
        if limit in HUGE and contender == "treeckpt":  # its buffers lie in huge pages
            limits.append(HUGE[limit])
        return cached, self.limits(limits)

    def compare(self, contender: str, loaded: State | None, difference: Difference | None) -> None:
        """Raises BenchError where what came back differs from what was saved."""
        if loaded is not None and difference is not None and (name := difference(loaded)):
            raise BenchError(f"{contender}: {self.scenario}: {name} came back changed")


def new_nbytes(phase: str, nbytes: int) -> int:
    """Returns the bytes of new memory that a phase takes: new arrays, and the page cache of who reads through it."""
    return nbytes * (phase.startswith("load") + phase.endswith("cold"))


def measure_work(work: Callable[[], State | None]) -> tuple[Usage, float, State | None]:
    """Returns what an operation took, its time when every byte was added up, and its result."""
    with Meter() as meter:
        loaded = work()
        if loaded is not None:
            # A library may have mapped the file: it is loaded once every page was touched.
            touch(loaded)
        usage = meter.lap()
    start = time.perf_counter()
    if loaded is None:
        return usage, usage.seconds, None
    sum_bytes(loaded)
    return usage, usage.seconds + time.perf_counter() - start, loaded


def run_alone(task: BenchTask, contenders: Sequence[SyncCheckpointer]) -> Iterator[list[Trial]]:
    """Measures a scenario of one process; yields the trials of each turn.

    Raises:
        BenchError: what came back differs from what was saved.
    """
    yield from run_turns(task, contenders, Measurement(task, shapes_bytes(task.shapes)), make_state(task.shapes))


def run_turns(
    task: BenchTask, contenders: Sequence[SyncCheckpointer], measurement: Measurement, state: State
) -> Iterator[list[Trial]]:
    """Measures the turns of contenders with a state; what comes back in the first repetition is compared."""
    target = {name: leaf.clone() for name, leaf in state.items()}
    for repetition, contender in task.turns(contenders):
        difference = partial(different_leaf, state) if repetition == 0 else None
        yield measurement.turn(contender, repetition, state, target, difference)
