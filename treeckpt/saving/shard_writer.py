"""Who writes a save's shards and publishes its index? A scribe: here is this process as one.

The writer process is the other kind (`desk` is its side, `remote` the parent's). All of them do the same with the same
functions of `committing`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np

from ..arrays.base import HostArray, Piece
from ..core.format.save_progress import Progress
from ..core.format.timings import timings_name
from ..core.planning.save_plan import FilePlan, SavePlan, ShardEntry
from ..core.sharding.region import Region
from ..io.comm.failures import Fault, to_fault, wrap_os_error
from ..io.storage.leftovers import clear_leftovers
from ..io.storage.progress_file import ProgressNote
from ..io.storage.store import Store, Swapping
from ..io.timing import Recorder
from .commit import SaveInfo, Stream, judge, may_be_in_place, remove, shard_names, write_shards
from .messages import FileRow, WriteReport
from .plan_cache import Plans
from .staging_memory import area_offsets

__all__ = ["InlineWriter", "ShardWriter", "WriteResult", "staged_stream"]


class WriteResult(msgspec.Struct, frozen=True, array_like=True):
    """How a rank's writing went."""

    fault: Fault | None
    files: tuple[FileRow, ...] = ()


class ShardWriter(Protocol):
    """What completes a save on a rank."""

    error: Exception | None
    """This rank's failure, where there is one."""

    def judge(self, heard: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        """On rank 0, the encoded verdict on what all ranks have reported."""
        ...

    def end(self) -> None:
        """Lets go of what is kept for this save."""
        ...


def staged_stream(plan: SavePlan, memory: np.ndarray) -> Stream:
    """The files of a plan out of an arena that holds their data areas."""
    offsets, _ = area_offsets([file.nbytes for file in plan.files])
    whole = [Region((0,), (file.nbytes,)) for file in plan.files]
    files = [
        FilePlan(file.part, file.stream, file.nbytes, (ShardEntry(n, region, 0, file.nbytes),))
        for n, (file, region) in enumerate(zip(plan.files, whole, strict=True))
    ]

    def pieces(number: int) -> tuple[Piece]:
        start = offsets[number]
        return (Piece(whole[number], HostArray(memory[start : start + plan.files[number].nbytes])),)

    return files, pieces


class InlineWriter:
    """This process as the scribe of one save.

    Args:
        error: why there are no plans.
        heard: is told of bytes written.
    """

    def __init__(
        self,
        store: Store,
        facts: SaveInfo,
        plans: Plans | None,
        recorder: Recorder,
        *,
        error: Exception | None = None,
        heard: Callable[[int], None] = lambda written: None,
    ) -> None:
        self.error = error
        self._store, self._facts, self._plans, self._recorder, self._heard = store, facts, plans, recorder, heard
        self._note: ProgressNote | None = None
        self._done = False
        """Whether all is written, which the others may know already."""

    def write(self, stream: Callable[[Plans], Stream]) -> WriteResult:
        """Writes this rank's shards; a failure is for telling the others, so it is returned, not raised."""
        facts, plans = self._facts, self._plans
        try:
            if plans is None:
                raise self.error or AssertionError("what kept this rank from planning is known")
            now = time.time_ns()
            planned = plans.own.nbytes
            first = Progress(facts.save_id, facts.rank, facts.world, facts.step, "write", 0, planned, now, now)
            self._note = ProgressNote(self._store, first, heard=self._heard)
            self._note.begin()
            rows = write_shards(self._note.counting(), facts, plans, stream(plans), self._recorder)
            self._note.commit()
            self._done = True
            return WriteResult(None, rows)
        except Exception as error:
            self.error = wrap_os_error(error, self._store.url)
            return WriteResult(to_fault(self.error, facts.rank))

    def judge(self, heard: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        reports = {rank: msgspec.msgpack.decode(message, type=WriteReport) for rank, message in heard.items()}
        verdict, error = judge(self._store, self._facts, self._plans, reports, lost, self._recorder)
        self.error = self.error or error
        return msgspec.msgpack.encode(verdict)

    def end(self) -> None:
        if self._note is None:
            return
        self._note.end()
        if self._facts.rank == 0 and not isinstance(self._store, Swapping):
            with contextlib.suppress(Exception):  # the save has ended, one way or the other
                clear_leftovers(self._store, self._store.sizes(), known=self._facts.save_id)

    def withdraw(self, error: BaseException) -> None:
        """Removes what was written, unless the save is committed, or others may still commit it.

        Args:
            error: why: the coordinator leaves it in the timings for what other ranks have written.
        """
        facts, plans = self._facts, self._plans
        self.end()
        if plans is None or (facts.rank and self._done) or may_be_in_place(self._store, facts.save_id):
            return
        remove(self._store, [*shard_names(facts, plans), *([timings_name(facts.save_id)] * (not facts.rank))])
        if facts.world > 1 and not facts.rank:
            done = WriteReport(to_fault(error, facts.rank), (), (), socket.gethostname())
            self.judge({0: msgspec.msgpack.encode(done)}, {})
