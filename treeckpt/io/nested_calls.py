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
from collections.abc import Callable
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

from ..errors import CheckpointError

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("treeckpt")
_calls: dict[CodeType, str] = {}
"""The code of the functions inside of which no save is made, with their names."""
_refused: list[str] = []
"""The saves that were refused and not logged yet."""


def takes_no_save(function: Callable[P, T], *, name: str = "") -> Callable[P, T]:
    """Has saves refused on a thread where this function is under way; `name` says what users call it.

    The error of a handler may be lost in the function, so refusals are logged at its end.
    """
    name = name or function.__qualname__
    _calls[function.__code__] = name  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result = function(*args, **kwargs)
        except BaseException:
            _refused.clear()
            raise
        if refused := _refused[:]:
            _refused.clear()
            _log.warning("inside of %s, %s was refused (%d calls)", name, refused[0], len(refused))
        return result

    return call


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
        while frame is not None and frame.f_code not in _calls:
            frame = frame.f_back
        if frame is None:
            return call(*args, **kwargs)
        outer = _calls[frame.f_code]
        kind = "save" if "ave" in outer else "call"
        _refused.append(name)
        raise CheckpointError(
            name,
            expected="to be called where no other call is under way on the thread",
            found=f"a {kind} is under way on this thread: {outer}, inside of which a handler, hook or finalizer saves",
            hint="Set a flag and save at the next step, as Manager.save_on_signal does",
        )

    return refuse_or_call
