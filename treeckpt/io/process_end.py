"""Calls functions at the end of a process, also of one that multiprocessing has forked."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

_registered: set[Callable[[], object]] = set()


def call_at_end(function: Callable[[], object]) -> None:
    """Has a function called once at the end of this process and of its forked children."""
    if function in _registered:
        return
    _registered.add(function)
    atexit.register(function)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        # a child that was forked ends without the handlers of atexit
        util.Finalize(None, function, exitpriority=100)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registered.clear)  # multiprocessing forgets what its parent has registered
