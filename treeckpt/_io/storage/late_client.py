"""Clients of object stores that are opened when they are first used: to open one takes several milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..._threads import start_unnamed_thread


class LateClient:
    """A client that `get` opens once.

    Args:
        make: opens it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, threading.RLock()
        self._client: Any = None

    def get(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    def open_soon(self) -> None:
        """Opens it in another thread, which has Python's global lock when this one waits for the network."""
        if self._client is None:
            start_unnamed_thread(self.get)  # start_thread would wait until the client is open
