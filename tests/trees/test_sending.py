"""Gathers and distributes trees of any layout between threads as ranks: only the transport differs from processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree.functools
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.layout_cases import Case, bits, cases, on_ranks
from tests.helpers.thread_transport import ThreadTransport
from treeckpt._core.sharding.region import Region
from treeckpt._io.comm.comm import ThreadComm
from treeckpt.trees import _collectives
from treeckpt.trees._collectives import PackedRegion, pack_regions


@pytest.fixture(autouse=True, scope="module")
def _transports_as_groups() -> Iterator[None]:
    """Has the functions take a transport in the place of a process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_collectives, "transport_of", lambda group: group)
        yield


def _whole(case: Case) -> dict[Any, Any]:
    return {n: array.full() for n, array in enumerate(case.arrays)}


@settings(deadline=None)
@given(cases(), st.sampled_from([1, 64, 1 << 20]), st.data())
def test_any_layout_is_gathered_whole_on_any_ranks(case: Case, limit: int, data: st.DataObject) -> None:
    """Uneven, strided, flat and listed pieces, replicas, arrays that one rank has: as the save's plan has them."""
    chosen = data.draw(st.one_of(st.none(), st.lists(st.integers(0, case.before - 1), max_size=3)))

    def act(comm: ThreadComm) -> None:
        tree, before = case.tree(comm.rank, saved=True), case.tree(comm.rank, saved=True)
        transport = ThreadTransport(comm)
        found = _collectives.gather(tree, group=transport, ranks=chosen, bucket_bytes=limit)
        assert found["values"] == list(case.values) and found["none"] == (None, {}, [])
        own = found["own"].value
        assert own["rank"] == comm.rank and torch.equal(own["state"], torch.arange(case.own[comm.rank]))
        for number, full in _whole(case).items():
            for leaf in found["layers"][number].values():
                if chosen is None or comm.rank in chosen:
                    assert bits(leaf) == bits(full), f"array {number} on rank {comm.rank}"
                else:
                    assert isinstance(leaf, tc.ArraySpec) and leaf.shape == tuple(full.shape)
        for number, leaves in before["layers"].items():
            for name, leaf in leaves.items():
                assert bits(tree["layers"][number][name]) == bits(leaf), "the input is as it was"

    on_ranks(case.before, act)


@settings(deadline=None)
@given(cases(), st.sampled_from([1, 64, 1 << 20]), st.data())
def test_one_rank_distributes_over_any_layout(case: Case, limit: int, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, case.after - 1))

    def act(comm: ThreadComm) -> None:
        expected = case.tree(comm.rank, saved=False)["layers"]
        like = case.tree(comm.rank, saved=False)["layers"]
        whole = {number: dict.fromkeys(("w", "tied"), full) for number, full in _whole(case).items()}
        found = _collectives.distribute(
            whole if comm.rank == source else None, like, group=ThreadTransport(comm), src=source, device=None,
            bucket_bytes=limit, namespace="",
        )  # fmt: skip
        assert list(found) == list(expected)
        for number, leaves in expected.items():
            for name, leaf in leaves.items():
                assert type(found[number][name]) is type(leaf) and bits(found[number][name]) == bits(leaf)
            assert len({id(leaf) for leaf in found[number].values()}) == 1, "ties"

    on_ranks(case.after, act)


@pytest.mark.parametrize("low", [0, 2])
def test_pieces_that_contradict_each_other_are_not_gathered(low: int) -> None:
    """The same pieces on all ranks, or windows that overlap."""

    def gather(comm: ThreadComm, content: float) -> Any:
        start = low * comm.rank
        local = torch.full((6, 2), 1.0)
        local[-1] = content
        tree = {"w": tc.Sharded(local, (6 + 3 * low, 2), (start, 0))}
        return _collectives.gather(tree, group=ThreadTransport(comm), bucket_bytes=1 << 20, namespace="")

    assert all((found["w"] == 1).all() for found in on_ranks(4, lambda comm: gather(comm, 1.0)))
    refused: list[str] = []

    def act(comm: ThreadComm) -> None:
        with pytest.raises(tc.MismatchError, match="w@") as caught:
            gather(comm, 1.0 + (comm.rank == 1))
        refused.append(str(caught.value))

    on_ranks(4, act)
    assert len(refused) == 4 and "rank 1" in refused[0]


def test_replicas_are_not_sent_again_and_each_element_is_sent_once() -> None:
    full = torch.arange(4000.0).reshape(40, 100)

    def act(comm: ThreadComm) -> int:
        low = 10 * comm.rank
        tree = {"replica": full, "rows": tc.Sharded(full[low : low + 10].clone(), full.shape, (low, 0))}
        transport = ThreadTransport(comm)
        found = _collectives.gather(tree, group=transport, ranks=[2], bucket_bytes=1 << 20)
        assert comm.rank != 2 or torch.equal(found["rows"], full)
        return transport.moved

    moved = on_ranks(4, act)
    assert moved[2] == 0 and sum(moved) == full.nbytes * 3 // 4, moved


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 4, 8, 16])), max_size=8), st.integers(1, 200))
def test_buckets_hold_every_entry_once_in_order_aligned_and_within_their_limit(
    sizes: list[tuple[int, int]], limit: int
) -> None:
    entries = [PackedRegion(f"{n}", Region((0,), (size,)), itemsize) for n, (size, itemsize) in enumerate(sizes)]
    buckets = list(pack_regions(entries, limit))
    packed = [entry for bucket in buckets for entry, _ in bucket.entries]
    assert packed == [entry for entry in entries if entry.nbytes]
    for bucket in buckets:
        ends = [0]
        for entry, at in bucket.entries:
            assert at >= ends[-1] and at % 16 == 0
            ends.append(at + entry.nbytes)
        assert ends[-1] <= bucket.nbytes and (ends[-1] <= limit or len(bucket.entries) == 1)


@pytest.mark.parametrize("world", [2, 5])
def test_a_rank_that_fails_to_begin_is_named_on_all(world: int) -> None:
    def act(comm: ThreadComm) -> tc.RankError:
        tree = {"w": object() if comm.rank == 1 else 5}
        with pytest.raises(tc.RankError, match="rank 1: TreeError: w: expected an array") as caught:
            _collectives.gather(tree, group=ThreadTransport(comm), bucket_bytes=1, namespace="")
        return caught.value

    assert all(list(error.ranks) == [1] for error in on_ranks(world, act))


def test_a_partial_of_optree_is_sent_with_its_function() -> None:
    def act(comm: ThreadComm) -> None:
        tree = {"f": optree.functools.partial(torch.add, torch.ones(2))} if comm.rank == 0 else None
        found = _collectives.broadcast(tree, group=ThreadTransport(comm))
        assert found["f"](1).tolist() == [2, 2]

    on_ranks(2, act)
