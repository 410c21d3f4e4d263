"""Elements of every dtype are shown as what they are, and summed up as numpy would."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from treeckpt._inspect.numbers import BATCH, BINS, element_stats, element_texts, elements_of


def raw(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)


@given(hnp.arrays(st.sampled_from(["f4", "f8", "f2", "i8", "u1", "c8", "?"]), st.integers(1, 60)))
def test_statistics_are_those_of_numpy(array):
    name = array.dtype.name
    found = element_stats(raw(array), name)
    with np.errstate(all="ignore"):
        numbers = (np.abs(array.astype(np.complex128)) if array.dtype.kind == "c" else array).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    assert (found.count, found.nan, found.infinite) == (
        array.size, np.isnan(numbers).sum(), np.isinf(numbers).sum(),
    )  # fmt: skip
    assert found.zero == (numbers == 0).sum()
    if not len(finite):
        assert found.minimum is None and found.bins == ()
        return
    exact = array if array.dtype.kind == "i" else finite
    assert (found.minimum, found.maximum) == (exact.min().item(), exact.max().item())
    assert sum(found.bins) == len(finite) and (len(found.bins), len(found.edges)) == (BINS, BINS + 1)
    assert (
        list(found.edges) == sorted(found.edges) and found.edges[0] <= finite.min() <= finite.max() <= found.edges[-1]
    )
    if np.abs(finite).max() < 1e150:
        assert math.isclose(found.mean, finite.mean(), rel_tol=1e-9, abs_tol=1e-9 * np.abs(finite).max())
        scale = np.abs(finite).max() or 1.0  # squares of numbers below 1e-150 are zero
        assert math.isclose(found.norm, scale * np.linalg.norm(finite / scale), rel_tol=1e-9, abs_tol=1e-300)
        assert math.isclose(found.deviation, finite.std(), rel_tol=1e-6, abs_tol=1e-9 * np.abs(finite).max())


BEYOND = [2**53 + 1, 2**62 + 3, -(2**63), 2**63 - 1, 2**53 + 3]


@pytest.mark.parametrize(("dtype", "numbers"), [("int64", BEYOND), ("uint64", [2**64 - 1, 2**63 + 1, 2**53 + 1])])
def test_wide_integers_have_exact_ends_and_a_mean_rounded_once(dtype, numbers):
    found = element_stats(raw(np.array(numbers * 1000, dtype)), dtype)
    assert (found.minimum, found.maximum, found.mean) == (min(numbers), max(numbers), sum(numbers) / len(numbers))
    assert type(found.minimum) is type(found.maximum) is int


def test_pieces_add_up_to_the_whole():
    array = np.arange(BATCH * 2 + 5, dtype=np.uint16).astype(np.float32)
    found = element_stats(raw(array), "float32")
    assert found.count == array.size == sum(found.bins) and found.maximum == 65535
    assert math.isclose(found.mean, array.astype(float).mean())


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("float32", np.array([1.5, -0.0, np.nan, np.inf], "f4"), ["1.5", "-0", "nan", "inf"]),
        ("int64", np.array([2**62 + 1, -3]), ["4611686018427387905", "-3"]),
        ("bool", np.array([True, False]), ["true", "false"]),
        ("complex64", np.array([1 + 2j, -1.5j], "c8"), ["1+2j", "-0-1.5j"]),
        ("bfloat16", np.array([0x3FC0, 0xFF80], "u2"), ["1.5", "-inf"]),
        ("float8_e4m3fn", np.array([0x38, 0x7F], "u1"), ["1", "nan"]),
        ("float8_e5m2", np.array([0x3C, 0x7C], "u1"), ["1", "inf"]),
        ("float8_e8m0fnu", np.array([128, 255], "u1"), ["2", "nan"]),
        ("float4_e2m1fn_x2", np.array([0x72, 0xF1], "u1"), ["1 6", "0.5 -6"]),
        ("complex32", np.array([[1, 2]], "f2").view("f4")[0], ["1+2j"]),
        ("uint4", np.array([9], "u1"), ["9"]),
        ("int2", np.array([255], "u1"), ["-1"]),
        ("str3", np.array(["ab", "xyz"], "U3"), ["ab", "xyz"]),
        ("datetime64[s]", np.array(["2020-01-02"], "M8[s]"), ["datetime.datetime(2020, 1, 2, 0, 0)"]),
    ],
)
def test_elements_read_as_a_person_would_write_them(name, data, texts):
    assert element_texts(raw(data), name) == texts


def test_texts_and_times_have_no_statistics():
    assert element_stats(raw(np.array(["ab"])), "str2") is None
    assert elements_of(raw(np.array([5], "M8[s]")), "datetime64[s]") is None


def test_the_widest_numbers_still_have_a_histogram():
    found = element_stats(raw(np.array([-1.7e308, 1.7e308, 0.0])), "float64")
    assert sum(found.bins) == 3 and all(map(math.isfinite, found.edges))


@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
def test_equal_elements_near_the_largest_float_fall_in_one_bin(value):
    found = element_stats(raw(np.full(3, value)), "float64")
    assert (found.minimum, found.maximum, sum(found.bins)) == (value, value, 3)
    assert all(map(math.isfinite, found.edges))


def test_bins_divide_the_range_evenly_and_equal_elements_lie_in_the_middle():
    found = element_stats(raw(np.linspace(-2, 4, BINS + 1)), "float64")
    assert np.allclose(found.edges, np.linspace(-2, 4, BINS + 1)) and found.bins == (1,) * (BINS - 1) + (2,)
    for value, low, high in ((8.0, 4.0, 12.0), (-8.0, -12.0, -4.0), (0.5, 0.0, 1.0), (0.0, -0.5, 0.5)):
        found = element_stats(raw(np.full(3, value)), "float64")
        assert (found.edges[0], found.edges[-1], found.bins[BINS // 2]) == (low, high, 3)
