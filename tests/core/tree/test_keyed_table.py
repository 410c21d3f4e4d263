"""Keyed tables: whose buckets are whose, and settings that make no sense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt._core.tree.keyed_table import OwnedRows, bucket_range, columns_of, restore_table, row_starts
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
        ({"owned": (-1, 4)}, "inside 0:65536"),
        ({"keep": "best"}, "'first', 'last' or None"),
        ({"owned": (0, 1, 2)}, r"owned: expected two numbers, .*found \(0, 1, 2\). .*KeyedTable.share"),
        ({"owned": 3}, "owned: expected two numbers"),
        ({"owned": "ab"}, "owned: expected two numbers"),
        ({"owned": (0.0, 4.0)}, "owned: expected two numbers"),
        ({"buckets": "many"}, "buckets: expected a number of buckets, found 'many'"),
        ({"owned": tc.KeyedTable.modulo(1, 4), "buckets": 16}, r"modulo\(rank, world\) without buckets="),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(options, words):
    with pytest.raises(LayoutError, match=words):
        tc.KeyedTable(np.empty(0, np.int64), {}, **options)


@pytest.mark.parametrize("owned", [(0, 64), (0, 0), (64, 64), (2, 5), (np.int64(2), np.int64(5))])
def test_a_rank_owns_any_range_of_buckets(owned):
    table = tc.KeyedTable(np.empty(0, np.int64), {}, buckets=64, owned=owned)
    assert table.owned == owned and all(type(n) is int for n in table.owned)
    assert tc.KeyedTable(np.empty(0, np.int64), {}, buckets=64).owned == (0, 64)


def test_the_columns_of_a_table_have_its_arrays_shapes_and_dtypes():
    table = tc.KeyedTable(np.arange(3), {"w": np.zeros((3, 2), np.float32)}, scalars={"n": 5}, buckets=64)
    ids, offsets, slots, scalars = columns_of(table)
    assert [(column.kind, column.name) for column in (ids, offsets, slots["w"])] == [
        ("ids", ""), ("offsets", ""), ("slot", "w"),
    ]  # fmt: skip
    assert [column.shape for column in (ids, offsets, slots["w"])] == [(3,), (64,), (3, 2)]
    assert [column.dtype for column in (ids, offsets, slots["w"])] == [np.int64, np.int64, np.float32]
    assert scalars == {"n": 5} and ids.view is offsets.view is slots["w"].view and ids.view.table is table
    part = restore_table(table.spec, ..., {"w": ...}, {})
    ids, _, slots, _ = columns_of(part)
    assert ids is ... and slots == {"w": ...} and part.owned == (0, 64)


def test_other_arrays_keep_the_options_of_their_table():
    table = tc.KeyedTable(np.arange(3), {}, buckets=64, owned=(2, 5), keep="last", fill={"w": 1.0})
    ids, _, _, _ = columns_of(table)
    other = table.with_parts(ids, {"w": np.ones(3)}, {"n": 1})
    assert other.ids is table.ids and list(other.slots) == ["w"] and other.scalars == {"n": 1}
    assert (other.spec, other.owned, other.keep, other.fill) == (table.spec, (2, 5), "last", {"w": 1.0})
    assert repr(table) == "KeyedTable(3 rows, slots ; buckets (2, 5) of 64)"


def test_a_hash_table_is_saved_as_it_exports_and_loaded_as_it_imports():
    class Table:
        def export(self):
            return np.arange(2), {"w": np.ones(2)}

        def import_(self, ids, slots):
            self.loaded = ids.tolist(), list(slots)

    bound = tc.KeyedTable.of(table := Table(), buckets=8)
    state = bound.state_dict()
    assert state.ids.tolist() == [0, 1] and state.spec.buckets == 8
    bound.load_state_dict(state)
    assert table.loaded == ([0, 1], ["w"])


@pytest.mark.parametrize("asked", [(4, 4), (-1, 4), (0, 0), ("0", 4), (0, None), (0.0, 4.0)])
def test_a_rank_outside_of_its_world_owns_nothing(asked):
    for owner in (tc.KeyedTable.share, tc.KeyedTable.modulo):
        with pytest.raises(LayoutError, match="owned: expected a rank of a world of"):
            owner(*asked)
