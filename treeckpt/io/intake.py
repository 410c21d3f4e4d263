"""Runs the plan of a load: reads blocks in, and copies or leaves them where they are wanted.

Each block of a plan is read, rounded out to the borders of checksums, verified, and its boxes are copied to their
targets; several blocks are under way at once. Runs of whole arrays land in page-aligned memory and stay there.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import msgspec
import numpy as np

from ..core.plan import Block, Copy, LoadPlan, Run
from ..core.region import c_strides
from ..core.shard import BLOCK
from ..leaves.base import TargetPiece, raw_dtype
from .engine import BUFFER
from .shards import Shards, Stretch, read_stretch, stretch_of
from .store import PAGE, aligned_buffer

__all__ = ["Landed", "run_land", "run_load", "run_map"]

READERS = 3


def run_load(
    shards: Shards,
    plan: LoadPlan,
    targets: Callable[[int], TargetPiece | None],
    *,
    itemsize: Callable[[int], int],
    paths: Callable[[int], str],
) -> int:
    """Reads every block of a plan through a few buffers and copies its boxes to their targets.

    Args:
        targets: the piece that want number i fills; None reads (and verifies) only.

    Returns:
        Bytes read from data areas.
    """
    if not plan.blocks:
        return 0
    buffers: queue.Queue[memoryview] = queue.Queue()
    largest = max(block.stop - block.start for block in plan.blocks) + 2 * BLOCK
    for _ in range(READERS):
        buffers.put(aligned_buffer(-(-largest // PAGE) * PAGE))

    def job(block: Block) -> Callable[[], int]:
        path = paths(block.copies[0].want)
        opened, start = shards.locate(block.rank, block.start, block.stop, path)
        stretch = stretch_of(opened, start, start + block.stop - block.start, verify=shards.verify)

        def work() -> int:
            buffer = buffers.get()
            try:
                size = stretch.high - stretch.low
                out = buffer[:size] if size <= len(buffer) else aligned_buffer(size)
                read_stretch(shards.store, stretch, out, verify=shards.verify)
                data = np.frombuffer(out, np.uint8)[start - stretch.low :]
                for copy in block.copies:
                    if (piece := targets(copy.want)) is not None:
                        _place(data, block, copy, piece, itemsize(copy.want))
                return size
            finally:
                buffers.put(buffer)

        return shards.timed(work)

    return sum(_in_parallel([job(block) for block in plan.blocks], READERS))


class Landed(msgspec.Struct, frozen=True):
    """Memory that holds a run of a rank's stream, the byte at stream offset `start` first."""

    start: int
    memory: memoryview


def run_map(shards: Shards, runs: Sequence[Run], paths: Callable[[int], str]) -> list[Landed]:
    """Maps each run, copy-on-write: bytes are read when they are touched, and never compared with checksums."""
    landed: list[Landed] = []
    for run in runs:
        opened, start = shards.locate(run.rank, run.start, run.stop, paths(run.members[0]))
        stretch = stretch_of(opened, start, start + run.stop - run.start, verify=False)
        position = opened.file.header + stretch.low
        memory = shards.store.map(opened.file.name, position, stretch.high - stretch.low)
        landed.append(Landed(run.start, memory[start - stretch.low :]))
    return landed


def run_land(shards: Shards, runs: Sequence[Run], paths: Callable[[int], str]) -> tuple[list[Landed], int]:
    """Reads each run into page-aligned memory of its own, where arrays can stay.

    Returns:
        (the memory of each run, bytes read from data areas).
    """
    landed: list[Landed] = []
    jobs: list[Callable[[], int]] = []
    for run in runs:
        path = paths(run.members[0])
        opened, start = shards.locate(run.rank, run.start, run.stop, path)
        whole = stretch_of(opened, start, start + run.stop - run.start, verify=shards.verify)
        memory = aligned_buffer(whole.high - whole.low, huge=True)
        landed.append(Landed(run.start, memory[start - whole.low :]))
        step = max(BUFFER // opened.block, 1) * opened.block
        for low in range(whole.low, whole.high, step):
            part = Stretch(opened, low, min(low + step, whole.high))
            jobs.append(shards.timed(_landing(shards, part, memory[low - whole.low : part.high - whole.low])))
    return landed, sum(_in_parallel(jobs, READERS))


def _landing(shards: Shards, stretch: Stretch, out: memoryview) -> Callable[[], int]:
    def work() -> int:
        read_stretch(shards.store, stretch, out, verify=shards.verify)
        return len(out)

    return work


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
