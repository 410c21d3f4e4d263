"""Whether a signal has told this process to end: from then on, waits for other ranks and for stores are cut short."""

from __future__ import annotations

import time

HEARTBEAT_TIMEOUT = 5.0
"""Seconds without a heartbeat after which a wait for a rank ends, from the signal on."""


class Termination:
    """Whether a signal has told this process to end. There is one object per process, as signals are per process."""

    def __init__(self) -> None:
        self.limit = HEARTBEAT_TIMEOUT
        self.signalled_at: float | None = None
        """When the signal came, on the monotonic clock."""
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
