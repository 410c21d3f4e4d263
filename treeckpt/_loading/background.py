"""Loads in a thread of their own, beside what a program does at its start.

The end of the interpreter does not wait for a load whose result nobody has: its next read fails then.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from .._io.background_call import BackgroundCall
from .._io.process import call_before_threads_end
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.local_store import for_reading
from .._io.storage.open import open_store
from .._io.storage.wrapped_store import CountingStore
from .._threads import start_thread
from ..errors import CheckpointError
from .overlay import as_bank

_EXITING = threading.Event()
"""Set when the interpreter begins to end."""


class PendingLoad(BackgroundCall[Any]):
    """A load in the background, returned by `treeckpt.load_async`; its result is the tree.

    Attributes:
        path: of what is loaded.

    >>> pending = tc.load_async("run/step_00000100")
    >>> pending.result()["step"], pending.done()
    (100, True)
    """

    words = ("load", "loaded", "loads")

    def __repr__(self) -> str:
        state = "loading" if not self._is_finished else "failed" if self._error is not None else "loaded"
        return f"<PendingLoad {state} {self.path}>"


def start_load(path: Any, load: Callable[[Any], Any]) -> PendingLoad:
    """Starts a load in a thread; the current CUDA device is that of the caller's thread.

    Args:
        path: as given to `treeckpt.load`.
        load: loads from what it is given in the place of the path.
    """
    pending, set_device = PendingLoad(str(getattr(path, "url", path))), _device_setter()
    _watch_exit()

    def run() -> None:
        result, error = None, None
        try:
            # the current CUDA device belongs to a thread: in a new one it is device 0
            set_device()
            result = load(_stopped_at_exit(path))
        except BaseException as failed:
            error = failed
        pending.set_finished(result, error)

    if start_thread(run, "treeckpt-load") is None:
        # where no thread can be started the caller waits for the load here
        run()
    return pending


def _device_setter() -> Callable[[], None]:
    """Returns a function that makes the caller's CUDA device the current one of another thread."""
    if "torch" not in sys.modules:
        return lambda: None
    from .._arrays.cuda_copies import device_setter

    return device_setter()


@functools.cache
def _watch_exit() -> None:
    call_before_threads_end(_EXITING.set)


def _stopped_at_exit(path: Any) -> Any:
    """Returns what is read in the place of a path, with reads that fail once the interpreter is ending."""
    bank = as_bank(path)
    if bank is not None:
        return bank.opened(list(map(_stopped_at_exit, bank.paths)))
    return path if isinstance(path, Checkpoint) else CountingStore(for_reading(open_store(path)), _check_exit)


def _check_exit(nbytes: int) -> None:
    if _EXITING.is_set():
        raise CheckpointError("load_async", expected="a result that is waited for", found="the end of the process")
