"""Saves in flight, and the clean-up after each: what a manager has under way on one rank.

Cleaning runs in a thread of its own, one at a time, so that deleting terabytes holds no training up; it never makes a
save fail, only says what it could not do.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

from ..core.analysis.retention_policy import Policy
from ..core.format.file_names import step_name
from ..errors import CheckpointError
from ..saving.at_exit import forget_at_exit, reset_after_fork
from ..saving.future import Pending
from .run import CleanReport, RunDirectory
from .select import CheckpointSelector

__all__ = ["PendingSaves", "RetentionRunner"]

_log = logging.getLogger("treeckpt")


class PendingSaves:
    """The background saves that have not ended yet, or whose failure nobody has been told of.

    Args:
        landed: called after each that has ended.
    """

    def __init__(self, landed: Callable[[], None]) -> None:
        self._landed = landed
        self._pending: list[tuple[int, Pending]] = []
        self._undo: dict[Pending, Callable[[], None]] = {}
        self._failed: list[Exception] = []
        self._starting: set[str] = set()
        self._claimed = ""
        self._lock = threading.Condition()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: the saves are its parent's."""
        self._pending, self._undo, self._failed = [], {}, []
        self._starting, self._claimed, self._lock = set(), "", threading.Condition()

    def add(self, step: int, pending: Pending, undo: Callable[[], None]) -> None:
        """Takes a save in.

        Args:
            undo: called if it fails.
        """
        with self._lock:
            self._pending.append((step, pending))
            self._undo[pending] = undo

    def busy(self) -> Set[str]:
        """The directories that are being saved."""
        with self._lock:
            return self._starting.union(step_name(step) for step, _ in self._pending)

    @contextlib.contextmanager
    def starting(self, step: int) -> Iterator[None]:
        """Keeps a directory from being cleaned up while a save into it begins; waits for a clean-up that is at it."""
        name = step_name(step)
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
        """Has a directory for a clean-up while the body runs; gives whether it is to be had."""
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
        """Waits for all of them, at most so many seconds.

        Raises:
            What the first that failed came to; CheckpointError where one has not ended in time.
        """
        if not self._wait(timeout):
            self._give_up(timeout or 0.0)
        if self._failed:
            error, self._failed = self._failed[0], []
            raise error

    def drain(self, timeout: float | None = None) -> None:
        """Waits for all of them, at most so many seconds; what failed is only logged."""
        self._wait(timeout)
        self._failed.clear()

    def _give_up(self, timeout: float) -> None:
        """Lets go of what has not ended: nothing waits for it any more, the end of the interpreter neither."""
        lost = {step: pending for step, pending in self._pending if not pending.done()}
        for pending in lost.values():
            forget_at_exit(pending)
        with self._lock:
            self._pending.clear()
            self._undo.clear()
        raise CheckpointError(
            ", ".join(pending.path for pending in lost.values()),
            expected=f"the saves in flight to end within {timeout:g} s",
            found=f"no end of that of {'step' if len(lost) == 1 else 'steps'} {', '.join(map(str, lost))}: "
            "it is lost unless it is committed before this process ends",
            hint="Wait longer, or restore an earlier step; what is committed stays valid",
        )

    def _wait(self, timeout: float | None = None) -> bool:
        """Whether all have ended."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while self._pending:
            limit = max(0.0, deadline - time.monotonic()) if deadline is not None else None
            if not self._pending[0][1].wait(limit):
                _log.error("saving step %d has not ended yet", self._pending[0][0])
                return False
            self._take(0)
        return True

    def collect(self) -> None:
        """Notes what has ended well, without waiting.

        Failures stay for `settle`, or for the next save: both tell all ranks alike, whenever each noticed.
        """
        for position, (_, pending) in reversed(list(enumerate(self._pending))):
            if pending.done() and pending.unreported_error is None:
                self._take(position)

    def _take(self, position: int) -> None:
        step, pending = self._pending[position]
        told = pending.done() and pending.unreported_error is None
        try:
            pending.result()
        except Exception as error:
            if not told:
                _log.error("saving step %d failed: %s", step, error)
                self._failed.append(error)
            self._undo[pending]()
        with self._lock:
            self._pending.pop(position)
            self._undo.pop(pending)
        self._landed()


class RetentionRunner:
    """Cleans a run up, on rank 0.

    Args:
        flights: tell what this process is saving.
    """

    def __init__(
        self,
        run: RunDirectory,
        policies: Sequence[Policy],
        finder: CheckpointSelector,
        flights: PendingSaves,
        *,
        grace: float,
    ) -> None:
        self._run, self._policies, self._finder, self._flights, self._grace = run, policies, finder, flights, grace
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        reset_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: the thread is its parent's."""
        self._pool = self._last = None

    def start(self) -> None:
        """Cleans up soon, beside whatever comes next."""
        self._pool = self._pool or ThreadPoolExecutor(1, "treeckpt-clean")
        self._last = self._pool.submit(self._quietly)

    def _quietly(self) -> None:
        try:
            report = self._clean(dry_run=False)
        except Exception as error:
            self._finder.say(self._run.url, f"could not be cleaned up: {type(error).__name__}: {error}")
            return
        for warning in report.warnings:
            self._finder.say(self._run.url, warning)
        for one in report.failed:
            self._finder.say(one.name, f"could not be cleaned away: {one.why}")

    def _clean(self, *, dry_run: bool) -> CleanReport:
        flights = self._flights
        return self._run.clean(
            self._policies, grace=self._grace, busy=flights.busy(), claim=flights.claim, dry_run=dry_run
        )

    def sweep(self, *, dry_run: bool) -> CleanReport:
        """Cleans up now, after what was started."""
        self.wait()
        return self._clean(dry_run=dry_run)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the clean-up that was started last, at most so many seconds."""
        if self._last is not None:
            with contextlib.suppress(TimeoutError):
                self._last.result(timeout)

    def close(self, *, wait: bool = True) -> None:
        """Lets the thread go, and waits for it; it can be started again."""
        if self._pool is not None:
            self._pool.shutdown(wait)
            self._pool = None
