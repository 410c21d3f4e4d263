"""Keyed tables' algebra against Python's integers: buckets, order, shares of owners, duplicates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt.core import table
from treeckpt.core.errors import LayoutError, MismatchError, TreeError
from treeckpt.core.rows import Claim, row_starts
from treeckpt.core.spec import TableSpec
from treeckpt.core.table import arrange, buckets_of, share_of

ODD = [-(1 << 63), (1 << 63) - 1, -1, 0, 1, 1 << 52, (1 << 52) + 1, 65_535, 65_536, -65_536]
IDS = st.lists(st.sampled_from(ODD) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=60, unique=True)
SPECS = st.builds(
    TableSpec, st.sampled_from(["u64_mod", "splitmix64_mod"]), st.just(1), st.sampled_from([1, 2, 7, 64, 1000, 65_536])
)


def bucket_of(number: int, spec: TableSpec) -> int:
    """By Python's integers, which know no overflow."""
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
    found = arrange(ids, spec)
    expected = sorted(numbers, key=lambda number: (bucket_of(number, spec), number & ((1 << 64) - 1)))
    assert found.ids.tolist() == expected
    assert (ids if found.order is None else ids[found.order]).tolist() == expected
    counts = np.bincount([bucket_of(number, spec) for number in numbers] or [0], minlength=spec.buckets)
    counts[0] -= not numbers
    assert np.diff(found.starts).tolist() == counts.tolist() and found.starts[0] == 0
    assert arrange(found.ids, spec).ids.tolist() == expected


@given(IDS, SPECS)
def test_ids_in_order_stay_where_they_are(numbers, spec):
    if spec.function == "u64_mod" and spec.buckets != 7 and spec.buckets != 1000:
        ordered = arrange(np.array(numbers, np.int64), spec).ids
        assert arrange(ordered, spec).order is None


@pytest.mark.parametrize("low", [0, 8, 40, 63])
@pytest.mark.parametrize("spread", [1, 1 << 16, 0x9E3779B97F4A7C15])
def test_many_ids_are_ordered_whatever_their_bits(low, spread, monkeypatch):
    """Keys that do not fit beside their positions, alike in all the bits that do, few or all of them."""
    monkeypatch.setattr(table, "PART", 64)
    random = np.random.default_rng(low)
    ids = random.permutation(3000).astype(np.uint64) * np.uint64(spread) + np.uint64((1 << low) - 1)
    for buckets in (1, 1 << 10, 1 << 16):
        found = arrange(ids.view(np.int64), TableSpec("u64_mod", 1, buckets))
        expected = np.lexsort((ids, ids % np.uint64(buckets)))
        assert found.ids.tolist() == ids[expected].view(np.int64).tolist()
        if found.order is not None:
            assert found.order.tolist() == expected.tolist()
        assert found.starts.tolist() == np.searchsorted(np.sort(ids % np.uint64(buckets)), range(buckets + 1)).tolist()


@given(IDS.filter(bool), SPECS, st.data())
def test_duplicates_are_an_error_or_one_of_them_stays(numbers, spec, data):
    again = data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=9))
    ids = np.array(data.draw(st.permutations(numbers + again)), np.int64)
    with pytest.raises(TreeError, match=f"{len(set(again))} ids more than once"):
        arrange(ids, spec)
    for keep, where in (("first", min), ("last", max)):
        found = arrange(ids, spec, keep)
        assert sorted(found.ids.tolist()) == sorted(numbers)
        for row, number in zip(found.order.tolist(), found.ids.tolist(), strict=True):
            assert row == where(np.flatnonzero(ids == number))


@given(st.integers(1, 100), st.integers(1, 300))
def test_owners_share_all_buckets_evenly(world, buckets):
    shares = [share_of(rank, world, buckets) for rank in range(world)]
    assert shares[0][0] == 0 and shares[-1][1] == buckets
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1 and sorted(sizes, reverse=True) == sizes


@given(st.permutations(range(6)), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_rows_follow_each_other_as_their_buckets_do(order, rows):
    claims = [Claim(rank, *share_of(rank, 6, 64), rows[rank]) for rank in order]
    starts, total = row_starts([*claims, claims[0]], 64, "t")
    assert total == sum(rows)
    assert [starts[share_of(rank, 6, 64)] for rank in range(6)] == np.cumsum([0, *rows])[:-1].tolist()


@pytest.mark.parametrize(
    ("claims", "kind", "words"),
    [
        ([Claim(0, 0, 8, 3)], LayoutError, "no rank owns buckets 8:16"),
        ([Claim(0, 0, 8, 3), Claim(1, 9, 16, 3)], LayoutError, "no rank owns buckets 8:9"),
        ([Claim(0, 0, 8, 3), Claim(1, 7, 16, 3)], LayoutError, "bucket 7 is owned by rank 1 and by another"),
        ([Claim(0, 0, 16, 3), Claim(1, 0, 16, 4)], MismatchError, "rank 1 has 4"),
    ],
)
def test_owners_that_leave_out_or_share_buckets_are_refused(claims, kind, words):
    with pytest.raises(kind, match=words):
        row_starts(claims, 16, "t")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"buckets": 0}, "buckets"),
        ({"partition": "abs_mod"}, "one of u64_mod, splitmix64_mod"),
        ({"owned": (5, 4)}, "inside 0:65536"),
        ({"owned": (0, 65_537)}, "inside 0:65536"),
        ({"keep": "best"}, "'first', 'last' or None"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(options, words):
    with pytest.raises(LayoutError, match=words):
        tc.KeyedTable(np.empty(0, np.int64), {}, **options)
