"""The pure parts behind the command line and the dashboard: outline, extents, profile, and how things read as text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.samples import write_checkpoint
from treeckpt.core.analysis.outline import IndexOutline
from treeckpt.core.analysis.profile import profile_of, span_lanes
from treeckpt.core.format.byte_map import extents_in_file, locate_chunks
from treeckpt.core.format.timings import Span, Timings
from treeckpt.core.text import bytes_text, seconds_text, value_text, visible
from treeckpt.core.tree.value_codec import TypedValue, encode_value
from treeckpt.errors import MismatchError


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("c") / "c", max_shard_bytes=500_000)


def test_every_nodes_bytes_are_the_sum_of_its_childrens(index):
    outline, todo, leaves = IndexOutline(index), [""], 0
    while todo:
        row = outline.row(todo.pop())
        children = outline.children(row.node, count=1 << 20)
        assert outline.node_at(row.path) == row
        if row.kind == "leaf":
            leaves += 1
        else:
            assert (sum(c.nbytes for c in children), sum(c.leaves for c in children)) == (row.nbytes, row.leaves)
        todo += [c.node for c in children]
    assert leaves == len(index.leaves) and outline.row().nbytes == index.nbytes


def test_nodes_that_are_not_there(index):
    outline = IndexOutline(index)
    for name in ("9", "0.9999", "x", "0..1", "-1", "0.0.0"):
        with pytest.raises(MismatchError):
            outline.row(name)
    assert outline.node_at("model/nothing") is None and outline.node_at("model/wte.weight/x") is None


def test_extents_are_the_inverse_of_located_chunks(index):
    assert len(index.file_list) > 4  # a size limit was given: ranks have several files
    by_file = {(f.name, e.leaf, e.region, e.start, e.stop) for f in index.file_list for e in extents_in_file(index, f)}
    by_leaf = {(c.file.name, n, c.region, c.start, c.stop) for n, leaf in enumerate(index.entries)
               for c in locate_chunks(index, leaf) if c.stop > c.start}  # fmt: skip
    assert by_file == by_leaf


def timings(*spans):
    return Timings("0" * 16, 1, 2, tuple(Span(*s) for s in spans))


def test_waiting_and_lone_phases_do_not_make_a_rank_slow():
    profile = profile_of(timings(
        ("save", 0, 0, 100), ("write", 0, 0, 20, 8, 0), ("gather", 0, 20, 60, 0, 0), ("publish", 0, 60, 100, 0, 0),
        ("save", 1, 0, 60), ("write", 1, 0, 60, 8, 0), ("fsync", 1, 50, 60, 0, 1),
    ))  # fmt: skip
    assert [(r.rank, r.busy_ns, r.nbytes) for r in profile.ranks] == [(0, 20, 8), (1, 60, 8)]
    assert (profile.slowest, profile.slowdown, profile.stop_ns) == (1, 3.0, 100)
    assert [p.name for p in profile.phases][:2] == ["save", "write"]


def test_no_spans_and_spans_of_no_length():
    assert profile_of(timings()).slowest is None
    assert profile_of(timings(("save", 0, 5, 5))).slowdown == 1.0


def test_overlapping_spans_lie_in_lanes_of_their_own():
    spans = [Span("a", 0, 0, 10), Span("b", 0, 0, 6, 0, 0), Span("c", 0, 5, 9, 0, 0), Span("d", 0, 6, 8, 0, 0)]
    assert span_lanes(spans) == [0, 1, 2, 1]


@given(st.text())
def test_visible_text_has_a_glyph_for_everything(text):
    shown = visible(text)
    assert shown.isprintable() or all(c.isprintable() or c.isspace() for c in shown)
    assert "\u202e" not in shown and "\n" not in shown and "\x1b" not in shown
    shown.encode()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(values, st.integers(1, 100))
def test_any_value_reads_within_its_limit(value, limit):
    assert len(value_text(encode_value(value, "x"), limit)) <= limit


def test_values_read_as_python_writes_them():
    shown = [
        value_text(encode_value(v, "x")) for v in (None, True, 10**30, 1.5, "a'b", (1,), [1, {"k": 2}], np.float32(2))
    ]
    assert shown == ["None", "True", str(10**30), "1.5", '"a\'b"', "(1,)", "[1, {'k': 2}]", repr(np.float32(2))]
    assert value_text(encode_value(b"\x00" * 9, "x")) == "bytes of 9"


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


def test_numbers_read_with_units():
    assert [bytes_text(n) for n in (0, 999, 1000, 999_600, 1.5e9)] == ["0 B", "999 B", "1 kB", "1 MB", "1.5 GB"]
    assert [seconds_text(s) for s in (0, 2.5e-5, 0.0123, 1.5, 200, 7300)] == [
        "0 ms", "25 µs", "12.3 ms", "1.5 s", "3 min 20 s", "2 h 1 min",
    ]  # fmt: skip
