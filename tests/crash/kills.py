"""Killing a process at one call after another: a fork for each kill, told apart by what it was about to call."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from tests.helpers.world import Switch
from treeckpt._io.comm import waiting as waiting_rules
from treeckpt._io.comm.comm import Comm

__all__ = ["impatient_once", "killed", "switched"]


class _Os:
    """os with a switch at some of its calls, of `open` at those that write a file or sync a directory."""

    def __init__(self, switch: Switch, calls: Sequence[str]) -> None:
        self.switch, self.calls = switch, calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.calls:
            return real

        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
                return real(*args, **options)
            return self.switch(name, lambda: real(*args, **options))

        return call


@contextlib.contextmanager
def switched(switch: Switch, calls: Sequence[str], modules: Sequence[ModuleType]) -> Iterator[None]:
    """Puts the switch at these calls of `os`, where these modules make them."""
    changed: list[Any] = list(modules)
    for module in changed:
        module.os = _Os(switch, calls)
    try:
        yield
    finally:
        for module in changed:
            module.os = os


def impatient_once(dead: Callable[[], bool], comm: Comm, *, seconds: float) -> None:
    """Has a comm take others for silent after so many seconds, but only once one is dead: all others may be slow.

    A wait is one wait then: no looks for the notes of interrupted ranks, which a dead one has not written.
    """
    waiting_rules.WATCH_AFTER = math.inf
    wait, patience = comm.wait, comm.timeout

    def waiting(keys: Sequence[str], timeout: float) -> list[bytes | None]:
        while True:
            over = not timeout or dead()
            found = wait(keys, timeout * seconds / patience if over else 0.05)
            if over or None not in found:
                return found

    comm.wait = waiting  # pyright: ignore[reportAttributeAccessIssue]


def killed(at: int, act: Callable[[Switch], None], *, after: bool) -> str:
    """Forks, and has the child killed before or after call number `at` of what it does; gives that call, "" if none."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:

        def kill(name: str) -> None:
            os.write(tell, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)

        act(Switch(at, after=after, act=kill))
        os._exit(0)
    os.close(tell)
    call = os.read(told, 1000).decode()
    os.close(told)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) == bool(call), status
    return call
