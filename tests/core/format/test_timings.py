"""Timings: exact, sealed, and spans that nest as they say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.shard_header import sealed
from treeckpt._core.format.timings import Host, Span, Timings, decode_timings, encode_timings, timings_name
from treeckpt.errors import CorruptError, FormatError

SAVE_ID = "0123456789abcdef"


@st.composite
def timings(draw):
    world = draw(st.integers(1, 3))
    counts = [0] * world
    spans = []
    for _ in range(draw(st.integers(0, 8))):
        rank = draw(st.integers(0, world - 1))
        start = draw(st.integers(0, 1 << 61))
        spans.append(
            Span(
                draw(st.text(max_size=5)), rank, start, start + draw(st.integers(0, 10**12)),
                draw(st.integers(0, 1 << 50)), draw(st.integers(-1, counts[rank] - 1)),
            )
        )  # fmt: skip
        counts[rank] += 1
    return Timings(SAVE_ID, draw(st.none() | st.integers(0, 9)), world, tuple(spans), draw(st.none() | st.text()))


@given(timings())
def test_timings_come_back(found):
    assert decode_timings(encode_timings(found), "t") == found
    assert [s for rank in range(found.world) for s in found.of_rank(rank)] == sorted(found.spans, key=lambda s: s.rank)


SMALL = Timings(
    SAVE_ID, 3, 2, (Span("save", 0, 10, 2_000_000_010), Span("write", 0, 20, 30, 5, 0), Span("save", 1, 0, 9))
)


def test_a_span_knows_its_seconds():
    assert SMALL.spans[0].seconds == 2.0
    assert timings_name(SAVE_ID) == f"timings.{SAVE_ID}.json"


def test_every_flipped_byte_is_found():
    data = encode_timings(SMALL)
    for at in range(len(data)):
        for flip in (1, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises((CorruptError, FormatError), match="run/t"):
                decode_timings(bytes(damaged), "run/t")


def nested(document):
    inner: list = []
    for _ in range(900):
        inner = [inner]
    document["timings"] = inner


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(version=2),
        lambda d: d.update(format="treeckpt"),
        lambda d: d.update(extra=1),
        lambda d: d["timings"].update(extra=1),
        lambda d: d["timings"].update(world=0),
        lambda d: d["timings"].update(world=1 << 50),
        lambda d: d["timings"].update(save_id="../x"),
        lambda d: d["timings"]["spans"][1].__setitem__(5, 1),
        lambda d: d["timings"]["spans"][1].__setitem__(5, -2),
        lambda d: d["timings"]["spans"][2].__setitem__(5, 0),
        lambda d: d["timings"]["spans"][0].__setitem__(1, 2),
        lambda d: d["timings"]["spans"][0].__setitem__(1, -1),
        lambda d: d["timings"]["spans"][0].__setitem__(3, 0),
        lambda d: d["timings"]["spans"][1].__setitem__(4, -5),
        lambda d: d["timings"]["spans"][0].pop(0) and None,
        nested,
    ],
)
def test_timings_that_no_save_writes_are_refused(change):
    document = json.loads(encode_timings(SMALL))
    change(document)
    document["seal"] = "0" * 16
    with pytest.raises(FormatError):
        decode_timings(sealed(json.dumps(document, separators=(",", ":")).encode()), "t")


def is_refused(world=2, spans=(), hosts=()):
    try:
        decode_timings(encode_timings(Timings(SAVE_ID, None, world, tuple(spans), None, tuple(hosts))), "t")
    except FormatError:
        return True
    return False


TOP = 1 << 62


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (Span("a", 0, 1 - TOP, 0), Span("a", 0, -TOP, 0)),
        (Span("a", 0, 0, TOP - 1), Span("a", 0, 0, TOP)),
        (Span("a", 0, 5, 5), Span("a", 0, 5, 4)),
        (Span("a", 1, 0, 1), Span("a", 2, 0, 1)),
        (Span("a", 0, 0, 1, TOP - 1), Span("a", 0, 0, 1, TOP)),
        (Span("a", 0, 0, 1, 0), Span("a", 0, 0, 1, -1)),
    ],
)
def test_spans_have_limits(good, bad):
    assert not is_refused(spans=[good]) and is_refused(spans=[bad])


def test_a_span_lies_in_an_earlier_one_of_its_rank():
    first = Span("a", 0, 0, 9)
    for parent, refused in ((-2, True), (-1, False), (0, False), (1, True)):
        assert is_refused(spans=[first, Span("x", 1, 0, 9), Span("b", 0, 1, 2, 0, parent)]) is refused


def test_each_rank_is_on_one_host():
    both, last = Host("a", ((0, 1, 2),)), Host("b", ((1,),))
    assert not is_refused(hosts=[both]) and not is_refused(hosts=[Host("a", ((0,),)), last])
    assert is_refused(hosts=[both, last]) and is_refused(hosts=[Host("a", ((2,),))])
    assert is_refused(hosts=[Host("a", ((-1,),))])


def test_a_giant_world_has_spans_of_every_rank():
    assert not is_refused(world=1 << 18) and is_refused(world=(1 << 18) + 1)
