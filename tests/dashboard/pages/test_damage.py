"""Damage is looked up by bytes and by leaves, and listed a page at a time."""

import numpy as np

from treeckpt._core.format.byte_map import BadBytes
from treeckpt_dashboard.pages.damage import NO_DAMAGE, Damage

BAD = (BadBytes("a", 0, 10, "x"), BadBytes("a", 5, 7, "y"), BadBytes("b", 3, 4, "z"))


def test_bytes_are_damaged_where_any_range_reaches_them():
    damage = Damage(BAD, (np.empty(0, np.int64),) * 3, ranges={"a": ([0, 5], [10, 10]), "b": ([3], [4])})
    hit = [at for at in range(12) if damage.of_bytes("a", at, at + 1)]
    assert hit == list(range(10)) and damage.of_bytes("b", 0, 9) and not damage.of_bytes("b", 0, 3)
    assert not damage.of_bytes("c", 0, 9) and not NO_DAMAGE.of_bytes("a", 0, 9)


def test_pages_of_rows_together_are_all_of_them():
    damage = Damage(BAD, (np.array([2, 5, 9]), np.array([], np.int64), np.array([5])), leaves=np.array([2, 5, 9]))
    whole = damage.rows_from(0, 100)
    assert [(one.why, leaf) for one, leaf in whole] == [("x", 2), ("x", 5), ("x", 9), ("y", None), ("z", 5)]
    assert damage.rows == len(whole)
    for size in (1, 2, 3):
        assert [row for at in range(0, 5, size) for row in damage.rows_from(at, size)] == whole
    assert damage.count(3, 9) == 1 and damage.holds(9) and not damage.holds(3)


def test_until_leaves_are_located_each_range_has_a_row():
    damage = Damage(BAD, (np.empty(0, np.int64),) * 3, located=False)
    assert [leaf for _, leaf in damage.rows_from(0, 9)] == [None] * 3 and not damage.holds(0)
