"""Ranks that are interrupted at any moment of a call meet again in the next one, in every order of their steps.

The rounds run on a message store in which one rank moves at a time, in an order that a seed gives, on a clock that goes
on only while all wait. Each step of a rank is a moment at which it can be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from tests.helpers.interrupted_ranks import LONGEST, TIMEOUT, World, clock, save
from treeckpt._io.comm.collective import ending_together, from_rank0

__all__ = ["clock"]


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
