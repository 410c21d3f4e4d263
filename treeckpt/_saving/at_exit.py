"""Handlers for the end of the interpreter and for forks, of a process with background saves.

A normal end waits for the saves, as long as their own time limits allow, and prints a line once that takes a second. A
save that is lost then, or failed before without reporting it to a caller, is named on stderr, and the exit code is 1.
A save that is begun when the end has begun, by a handler of `atexit` or a finalizer, is made in the calling thread.

Forks inherit memory but no threads: in a child no save is running, and its first save starts with empty state.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from typing import Protocol

from .._io.process import call_at_end, call_in_forks, is_ending
from ..errors import visible
from .future import Pending

QUIET_SECONDS = 1.0
"""Seconds of waiting before a line is printed."""
EXIT_GRACE = 60.0
"""Seconds to wait beyond a save's own time limits."""


class ForkAware(Protocol):
    """An object with state that a forked child must not use."""

    def after_fork(self) -> None:
        """Replaces the state, in the child."""
        ...


class SupportsEnd(Protocol):
    """A process that writes."""

    def end(self) -> object:
        """Ends it."""
        ...


class _ExitState:
    """The saves and sessions of this process."""

    def __init__(self) -> None:
        self.pending: set[Pending] = set()
        self.fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
        self.writers: weakref.WeakSet[SupportsEnd] = weakref.WeakSet()
        self.lock = threading.RLock()


_STATE = _ExitState()


def wait_at_exit(pending: Pending) -> bool:
    """Registers a save that the end of the interpreter waits for; returns False where that has begun: it does not."""
    with _STATE.lock:
        if is_ending() or not call_at_end(_finish):
            return False
        _STATE.pending = {save for save in _STATE.pending if not save.done() or save.unreported_error is not None}
        _STATE.pending.add(pending)
        return True


def forget_at_exit(pending: Pending) -> None:
    """Removes a save: its loss has been reported, so the end of the interpreter does not wait for it."""
    with _STATE.lock:
        _STATE.pending.discard(pending)


def reset_after_fork(fork_aware: ForkAware) -> None:
    """Has `after_fork` called in forked children, as long as the object lives."""
    with _STATE.lock:
        _STATE.fork_aware.add(fork_aware)
        call_at_end(_finish)


def end_after_saves(writer: SupportsEnd) -> None:
    """Has a process ended at the end of the interpreter, after the saves."""
    with _STATE.lock:
        _STATE.writers.add(writer)
        call_at_end(_finish)


def _after_fork() -> None:
    fork_aware = list(_STATE.fork_aware)
    _STATE.pending, _STATE.lock = set(), threading.RLock()
    for each in fork_aware:
        each.after_fork()


call_in_forks(_after_fork)


def _finish() -> None:
    """Waits for the saves that run, and ends the process with an error if one is lost."""
    with _STATE.lock:
        pending, _STATE.pending = _STATE.pending, set()
    try:
        for save in pending:
            _wait(save)
    except KeyboardInterrupt:
        _print("interrupted while waiting for saves in the background")
    for writer in list(_STATE.writers):
        writer.end()
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
