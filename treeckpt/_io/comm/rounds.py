"""Rounds: the messages of one save (or another call of all ranks), kept apart from those of every other one.

Rank 0 is the coordinator. It opens a numbered round, and every message carries that number. `gather` sends one message
of every rank to rank 0, `broadcast` sends one message of rank 0 to all; the last `broadcast` closes the round. Rank 0
keeps a *state* in the message store: which round was opened last and for which topic, and how the last closed round
ended. From this state a rank finds the round that its call belongs to, so that ranks meet again after a failure:

- A rank that calls too late, after the others have given up on it, receives the result of the round that it missed.
- A rank that never called for an earlier round does not receive that round's messages; it joins the open round.
- A rank that gave up on a round and calls again is recognised by a nonce, which is new for each call.
- A rank that sends nothing within the time limit is lost: it is named in `lost`, and not waited for again.

A rank may be interrupted at any point of a call, and call again. It notes that it has *abandoned* the round
(`_io.comm.waiting`), and who waits for a message looks for such notes now and then. These hold then:

1. Numbers only rise. Rank 0 opens no number twice, and no rank is in a round that it has abandoned.
2. A rank notes that it has abandoned a round before it joins a later one, at the latest when it begins to.
3. Rank 0 has concluded nothing of a round until it has everyone's first message and found no note afterwards. With a
   note it opens a later round for the same call. A rank that waits for the first conclusion follows: to the round that
   rank 0 has opened for the same call, or past a round with a note that rank 0 has not opened yet.
4. So all that call again meet in one round. Who was interrupted and has not called again after `RETURN_TIMEOUT` is
   named in the error of the others, as is a rank that is interrupted once something is concluded: that save fails, or
   if all have reported is committed without it.
5. Nobody waits for a rank whose note says that it will not send or read the message. The note that a process has ended
   counts when the rank has not joined a round for `RETURN_TIMEOUT`: a handler of atexit may still make a call.

In a large world (`_io.comm.message_store`) not all ranks exchange messages with rank 0: a leader gathers the messages
of the ranks below it and passes them on as one, and it passes rank 0's messages down, each through a message store of
its own. A leader that falls silent is lost, and the ranks below it are cut off: nothing is known of them, so they are
not named, and they read rank 0's message from rank 0's own store.

`branch` starts messages under a name that only the ranks of one round know. A branch may continue in the background
while later numbered rounds are opened and closed.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec

from ..._core.format.decoding import decode_msgpack
from ...errors import RankError
from ..process import TERMINATION
from .comm import Comm, HierarchicalComm, MessageStore
from .message_store import bundle, children_of, is_leader, parent_of, unbundle
from .waiting import (
    KEPT_NOTES,
    WATCH_INTERVAL,
    abandon_round,
    ended_ranks,
    is_abandoned,
    join_rounds,
    leave_rounds,
    log_waiting,
    reasons_of,
    send_heartbeats,
    silence_text,
    wait_for,
)

LAST_READ_TIMEOUT = 30.0
"""Seconds that rank 0 waits, at most, until the others have read its last message: rank 0 may serve the message store,
and be about to exit. A comm with a shorter time limit waits that long: a rank that died after its report reads nothing.
"""
LEADER_CHECK_INTERVAL = 5.0
"""Seconds between two reads of rank 0's store, at most, by a rank whose own leader is silent."""
RETURN_TIMEOUT = 5.0
"""Seconds that a rank which was interrupted has to call again, where the others do so, or are still in the call; and
that one has to call whose process has noted its end.
"""
_RETRY_WINDOW = 2.0
"""A call that a rank makes within so many seconds after one that failed or was interrupted counts as its retry."""
_STATE = "state"


class _Superseded(Exception):
    """A later round has this call's messages."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _ClosedRound(msgspec.Struct, array_like=True):
    """How the last closed round ended."""

    number: int
    topic: str
    lost: list[int]
    message: bytes
    """Rank 0's last message."""


class _RoundState(msgspec.Struct, array_like=True):
    """Rank 0's state of the rounds, as it is in the message store."""

    number: int = 0
    """The number of the round that was opened last."""
    topic: str = ""
    closed: _ClosedRound | None = None


class _Broadcast(msgspec.Struct, array_like=True):
    """A message of rank 0 to all."""

    last: bool
    settles: bool
    """Whether rank 0 waits until the message was read."""
    lost: list[int]
    cut: list[int]
    """Ranks whose leader is lost."""
    data: bytes


class Round:
    """One rank's side of the messages of one save.

    Args:
        topic: identifies the save: by it a rank that calls late finds whether it missed this very save.
        name: of a branch.
        log_waits: whether to log a long wait for ranks that may not have made the call.
    """

    def __init__(self, comm: Comm, topic: str, *, name: str = "", log_waits: bool = True) -> None:
        self.lost: dict[int, str] = {}
        """On rank 0: the silent ranks, and what is known of each; on leaders, of the ranks below them."""
        self._comm, self._topic, self._name = comm, topic, name
        self._group_sizes: tuple[int, ...] = getattr(comm, "group_sizes", ())
        self._leader = parent_of(comm.rank, self._group_sizes)
        self._below = children_of(comm.rank, comm.size, self._group_sizes)
        self._above: MessageStore | None = None
        """The leader's store, from the first message to it on; None where it cannot be reached."""
        self._cut: set[int] = set()
        """On rank 0: ranks below a lost one."""
        self._leader_lost = False
        """Whether this rank's leader has fallen silent."""
        self._number = self._step = 0
        self._first = b""
        """This rank's first message, which is sent again in a later round."""
        self._ended = False
        """Whether nothing more of the round follows on this rank."""
        self._is_retry = False
        """Whether this call is made again, and ranks that were interrupted are to call again too."""
        self._noted_at: dict[int, float] = {}
        """Since when, on the monotonic clock, it is known of a rank that it has abandoned the call."""
        self._end_noted_at: dict[int, float] = {}
        """Since when, on the monotonic clock, it is known of a rank that it has noted its end."""
        self._left: dict[int, str] = {}
        """Ranks that have abandoned the round, or do not return to it, and why: their messages are not waited for."""
        self._unheard: set[int] = set()
        """Ranks that had not sent their message when others were found in `_left`."""
        self._log_waits = log_waits and not name
        self._state = _RoundState()
        self._nonce = secrets.token_bytes(8)
        self._nonces: dict[int, bytes] = {}
        self._sent_up: list[str] = []
        """Keys of the messages that this rank has posted in its leader's store."""
        self._sent_down: list[str] = []
        """Keys of rank 0's messages that this rank has posted in its own store."""

    def join(self) -> bytes | None:
        """Opens the round on rank 0, finds it on others; returns its last message if it is over without this rank."""
        comm = self._comm
        if comm.size == 1:
            return None
        own, state = comm.state, self._read_state()
        join_rounds(comm)
        self._is_retry = time.monotonic() - own.failed_at < _RETRY_WINDOW
        if comm.rank == 0:
            self._open(state.number + 1, state.closed)
            return None
        last, closed = max(own.last_round, own.abandoned), state.closed
        joinable = state.number > last and (closed is None or closed.number < state.number)
        # the others make the same call again: this rank joins them, and does not take the end that it missed
        retried = joinable and state.topic == self._topic
        known = closed is not None and closed.number > last and closed.topic == self._topic
        if closed is not None and known and not retried and comm.rank in closed.lost:
            own.last_round = closed.number
            leave_rounds(comm)
            return closed.message
        # no round that this rank has abandoned, by the first rule above
        self._number = max(state.number if joinable else state.number + 1, own.abandoned + 1)
        return None

    def _open(self, number: int, closed: _ClosedRound | None) -> None:
        """Opens a round, on rank 0, with this number or, where that was used, the next one."""
        own = self._comm.state
        self._number = own.opened = max(number, own.opened + 1)
        self._state = _RoundState(self._number, self._topic, closed)
        self._comm.post(_STATE, msgspec.msgpack.encode(self._state))

    def _move(self, number: int) -> None:
        """Begins the call again in a later round; on rank 0 opens it."""
        if self._comm.rank == 0:
            self._comm.drop([self._key(rank, 1) for rank in self._below])
            self._open(number, self._state.closed)
        else:
            if self._above is not None:
                self._above.drop(self._sent_up)
            self._number = number
        self._step, self._is_retry = 0, True
        for kept in (self._noted_at, self._nonces, self.lost, self._left, self._unheard, self._sent_up):
            kept.clear()

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Abandons the round where the body raises, an interrupt included."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Tells the other ranks that this one leaves the round because of an error, unless it has ended here."""
        if self._number and not self._ended:
            self._ended = True
            abandon_round(self._comm, self._number, error)

    def _read_state(self) -> _RoundState:
        data = self._comm.wait([_STATE], 0)[0]
        return decode_msgpack(data, _RoundState) if data is not None else _RoundState()

    def branch(self, name: str) -> Round:
        """Returns a round of the same ranks under a name on which they have agreed."""
        branch = Round(self._comm, self._topic, name=name)
        branch._number = self._number
        return branch

    def heartbeats(self) -> contextlib.AbstractContextManager[None]:
        """Sends heartbeats of this rank while the body runs; only after `join`."""
        if self._comm.size == 1:
            return contextlib.nullcontext()
        return send_heartbeats(self._heartbeat_stores, lambda: self._key(self._comm.rank, "heartbeat"))

    def _heartbeat_stores(self) -> list[MessageStore]:
        """Returns the stores of the ranks that wait for this one: its leader's, and its own for those below."""
        servers = ({self._leader} if self._comm.rank else set[int]()) | (
            {self._comm.rank} if self._below else set[int]()
        )
        return [self._store(server) for server in servers]

    def _key(self, rank: int | str, step: int | str = "") -> str:
        return f"{self._name or self._number}/{step or self._step}/{rank}"

    def _store(self, server: int) -> MessageStore:
        """Returns the message store that a rank serves."""
        return cast(HierarchicalComm, self._comm).leader_store(server) if server else self._comm

    def gather(self, data: bytes) -> dict[int, bytes] | None:
        """Returns the messages of all ranks that are not lost, by rank, on rank 0; None on other ranks."""
        if not self._step:
            self._first = data
        while True:
            try:
                return self._gather(data)
            except _Superseded as later:
                self._move(later.number)

    def _gather(self, data: bytes) -> dict[int, bytes] | None:
        self._step += 1
        rank = self._comm.rank
        if rank and self._below:
            self._post_up(self._waiting_key(rank), b"")
        messages = self._collect(data) if self._below else {0: data}
        if rank == 0:
            # looked for when all first messages are there, before anything is concluded: the third rule above
            if self._undecided and self._below and not self.lost and is_abandoned(self._comm, self._number):
                raise _Superseded(self._number + 1)
            self._cut = set(range(self._comm.size)).difference(messages, self.lost, self._unheard)
            return messages
        self._post_up(self._key(rank), self._nonce + (bundle(messages, self.lost) if self._below else data))
        return None

    def _waiting_key(self, rank: int) -> str:
        """Returns the key under which a leader notes that it has called, and waits for the ranks below it."""
        return f"{self._key(rank)} waits"

    def _post_up(self, key: str, data: bytes) -> None:
        """Posts a message to this rank's leader."""
        self._sent_up.append(key)
        try:
            if self._above is None and not self._leader_lost:
                self._above = self._store(self._leader)
            if self._above is not None:
                self._above.post(key, data)
        except RankError:
            # it is rank 0, without which no call goes on
            if not self._leader:
                raise
            self._above, self._leader_lost = None, True  # rank 0's next message names the leader as lost

    def _collect(self, data: bytes) -> dict[int, bytes]:
        """Returns this rank's message, those of the ranks below it, and those that they pass on, by rank."""
        store = self._store(self._comm.rank)
        ranks = [rank for rank in self._below if rank not in self.lost]
        messages = {self._comm.rank: data}
        for rank, message in zip(ranks, self._receive_from(store, ranks), strict=True):
            if message is None and self._left and rank not in self._left:
                self._unheard.add(rank)
            elif message is None:
                self.lost[rank] = self._left.get(rank) or silence_text(self._comm.timeout)
            elif self._nonces.setdefault(rank, message[:8]) != message[:8]:
                self.lost[rank] = "gave up on this save and began another"
            elif self._is_leader(rank):
                passed_on, lost = unbundle(message[8:])
                messages |= passed_on
                self.lost |= lost
            else:
                messages[rank] = message[8:]
        notes = [self._waiting_key(rank) for rank in ranks if self._is_leader(rank)]
        store.drop([self._key(rank) for rank in ranks] + notes)
        return messages

    @property
    def _undecided(self) -> bool:
        """Whether nothing of the round is concluded as far as this rank knows."""
        return not self._name and self._step <= 2

    @property
    def _watch_interval(self) -> float:
        return max(WATCH_INTERVAL, self._comm.size / 2048)

    def _watch_senders(self, missing: Sequence[int]) -> bool:
        """Looks for notes while messages of these ranks are missing; returns whether to wait no longer."""
        comm = self._comm
        if self._undecided:
            if comm.rank:
                self._watch_rank0()
            elif is_abandoned(comm, self._number):
                raise _Superseded(self._number + 1)
            self._left = self._not_called(missing) | self._not_returned(missing)
        else:
            self._left = self._gone(missing)
        return bool(self._left)

    def _watch_rank0(self) -> None:
        """Looks for a later round, and for a note of rank 0, while a message of rank 0 is missing."""
        comm, number = self._comm, self._number
        if not self._undecided:
            if why := self._gone([0]):
                raise self._rank0_error(why[0])
            return
        state = self._read_state()
        if state.number > number and state.topic == self._topic:
            raise _Superseded(state.number)
        if state.number > number:
            raise self._rank0_error(f"went on to another call ({state.topic})")
        if gone := self._not_called([0]):
            raise self._rank0_error(gone[0])
        why = reasons_of(comm, [number], [0])
        if not why and state.number < number and is_abandoned(comm, number):
            raise _Superseded(number + 1)
        if (why or state.number < number) and (late := self._not_returned([0], why)):
            raise self._rank0_error(late[0])

    def _not_called(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns which of these ranks' processes have noted their end and not called for `RETURN_TIMEOUT`, and why."""
        now, noted = time.monotonic(), ended_ranks(self._comm, ranks)
        for rank in noted.symmetric_difference(ranks):
            self._end_noted_at.pop(rank, None)
        return {
            rank: f"its process has ended, or is ending and has not called for {RETURN_TIMEOUT:g} s"
            for rank in noted
            if now - self._end_noted_at.setdefault(rank, now) > RETURN_TIMEOUT
        }

    def _not_returned(self, ranks: Sequence[int], known: Mapping[int, str] | None = None) -> dict[int, str]:
        """Returns which of these ranks have abandoned this call and not called again for `RETURN_TIMEOUT`, and why.

        Args:
            known: why they have abandoned this round; by default it is looked for in those since the last that ended.
        """
        earlier = range(max(self._comm.state.ended + 1, self._number - KEPT_NOTES), self._number)
        reasons = dict(known or {}) or (reasons_of(self._comm, earlier, ranks) if self._is_retry else {})
        now = time.monotonic()
        return {
            rank: f"{why}, and has not called again for {RETURN_TIMEOUT:g} s"
            for rank, why in reasons.items()
            if now - self._noted_at.setdefault(rank, now) > RETURN_TIMEOUT
        }

    def _rank0_error(self, why: str) -> RankError:
        return RankError(
            "ranks",
            ranks={0: why},
            expected="rank 0's word on how to go on",
            hint="Call again on every rank. If this save was past its writes it may be committed after all: look "
            "before saving there again",
        )

    @property
    def _leader_timeout(self) -> float:
        """Seconds to wait for a leader that itself waits for a time limit: its message needs time to arrive."""
        return self._comm.timeout * 1.25 + 1

    def _is_leader(self, rank: int) -> bool:
        return is_leader(rank, self._comm.size, self._group_sizes)

    def _receive_from(self, store: MessageStore, ranks: list[int]) -> list[bytes | None]:
        """Returns one message of each rank, None for a silent one.

        A leader that has called may itself be waiting, for a whole time limit, for ranks below it: it gets more time.
        """
        if not ranks:
            return []
        timeout = self._comm.timeout
        heartbeats = [self._key(rank, "heartbeat") for rank in ranks]

        def log(missing: Sequence[int], seconds: float) -> None:
            log_waiting(self._comm.rank, [ranks[i] for i in missing], seconds, self._topic)

        keys = [self._key(rank) for rank in ranks]
        messages = wait_for(
            store,
            keys,
            timeout,
            heartbeats=heartbeats,
            watch=lambda missing: self._watch_senders([ranks[i] for i in missing]),
            interval=self._watch_interval,
            on_slow=log if self._log_waits else None,
        )
        # the ranks below have called: rank 0 waits for no call any more, a leader may still wait for that of rank 0
        self._log_waits = self._log_waits and bool(self._comm.rank)
        for _ in self._group_sizes if not self._left else ():
            slow = [i for i, rank in enumerate(ranks) if messages[i] is None and self._is_leader(rank)]
            notes = store.wait([self._waiting_key(ranks[i]) for i in slow], 0) if slow else []
            slow = [i for i, note in zip(slow, notes, strict=True) if note is not None]
            if not slow:
                break
            keys = [self._key(ranks[i]) for i in slow]
            waited = [ranks[i] for i in slow]
            more = wait_for(
                store,
                keys,
                self._leader_timeout,
                heartbeats=[heartbeats[i] for i in slow],
                watch=lambda missing, waited=waited: self._watch_senders([waited[i] for i in missing]),
                interval=self._watch_interval,
            )
            for i, message in zip(slow, more, strict=True):
                messages[i] = message
        return messages

    def broadcast(self, data: bytes | None, *, last: bool = False, settle: bool = True) -> bytes:
        """Returns rank 0's message, on every rank; raises RankError where rank 0 did not send in time.

        Args:
            data: the message, on rank 0.
            last: on rank 0, whether it closes the round.
            settle: on rank 0, whether to wait until others have read the last message; needless if a branch follows.
        """
        self._step += 1
        comm = self._comm
        if comm.rank == 0:
            assert data is not None, "rank 0 has the message"
            if comm.size > 1:
                lost = [*self.lost, *sorted(self._unheard)]
                self._post_down(msgspec.msgpack.encode(_Broadcast(last, settle, lost, sorted(self._cut), data)))
                self._end(last and settle, lost)
                if last:
                    self._close(data, settle)
            return data
        received = self._receive_broadcast()
        with contextlib.suppress(RankError):  # the ranks below read rank 0's store then
            self._post_down(received)
        if not self._name:
            comm.state.last_round = self._number
        message = decode_msgpack(received, _Broadcast)
        if message.last:
            self._leave(message)
        self._end(message.last and message.settles, message.lost)
        return message.data

    def _end(self, last: bool, lost: Sequence[int]) -> None:
        """Notes the end of the round on this rank, after the last message, unless a branch follows."""
        self._ended = last
        if last and lost:
            self._comm.state.failed_at = time.monotonic()
        elif last:
            self._comm.state.ended = max(self._comm.state.ended, self._number)
        if last:
            leave_rounds(self._comm)

    def _wait_left(self, store: MessageStore, ranks: Sequence[int]) -> list[bytes | None]:
        """Waits until these ranks have read the last message, but for those that have abandoned the round."""
        return wait_for(
            store,
            [self._key(rank, "left") for rank in ranks],
            TERMINATION.limit_timeout(min(LAST_READ_TIMEOUT, self._comm.timeout)),
            heartbeats=[self._key(rank, "heartbeat") for rank in ranks],
            watch=lambda missing: len(self._gone([ranks[i] for i in missing])) == len(missing),
            interval=self._watch_interval,
        )

    def _gone(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns which of these ranks send nothing more in this round, and why."""
        return self._not_called(ranks) | reasons_of(self._comm, [self._number], ranks)

    def _post_down(self, message: bytes) -> None:
        """Posts a message of rank 0 for the ranks below this one."""
        if self._below:
            self._sent_down.append(self._key("all"))
            self._store(self._comm.rank).post(self._sent_down[-1], message)

    def _receive_broadcast(self) -> bytes:
        """Waits for rank 0's message; raises RankError if it does not come in time."""
        comm = self._comm
        while True:
            key = self._key("all")
            # rank 0 may itself wait, for a whole time limit, for a silent rank, and leaders before it
            limit = comm.timeout * 2 + 1 + len(self._group_sizes) * self._leader_timeout
            receive = self._receive_by_leader if self._leader else self._receive_from_rank0
            try:
                message = receive(key, limit)
            except (_Superseded, RankError) as error:
                message = None
                with contextlib.suppress(RankError):  # it may have come before what the watch has found
                    message = comm.wait([key], 0)[0]
                if message is None and isinstance(error, RankError):
                    raise
                if message is None and isinstance(error, _Superseded):
                    self._move(error.number)
                    self.gather(self._first)
                    self._step += 1
                    continue
            if message is not None:
                self._log_waits = False
                return message
            if self._above is not None:
                self._above.drop(self._sent_up)
            raise self._rank0_error(silence_text(limit))

    def _receive_from_rank0(self, key: str, limit: float) -> bytes | None:
        """Waits for a message in rank 0's own store."""

        def log(missing: Sequence[int], seconds: float) -> None:
            if self._read_state().number < self._number:
                log_waiting(self._comm.rank, [0], seconds, self._topic)  # else rank 0 waits too, and logs it

        heartbeats, on_slow = [self._key(0, "heartbeat")], log if self._log_waits else None
        # rank 0 may itself be waiting for another rank, until that wait ends
        return wait_for(
            self._comm,
            [key],
            limit,
            heartbeats=heartbeats,
            watch=lambda _: bool(self._watch_rank0()),
            interval=self._watch_interval,
            grace=2.2,
            on_slow=on_slow,
        )[0]

    def _receive_by_leader(self, key: str, limit: float) -> bytes | None:
        """Waits for a message in the leader's store; in rank 0's where the leader is silent or cannot be reached."""
        comm, start = self._comm, time.monotonic()
        deadline = start + limit
        interval = min(max(comm.timeout / 8, 0.02), LEADER_CHECK_INTERVAL)
        pause = interval if self._leader_lost or TERMINATION.listening else self._watch_interval
        watch_at = start + self._watch_interval
        while True:
            message = None
            if self._above is not None:
                try:
                    message = self._above.wait([key], pause)[0]
                except RankError:
                    self._above = None
            if message is not None:
                return message
            looks = self._leader_lost or TERMINATION.listening or time.monotonic() > start + comm.timeout
            if looks or self._above is None:
                message = comm.wait([key], 0 if self._above is not None else interval)[0]
                pause = interval
            if message is None and time.monotonic() > watch_at:
                self._watch_rank0()
                watch_at = time.monotonic() + self._watch_interval
            if TERMINATION.signalled_at is not None:
                begin = max(TERMINATION.signalled_at, start)
                deadline = min(deadline, begin + TERMINATION.limit * (2 + len(self._group_sizes)))
            if message is not None or time.monotonic() > deadline:
                self._leader_lost = True
                return message

    def _leave(self, message: _Broadcast) -> None:
        """Confirms that the last message was read here and, before, by the ranks below."""
        comm = self._comm
        cut, lost = comm.rank in message.cut, comm.rank in message.lost
        # nobody reads the messages of a rank that was given up: it removes them itself
        if (cut or lost) and self._above is not None:
            self._above.drop(self._sent_up)
        if self._below:
            # the ranks below a lost leader are cut off, and confirm to rank 0
            self._clear(message.settles and not cut and not lost, complete=not message.lost)
        if not message.settles or lost:
            return
        above = comm if cut else self._above
        if above is not None:
            with contextlib.suppress(RankError):  # whatever becomes of the store, the message was received
                above.post(self._key(comm.rank, "left"), b"")

    def _close(self, data: bytes, settle: bool) -> None:
        """Stores for late ranks how the round ended, waits until the others have read it, and removes its messages."""
        with contextlib.suppress(RankError):  # the save has ended, even if the store is gone
            if not self._name:
                # only a lost rank reads the message, and it stays in the store for long
                lost = [*self.lost, *sorted(self._cut | self._unheard)]
                self._state.closed = _ClosedRound(self._number, self._topic, lost, data if lost else b"")
                self._comm.post(_STATE, msgspec.msgpack.encode(self._state))
        self._clear(settle, complete=not self.lost)

    def _clear(self, settle: bool, *, complete: bool) -> None:
        """Removes the messages in this rank's store once the ranks below it have read the last one.

        Args:
            settle: whether to wait until they have.
            complete: no rank is lost that may read them later.
        """
        comm, store = self._comm, self._store(self._comm.rank)
        below = [rank for rank in self._below if rank not in self.lost and rank not in self._unheard]
        # `left` stands for "not read" until the store has answered
        readers, left = [*below, *sorted(self._cut)] if settle else [], list[bytes | None]([None])
        with contextlib.suppress(RankError):
            left = self._wait_left(store, readers)
        # a rank that has not read the last message may still do so until the next round, or branch, is closed
        store.drop(comm.state.unread_keys.pop(bool(self._name), []))
        keys = [*self._sent_down, *(self._key(rank, "left") for rank in readers)]
        if not complete or None in left or not settle:
            comm.state.unread_keys[bool(self._name)] = keys
        else:
            store.drop(keys)
