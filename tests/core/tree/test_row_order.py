"""The order of a keyed table's rows against Python's integers: buckets, shares of owners, duplicates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.tree import keyed_table as module
from treeckpt._core.tree.keyed_table import bucket_range, buckets_of, sort_rows
from treeckpt._core.tree.spec import TableSpec
from treeckpt._threads import WorkerThreads
from treeckpt.errors import TreeError

ODD = [-(1 << 63), (1 << 63) - 1, -1, 0, 1, 1 << 52, (1 << 52) + 1, 65_535, 65_536, -65_536]
IDS = st.lists(st.sampled_from(ODD) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=60, unique=True)
SPECS = st.builds(
    TableSpec,
    st.sampled_from(["u64_mod", "splitmix64_mod", "i64_mod"]),
    st.just(1),
    st.sampled_from([1, 2, 7, 64, 1000, 65_536]),
)


def bucket_of(number: int, spec: TableSpec) -> int:
    """By Python's integers, which know no overflow."""
    if spec.function == "i64_mod":
        return number % spec.buckets
    mask = (1 << 64) - 1
    number &= mask
    if spec.function == "splitmix64_mod":
        number = (number + 0x9E3779B97F4A7C15) & mask
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
        number ^= number >> 31
    return number % spec.buckets


@given(IDS, SPECS)
def test_buckets_are_those_of_unsigned_integers(numbers, spec):
    ids = np.array(numbers, np.int64)
    assert buckets_of(ids, spec).tolist() == [bucket_of(number, spec) for number in numbers]


@given(IDS, SPECS)
def test_rows_are_ordered_by_bucket_and_unsigned_id(numbers, spec):
    ids = np.array(numbers, np.int64)
    found = sort_rows(ids, spec)
    expected = sorted(numbers, key=lambda number: (bucket_of(number, spec), number & ((1 << 64) - 1)))
    ordered = found.of(ids)
    assert ordered.tolist() == expected
    counts = np.bincount([bucket_of(number, spec) for number in numbers] or [0], minlength=spec.buckets)
    counts[0] -= not numbers
    assert np.diff(found.starts).tolist() == counts.tolist() and found.starts[0] == 0
    assert sort_rows(ordered, spec).of(ordered).tolist() == expected


@given(IDS, SPECS)
def test_ids_in_order_stay_where_they_are(numbers, spec):
    if spec.function == "u64_mod" and spec.buckets != 7 and spec.buckets != 1000:
        ids = np.array(numbers, np.int64)
        ordered = sort_rows(ids, spec).of(ids)
        assert sort_rows(ordered, spec).order is None


@pytest.mark.parametrize("low", [0, 8, 40, 63])
@pytest.mark.parametrize("spread", [1, 1 << 16, 0x9E3779B97F4A7C15])
def test_many_ids_are_ordered_whatever_their_bits(low, spread, monkeypatch):
    """Keys that do not fit beside their positions, alike in all the bits that do, few or all of them."""
    monkeypatch.setattr(module, "PART_SIZE", 64)
    random = np.random.default_rng(low)
    ids = random.permutation(3000).astype(np.uint64) * np.uint64(spread) + np.uint64((1 << low) - 1)
    for buckets in (1, 1 << 10, 1 << 16):
        found = sort_rows(ids.view(np.int64), TableSpec("u64_mod", 1, buckets), execute=WorkerThreads(2))
        expected = np.lexsort((ids, ids % np.uint64(buckets)))
        assert found.of(ids).tolist() == ids[expected].tolist()
        if found.order is not None:
            assert found.order.tolist() == expected.tolist()
        assert found.starts.tolist() == np.searchsorted(np.sort(ids % np.uint64(buckets)), range(buckets + 1)).tolist()


@given(IDS.filter(bool), SPECS, st.data())
def test_duplicates_are_an_error_or_one_of_them_stays(numbers, spec, data):
    again = data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=9))
    ids = np.array(data.draw(st.permutations(numbers + again)), np.int64)
    with pytest.raises(TreeError, match=f"{len(set(again))} ids more than once"):
        sort_rows(ids, spec)
    for keep, where in (("first", min), ("last", max)):
        found = sort_rows(ids, spec, keep)
        assert sorted(found.of(ids).tolist()) == sorted(numbers)
        for row, number in zip(found.order.tolist(), found.of(ids).tolist(), strict=True):
            assert row == where(np.flatnonzero(ids == number))


@pytest.mark.parametrize("spread", [1, 0x9E3779B97F4A7C15])
def test_duplicates_among_many_are_found_whatever_their_bits(spread, monkeypatch):
    monkeypatch.setattr(module, "PART_SIZE", 64)
    numbers = np.random.default_rng(1).permutation(3000).astype(np.uint64) * np.uint64(spread)
    ids = np.concatenate([numbers, numbers[[5, 2999, 5]]]).view(np.int64)
    for spec in (TableSpec("u64_mod", 1, 1 << 16), TableSpec("u64_mod", 1, 1), TableSpec("splitmix64_mod", 1, 9)):
        with pytest.raises(TreeError, match="2 ids more than once"):
            sort_rows(ids, spec)
        found = sort_rows(ids, spec, "last")
        assert len(found.order) == found.starts[-1] == 3000
        assert {2999, 5}.isdisjoint(found.order.tolist()) and {3001, 3002} <= set(found.order.tolist())


@given(st.integers(1, 100), st.integers(1, 300))
def test_owners_share_all_buckets_evenly(world, buckets):
    shares = [bucket_range(rank, world, buckets) for rank in range(world)]
    assert shares[0][0] == 0 and shares[-1][1] == buckets
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1 and sorted(sizes, reverse=True) == sizes


@pytest.mark.parametrize("group", [2, 30, 3000])
def test_of_ids_that_are_alike_in_all_bits_but_the_last_only_these_are_sorted_again(group, monkeypatch):
    random, sizes = np.random.default_rng(group), list[int]()
    alone = random.integers(1 << 62, 1 << 63, 3000).astype(np.uint64)
    alike = np.repeat(alone[: 3000 // group] ^ np.uint64(1 << 61), group) & ~np.uint64(4095)
    ids = random.permutation(np.concatenate([alone, alike + np.arange(3000, dtype=np.uint64), [(1 << 64) - 1]]))
    ids = ids.astype(np.uint64)
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda keys, **options: sizes.append(len(keys)) or argsort(keys, **options))
    found = sort_rows(ids.view(np.int64), TableSpec("u64_mod", 1, 1))
    assert found.order is not None and found.order.tolist() == np.lexsort((ids,)).tolist()
    assert sum(sizes) <= 3001
