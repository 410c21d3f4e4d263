"""The numbers of one column read alike: one unit, and as many digits after the point in every row."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.columns import bytes_column, numbers_column, seconds_column

B, S, N = bytes_column, seconds_column, numbers_column


@pytest.mark.parametrize(
    ("column", "values", "texts"),
    [
        (B, [4_000_000, 4_100_000], "4.00 MB|4.10 MB"),
        (B, [1_230_000_000, 456_000_000, None], "1.23 GB|0.46 GB"),
        (B, [45_600_000_000, 12_300_000], "45,600 MB|12 MB"),
        (B, [4_100, 12, 0], "4,100 B|12 B|0 B"),
        (B, [4_020_000_000, 12_345, 512, 0], "4.02 GB|12.3 kB|512 B|0 B"),  # more than four powers of ten
        (B, [0, 0], "0 B|0 B"),
        (B, [999_499, 999_500], "1.00 MB|1.00 MB"),
        (S, [4.0, 4.1], "4.00 s|4.10 s"),
        (S, [0.0123, 0.004, 0], "12.3 ms|4.0 ms|0.0 ms"),
        (S, [4.1, 0.0032], "4,100.0 ms|3.2 ms"),
        (S, [125, 62.4, 59.6], "2 min 05 s|1 min 02 s|1 min 00 s"),
        (S, [11_100, 720], "3 h 05 min|0 h 12 min"),
        (S, [120, 1.25], "120.0 s|1.3 s"),
        (S, [3e-7, 1e-9], "0.300 µs|0.001 µs"),
        (S, [4000, 1e-6], "1 h 07 min|1.00 µs"),
        (S, [0], "0 ms"),
        (S, [-0.5, 0.25], "-500 ms|250 ms"),
        (N, [10.4, 0.0012345], "10.4000|0.0012"),
        (N, [0.5, 0.25, "NaN", None], "0.50|0.25|NaN"),
        (N, [1234567, 8, 12.5], "1,234,567|8|12.5"),
        (N, [12_000, 7], "12,000|7"),
        (N, [3e-5, 12.123456], "3e-05|12.123"),
        (N, [2**63 - 1, 3.5e38], "9223372036854775807|3.5e+38"),
        (N, [math.nan, -math.inf, 1.5], "NaN|-Infinity|1.5"),
    ],
)
def test_values_read_alike(column, values, texts):
    text = column(values)
    assert [text(value) for value in values if value is not None] == texts.split("|")


def test_rates_have_their_unit_behind_them():
    rate = bytes_column([4e9, 4.1e9], "/s")
    assert (rate(4e9), rate(4.1e9)) == ("4.00 GB/s", "4.10 GB/s")


@given(
    st.sampled_from([B, S, N]),
    st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=5).filter(lambda v: max(v) <= 1e4 * min(v)),
)
def test_close_values_have_one_unit_and_no_value_reads_as_zero(column, values):
    text = column(values)
    texts = [text(value) for value in values]
    numbers = [part.replace(",", "").split()[0] for part in texts]
    assert len({tuple(part.split()[1::2]) for part in texts}) == 1
    assert len({len(number.partition(".")[2]) for number in numbers if "e" not in number}) == 1
    assert column is B or all(any(digit in part for digit in "123456789") for part in texts)
