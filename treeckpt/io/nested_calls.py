"""Refuses a save on a thread that is inside of another call of this package.

So it is for a save of a signal handler, a hook, a finalizer, or the `state_dict` of an object: it would wait for locks
that its own thread holds, or for what that thread was about to do. Which calls are under way is seen on the stack: a
call that was interrupted leaves nothing behind. Other calls, as loads, may be made inside of any call: the locks that
two calls share are reentrant.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

from ..errors import CheckpointError

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("treeckpt")
_calls: dict[CodeType, str] = {}
"""The code of the functions inside of which no save is made, with their names."""


class _Refusals(threading.local):
    """The saves of this thread that were refused and not logged yet, with their errors."""

    def __init__(self) -> None:
        self.saves: list[tuple[str, CheckpointError]] = []


_refused = _Refusals()


def takes_no_save(function: Callable[P, T], *, name: str = "") -> Callable[P, T]:
    """Has saves refused on a thread where this function is under way; `name` says what users call it.

    The error of a handler may be lost in the function, so refusals are logged at its end, except what it raises itself.
    """
    name = name or function.__qualname__
    _calls[function.__code__] = name  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        raised: BaseException | None = None
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raised = error
            raise
        finally:
            refused, _refused.saves = [save for save, error in _refused.saves if error is not raised], []
            if refused:
                _log.warning("inside of %s, %s was refused (%d calls)", name, refused[0], len(refused))

    return call


def call_back(function: Callable[[T], object], argument: T) -> None:
    """Calls a function of the user's when the call of this package has done its work: a save may be made in it."""
    function(argument)


def saves(function: Callable[P, T]) -> Callable[P, T]:
    """Refuses this function, which saves, on a thread where a call of this package is under way.

    Raises:
        CheckpointError: naming that call; or the modules of the interpreter are being torn down.
    """
    name, call = function.__qualname__, takes_no_save(function)

    @functools.wraps(function)
    def refuse_or_call(*args: P.args, **kwargs: P.kwargs) -> T:
        if sys.is_finalizing():
            raise CheckpointError(
                name,
                expected="to be called before the interpreter ends",
                found="its modules are being torn down already",
                hint="Save in the foreground before the interpreter ends: in a handler of atexit at the latest",
            )
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code not in _calls and frame.f_code is not call_back.__code__:
            frame = frame.f_back
        if frame is None or frame.f_code is call_back.__code__:
            return call(*args, **kwargs)
        outer = _calls[frame.f_code]
        kind = "save" if "ave" in outer else "call"
        refusal = CheckpointError(
            name,
            expected="to be called where no other call is under way on the thread",
            found=f"a {kind} is under way on this thread: {outer}, inside of which a handler, hook or finalizer saves",
            hint="Set a flag and save at the next step, as Manager.save_on_signal does",
        )
        _refused.saves.append((name, refusal))
        raise refusal

    return refuse_or_call
