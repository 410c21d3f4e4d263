"""A call that runs in the background: its result, its error, and the functions that are called at its end."""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar

from ..errors import CheckpointError
from .process import OwnProcess

T = TypeVar("T")
_log = logging.getLogger("treeckpt")


class BackgroundCall(Generic[T]):
    """The future of a save or a load.

    Attributes:
        path: of the checkpoint.
    """

    words: ClassVar[tuple[str, str, str]]
    """The name of the call, what is being done, and who does it: ("save", "saved", "saves")."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._owner = OwnProcess()
        self._result: Any = None
        self._error: BaseException | None = None
        self._error_reported = False
        self._is_finished, self._callbacks = False, collections.deque[Callable[[Any], object]]()
        self._calls_back = True
        """Whether callbacks are kept for the thread that ends the call: until it has called all."""
        self._changed = threading.Condition()
        """Told of each change. Its lock, unlike that of an event, may be taken once more by a signal handler."""

    def result(self, timeout: float | None = None) -> T:
        """Waits for the end, and returns the result.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: it has not ended, and goes on.
            TreeckptError: it failed, for the reason that this error gives. Or this process was forked meanwhile.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self.path}: still being {self.words[1]} after {timeout} s")
        self._error_reported = True
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether it has ended, with or without an error.

        Raises:
            TreeckptError: this process was forked meanwhile, so it cannot know.
        """
        self._check_owner(self._is_finished)
        return self._is_finished

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, with or without an error; returns False if it did not come in time."""
        self._check_owner(self._is_finished)
        return self._wait_for(lambda: self._is_finished, timeout)

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        if condition():
            return True
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Calls a function with this object once the call has ended, with or without an error.

        It is called in the thread that ends the call, in this one if that has ended already and all that were added
        before have been called; several in the order in which they were added. An exception of it is logged.
        """
        with self._changed:
            if self._calls_back:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def set_finished(self, result: T | None, error: BaseException | None) -> None:
        """Marks the call as ended, for the code that carries it out."""
        # before the flag: who finds it set reads these without the lock
        self._result, self._error = result, error
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
        while True:
            with self._changed:
                self._calls_back = bool(self._callbacks)
                if not self._calls_back:
                    return
                callback = self._callbacks.popleft()
            self._call(callback)  # without the lock, which others may wait for while it runs

    def _call(self, callback: Callable[[Self], object]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("%s: a callback of the %s failed", self.path, self.words[0])

    def _check_owner(self, is_over: bool) -> None:
        """Refuses to wait in a forked child, where no thread is left that could end the call."""
        if not is_over and not self._owner.is_this:
            call, _, does = self.words
            raise CheckpointError(
                self.path,
                expected=f"a call in process {self._owner.pid}, which {does}",
                found=f"one in process {os.getpid()}, forked from it while the {call} was under way",
                hint=f"Call it in the process that began the {call}; a forked child may begin a {call} of its own",
            )
