"""`Pending`, the future of a background save, and what it leaves for the next save."""

from __future__ import annotations

import msgspec

from .._io.background_call import BackgroundCall
from ..errors import CheckpointError, TreeckptError
from ..reports import SaveReport


class PreviousSave(msgspec.Struct, frozen=True):
    """State of this rank's previous background save."""

    error: Exception | None = None
    """Why it failed, if that was not reported to anyone yet: the next save fails with it."""
    running: str = ""
    """The path of one that has not ended; empty if none is running."""


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
