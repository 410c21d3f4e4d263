"""Copies the bytes of a rank's shards into staging memory, as they will be in the files.

Small leaves are copied one after the other by the caller, large contiguous ones by a few threads, for one thread does
not reach the memory's bandwidth. What lies on a device, or is lazily transformed, is copied by its own library where it
can (`copy_to`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from ..arrays.base import Box, HostArray, HostMemory, SourcePiece
from ..arrays.threads import WorkerThreads
from ..core.planning.save_plan import FilePlan, PlannedEntry
from ..core.sharding.region import Region
from .plan_cache import GlobalPlan
from .shard_stream import ShardSource, append_entry, piece_of
from .staging_memory import PinMemory, area_offsets

__all__ = ["StagedShardSource", "cuda_pinning", "order_device_copies", "stage"]

ADDRESS_COPY_LIMIT = 32 << 10
"""Bytes below which arrays are copied by address: for a larger one the time that numpy takes to begin is small."""
PARALLEL_COPY = 1 << 20
"""Bytes from which threads share the copying."""
COPY_PART = 16 << 20
"""Bytes that a thread copies at a time."""
COPY_THREADS = 2


def order_device_copies() -> None:
    """Has copies from devices wait for the work that the calling thread has started on the devices so far."""
    if "torch" in sys.modules:
        from ..arrays import cuda

        cuda.wait_for_current_streams()


def cuda_pinning() -> PinMemory | None:
    """Returns the function that pins memory for a device, in a process that uses one."""
    if "torch" not in sys.modules:
        return None
    from ..arrays import cuda

    return cuda.pin_function()


@runtime_checkable
class HostCopyable(Protocol):
    """An array that its library copies to host memory."""

    def copy_to(self, box: Box, out: np.ndarray) -> Callable[[], None] | None:
        """Starts to copy a box to `out`, uint8[n]; returns what waits for the end, None if it has ended."""
        ...


ByteCopy = tuple[np.ndarray, np.ndarray]
"""(target, source) of a copy, both uint8[n]."""


class _MemorySink:
    """Memory that is filled from the front. `delayed` gets large copies; None where the source is soon gone."""

    def __init__(self, memory: np.ndarray, delayed: list[ByteCopy] | None) -> None:
        self._memory, self._delayed, self._filled = memory, delayed, 0

    def append_memory(self, memory: HostMemory, nbytes: int) -> None:
        self.append(memory.array)

    def remaining(self) -> np.ndarray:
        return self._memory[self._filled :]

    def advance(self, nbytes: int) -> None:
        self._filled += nbytes

    def append(self, data: np.ndarray) -> None:
        start, self._filled = self._filled, self._filled + data.nbytes
        target = self._memory[start : self._filled]
        if data.flags.c_contiguous:
            source = data.reshape(-1).view(np.uint8)
            if self._delayed is None or len(source) < PARALLEL_COPY:
                target[:] = source
            else:
                self._delayed.append((target, source))
        elif data.nbytes:
            np.copyto(target.view(data.dtype).reshape(data.shape), data)


def stage(source: ShardSource, memory: np.ndarray) -> None:
    """Copies what a rank writes to `memory`, uint8[n], as many bytes as `area_offsets` gives for the files."""
    delayed: list[ByteCopy] = []
    device_copies: list[Callable[[], None]] = []
    offsets, _ = area_offsets([file.nbytes for file in source.files])
    address = memory.ctypes.data
    for file, at in zip(source.files, offsets, strict=True):
        for write in file.writes:  # entries follow each other without holes
            pieces, region = source.pieces(write.leaf), write.region
            data = pieces[0].data if pieces else None
            if (
                write.nbytes < ADDRESS_COPY_LIMIT
                and type(data) is HostMemory
                and len(pieces) == 1
                and region == pieces[0].region
            ):
                ctypes.memmove(address + at, data.address, write.nbytes)
            elif write.nbytes:
                _stage_entry(write, pieces, memory[at : at + write.nbytes], delayed, device_copies)
            at += write.nbytes
    parts = [
        partial(np.copyto, target[low : low + COPY_PART], data[low : low + COPY_PART])
        for target, data in delayed
        for low in range(0, len(data), COPY_PART)
    ]
    WorkerThreads(COPY_THREADS)(parts)
    for wait in device_copies:
        wait()


def _stage_entry(
    write: PlannedEntry,
    pieces: Sequence[SourcePiece],
    target: np.ndarray,
    delayed: list[ByteCopy],
    device_copies: list[Callable[[], None]],
) -> None:
    piece = piece_of(write, pieces)
    if isinstance(piece.data, (HostArray, HostMemory)):
        append_entry(_MemorySink(target, delayed), write, pieces)
    elif not isinstance(piece.data, HostCopyable):  # what is read for the copy is gone after that
        append_entry(_MemorySink(target, None), write, pieces)
    elif (wait := piece.data.copy_to(write.region.relative_to(piece.region).slices(), target)) is not None:
        device_copies.append(wait)


class StagedShardSource:
    """Shards out of staging memory, filled by `stage`, where each data area is one entry."""

    def __init__(self, plan: GlobalPlan, memory: np.ndarray) -> None:
        sizes = [file.nbytes for file in plan.own.files]
        self.files: list[FilePlan] = []
        self._pieces: list[SourcePiece] = []
        for file, start in zip(plan.own.files, area_offsets(sizes)[0], strict=True):
            whole = Region((0,), (file.nbytes,))
            write = PlannedEntry(len(self._pieces), whole, 0, file.nbytes)
            self.files.append(FilePlan(file.part, file.stream, file.nbytes, (write,)))
            self._pieces.append(SourcePiece(whole, HostArray(memory[start : start + file.nbytes])))

    def pieces(self, leaf: int) -> Sequence[SourcePiece]:
        return self._pieces[leaf : leaf + 1]
