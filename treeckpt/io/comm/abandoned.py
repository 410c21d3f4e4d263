"""Notes of ranks that abandon a round, which is to leave it before its end: interrupted, or because of an error.

Such a rank posts why under a key of its own, then under one key for all ranks that somebody has abandoned the round; so
others look at one key while they wait. What the exception path cannot post, as an interrupt ends that too, is posted
when the rank begins its next round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from ...errors import RankError
from .comm import Comm
from .message_store import answers_within

KEPT_NOTES = 8
"""Rounds whose notes a rank leaves in the store: background saves may still look for them."""
_POST_LIMIT = 5.0
"""Seconds in which the store has to take a note."""


def abandon_round(comm: Comm, number: int, error: BaseException) -> None:
    """Posts that this rank has abandoned a round; whatever becomes of the store, the round is known to be over here."""
    why = f"{type(error).__name__}" + (f": {error}" if str(error) else "")
    why = f"left this call by an error ({why:.300})" if isinstance(error, Exception) else f"was interrupted ({why})"
    state = comm.state
    state.abandoned, state.abandoned_at = max(state.abandoned, number), time.monotonic()
    state.unposted_notes.append((number, why))
    try:
        post_notes(comm)
    except KeyboardInterrupt:  # a second one
        post_notes(comm)


def post_notes(comm: Comm) -> None:
    """Posts the notes that this rank could not post yet; removes those of long ago."""
    state = comm.state
    with contextlib.suppress(RankError), answers_within(_POST_LIMIT):
        while state.unposted_notes:
            number, why = state.unposted_notes[0]
            keys = [_why_key(number, comm.rank), _any_key(number)]
            comm.post(keys[0], why.encode())
            comm.post(keys[1], b"")
            state.posted_notes.append(keys)
            state.unposted_notes.pop(0)
        while len(state.posted_notes) > KEPT_NOTES:
            comm.drop(state.posted_notes[0])
            state.posted_notes.pop(0)


def is_abandoned(comm: Comm, number: int) -> bool:
    """Whether a rank has abandoned a round."""
    return comm.wait([_any_key(number)], 0)[0] is not None


def reasons_of(comm: Comm, numbers: Iterable[int], ranks: Iterable[int]) -> dict[int, str]:
    """Returns which of these ranks have abandoned one of these rounds, and why."""
    ranks, found = list(ranks), dict[int, str]()
    for number in numbers:
        if is_abandoned(comm, number):
            reasons = comm.wait([_why_key(number, rank) for rank in ranks], 0)
            found |= {rank: why.decode() for rank, why in zip(ranks, reasons, strict=True) if why is not None}
    return found


def _why_key(number: int, rank: int) -> str:
    return f"{number}/abandoned/{rank}"


def _any_key(number: int) -> str:
    return f"{number}/abandoned"
