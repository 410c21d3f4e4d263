"""Waits for other ranks: with a word on stderr after a while, and cut short once this process was told to end.

A rank that calls alone (`if rank == 0: save(...)`) would wait for minutes without a line; so after `NOTICE` seconds it
is logged who waits for whom. A signal that tells the process to end is followed by a kill a few seconds later; so from
then on a rank that gives no sign for `ENDING.limit` seconds is given up. Ranks that are in the middle of a save give
signs, numbers that they post again and again, as long as somebody listens for signals.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ..core.errors import RankError
from .comm import Board

__all__ = ["ENDING", "LIMIT", "Ending", "give_signs", "noticing", "say_waiting", "silence", "wait_for"]

NOTICE = 10.0
"""Seconds after which a wait for ranks that have not called is mentioned."""
LIMIT = 5.0
"""Seconds without a sign after which a rank is given up, once this process was told to end."""
_LOOK = 0.5
"""Seconds between two looks at the signs of others, at most."""

_log = logging.getLogger("treeckpt")


class Ending:
    """Whether this process was told to end. A signal concerns the whole process, so there is one of these."""

    def __init__(self) -> None:
        self.limit = LIMIT
        self.since: float | None = None
        """When the signal came."""
        self._listeners = 0

    @property
    def listening(self) -> bool:
        """Whether signals are waited for: then ranks give signs during their saves."""
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

    def tell(self) -> None:
        """A signal is in. Safe in a signal handler: it takes no lock."""
        self.since = time.monotonic() if self.since is None else self.since

    def cut(self, seconds: float) -> float:
        """How long to wait where others may be given up at once."""
        return seconds if self.since is None else min(seconds, self.limit)


ENDING = Ending()


def wait_for(
    board: Board,
    keys: Sequence[str],
    timeout: float,
    *,
    signs: Sequence[str],
    grace: float = 1.0,
    late: Callable[[Sequence[int], float], None] | None = None,
) -> list[bytes | None]:
    """As `board.wait`; returns earlier once this process was told to end and a sender gives no sign.

    Args:
        signs: for each key, under which key its sender gives signs.
        grace: how many times `ENDING.limit` to wait for a sign.
        late: is called once after `NOTICE` seconds, with the positions of what is missing and the seconds.
    """
    found: list[bytes | None] = [None] * len(keys)
    missing = list(range(len(keys)))
    start = time.monotonic()
    notice, seen = start + NOTICE if late is not None else math.inf, {}
    while missing:
        now = time.monotonic()
        left = start + timeout - now
        pause = min(left, notice - now, _LOOK if ENDING.listening or ENDING.since is not None else math.inf)
        for i, message in zip(missing, board.wait([keys[i] for i in missing], max(pause, 0.0)), strict=True):
            found[i] = message
        missing = [i for i in missing if found[i] is None]
        if pause >= left or (
            ENDING.since is not None and _silent(board, [signs[i] for i in missing], seen, start, grace)
        ):
            break
        if late is not None and missing and time.monotonic() >= notice:
            late(missing, NOTICE)
            notice = math.inf
    return found


def _silent(
    board: Board, signs: Sequence[str], seen: dict[str, tuple[bytes | None, float]], start: float, grace: float
) -> bool:
    """Whether a sender has given no sign for too long.

    Args:
        seen: the last sign of each, and when it was seen first; filled here.
    """
    now, begin = time.monotonic(), max(start, ENDING.since or 0.0)
    for key, sign in zip(signs, board.wait(signs, 0.0), strict=True) if signs else ():
        if key not in seen or seen[key][0] != sign:
            seen[key] = sign, begin if sign is None else now
    return any(now - seen[key][1] > ENDING.limit * grace for key in signs)


@contextlib.contextmanager
def give_signs(boards: Callable[[], Sequence[Board]], key: str) -> Iterator[None]:
    """Gives signs of this rank while the body runs, if anybody listens for signals."""
    if not ENDING.listening:
        yield
        return
    stop = threading.Event()

    def beat() -> None:
        count = 0
        with contextlib.suppress(RankError):
            reached = boards()
            while not stop.wait(ENDING.limit / 5):
                count += 1
                for board in reached:
                    board.post(key, b"%d" % count)
            for board in reached if count else ():
                board.drop([key])

    threading.Thread(target=beat, name="treeckpt-sign", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


@contextlib.contextmanager
def noticing(rank: int, topic: str) -> Iterator[None]:
    """Says that a collective call, which does not tell who is missing, takes long."""
    timer = threading.Timer(NOTICE, say_waiting, (rank, (), NOTICE, topic))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say_waiting(rank: int, late: Sequence[int], seconds: float, topic: str) -> None:
    """Logs who waits for whom; without any configuration of logging it stands on stderr.

    Args:
        late: the ranks that are missing; none where they are not known.
    """
    names = ", ".join(map(str, late[:8])) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
    _log.warning(
        "treeckpt: rank %d has waited %g s for %s to make the same call (%s). Every rank calls save, and each method "
        'of a Manager; comm="alone" saves on one rank without talking to the others',
        *(rank, seconds, f"rank{'s' if len(late) > 1 else ''} {names}" if late else "other ranks", topic),
    )


def silence(seconds: float) -> str:
    """What is said of a rank that did not answer."""
    if ENDING.since is None:
        return f"silent for {seconds:g} s"
    return f"silent for {min(seconds, ENDING.limit):g} s after a signal told this process to end"
