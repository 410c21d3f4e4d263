"""`Pending`, the future of a background save, and what it leaves for the next save."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import msgspec

from ..errors import CheckpointError, TreeckptError
from ..reports import SaveReport

_log = logging.getLogger("treeckpt")


class PreviousSave(msgspec.Struct, frozen=True):
    """State of this rank's previous background save."""

    error: Exception | None = None
    """Why it failed, if that was not reported to anyone yet: the next save fails with it."""
    running: str = ""
    """The path of one that has not ended; empty if none is running."""


class Pending:
    """A background save, returned by `treeckpt.save_async`.

    Attributes:
        path: where the save goes.
        skipped: an earlier save was still running and `busy="skip"` was given: this save does nothing.
        limit: seconds that the save waits for another rank.
    """

    def __init__(self, path: str, *, skipped: bool = False, limit: float = 0.0) -> None:
        self.path, self.skipped, self.limit = path, skipped, limit
        self._owner = os.getpid()
        self.staging_error: Exception | None = None
        self._staged, self._finished = threading.Event(), threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._error_reported = False
        self._lock, self._callbacks = threading.Lock(), list[Callable[[Pending], object]]()
        if skipped:
            self._staged.set()
            self._finished.set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns when everything is copied, so that the tree may be changed.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: it is not copied yet.
            TreeckptError: it could not be copied; the save has failed. Or this process was forked meanwhile.
        """
        self._check_owner(self._staged)
        if not self._staged.wait(timeout):
            raise TimeoutError(f"{self.path}: not staged after {timeout} s")
        if self.staging_error is not None:
            raise self.staging_error

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Waits for the end of the save and returns its report, or None if it was skipped.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: it has not ended, and goes on.
            TreeckptError: it failed, for the reason that this error gives. Or this process was forked meanwhile.
        """
        self._check_owner(self._finished)
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path}: still being saved after {timeout} s")
        self._error_reported = True
        if self._error is not None:
            raise self._error
        return self._report

    def done(self) -> bool:
        """Whether the save has ended, with or without an error.

        Raises:
            TreeckptError: this process was forked meanwhile, so it cannot know.
        """
        self._check_owner(self._finished)
        return self._finished.is_set()

    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Calls a function with this `Pending` once the save has ended, with or without an error, or was skipped.

        It is called in the thread that ends the save, in this one if that has ended already; several in the order in
        which they were added. An exception of it is logged.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _call(self, callback: Callable[[Pending], object]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("%s: a callback of the save failed", self.path)

    def _check_owner(self, event: threading.Event) -> None:
        """Refuses to wait in a forked child, where no thread is left that could end the save."""
        if os.getpid() != self._owner and not event.is_set():
            raise CheckpointError(
                self.path,
                expected=f"a call in process {self._owner}, which saves",
                found=f"one in process {os.getpid()}, forked from it while the save was under way",
                hint="Call it in the process that began the save; a forked child may begin a save of its own",
            )

    def __repr__(self) -> str:
        if self.skipped:
            state = "skipped"
        elif not self._finished.is_set():
            state = "writing" if self._staged.is_set() else "staging"
        else:
            state = "failed" if self._error is not None else "saved"
        return f"<Pending {state} {self.path}>"

    # for the code that saves ------------------------------------------------------------------------------------------
    def set_staged(self, error: Exception | None = None) -> None:
        """Marks the tree as copied, or as impossible to copy."""
        self.staging_error = error
        self._staged.set()

    def set_finished(self, report: SaveReport | None, error: BaseException | None) -> None:
        """Marks the save as ended."""
        self._report, self._error = report, error
        self._staged.set()
        with self._lock:
            self._finished.set()
        for callback in self._callbacks:
            self._call(callback)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, with or without an error; returns False if it did not come in time."""
        self._check_owner(self._finished)
        return self._finished.wait(timeout)

    @property
    def unreported_error(self) -> BaseException | None:
        """The error of the save, if no caller has received it yet."""
        return None if self._error_reported or not self._finished.is_set() else self._error

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
