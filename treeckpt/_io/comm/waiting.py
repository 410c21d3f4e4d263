"""Waits for other ranks, and the notes of those that will not come.

A rank that calls alone (`if rank == 0: save(...)`) would wait for minutes without a line of log, so after `SLOW_WAIT`
seconds the missing ranks are logged. A launcher kills a process a few seconds after the signal, so from the signal on a
wait for a rank that sends no heartbeat for `TERMINATION.limit` seconds ends. A heartbeat is a counter that a thread
raises during a save, as long as this process listens for signals.

A rank that abandons a round, which is to leave it before its end, interrupted or because of an error, posts why under a
key of its own, then under one key for all ranks that somebody has abandoned the round; so others look at one key while
they wait. What the exception path cannot post, as an interrupt ends that too, is posted when the rank begins its next
round.

A process that ends by itself notes that too, for the rounds that it will not join: after all its saves have ended, and
after the handlers of atexit that the program has registered since the package was imported. Where another handler
makes a call after that, the note is removed when the rank joins the round, and posted again when it has left it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ..._threads import start_thread
from ...errors import RankError
from ..process import TERMINATION, call_at_end
from .comm import Comm, MessageStore, base_of
from .message_store import answer_limit, answers_within

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
            # who has sent no heartbeat is silent since the wait, or the signal, has begun
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
        # five in the time after which a rank counts as silent, so that some may come late
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


KEPT_NOTES = 8
"""Rounds whose notes a rank leaves in the store: background saves may still look for them."""
_POST_LIMIT = 5.0
"""Seconds in which the store has to take a note."""
_ENDED = "ended"
"""The key under which stands that a rank's process has ended."""
_JOINED: weakref.WeakSet[Comm] = weakref.WeakSet()
"""The comms of this process on which it has joined rounds, those that others have as base."""


def abandon_round(comm: Comm, number: int, error: BaseException) -> None:
    """Posts that this rank has abandoned a round; whatever becomes of the store, the round is known to be over here."""
    why = f"{type(error).__name__}" + (f": {error}" if str(error) else "")
    why = f"left this call by an error ({why:.300})" if isinstance(error, Exception) else f"was interrupted ({why})"
    state = comm.state
    state.abandoned, state.failed_at = max(state.abandoned, number), time.monotonic()
    state.unposted_notes.append((number, why))
    try:
        post_notes(comm)
    except KeyboardInterrupt:  # a second one
        post_notes(comm)
    leave_rounds(comm)


def join_rounds(comm: Comm) -> None:
    """Before this rank joins a round: posts its notes about earlier ones, and removes the one of its end."""
    base = base_of(comm)
    if not base.state.joined:
        with answers_within(answer_limit(comm.timeout)):
            base.drop([f"{_ENDED}/{base.rank}"])  # its own, or that of a process that was this rank before
        base.state.joined = True
        _JOINED.add(base)
        call_at_end(_note_ends, last=True)
    post_notes(comm)


def leave_rounds(comm: Comm) -> None:
    """After a round: where the process has noted its end before, it does so again."""
    if not call_at_end(_note_ends, last=True):
        note_end(comm)


def post_notes(comm: Comm) -> None:
    """Posts the notes that this rank could not post yet; removes those of long ago."""
    state = comm.state
    with contextlib.suppress(RankError), answers_within(_POST_LIMIT):
        while state.unposted_notes:
            number, why = state.unposted_notes[0]
            # the reason comes first: who finds the second key looks for it
            keys = [_why_key(number, comm.rank), _any_key(number)]
            comm.post(keys[0], why.encode())
            comm.post(keys[1], b"")
            state.posted_notes.append(keys)
            # after both posts: an interrupt in between has the note posted once more, and loses none
            state.unposted_notes.pop(0)
        while len(state.posted_notes) > KEPT_NOTES:
            comm.drop(state.posted_notes[0])
            state.posted_notes.pop(0)


def is_abandoned(comm: Comm, number: int) -> bool:
    """Whether a rank has abandoned a round."""
    return comm.wait([_any_key(number)], 0)[0] is not None


def reasons_of(comm: Comm, numbers: Iterable[int], ranks: Iterable[int]) -> dict[int, str]:
    """Returns which of these ranks have abandoned one of these rounds, and why."""
    ranks, known = list(ranks), dict[int, str]()
    for number in numbers:
        if is_abandoned(comm, number):
            reasons = comm.wait([_why_key(number, rank) for rank in ranks], 0)
            known |= {rank: why.decode() for rank, why in zip(ranks, reasons, strict=True) if why is not None}
    return known


def note_end(comm: Comm, limit: float = _POST_LIMIT) -> None:
    """Posts that this rank joins no further round; gives up after so many seconds."""
    base = base_of(comm)
    base.state.joined = False
    with contextlib.suppress(RankError), answers_within(limit):
        # this one first: others look for it where they find the second key
        base.post(f"{_ENDED}/{base.rank}", b"")
        base.post(_ENDED, b"")


def _note_ends() -> None:
    deadline = time.monotonic() + _POST_LIMIT
    for comm in list(_JOINED):
        note_end(comm, max(deadline - time.monotonic(), 0.0))


call_at_end(_note_ends, last=True)


def ended_ranks(comm: Comm, ranks: Iterable[int]) -> set[int]:
    """Returns which of these ranks' processes have noted that they end.

    A rank that calls after that removes its note, so the note counts once it has stood for a while.
    """
    base = base_of(comm)
    with answers_within(answer_limit(comm.timeout)):
        if base.wait([_ENDED], 0)[0] is None:
            return set()
        ranks = list(ranks)
        notes = base.wait([f"{_ENDED}/{rank}" for rank in ranks], 0)
    return {rank for rank, note in zip(ranks, notes, strict=True) if note is not None}


def _why_key(number: int, rank: int) -> str:
    return f"{number}/abandoned/{rank}"


def _any_key(number: int) -> str:
    return f"{number}/abandoned"
