"""Keyed tables: whose buckets are whose, and settings that make no sense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt.core.tree.keyed_table import OwnedRows, row_starts
from treeckpt.core.tree.row_order import bucket_range
from treeckpt.errors import LayoutError, MismatchError


@given(st.permutations(range(6)), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_rows_follow_each_other_as_their_buckets_do(order, rows):
    claims = [OwnedRows(rank, *bucket_range(rank, 6, 64), rows[rank]) for rank in order]
    starts, total = row_starts([*claims, claims[0]], 64, "t")
    assert total == sum(rows)
    assert [starts[bucket_range(rank, 6, 64)] for rank in range(6)] == np.cumsum([0, *rows])[:-1].tolist()


@pytest.mark.parametrize(
    ("claims", "kind", "words"),
    [
        ([OwnedRows(0, 0, 8, 3)], LayoutError, "no rank owns buckets 8:16"),
        ([OwnedRows(0, 0, 8, 3), OwnedRows(1, 9, 16, 3)], LayoutError, "no rank owns buckets 8:9"),
        ([OwnedRows(0, 0, 8, 3), OwnedRows(1, 7, 16, 3)], LayoutError, "bucket 7 is owned by rank 1 and by another"),
        ([OwnedRows(0, 0, 16, 3), OwnedRows(1, 0, 16, 4)], MismatchError, "rank 1 has 4"),
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
