"""`ShardWriter`, and `InlineWriter`, which writes in this process; `writer_process.ProcessWriter` is the other form."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Event
from typing import Protocol

import msgspec

from ..arrays.base import ArraySource, SourcePiece
from ..core.format.decoding import decode_msgpack
from ..core.format.index import encode_index
from ..core.format.records import Index
from ..core.format.save_progress import Progress
from ..core.format.timings import timings_name
from ..core.planning.save_plan import FilePlan
from ..errors import CheckpointExists
from ..io.comm.failures import silent_faults, to_fault, wrap_os_error
from ..io.storage.index_lock import unlocked_sizes
from ..io.storage.late_requests import send_late
from ..io.storage.leftovers import clear_leftovers
from ..io.storage.progress_file import ProgressRecorder
from ..io.storage.store import Store
from ..io.timing import Recorder
from ..threads import call_in_thread
from .commit import (
    SaveInfo,
    check_files_exist,
    check_still_there,
    complete_index,
    index_may_be_published,
    manifest_of,
    publish_index,
    remove_files,
    remove_replaced,
    shard_header,
    shard_names,
    with_published_hint,
    write_timings,
    written_names,
)
from .messages import CommitResult, WriteReport
from .path_look import PathLook
from .plan_cache import GlobalPlan
from .shard_files import ShardFile, write_files
from .shard_stream import ShardSource, WriteCallbacks


class ShardWriter(Protocol):
    """Writes the shards of one save on one rank; on rank 0 it also publishes the index."""

    error: Exception | None
    """This rank's failure, where there is one."""
    trace: str
    """The traceback of a failure in another process."""

    def write(self) -> WriteReport:
        """Writes this rank's shards; returns the result without timings. A failure is returned, not raised."""
        ...

    def commit(self, reports: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        """On rank 0: commits the save if all ranks have written; returns the encoded `CommitResult`.

        Args:
            reports: the encoded `WriteReport` of each rank.
            lost: ranks that fell silent, and what is known of each.
        """
        ...

    def end(self) -> None:
        """Releases what is kept for this save."""
        ...


class TreeShardSource(msgspec.Struct, frozen=True):
    """Shards straight out of the tree's arrays."""

    plan: GlobalPlan
    sources: Mapping[str, ArraySource]
    """This rank's arrays, by path."""

    @property
    def private(self) -> bool:
        return False

    @property
    def files(self) -> Sequence[FilePlan]:
        return self.plan.own.files

    def pieces(self, leaf: int) -> Sequence[SourcePiece]:
        return self.sources[self.plan.leaf(leaf).path].pieces


class InlineWriter:
    """Writes in this process.

    Args:
        plan, source: None if this rank has none; `error` says why.
        on_progress: called with the bytes written so far, now and then.
        waits: whether `end` waits for an object store after a commit. Unless it does, threads complete the timings and
            remove the progress record, and the end of the process waits for them.
        look: must have a result before anything is written.
        record: the progress record of the save, which is ended with it; None where another process keeps it until this
            one has written its own, and on ranks other than 0.
    """

    trace = ""

    def __init__(
        self,
        store: Store,
        info: SaveInfo,
        plan: GlobalPlan | None,
        recorder: Recorder,
        source: ShardSource | None = None,
        *,
        error: Exception | None = None,
        on_progress: Callable[[int], None] | None = None,
        waits: bool = True,
        look: PathLook | None = None,
        record: ProgressRecorder | None = None,
    ) -> None:
        self.error, self.recorder = error, recorder
        self._waits = waits or not store.traits.far
        self._store, self._info, self._plan, self._source = store, info, plan, source
        self._on_progress, self._look = on_progress or (lambda written: None), look
        self._on_interrupt: Callable[[BaseException], None] = lambda error: None
        self._refusal: Exception | None = None
        """Why the look at the path forbids the save."""
        self._note, self._keeps_note = record, record is not None
        self._begun: Future[None] | None = None
        """Of `_begin`, where it waits for an object store."""
        self._recorded: Future[None] | None = None
        """Of the first write of this process's own record, where it waits for an object store."""
        self._unlocked: Future[dict[str, int]] | None = None
        """Of the look for locks on the index of an object store: its listing goes beside the shards."""
        self._timings_over: Event | None = None
        """Set when the thread has ended that writes the timings to an object store, beside the index and once more."""
        self._decided, self._is_committed = Event(), False
        """Whether it is known how the save ends, and whether it is committed."""
        self._written = False
        """Whether all shards are written, which the others may know already."""

    def write(self, *, on_interrupt: Callable[[BaseException], None] = lambda error: None) -> WriteReport:
        """Does what `ShardWriter.write` says.

        Args:
            on_interrupt: called at an interrupt, before the requests in flight have ended.
        """
        self._on_interrupt = on_interrupt
        info, plan, source = self._info, self._plan, self._source
        try:
            if self.error is not None:
                raise self.error
            assert plan is not None and source is not None, "a rank without them has an error"
            self._begin_record(plan.own.nbytes)
            assert self._note is not None, "it was just set"
            callbacks = WriteCallbacks(partial(_result, self._begun), self._wait_begun, self._note.add, on_interrupt)
            manifest = manifest_of(info, plan)
            files = [
                ShardFile(entries, name, shard_header(info, plan, file, manifest if file.part == 0 else None))
                for entries, name, file in zip(source.files, shard_names(info, plan), plan.own.files, strict=True)
            ]
            sizes = write_files(self._store, files, source, self.recorder, callbacks)
            self._wait_begun()  # a rank without shards has not waited yet
            self._note.commit()
            self._written = True
            rows = [
                (info.rank, file.part, file.stream, nbytes, header)
                for file, (header, nbytes) in zip(plan.own.files, sizes, strict=True)
            ]
            return WriteReport(None, tuple(rows))
        except Exception as error:
            wait([future for future in (self._begun, self._recorded) if future is not None])
            if self._refusal is not None:
                raise self._refusal from None
            self.error = wrap_os_error(error, self._store.url)
            return WriteReport(to_fault(self.error, info.rank))

    def _begin_record(self, planned: int) -> None:
        """Begins or continues the progress record; in an object store threads do what waits for an answer."""
        store, info, note = self._store, self._info, self._note
        if note is None:
            now = time.time_ns()
            first = Progress(info.save_id, info.rank, info.world, info.options.step, "write", 0, planned, now, now)
            note = self._note = ProgressRecorder(store, first, on_progress=self._on_progress)
        note.expect(planned)
        if not store.traits.far:
            if not self._keeps_note:
                note.begin()
            return
        self._begun = call_in_thread(partial(self._begin, note), "treeckpt-begin")
        if not self._keeps_note:
            self._recorded = call_in_thread(note.begin, "treeckpt-record")
        if info.rank == 0:

            def look_for_locks() -> dict[str, int]:
                _result(self._begun)  # the record can be seen
                return unlocked_sizes(store)

            self._unlocked = call_in_thread(look_for_locks, "treeckpt-locks")

    def _begin(self, note: ProgressRecorder) -> None:
        """Waits for the look at the path, and asks the store for the conditional writes of the commit."""
        if self._look is not None:
            try:
                self._info = self._info.replacing(self._look.result())
            except Exception as error:
                self._refusal = error
                raise
        note.check_condition(replaces=self._info.replaces)

    def _wait_begun(self) -> None:
        """Waits until all is done before which no shard may be seen."""
        _result(self._begun)
        _result(self._recorded)

    def commit(self, reports: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
        decoded = {rank: decode_msgpack(report, WriteReport) for rank, report in reports.items()}
        return msgspec.msgpack.encode(self._commit(decoded, lost))

    def _commit(self, reports: Mapping[int, WriteReport], lost: Mapping[int, str]) -> CommitResult:
        store, info, plan, recorder = self._store, self._info, self._plan, self.recorder
        faults = [report.fault for report in reports.values() if report.fault is not None] + silent_faults(lost)
        publishing = in_place = False
        if not faults:
            try:
                assert plan is not None, "a rank without a plan reports a fault"
                with recorder.span("publish"):
                    index = complete_index(info, plan, reports)
                    data = encode_index(index)
                    # before the index, in an object store beside it: should this save die after it, later ones know by
                    # them that it had ended
                    if not self._start_timings(reports):
                        write_timings(store, info, reports, None, recorder)
                    # deletions and repairs that have not seen this save's record have ended at the look for locks
                    sizes = self._unlocked.result() if self._unlocked is not None else None
                    publishing = True
                    self._publish(data, partial(self._check_files, index, sizes))
                    if self._note is not None and self._note.has_lapsed:
                        check_still_there(store, index)
            except Exception as caught:
                error = wrap_os_error(caught, store.url)
                if in_place := publishing and index_may_be_published(store, info.save_id, error):
                    error = with_published_hint(error)
                faults.append(to_fault(error, 0, common=isinstance(error, CheckpointExists)))
                self.error = self.error or error
        self._is_committed = not faults
        self._decided.set()
        if not faults:
            # it is committed: the rest may fail without harm
            if self._timings_over is None:
                self._write_timings(reports, again=True)
            if info.content is not None and info.replaces:
                with contextlib.suppress(Exception):
                    remove_replaced(store, info.content.replaced)
            return CommitResult((), True)
        self._wait_timings()
        with contextlib.suppress(Exception):  # the error that is being reported matters more
            text = "; ".join(f"rank {fault.rank}: {fault.text}" for fault in faults)[:4000]
            write_timings(store, info, reports, text, recorder)
        return CommitResult(tuple(faults), in_place)

    def _check_files(self, index: Index, sizes: dict[str, int] | None) -> None:
        check_files_exist(self._store, index, unlocked_sizes(self._store) if sizes is None else sizes)

    def _publish(self, data: bytes, check: Callable[[], object]) -> None:
        """Publishes the index; an interrupt is told at once, and raised when it is known what became of the request."""
        publish = partial(publish_index, self._store, data, self._info, check)
        if not self._store.traits.far:
            publish()
            return
        request = call_in_thread(publish, "treeckpt-publish")
        try:
            request.result()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._on_interrupt(error)
            while not request.done():
                with contextlib.suppress(KeyboardInterrupt):  # else files of a published index could be deleted
                    wait([request])
            raise

    def _start_timings(self, reports: Mapping[int, WriteReport]) -> bool:
        """Begins to write the timings to an object store; False elsewhere, or where no thread can be started."""

        def write() -> None:
            self._write_timings(reports)
            self._decided.wait()
            if self._is_committed:  # with the time of the commit
                self._write_timings(reports, again=True)

        if self._store.traits.far:
            self._timings_over = send_late(self._store.url, write)
        return self._timings_over is not None

    def _write_timings(self, reports: Mapping[int, WriteReport], *, again: bool = False) -> None:
        with contextlib.suppress(Exception):
            write_timings(self._store, self._info, reports, None, self.recorder, again=again)

    def _wait_timings(self) -> None:
        self._decided.set()
        if self._timings_over is not None:
            self._timings_over.wait()  # unlike the join of a thread, it can be interrupted

    def end(self) -> None:
        late = not self._waits and (self._is_committed if self._info.rank == 0 else self.error is None)
        if self._note is not None:
            self._note.end(wait=not late)
        if not late:
            self._wait_timings()
        if self._note is None:
            return
        if self._info.rank == 0 and not self._store.traits.conditional:
            with contextlib.suppress(Exception):  # the save has ended, with or without an error
                clear_leftovers(self._store, self._store.sizes(), known=self._info.save_id)

    def withdraw(self, error: BaseException) -> None:
        """Removes what was written, unless the save is committed, or others may still commit it.

        The coordinator writes `error` to the timings, so the files of other ranks count as left over.
        """
        info, plan = self._info, self._plan
        self._waits = True
        self._wait_timings()
        try:
            if plan is None or (info.rank and self._written) or index_may_be_published(self._store, info.save_id):
                return
            timings = [] if info.rank else [timings_name(info.save_id)]
            remove_files(self._store, [*written_names(info, plan), *timings])
            if info.world > 1 and not info.rank:
                report = WriteReport(to_fault(error, info.rank), host=socket.gethostname())
                self._commit({0: report}, {})
        finally:
            self.end()  # as long as the record stands, nobody takes the files for those of a save that has ended


def _result(future: Future[None] | None) -> None:
    if future is not None:
        future.result()
