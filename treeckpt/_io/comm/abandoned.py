"""Notes of ranks that abandon a round, which is to leave it before its end: interrupted, or because of an error.

Such a rank posts why under a key of its own, then under one key for all ranks that somebody has abandoned the round; so
others look at one key while they wait. What the exception path cannot post, as an interrupt ends that too, is posted
when the rank begins its next round.

A process that ends by itself notes that too, for the rounds that it will not join: after all its saves have ended, and
after the handlers of atexit that the program has registered since the package was imported. Where another handler
makes a call after that, the note is removed when the rank joins the round, and posted again when it has left it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable

from ...errors import RankError
from ..process_end import call_at_end
from .comm import Comm, base_of
from .message_store import answer_limit, answers_within

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


def note_end(comm: Comm, limit: float = _POST_LIMIT) -> None:
    """Posts that this rank joins no further round; gives up after so many seconds."""
    base = base_of(comm)
    base.state.joined = False
    with contextlib.suppress(RankError), answers_within(limit):
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
