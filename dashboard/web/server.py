"""Starts the server, and prints the address to open. No client keeps others out by not sending, or by not reading.

The request line and headers (the head) must arrive within `head_seconds` after the connection is opened, or after the
first byte of the head if the connection was used before. A client must keep reading its answer. At most `MAX_WAITING`
connections without a request to answer are open: a further one closes the one that has waited longest. Only requests
with a complete head count towards the limit of requests that are answered at a time; see `security`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from treeckpt._runs.verification import user_name
from treeckpt.errors import TreeckptError
from treeckpt.policy import parse_keep

from .app import create_app
from .security import LOOPBACK_HOSTS

HEAD_SECONDS = 10.0
READ_SECONDS = 60.0
"""Seconds in which a client has to read some more of its answer."""
MAX_WAITING = 256
MIN_TOKEN = 12
"""Characters of a token."""
MAX_HEAD = 32 << 10
"""Bytes of the request line and headers of a request."""


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
        # At the end of the dict, whose first one is closed where too many wait.
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


class ServeError(Exception):
    """The server cannot start with these arguments."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def serve(
    runs: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8265,
    token: str | None = None,
    root_path: str = "",
    allowed_hosts: Sequence[str] = (),
    cache: str | Path | None = None,
    keep: str = "",
    head_seconds: float = HEAD_SECONDS,
    started: Callable[[str], None] | None = None,
) -> int:
    """Serves until interrupted; returns the exit code.

    Args:
        port: 0 takes a free one.
        token: an empty one is replaced by a random one; None requires none, which only loopback addresses allow.
        allowed_hosts: Host headers to answer besides those of the address itself.
        cache: the cache directory; None takes the user's own.
        keep: the retention policies of the runs, as in `treeckpt.policy`.
        head_seconds: seconds in which a client has to send the request line and headers.
        started: is called with the address to open, once connections are accepted; by default it is printed.

    Raises:
        ServeError: another machine can reach the address and there is no token, the address is not available, or an
            argument is not valid.
    """
    token = _checked_token(token, host)
    hosts = {*LOOPBACK_HOSTS, *_own_names(host), *allowed_hosts}
    try:
        app = create_app(
            runs, token=token, root_path=root_path, allowed_hosts=hosts, cache=cache, policies=parse_keep(keep)
        )
    except (ValueError, TreeckptError) as error:
        raise ServeError(str(error)) from error
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    address = _address(host, port, token)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        http=protocol_of(head_seconds),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=3,
    )
    # threads that read directories and indexes must not delay answers: by default each runs for 5 ms at a time
    sys.setswitchinterval(0.001)
    gc.freeze()  # modules and routes stay for good: each full collection would visit them, for some 40 ms
    with listening:
        (started or partial(_announce, host=host, port=port))(address)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    return 0


def _checked_token(token: str | None, host: str) -> str | None:
    """Returns the token to require, a random one for an empty one; refuses short ones, and none beyond loopback."""
    if token is None and not is_loopback(host):
        raise ServeError(f"{host} is reachable from other machines: give --token as well")
    if token is not None and 0 < len(token) < MIN_TOKEN:
        raise ServeError(f"a token needs at least {MIN_TOKEN} characters; leave it empty for a random one")
    return secrets.token_urlsafe(24) if token == "" else token


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    try:
        if sys.platform != "win32":  # where it would let a second server take the same port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
        listening.listen(128)  # from now on connections wait for the server instead of being refused
    except (OSError, OverflowError) as error:
        listening.close()
        used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        hint = "; --port 0 takes a free one" if used else ""
        raise ServeError(f"{host}:{port} cannot be listened on: {error}{hint}") from error
    return listening


def _own_names(host: str) -> set[str]:
    name = f"[{host.strip('[]')}]" if ":" in host else host
    return {name, socket.gethostname()} if not is_loopback(host) else {name}


def _address(host: str, port: int, token: str | None) -> str:
    unspecified = host in ("0.0.0.0", "::")
    name = socket.gethostname() if unspecified else f"[{host.strip('[]')}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


def announce_json(address: str) -> None:
    """Prints the address as one line of JSON: what `--json` passes to `serve` as `started`."""
    print(msgspec.json.encode({"url": address, "pid": os.getpid()}).decode(), flush=True)


def _announce(address: str, host: str, port: int) -> None:
    print(f"treeckpt dashboard: {address}", flush=True)
    if is_loopback(host):
        print(
            f"from another machine: ssh -L {port}:127.0.0.1:{port} {user_name()}@{socket.gethostname()}",
            flush=True,
        )
    if sys.stdout.isatty():
        print("Ctrl-C ends it.", flush=True)
