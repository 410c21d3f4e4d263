"""Silent, late and slow ranks, on a clock that goes on only while all ranks wait: however busy the machine is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.comms import ended
from tests.helpers.interrupted_ranks import World, clock
from tests.helpers.world import Faulty, Switch
from treeckpt._io.comm import rounds, waiting
from treeckpt._io.comm.message_store import parent_of
from treeckpt._io.comm.rounds import Round

__all__ = ["clock"]

TIERS = (2, 4)
"""Of eight ranks: 1 speaks to 0, 3 to 2, 2 to 0, 5 to 4, 7 to 6, 6 to 4 and 4 to 0."""
SEEDS = range(3)
"""Orders of the steps of the ranks."""


@pytest.mark.parametrize("absent", [{1}, {3}, {2}, {7}, {6}, {4}, {4, 5, 6, 7}, {2, 7}], ids=str)
def test_whoever_is_silent_is_named_and_nobody_else_and_all_others_are_told(absent: set[int], clock: Any) -> None:
    # of those below a silent leader nothing is known
    named = {rank for rank in absent if parent_of(rank, TIERS) not in absent or rank == 4}
    lost: dict[int, str] = {}

    def act(comm: Any) -> str | None:
        if comm.rank in absent:
            return None
        conversation = Round(comm, "a")
        assert conversation.join() is None
        heard = conversation.gather(b"here")
        lost.update(conversation.lost if comm.rank == 0 else {})
        word = f"without {sorted(conversation.lost)}".encode() if heard is not None else None
        return conversation.broadcast(word, last=True).decode()

    for seed in SEEDS:
        lost.clear()
        clock.world = World(8, seed, {}, timeout=0.5, group_sizes=TIERS, tells_ends=False)
        found = clock.world.run(act)
        assert lost == dict.fromkeys(sorted(named), "silent for 0.5 s")
        assert found == [None if rank in absent else f"without {sorted(named)}" for rank in range(8)]
        late = clock.world.run(lambda comm: ended(comm, "a") if comm.rank in absent else None)
        assert late == [f"missed: without {sorted(named)}" if rank in absent else None for rank in range(8)]
        assert clock.world.run(lambda c: ended(c, "b")) == ["b: 8 of 8"] * 8, "all are in step again"


def test_a_leader_that_comes_late_is_waited_for_and_so_are_those_below_it(clock: Any) -> None:
    lost: dict[int, str] = {}

    def act(comm: Any) -> bool:
        comm.pause({6: 0.5, 4: 0.7}.get(comm.rank, 0))
        if comm.rank == 7:
            return True
        conversation = Round(comm, "a")
        conversation.join()
        heard = conversation.gather(b"")
        lost.update(conversation.lost if comm.rank == 0 else {})
        conversation.broadcast(b"end" if heard is not None else None, last=True)
        return True

    for seed in SEEDS:
        lost.clear()
        clock.world = World(8, seed, {}, timeout=1.0, group_sizes=TIERS, tells_ends=False)
        assert clock.world.run(act) == [True] * 8
        assert lost == {7: "silent for 1 s"}, "not those who waited for it, longer than rank 0 would"


def test_a_leader_that_falls_silent_after_it_spoke_leaves_nobody_waiting(clock: Any) -> None:
    def act(comm: Any) -> Any:
        conversation = Round(comm, "a")
        conversation.join()
        heard = conversation.gather(b"")
        if comm.rank == 4:
            return None  # it has passed on what it heard, and dies
        return conversation.broadcast(b"end" if heard is not None else None, last=True, settle=False)

    for seed in SEEDS:
        clock.world = World(8, seed, {}, timeout=0.5, group_sizes=TIERS, tells_ends=False)
        assert clock.world.run(act) == [b"end"] * 4 + [None] + [b"end"] * 3


@pytest.mark.parametrize("apart", [1.0, 60.0])
def test_the_writing_of_a_rank_may_take_long_and_its_call_may_not(
    apart: float, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that come together say nothing, however long one writes."""
    store = tc.MemoryStore()

    def act(comm: Any) -> bool:
        slow = Faulty(store, Switch(0, act=lambda _: comm.pause(3 * waiting.SLOW_WAIT), names=("commit",)))
        tree = {"w": tc.Sharded(np.ones(4), (8,), (4 * comm.rank,))}
        if comm.rank == 1:
            comm.pause(apart)
        tc.save(slow if comm.rank == 1 else store, tree, comm=comm)
        return True

    clock.world = World(2, 1, {})
    with caplog.at_level(logging.WARNING, "treeckpt"):
        assert clock.world.run(act) == [True, True]
    assert clock.world.now >= apart + 3 * waiting.SLOW_WAIT
    said = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert [line.partition(" to make")[0] for line in said] == (
        [f"treeckpt: rank 0 has waited {waiting.SLOW_WAIT:g} s for rank 1"] if apart > waiting.SLOW_WAIT else []
    )


def test_a_rank_that_died_after_its_report_is_waited_for_no_longer_than_the_comms_limit(
    tmp_path: Path, clock: Any
) -> None:
    """Rank 1 reports and never reads the verdict: rank 0's save is committed all the same."""

    def act(comm: Any) -> float:
        if comm.rank == 1:
            heard, wait = list[str](), comm.wait

            def dying(keys: Any, timeout: float) -> list[bytes | None]:
                found = wait(keys, timeout)
                heard.extend(key for key, message in zip(keys, found, strict=True) if message and key.endswith("/all"))
                if len(heard) > 1 and timeout:
                    comm.post = lambda *_: None  # nor a note that it leaves
                    raise SystemExit("killed before it reads the verdict")
                return found

            comm.wait = dying
        tc.save(tmp_path / "c", {"w": np.arange(5)}, comm=comm)
        return comm.world.now

    clock.world = World(2, 1, {}, timeout=2.0, tells_ends=False)
    first, second = clock.world.run(act)
    assert isinstance(second, SystemExit)
    assert 2.0 <= first < rounds.LAST_READ_TIMEOUT / 10, "it waits for as long with a longer limit"
