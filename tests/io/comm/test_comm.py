"""Ranks talk in rounds: in order, within time limits, without leaving anything behind, and never across two saves."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.comms import ended, file_comms, hash_comms, talk, tcp_comms
from tests.helpers.world import LONG, Faulty, Patient, Switch, errors_of, on_ranks
from treeckpt._io.comm.comm import Comm, SoloComm, TorchComm, default_comm, thread_comms
from treeckpt._io.comm.rounds import Round

Make = Callable[..., Sequence[Any]]


PAIRS = (2,)
"""Rank 2 speaks for rank 3, and all others for themselves."""


@pytest.fixture(params=["threads", "hash", "file", "tcp", "threads in pairs", "tcp in pairs"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    kind, tiers = request.param.split()[0], PAIRS if "pairs" in request.param else ()

    def comms(size: int, *, timeout: float = LONG) -> Sequence[Any]:
        if kind == "threads":
            return thread_comms(size, timeout=timeout, group_sizes=tiers)
        if kind == "hash":
            return hash_comms(size, timeout, tiers)
        return file_comms(size, timeout, tmp_path) if kind == "file" else tcp_comms(size, timeout, tiers)

    return comms


def keys_of(comm: Any) -> set[str]:
    """What is left on the board."""
    if not isinstance(comm, TorchComm):
        return set(comm.stores[0].messages)
    store = comm.common.store
    return {key for key in store.list_keys() if key.startswith("treeckpt/")} if hasattr(store, "list_keys") else set()


def test_messages_arrive_by_rank_and_in_order(make: Make) -> None:
    comms = make(4)
    for number in range(3):
        outcomes = on_ranks(comms, lambda c, n=number: talk(c, f"save {n}", steps=3))
        assert errors_of(outcomes) == [None] * 4
        first = outcomes[0].value
        assert [first[2 * s] for s in range(3)] == [{r: f"{s} of {r}".encode() for r in range(4)} for s in range(3)]
        for outcome in outcomes:
            assert outcome.value[1::2] == [f"save {number} {s} [0, 1, 2, 3]".encode() for s in range(3)]


def test_a_hundred_rounds_leave_no_more_than_one(make: Make) -> None:
    comms = make(3)
    assert errors_of(on_ranks(comms, lambda c: [talk(c, f"save {n}") for n in range(100)])) == [None] * 3
    store = comms[0].common.store if isinstance(comms[0], TorchComm) else None
    if isinstance(store, (dist.TCPStore, dist.FileStore)):
        assert store.num_keys() <= 3, "the state, and a few of the store's own"
    else:
        assert len(keys_of(comms[0])) <= 1, keys_of(comms[0])


def test_big_messages_go_through(make: Make) -> None:
    def act(comm: Comm) -> Any:
        conversation = Round(comm, "big")
        conversation.join()
        heard = conversation.gather(bytes([comm.rank]) * 3_000_000)
        return heard, conversation.broadcast(b"x" * 3_000_000 if heard is not None else None, last=True)

    outcomes = on_ranks(make(2), act)
    assert errors_of(outcomes) == [None, None]
    assert outcomes[0].value[0] == {0: bytes(3_000_000), 1: b"\x01" * 3_000_000}
    assert outcomes[1].value[1] == b"x" * 3_000_000


def test_silent_ranks_are_named_within_the_limit(make: Make) -> None:
    comms = [Patient(comm, 1, 3) for comm in make(4)]

    def act(comm: Comm) -> Any:
        if comm.rank in (1, 3):
            return None
        conversation = Round(comm, "a")
        conversation.join()
        heard = conversation.gather(b"here")
        conversation.broadcast(b"over" if heard is not None else None, last=True)
        return conversation.lost

    outcomes = on_ranks(comms, act)
    assert comms[0].waited == [1, 3], "nobody is waited for twice"
    assert outcomes[0].value == {1: "silent for 0.1 s", 3: "silent for 0.1 s"}
    assert outcomes[2].error is None


def test_a_silent_coordinator_is_named(make: Make) -> None:
    comms = make(3)
    hasty: Sequence[Any] = [Patient(comm, 0) for comm in comms]
    if comms[0].group_sizes:
        hasty = comms  # leaders who seem silent do not change what is said of rank 0
        for comm in comms:
            comm.timeout = 0.1
    outcomes = on_ranks(hasty, lambda c: talk(c) if c.rank else None)
    for comm in comms:
        comm.timeout = LONG
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, tc.RankError)
        limit = 1.2 + 1.125 * len(comms[0].group_sizes)
        assert outcome.error.ranks == {0: f"silent for {limit:g} s"} and outcome.error.hint
    outcomes = on_ranks(comms, lambda c: talk(c, "again"))
    assert errors_of(outcomes) == [None] * 3, "the next round is not confused by what was left"


def _without_rank_2(comms: Sequence[Any], topic: str) -> Any:
    """A round that rank 2 takes no part in; what rank 1 heard in the end."""
    return on_ranks([Patient(comm, 2) for comm in comms[:2]], lambda c: ended(c, topic))[1].value


def test_a_late_rank_is_told_what_it_missed_and_is_in_step_again(make: Make) -> None:
    comms = make(3)
    assert _without_rank_2(comms, "one") == "one: 2 of 3"
    assert ended(comms[2], "one") == "missed: one: 2 of 3"
    assert [o.value for o in on_ranks(comms, lambda c: ended(c, "two"))] == ["two: 3 of 3"] * 3


def test_a_rank_that_skipped_a_save_joins_the_next(make: Make) -> None:
    comms = make(3)
    _without_rank_2(comms, "one")
    _without_rank_2(comms, "two")
    assert [o.value for o in on_ranks(comms, lambda c: ended(c, "three"))] == ["three: 3 of 3"] * 3


def test_a_skipping_rank_that_is_early_joins_the_next(make: Make) -> None:
    comms, early = make(3), threading.Event()
    _without_rank_2(comms, "one")

    def act(comm: Comm) -> str:
        assert comm.rank or early.wait(LONG)
        return ended(comm, "two", joined=early.set if comm.rank == 2 else bool)

    assert [o.value for o in on_ranks(comms, act)] == ["two: 3 of 3"] * 3


def test_a_late_rank_joins_a_retry_of_the_same_save(make: Make) -> None:
    comms, begun = make(3), threading.Event()
    _without_rank_2(comms, "one")

    def act(comm: Comm) -> str:
        assert comm.rank < 2 or begun.wait(LONG)
        return ended(comm, "one", joined=bool if comm.rank else begun.set)

    assert [o.value for o in on_ranks(comms, act)] == ["one: 3 of 3"] * 3


def test_a_late_rank_does_not_join_a_later_save(make: Make) -> None:
    comms, begun = make(3), threading.Event()
    _without_rank_2(comms, "one")

    def act(comm: Comm) -> Any:
        if comm.rank < 2:
            return ended(comm, "two", joined=bool if comm.rank else begun.set)
        assert begun.wait(LONG)
        return ended(comm, "one"), ended(comm, "two")

    values = [o.value for o in on_ranks(comms, act)]
    assert values == ["two: 3 of 3", "two: 3 of 3", ("missed: one: 2 of 3", "two: 3 of 3")]


def test_a_rank_that_gave_up_and_came_back_is_not_taken_for_the_same(make: Make) -> None:
    comms = make(2)
    lost: dict[int, str] = {}
    greeted, returned = threading.Event(), threading.Event()

    def act(comm: Comm) -> None:
        conversation = Round(comm, "a")
        if comm.rank == 0:
            conversation.join()
            conversation.gather(b"")
            greeted.set()
            assert returned.wait(LONG)
            conversation.broadcast(b"terms")
            conversation.gather(b"")
            conversation.broadcast(b"end", last=True)
            lost.update(conversation.lost)
            return
        conversation.join()
        conversation.gather(b"first hello")
        assert greeted.wait(LONG)
        again = Round(comm, "a")  # as after an interrupt
        again.join()
        again.gather(b"second hello")
        returned.set()
        assert again.broadcast(None) == b"terms"
        again.gather(b"done")
        again.broadcast(None)

    assert errors_of(on_ranks(comms, act)) == [None, None]
    assert lost == {1: "gave up on this save and began another"}


def test_left_over_keys_of_failures_go_with_the_next_rounds(make: Make) -> None:
    comms = make(3)
    for number in range(20):
        _without_rank_2(comms, f"bad {number}")
        assert ended(comms[2], f"bad {number}").startswith("missed")
    store = comms[0].common.store if isinstance(comms[0], TorchComm) else None
    if isinstance(store, (dist.TCPStore, dist.FileStore)):
        assert store.num_keys() <= 6
    else:
        assert len(keys_of(comms[0])) <= 4, keys_of(comms[0])


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def act(*_: Any) -> None:
                raise dist.DistNetworkError("connection reset by peer")

            return act

    comm = TorchComm(Gone(), 1, 2, timeout=1)
    with pytest.raises(tc.RankError, match="connection reset") as caught:
        tc.save(tc.MemoryStore(), {"v": 1}, comm=comm)
    assert list(caught.value.ranks) == [0] and "look before saving there again" in caught.value.hint
    comm.drop(["a"])


def test_rank_zero_may_leave_right_after_a_save(tmp_path: Path) -> None:
    """It serves the store: all others must have read its last word by then, in success and in failure."""

    def act(comm: TorchComm, tree: Any) -> None:
        try:
            tc.save(tmp_path / type(tree["v"]).__name__, tree, comm=comm)
        finally:
            if comm.rank == 0:
                comm.common.store = None  # the last reference: the server stops

    for tiers in ((), PAIRS):
        for tree, failure in (({"v": 1}, type(None)), ({"v": object()}, tc.TreeError)):
            outcomes = on_ranks(tcp_comms(4, LONG, tiers), lambda c, t=tree: act(c, t))
            assert [type(error) for error in errors_of(outcomes)] == [failure] * 4
            shutil.rmtree(tmp_path / "int", ignore_errors=True)


def test_one_rank_needs_nobody() -> None:
    comm = SoloComm()
    assert talk(comm) == [{0: b"0 of 0"}, b"a 0 [0]", {0: b"1 of 0"}, b"a 1 [0]"]
    assert isinstance(default_comm(), SoloComm)


@pytest.mark.parametrize("how", ["launcher ends", "rank 0 is interrupted"])
def test_what_ranks_have_written_is_known_to_be_left_over_where_rank_0_ends_without_a_word(
    tmp_path: Path, how: str
) -> None:
    """As torchrun's agent serves the store: once that is killed no rank reaches another one."""
    limit, path, taken = timedelta(seconds=LONG), tmp_path / "latest", threading.Event()
    server = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)]
    port = server[0].port
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit) for _ in range(2)]
    tree = {"whole": np.arange(64), "own": tc.PerRank(np.arange(8))}

    def interrupt(name: str) -> None:
        taken.wait(LONG)
        raise KeyboardInterrupt

    def leave(name: str) -> None:
        assert until(lambda: any(path.glob("shard-00000-*"))), "rank 0 has begun to write"
        if how == "launcher ends":
            server.clear()
        else:
            for comm in comms:  # rank 0 says nothing any more
                comm.timeout = 0.1

    def act(comm: TorchComm) -> None:
        switch = Switch(0, names=["commit"], act=leave) if comm.rank else Switch()
        if comm.rank == 0 and how != "launcher ends":
            switch = Switch(0, names=["commit"], act=interrupt)
        try:
            tc.save(Faulty(tc.LocalStore(path), switch), tree, comm=comm)
        finally:
            taken.set()

    comms = [TorchComm(store, rank, 2, timeout=LONG) for rank, store in enumerate(stores)]
    first, second = errors_of(on_ranks(comms, act))
    assert isinstance(first, tc.RankError if how == "launcher ends" else KeyboardInterrupt)
    assert isinstance(second, tc.RankError)
    assert any(path.glob("shard-00001-*")) and not any(path.glob("shard-00000-*"))
    report = tc.save(path, tree, overwrite=True)
    assert {shard.name for shard in path.glob("shard-*")} == set(report.files)
    assert not any(path.glob("progress-*"))
