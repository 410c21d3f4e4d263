"""Waits for other ranks: logged when they are long, and cut short once a signal has told this process to end.

A rank that calls alone (`if rank == 0: save(...)`) would wait for minutes without a line. So after `SLOW_WAIT` seconds the
ranks that wait and the ranks that are missing are logged. A launcher kills a process a few seconds after the signal. So
from the signal on, a wait for a rank that sends no heartbeat for `TERMINATION.limit` seconds ends. A heartbeat is a number
under a key of the rank, which a thread raises during a save, as long as this process listens for signals.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ...errors import RankError
from .comm import MessageStore

__all__ = [
    "HEARTBEAT_TIMEOUT",
    "TERMINATION",
    "Termination",
    "log_if_slow",
    "log_waiting",
    "send_heartbeats",
    "silence_text",
    "wait_for",
]

SLOW_WAIT = 10.0
"""Seconds after which a wait for ranks that have not called is logged."""
HEARTBEAT_TIMEOUT = 5.0
"""Seconds without a heartbeat after which a wait for a rank ends, from the signal on."""
_HEARTBEAT_INTERVAL = 0.5
"""Seconds between two reads of the heartbeats of others, at most."""

_log = logging.getLogger("treeckpt")


class Termination:
    """Whether a signal has told this process to end. There is one for the process, as a signal is for all of it."""

    def __init__(self) -> None:
        self.limit = HEARTBEAT_TIMEOUT
        self.since: float | None = None
        """When the signal came."""
        self._listeners = 0

    @property
    def listening(self) -> bool:
        """Whether this process listens for signals: then it sends heartbeats during its saves."""
        return self._listeners > 0

    def listen(self, limit: float) -> None:
        """Begins to listen for signals."""
        if not self._listeners:
            self.since = None
        self._listeners, self.limit = self._listeners + 1, limit

    def leave(self, *, ended: bool) -> None:
        """Ends listening.

        Args:
            ended: nothing will be waited for because of the signal; otherwise waits stay cut short.
        """
        self._listeners -= 1
        if ended and not self._listeners:
            self.since = None

    def signal(self) -> None:
        """Notes that a signal has come. Safe in a signal handler: it takes no lock."""
        self.since = time.monotonic() if self.since is None else self.since

    def cut(self, seconds: float) -> float:
        """A time limit of a wait, and at most `limit` from the signal on."""
        return seconds if self.since is None else min(seconds, self.limit)


TERMINATION = Termination()


def wait_for(
    board: MessageStore,
    keys: Sequence[str],
    timeout: float,
    *,
    heartbeats: Sequence[str],
    grace: float = 1.0,
    late: Callable[[Sequence[int], float], None] | None = None,
) -> list[bytes | None]:
    """As `board.wait`; returns earlier if, after the signal, a sender sends no heartbeat.

    Args:
        heartbeats: for each key, the key of its sender's heartbeat.
        grace: how many times `TERMINATION.limit` to wait for a heartbeat.
        late: is called once after `SLOW_WAIT` seconds, with the positions of what is missing and the seconds.
    """
    found: list[bytes | None] = [None] * len(keys)
    missing = list(range(len(keys)))
    start = time.monotonic()
    notice, seen = start + SLOW_WAIT if late is not None else math.inf, {}
    while missing:
        now = time.monotonic()
        left = start + timeout - now
        pause = min(
            left,
            notice - now,
            _HEARTBEAT_INTERVAL if TERMINATION.listening or TERMINATION.since is not None else math.inf,
        )
        for i, message in zip(missing, board.wait([keys[i] for i in missing], max(pause, 0.0)), strict=True):
            found[i] = message
        missing = [i for i in missing if found[i] is None]
        if pause >= left or (
            TERMINATION.since is not None and _is_silent(board, [heartbeats[i] for i in missing], seen, start, grace)
        ):
            break
        if late is not None and missing and time.monotonic() >= notice:
            late(missing, SLOW_WAIT)
            notice = math.inf
    return found


def _is_silent(
    board: MessageStore,
    heartbeats: Sequence[str],
    seen: dict[str, tuple[bytes | None, float]],
    start: float,
    grace: float,
) -> bool:
    """Whether a sender has sent no heartbeat for too long.

    Args:
        seen: the last heartbeat of each, and when it was seen first; filled here.
    """
    now, begin = time.monotonic(), max(start, TERMINATION.since or 0.0)
    for key, count in zip(heartbeats, board.wait(heartbeats, 0.0), strict=True) if heartbeats else ():
        if key not in seen or seen[key][0] != count:
            seen[key] = count, begin if count is None else now
    return any(now - seen[key][1] > TERMINATION.limit * grace for key in heartbeats)


@contextlib.contextmanager
def send_heartbeats(boards: Callable[[], Sequence[MessageStore]], key: str) -> Iterator[None]:
    """Sends heartbeats of this rank while the body runs, if this process listens for signals."""
    if not TERMINATION.listening:
        yield
        return
    stop = threading.Event()

    def post() -> None:
        count = 0
        with contextlib.suppress(RankError):
            reached = boards()
            while not stop.wait(TERMINATION.limit / 5):
                count += 1
                for board in reached:
                    board.post(key, b"%d" % count)
            for board in reached if count else ():
                board.drop([key])

    threading.Thread(target=post, name="treeckpt-heartbeat", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


@contextlib.contextmanager
def log_if_slow(rank: int, topic: str) -> Iterator[None]:
    """Logs that a collective call takes long. Which ranks are missing is not known there."""
    timer = threading.Timer(SLOW_WAIT, log_waiting, (rank, (), SLOW_WAIT, topic))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_waiting(rank: int, late: Sequence[int], seconds: float, topic: str) -> None:
    """Logs a wait for other ranks: to stderr, unless logging is configured.

    Args:
        late: the ranks that are missing; none where they are not known.
    """
    names = ", ".join(map(str, late[:8])) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
    _log.warning(
        "treeckpt: rank %d has waited %g s for %s to make the same call (%s). Every rank calls save, and each method "
        'of a Manager; comm="alone" saves on one rank without talking to the others',
        *(rank, seconds, f"rank{'s' if len(late) > 1 else ''} {names}" if late else "other ranks", topic),
    )


def silence_text(seconds: float) -> str:
    """How long a rank has not answered, for errors."""
    if TERMINATION.since is None:
        return f"silent for {seconds:g} s"
    return f"silent for {min(seconds, TERMINATION.limit):g} s after a signal told this process to end"
