"""A picture of numbers keeps the largest value of each cell, and every cell with a NaN."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from treeckpt._inspect.numbers import IMAGE_COLUMNS, IMAGE_ROWS, NOT_FINITE_CELL, number_image


def drawn(array):
    found = number_image(array.view(np.uint8).reshape(*array.shape, array.itemsize), array.dtype.name)
    return found, np.frombuffer(found.cells, np.int8).reshape(found.rows, found.columns)


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(width=32)))
def test_a_small_plane_is_drawn_element_by_element(array):
    found, cells = drawn(array)
    finite = np.isfinite(array)
    assert ((cells == NOT_FINITE_CELL) == ~finite).all() and cells.shape == array.shape
    assert found.limit == np.abs(array[finite].astype(float)).max(initial=0)
    if found.limit:
        assert np.allclose(cells[finite], array[finite].astype(float) / found.limit * 127, atol=0.51)


def test_one_large_value_and_one_nan_of_millions_stay_visible():
    array = np.random.default_rng(0).standard_normal((2000, 1500)).astype(np.float32)
    array[1234, 77], array[3, 1499] = -900, np.nan
    found, cells = drawn(array)
    assert cells.shape == (IMAGE_ROWS, IMAGE_COLUMNS) and found.limit == 900
    assert np.argwhere(cells == -127).tolist() == [[1234 * IMAGE_ROWS // 2000, 77 * IMAGE_COLUMNS // 1500]]
    assert np.argwhere(cells == NOT_FINITE_CELL).tolist() == [[0, IMAGE_COLUMNS - 1]]


def test_one_long_row_is_drawn_in_parts():
    array = np.zeros((1, 3_000_000), np.float32)
    array[0, 2_999_999] = 4
    found, cells = drawn(array)
    assert (found.rows, found.limit, cells[0, -1], cells[0, :-1].any()) == (1, 4.0, 127, False)


def test_text_is_not_drawn():
    assert number_image(np.zeros((2, 2, 4), np.uint8), "bytes4") is None
