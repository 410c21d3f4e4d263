"""This process: who it is to others, what is called at its end and in its forks, and the signal that tells it to end.

The kernel knows the processes of this boot of this host, in the process namespace of this process: in a container the
same pid is another process. Whether any other process runs is not known here.

Of the functions that are called at the end the one that was registered last is called first, also in a process that
multiprocessing has forked. One that is to be called after the others, whichever of them is needed first, is registered
when its module is imported.

Late requests are those to an object store for which no caller waits: they remove small files, and complete timings. The
end of the process waits for them, `MAX_WAIT_SECONDS` at most, and says so after `SILENT_SECONDS`. What does not arrive
harms nothing: the next clean-up removes the records and leases of a process that has ended.

From the signal on waits for other ranks and for stores are cut short.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from .._core.format.files import Owner
from .._threads import start_thread
from ..errors import visible

_registered: set[Callable[[], object]] = set()
_finalizers: set[Callable[[], object]] = set()
"""The functions that multiprocessing calls in this child."""
_called: set[Callable[[], object]] = set()
"""The functions whose turn has come: they are not called again."""


def is_ending() -> bool:
    """Whether this process has begun to end: a handler that is registered now may not be called any more."""
    util = sys.modules.get("multiprocessing.util")
    return not threading.main_thread().is_alive() or (util is not None and bool(util.is_exiting()))


_umask_lock = threading.RLock()
"""Held while the umask is asked for by setting it."""


def umask_of_process() -> int:
    """Returns the permissions that new files of this process do not get; another thread that makes one is not harmed.

    Where the kernel does not tell it (Linux does), it is set for a moment, to one by which nothing is opened wider.
    """
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    with _umask_lock:
        umask = os.umask(0o077)
        os.umask(umask)
    return umask


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
        # multiprocessing calls functions of a higher priority first
        util.Finalize(None, call, exitpriority=99 if last else 100)
    return True


def _call_once(function: Callable[[], object]) -> None:
    if function not in _called:
        _called.add(function)
        function()


def call_in_forks(function: Callable[[], object]) -> None:
    """Has a function called in each child that is forked from this process: memory is inherited, and no thread is."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def call_before_threads_end(function: Callable[[], object]) -> None:
    """Has a function called before the end of the interpreter waits for threads, which is before `call_at_end`.

    Where the end has begun, or the interpreter has no such hook, it is not called.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        if register is not None:
            register(function)


class OwnProcess:
    """The process in which something was made: a forked child inherits memory, but no thread, connection or lease."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether it is the process that asks, not one that was forked from it."""
        return os.getpid() == self.pid


@lru_cache(maxsize=1)
def this_process() -> Owner:
    """Returns the identity of this process; a forked child has its own."""
    pid = os.getpid()
    return Owner(socket.gethostname(), pid, _boot_id(), _stat(pid)[1])


def usable_cpus() -> int:
    """Returns the number of processors that this process may run on; of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _boot_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[bool, int]:
    """Returns whether a process is a zombie without live threads, and its start time; (False, 0) if not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # the program's name stands in parentheses and may contain some; the third field of proc(5) comes behind it
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] in "ZX" and int(fields[17]) <= 1, int(fields[19])
    return False, 0


def is_running(owner: Owner) -> bool | None:
    """Whether a process still runs; None if that cannot be known here."""
    here = this_process()
    if owner == here:
        return True
    # to a signal a pid of 0 or less means a group of processes
    if not here.boot or (owner.host, owner.boot) != (here.host, here.boot) or owner.pid <= 0:
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to another user
        pass
    ended, started = _stat(owner.pid)
    return not ended and (not started or started == owner.started)


SILENT_SECONDS = 1.0
MAX_WAIT_SECONDS = 30.0

_running: dict[threading.Event, str] = {}
"""The late requests under way: the event that is set at the end of each, and the URL of its store."""
_being_deleted: set[str] = set()
"""The names of files that are being deleted: to a clean-up these are gone already."""


def send_late(url: str, send: Callable[[], object]) -> threading.Event | None:
    """Calls a function in a thread; returns what is set at its end.

    Returns None, and calls nothing, where no thread can be started, or the end of the process does not wait any more.
    """
    over = threading.Event()

    def call() -> None:
        try:
            send()
        finally:
            _running.pop(over, None)
            over.set()

    # before the thread starts: the end of the process waits for what it finds here
    _running[over] = url
    if call_at_end(_finish) and start_thread(call, "treeckpt-late") is not None:
        return over
    _running.pop(over)
    return None


def delete_late(url: str, name: str, delete: Callable[[], object]) -> None:
    """Calls `delete`, which deletes the file `name`, as `send_late` does; or here."""

    def call() -> None:
        try:
            delete()
        finally:
            _being_deleted.discard(name)

    _being_deleted.add(name)
    if send_late(url, call) is None:
        call()


def names_being_deleted() -> frozenset[str]:
    """Returns the names of the files that threads of this process are deleting."""
    return frozenset(_being_deleted)


def _finish() -> None:
    """Waits for the requests that are under way, at the end of the process."""
    begin, waiting = time.monotonic(), dict(_running)
    # an interrupt ends the wait: what does not arrive harms nothing
    with contextlib.suppress(KeyboardInterrupt):
        for over, url in waiting.items():
            if over.wait(max(0.0, begin + SILENT_SECONDS - time.monotonic())):
                continue
            if sys.stderr is not None:
                text = f"treeckpt: waiting for the last requests to {url}, for at most {MAX_WAIT_SECONDS:.0f} s"
                print(visible(text), file=sys.stderr, flush=True)
            break
        for over in waiting:
            over.wait(max(0.0, begin + MAX_WAIT_SECONDS - time.monotonic()))


def _forget_parent() -> None:
    """Forgets in a forked child what its parent does: late requests, and finalizers, which multiprocessing forgets."""
    for kept in (_finalizers, _called, _running, _being_deleted):
        kept.clear()
    this_process.cache_clear()


call_in_forks(_forget_parent)


HEARTBEAT_TIMEOUT = 5.0
"""Seconds without a heartbeat after which a wait for a rank ends, from the signal on."""


class Termination:
    """Whether a signal has told this process to end. There is one object per process, as signals are per process."""

    def __init__(self) -> None:
        self.limit = HEARTBEAT_TIMEOUT
        self.signalled_at: float | None = None
        """The moment at which the signal came, on the monotonic clock; None without one."""
        self._listeners = 0

    @property
    def listening(self) -> bool:
        """Whether this process listens for signals: then it sends heartbeats during its saves."""
        return self._listeners > 0

    def start_listening(self, limit: float) -> None:
        """Begins to listen for signals."""
        if not self._listeners:
            self.signalled_at = None
        self._listeners, self.limit = self._listeners + 1, limit

    def stop_listening(self, *, ended: bool) -> None:
        """Ends listening; after `ended` no further wait is cut short by the signal, otherwise waits stay cut short."""
        self._listeners -= 1
        if ended and not self._listeners:
            self.signalled_at = None

    def record_signal(self) -> None:
        """Records that a signal has come. Safe in a signal handler: it takes no lock."""
        self.signalled_at = time.monotonic() if self.signalled_at is None else self.signalled_at

    def limit_timeout(self, seconds: float) -> float:
        """Returns the time limit of a wait: at most `limit` from the signal on."""
        return seconds if self.signalled_at is None else min(seconds, self.limit)

    def expired(self, begin: float) -> bool:
        """Whether a wait that began at `begin`, on the monotonic clock, has gone on for `limit` since the signal."""
        since = self.signalled_at
        return since is not None and time.monotonic() - max(begin, since) > self.limit


TERMINATION = Termination()
