"""Calls functions at the end of a process, also of one that multiprocessing has forked, and at the begin of forks.

The function that was registered last is called first. One that is to be called after the others, whichever of them is
needed first, is registered when its module is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

_registered: set[Callable[[], object]] = set()
_finalizers: set[Callable[[], object]] = set()
"""The functions that multiprocessing calls in this child."""
_called: set[Callable[[], object]] = set()
"""The functions whose turn has come: they are not called again."""


def is_ending() -> bool:
    """Whether this process has begun to end: a handler that is registered now may not be called any more."""
    util = sys.modules.get("multiprocessing.util")
    return not threading.main_thread().is_alive() or (util is not None and bool(util.is_exiting()))


def call_at_end(function: Callable[[], object], *, last: bool = False) -> bool:
    """Has a function called once at the end of this process and of its forked children.

    Args:
        last: whether it comes after the others. Such a function is registered when its module is imported, and again
            where it is needed: a child of multiprocessing knows nothing of what was registered before it began.

    Returns:
        Whether it will be; False where its turn has passed.
    """
    process = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    if function in _called or (function not in (_finalizers if is_child else _registered) and is_ending()):
        return False
    call = partial(_call_once, function)
    if function not in _registered:
        _registered.add(function)
        atexit.register(call)
    if is_child and function not in _finalizers:
        from multiprocessing import util

        # a child that was forked ends without the handlers of atexit
        _finalizers.add(function)
        util.Finalize(None, call, exitpriority=99 if last else 100)
    return True


def _call_once(function: Callable[[], object]) -> None:
    if function not in _called:
        _called.add(function)
        function()


def _forget() -> None:
    _finalizers.clear()  # multiprocessing forgets them, and atexit knows its handlers still
    _called.clear()


def call_in_forks(function: Callable[[], object]) -> None:
    """Has a function called in each child that is forked from this process: memory is inherited, and no thread is."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


call_in_forks(_forget)


def call_before_threads_end(function: Callable[[], object]) -> None:
    """Has a function called before the end of the interpreter waits for threads, which is before `call_at_end`.

    Where the end has begun, or the interpreter has no such hook, it is not called.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        if register is not None:
            register(function)
