"""Connections that wait: no client keeps others out by what it does not send, or does not take.

A request's head has to be there within `head_seconds` of the connection's start, or of the head's first byte where
the connection has been used before, however slowly it comes; an answer has to go on being taken. Of connections that
have no request to be answered at most `MAX_WAITING` are open: another one closes the one that has waited longest.
Only requests that have been let in count towards the limit of those that are answered at a time; see `security`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_SECONDS", "MAX_WAITING", "protocol_of"]

HEAD_SECONDS = 10.0
TAKE_SECONDS = 60.0
"""Seconds in which a client has to take some more of its answer."""
MAX_WAITING = 256


class _Impatient(H11Protocol):
    """A connection with time limits."""

    head_seconds = HEAD_SECONDS
    waiting: dict[_Impatient, None]
    """The connections of a server that have no request to be answered, those that began to wait first at the front."""

    _head_limit: asyncio.TimerHandle | None = None
    _take_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._wait()
        self._expect_head()
        if len(self.waiting) > MAX_WAITING:
            next(iter(self.waiting)).give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._end_head_limit()
        self._end_take_limit()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self.waiting:
            self._expect_head()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.waiting.pop(self, None)
            self._end_head_limit()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_take_limit()
        self._take_limit = self.loop.call_later(TAKE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_take_limit()
        super().resume_writing()

    def give_up(self) -> None:
        """Closes a connection that has no request to be answered."""
        self.waiting.pop(self, None)
        self.transport.close()

    def _wait(self) -> None:
        self.waiting.pop(self, None)
        self.waiting[self] = None

    def _expect_head(self) -> None:
        if self._head_limit is None:
            self._head_limit = self.loop.call_later(self.head_seconds, self.give_up)

    def _end_head_limit(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _end_take_limit(self) -> None:
        if self._take_limit is not None:
            self._take_limit.cancel()
            self._take_limit = None


def protocol_of(head_seconds: float) -> type[asyncio.Protocol]:
    """The class of one server's connections."""
    members: dict[str, Any] = {"head_seconds": head_seconds, "waiting": {}}
    return type("Impatient", (_Impatient,), members)
