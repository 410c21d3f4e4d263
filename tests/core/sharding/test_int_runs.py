"""Run-length columns: exact for any column, short for regular ones, checked before they are expanded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.sharding.int_runs import (
    MAX_LENGTH,
    check_runs,
    decode_runs,
    encode_runs,
    length_of,
    rises_strictly,
    value_at,
)
from treeckpt.errors import FormatError

BIG = 1 << 62


@st.composite
def columns(draw):
    """Random columns, and regular ones with a few changes."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(-BIG // 2, BIG // 2) | st.integers(0, 3), max_size=30))
    column = np.array([draw(st.integers(0, 50))])
    for _ in range(draw(st.integers(1, 4))):
        step, count = draw(st.integers(-5, 9)), draw(st.integers(1, 4))
        column = (np.arange(count)[:, None] * step + column).reshape(-1)
    numbers = column.tolist()
    for at in draw(st.lists(st.integers(0, len(numbers) - 1), max_size=2)):
        numbers[at] += 1
    return numbers


@given(columns())
def test_columns_come_back(column):
    runs = encode_runs(column)
    assert decode_runs(runs).tolist() == column
    assert length_of(runs) == len(column)
    check_runs(runs, length=len(column), path="x")


@given(columns())
def test_single_values_are_found_without_expanding(column):
    runs = encode_runs(column)
    assert [value_at(runs, i) for i in range(len(column))] == column
    for outside in (len(column), -1):
        with pytest.raises(IndexError):
            value_at(runs, outside)


@given(columns())
def test_bounds_are_the_extremes(column):
    runs = encode_runs(column)
    if column:
        low, high = min(column), max(column) + 1
        check_runs(runs, path="x", low=low, high=high)
        with pytest.raises(FormatError, match=f"x: expected numbers from {low + 1} to"):
            check_runs(runs, path="x", low=low + 1, high=high)
        with pytest.raises(FormatError, match=f"found .* to {high - 1}"):
            check_runs(runs, path="x", low=low, high=high - 1)


@given(columns())
def test_encoding_takes_at_most_one_and_a_half_integers_an_entry(column):
    assert sum(map(len, encode_runs(column))) <= 1.5 * len(column) + 2


@given(st.sets(st.integers(0, 40), min_size=2), st.data())
def test_rising_columns_are_told_from_others(numbers, data):
    column = sorted(numbers)
    assert rises_strictly(encode_runs(column), column[0], column[-1])
    assert not rises_strictly(encode_runs(column), column[0], column[-1] + 1)
    assert not rises_strictly(encode_runs(column), column[0] - 1, column[-1])
    at = data.draw(st.integers(1, len(column) - 1))
    broken = [*column[:at], column[at - 1], *column[at:]]
    assert not rises_strictly(encode_runs(broken), column[0], column[-1])


@given(columns())
def test_rising_is_what_numpy_says(column):
    if column:
        rising = bool((np.diff(column) > 0).all())
        assert rises_strictly(encode_runs(column), column[0], column[-1]) == rising


@pytest.mark.parametrize(
    "column",
    [
        np.add.outer(np.arange(128), np.arange(128) * 128).ravel(),
        np.repeat(np.arange(64) * 7, 64),
        np.tile(np.arange(100), 100),
        np.add.outer(np.add.outer(np.arange(16) * 4096, np.arange(16)), np.arange(16) * 16).ravel(),
    ],
    ids=["transposed", "repeated", "tiled", "three levels"],
)
def test_a_regular_sharding_of_thousands_of_ranks_is_one_run(column):
    assert len(encode_runs(column)) == 1


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_constants(count):
    assert decode_runs(encode_runs([7] * count)).tolist() == [7] * count


@pytest.mark.parametrize(
    "runs",
    [
        ((),),
        ((0, 1),),
        ((0, 1, 0),),
        ((0, 1, -3),),
        ((0, 1, 3, 4),),
        ((0, 0, 1 << 60),),
        ((0, 0, MAX_LENGTH, 0, MAX_LENGTH),),
        ((0, *(0, 1 << 62) * 100_000),),
        ((0, *(0, 2) * 10_000),),
        ((1 << 63,),),
        ((-(1 << 63) - 1,),),
        ((0, 1 << 62, 3),),
        ((BIG, 1, 2),),
    ],
)
def test_malformed_giant_and_overflowing_runs_are_refused_unexpanded(runs):
    with pytest.raises(FormatError, match="leaf/x"):
        check_runs(runs, path="leaf/x")


def test_a_column_of_another_length_or_out_of_bounds_is_refused():
    runs = encode_runs([3, 4, 5, 9])
    check_runs(runs, length=4, path="x", low=3, high=10)
    for bad in ({"length": 5}, {"low": 4}, {"high": 9}):
        with pytest.raises(FormatError):
            check_runs(runs, path="x", **bad)
