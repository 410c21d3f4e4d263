"""Decides which steps are saved: at an interval of steps or seconds, and after a signal that ends the process.

An interval in steps is the same on every rank. Clocks and signals differ between ranks, so rank 0 decides, without
waiting for other ranks, and at its n-th call already for call n + 1. Each rank reads that decision from the message
store when it makes call n + 1; it is there at the latest a moment after rank 0 has made its call n, so ranks that train
in step do not wait. A signal handler only sets a flag: the next call on that rank posts it, the next call on rank 0
after that decides, and all ranks save at the call after: within two steps of the signal, and at the same step on every
rank. After the signal, waits for a rank without heartbeats end after a few seconds (`_io.comm.waiting`).

A request of a save by a thread is posted and decided in the same way, again and again until a save is due after it.
Without `seconds` and without signals nothing is posted at all.

torchrun and SLURM send the signal to every process of a rank. A worker of a `DataLoader` dies of it, torch raises
`RuntimeError: DataLoader worker ... is killed by signal` in the training, and the steps before the last save never
finish. `LoaderWorkers` keeps the signals from the workers that start while a manager listens; for workers that started
before, `LoopState` keeps the state of the loop for a last save when their error breaks it.

`SaveHistory` keeps the order of what was restored and saved, for the lineage in the index of each save.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from numbers import Real
from types import FrameType
from typing import Any

import msgspec

from .._arrays.registry import is_value
from .._core.format.decoding import decode_msgpack
from .._core.format.files import PIN_NAME, STEP_PATTERN, CheckpointId, id_order, id_text
from .._core.format.lineage import MAX_KEEP, Lineage, SavedCheckpoint, next_lineage
from .._core.tree.flatten import flatten
from .._io.comm import waiting
from .._io.comm.comm import Comm, PrefixComm
from .._io.process import HEARTBEAT_TIMEOUT, TERMINATION
from .._io.storage.store import Store
from ..errors import RankError, TreeckptError, visible
from ..policy import Policy, keep_text, parse_keep
from .run import RunDirectory

_LOADERS = ("torch.utils.data", "torchdata")
"""The packages whose functions the workers of data loaders run."""
_WORKER_END_SECONDS = 5.0
"""Seconds to wait at most for the end of a killed worker; one that waits for a disk may take longer."""
_log = logging.getLogger("treeckpt")
_KEPT_DECISIONS = 256
"""Decisions to save that stay in the message store, for ranks that are behind."""
_WORKER_ERROR = "DataLoader worker"
"""The words with which torch's errors about dead workers begin."""


class LoaderWorkers:
    """The signals that are blocked in new worker processes of data loaders. There is one object per process.

    A worker that starts while a manager listens is started with the signals blocked: a new process has the signal mask
    of the thread that starts it, whether it is forked or spawned. A forkserver that runs already has its own mask, and
    its workers are not protected. Other processes have the signals as before, but those that a worker starts, which it
    needs to go on, have its mask.

    A blocked SIGTERM would make `terminate`, by which multiprocessing ends workers that are left at the end of the
    training, wait for ever: such workers are killed, and reaped while torch's handler of SIGCHLD, which takes that for
    a failure, is away.
    """

    def __init__(self) -> None:
        self._blocked: Counter[int] = Counter()
        self._installed = False
        """Whether `BaseProcess.start` is replaced; once it is, it stays so."""

    def block(self, signals: Iterable[int]) -> None:
        """Blocks signals in workers that are started from now on. Windows has no signals for groups of processes."""
        if not hasattr(signal, "pthread_sigmask"):
            return
        self._blocked.update(list(signals))
        if not self._installed and self._blocked:
            process_class: Any = BaseProcess
            process_class.start, self._installed = self._starting(BaseProcess.start), True

    def unblock(self, signals: Iterable[int]) -> None:
        """Undoes one `block`; workers that run keep their mask."""
        self._blocked.subtract(list(signals))

    def _starting(self, start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
        @wraps(start)
        def start_process(process: Any) -> None:
            # The plus leaves out signals whose count is back at 0.
            blocked = +self._blocked
            if not blocked or not (getattr(process._target, "__module__", None) or "").startswith(_LOADERS):
                start(process)
                return
            before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            try:
                start(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            process._popen.terminate = partial(_kill, process._popen)

        return start_process


def _kill(popen: Any) -> None:
    """Kills a worker and waits for its end, without the handler of SIGCHLD.

    Blocking that signal is not enough: another thread gets it, and Python runs the handler in the main thread. In other
    threads handlers cannot be replaced, and torch's may raise in the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if is_main else None
    if before is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        popen.kill()
        popen.wait(_WORKER_END_SECONDS)
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)


LOADER_WORKERS = LoaderWorkers()


class _SchedulePlan(msgspec.Struct, array_like=True):
    """The decisions of rank 0."""

    decided: int
    """The last call for which there is a decision."""
    due: list[int]
    """Calls at which the interval in seconds has passed, or a save was requested."""
    stop: int
    """The call at which a signal makes all ranks save, 0 for none."""


class SaveSchedule:
    """Decides which steps are saved.

    Args:
        every: steps between saves.
        seconds: seconds between saves, by rank 0's clock.
    """

    def __init__(self, comm: Comm, *, every: int | None = None, seconds: float | None = None) -> None:
        for name, given, least in (("every", every, 1), ("seconds", seconds, 0)):
            if given is None:
                continue
            if isinstance(given, bool) or not isinstance(given, Real) or not given >= least:
                hint = f"{name}=None saves at no interval"
                raise TreeckptError(name, expected=f"a number, {least} or more", found=f"{given!r}", hint=hint)
        self._every, self._seconds, self.clock = every, seconds, time.monotonic
        self._comm = PrefixComm(comm, "pace")
        # every rank creates its managers in the same order: the number keeps their messages apart
        self._number = self._comm.state.managers = self._comm.state.managers + 1
        self._calls, self._last = 0, self.clock()
        self._interrupted: int | None = None
        """The step of the last call if that has not come to its end: made again, it is not counted again."""
        self._plan = _SchedulePlan(1, [], 0)
        self.signum = 0
        self._signal_posted = self._request_posted = self.listening = False
        self._requested = False
        self._requested_by = 0
        """The call before which this rank was asked for a save; 0 once one was due after that."""
        self._handlers: dict[int, Any] = {}
        self.stopping = False
        """Whether the last save was due because of a signal."""

    def restart(self) -> None:
        """Restarts the interval in seconds."""
        self._last = self.clock()

    def request(self) -> None:
        """Requests a save on all ranks; from any thread.

        Raises:
            TreeckptError: other ranks do not listen.
        """
        if self._comm.size > 1 and not self._posts:
            raise TreeckptError(
                "request_save",
                expected="ranks that listen for requests of others",
                found="an interval in steps alone",
                hint="Call save_on_signal(()) on every rank before the loop; with signals it listens for these too",
            )
        self._requested = True

    @property
    def _posts(self) -> bool:
        """Whether rank 0 decides, and posts what it has decided."""
        return self._seconds is not None or self.listening

    def due(self, step: int) -> bool:
        """Whether to save this step. Call it once per step, on every rank."""
        self._calls += step != self._interrupted
        self._interrupted = step  # unless the next lines are interrupted: then the call is made again
        due = self._due(step)
        self._interrupted = None
        return due

    def _due(self, step: int) -> bool:
        at_interval = self._every is not None and step > 0 and step % self._every == 0
        if self._requested:
            self._requested, self._requested_by = False, self._calls
        if self._comm.size == 1:
            stop, self.stopping = (
                bool(self.signum) and not self.stopping,
                self.stopping or bool(self.signum),
            )
            is_requested, self._requested_by = bool(self._requested_by), 0
            return at_interval or stop or is_requested or self._is_time()
        if not self._posts:
            return at_interval
        if self._comm.rank == 0:
            plan = self._decide()
        else:
            self._post_signal()
            plan = self._plan = self._read_plan()
        if self._requested_by <= max(plan.stop, *plan.due, 0):
            self._requested_by = 0
        if self._calls == plan.stop:
            self.stopping = True
        return at_interval or self._calls in (plan.stop, *plan.due)

    def _is_time(self) -> bool:
        return self._seconds is not None and self.clock() - self._last >= self._seconds

    # ranks ---------------------------------------------------------------------------------------------------

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"

    def _decide(self) -> _SchedulePlan:
        """On rank 0: decides about the next call; returns the decisions."""
        plan, following = self._plan, self._calls + 1
        due, stop = plan.due[-_KEPT_DECISIONS:], plan.stop
        signal, request = self._comm.wait([self._key("signal"), self._key("request")], 0)
        requested_by = max(self._requested_by, int(request or 0))
        if self._is_time() or requested_by > max(stop, *due, 0):
            due = [*due, following]
            self.restart()
        if not stop and self.listening and (self.signum or signal is not None):
            stop = following
        self._plan = _SchedulePlan(following, due, stop)
        self._comm.post(self._key("plan"), msgspec.msgpack.encode(self._plan))
        return self._plan

    def _post_signal(self) -> None:
        """On other ranks: posts a signal once, for rank 0, and a request until a save is due."""
        if self.signum and not self._signal_posted:
            self._signal_posted = True
            self._comm.post(self._key("signal"), b"%d" % self.signum)
        if self._requested_by:  # again, as that of another rank may have taken its place
            self._request_posted = True
            self._comm.post(self._key("request"), b"%d" % self._requested_by)

    def _read_plan(self) -> _SchedulePlan:
        """On other ranks: waits for the decision about this call; it is mostly there already."""
        if self._calls <= self._plan.decided:
            return self._plan
        limit, pause, start, logged = self._comm.timeout * 2 + 1, 0.0005, time.monotonic(), False
        while True:
            data = self._comm.wait([self._key("plan")], 0)[0]
            plan = decode_msgpack(data, _SchedulePlan) if data is not None else self._plan
            if plan.decided >= self._calls:
                return plan
            waited = time.monotonic() - start
            if not logged and waited > waiting.SLOW_WAIT:
                waiting.log_waiting(self._comm.rank, [0], waiting.SLOW_WAIT, "should_save or step")
                logged = True
            if waited > limit or TERMINATION.expired(start):
                raise RankError(
                    "ranks",
                    ranks={0: waiting.silence_text(limit)},
                    expected="rank 0's decision on whether to save this step",
                    hint="Call should_save or step once per step, on every rank",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    # signals -------------------------------------------------------------------------------------------------

    def listen(self, signals: Iterable[int], rank_timeout: float = HEARTBEAT_TIMEOUT) -> None:
        """Installs handlers of the signals.

        Args:
            rank_timeout: after the signal, waits for a rank end when it has sent no heartbeat for so many seconds.

        Raises:
            TreeckptError: this is not the main thread.
        """

        if not 0 < rank_timeout < math.inf:
            hint = f"By default it is {HEARTBEAT_TIMEOUT:g}"
            raise TreeckptError("rank_timeout", expected="seconds, more than 0", found=f"{rank_timeout!r}", hint=hint)

        def note(number: int, frame: FrameType | None) -> None:
            self.signum = number
            TERMINATION.record_signal()

        fresh = not self._handlers
        for number in signals:
            try:
                before = signal.signal(number, note)
            except ValueError as error:
                raise TreeckptError(
                    "save_on_signal",
                    expected="a call in the main thread, and signals that can be handled",
                    found=f"{error}",
                ) from error
            if number not in self._handlers:
                LOADER_WORKERS.block([number])
            # A second call finds the handler of the first one: what was there before both stays noted.
            self._handlers.setdefault(number, before)
        if fresh and self._handlers:
            TERMINATION.start_listening(rank_timeout)
        self.listening = True

    def close(self, error: BaseException | None = None) -> None:
        """Restores the previous signal handlers, and removes this rank's messages.

        Args:
            error: why there will be no further save: a signal that waits for one is raised again with its old handler.
        """
        for number, before in self._handlers.items():
            # None stands for a handler that other code than Python's had installed, which Python cannot install again.
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        LOADER_WORKERS.unblock(self._handlers)
        if self._handlers:
            TERMINATION.stop_listening(ended=error is None or not self.stopping)
        self._handlers.clear()
        posted = {"signal": self._signal_posted, "request": self._request_posted}
        self._comm.drop([self._key(what) for what, there in posted.items() if there])
        if error is not None and self.signum and not self.stopping:
            name = signal.Signals(self.signum).name
            _log.error("treeckpt: ends by %s without a last save: %s: %s", name, type(error).__name__, error)
            signal.raise_signal(self.signum)


class LoopState:
    """The state of a loop for a last save, where a signal ends workers of its data loader, and their error the loop.

    Such an error can come at any line of the loop. The state is that of a step as long as no optimizer has begun a step
    since `should_save` was called for it; after that it is between two steps, and is not saved. Several ranks save only
    if the loop breaks on all of them: one that waits for another in a collective does not get there.
    """

    def __init__(self) -> None:
        self.tree: Callable[[], Any] | None = None
        """Returns the state; None where nothing tells how the loop saves."""
        self.step: int | None = None
        """For which `should_save` was called last."""
        self._parts: frozenset[Any] | None = None
        self._begun = self._begun_before = 0
        self._hook: Any = None

    def reach(self, step: int) -> None:
        """Notes the call of `should_save` for a step."""
        if self._hook is None and "torch.optim" in sys.modules:
            from ..training._guard import before_any_step

            self._hook = before_any_step(self._begin)
        self.step, self._begun_before = step, self._begun

    def _begin(self) -> None:
        self._begun += 1

    def note_saved(self, tree: Any) -> None:
        """Notes the keys at the root of a tree that the loop saves."""
        self._parts = frozenset(tree) if isinstance(tree, Mapping) else None

    def last_tree(self) -> Any:
        """Returns the state to save.

        Raises:
            LookupError: it is not known, or not that of a step; with the reason.
        """
        if self.step is None or self._begun != self._begun_before:
            raise LookupError("the error came between two steps")
        if self.tree is None:
            raise LookupError("resume was not given all that is saved, and step no function that returns it")
        tree = self.tree()
        if self._parts is not None and frozenset(tree) != self._parts:
            what = ", ".join(sorted(map(str, self._parts)))
            raise LookupError(f"the loop saves {what}, and resume was given objects for {', '.join(map(str, tree))}")
        return tree

    def close(self) -> None:
        """Ends counting steps."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def is_of_workers(error: BaseException) -> bool:
    """Whether an error is that of dead workers of a data loader, or follows one."""
    return any(_WORKER_ERROR in str(one) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def training_state(model: Any, optimizer: Any, options: Mapping[str, Any]) -> Any:
    """Returns the state of the objects that `resume` got.

    Raises:
        LookupError: values are among them, of which the loop may have others by now in variables of its own.
    """
    from ..training import state

    asked = {name: options.get(name) for name in ("scheduler", "loader", "extra")}
    parts: dict[str, Any] = {name: None if thing is False else thing for name, thing in asked.items()}
    given = {name: thing for name, thing in parts.items() if thing is not None}
    for path, leaf in flatten(given, namespace=options.get("namespace", ""))[1]:
        if is_value(leaf):
            raise LookupError(f"{path} is a value, which the loop alone knows: call step with a function for the state")
    return state(model, optimizer, rng=options.get("rng") is not False, **parts)


# the history of a manager, for the lineage of its saves -----------------------------------------------------------


# Entries are told apart by identity: those of saves whose lineage is not known yet have equal fields.
@dataclass(eq=False)
class _HistoryEntry:
    """A restored checkpoint, or a save that was started."""

    mark: SavedCheckpoint | None = None
    """The checkpoint; None until the lineage of its save is known."""
    restored: bool = False


@dataclass(frozen=True, eq=False)
class NextSave:
    """The `LineageSource` of one save of a manager."""

    history: SaveHistory
    step: CheckpointId
    pin: bool
    """Whether the save itself is pinned: then it may replace a pinned checkpoint."""
    before: tuple[_HistoryEntry, ...]
    """What was restored and saved before."""
    entry: _HistoryEntry
    """The entry of this save."""

    def bases(self) -> Iterator[tuple[Store, str]]:
        """As `BaseSource`: what was restored or saved last comes first."""
        for entry in reversed(self.before):
            if entry.mark is not None:
                yield self.history.directory.folder(entry.mark.step), entry.mark.save_id

    def lineage(self, save_id: str) -> Lineage:
        """Returns the lineage of the save with this id; raises nothing."""
        return self.history.lineage(self, save_id)


def _recorded_text(policies: Sequence[Policy]) -> str:
    """Returns policies as a save records them; empty if they are too long, or no text is parsed to them."""
    keep = keep_text(policies)
    try:
        return keep if len(keep.encode()) <= MAX_KEEP and keep_text(parse_keep(keep)) == keep else ""
    except ValueError:  # it has no UTF-8, or is not parsed
        return ""


class SaveHistory:
    """The checkpoints that a manager has restored and saved, in the order of the calls.

    The lineage of its next save follows the last of them. Whether a save was committed is read from the disk: one that
    failed, was skipped or was deleted is skipped here. Rank 0 decides, after the previous save has ended, and outside
    the caller's thread for a save in the background, because it reads every index of the run.

    A manager that restored nothing, but saves a step that the run has already or that lies below one of it, is mostly
    that of a training that forgot to resume: it replaces the old steps, or its clean-ups delete them. It warns, once.

    Args:
        policies: the retention policies of the manager, which each save records.
        warn: logs a warning about a path.
        rank: the rank of this process; rank 0 alone decides.
        replaces: whether the caller said that steps of other trainings are to be replaced: then nothing warns of it.
    """

    def __init__(
        self,
        run: RunDirectory,
        policies: Sequence[Policy],
        warn: Callable[[str, str], None],
        rank: int,
        *,
        replaces: bool = False,
    ) -> None:
        self.directory, self._warn, self._rank = run, warn, rank
        self._entries: tuple[_HistoryEntry, ...] = ()
        self._lock = threading.RLock()
        self._warned = replaces
        self._keep = _recorded_text(policies)
        self._saved: set[str] = set()
        """The ids of the saves of this manager, until it has restored something or warned."""

    def restored(self, mark: SavedCheckpoint) -> None:
        """Records that the next save follows this checkpoint."""
        with self._lock:
            self._entries, self._warned = (_HistoryEntry(mark, restored=True),), True

    def next_save(self, step: CheckpointId, *, pin: bool = False) -> NextSave | None:
        """Records a save that is started, and whether it is pinned; returns what determines its lineage, on rank 0."""
        if self._rank:
            return None
        entry = _HistoryEntry()
        with self._lock:
            before, self._entries = self._entries, (*self._entries, entry)
        return NextSave(self, step, pin, before, entry)

    def _warn_of_pinned(self, step: CheckpointId) -> None:
        """Warns where a save is about to replace a pinned checkpoint; raises nothing."""
        with contextlib.suppress(Exception):
            folder = self.directory.folder(step)
            if PIN_NAME in folder.entries():
                text = "is pinned, and this save replaces it: a pin keeps a checkpoint from clean-ups only"
                self._warn(folder.place, f"{text}. overwrite=False of the Manager refuses to replace steps")

    def lineage(self, save: NextSave, save_id: str) -> Lineage:
        """Returns the lineage of a save, from the entries before it and the state of the run; raises nothing."""
        step, before = save.step, save.before
        try:
            marks = self.directory.marks()
        except Exception as error:  # a save without the right lineage is better than none
            marks = [known.mark for known in before if known.mark is not None]
            self._warn(self.directory.url, f"could not be looked at for the lineage of {id_text(step)}: {error}")
        if not save.pin and any(mark.step == step for mark in marks):
            self._warn_of_pinned(step)
        if not self._warned:
            self._warn_of_forgotten_resume(marks, step)
            self._saved.add(save_id)
        there = {mark.save_id for mark in marks}
        sure = [e for e in before if e.mark is not None and (e.restored or e.mark.save_id in there)]
        lineage = next_lineage(marks, sure[-1].mark if sure else None, step)
        lineage = msgspec.structs.replace(lineage, keep=self._keep, name=lineage.name or self._pattern_of(marks, step))
        save.entry.mark = SavedCheckpoint(step, save_id, lineage)
        old = before[: before.index(sure[-1])] if sure else ()
        with self._lock:
            self._entries = tuple(kept for kept in self._entries if kept not in old)
        return lineage

    def _pattern_of(self, marks: Sequence[SavedCheckpoint], step: CheckpointId) -> str:
        """Returns the pattern that the index of a step records: that of a checkpoint which it replaces, if any."""
        recorded = (mark.lineage.name for mark in marks if mark.step == step and mark.lineage is not None)
        pattern = next(filter(None, recorded), self.directory.pattern)
        return pattern if isinstance(step, int) and pattern != STEP_PATTERN else ""

    def _warn_of_forgotten_resume(self, marks: Sequence[SavedCheckpoint], step: CheckpointId) -> None:
        """Warns where a step is saved at or below one that this manager neither saved nor restored.

        A text replaces the checkpoint of the same text alone.
        """
        unknown = [mark.step for mark in marks if mark.save_id not in self._saved]
        if isinstance(step, str):
            others: list[CheckpointId] = [other for other in unknown if other == step]
        else:
            others = [other for other in unknown if isinstance(other, int) and other >= step]
        if not others:
            return
        self._warned, path = True, self.directory.folder(step).place
        what = "replaces a checkpoint" if step in others else f"is saved below step {max(others, key=id_order)}"
        text = (
            f"{id_text(step)} {what} that this manager neither saved nor restored. To continue the run, call resume or "
            "restore before the first save; to start anew, take another directory; overwrite=True of the Manager "
            "replaces such steps without a warning, overwrite=False refuses to"
        )
        try:
            warnings.warn(visible(f"{path}: {text}"), stacklevel=2)
        except UserWarning:  # a filter makes it an error, but the ranks have agreed on this save
            self._warn(path, text)
