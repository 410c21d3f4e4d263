"""Keeps the signals that end a training from the worker processes of its data loaders.

torchrun and SLURM send the signal to every process of a rank. A worker of a `DataLoader` dies of it, torch raises
`RuntimeError: DataLoader worker ... is killed by signal` in the training, and the steps before the last save never
finish. A worker that starts while a manager listens is therefore started with the signals blocked: a new process has
the signal mask of the thread that starts it, whether it is forked or spawned. A forkserver that runs already has
its own mask, and its workers are not protected.

A blocked SIGTERM would make `terminate`, by which multiprocessing ends workers that are left at the end of the
training, wait for ever: such workers are killed, and reaped while torch's handler of SIGCHLD, which takes that for a
failure, is away. Other processes have the signals as before, but those that a worker starts, which it needs to go on,
have its mask.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from typing import Any

_LOADERS = ("torch.utils.data", "torchdata")
"""The packages whose functions the workers of data loaders run."""
_END = 5.0
"""Seconds to wait at most for the end of a killed worker; one that waits for a disk may take longer."""


class LoaderWorkers:
    """The signals that are blocked in new worker processes. There is one object per process."""

    def __init__(self) -> None:
        self._blocked: Counter[int] = Counter()
        self._installed = False
        """Whether `BaseProcess.start` is replaced; once it is, it stays so."""

    def block(self, signals: Iterable[int]) -> None:
        """Blocks signals in workers that are started from now on. Windows has no signals for groups of processes."""
        if not hasattr(signal, "pthread_sigmask"):
            return
        self._blocked.update(list(signals))
        if not self._installed and self._blocked:
            process_class: Any = BaseProcess
            process_class.start, self._installed = self._starting(BaseProcess.start), True

    def unblock(self, signals: Iterable[int]) -> None:
        """Undoes one `block`; workers that run keep their mask."""
        self._blocked.subtract(list(signals))

    def _starting(self, start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
        @wraps(start)
        def start_process(process: Any) -> None:
            blocked = +self._blocked
            if not blocked or not (getattr(process._target, "__module__", None) or "").startswith(_LOADERS):
                start(process)
                return
            before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            try:
                start(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            process._popen.terminate = partial(_kill, process._popen)

        return start_process


def _kill(popen: Any) -> None:
    """Kills a worker and waits for its end, without the handler of SIGCHLD.

    Blocking that signal is not enough: another thread gets it, and Python runs the handler in the main thread. In other
    threads handlers cannot be replaced, and torch's may raise in the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if is_main else None
    if before is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        popen.kill()
        popen.wait(_END)
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)


LOADER_WORKERS = LoaderWorkers()
