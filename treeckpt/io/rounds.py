"""One save's conversation, kept apart from that of every other save on the same comm.

Rank 0 is the coordinator. It opens a numbered round, and every message carries that number. `gather` brings one message
of every rank to rank 0, `share` one of rank 0's to all; the last `share` closes the round. Rank 0 keeps a *state* on
the board: which round was opened last, for what, and how the last one that was closed ended. From it a rank finds the
round that its call belongs to, so ranks fall into step again after a failure:

- A rank that comes too late, after the others gave up on it, is told how the round ended that it missed.
- A rank that never called for an earlier round does not get that round's messages, but joins the one that is open.
- A rank that gave up on a round and came back is known by a nonce, which it draws anew for each of its calls.

A rank that says nothing within the time limit is lost to the round: it is named in `lost`, and not waited for again.

`branch` starts a conversation under a name that only the ranks of one round know. It is apart from the numbered rounds,
so that it may go on in the background while later rounds are opened and closed.
"""

from __future__ import annotations

import contextlib
import secrets

import msgspec

from ..core.errors import RankError
from .comm import Comm

__all__ = ["Round"]

SETTLE = 30.0
"""Seconds that rank 0 waits for the others to read its last word: it may serve the messages, and be about to exit."""
_ROUND, _LEFT_OVER, _STATE = "round", "left over", "state"


class _Closed(msgspec.Struct, array_like=True):
    """How a round ended."""

    number: int
    topic: str
    lost: list[int]
    word: bytes

    def missed(self, rank: int, topic: str) -> bool:
        return rank in self.lost and topic == self.topic


class _State(msgspec.Struct, array_like=True):
    number: int = 0
    """Of the round that was opened last."""
    topic: str = ""
    closed: _Closed | None = None
    """The round that was closed last."""

    @property
    def is_open(self) -> bool:
        return self.number > 0 and (self.closed is None or self.closed.number < self.number)


class _Word(msgspec.Struct, array_like=True):
    """What rank 0 shares."""

    last: bool
    settles: bool
    """Whether rank 0 waits to hear that it was read."""
    lost: list[int]
    data: bytes


class Round:
    """The conversation of one save, as one rank has it.

    Args:
        topic: what the save is about: tells a rank that comes late whether it missed this very save.
    """

    def __init__(self, comm: Comm, topic: str, *, name: str = "") -> None:
        self.lost: dict[int, str] = {}
        """On rank 0: the ranks that fell silent, and what is known of each."""
        self._comm, self._topic, self._name = comm, topic, name
        self._number = self._step = 0
        self._state = _State()
        self._nonce = secrets.token_bytes(8)
        self._nonces: dict[int, bytes] = {}
        self._posted: list[str] = []

    def join(self) -> bytes | None:
        """Opens the round, on rank 0; elsewhere finds it.

        Returns:
            rank 0's last word on the round, if it is over already and this rank was missed in it; else None.
        """
        comm = self._comm
        if comm.size == 1:
            return None
        data = comm.wait([_STATE], 0)[0]
        state = msgspec.msgpack.decode(data, type=_State) if data is not None else _State()
        if comm.rank == 0:
            self._number = state.number + 1
            self._state = _State(self._number, self._topic, state.closed)
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

    def _key(self, rank: int | str, step: int | str = "") -> str:
        return f"{self._name or self._number}/{step or self._step}/{rank}"

    def gather(self, data: bytes) -> dict[int, bytes] | None:
        """The messages of all ranks that are not lost, on rank 0; None elsewhere."""
        self._step += 1
        comm = self._comm
        if comm.rank:
            self._posted.append(self._key(comm.rank))
            comm.post(self._posted[-1], self._nonce + data)
            return None
        ranks = [rank for rank in range(1, comm.size) if rank not in self.lost]
        keys = [self._key(rank) for rank in ranks]
        heard = {0: data}
        for rank, message in zip(ranks, comm.wait(keys, comm.timeout) if ranks else [], strict=True):
            if message is None:
                self.lost[rank] = f"silent for {comm.timeout:g} s"
            elif self._nonces.setdefault(rank, message[:8]) != message[:8]:
                self.lost[rank] = "gave up on this save and began another"
            else:
                heard[rank] = message[8:]
        comm.drop(keys)
        return heard

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
                word = _Word(last, settle, list(self.lost), data)
                self._posted.append(self._key("all"))
                comm.post(self._posted[-1], msgspec.msgpack.encode(word))
                if last:
                    self._close(data, settle)
            return data
        # rank 0 may itself be waiting, for as long, for a rank that is silent
        limit = comm.timeout * 2 + 1
        found = comm.wait([self._key("all")], limit)[0]
        if found is None:
            comm.drop(self._posted)
            raise RankError(
                "ranks",
                ranks={0: f"silent for {limit:g} s"},
                expected="rank 0's word on how to go on",
                hint="Look at what rank 0 is doing. If this save was past its writes it may be committed after all: "
                "look before saving there again",
            )
        if not self._name:
            comm.memory[_ROUND] = self._number
        word = msgspec.msgpack.decode(found, type=_Word)
        if word.last:
            if comm.rank in word.lost:
                comm.drop(self._posted)  # nobody waited for these
            elif word.settles:
                comm.post(self._key(comm.rank, "left"), b"")
        return word.data

    def _close(self, data: bytes, settle: bool) -> None:
        """Lets late ranks know how it ended, waits until the others have read it, and removes what is left over."""
        comm = self._comm
        marks = [self._key(rank, "left") for rank in range(1, comm.size) if rank not in self.lost] if settle else []
        left: list[bytes | None] = [None]
        with contextlib.suppress(RankError):  # whatever becomes of the board: the save has ended as it has
            if not self._name:
                self._state.closed = _Closed(self._number, self._topic, list(self.lost), data)
                comm.post(_STATE, msgspec.msgpack.encode(self._state))
            left = comm.wait(marks, SETTLE) if marks else []
        # a rank that has not read the last word yet may still do so until the next round, or branch, is closed
        left_over = f"{_LEFT_OVER} {bool(self._name)}"
        comm.drop(comm.memory.pop(left_over, []))
        keys = [*self._posted, *marks]
        if self.lost or None in left or not settle:
            comm.memory[left_over] = keys
        else:
            comm.drop(keys)
