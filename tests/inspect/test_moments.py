"""Statistics of parts merge to those of the whole, whatever the parts, the dtype and the size of the numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from treeckpt._core.sharding.dtypes import numpy_dtype
from treeckpt._inspect.numbers import BATCH, Moments, merged, moments_of, placed


def raw(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def as_float(array):
    with np.errstate(all="ignore"):
        wide = np.abs(array.astype(np.complex128)) if array.dtype.kind == "c" else array.astype(np.float64)
    return wide.reshape(-1)


def expect_of_numpy(found, numbers):
    finite = numbers[np.isfinite(numbers)]
    assert (found.count, found.nan) == (numbers.size, np.isnan(numbers).sum())
    assert found.infinite == np.isinf(numbers).sum() and found.finite == len(finite)
    if not len(finite):
        assert (found.norm, found.mean, found.deviation, found.largest) == (0, 0, 0, 0)
        return
    scale = np.abs(finite).max() or 1.0
    assert (float(found.low), float(found.high), float(found.largest)) == (
        finite.min(), finite.max(), np.abs(finite).max(),
    )  # fmt: skip
    near = {"rel_tol": 1e-9, "abs_tol": 1e-9 * scale}
    if scale < 1e306:  # the mean of larger ones overflows in numpy
        assert math.isclose(found.mean, (finite / scale).mean() * scale, **near)
        assert math.isclose(found.norm, scale * np.linalg.norm(finite / scale), **near)
        assert math.isclose(found.deviation, (finite / scale).std() * scale, rel_tol=1e-6, abs_tol=1e-8 * scale)


DTYPES = st.sampled_from(["f4", "f8", "f2", "i8", "u1", "c8", "?"])


@given(hnp.arrays(DTYPES, st.integers(0, 60)))
def test_statistics_are_those_of_numpy(array):
    found, numbers = moments_of(raw(array), array.dtype.name), as_float(array)
    expect_of_numpy(found, numbers)
    places = [np.flatnonzero(bad(numbers)).tolist() for bad in (np.isnan, np.isinf)]
    assert [found.first_nan, found.first_infinite] == [place[0] if place else -1 for place in places]


def test_the_first_nan_of_many_batches_is_found():
    numbers = np.zeros(3 * BATCH, np.float32)
    numbers[[BATCH + 5, 2 * BATCH]], numbers[7] = np.nan, -np.inf
    found = moments_of(raw(numbers), "float32")
    assert (found.first_nan, found.first_infinite) == (BATCH + 5, 7)
    assert placed(found, lambda at: 2 * at).first_nan == 2 * BATCH + 10 and placed(Moments(), abs) == Moments()


@given(hnp.arrays(DTYPES, st.integers(0, 60)), st.lists(st.integers(0, 60), max_size=5), st.randoms())
def test_parts_in_any_order_merge_to_the_whole(array, cuts, random):
    parts = np.split(array, sorted(cuts))
    random.shuffle(parts)
    found = Moments()
    for part in parts:
        found = merged(found, moments_of(raw(part), array.dtype.name))
    expect_of_numpy(found, as_float(array))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "int4"]
)
def test_low_precision_counts_as_what_it_encodes(dtype):
    codes = np.arange(65536, dtype=np.uint16) if dtype == "bfloat16" else np.arange(16, dtype=np.uint8)
    codes = np.arange(256, dtype=np.uint8) if dtype.startswith("float8") else codes
    if dtype == "int4":
        codes = np.array([-8, 7, 3], np.int8)
    numbers = codes.astype(float) if dtype == "int4" else as_float(codes.view(numpy_dtype(dtype)))
    expect_of_numpy(moments_of(raw(codes), dtype), numbers)


def test_half_precision_does_not_overflow():
    array = np.full(3 * BATCH + 7, 60_000, np.float16)
    found = moments_of(raw(array), "float16")
    assert math.isclose(found.mean, 60_000) and found.deviation < 1e-9 and found.count == array.size
    assert math.isclose(found.norm, 60_000 * math.sqrt(array.size))


def test_a_small_deviation_from_a_large_mean_is_kept():
    array = 1e6 + np.random.default_rng(0).standard_normal(BATCH + 1000)
    assert math.isclose(moments_of(raw(array), "float64").deviation, array.std(), rel_tol=1e-9)


def test_the_largest_and_the_smallest_numbers_neither_overflow_nor_vanish():
    for size in (1e300, 1e-300, 5e-324):
        found = moments_of(raw(np.array([size, -size, size, size])), "float64")
        assert math.isclose(found.norm, 2 * size) and math.isclose(found.mean, size / 2, abs_tol=5e-324)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_have_exact_ends(dtype):
    limits = np.iinfo(dtype)
    numbers = [limits.max, limits.max - 1, limits.min, 2**53 + 1]
    found = moments_of(raw(np.array(numbers, dtype)), dtype)
    assert (found.low, found.high, found.mean) == (limits.min, limits.max, sum(numbers) / 4)
    found = merged(
        moments_of(raw(np.array([5, 2**53 + 1], dtype)), dtype), moments_of(raw(np.array([7], dtype)), dtype)
    )
    assert (found.low, found.high) == (5, 2**53 + 1)


def test_text_and_times_have_no_statistics():
    assert moments_of(np.zeros(8, np.uint8), "bytes4") is None
    assert moments_of(np.zeros(8, np.uint8), "datetime64[s]") is None
