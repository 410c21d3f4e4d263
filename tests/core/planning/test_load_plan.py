"""Reads of whole chunks: neighbours are joined up to a gap and a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.planning.load_plan import (
    ContiguousRead,
    bounded_span_boxes,
    plan_contiguous_reads,
    split_at_multiples,
)
from treeckpt._core.sharding.region import Region


def reads_of(*chunks, **options):
    """(start, stop, chunks) of reads of rank 0."""
    return [(r.start, r.stop, r.members) for r in plan_contiguous_reads([(0, *c) for c in chunks], **options)]


def test_neighbours_up_to_the_gap_apart_are_one_read():
    assert reads_of((0, 10), (14, 10), gap=4) == [(0, 24, (0, 1))]
    assert reads_of((0, 10), (15, 10), gap=4) == [(0, 10, (0,)), (15, 25, (1,))]
    assert reads_of((0, 10), (10, 10), gap=0) == [(0, 20, (0, 1))]
    assert reads_of((0, 10), (11, 10), gap=0) == [(0, 10, (0,)), (11, 21, (1,))]


def test_without_a_gap_given_64_kib_are_read_along():
    assert reads_of((0, 10), (10 + (64 << 10), 10)) == [(0, 20 + (64 << 10), (0, 1))]
    assert len(reads_of((0, 10), (11 + (64 << 10), 10))) == 2


def test_chunks_are_read_in_the_order_of_the_stream_by_rank():
    found = plan_contiguous_reads([(3, 8, 4), (1, 8, 4), (3, 0, 4), (1, 90, 2)], gap=4)
    assert found == [
        ContiguousRead(1, 8, 12, (1,)), ContiguousRead(1, 90, 92, (3,)), ContiguousRead(3, 0, 12, (2, 0)),
    ]  # fmt: skip
    assert plan_contiguous_reads([]) == []


def test_a_read_is_as_long_as_its_limit_unless_one_chunk_is_longer():
    assert reads_of((0, 5), (5, 5), (10, 5), gap=0, limit=10) == [(0, 10, (0, 1)), (10, 15, (2,))]
    assert reads_of((0, 5), (5, 5), gap=0, limit=9) == [(0, 5, (0,)), (5, 10, (1,))]
    assert reads_of((0, 50), (50, 5), gap=0, limit=10) == [(0, 50, (0,)), (50, 55, (1,))]
    assert reads_of((0, 8), (2, 2), (8, 2), gap=0, limit=10) == [(0, 10, (0, 1, 2))]


@given(st.data())
def test_reads_hold_their_chunks_and_each_chunk_is_read_once(data):
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 12))
    chunks = data.draw(st.lists(sizes, max_size=12))
    gap, limit = data.draw(st.integers(0, 5)), data.draw(st.none() | st.integers(1, 30))
    reads = plan_contiguous_reads(chunks, gap=gap, limit=limit)
    assert sorted(m for read in reads for m in read.members) == list(range(len(chunks)))
    for read in reads:
        mine = [chunks[m] for m in read.members]
        assert {rank for rank, *_ in mine} == {read.rank}
        assert read.start == min(s for _, s, _ in mine) and read.stop == max(s + n for _, s, n in mine)
        assert limit is None or read.stop - read.start <= limit or len(mine) == 1
        covered = {n for _, s, count in mine for n in range(s, s + count)}
        missing = [n for n in range(read.start, read.stop) if n not in covered]
        assert all(not set(range(n, n + gap + 1)) <= set(missing) for n in missing)


@pytest.mark.parametrize(
    ("start", "stop", "origin", "step", "pieces"),
    [
        (0, 10, 0, 4, [(0, 4), (4, 8), (8, 10)]), (3, 9, 0, 4, [(3, 4), (4, 8), (8, 9)]), (4, 8, 0, 4, [(4, 8)]),
        (5, 5, 0, 4, []), (6, 5, 0, 4, []), (5, 13, 1, 4, [(5, 9), (9, 13)]), (6, 8, 1, 4, [(6, 8)]),
        (0, 9, 2, 4, [(0, 2), (2, 6), (6, 9)]),
    ],
)  # fmt: skip
def test_ranges_are_cut_at_multiples(start, stop, origin, step, pieces):
    assert list(split_at_multiples(start, stop, origin, step)) == pieces


def boxes_of(shape, outer, **options):
    box = Region((0,) * len(shape), shape)
    return [(b.offset, b.shape) for b in bounded_span_boxes(box, Region.whole(outer), 1, **options)]


def test_boxes_are_cut_at_rows_up_to_the_limit():
    assert boxes_of((4, 10), (4, 10), limit=40, gap=0) == [((0, 0), (4, 10))]
    assert boxes_of((4, 10), (4, 10), limit=39, gap=0) == [((0, 0), (2, 10)), ((2, 0), (2, 10))]
    assert boxes_of((4, 10), (4, 10), limit=10, gap=0) == [((n, 0), (1, 10)) for n in range(4)]
    assert boxes_of((1, 10), (1, 10), limit=4, gap=0) == [((0, n), (1, min(4, 10 - n))) for n in (0, 4, 8)]
    assert boxes_of((1, 1), (4, 4), limit=0, gap=0) == [((0, 0), (1, 1))]


def test_rows_that_lie_further_apart_than_the_gap_are_boxes_of_their_own():
    assert boxes_of((3, 6), (3, 10), limit=99, gap=4) == [((0, 0), (3, 6))]
    assert boxes_of((3, 6), (3, 10), limit=99, gap=3) == [((n, 0), (1, 6)) for n in range(3)]
    assert boxes_of((2, 2, 6), (2, 4, 6), limit=99, gap=12) == [((0, 0, 0), (2, 2, 6))]
    assert boxes_of((2, 2, 6), (2, 4, 6), limit=99, gap=11) == [((n, 0, 0), (1, 2, 6)) for n in range(2)]
