"""Raw elements become the numbers that torch reads in them."""

import numpy as np
import pytest
import torch

from treeckpt._inspect.numbers import as_numbers

FLOATS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_pattern_of_a_small_float_is_the_number_that_torch_sees(dtype):
    width = getattr(torch, dtype).itemsize
    raw = np.arange(1 << (8 * width), dtype=f"<u{width}")
    seen = torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).to(torch.float64).numpy()
    np.testing.assert_array_equal(as_numbers(raw, dtype), seen)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "float32", "float64", "complex64", "complex128"])
def test_plain_dtypes_keep_their_numbers_and_shape(dtype):
    array = np.array([[0, 1, 3], [1, 0, 100]]).astype(dtype)
    width = array.dtype.itemsize
    raw = array.view("<c16" if width == 16 else f"<u{width}")
    np.testing.assert_array_equal(as_numbers(raw, dtype), array)


def test_half_complex_numbers_are_pairs():
    halves = np.array([1, 2, -3, 0.5], "<f2")
    np.testing.assert_array_equal(as_numbers(halves.view("<u4"), "complex32"), [1 + 2j, -3 + 0.5j])


@pytest.mark.parametrize("dtype", ["datetime64[s]", "str2", "bytes4", "void3"])
def test_what_is_no_number_has_none(dtype):
    assert as_numbers(np.zeros(2, "u1"), dtype) is None


def test_narrow_integers_stand_in_a_byte_each():
    raw = np.array([0, 1, 7, 8, 15], "u1")
    np.testing.assert_array_equal(as_numbers(raw, "int4"), [0, 1, 7, -8, -1])
    np.testing.assert_array_equal(as_numbers(raw, "uint4"), raw)
    np.testing.assert_array_equal(as_numbers(np.array([0, 3, 0xFC], "u1"), "int3"), [0, 3, -4])


def test_elements_of_two_numbers_have_one_dimension_more():
    raw = np.array([[0x21, 0x7F]], "u1")
    np.testing.assert_array_equal(as_numbers(raw, "float4_e2m1fn_x2"), [[[0.5, 1], [-6, 6]]])
