"""Calls functions at the end of a process, also of one that multiprocessing has forked."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

_registered: set[Callable[[], object]] = set()
_called: set[Callable[[], object]] = set()
"""The functions whose turn has come: they are not called again."""


def is_ending() -> bool:
    """Whether this process has begun to end: a handler that is registered now may not be called any more."""
    util = sys.modules.get("multiprocessing.util")
    return not threading.main_thread().is_alive() or (util is not None and bool(util.is_exiting()))


def call_at_end(function: Callable[[], object]) -> bool:
    """Has a function called once at the end of this process and of its forked children.

    Returns:
        Whether it will be; False where its turn has passed.
    """
    if function in _called or (function not in _registered and is_ending()):
        return False
    if function in _registered:
        return True
    _registered.add(function)
    call = partial(_call_once, function)
    atexit.register(call)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        # a child that was forked ends without the handlers of atexit
        util.Finalize(None, call, exitpriority=100)
    return True


def _call_once(function: Callable[[], object]) -> None:
    if function not in _called:
        _called.add(function)
        function()


def _forget() -> None:
    _registered.clear()  # multiprocessing forgets what its parent has registered
    _called.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
