"""The background saves of a manager on one rank, and the clean-up after each of them.

The clean-up runs in a thread of its own, one at a time, so that deleting terabytes does not delay training. It never
makes a save fail: what it could not do is logged, and what it removed (INFO).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, wait
from functools import partial
from typing import NamedTuple

import msgspec

from .._core.format.files import CheckpointId, id_text
from .._inspect.deletion import CleanReport
from .._saving.session import Pending, forget_at_exit, reset_after_fork
from .._threads import call_in_thread
from ..errors import CheckpointError
from ..policy import Policy, keep_text
from ..reports import SaveReport
from .disk_cleanup import RunDisks, complete_saves, spread_pins
from .run import CheckpointSelector, RunDirectory

_log = logging.getLogger("treeckpt")


class _PendingSave(NamedTuple):
    step: CheckpointId
    name: str
    pending: Pending
    undo: Callable[[], None]


class PendingSaves:
    """The background saves that have not ended yet, or whose failure was not raised yet.

    Args:
        on_end: called after each save that has ended, with its report, None if it failed.
    """

    def __init__(self, on_end: Callable[[SaveReport | None], None]) -> None:
        self._on_end = on_end
        self._pending: list[_PendingSave] = []
        self._failed: list[Exception] = []
        self._starting: set[str] = set()
        self._claimed = ""
        self._lock = threading.Condition()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Drops all saves in a forked child: they belong to the parent."""
        self._pending, self._failed = [], []
        self._starting, self._claimed, self._lock = set(), "", threading.Condition()

    def add(self, step: CheckpointId, name: str, pending: Pending, undo: Callable[[], None]) -> None:
        """Adds a save that was started.

        Args:
            name: the directory's.
            undo: called if the save fails.
        """
        with self._lock:
            self._pending.append(_PendingSave(step, name, pending, undo))

    def busy(self) -> Set[str]:
        """Returns the names of the directories that are being saved."""
        with self._lock:
            return self._starting.union(save.name for save in self._pending)

    @contextlib.contextmanager
    def starting(self, name: str) -> Iterator[None]:
        """Protects a directory from clean-up while a save into it starts; waits for a clean-up that runs there."""
        with self._lock:
            self._lock.wait_for(lambda: self._claimed != name)
            self._starting.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._starting.discard(name)

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Reserves a directory for a clean-up while the body runs; gives False if it is being saved."""
        with self._lock:
            free = name not in self.busy()
            self._claimed = name if free else ""
        try:
            yield free
        finally:
            with self._lock:
                self._claimed = ""
                self._lock.notify_all()

    def settle(self, timeout: float | None = None) -> None:
        """Waits for all saves, at most so many seconds.

        Raises:
            The error of the first save that failed; CheckpointError if one has not ended in time.
        """
        if not self._wait(timeout):
            self._abandon(timeout or 0.0)
        if self._failed:
            error, self._failed = self._failed[0], []
            raise error

    def drain(self, timeout: float | None = None) -> None:
        """Waits for all saves, at most so many seconds; failures are only logged."""
        self._wait(timeout)
        self._failed.clear()

    def _abandon(self, timeout: float) -> None:
        """Drops the saves that have not ended: nothing waits for them any more, not even the end of the interpreter."""
        lost = {save.step: save.pending for save in self._pending if not save.pending.done()}
        for pending in lost.values():
            forget_at_exit(pending)
        with self._lock:
            self._pending.clear()
        raise CheckpointError(
            ", ".join(pending.path for pending in lost.values()),
            expected=f"the saves in flight to end within {timeout:g} s",
            found=f"no end of that of {', '.join(map(id_text, lost))}: "
            "it is lost unless it is committed before this process ends",
            hint="Wait longer, or restore an earlier step; what is committed stays valid",
        )

    def _wait(self, timeout: float | None = None) -> bool:
        """Waits for all saves; returns whether they have ended."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        for save in list(self._pending):
            limit = max(0.0, deadline - time.monotonic()) if deadline is not None else None
            if not save.pending.wait(limit):
                _log.error("saving %s has not ended yet", id_text(save.step))
                return False
            self._finish(save)
        return True

    def collect(self) -> None:
        """Removes the saves that have succeeded, without waiting.

        Failures stay until `settle` or the next save, which raise them on all ranks at the same call.
        """
        for save in reversed(list(self._pending)):
            if save.pending.done() and save.pending.unreported_error is None:
                self._finish(save)

    def _finish(self, save: _PendingSave) -> None:
        # The caller may have the error already, from `result` of the `Pending`.
        raised = save.pending.done() and save.pending.unreported_error is None
        report = None
        try:
            report = save.pending.result()
        except Exception as error:
            if not raised:
                _log.error("saving %s failed: %s", id_text(save.step), error)
                self._failed.append(error)
            save.undo()
        with self._lock:
            if save in self._pending:  # not where a signal handler has waited too
                self._pending.remove(save)
        self._on_end(report)


class RetentionRunner:
    """Applies the retention policies of a run, on rank 0.

    Args:
        pending: the saves of this process, whose directories are left alone.
    """

    def __init__(
        self,
        run: RunDirectory,
        policies: Sequence[Policy],
        selector: CheckpointSelector,
        pending: PendingSaves,
        *,
        grace: float,
    ) -> None:
        self.directory, self._policies, self._selector, self._pending, self._grace = (
            run,
            policies,
            selector,
            pending,
            grace,
        )
        self._last: Future[None] | None = None
        self._disks: RunDisks | None = None
        self._is_waiting = False
        """Whether a clean-up waits for the one before it; it sees all saves that end until it begins."""
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Drops the clean-up in a forked child: it belongs to the parent."""
        self._last, self._is_waiting = None, False

    def start(self, disks: RunDisks | None = None) -> None:
        """Starts a clean-up in the background, for which the end of the process waits; cleans up if that has begun.

        Args:
            disks: where ranks see several, what all have: this rank cleans up its own.
        """
        self._disks = disks
        if not self._is_waiting:
            self._is_waiting = True
            self._last = call_in_thread(partial(self._clean_and_log, self._last), "treeckpt-clean", awaited=True)

    def _clean_and_log(self, before: Future[None] | None) -> None:
        if before is not None:
            wait([before])
        self._is_waiting = False
        try:
            report = self._clean(dry_run=False, disks=self._disks)
        except Exception as error:
            self._selector.warn_once(self.directory.url, f"could not be cleaned up: {type(error).__name__}: {error}")
            return
        for warning in report.warnings:
            self._selector.warn_once(self.directory.url, warning)
        for failure in report.failed:
            self._selector.warn_once(failure.name, f"could not be cleaned away: {failure.why}")

    def _clean(self, *, dry_run: bool, disks: RunDisks | None) -> CleanReport:
        pending, completed = self._pending, ()
        if disks is not None and not dry_run:
            completed = complete_saves(self.directory, disks, pending.busy())
            spread_pins(self.directory, disks)
        report = self.directory.clean(
            self._policies,
            grace=self._grace,
            busy=pending.busy(),
            claim=pending.claim,
            dry_run=dry_run,
            disks=disks.state() if disks is not None else None,
        )
        report = msgspec.structs.replace(report, completed=completed)
        if report.removed and not dry_run:
            names: dict[str, list[str]] = {}
            for removal in report.removed:
                names.setdefault(f"{removal.what} ({removal.reason})", []).append(removal.name)
            _log.info(
                "%s: keep=%r removed %s",
                report.run,
                keep_text(self._policies),
                "; ".join(f"{what}: {', '.join(some)}" for what, some in names.items()),
            )
        return report

    def clean_now(self, *, dry_run: bool, disks: RunDisks | None = None) -> CleanReport:
        """Waits for the clean-up that was started last, then cleans up; `disks` as for `start`."""
        self.wait()
        return self._clean(dry_run=dry_run, disks=disks)

    def delete(self, step: CheckpointId, *, force: bool) -> None:
        """Waits for the clean-up that was started last, then deletes a step; see `RunDirectory.delete`."""
        self.wait()
        self.directory.delete(step, force=force, grace=self._grace, claim=self._pending.claim)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the clean-up that was started last, at most so many seconds."""
        if self._last is not None:
            with contextlib.suppress(TimeoutError):
                self._last.result(timeout)
