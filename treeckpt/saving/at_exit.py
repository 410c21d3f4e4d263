"""What becomes of saves in the background when the interpreter ends, or forks.

A normal end waits for them, for as long as their own time limits allow, and says so once that takes a second. A save
that is lost then, or failed before without anybody asking, is named on stderr, and the exit code is not 0. Nothing can
be done when a process is killed: an uncommitted save is then no checkpoint, and the writer ends by itself.

Forks inherit memory but no threads: in a child there are no saves under way, and its first save starts anew.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from typing import Protocol

from .future import Pending

__all__ = ["unwatch", "watch", "watch_session"]

PATIENCE = 1.0
"""Seconds of waiting before it is mentioned."""
GRACE = 60.0
"""Seconds beyond a save's own time limits."""


class Forkable(Protocol):
    """What a forked child has to let go of."""

    def forget(self) -> None: ...


class _State:
    """Of this process: there is one interpreter that ends."""

    def __init__(self) -> None:
        self.pending: set[Pending] = set()
        self.sessions: weakref.WeakSet[Forkable] = weakref.WeakSet()
        self.lock = threading.Lock()
        self.registered = False


_STATE = _State()


def watch(pending: Pending) -> None:
    """Has the end of the interpreter wait for a save."""
    with _STATE.lock:
        _STATE.pending = {other for other in _STATE.pending if not other.done() or other.unheard is not None}
        _STATE.pending.add(pending)
        _register()


def unwatch(pending: Pending) -> None:
    """Keeps the end of the interpreter from waiting for a save: its loss has been reported."""
    with _STATE.lock:
        _STATE.pending.discard(pending)


def watch_session(session: Forkable) -> None:
    """Has forks let go of what belongs to their parent."""
    with _STATE.lock:
        _STATE.sessions.add(session)
        _register()


def _register() -> None:
    if _STATE.registered:
        return
    _STATE.registered = True
    atexit.register(_finish)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        # a child that was forked ends without the handlers of atexit
        util.Finalize(None, _finish, exitpriority=100)


def _forget() -> None:
    sessions = list(_STATE.sessions)
    _STATE.pending, _STATE.lock = set(), threading.Lock()
    for session in sessions:
        session.forget()


def _finish() -> None:
    """Waits for what is under way, and lets no lost save pass for a success."""
    pending, _STATE.pending = _STATE.pending, set()
    try:
        for one in pending:
            _wait(one)
    except KeyboardInterrupt:
        _say("interrupted while waiting for saves in the background")
    lost = [one for one in pending if not one.done() or one.unheard is not None]
    for one in lost:
        error = one.unheard
        _say(f"the save to {one.path} was lost: {f'{type(error).__name__}: {error}' if error else 'it did not end'}")
    if lost:
        _exit_badly()


def _wait(pending: Pending) -> None:
    begin = time.monotonic()
    if pending.wait(PATIENCE):
        return
    limit = 2 * pending.limit + GRACE
    _say(f"waiting for the save to {pending.path} to be committed, for at most {limit:.0f} s")
    if pending.wait(limit) and pending.unheard is None:
        _say(f"it is committed, {time.monotonic() - begin:.1f} s later")


def _say(text: str) -> None:
    stream = sys.stderr
    if stream is not None:
        print(f"treeckpt: {text}", file=stream, flush=True)


def _exit_badly() -> None:
    """Ends with exit code 1, after the other handlers; one that is not 0 already is replaced too.

    A handler cannot change the code with which the interpreter is about to end, nor see it.
    """
    atexit.unregister(_finish)
    try:
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)
