"""Ranks on message stores: one moves at a time, in an order that a seed gives, and can be interrupted at any step."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from treeckpt._io.comm import rounds, waiting
from treeckpt._io.comm.collective import Conclusion, Exchange
from treeckpt._io.comm.comm import CommState

TIMEOUT = 600.0
LONGEST = 15.0
"""Seconds that no call may take, on the clock of the model, in which only waits take time."""


class Rank(msgspec.Struct):
    """What the schedule knows of one rank."""

    turn: Any = msgspec.field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    """Of a rank that waits: whether it need not any longer."""
    deadline: float = 0.0
    interrupts: int = 0
    """Interrupts that have come and are not raised yet."""
    leaves: bool = False
    """Whether its program has ended, and only that is still told."""
    ended: bool = False


class World:
    """The message store of some ranks, their clock and the order of their steps.

    Args:
        interrupts: the ranks that are interrupted, by the number of the step before which they are.
        timeout: of the comms.
        group_sizes: of the comms, whose leaders have stores of their own.
        tells_ends: whether a rank tells the others when its program has ended.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        interrupts: dict[int, Sequence[int]],
        *,
        timeout: float = TIMEOUT,
        group_sizes: tuple[int, ...] = (),
        tells_ends: bool = True,
    ) -> None:
        self.now, self.steps, self.messages = 0.0, 0, dict[str, bytes]()
        self.ranks, self.tells_ends = [Rank() for _ in range(size)], tells_ends
        self.comms = [ModelComm(self, rank, timeout, group_sizes) for rank in range(size)]
        self._random, self._interrupts, self._back = random.Random(seed), interrupts, threading.Semaphore(0)

    def step(self, rank: int, ready: Callable[[], bool] | None = None, timeout: float = 0.0) -> None:
        """Lets other ranks move, until it is this one's turn, and where it waits until that is over."""
        own = self.ranks[rank]
        own.ready, own.deadline = ready, self.now + timeout
        self._back.release()
        own.turn.acquire()
        own.ready = None
        if own.interrupts and not own.leaves:
            own.interrupts -= 1
            raise KeyboardInterrupt

    def run(self, act: Callable[[Any], Any]) -> list[Any]:
        """Runs a function on all ranks; returns their results, or errors. It may be called again."""
        self.ranks = [Rank() for _ in self.ranks]
        found: list[Any] = [None] * len(self.ranks)

        def on(rank: int) -> None:
            own, comm = self.ranks[rank], self.comms[rank]
            own.turn.acquire()
            try:
                found[rank], own.leaves = act(comm), True
                if self.tells_ends:
                    waiting.note_end(comm)
            except BaseException as error:
                found[rank] = error
            own.ended = True
            self._back.release()

        for rank in range(len(self.ranks)):
            threading.Thread(target=on, args=(rank,), daemon=True).start()
        while alive := [rank for rank in self.ranks if not rank.ended]:
            for number in self._interrupts.get(self.steps, ()):
                self.ranks[number].interrupts += 1
            movable = [r for r in alive if r.ready is None or r.interrupts or r.ready() or r.deadline <= self.now]
            if not movable:
                self.now = min(rank.deadline for rank in alive)
                continue
            self.steps += 1
            self._random.choice(movable).turn.release()
            self._back.acquire()
        return found


class ModelStore:
    """One rank's access to the messages under a prefix."""

    def __init__(self, world: World, rank: int, prefix: str = "") -> None:
        self.world, self.rank, self.prefix = world, rank, prefix

    def post(self, key: str, data: bytes) -> None:
        self.world.step(self.rank)
        self.world.messages[self.prefix + key] = data
        self.world.step(self.rank)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        messages, keys = self.world.messages, [self.prefix + key for key in keys]
        self.world.step(self.rank, lambda: all(key in messages for key in keys), timeout)
        return [messages.get(key) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        self.world.step(self.rank)
        for key in keys:
            self.world.messages.pop(self.prefix + key, None)


class ModelComm(ModelStore):
    def __init__(self, world: World, rank: int, timeout: float, group_sizes: tuple[int, ...]) -> None:
        super().__init__(world, rank)
        self.size, self.timeout, self.group_sizes, self.state = len(world.ranks), timeout, group_sizes, CommState()

    def leader_store(self, leader: int) -> ModelStore:
        return ModelStore(self.world, self.rank, f"of {leader}/")

    def pause(self, seconds: float) -> None:
        self.world.step(self.rank, lambda: False, seconds)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The clock of the rounds: that of the `world` which is put into it."""
    found = SimpleNamespace(world=None)
    found.monotonic = lambda: found.world.now
    monkeypatch.setattr(waiting, "_JOINED", set[Any]())  # else the end of this process is told to a model
    for module in (rounds, waiting):
        monkeypatch.setattr(module, "time", found)
    yield found


def save(comm: Any, topic: str) -> str:
    """Agrees, writes, reports and commits as a save does; returns the id of the save."""

    def agree(topics: dict[int, bytes]) -> Conclusion[str]:
        if len(set(topics.values())) > 1:
            raise tc.MismatchError(topic, expected="one call", found=f"{topics}")
        return Conclusion(f"{topic} {exchange.round._number}", settle=False)

    with Exchange(comm, topic) as exchange:
        save_id = exchange.step(topic.encode, agree, str)
        branch = exchange.round.branch(save_id)
    with branch.abandoned_on_error():
        comm.world.step(comm.rank)
        reports = branch.gather(b"")
        verdict = None if reports is None else str(branch.lost or "").encode()
        if lost := branch.broadcast(verdict, last=True):
            raise tc.RankError("save", ranks={0: lost.decode()}, expected="all")
    return save_id
