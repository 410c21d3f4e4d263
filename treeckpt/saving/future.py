"""A save that goes on in the background, as its caller sees it."""

from __future__ import annotations

import os
import threading

from ..errors import CheckpointError, TreeckptError
from ..reports import SaveReport

__all__ = ["Pending"]


class Pending:
    """A save under way. Made by `treeckpt.save_async`.

    Attributes:
        path: where it goes.
        skipped: an earlier save was still under way and `busy="skip"` was given: nothing was, or will be, done.
    """

    def __init__(self, path: str, *, skipped: bool = False, limit: float = 0.0) -> None:
        self.path, self.skipped, self.limit = path, skipped, limit
        self._owner = os.getpid()
        self.staging_error: Exception | None = None
        self._staged, self._finished = threading.Event(), threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._heard = False
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
        """Waits for the end of the save; its report, or None if it was skipped.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: it is still under way, and goes on.
            TreeckptError: it failed, for the reason that this error says. Or this process was forked meanwhile.
        """
        self._check_owner(self._finished)
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path}: still being saved after {timeout} s")
        self._heard = True
        if self._error is not None:
            raise self._error
        return self._report

    def done(self) -> bool:
        """Whether it has ended, well or not.

        Raises:
            TreeckptError: this process was forked meanwhile, so it cannot know.
        """
        self._check_owner(self._finished)
        return self._finished.is_set()

    def _check_owner(self, event: threading.Event) -> None:
        """Refuses to wait in a forked child, where no thread is left that could end the save."""
        if os.getpid() != self._owner and not event.is_set():
            raise CheckpointError(
                self.path,
                expected=f"a call in process {self._owner}, which saves",
                found=f"one in process {os.getpid()}, forked from it while the save was under way",
                hint="Ask in the process that began the save; a forked child may begin a save of its own",
            )

    def __repr__(self) -> str:
        if self.skipped:
            state = "skipped"
        elif not self._finished.is_set():
            state = "writing" if self._staged.is_set() else "staging"
        else:
            state = "failed" if self._error is not None else "saved"
        return f"<Pending {state} {self.path}>"

    # for the one that saves -------------------------------------------------------------------------------------------
    def staged(self, error: Exception | None = None) -> None:
        """The tree is copied, or could not be."""
        self.staging_error = error
        self._staged.set()

    def finish(self, report: SaveReport | None, error: BaseException | None) -> None:
        """The save has ended."""
        self._report, self._error = report, error
        self._staged.set()
        self._finished.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, whatever it is; False if it did not come in time."""
        self._check_owner(self._finished)
        return self._finished.wait(timeout)

    @property
    def unheard(self) -> BaseException | None:
        """The error that nobody has been told."""
        return None if self._heard or not self._finished.is_set() else self._error

    def take_lost(self) -> TreeckptError | None:
        """The error of a save that nobody asked for, as one to be raised elsewhere; once."""
        error = self.unheard
        if error is None:
            return None
        self._heard = True
        lost = CheckpointError(
            self.path,
            expected="the save to this path, in the background, to be committed",
            found=f"{type(error).__name__}: {error}",
            hint="What is asked for now was not begun: ask again. Pending.result() tells of a failure earlier",
        )
        lost.__cause__ = error
        return lost
