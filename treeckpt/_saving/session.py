"""The background saves of a comm: their futures, what they share, what the end of the process and a fork do to them.

A normal end waits for the saves, as long as their own time limits allow, and prints a line once that takes a second. A
save that is lost then, or failed before without reporting it to a caller, is named on stderr, and the exit code is 1.
A save that is begun when the end has begun, by a handler of `atexit` or a finalizer, is made in the calling thread.

Forks inherit memory but no threads: in a child no save is running, and its first save starts with empty state.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from typing import Protocol

import msgspec

from .._io.background_call import BackgroundCall
from .._io.comm.comm import Comm
from .._io.process import call_at_end, call_in_forks, is_ending
from ..errors import CheckpointError, TreeckptError, visible
from ..reports import SaveReport
from .options import BusyPolicy
from .staging import ArenaPool
from .writer_process import WriterProcess

_log = logging.getLogger("treeckpt")


class PreviousSave(msgspec.Struct, frozen=True):
    """State of this rank's previous background save."""

    error: Exception | None = None
    """The error of a save that failed, if it was not reported to anyone yet: the next save fails with it."""
    running: str = ""
    """The path of a save that has not ended; empty if none is running."""


class Pending(BackgroundCall[SaveReport | None]):
    """A background save, returned by `treeckpt.save_async`. Its result is the report, None if it was skipped.

    Attributes:
        path: where the save goes.
        skipped: an earlier save was still running, and `BackgroundOptions(busy="skip")` has this one do nothing.
        limit: seconds that the save waits for another rank.

    >>> pending = tc.save_async("run/step_00000200", {"step": 200})
    >>> pending.wait_staged()  # from here on the tree may be changed
    >>> pending.result(timeout=60).step, pending.done()
    (None, True)
    """

    words = ("save", "saved", "saves")

    def __init__(self, path: str, *, skipped: bool = False, limit: float = 0.0) -> None:
        super().__init__(path)
        self.skipped, self.limit = skipped, limit
        self.staging_error: Exception | None = None
        self._is_staged = self._is_finished = skipped

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns when everything is copied, so that the tree may be changed.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: it is not copied yet.
            TreeckptError: it could not be copied; the save has failed. Or this process was forked meanwhile.
        """
        self._check_owner(self._is_staged)
        if not self._wait_for(lambda: self._is_staged, timeout):
            raise TimeoutError(f"{self.path}: not staged after {timeout} s")
        if self.staging_error is not None:
            raise self.staging_error

    def __repr__(self) -> str:
        if self.skipped:
            state = "skipped"
        elif not self._is_finished:
            state = "writing" if self._is_staged else "staging"
        else:
            state = "failed" if self._error is not None else "saved"
        return f"<Pending {state} {self.path}>"

    # for the code that saves ------------------------------------------------------------------------------------------
    def set_staged(self, error: Exception | None = None) -> None:
        """Marks the tree as copied, or as impossible to copy."""
        self.staging_error = error
        self._set_staged()

    def _set_staged(self) -> None:
        with self._changed:
            self._is_staged = True
            self._changed.notify_all()

    def set_finished(self, result: SaveReport | None, error: BaseException | None) -> None:
        """Marks the save as ended."""
        self._set_staged()
        super().set_finished(result, error)

    @property
    def unreported_error(self) -> BaseException | None:
        """The error of the save, if no caller has received it yet."""
        return None if self._error_reported or not self._is_finished else self._error

    def take_unreported_error(self) -> TreeckptError | None:
        """Returns the unreported error once, as an error to be raised by another call."""
        error = self.unreported_error
        if error is None:
            return None
        self._error_reported = True
        failed = CheckpointError(
            self.path,
            expected="the save to this path, in the background, to be committed",
            found=f"{type(error).__name__}: {error}",
            hint="This call started nothing: ask again. Pending.result() reports such a failure earlier",
        )
        failed.__cause__ = error
        return failed


# what the saves of a comm share ---------------------------------------------------------------------------------------


class Session:
    """The background saves of a comm. It outlives them; at most one runs at a time."""

    def __init__(self) -> None:
        self.starting = threading.Lock()
        """The lock that is held while a save is agreed on and staged: one at a time."""
        self.writer = WriterProcess()
        self.pool = ArenaPool(on_close=self.writer.detach)
        self.current: Pending | None = None
        weakref.finalize(self, self.writer.end).atexit = False  # other handlers may run before the wait for the saves
        _ENDING.sessions.add(self)
        reset_after_fork(self)

    def start_writer(self, path: str) -> bool:
        """Starts the writer process; returns False where that is impossible: a thread writes then."""
        try:
            self.writer.start()
        except OSError as error:
            _log.warning("%s: a thread writes, as no process can be started: %s", path, error)
            return False
        return True

    def previous(self, busy: BusyPolicy, timeout: float | None) -> PreviousSave:
        """Returns the state of the save before, after waiting for its end if `busy` says so."""
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
                    hint='Save less often, wait longer, or pass BackgroundOptions(busy="skip")',
                )
                return PreviousSave(late)
        self.current = None
        return PreviousSave(before.take_unreported_error())

    def after_fork(self) -> None:
        """In a forked child: replaces what belongs to the parent."""
        # a thread of the parent may have held it at the fork, and nobody here would release it
        self.starting = threading.Lock()
        self.writer.disown()
        self.pool = ArenaPool(on_close=self.writer.detach)
        self.current = None


def session_of(comm: Comm) -> Session:
    """Returns the session of a comm, which is created with its first background save."""
    return comm.state.get(Session) or comm.state.setdefault(Session())


# the end of the process, and forks ------------------------------------------------------------------------------------

QUIET_SECONDS = 1.0
"""The seconds of waiting before a line is printed."""
EXIT_GRACE = 60.0
"""The seconds to wait beyond a save's own time limits."""


class ForkAware(Protocol):
    """An object with state that a forked child must not use."""

    def after_fork(self) -> None:
        """Replaces the state, in the child."""
        ...


class _Ending:
    """What the end of this process waits for, or ends, and what forks replace."""

    def __init__(self) -> None:
        self.pending: set[Pending] = set()
        self.fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        # reentrant: a signal handler may make a call while this thread holds it
        self.lock = threading.RLock()


_ENDING = _Ending()


def wait_at_exit(pending: Pending) -> bool:
    """Registers a save that the end of the interpreter waits for; returns False where that has begun: it does not."""
    with _ENDING.lock:
        if is_ending() or not call_at_end(_finish):
            return False
        # saves that have ended well are dropped, or the set would hold all saves of the process
        _ENDING.pending = {save for save in _ENDING.pending if not save.done() or save.unreported_error is not None}
        _ENDING.pending.add(pending)
        return True


def forget_at_exit(pending: Pending) -> None:
    """Removes a save: its loss has been reported, so the end of the interpreter does not wait for it."""
    with _ENDING.lock:
        _ENDING.pending.discard(pending)


def reset_after_fork(fork_aware: ForkAware) -> None:
    """Has `after_fork` called in forked children, as long as the object lives."""
    with _ENDING.lock:
        _ENDING.fork_aware.add(fork_aware)
        call_at_end(_finish)


def _after_fork() -> None:
    # without the lock: a thread of the parent may have held it at the fork
    fork_aware = list(_ENDING.fork_aware)
    _ENDING.pending, _ENDING.lock = set(), threading.RLock()
    for each in fork_aware:
        each.after_fork()


call_in_forks(_after_fork)


def _finish() -> None:
    """Waits for the saves that run, and ends the process with an error if one is lost."""
    with _ENDING.lock:
        pending, _ENDING.pending = _ENDING.pending, set()
    try:
        for save in pending:
            _wait(save)
    except KeyboardInterrupt:
        _print("interrupted while waiting for saves in the background")
    # after the saves, which these processes write
    for session in list(_ENDING.sessions):
        session.writer.end()
    lost = [save for save in pending if not save.done() or save.unreported_error is not None]
    for save in lost:
        error = save.unreported_error
        reason = f"{type(error).__name__}: {error}" if error else "it did not end"
        _print(f"the save to {save.path} was lost: {reason}")
    if lost:
        _exit_with_error()


def _wait(pending: Pending) -> None:
    begin = time.monotonic()
    if pending.wait(QUIET_SECONDS):
        return
    limit = 2 * pending.limit + EXIT_GRACE
    _print(f"waiting for the save to {pending.path} to be committed, for at most {limit:.0f} s")
    if pending.wait(limit) and pending.unreported_error is None:
        _print(f"it is committed, {time.monotonic() - begin:.1f} s later")


def _print(text: str) -> None:
    if sys.stderr is not None:
        print(f"treeckpt: {visible(text)}", file=sys.stderr, flush=True)


def _exit_with_error() -> None:
    """Ends with exit code 1, after the other handlers; an exit code other than 0 is replaced too.

    A handler cannot change the code with which the interpreter is about to end, nor see it.
    """
    try:
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)
