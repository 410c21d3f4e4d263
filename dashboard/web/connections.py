"""Time limits of connections: no client keeps others out by not sending its request, or by not reading its answer.

The request line and headers (the head) must arrive within `head_seconds` after the connection is opened, or after the
first byte of the head if the connection was used before. A client must keep reading its answer. At most `MAX_WAITING`
connections without a request to answer are open: a further one closes the one that has waited longest. Only requests
with a complete head count towards the limit of requests that are answered at a time; see `security`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
READ_SECONDS = 60.0
"""Seconds in which a client has to read some more of its answer."""
MAX_WAITING = 256


class _TimedConnection(H11Protocol):
    """A connection with time limits."""

    head_seconds = HEAD_SECONDS
    waiting: dict[_TimedConnection, None]
    """The connections of a server that have no request to answer; the one that has waited longest is first."""

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._start_waiting()
        self._expect_head()
        if len(self.waiting) > MAX_WAITING:
            next(iter(self.waiting)).close_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._cancel(self._head_timer, self._read_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self.waiting:
            self._expect_head()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.waiting.pop(self, None)
            self._cancel(self._head_timer)
            self._head_timer = None

    def on_response_complete(self) -> None:
        self._start_waiting()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel(self._read_timer)
        self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel(self._read_timer)
        super().resume_writing()

    def close_idle(self) -> None:
        """Closes a connection that has no request to answer."""
        self.waiting.pop(self, None)
        self.transport.close()

    def _start_waiting(self) -> None:
        self.waiting.pop(self, None)
        self.waiting[self] = None

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self.close_idle)

    @staticmethod
    def _cancel(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def protocol_of(head_seconds: float) -> type[asyncio.Protocol]:
    """Returns the class of the connections of one server."""
    members: dict[str, Any] = {"head_seconds": head_seconds, "waiting": {}}
    return type("TimedConnection", (_TimedConnection,), members)
