"""Ranks that speak by leaders, as in large worlds: the same errors and promises, and hardly a message at rank 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.comms import talk, tcp_comms
from tests.helpers.world import LONG, Patient, assert_holds, errors_of, on_ranks, small_tree
from treeckpt._io.comm import message_store
from treeckpt._io.comm.comm import TorchComm, thread_comms
from treeckpt._io.comm.message_store import (
    GROUP_SIZES,
    TREE_ABOVE,
    LeaderStore,
    TorchMessageStore,
    bundle,
    children_of,
    group_sizes_for,
    parent_of,
    unbundle,
)
from treeckpt._io.storage.store import MemoryStore

TIERS = (2, 4)
"""Of eight ranks: 1 speaks to 0, 3 to 2, 2 to 0, 5 to 4, 7 to 6, 6 to 4 and 4 to 0."""
spans = st.lists(st.integers(2, 5), max_size=3).map(lambda steps: tuple(_products(steps)))


def _products(steps: Sequence[int]) -> Iterator[int]:
    size = 1
    for step in steps:
        size *= step
        yield size


# who speaks to whom ---------------------------------------------------------------------------------------------------
@given(spans, st.integers(1, 200))
def test_every_rank_speaks_to_one_leader_and_no_message_goes_in_circles(tiers: tuple[int, ...], size: int) -> None:
    heard = [child for rank in range(size) for child in children_of(rank, size, tiers)]
    assert sorted(heard) == list(range(1, size))
    assert all(rank in children_of(parent_of(rank, tiers), size, tiers) for rank in range(1, size))
    assert all(parent_of(rank, tiers) < rank for rank in range(1, size))


def test_small_worlds_speak_to_rank_0_and_in_large_ones_no_leader_hears_many() -> None:
    assert group_sizes_for(TREE_ABOVE) == () and group_sizes_for(TREE_ABOVE + 1) == GROUP_SIZES
    for size in (TREE_ABOVE + 1, 16_384, 65_536):
        assert max(len(children_of(rank, size, GROUP_SIZES)) for rank in range(0, size, 8)) <= 200


@settings(max_examples=30)
@given(
    st.dictionaries(st.integers(0, 1 << 20), st.sampled_from([b"", b"a", b"bc"])),
    st.dictionaries(st.integers(0, 99), st.text()),
)
def test_bundles_come_back(heard: dict[int, bytes], lost: dict[int, str]) -> None:
    assert unbundle(bundle(heard, lost)) == (heard, lost)


def test_equal_messages_of_many_ranks_are_carried_once() -> None:
    assert len(bundle(dict.fromkeys(range(512), b"x" * 100), {})) < 150


# rounds ---------------------------------------------------------------------------------------------------------------
def test_messages_pass_two_leaders_and_words_come_back() -> None:
    comms = thread_comms(8, group_sizes=TIERS)
    outcomes = on_ranks(comms, lambda c: [talk(c, f"save {n}") for n in range(20)])
    assert errors_of(outcomes) == [None] * 8
    assert outcomes[0].value[3][0] == {rank: f"0 of {rank}".encode() for rank in range(8)}
    assert {o.value[19][3] for o in outcomes} == {f"save 19 1 {list(range(8))}".encode()}
    assert sum(len(store.messages) for store in comms[0].stores.values()) <= 1, "nothing is left but the state"


# real servers ---------------------------------------------------------------------------------------------------------
class Gone:
    """A server whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        def act(*_: Any) -> None:
            raise dist.DistNetworkError("connection reset by peer")

        return act


def test_leaders_serve_stores_of_their_own() -> None:
    comms = tcp_comms(4, LONG, (2,))
    assert errors_of(on_ranks(comms, talk)) == [None] * 4
    led, above = comms[2].leader_store(2), comms[3].leader_store(2)
    assert isinstance(led, LeaderStore)
    assert led.own.store.port == above.store.port != comms[0].common.store.port


class PatientInGroups(Patient):
    """A patient rank that speaks by leaders."""

    def __init__(self, inner: TorchComm, *silent: int, timeout: float) -> None:
        super().__init__(inner, *silent, timeout=timeout)
        self.group_sizes, self.leader_store = inner.group_sizes, inner.leader_store


def test_a_rank_whose_leader_dies_hears_from_rank_0_who_it_was() -> None:
    comms = tcp_comms(4, LONG, (2,))
    store = MemoryStore()
    assert errors_of(on_ranks(comms, lambda c: tc.save(store, small_tree(c.rank, 4), comm=c))) == [None] * 4

    def act(comm: PatientInGroups) -> None:
        if comm.rank == 2:
            return  # with its server
        if comm.rank == 3:
            comm.leader_store(2).store = Gone()  # pyright: ignore[reportAttributeAccessIssue]
        tc.save(store, small_tree(comm.rank, 4, seed=1), comm=comm, overwrite=True)

    errors = errors_of(on_ranks([PatientInGroups(comm, 2, timeout=0.5) for comm in comms], act))
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], tc.RankError) and list(errors[rank].ranks) == [2], errors
    assert_holds(store, seed=0)


class Vanished:
    """A server whose machine is gone: no answer comes, and no error."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: released.wait(2 * LONG)


released = threading.Event()


def test_a_leader_whose_machine_vanished_is_not_waited_for_without_end() -> None:
    comms = tcp_comms(4, LONG, (2,))
    assert errors_of(on_ranks(comms, talk)) == [None] * 4
    patient = [PatientInGroups(comm, 2, timeout=0.5) for comm in comms]
    comms[3].leader_store(2).store = Vanished()
    comms[3].leader_store(2)._calls.limit = 0.1
    store = MemoryStore()
    start = time.monotonic()
    outcomes = on_ranks(patient, lambda c: c.rank == 2 or tc.save(store, {"v": 1}, comm=c))
    released.set()
    assert time.monotonic() - start < LONG
    for rank in (0, 1, 3):
        error = outcomes[rank].error
        assert isinstance(error, tc.RankError) and list(error.ranks) == [2], error


@pytest.mark.parametrize("fault", ["nobody can be served", "a firewall"])
def test_ranks_that_cannot_reach_their_leader_meet_it_on_the_common_store(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = message_store.open_tcp_store

    def refuse(host: str, port: int, *, serves: bool) -> Any:
        if serves and fault == "a firewall":
            return original(host, port, serves=True)
        raise dist.DistNetworkError("no route to host")

    monkeypatch.setattr(message_store, "open_tcp_store", refuse)
    monkeypatch.setattr(message_store, "FALLBACK_INTERVAL", 0.05)
    comms = tcp_comms(4, LONG, (2,))
    for number in range(3):
        outcomes = on_ranks(comms, lambda c, n=number: talk(c, f"save {n}"))
        assert errors_of(outcomes) == [None] * 4
        assert len(outcomes[0].value[0]) == 4
    met_at = comms[3].leader_store(2)
    assert isinstance(met_at, TorchMessageStore) and met_at.store is comms[3].common.store
    assert comms[0].common.store.num_keys() <= 4, "the state, an address, and a few of the store's own"
