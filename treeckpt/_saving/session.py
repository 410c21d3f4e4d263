"""The state that a comm's background saves share: the writer process, the staging memory, and the save that runs."""

from __future__ import annotations

import logging
import threading
import weakref

from .._io.comm.comm import Comm
from ..errors import CheckpointError
from . import at_exit
from .future import Pending, PreviousSave
from .options import BusyPolicy
from .staging import ArenaPool
from .writer_process import WriterProcess

_log = logging.getLogger("treeckpt")


class Session:
    """The background saves of a comm. It outlives them; at most one runs at a time."""

    def __init__(self) -> None:
        self.starting = threading.Lock()
        """Held while a save is agreed on and staged: one at a time."""
        self.writer = WriterProcess()
        self.pool = ArenaPool(on_close=self.writer.detach)
        self.current: Pending | None = None
        weakref.finalize(self, self.writer.end).atexit = False  # other handlers may run before the wait for the saves
        at_exit.end_after_saves(self.writer)
        at_exit.reset_after_fork(self)

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
        self.starting = threading.Lock()
        self.writer.end()
        self.pool = ArenaPool(on_close=self.writer.detach)
        self.current = None


def session_of(comm: Comm) -> Session:
    """Returns the session of a comm, which is created with its first background save."""
    return comm.state.get(Session) or comm.state.setdefault(Session())


def previous_save(comm: Comm) -> PreviousSave:
    """For a save in the caller's thread: waits for the background save before, and returns its state."""
    session = comm.state.get(Session)
    return PreviousSave() if session is None else session.previous("wait", None)
