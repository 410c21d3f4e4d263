"""Ranks that are interrupted at any moment of a call meet again in the next one, in every order of their steps.

The rounds run on a message store in which one rank moves at a time, in an order that a seed gives, on a clock that goes
on only while all wait. Each step of a rank is a moment at which it can be interrupted.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from treeckpt.io.comm import abandoned, rounds, waiting
from treeckpt.io.comm.collective import Conclusion, Exchange, ending_together, from_rank0
from treeckpt.io.comm.state import CommState

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
    """

    def __init__(self, size: int, seed: int, interrupts: dict[int, Sequence[int]]) -> None:
        self.now, self.steps, self.messages = 0.0, 0, dict[str, bytes]()
        self.ranks = [Rank() for _ in range(size)]
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
        """Runs a function on all ranks; returns their results, or errors."""
        found: list[Any] = [None] * len(self.ranks)

        def on(rank: int) -> None:
            own, comm = self.ranks[rank], ModelComm(self, rank)
            own.turn.acquire()
            try:
                found[rank], own.leaves = act(comm), True
                abandoned.note_end(comm)
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


class ModelComm:
    timeout, group_sizes = TIMEOUT, ()

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size, self.state = world, rank, len(world.ranks), CommState()

    def post(self, key: str, data: bytes) -> None:
        self.world.step(self.rank)
        self.world.messages[key] = data
        self.world.step(self.rank)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        messages = self.world.messages
        self.world.step(self.rank, lambda: all(key in messages for key in keys), timeout)
        return [messages.get(key) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        self.world.step(self.rank)
        for key in keys:
            self.world.messages.pop(key, None)

    def pause(self, seconds: float) -> None:
        self.world.step(self.rank, lambda: False, seconds)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The clock of the rounds: that of the `world` which is put into it."""
    found = SimpleNamespace(world=None)
    found.monotonic = lambda: found.world.now
    monkeypatch.setattr(abandoned, "_JOINED", set[Any]())  # else the end of this process is told to a model
    for module in (abandoned, rounds, waiting):
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


def ask(comm: Any, topic: str) -> str:
    """Is told something by rank 0, as by a method of a manager."""
    answer = from_rank0(comm, topic, lambda: f"{topic} {comm.world.steps}", str, call=topic)
    assert answer.startswith(topic), "the answer to another call"
    return answer


def restore(comm: Any, topic: str) -> str:
    """Is told by rank 0 what to load, loads it alone, and hears how the others fared, as a restore does."""
    choice = ask(comm, topic)
    with ending_together(comm, f"{topic} ends", topic, hint=""):
        comm.world.step(comm.rank)
    return choice


class Told(msgspec.Struct):
    """What became of one rank's calls."""

    saved: str = ""
    attempts: int = 0
    longest: float = 0.0
    errors: list[str] = []
    alone: bool = False
    """Whether it was told that another rank has ended, and ended too."""


def program(call: Callable[[Any, str], str], *, waits: bool = True, slow: Sequence[float] = ()) -> Callable[..., Told]:
    """A program that makes a call, and another one until that succeeds, when it is interrupted or the first one fails.

    Args:
        waits: whether it does so only then.
        slow: seconds after which each rank begins.
    """

    def act(comm: Any) -> Told:
        told, first = Told(), True
        while not told.saved and not told.alone:
            begin = comm.world.now
            try:
                if first and slow:
                    comm.pause(slow[comm.rank])
                begin = comm.world.now
                if first:
                    call(comm, "first")
                    while waits:
                        begin = float("inf")
                        comm.pause(TIMEOUT)
                else:
                    told.attempts += 1
                    told.saved = call(comm, "second")
            except KeyboardInterrupt:
                pass
            except tc.TreeckptError as error:
                told.errors.append(f"{error}")
                told.alone = "its process has ended" in told.errors[-1]
            first = False
            told.longest = max(told.longest, comm.world.now - begin)
            assert told.attempts < 10, told
        return told

    return act


def check(found: Sequence[Any], where: Any, *, attempts: int) -> None:
    """The second call has succeeded soon, in the same round on all ranks but those that missed its end."""
    for rank, told in enumerate(found):
        assert isinstance(told, Told), (where, rank, found)
        assert told.longest <= LONGEST and told.attempts <= attempts, (where, rank, found)
    assert len({told.saved for told in found if not told.alone}) == 1, (where, found)


def moments(size: int, seed: int, clock: Any, act: Callable[[Any], Told]) -> range:
    """Returns the numbers of the steps of both calls, in the order of a seed."""
    clock.world = World(size, seed, {})
    check(clock.world.run(act), (size, seed), attempts=1)
    return range(clock.world.steps)


EACH = pytest.mark.parametrize(
    ("size", "seeds"), [(2, 2), (3, 1), *(pytest.param(size, 40, marks=pytest.mark.slow) for size in (2, 3, 4))]
)
"""Ranks, and orders of their steps: each with an interrupt at every step."""


@pytest.mark.parametrize("call", [save, ask, restore])
@EACH
def test_ranks_that_are_all_interrupted_at_any_moment_meet_in_their_next_call(
    size: int, seeds: int, call: Callable[[Any, str], str], clock: Any
) -> None:
    for seed in range(seeds):
        for moment in moments(size, seed, clock, program(call, waits=False)):
            clock.world = World(size, seed, {moment: range(size)})
            check(clock.world.run(program(call)), (seed, moment), attempts=2)


@EACH
def test_ranks_that_are_interrupted_twice_meet_in_their_next_call(size: int, seeds: int, clock: Any) -> None:
    for seed in range(seeds):
        for moment in moments(size, seed, clock, program(save, waits=False)):
            second = moment + 1 + seed % (2 * size)
            clock.world = World(size, seed, {moment: range(size), second: range(size)})
            check(clock.world.run(program(save)), (seed, moment), attempts=3)


@pytest.mark.parametrize("call", [save, ask, restore])
@EACH
def test_a_rank_that_alone_is_interrupted_meets_the_others_in_their_next_call(
    size: int, seeds: int, call: Callable[[Any, str], str], clock: Any
) -> None:
    for seed in range(seeds):
        for moment in moments(size, seed, clock, program(call, waits=False)):
            clock.world = World(size, seed, {moment: [moment % size]})
            check(clock.world.run(program(call, waits=False)), (seed, moment), attempts=4)
