"""The algebra of boxes against numpy: a region is what it marks in an array."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.strategies import regions, shapes
from treeckpt._core.sharding.region import (
    Region,
    any_overlap,
    byte_runs,
    c_strides,
    coalesce,
    flat_boxes,
    flat_regions,
    intersect,
    is_c_order,
    max_boxes,
    memory_order,
    strides_in,
    subtract,
    tiles,
)


@st.composite
def two_regions(draw):
    shape = draw(shapes())
    return shape, draw(regions(shape)), draw(regions(shape))


def mask(shape, region):
    marks = np.zeros(shape, int)
    marks[region.slices()] += 1
    return marks


@given(two_regions())
def test_intersection_marks_what_both_mark(case):
    shape, a, b = case
    both = mask(shape, a) * mask(shape, b)
    common = intersect(a, b)
    if common is None:
        assert both.sum() == 0
    else:
        assert common.size > 0 or not shape
        assert (mask(shape, common) == both).all()
        assert intersect(b, a) == common
        assert common.within(a) and common.within(b)


@given(two_regions())
def test_difference_is_disjoint_and_marks_what_is_left(case):
    shape, a, b = case
    pieces = subtract(a, b)
    assert len(pieces) <= max(1, 2 * len(shape))
    assert all(piece.size for piece in pieces)
    left = sum((mask(shape, piece) for piece in pieces), np.zeros(shape, int))
    assert (left == mask(shape, a) * (1 - mask(shape, b))).all()


@given(two_regions())
def test_relative_and_shifted_undo_each_other(case):
    _, a, b = case
    assert a.relative_to(b).shifted(b.offset) == a


@given(st.data())
def test_size_stop_and_whole_agree_with_slices(data):
    shape = data.draw(shapes())
    region = data.draw(regions(shape))
    part = np.zeros(shape)[region.slices()]
    assert part.shape == region.shape
    assert part.size == region.size
    assert region.stop == tuple(s.stop for s in region.slices())
    assert Region.whole(shape).is_whole(shape)
    assert region.is_whole(shape) == (region == Region.whole(shape))


def test_regions_of_different_rank_do_not_meet():
    with pytest.raises(ValueError):
        intersect(Region((0,), (1,)), Region((0, 0), (1, 1)))


@given(st.data())
def test_flat_ranges_become_boxes_in_order(data):
    shape = data.draw(shapes(max_size=5))
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = flat_regions(shape, start, stop)
    numbers = np.arange(size).reshape(shape)
    found = [n for box in boxes for n in numbers[box.slices()].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data(), st.sampled_from([1, 2, 4, 16]))
def test_byte_runs_touch_exactly_the_bytes_of_the_box(data, itemsize):
    shape = data.draw(shapes(max_size=5))
    outer = Region(tuple(data.draw(st.integers(0, 9)) for _ in shape), shape)
    inner = data.draw(regions(shape)).shifted(outer.offset)
    numbers = np.arange(math.prod(shape) * itemsize).reshape(*shape, itemsize)
    wanted = numbers[inner.relative_to(outer).slices()].reshape(-1)
    runs = byte_runs(inner, outer, itemsize)
    starts = runs.starts()
    assert len(starts) == runs.count
    assert [s + i for s in starts.tolist() for i in range(runs.length)] == wanted.tolist()
    first, last = runs.span
    if wanted.size:
        assert (first, last) == (wanted[0], wanted[-1] + 1)
    else:
        assert first == last


def test_a_slab_of_rows_is_one_run():
    runs = byte_runs(Region((2, 0, 0), (3, 4, 5)), Region.whole((9, 4, 5)), 4)
    assert (runs.count, runs.first, runs.length) == (1, 2 * 80, 3 * 80)


@given(shapes(min_size=1), st.sampled_from([1, 2, 8]))
def test_strides_are_numpys(shape, itemsize):
    assert c_strides(shape, itemsize) == np.empty(shape, f"V{itemsize}").strides


@given(shapes(min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_a_dense_array_gives_its_strides_again(shape, random):
    order = random.sample(range(len(shape)), len(shape))
    strides = strides_in(shape, order, 1)
    made = np.empty([shape[d] for d in order], "u1").transpose(np.argsort(order) if shape else None)
    assert strides == made.strides
    found = memory_order(shape, strides)
    assert strides_in(shape, found, 1) == strides
    assert (found is None) == (strides == c_strides(shape, 1))
    assert is_c_order(shape, order) == made.flags.c_contiguous


def test_an_array_that_is_not_dense_has_no_order():
    assert memory_order((3, 4), (1, 3)) == (1, 0)
    for strides in ((1, 4), (0, 1), (8, 1), (-4, 1), (1, -3), (1, 0)):
        assert memory_order((3, 4), strides) is None, strides
    assert is_c_order((3, 1), memory_order((3, 1), (1, 100)))
    assert memory_order((0, 3), (1, 1)) is None


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12),
    st.integers(0, 5),
)
def test_coalesced_ranges_hold_their_members_and_lie_further_apart_than_the_gap(ranges, gap):
    ranges = sorted(ranges)
    starts = np.array([a for a, _ in ranges], np.int64)
    stops = starts + np.array([n for _, n in ranges], np.int64)
    bounds, members = coalesce(starts, stops, gap)
    assert len(members) == len(ranges)
    for start, stop, member in zip(starts, stops, members, strict=True):
        assert bounds[member, 0] <= start and stop <= bounds[member, 1]
    assert (bounds[1:, 0] - bounds[:-1, 1] > gap).all()
    touched = set()
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        touched |= set(range(start, stop))
    for low, high in bounds.tolist():
        assert low in touched and high - 1 in touched
        holes = [n for n in range(low, high) if n not in touched]
        assert all(set(range(n, n + gap + 1)) & touched for n in holes)


@given(data=st.data())
def test_tiles_are_the_box_in_c_order_and_none_is_too_large(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    box = Region(tuple(data.draw(st.integers(0, 5)) for _ in shape), shape)
    limit = data.draw(st.integers(1, 60))
    found = list(tiles(box, limit))
    assert all(tile.size <= limit and tile.within(box) for tile in found)
    whole = np.arange(math.prod(n + o for n, o in zip(shape, box.offset, strict=True)))
    whole = whole.reshape([n + o for n, o in zip(shape, box.offset, strict=True)])
    parts = [whole[tile.slices()].reshape(-1) for tile in found]
    assert np.array_equal(np.concatenate(parts), whole[box.slices()].reshape(-1))


@given(st.lists(st.tuples(st.tuples(*[st.integers(0, 5)] * 2), st.tuples(*[st.integers(0, 3)] * 2)), max_size=6))
def test_overlapping_is_what_counting_says(pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    counts = np.zeros((9, 9), int)
    for offset, shape in pairs:
        counts[Region(offset, shape).slices()] += 1
    assert any_overlap([Region(*pair) for pair in pairs]) == bool((counts > 1).any())


@given(st.data())
def test_boxes_of_many_ranges_are_those_of_each(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    size = int(np.prod(shape))
    cuts = data.draw(st.lists(st.integers(0, size), min_size=2, max_size=8, unique=True).map(sorted))
    assume(len(cuts) > 1)
    pairs = list(itertools.pairwise(cuts))
    which, offsets, sizes = flat_boxes(shape, np.array(cuts[:-1]), np.array(cuts[1:]))
    expected = [(i, box.offset, box.shape) for i, (a, b) in enumerate(pairs) for box in flat_regions(shape, a, b)]
    found = zip(which.tolist(), map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True)
    assert list(found) == expected
    assert all(sum(1 for i, *_ in expected if i == n) <= max_boxes(shape) for n in range(len(pairs)))
