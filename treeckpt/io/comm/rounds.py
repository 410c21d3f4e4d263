"""One save's conversation, kept apart from that of every other save on the same comm.

Rank 0 is the coordinator. It opens a numbered round, and every message carries that number. `gather` brings one message
of every rank to rank 0, `share` one of rank 0's to all; the last `share` closes the round. Rank 0 keeps a *state* on
the board: which round was opened last, for what, and how the last one that was closed ended. From it a rank finds the
round that its call belongs to, so ranks fall into step again after a failure:

- A rank that comes too late, after the others gave up on it, is told how the round ended that it missed.
- A rank that never called for an earlier round does not get that round's messages, but joins the one that is open.
- A rank that gave up on a round and came back is known by a nonce, which it draws anew for each of its calls.

A rank that says nothing within the time limit is lost to the round: it is named in `lost`, and not waited for again.

In a large world (`io.comm.fanout`) not all ranks speak to rank 0: a leader gathers what those below it say and passes
it on as one message, and hands down what rank 0 says, each over a board of its own. A leader that falls silent is
lost, and those below it are cut off: they are not named, for nothing is known of them, and read rank 0's word on its
own board.

`branch` starts a conversation under a name that only the ranks of one round know. It is apart from the numbered rounds,
so that it may go on in the background while later rounds are opened and closed.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from ...errors import RankError
from .comm import Comm, HierarchicalComm, MessageStore
from .fanout import bundle, children_of, is_leader, parent_of, unbundle
from .waiting import TERMINATION, log_waiting, send_heartbeats, silence_text, wait_for

__all__ = ["Round"]

LAST_READ_TIMEOUT = 30.0
"""Seconds that rank 0 waits, at most, for the others to read its last word: it may serve the messages, and be about to
exit. A comm with a shorter time limit waits that long: a rank that died after its report reads nothing any more.
"""
LEADER_CHECK_INTERVAL = 5.0
"""Seconds between two looks at rank 0's board, of a rank whose own leader says nothing: at most."""
_ROUND, _LEFT_OVER, _STATE = "round", "left over", "state"


class _ClosedRound(msgspec.Struct, array_like=True):
    """How a round ended."""

    number: int
    topic: str
    lost: list[int]
    word: bytes

    def missed(self, rank: int, topic: str) -> bool:
        return rank in self.lost and topic == self.topic


class _RoundState(msgspec.Struct, array_like=True):
    number: int = 0
    """Of the round that was opened last."""
    topic: str = ""
    closed: _ClosedRound | None = None
    """The round that was closed last."""

    @property
    def is_open(self) -> bool:
        return self.number > 0 and (self.closed is None or self.closed.number < self.number)


class _Broadcast(msgspec.Struct, array_like=True):
    """What rank 0 shares."""

    last: bool
    settles: bool
    """Whether rank 0 waits to hear that it was read."""
    lost: list[int]
    cut: list[int]
    """Ranks whose leader is lost."""
    data: bytes


class Round:
    """The conversation of one save, as one rank has it.

    Args:
        topic: what the save is about: tells a rank that comes late whether it missed this very save.
        name: of a branch.
        met: all ranks are known to make the same call, so that no wait is logged.
    """

    def __init__(self, comm: Comm, topic: str, *, name: str = "", met: bool = False) -> None:
        self.lost: dict[int, str] = {}
        """On rank 0: the ranks that fell silent, and what is known of each; on leaders, of those below them."""
        self._comm, self._topic, self._name = comm, topic, name
        self._spans: tuple[int, ...] = getattr(comm, "tiers", ())
        self._leader = parent_of(comm.rank, self._spans)
        self._below = children_of(comm.rank, comm.size, self._spans)
        self._above: MessageStore | None = None
        """Where this rank speaks to its leader, from its first message on; None where that is gone."""
        self._cut: set[int] = set()
        """On rank 0: ranks below one that is lost."""
        self._adrift = False
        """Whether this rank's leader has fallen silent."""
        self._number = self._step = 0
        self._met = met or bool(name)
        """Whether the others are known to have made the call."""
        self._state = _RoundState()
        self._nonce = secrets.token_bytes(8)
        self._nonces: dict[int, bytes] = {}
        self._posted: list[str] = []
        """On the leader's board."""
        self._handed: list[str] = []
        """On this rank's own board."""

    def join(self) -> bytes | None:
        """Opens the round, on rank 0; elsewhere finds it.

        Returns:
            rank 0's last word on the round, if it is over already and this rank was missed in it; else None.
        """
        comm = self._comm
        if comm.size == 1:
            return None
        data = comm.wait([_STATE], 0)[0]
        state = msgspec.msgpack.decode(data, type=_RoundState) if data is not None else _RoundState()
        if comm.rank == 0:
            self._number = state.number + 1
            self._state = _RoundState(self._number, self._topic, state.closed)
            comm.post(_STATE, msgspec.msgpack.encode(self._state))
            return None
        last, closed = comm.memory.get(_ROUND, 0), state.closed
        joinable = state.is_open and state.number > last
        retried = joinable and state.topic == self._topic
        if closed is not None and closed.number > last and not retried and closed.missed(comm.rank, self._topic):
            comm.memory[_ROUND] = closed.number
            return closed.word
        self._number = state.number if joinable else state.number + 1
        return None

    def branch(self, name: str) -> Round:
        """What the same ranks go on to say under a name that they have agreed on."""
        return Round(self._comm, self._topic, name=name)

    def heartbeats(self) -> contextlib.AbstractContextManager[None]:
        """Sends heartbeats of this rank while the body runs; only after `join`."""
        comm = self._comm
        if comm.size == 1:
            return contextlib.nullcontext()

        def boards() -> list[MessageStore]:
            ranks = ({self._leader} if comm.rank else set()) | ({comm.rank} if self._below else set())
            return [self._board(rank) for rank in ranks]

        return send_heartbeats(boards, self._key(comm.rank, "heartbeat"))

    def _key(self, rank: int | str, step: int | str = "") -> str:
        return f"{self._name or self._number}/{step or self._step}/{rank}"

    def _board(self, leader: int) -> MessageStore:
        return cast(HierarchicalComm, self._comm).board(leader) if leader else self._comm

    def gather(self, data: bytes) -> dict[int, bytes] | None:
        """The messages of all ranks that are not lost, on rank 0; None elsewhere."""
        self._step += 1
        comm = self._comm
        if comm.rank and self._below:
            self._tell(self._waits(comm.rank), b"")
        heard = self._collect(data) if self._below else {0: data}
        if comm.rank == 0:
            self._cut = set(range(comm.size)).difference(heard, self.lost)
            return heard
        self._tell(self._key(comm.rank), self._nonce + (bundle(heard, self.lost) if self._below else data))
        return None

    def _waits(self, rank: int) -> str:
        """The key of the mark that a leader has come, and waits for those below it."""
        return f"{self._key(rank)} waits"

    def _tell(self, key: str, data: bytes) -> None:
        """Posts to this rank's leader."""
        self._posted.append(key)
        try:
            if self._above is None and not self._adrift:
                self._above = self._board(self._leader)
            if self._above is not None:
                self._above.post(key, data)
        except RankError:
            if not self._leader:
                raise
            self._above, self._adrift = None, True  # rank 0 will say what became of the leader

    def _collect(self, data: bytes) -> dict[int, bytes]:
        """This rank's message and those that come to it, with what they bring of others."""
        board = self._board(self._comm.rank)
        ranks = [rank for rank in self._below if rank not in self.lost]
        heard = {self._comm.rank: data}
        for rank, message in zip(ranks, self._await(board, ranks), strict=True):
            if message is None:
                self.lost[rank] = silence_text(self._comm.timeout)
            elif self._nonces.setdefault(rank, message[:8]) != message[:8]:
                self.lost[rank] = "gave up on this save and began another"
            elif self._leads(rank):
                words, lost = unbundle(message[8:])
                heard |= words
                self.lost |= lost
            else:
                heard[rank] = message[8:]
        board.drop([self._key(rank) for rank in ranks] + [self._waits(rank) for rank in ranks if self._leads(rank)])
        return heard

    def _leads(self, rank: int) -> bool:
        return is_leader(rank, self._comm.size, self._spans)

    def _await(self, board: MessageStore, ranks: list[int]) -> list[bytes | None]:
        """One message of each; leaders that have come may themselves be waiting, as long, for those below them."""
        timeout = self._comm.timeout
        heartbeats = [self._key(rank, "heartbeat") for rank in ranks]

        def log(missing: Sequence[int], seconds: float) -> None:
            log_waiting(self._comm.rank, [ranks[i] for i in missing], seconds, self._topic)

        late = None if self._met else log
        found = (
            wait_for(board, [self._key(rank) for rank in ranks], timeout, heartbeats=heartbeats, late=late)
            if ranks
            else []
        )
        self._met = self._met or not self._comm.rank
        for _ in self._spans:
            slow = [i for i, rank in enumerate(ranks) if found[i] is None and self._leads(rank)]
            marks = board.wait([self._waits(ranks[i]) for i in slow], 0) if slow else []
            slow = [i for i, mark in zip(slow, marks, strict=True) if mark is not None]
            if not slow:
                break
            keys = [self._key(ranks[i]) for i in slow]
            more = wait_for(board, keys, _leader_timeout(timeout), heartbeats=[heartbeats[i] for i in slow])
            for i, message in zip(slow, more, strict=True):
                found[i] = message
        return found

    def share(self, data: bytes | None, *, last: bool = False, settle: bool = True) -> bytes:
        """Rank 0's message, on every rank.

        Args:
            data: on rank 0, the message.
            last: on rank 0, whether it closes the round.
            settle: on rank 0, whether to wait until the others have read the last word; needless where more will be
                said.

        Raises:
            RankError: rank 0 did not send in time.
        """
        self._step += 1
        comm = self._comm
        if comm.rank == 0:
            assert data is not None, "rank 0 has the message"
            if comm.size > 1:
                word = _Broadcast(last, settle, list(self.lost), sorted(self._cut), data)
                self._hand_down(msgspec.msgpack.encode(word))
                if last:
                    self._close(data, settle)
            return data
        found = self._hear()
        with contextlib.suppress(RankError):  # those below will look at rank 0's board
            self._hand_down(found)
        if not self._name:
            comm.memory[_ROUND] = self._number
        word = msgspec.msgpack.decode(found, type=_Broadcast)
        if word.last:
            self._leave(word)
        return word.data

    def _hand_down(self, word: bytes) -> None:
        if self._below:
            self._handed.append(self._key("all"))
            self._board(self._comm.rank).post(self._handed[-1], word)

    def _hear(self) -> bytes:
        """Rank 0's word."""
        comm, key = self._comm, self._key("all")
        # rank 0 may itself be waiting, for as long, for a rank that is silent, and leaders before it
        limit = comm.timeout * 2 + 1 + len(self._spans) * _leader_timeout(comm.timeout)
        found = self._overhear(key, limit) if self._leader else self._await_word(key, limit)
        if found is not None:
            self._met = True
            return found
        self._withdraw()
        raise RankError(
            "ranks",
            ranks={0: silence_text(limit)},
            expected="rank 0's word on how to go on",
            hint="Look at what rank 0 is doing. If this save was past its writes it may be committed after all: "
            "look before saving there again",
        )

    def _await_word(self, key: str, limit: float) -> bytes | None:
        """Rank 0's message, from its own board."""

        def log(missing: Sequence[int], seconds: float) -> None:
            data = self._comm.wait([_STATE], 0)[0]
            if data is None or msgspec.msgpack.decode(data, type=_RoundState).number < self._number:
                log_waiting(self._comm.rank, [0], seconds, self._topic)  # else rank 0 waits too, and logs it

        heartbeats, late = [self._key(0, "heartbeat")], None if self._met else log
        # rank 0 may itself be waiting for another rank, until that wait ends
        return wait_for(self._comm, [key], limit, heartbeats=heartbeats, grace=2.2, late=late)[0]

    def _overhear(self, key: str, limit: float) -> bytes | None:
        """The word as this rank's leader hands it down; where that is silent or gone, as rank 0 posted it."""
        comm, start = self._comm, time.monotonic()
        deadline = start + limit
        often = min(max(comm.timeout / 8, 0.02), LEADER_CHECK_INTERVAL)
        pause = often if self._adrift or TERMINATION.listening else comm.timeout
        while True:
            found = None
            if self._above is not None:
                try:
                    found = self._above.wait([key], pause)[0]
                except RankError:
                    self._above = None
            if found is not None:
                return found
            found = comm.wait([key], 0 if self._above is not None else often)[0]
            if TERMINATION.since is not None:
                deadline = min(deadline, max(TERMINATION.since, start) + TERMINATION.limit * (2 + len(self._spans)))
            if found is not None or time.monotonic() > deadline:
                self._adrift = True
                return found
            pause = often

    def _withdraw(self) -> None:
        """Removes what nobody will read."""
        if self._above is not None:
            self._above.drop(self._posted)

    def _leave(self, word: _Broadcast) -> None:
        """The last word was read: so say this rank, and those below it before."""
        comm = self._comm
        cut, lost = comm.rank in word.cut, comm.rank in word.lost
        if cut or lost:
            self._withdraw()
        if self._below:
            # those below one that was not heard are cut off, and tell rank 0
            self._clear(word.settles and not cut and not lost, whole=not word.lost)
        if not word.settles or lost:
            return
        above = comm if cut else self._above
        if above is not None:
            with contextlib.suppress(RankError):  # whatever becomes of the board, the word is known
                above.post(self._key(comm.rank, "left"), b"")

    def _close(self, data: bytes, settle: bool) -> None:
        """Lets late ranks know how it ended, waits until the others have read it, and removes what is left over."""
        comm = self._comm
        with contextlib.suppress(RankError):  # whatever becomes of the board: the save has ended as it has
            if not self._name:
                # only a lost rank will ask for it, and it stands on the board for long
                lost = [*self.lost, *sorted(self._cut)]
                self._state.closed = _ClosedRound(self._number, self._topic, lost, data if lost else b"")
                comm.post(_STATE, msgspec.msgpack.encode(self._state))
        self._clear(settle, whole=not self.lost)

    def _clear(self, settle: bool, *, whole: bool) -> None:
        """Removes this rank's words once those below it have read the last.

        Args:
            settle: whether to wait for that.
            whole: no rank is lost, so there is none that may yet read them.
        """
        comm, board = self._comm, self._board(self._comm.rank)
        marks = [self._key(rank, "left") for rank in self._below if rank not in self.lost] if settle else []
        cut = [self._key(rank, "left") for rank in sorted(self._cut)] if settle else []
        left: list[bytes | None] = [None]
        with contextlib.suppress(RankError):
            settle_for = TERMINATION.cut(min(LAST_READ_TIMEOUT, comm.timeout))
            left = board.wait(marks, settle_for) if marks else []
            left += board.wait(cut, settle_for) if cut else []
        # a rank that has not read the last word yet may still do so until the next round, or branch, is closed
        left_over = f"{_LEFT_OVER} {bool(self._name)}"
        board.drop(comm.memory.pop(left_over, []))
        keys = [*self._handed, *marks, *cut]
        if not whole or None in left or not settle:
            comm.memory[left_over] = keys
        else:
            board.drop(keys)


def _leader_timeout(timeout: float) -> float:
    """Seconds to wait for a leader that is itself waiting for as long as `timeout`: its message has a way to go."""
    return timeout * 1.25 + 1
