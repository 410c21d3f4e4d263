"""How are the bytes of a rank's shards copied into an arena, as they will stand in the files?

A plan says which regions of which leaves a rank writes, in order, so staging is writing the data areas to memory: views
give only their bytes, tied leaves are there once, replicas only this rank's part. Small leaves are copied one after the
other by the caller; the stretches of large contiguous ones by a few threads, for one thread does not reach the memory's
bandwidth. What lies on a device, or is lazily transformed, is copied by its own library where it can (`copy_to`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arrays.base import HostArray, HostMemory, Piece
from ..arrays.threads import WorkerThreads
from ..core.planning.save_plan import FilePlan, SavePlan, ShardEntry
from .shard_stream import feed
from .staging_memory import area_offsets

__all__ = ["pinning", "stage", "start_after"]

SMALL = 32 << 10
"""Bytes below which arrays are copied by address: more, and what numpy takes to begin with is nothing."""
LARGE = 1 << 20
"""Bytes from which threads share the copying."""
STRIDE = 16 << 20
"""Bytes that a thread copies at a time."""
THREADS = 2


def start_after() -> None:
    """Has copies from devices wait for what the calling thread has asked the devices to do so far."""
    if "torch" in sys.modules:
        from ..arrays import cuda

        cuda.start_after()


def pinning() -> Callable[[int, int], Callable[[], None]] | None:
    """What pins memory for a device, in a process that uses one."""
    if "torch" not in sys.modules:
        return None
    from ..arrays import cuda

    return cuda.pinning()


Stretch = tuple[np.ndarray, np.ndarray]
"""Bytes to copy to, and from."""


class _Area:
    """A stretch of memory that is filled from the front.

    Args:
        later: where large copies are put off to; None where what is fed is gone afterwards.
    """

    def __init__(self, memory: np.ndarray, later: list[Stretch] | None) -> None:
        self._memory, self._later, self._at = memory, later, 0

    def copy(self, memory: HostMemory, nbytes: int) -> None:
        """Appends a small array."""
        self.feed(memory.array)

    def room(self) -> np.ndarray:
        """All that is left."""
        return self._memory[self._at :]

    def advance(self, nbytes: int) -> None:
        """Takes the front of `room` as filled."""
        self._at += nbytes

    def feed(self, data: np.ndarray) -> None:
        """Appends the elements of an array, in C order."""
        start, self._at = self._at, self._at + data.nbytes
        target = self._memory[start : self._at]
        if data.flags.c_contiguous:
            source = data.reshape(-1).view(np.uint8)
            if self._later is None or len(source) < LARGE:
                target[:] = source
            else:
                self._later.append((target, source))
        elif data.nbytes:
            np.copyto(target.view(data.dtype).reshape(data.shape), data)


def stage(plan: SavePlan, pieces: Callable[[int], Sequence[Piece]], memory: np.ndarray) -> int:
    """Copies what a rank writes; returns the bytes.

    Args:
        pieces: the local pieces of leaf number i.
        memory: bytes, as many as `area_offsets` says.
    """
    offsets, _ = area_offsets([file.nbytes for file in plan.files])
    later: list[Stretch] = []
    waits: list[Callable[[], None]] = []
    for file, offset in zip(plan.files, offsets, strict=True):
        _stage_file(file, pieces, memory[offset : offset + file.nbytes], later, waits)
    _copy(later)
    for wait in waits:
        wait()
    return plan.nbytes


def _stage_file(
    file: FilePlan,
    pieces: Callable[[int], Sequence[Piece]],
    area: np.ndarray,
    later: list[Stretch],
    waits: list[Callable[[], None]],
) -> None:
    address = area.ctypes.data
    at = 0  # entries follow each other without holes
    for write in file.writes:
        held = pieces(write.leaf)
        data: Any = held[0].data if held else None
        if write.nbytes < SMALL and type(data) is HostMemory and len(held) == 1 and write.region == held[0].region:
            ctypes.memmove(address + at, data.address, write.nbytes)
        else:
            _stage_one(write, held, area[at : at + write.nbytes], later, waits)
        at += write.nbytes


def _stage_one(
    write: ShardEntry,
    pieces: Sequence[Piece],
    target: np.ndarray,
    later: list[Stretch],
    waits: list[Callable[[], None]],
) -> None:
    if not write.nbytes:
        return
    piece = next((p for p in pieces if write.region.within(p.region)), pieces[0])
    copy_to: Any = getattr(piece.data, "copy_to", None)
    if copy_to is None:
        # what is read to be copied is gone after that, so it is not kept for later
        feed(_Area(target, later if isinstance(piece.data, (HostArray, HostMemory)) else None), write, pieces)
    elif (wait := copy_to(write.region.relative_to(piece.region).slices(), target)) is not None:
        waits.append(wait)


def _copy(stretches: list[Stretch]) -> None:
    """Copies by a few threads, of which the caller's is one."""
    parts = [
        (target[at : at + STRIDE], source[at : at + STRIDE])
        for target, source in stretches
        for at in range(0, len(source), STRIDE)
    ]
    WorkerThreads(THREADS)([partial(np.copyto, target, source) for target, source in parts])
