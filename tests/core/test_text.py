"""Shapes, layouts, values, bytes and times as text: what a person reads, and bounded whatever a file claims."""

import enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import BoxLayout, Mesh, MeshLayout, Replicate, Shard, StridedShard
from treeckpt._core.sharding.region import Region
from treeckpt._core.text import (
    bytes_text,
    count_text,
    layout_text,
    number_text,
    placement_text,
    rate_text,
    region_text,
    seconds_text,
    shape_text,
    time_text,
    value_text,
    value_type,
)
from treeckpt._core.tree.value_codec import TypedValue, encode_value
from treeckpt.errors import visible


class Color(enum.Enum):
    RED = 1


@given(st.text())
def test_visible_text_has_a_glyph_for_everything(text):
    shown = visible(text)
    assert shown.isprintable() or all(c.isprintable() or c.isspace() for c in shown)
    assert "\u202e" not in shown and "\n" not in shown and "\x1b" not in shown
    shown.encode()


def test_characters_without_a_glyph_are_written_as_python_escapes():
    assert visible("a\x1b\n\x7f\x80\xadé\u0100") == "a\\x1b\\x0a\\x7f\\x80\\xadé\u0100"
    assert (
        visible("\u200b\u202e\ud800\uffff\U000e0001\U0010ffff") == "\\u200b\\u202e\\ud800\\uffff\\U000e0001\\U0010ffff"
    )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(values, st.integers(1, 100))
def test_any_value_reads_within_its_limit(value, limit):
    assert len(value_text(encode_value(value, "x"), limit)) <= limit


def test_integers_of_arrays_are_whole_and_floats_are_rounded():
    assert (number_text(2**63 - 1), number_text(-7)) == ("9223372036854775807", "-7")
    assert (number_text(1 / 3), number_text(123456.7, 6)) == ("0.33333", "123457")


def test_values_read_as_python_writes_them():
    shown = [
        value_text(encode_value(v, "x")) for v in (None, True, 10**30, 1.5, "a'b", (1,), [1, {"k": 2}], np.float32(2))
    ]
    assert shown == ["None", "True", str(10**30), "1.5", '"a\'b"', "(1,)", "[1, {'k': 2}]", repr(np.float32(2))]
    assert value_text(encode_value(b"\x00" * 9, "x")) == "bytes of 9"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((), "()"),
        ((1, 2), "(1, 2)"),
        ([1], "[1]"),
        ({1}, "{1}"),
        (frozenset({1}), "frozenset({1})"),
        ({"a": 1, "b": (2, 3)}, "{'a': 1, 'b': (2, 3)}"),
        (range(3), "range(0, 3, 1)"),
        (Color.RED, "Color.RED"),
        (float("nan"), "nan"),
        (b"", "bytes of 0"),
        (b"ab", "bytes of 2"),
        (bytearray(b"abcd"), "bytearray of 4"),
    ],
    ids=str,
)
def test_containers_and_typed_values_read_as_python_writes_them(value, text):
    assert value_text(encode_value(value, "x")) == text


def test_a_value_is_shown_up_to_its_limit_and_eight_levels():
    deep = 1
    for _ in range(8):
        deep = [deep]
    assert value_text(encode_value(deep, "x")) == "[[[[[[[[1]]]]]]]]"
    assert value_text(encode_value([deep], "x")) == "[[[[[[[[[…]]]]]]]]]"
    lists = encode_value([10, 20, 30], "x")
    assert [value_text(lists, n) for n in (0, 1, 5, 11, 12)] == ["…", "…", "[10,…", "[10, 20, 3…", "[10, 20, 30]"]
    assert [value_text("abcdefghij", n) for n in (1, 4, 11, 12)] == ["…", "'ab…", "'abcdefghi…", "'abcdefghij'"]
    assert value_text(encode_value([[1, 2], [3]], "x"), 12) == "[[1, 2], [……"


@pytest.mark.parametrize(
    "bad",
    [
        TypedValue("int", ("0x" + "f" * 9999,)),
        TypedValue("numpy", ("O", "")),
        TypedValue("enum", (1,)),
        TypedValue("?", ()),
    ],
)
def test_values_that_claim_nonsense_still_read_as_something(bad):
    assert value_text(bad)


def test_values_have_types():
    values = (None, True, 1, 1.5, "a", (1,), np.float32(2), b"")
    assert [value_type(encode_value(v, "x")) for v in values] == [
        "None", "bool", "int", "float", "str", "tuple", "numpy", "bytes",
    ]  # fmt: skip


def test_numbers_read_with_units():
    assert [bytes_text(n) for n in (0, 999, 1000, 999_600, 1.5e9)] == ["0 B", "999 B", "1 kB", "1 MB", "1.5 GB"]
    assert [bytes_text(n) for n in (999.4, 999.5, 1.236e6, 5e18, 2e21, -1500)] == [
        "999 B", "1 kB", "1.24 MB", "5 EB", "2e+03 EB", "-1.5 kB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0, 2.5e-5, 0.0123, 1.5, 200, 7300)] == [
        "0 ms", "25 µs", "12.3 ms", "1.5 s", "3 min 20 s", "2 h 1 min",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (9.9e-4, 1e-3, 0.999, 1, 99.9, 100, 3599, 3600, 86399)] == [
        "990 µs", "1 ms", "999 ms", "1 s", "99.9 s", "1 min 40 s", "59 min 59 s", "1 h 0 min", "23 h 59 min",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (9.996e-4, 0.99949, 0.9996, 99.94, 99.96, 119.6, 3599.7, 7199.9)] == [
        "1 ms", "999 ms", "1 s", "99.9 s", "1 min 40 s", "2 min 0 s", "1 h 0 min", "2 h 0 min",
    ]  # fmt: skip
    assert [rate_text(3e9, 2), rate_text(5e6), rate_text(1, 0), rate_text(1, -1)] == ["1.5 GB/s", "5 MB/s", "-", "-"]


def test_times_read_to_the_second_in_their_zone():
    assert time_text(1_750_000_000_999_999_999) == "2025-06-15 15:06:40 UTC"
    assert [time_text(None), time_text(1 << 100)] == ["-", "out of range"]


def test_a_number_of_things_is_in_the_singular_for_one():
    assert [count_text(n, "shard") for n in (0, 1, 2, 1024)] == ["0 shards", "1 shard", "2 shards", "1,024 shards"]
    assert [count_text(n, "leaf", "leaves") for n in (1, 3)] == ["1 leaf", "3 leaves"]


def test_shapes_and_regions_read_as_python_writes_them():
    assert [shape_text(()), shape_text((3,)), shape_text((1024, 768))] == ["[]", "[3]", "[1024, 768]"]
    assert region_text(Region((0, 128), (512, 64))) == "[0:512, 128:192]" and region_text(Region((), ())) == "[]"


def test_layouts_read_as_placements_on_a_mesh():
    ranks = encode_runs(range(6))
    strided, shard, replicate = StridedShard(1, 4), Shard(2), Replicate()
    assert [placement_text(p) for p in (strided, shard, replicate)] == ["StridedShard(1, 4)", "Shard(2)", "Replicate"]
    assert layout_text(None) == layout_text(BoxLayout(())) == "explicit pieces"
    assert layout_text(MeshLayout(Mesh((2, 3), ranks), (replicate, replicate))) == "whole on 6 ranks"
    assert layout_text(MeshLayout(Mesh((1,), encode_runs([5])), (replicate,))) == "whole on one rank"
    named = MeshLayout(Mesh((2, 3), ranks, ("dp", "tp")), (shard, replicate))
    assert layout_text(named) == "dp: Shard(2), tp: Replicate on a 2×3 mesh"
    assert layout_text(MeshLayout(Mesh((6,), ranks), (shard,))) == "Shard(2) on a 6 mesh"
