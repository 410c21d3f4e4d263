"""The save beside the training: agree and stage in the caller's thread, write and commit behind it.

A session belongs to a comm and outlives its saves: it has the arenas, the writer process, and the save that is under
way, of which there is one at most. A save in the background takes a thread that mostly waits: for the writer process,
and for the other ranks' reports on the comm. Nothing in it issues a collective. What takes long and holds the
interpreter's lock (headers, manifest, index) is done by the writer process, which imports no torch.

With lazy staging the copying is the thread's first task, beside the next forward and backward.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from ..arrays.base import SourcePiece
from ..core.format.timings import BLOCKING
from ..errors import CheckpointError, TreeckptError
from ..io.comm.comm import Comm
from ..io.comm.failures import to_fault, wrap_os_error
from ..io.storage.store import MemoryStore, Store
from ..io.timing import Recorder
from . import at_exit
from .agree import Agreed, PreviousSave, agree
from .future import Pending
from .options import Busy, SaveOptions
from .plan_cache import Plans
from .process_channel import WriterGone, WriterProcess
from .save import complete, report_of
from .shard_writer import InlineWriter, WriteResult, staged_stream
from .staging import pinning, stage, start_after
from .staging_memory import Arena, ArenaPool, Lease, area_offsets
from .writer_process import ProcessWriter, address_of, arrange, detach, modules_of
from .writer_server import ENTRY

__all__ = ["Staging", "WriterKind", "prewarm_tree", "save_async_tree", "session_of", "standing_of"]

Staging = Literal["copy", "lazy"]
WriterKind = Literal["process", "thread"]


class _Writer:
    """The writer process, and what it has been sent."""

    def __init__(self) -> None:
        self.process: WriterProcess | None = None
        self.known: set[str | int] = set()

    def get(self) -> WriterProcess:
        """The process, started if there is none.

        Raises:
            OSError: none can be started.
        """
        if self.process is not None and not self.process.alive:
            self.end()
        if self.process is None:
            self.process, self.known = WriterProcess(ENTRY), set()
        return self.process

    def detach(self, arena: int) -> None:
        """Lets the process give back an arena."""
        if self.process is not None:
            with contextlib.suppress(WriterGone):
                detach(self.process, self.known, arena, limit=60)

    def end(self) -> None:
        """Ends the process; the next `get` starts another."""
        process, self.process = self.process, None
        if process is not None:
            process.end()


class Session:
    """What a comm's saves in the background have in common."""

    def __init__(self) -> None:
        self.starting = threading.Lock()
        """Held while a save is agreed on and staged: one at a time."""
        self.writer = _Writer()
        self.pool = ArenaPool(closed=self.writer.detach)
        self.current: Pending | None = None
        weakref.finalize(self, self.writer.end).atexit = False  # the process ends by itself when this one has
        at_exit.watch_session(self)

    def standing(self, busy: Busy, timeout: float | None) -> PreviousSave:
        """How it stands with the save before, which is waited for if `busy` says so."""
        before = self.current
        if before is None:
            return PreviousSave()
        if not before.done():
            if busy != "wait":
                return PreviousSave(running=before.path)
            if not before.wait(timeout):
                late = CheckpointError(
                    before.path,
                    expected=f"the save to this path to end within {timeout:g} s",
                    found="it is still under way, and goes on",
                    hint='Save less often, wait longer, or pass busy="skip"',
                )
                return PreviousSave(lost=late)
        self.current = None
        return PreviousSave(lost=before.take_lost())

    def forget(self) -> None:
        """In a forked child: none of it is this process's."""
        self.starting = threading.Lock()
        self.writer.end()
        self.pool = ArenaPool(closed=self.writer.detach)
        self.current = None


def session_of(comm: Comm) -> Session:
    """The session of a comm, made with its first save in the background."""
    return comm.state.get(Session) or comm.state.setdefault(Session())


def standing_of(comm: Comm) -> PreviousSave:
    """For a save in the caller's thread: waits for the one before, and says how it ended."""
    session = comm.state.get(Session)
    return PreviousSave() if session is None else session.standing("wait", None)


class _Timed:
    """A comm with a time limit of its own."""

    def __init__(self, inner: Comm, timeout: float) -> None:
        self.rank, self.size, self.state, self.timeout = inner.rank, inner.size, inner.state, timeout
        self.post, self.drop, self._wait = inner.post, inner.drop, inner.wait

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._wait(keys, timeout)


def save_async_tree(
    store: Store,
    tree: object,
    comm: Comm,
    options: SaveOptions,
    metadata: Mapping[str, object],
    *,
    staging: Staging = "copy",
    writer: WriterKind = "process",
    timeout: float | None = None,
) -> Pending:
    """Starts to save a tree; see `treeckpt.save_async`."""
    begin = time.perf_counter()
    _check_choices(store, busy=(options.busy, Busy), staging=(staging, Staging), writer=(writer, WriterKind))
    _check_timeout(store, timeout)
    session = session_of(comm)
    timed: Comm = comm if timeout is None else _Timed(comm, timeout)
    with session.starting:
        standing = session.standing(options.busy, timeout)
        recorder, stack = Recorder(comm.rank), contextlib.ExitStack()
        stack.enter_context(recorder.span("save"))
        agreed = agree(store, tree, timed, options, metadata, recorder, standing)
        if agreed is None:
            return Pending(store.url, skipped=True)
        if agreed.plans is None:  # the others have to be told, and all raise the same
            assert agreed.error is not None, "what kept this rank from planning is known"
            here = InlineWriter(store, agreed.facts, None, recorder, error=agreed.error)
            complete(agreed, store, timed, recorder, here, WriteResult(to_fault(agreed.error, comm.rank)))
            raise AssertionError("a save without plans fails")
        pending = Pending(store.url, limit=timed.timeout)
        stack.enter_context(agreed.talk.heartbeats())
        job = _Job(session, store, agreed, agreed.plans, timed, recorder, stack, pending, writer)
        try:
            if staging == "copy":
                job.stage()
            job.blocked = time.perf_counter() - begin
            recorder.add(BLOCKING, recorder.created_ns, recorder.now())
            session.current = pending
            at_exit.watch(pending)
            threading.Thread(target=job.run, name="treeckpt-save", daemon=True).start()
        except BaseException as error:  # Ctrl-C, or no thread can be started
            job.give_up(error)
            raise
    return pending


def _check_choices(store: Store, **given: tuple[str, object]) -> None:
    """Refuses a word that none of the choices is."""
    for name, (word, kind) in given.items():
        if word not in get_args(kind):
            choices = ", ".join(map(repr, get_args(kind)))
            raise TreeckptError(store.url, expected=f"{name} to be one of {choices}", found=f"{word!r}")


def _check_timeout(store: Store, timeout: float | None) -> None:
    """Refuses a limit within which nobody can answer: the writer would be blamed for its silence."""
    if timeout is not None and not 0 < timeout < math.inf:
        raise TreeckptError(
            store.url,
            expected="a timeout of more than 0 seconds, or None for the comm's",
            found=f"{timeout!r}",
            hint='To give up at once where an earlier save is under way, pass busy="skip" or busy="error"',
        )


class _Job:
    """One save on its way."""

    def __init__(
        self,
        session: Session,
        store: Store,
        agreed: Agreed,
        plans: Plans,
        comm: Comm,
        recorder: Recorder,
        stack: contextlib.ExitStack,
        pending: Pending,
        writer: WriterKind,
    ) -> None:
        self._session, self._store, self._agreed, self._plans, self._comm = session, store, agreed, plans, comm
        self._recorder, self._stack, self._pending = recorder, stack, pending
        self.blocked = 0.0
        self._error: Exception | None = None
        self._lease: Lease | None = None
        self._address = address_of(store) if writer == "process" else None
        self._is_staged = False
        self._begun = threading.Lock()
        """Taken for good by the thread that writes, or by giving up, whichever comes first."""
        if self._address is not None:
            self._attempt(session.writer.get)  # it starts while the tree is copied
        start_after()

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._error = self._error or wrap_os_error(error, self._store.url)

    def stage(self) -> None:
        """Copies what this rank writes; a failure is kept for telling the others."""
        self._is_staged = True
        if self._error is None:
            self._attempt(self._stage)
        self._agreed.sources.clear()
        self._pending.staged(self._error)

    def _stage(self) -> None:
        plans, sources = self._plans, self._agreed.sources

        def pieces(number: int) -> Sequence[SourcePiece]:
            return sources[plans.leaf(number).path].pieces

        with self._recorder.span("stage", plans.own.nbytes):
            self._lease = self._session.pool.lease(_arena_nbytes(plans), pinning())
            stage(plans.own, pieces, self._lease.arena.memory)

    def give_up(self, error: BaseException) -> None:
        """Ends a save whose thread has not begun; its caller hears of the error."""
        if self._begun.acquire(blocking=False):
            self._stack.close()
            self._release()
            self._pending.finish(None, error)
            self._pending.take_lost()

    def run(self) -> None:
        """The rest of the save, in a thread of its own."""
        if not self._begun.acquire(blocking=False):
            return
        report, error = None, None
        try:
            with self._stack:
                if not self._is_staged:
                    self.stage()
                self._write()
            report = msgspec.structs.replace(
                report_of(self._agreed, self._store, self._recorder),
                blocked_seconds=self.blocked,
                staged_nbytes=self._plans.own.nbytes,
            )
        except BaseException as met:
            error = met
        finally:
            self._release()
            self._pending.finish(report, error)

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def _write(self) -> None:
        self._agreed = self._agreed.with_lineage()
        facts, store, recorder, session = self._agreed.facts, self._store, self._recorder, self._session
        process = session.writer.process
        if self._error is not None or self._lease is None or self._address is None or process is None:
            here = InlineWriter(store, facts, self._plans, recorder, error=self._error)
            wrote = self._write_here(here)
            self._release()
            complete(self._agreed, store, self._comm, recorder, here, wrote)
            return
        there = ProcessWriter(
            process, session.writer.known, store, facts, self._plans, recorder, limit=self._comm.timeout
        )
        try:
            wrote = there.write(self._lease.arena, self._address)
            self._release()
            complete(self._agreed, store, self._comm, recorder, there, wrote)
        except TreeckptError as error:
            if there.trace:
                error.add_note(f"In the writer process:\n{there.trace}")
            raise
        finally:
            if there.broken:
                session.writer.end()

    def _write_here(self, here: InlineWriter) -> WriteResult:
        if self._error is not None or self._lease is None:
            assert self._error is not None, "what is not staged has failed"
            return WriteResult(to_fault(self._error, self._agreed.facts.rank))
        memory = self._lease.arena.memory
        return here.write(lambda plans: staged_stream(plans.own, memory))


def _arena_nbytes(plans: Plans) -> int:
    return area_offsets([file.nbytes for file in plans.own.files])[1]


def prewarm_tree(tree: object, comm: Comm, *, writer: WriterKind = "process") -> None:
    """Makes ready for saving trees like this one; see `treeckpt.prewarm`."""
    session = session_of(comm)
    with session.starting:
        standing = session.standing("wait", None)
        process = session.writer.get() if writer == "process" else None
        options, store = SaveOptions(rehearsal=True), MemoryStore("prewarm")
        agreed = agree(store, tree, comm, options, {}, Recorder(comm.rank), standing)
        assert agreed is not None, "a rehearsal is not skipped"
        if agreed.plans is None:
            raise agreed.error or AssertionError("plans fail with an error")
        nbytes = _arena_nbytes(agreed.plans)
        lease = session.pool.lease(nbytes, pinning())
        try:
            lease.arena.touch(nbytes)
            if process is not None:
                _introduce(process, session.writer, agreed.plans, lease.arena, comm.timeout)
        finally:
            lease.release()


def _introduce(process: WriterProcess, writer: _Writer, plans: Plans, arena: Arena, limit: float) -> None:
    """Sends plans and arena to the writer process, and waits until it is up."""
    try:
        arrange(process, writer.known, plans, arena, limit=limit)
        modules_of(process)
    except WriterGone as gone:
        writer.end()
        raise CheckpointError(
            "prewarm", expected="a writer process", found=f"{gone}", hint='writer="thread" needs none'
        ) from gone
