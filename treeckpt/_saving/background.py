"""The background save: agree and stage in the caller's thread, write and commit in another one.

That thread calls no collective and mostly waits, for the writer process and for the other ranks' reports: what takes
long and holds the interpreter's lock (headers, manifest, index) is done by the writer process. With lazy staging the
copying is the thread's first task, beside the next forward and backward.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import msgspec

from .._core.format.timings import BLOCKING
from .._core.planning.save_plan import FilePlan, GlobalPlan
from .._io.comm.comm import Comm, base_of
from .._io.comm.message_store import answer_limit, answers_within
from .._io.os_errors import wrap_write_error
from .._io.process import is_ending
from .._io.public_calls import gc_paused, takes_no_save
from .._io.storage.store import MemoryStore, Store
from .._io.timing import Recorder
from .._threads import start_thread
from ..errors import CheckpointError, TreeckptError
from ..reports import SaveReport
from .agree import AgreedSave, agree
from .options import SaveOptions, WriterKind
from .process_channel import WriterGone, passes_files
from .save import complete, save_report
from .session import Pending, Session, forget_at_exit, session_of, wait_at_exit
from .shard_writer import InlineWriter, ShardWriter, TreeShardSource
from .staging import (
    Lease,
    StagedShardSource,
    after_device_order,
    area_offsets,
    cuda_pinning,
    order_device_copies,
    stage,
)
from .writer_process import ProcessWriter

_log = logging.getLogger("treeckpt")


class _CommWithTimeout:
    """A comm with a time limit of its own."""

    def __init__(self, inner: Comm, timeout: float) -> None:
        self._inner, self.timeout, self.base = inner, timeout, base_of(inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def post(self, key: str, data: bytes) -> None:
        with answers_within(answer_limit(self.timeout)):
            self._inner.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        with answers_within(answer_limit(self.timeout)):
            return self._inner.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        with answers_within(answer_limit(self.timeout)):
            self._inner.drop(keys)


def save_async_tree(
    store: Store,
    tree: object,
    comm: Comm,
    options: SaveOptions,
) -> Pending:
    """Starts to save a tree; see `treeckpt.save_async`."""
    begin = time.perf_counter()
    session, background = session_of(comm), options.background
    if background.timeout is not None:
        comm = cast(Comm, _CommWithTimeout(comm, background.timeout))
    with gc_paused(), session.starting:
        # 1. Wait for the save before; agree with the other ranks
        previous = session.previous(background.busy, background.timeout)
        recorder, open_contexts = Recorder(comm.rank), contextlib.ExitStack()
        open_contexts.enter_context(recorder.span("save"))
        agreed = agree(store, tree, comm, options, recorder, previous)
        if agreed is None:
            return Pending(store.url, skipped=True)
        with agreed.given_up_on_error():
            # waited for before the copy, so that this call raises what forbids the save
            agreed = agreed.looked()
            if agreed.plan is None:  # the others learn it from the report, and all raise the same error
                writer = InlineWriter(store, agreed.info, None, recorder, error=agreed.error, record=agreed.record)
                complete(agreed, writer, writer.write())
                raise AssertionError("a save without a plan fails")
            pending = Pending(store.url, limit=comm.timeout)
            open_contexts.enter_context(agreed.heartbeats())
            save = _BackgroundSave(session, agreed, agreed.plan, pending, open_contexts)
        try:
            # 2. Start the writer process, which takes its time, while the tree is copied
            if background.writer == "process" and not is_ending():
                save.start_process()
            # 3. Copy the tree to staging memory
            # here, also for lazy staging: the current streams of a device are those of the calling thread
            order_device_copies()
            if background.staging == "copy":
                save.stage()
            # 4. Continue in a thread: `_BackgroundSave.run`
            save.blocked_seconds = time.perf_counter() - begin
            recorder.add(BLOCKING, recorder.created_ns, recorder.now())
            session.current = pending
            if not wait_at_exit(pending) or start_thread(save.run, "treeckpt-save") is None:
                # or here: the process ends, or may have no more threads
                if not is_ending():
                    _log.warning("%s: the calling thread writes, as none can be started", store.url)
                # this call raises the error of the save: the end of the process is not to report it too
                forget_at_exit(pending)
                save.run(here=True)
                pending.result()
        except BaseException as error:  # Ctrl-C
            save.give_up(error)
            raise
    return pending


class _BackgroundSave:
    """One save from the agreement to the end; `open_contexts`, its span and heartbeats, end with it."""

    def __init__(
        self,
        session: Session,
        agreed: AgreedSave,
        plan: GlobalPlan,
        pending: Pending,
        open_contexts: contextlib.ExitStack,
    ) -> None:
        self._session, self._agreed, self._plan, self._pending = session, agreed, plan, pending
        self._open_contexts = open_contexts
        self.blocked_seconds = 0.0
        """The seconds for which the caller was held up."""
        self.staged_nbytes = 0
        self._address: bytes | None = None
        """The address of the store for the writer process; None to write from this one."""
        self._error: Exception | None = None
        """Why this rank cannot write; the other ranks learn it from the report."""
        self._lease: Lease | None = None
        self._is_staged = False
        self._begun = threading.Lock()
        """It is taken for good by the thread that writes, or by `give_up`, whichever comes first."""

    def start_process(self) -> None:
        """Starts the writer process, if there can be one and it can open the store."""
        self._address = self._agreed.store.address() if passes_files else None
        if self._address is not None and not self._session.start_writer(self._agreed.store.url):
            self._address = None

    def stage(self) -> None:
        """Copies what this rank writes; keeps the error."""
        plan, agreed = self._plan, self._agreed
        self._is_staged = True
        try:
            agreed = self._agreed = agreed.with_shared()
            source = TreeShardSource(plan, agreed.sources, agreed.info.shared)
            self.staged_nbytes = sum(file.nbytes for file in source.files)
            with agreed.recorder.span("stage", self.staged_nbytes):
                self._lease = self._session.pool.lease(_arena_nbytes(source.files), cuda_pinning())
                stage(source, self._lease.arena.memory)
        except Exception as error:
            self._error = wrap_write_error(error, agreed.store.url)
        # else the tree's memory would be held until the save has ended
        agreed.sources.clear()
        self._pending.set_staged(self._error)

    def run(self, *, here: bool = False) -> None:
        """The rest of the save, in a thread of its own, or `here` in that of its caller."""
        if not self._begun.acquire(blocking=False):
            return
        report, error = None, None
        try:
            report = self._write_and_commit(here=here)
        except BaseException as caught:
            error = caught
            self._agreed.abandon(caught)
        finally:
            # 9. The save has ended
            self._release()
            self._end_record()
            if error is not None:
                self._agreed.report_failure(error)
            self._pending.set_finished(report, error)

    @partial(takes_no_save, name="save_async", kind="save")
    def _write_and_commit(self, *, here: bool) -> SaveReport:
        with self._open_contexts:
            # 5. Copy the tree now, with lazy staging
            if not self._is_staged:
                with after_device_order():
                    self.stage()
            # 6. Rank 0 reads the run for the lineage
            agreed = self._agreed.with_lineage()
            # 7. Write the shards; after that the staging memory is free for the next save
            writer = self._new_writer(agreed, here=here)
            try:
                written = writer.write()
                self._release()
                # 8. Report; rank 0 commits; all ranks receive the result
                ended = complete(agreed, writer, written)
            except TreeckptError as failed:
                if writer.trace:
                    failed.add_note(f"In the writer process:\n{writer.trace}")
                raise
            except BaseException as error:
                if isinstance(writer, InlineWriter) and not isinstance(error, Exception):  # Ctrl-C
                    writer.withdraw(error)
                raise
        return msgspec.structs.replace(
            save_report(agreed, ended), blocked_seconds=self.blocked_seconds, staged_nbytes=self.staged_nbytes
        )

    def _new_writer(self, agreed: AgreedSave, *, here: bool) -> ShardWriter:
        plan, source = self._plan, None
        if self._error is None and self._lease is not None:
            if self._address is not None and not here:  # Ctrl-C may not come between a request to it and the answer
                return ProcessWriter(
                    self._session.writer,
                    agreed.store,
                    agreed.info,
                    plan,
                    agreed.recorder,
                    arena=self._lease.arena,
                    address=self._address,
                    timeout=agreed.comm.timeout,
                    record=agreed.record,
                )
            source = StagedShardSource(agreed.info.to_write(plan), self._lease.arena.memory)
        return InlineWriter(
            agreed.store, agreed.info, plan, agreed.recorder, source, error=self._error, record=agreed.record
        )

    def give_up(self, error: BaseException) -> None:
        """Ends a save whose thread has not begun; its caller raises the error."""
        if self._begun.acquire(blocking=False):
            self._agreed.abandon(error)
            self._open_contexts.close()
            self._release()
            self._end_record()
            self._agreed.report_failure(error)
            self._pending.set_finished(None, error)
            # the caller raises the error: the next save is not to fail with it
            self._pending.take_unreported_error()

    def _end_record(self) -> None:
        """Ends the progress record, unless the writer has."""
        if self._agreed.record is not None:
            self._agreed.record.end()

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()


def _arena_nbytes(files: Sequence[FilePlan]) -> int:
    return area_offsets([file.nbytes for file in files])[1]


def prewarm_tree(tree: object, comm: Comm, writer: WriterKind = "process") -> None:
    """Prepares for background saves of trees like this one; see `treeckpt.prewarm`."""
    session, in_process = session_of(comm), writer == "process" and passes_files
    with gc_paused(), session.starting:
        previous = session.previous("wait", None)
        in_process = in_process and session.start_writer("prewarm")
        options, store = SaveOptions(plan_only=True), MemoryStore("prewarm")
        agreed = agree(store, tree, comm, options, Recorder(comm.rank), previous)
        assert agreed is not None, "planning is not skipped"
        if agreed.plan is None:
            # a save reports this error to the other ranks; here nothing is saved
            raise agreed.error or AssertionError("a rank without a plan has an error")
        nbytes = _arena_nbytes(agreed.plan.own.files)
        lease = session.pool.lease(nbytes, cuda_pinning())
        try:
            lease.arena.populate(nbytes)
            if in_process:
                session.writer.prepare(agreed.plan, lease.arena, timeout=comm.timeout)
                session.writer.modules()  # answered once the process has imported and planned
        except WriterGone as gone:
            session.writer.end()
            raise CheckpointError(
                "prewarm",
                expected="a writer process",
                found=f"{gone}",
                hint='BackgroundOptions(writer="thread") needs none',
            ) from gone
        finally:
            lease.release()
