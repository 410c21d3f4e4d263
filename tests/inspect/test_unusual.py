"""Arrays are ranked by how unusual their numbers are: NaN and infinity, zeros, what differs from arrays like it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._inspect.ranking import Ranking, group_of, rank_unusual, reason_of


def columns(rows):
    """Rows of (count, nan, infinite, low, high, norm)."""
    names = ("count", "nan", "infinite", "low", "high", "norm")
    return {name: np.array([row[at] for row in rows]) for at, name in enumerate(names)}


USUAL = (100, 0, 0, -3.0, 3.0, 10.0)


def reasons(rows):
    paths = [f"layers.{n}.weight" for n in range(len(rows))]
    table = columns(rows)
    ranking = rank_unusual(paths, table)
    return [
        (int(row), reason_of(ranking, row, int(table["nan"][row]), int(table["infinite"][row])))
        for row in ranking.order
    ]


def test_what_is_not_finite_comes_first_then_zeros_then_what_differs_from_its_group():
    rows = [USUAL] * 5 + [
        (100, 0, 0, -3.0, 3.0, 200.0),
        (100, 0, 0, 0.0, 0.0, 0.0),
        (100, 1, 0, -3.0, 3.0, 10.0),
        (100, 0, 60, -3.0, 3.0, 10.0),
    ]
    found = reasons(rows)
    assert found[:4] == [(8, "60 Inf"), (7, "1 NaN"), (6, "all zero"), (5, "RMS 20 × that of like arrays")]
    assert {reason for _, reason in found[4:]} == {""}


def test_a_value_that_stands_out_is_named():
    rows = [(10_000, 0, 0, -4.0, 4.0, 100.0)] * 6 + [(10_000, 0, 0, -4.0, 90.0, 130.0)]
    assert reasons(rows)[0] == (6, "largest value 69.2 × the RMS")


def test_zeros_are_usual_where_like_arrays_are_zero_too():
    zero = (100, 0, 0, 0.0, 0.0, 0.0)
    assert {reason for _, reason in reasons([zero] * 5)} == {""}


def test_arrays_are_alike_if_their_paths_differ_in_numbers():
    assert group_of("m/layers.12.w1") == "m/layers.#.w#" == group_of("m/layers.3.w2")


def test_numbers_of_no_common_scale_stay_behind_what_is_not_finite():
    rows = [(1, 0, 0, -1.0, 1.0, 1e-300)] * 4 + [(1, 0, 0, -1.0, 1.0, 1e300), (2, 1, 0, -1.0, 1.0, 1.0)]
    assert [row for row, _ in reasons(rows)][:2] == [5, 4]


NUMBERS = st.floats(0, 1e300)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 3), NUMBERS, NUMBERS, NUMBERS)))
def test_every_row_is_ranked_once_whatever_the_numbers_are(drawn):
    rows = [
        (count + nan + infinite, nan, infinite, -low, high, norm) for count, nan, infinite, low, high, norm in drawn
    ]
    found = reasons(rows)
    assert sorted(row for row, _ in found) == list(range(len(rows)))
    bad = [row for row, _ in found if rows[row][1] + rows[row][2]]
    assert [row for row, _ in found[: len(bad)]] == bad


def test_a_reason_has_plain_numbers():
    ranking = Ranking(np.zeros(1, np.int64), *(np.array([number]) for number in (4.0, 1 / 73_512, 1.0)))
    assert reason_of(ranking, 0, 0, 0) == "RMS 1/73,500 of that of like arrays"
    ranking = Ranking(np.zeros(1, np.int64), *(np.array([number]) for number in (4.0, 1.0, 12_345.0)))
    assert reason_of(ranking, 0, 0, 0) == "largest value 12,300 × the RMS"
