"""Waits for other ranks: long ones are logged, and all are cut short once a signal has told this process to end.

A rank that calls alone (`if rank == 0: save(...)`) would wait for minutes without a line of log, so after `SLOW_WAIT`
seconds the missing ranks are logged. A launcher kills a process a few seconds after the signal, so from the signal on a
wait for a rank that sends no heartbeat for `TERMINATION.limit` seconds ends. A heartbeat is a counter that a thread
raises during a save, as long as this process listens for signals.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..._threads import start_thread
from ...errors import RankError
from .comm import MessageStore
from .termination import TERMINATION

SLOW_WAIT = 10.0
"""Seconds after which a wait for ranks that have not called is logged."""
_HEARTBEAT_CHECK = 0.5
"""Seconds between two reads of the heartbeats of others, at most."""

WATCH_AFTER = 0.2
"""Seconds of a wait after which it is looked for notes of ranks that have left the round."""
WATCH_INTERVAL = 0.5
"""Seconds between two such looks; longer in worlds of more than 1024 ranks, which look at one server."""

_log = logging.getLogger("treeckpt")


def wait_for(
    store: MessageStore,
    keys: Sequence[str],
    timeout: float,
    *,
    heartbeats: Sequence[str],
    watch: Callable[[Sequence[int]], bool],
    interval: float = WATCH_INTERVAL,
    grace: float = 1.0,
    on_slow: Callable[[Sequence[int], float], None] | None = None,
) -> list[bytes | None]:
    """Waits for messages as `store.wait` does; returns earlier if, after the signal, a sender sends no heartbeat.

    Args:
        heartbeats: for each key, the key of its sender's heartbeat.
        watch: is called now and then, with the positions of the missing messages; where it returns True the wait ends.
        interval: seconds between two such calls.
        grace: how many times `TERMINATION.limit` to wait for a heartbeat.
        on_slow: is called once after `SLOW_WAIT` seconds, with the positions of the missing messages and the seconds.
    """
    messages: list[bytes | None] = [None] * len(keys)
    missing = list(range(len(keys)))
    start = time.monotonic()
    slow_at, seen = start + SLOW_WAIT if on_slow is not None else math.inf, {}
    watch_at = start + WATCH_AFTER
    while missing:
        now = time.monotonic()
        left = start + timeout - now
        checks = TERMINATION.listening or TERMINATION.signalled_at is not None
        pause = min(left, slow_at - now, watch_at - now, _HEARTBEAT_CHECK if checks else math.inf)
        for i, message in zip(missing, store.wait([keys[i] for i in missing], max(pause, 0.0)), strict=True):
            messages[i] = message
        missing = [i for i in missing if messages[i] is None]
        if pause >= left or (
            TERMINATION.signalled_at is not None
            and _is_silent(store, [heartbeats[i] for i in missing], seen, start, grace)
        ):
            break
        if missing and time.monotonic() >= watch_at:
            if watch(missing):
                break
            watch_at = time.monotonic() + interval
        if on_slow is not None and missing and time.monotonic() >= slow_at:
            on_slow(missing, SLOW_WAIT)
            slow_at = math.inf
    return messages


def _is_silent(
    store: MessageStore,
    heartbeats: Sequence[str],
    seen: dict[str, tuple[bytes | None, float]],
    start: float,
    grace: float,
) -> bool:
    """Returns whether a sender has been silent for too long; `seen` holds the last heartbeat of each, and its time."""
    now, begin = time.monotonic(), max(start, TERMINATION.signalled_at or 0.0)
    for key, count in zip(heartbeats, store.wait(heartbeats, 0.0), strict=True) if heartbeats else ():
        if key not in seen or seen[key][0] != count:
            seen[key] = count, begin if count is None else now
    return any(now - seen[key][1] > TERMINATION.limit * grace for key in heartbeats)


@contextlib.contextmanager
def send_heartbeats(stores: Callable[[], Sequence[MessageStore]], key: Callable[[], str]) -> Iterator[None]:
    """Sends heartbeats of this rank to `stores()` while the body runs, if this process listens for signals.

    Args:
        key: returns the key to post them under, which may change.
    """
    if not TERMINATION.listening:
        yield
        return
    stop = threading.Event()
    start_thread(partial(_post_heartbeats, stores, key, stop), "treeckpt-heartbeat")
    try:
        yield
    finally:
        stop.set()


def _post_heartbeats(
    stores: Callable[[], Sequence[MessageStore]], key: Callable[[], str], stop: threading.Event
) -> None:
    count, keys = 0, set[str]()
    with contextlib.suppress(RankError):
        connected = stores()
        while not stop.wait(TERMINATION.limit / 5):
            count += 1
            keys.add(now := key())
            for store in connected:
                store.post(now, b"%d" % count)
        for store in connected if count else ():
            store.drop(sorted(keys))


@contextlib.contextmanager
def log_if_slow(rank: int, topic: str) -> Iterator[None]:
    """Logs that a collective call takes long. Which ranks are missing is not known there."""
    over = threading.Event()
    start_thread(lambda: over.wait(SLOW_WAIT) or log_waiting(rank, (), SLOW_WAIT, topic), "treeckpt-slow")
    try:
        yield
    finally:
        over.set()


def log_waiting(rank: int, missing: Sequence[int], seconds: float, topic: str) -> None:
    """Logs a wait for other ranks, `missing` or unknown: to stderr, unless logging is configured."""
    names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    _log.warning(
        "treeckpt: rank %d has waited %g s for %s to make the same call (%s). Every rank calls save, and each method "
        'of a Manager; comm="alone" saves on one rank without talking to the others',
        *(rank, seconds, f"rank{'s' if len(missing) > 1 else ''} {names}" if missing else "other ranks", topic),
    )


def silence_text(seconds: float) -> str:
    """Returns the text for errors that says how long a rank has not answered."""
    if TERMINATION.signalled_at is None:
        return f"silent for {seconds:g} s"
    return f"silent for {min(seconds, TERMINATION.limit):g} s after a signal told this process to end"
