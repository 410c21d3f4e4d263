"""Runs plans: streams a rank's shards out, and reads blocks in. The only code that moves array bytes.

Saving copies entries one after the other into page-aligned buffers of `BUFFER` bytes; full buffers go to a few threads
that hash and write them while the next is filled, so a save needs no more memory than those buffers. The header is
written last, with the checksums. Loading reads each block of a plan, rounded out to the borders of checksums, verifies it, and
copies its boxes to where they are wanted; several blocks are under way at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec
import numpy as np

from ..core.errors import CorruptError
from ..core.plan import Block, Copy, FilePlan, LoadPlan
from ..core.records import File, Index
from ..core.region import Region, c_strides
from ..core.shard import (
    BLOCK,
    Entry,
    ShardHeader,
    block_count,
    decode_header,
    encode_header,
    hash_block,
    header_nbytes,
)
from ..leaves.base import HostArray, Piece, TargetPiece, raw_dtype
from .record import Recorder
from .store import Store, Writer, aligned_buffer

__all__ = ["Opened", "open_shard", "run_load", "run_save", "verify_shard"]

BUFFER = 8 << 20
"""Bytes of one write. Measured: 4 to 16 MiB reach the device's rate, smaller ones do not."""
BUFFERS = 4
WRITERS = 2
READERS = 3


class _Pipe:
    """Buffers on their way to a file: filled by the caller, hashed and written by threads."""

    def __init__(self, writer: Writer, base: int, nbytes: int, pool: ThreadPoolExecutor, ring: queue.Queue[Any]):
        self._writer, self._base, self._pool, self._ring = writer, base, pool, ring
        self.hashes = [0] * block_count(nbytes)
        self.hash_ns = self.write_ns = 0
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()
        self._buffer: memoryview = ring.get()
        self._at = 0  # bytes in the buffer
        self._start = 0  # where the buffer goes in the data area

    def feed(self, data: np.ndarray, itemsize: int) -> None:
        """Appends the elements of an array of raw dtype, in C order."""
        if data.flags.c_contiguous:
            self._feed_bytes(memoryview(data.reshape(-1).view(np.uint8)))
            return
        rows = max(1, BUFFER // max(1, itemsize * data[:1].size)) if data.ndim else 1
        for low in range(0, len(data) if data.ndim else 1, rows):
            part = np.ascontiguousarray(data[low : low + rows])
            self._feed_bytes(memoryview(part.reshape(-1).view(np.uint8)))

    def _feed_bytes(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER - self._at)
            self._buffer[self._at : self._at + count] = data[done : done + count]
            self._at += count
            done += count
            if self._at == BUFFER:
                self._send()
                self._buffer = self._ring.get()

    def _send(self) -> None:
        buffer, nbytes, start = self._buffer, self._at, self._start
        self._start, self._at = start + nbytes, 0
        self._pending.append(self._pool.submit(self._work, buffer, nbytes, start))
        for future in [f for f in self._pending if f.done()]:
            self._pending.remove(future)
            future.result()

    def _work(self, buffer: memoryview, nbytes: int, start: int) -> None:
        try:
            begin = time.perf_counter_ns()
            for at in range(0, nbytes, BLOCK):
                self.hashes[(start + at) // BLOCK] = hash_block(buffer[at : min(at + BLOCK, nbytes)])
            middle = time.perf_counter_ns()
            self._writer.write(self._base + start, buffer[:nbytes])
            end = time.perf_counter_ns()
            with self._lock:
                self.hash_ns += middle - begin
                self.write_ns += end - middle
        finally:
            self._ring.put(buffer)

    def finish(self) -> None:
        """Sends what is left and waits for everything."""
        if self._at:
            self._send()
        else:
            self._ring.put(self._buffer)
        errors = [error for f in self._pending if (error := f.exception()) is not None]
        if errors:
            raise errors[0]

    def drain(self) -> None:
        """After an error: waits until no thread uses the file any more."""
        wait(self._pending)


class SaveFile(msgspec.Struct, frozen=True):
    """One shard to write: its plan, its name, and a header that lacks only the checksums."""

    plan: FilePlan
    name: str
    header: ShardHeader


def run_save(
    store: Store,
    files: Sequence[SaveFile],
    pieces: Callable[[int], Sequence[Piece]],
    recorder: Recorder,
    *,
    created: Callable[[str], None] = lambda name: None,
) -> list[tuple[int, int]]:
    """Writes a rank's shards, durably.

    Args:
        pieces: the local pieces of leaf number i.
        created: told each file's name before the file is made, for cleaning up after a failure.

    Returns:
        (bytes of the header, bytes of the data) of each file.
    """
    ring: queue.Queue[Any] = queue.Queue()
    for _ in range(BUFFERS):
        ring.put(aligned_buffer(BUFFER))
    with ThreadPoolExecutor(WRITERS, "treeckpt-write") as pool:
        return [_save_file(store, file, pieces, recorder, pool, ring, created) for file in files]


def _save_file(
    store: Store,
    file: SaveFile,
    pieces: Callable[[int], Sequence[Piece]],
    recorder: Recorder,
    pool: ThreadPoolExecutor,
    ring: queue.Queue[Any],
    created: Callable[[str], None],
) -> tuple[int, int]:
    base = len(encode_header(file.header))
    created(file.name)
    with recorder.span("write", base + file.plan.nbytes):
        writer = store.create(file.name, base + file.plan.nbytes)
        try:
            pipe = _Pipe(writer, base, file.plan.nbytes, pool, ring)
            try:
                start = recorder.now()
                for write in file.plan.writes:
                    _feed(pipe, write.region, pieces(write.leaf))
                pipe.finish()
            finally:
                pipe.drain()
            recorder.add("hash", start, start + pipe.hash_ns, file.plan.nbytes)
            header = encode_header(msgspec.structs.replace(file.header, hashes=tuple(pipe.hashes)))
            head = aligned_buffer(base)
            head[:] = header
            writer.write(0, head)
            with recorder.span("fsync"):
                writer.commit()
        except BaseException:
            writer.abort()
            raise
    return base, file.plan.nbytes


def _feed(pipe: _Pipe, region: Region, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        if region.size and region.within(piece.region):
            break
    else:
        if region.size:
            raise AssertionError(f"the plan writes {region}, which this rank does not hold")
        return
    box = region.relative_to(piece.region)
    if isinstance(piece.data, HostArray):
        data = piece.data.array if region == piece.region else piece.data.array[box.slices()]
        pipe.feed(data, data.itemsize)
        return
    # lazily transformed or on a device: read in rows, so that no more than a few buffers are made of it
    first = piece.data.read(tuple(slice(o, o + min(1, n)) for o, n in zip(box.offset, box.shape, strict=True)))
    rows = max(1, BUFFER // max(1, first.itemsize * (box.size // box.shape[0]))) if box.shape else 1
    for low in range(0, box.shape[0] if box.shape else 1, rows):
        slices = box.slices()
        if box.shape:
            slices = (slice(box.offset[0] + low, box.offset[0] + min(low + rows, box.shape[0])), *slices[1:])
        data = piece.data.read(slices)
        pipe.feed(data, data.itemsize)


class Opened(msgspec.Struct, frozen=True):
    """A shard whose header was read and found to be the one that the index means."""

    file: File
    hashes: tuple[int, ...]
    block: int


def read_header(store: Store, name: str, *, entries: bool = True) -> tuple[int, ShardHeader]:
    """(bytes of the header, what it says).

    Raises:
        CorruptError, FormatError: naming the file.
    """
    label = f"{store.url}/{name}"
    prefix = bytearray(8)
    store.read_into(name, 0, memoryview(prefix))
    size = header_nbytes(prefix, label)
    if size > (actual := store.sizes().get(name, 0)):
        raise CorruptError(label, expected=f"a header of {size} bytes", found=f"a file of {actual}")
    data = bytearray(size)
    store.read_into(name, 0, memoryview(data))
    return size, decode_header(data, label)


def open_shard(store: Store, index: Index, file: File, size: int | None) -> Opened:
    """Reads a shard's header and checks that it is the file that the index means.

    Args:
        size: the file's, in bytes; None where it is missing.

    Raises:
        CorruptError: missing, cut short, grown, or of another save or rank.
    """
    label = f"{store.url}/{file.name}"
    expected = file.header + file.nbytes
    if size is None:
        raise CorruptError(label, expected="a shard", found="no such file", hint="Restore it from a copy")
    if size != expected:
        raise CorruptError(
            label,
            expected=f"{expected} bytes",
            found=f"{size}",
            hint="The file was changed or cut short after it was written; restore it from a copy",
        )
    length, header = read_header(store, file.name)
    found = (header.save_id, header.rank, header.part, header.stream, length, header.nbytes)
    wanted = (index.save_id, file.rank, file.part, file.stream, file.header, file.nbytes)
    if found != wanted:
        raise CorruptError(
            label,
            expected="save {}, rank {}, part {}, at {}, header {}, data {}".format(*wanted),
            found="save {}, rank {}, part {}, at {}, header {}, data {}".format(*found),
            hint="The file belongs to another save; restore the right one from a copy",
        )
    return Opened(file, header.hashes, header.block)


def _check_blocks(opened: Opened, start: int, data: memoryview, label: str) -> None:
    """Compares checksums of data that starts at a border of a block."""
    for at in range(0, len(data), opened.block):
        number = (start + at) // opened.block
        if hash_block(data[at : at + opened.block]) != opened.hashes[number]:
            first = number * opened.block + opened.file.header
            raise CorruptError(
                label,
                expected="bytes that match their checksum",
                found=f"changed bytes in {first}:{first + len(data[at : at + opened.block])} of the file",
                hint="Restore the file from a copy, or load without this leaf",
            )


def _read(store: Store, opened: Opened, start: int, stop: int, verify: bool, label: str) -> np.ndarray:
    """Bytes `start:stop` of a shard's data area, verified if asked."""
    low, high = start, stop
    if verify:
        low = start // opened.block * opened.block
        high = min(-(-stop // opened.block) * opened.block, opened.file.nbytes)
    data = np.empty(high - low, np.uint8)
    store.read_into(opened.file.name, opened.file.header + low, memoryview(data))
    if verify:
        _check_blocks(opened, low, memoryview(data), label)
    return data[start - low : stop - low]


def run_load(
    store: Store,
    index: Index,
    plan: LoadPlan,
    targets: Callable[[int], TargetPiece | None],
    *,
    itemsize: Callable[[int], int],
    paths: Callable[[int], str],
    verify: bool = True,
    opened: dict[str, Opened] | None = None,
    recorder: Recorder | None = None,
) -> int:
    """Reads every block of a plan and copies its boxes to their targets.

    Args:
        targets: the piece that want number i fills; None reads (and verifies) only.
        opened: shards whose headers were read already; filled further.

    Returns:
        Bytes read from data areas.
    """
    shards = opened if opened is not None else {}
    located = [(block, *index.locate(block.rank, block.start, block.stop, paths(block.copies[0].want)))
               for block in plan.blocks]  # fmt: skip
    sizes = store.sizes() if any(file.name not in shards for _, file, _ in located) else {}
    for _, file, _ in located:
        if file.name not in shards:
            shards[file.name] = open_shard(store, index, file, sizes.get(file.name))

    def work(block: Block, file: File, position: int) -> int:
        start = position - file.header
        label = f"{paths(block.copies[0].want)}: {store.url}/{file.name}"
        begin = recorder.now() if recorder else 0
        data = _read(store, shards[file.name], start, start + block.stop - block.start, verify, label)
        for copy in block.copies:
            if (piece := targets(copy.want)) is not None:
                _place(data, block, copy, piece, itemsize(copy.want))
        if recorder:
            recorder.add("read", begin, recorder.now(), len(data))
        return len(data)

    return sum(_in_parallel([lambda b=b, f=f, p=p: work(b, f, p) for b, f, p in located], READERS))


def _place(data: np.ndarray, block: Block, copy: Copy, piece: TargetPiece, itemsize: int) -> None:
    raw = raw_dtype(itemsize)
    first = copy.start - block.start
    box, outer = copy.box, copy.chunk
    if box.shape == outer.shape:
        source = data[first : first + box.size * itemsize].view(raw).reshape(box.shape)
    else:
        span = data[first : first + copy.stop - copy.start]
        source = np.ndarray(box.shape, raw, span, strides=c_strides(outer.shape, itemsize))
    where = box.relative_to(piece.region)
    piece.data.write(where.slices(), source)


def _in_parallel(jobs: Sequence[Callable[[], int]], threads: int) -> list[int]:
    """Runs jobs on a few threads; the first error stops what has not begun, and is raised."""
    if len(jobs) <= 2:
        return [job() for job in jobs]
    results: list[int] = []
    with ThreadPoolExecutor(threads, "treeckpt-read") as pool:
        pending: set[Future[int]] = set()
        try:
            for job in jobs:
                if len(pending) >= threads * 2:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    results += [f.result() for f in done]
                pending.add(pool.submit(job))
            results += [f.result() for f in pending]
        except BaseException:
            for future in pending:
                future.cancel()
            raise
    return results


def verify_shard(store: Store, opened: Opened) -> int:
    """Compares every checksum of a shard; returns the bytes that were read.

    Raises:
        CorruptError: naming the file and the bytes.
    """
    step = BUFFER // opened.block * opened.block or opened.block
    for start in range(0, opened.file.nbytes, step):
        stop = min(start + step, opened.file.nbytes)
        _read(store, opened, start, stop, True, f"{store.url}/{opened.file.name}")
    return opened.file.nbytes


def entries_of(plan: FilePlan, describe: Callable[[int], tuple[str, str, tuple[int, ...]]]) -> tuple[Entry, ...]:
    """The header's entries of a file's plan; `describe` gives a leaf's path, dtype and global shape."""
    entries: list[Entry] = []
    for write in plan.writes:
        path, dtype, shape = describe(write.leaf)
        entries.append(Entry(path, dtype, shape, write.region, write.start, write.nbytes))
    return tuple(entries)
