"""The chunks of an array, in whichever form, are found by region and by rank as in a plain list of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import regions
from treeckpt._core.format.records import (
    BoxChunks,
    GridChunks,
    NoChunks,
    WholeChunk,
    chunks_in,
    count_chunks,
    encode_boxes,
    encode_chunks,
)
from treeckpt._core.planning.load_plan import Chunk
from treeckpt._core.planning.save_plan import BoxOwners, ChunkOffsets, GridOwners, SingleChunkOffset
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.region import Region, intersect


@st.composite
def grids(draw):
    """The shape of an array, its cuts, and all cells of the grid in row-major order."""
    cuts = [
        [0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=4))), n] if n > 1 else [0, 1]
        for n in draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    ]
    cells = [
        Region(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
    ]
    count = len(cells)
    ranks = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    starts = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    chunks = [Chunk(*row) for row in zip(cells, ranks, starts, strict=True)]
    return tuple(cut[-1] for cut in cuts), cuts, chunks


def as_grid(cuts, chunks):
    return GridChunks(
        tuple(map(encode_runs, cuts)), encode_runs([c.rank for c in chunks]), encode_runs([c.start for c in chunks])
    )


def as_boxes(shape, chunks):
    columns = range(len(shape))
    return BoxChunks(
        tuple(encode_runs([c.region.offset[d] for c in chunks]) for d in columns),
        tuple(encode_runs([c.region.shape[d] for c in chunks]) for d in columns),
        encode_runs([c.rank for c in chunks]), encode_runs([c.start for c in chunks]),
    )  # fmt: skip


@given(grids(), st.data())
def test_chunks_are_found_by_region_and_by_rank(case, data):
    shape, cuts, every = case
    region, rank = data.draw(regions(shape, empty=False)), data.draw(st.integers(0, 3))
    some = data.draw(st.lists(st.sampled_from(every), unique=True))
    for listed, chunks in (
        (every, as_grid(cuts, every)),
        (every, as_boxes(shape, every)),
        (some, as_boxes(shape, some)),
    ):
        assert chunks_in(chunks, shape) == listed
        assert chunks_in(chunks, shape, region) == [c for c in listed if intersect(c.region, region)]
        assert chunks_in(chunks, shape, rank=rank) == [c for c in listed if c.rank == rank]
        assert count_chunks(chunks) == len(listed)


def test_a_single_chunk_of_a_large_grid_is_found():
    """Few of many cells are looked up without expanding the columns."""
    cuts = encode_runs(range(0, 4001, 4))
    chunks = GridChunks((cuts, cuts), encode_runs(np.arange(10**6) % 7), encode_runs(np.arange(10**6) * 16))
    cell = 123 * 1000 + 456
    region = Region((123 * 4 + 1, 456 * 4 + 3), (2, 1))
    assert chunks_in(chunks, (4000, 4000), region) == [Chunk(Region((492, 1824), (4, 4)), cell % 7, cell * 16)]


def test_one_chunk_is_whole_and_of_one_rank():
    chunks = WholeChunk(3, 64)
    whole = [Chunk(Region((0, 0), (2, 5)), 3, 64)]
    assert chunks_in(chunks, (2, 5)) == chunks_in(chunks, (2, 5), rank=3) == whole
    assert chunks_in(chunks, (2, 5), Region((1, 1), (1, 1))) == whole
    assert chunks_in(chunks, (2, 5), rank=0) == [] and count_chunks(chunks) == 1


def test_chunks_that_are_not_placed_yet_are_none():
    assert chunks_in(NoChunks(), (2,)) == chunks_in(NoChunks(), (2,), rank=0) == [] and count_chunks(NoChunks()) == 0


def test_boxes_without_dimensions_hold_the_one_element():
    chunks = BoxChunks((), (), ((1,), (0,)), ((8,), (16,)))
    point = Region((), ())
    assert chunks_in(chunks, ()) == [Chunk(point, 1, 8), Chunk(point, 0, 16)]
    assert chunks_in(chunks, (), rank=0) == [Chunk(point, 0, 16)]


# encoding -------------------------------------------------------------------------------------------------------------
def arrays_of(chunks):
    return (
        np.array([c.region.offset for c in chunks], np.int64), np.array([c.region.shape for c in chunks], np.int64),
        np.array([c.rank for c in chunks], np.int64), np.array([c.start for c in chunks], np.int64),
    )  # fmt: skip


@given(grids())
def test_boxes_that_form_a_grid_are_stored_as_one(case):
    shape, cuts, chunks = case
    found = encode_boxes(shape, *arrays_of(chunks))
    assert found == (as_grid(cuts, chunks) if len(chunks) > 1 else WholeChunk(chunks[0].rank, chunks[0].start))
    placed = ChunkOffsets(BoxOwners(tuple((c.rank, c.region) for c in chunks)), arrays_of(chunks)[3])
    assert chunks_in(encode_chunks(shape, placed), shape) == chunks


@given(grids())
def test_owners_on_a_grid_are_stored_as_a_grid(case):
    shape, cuts, chunks = case
    starts, stops = tuple(np.array(cut[:-1]) for cut in cuts), tuple(np.array(cut[1:]) for cut in cuts)
    _, _, ranks, places = arrays_of(chunks)
    found = encode_chunks(shape, ChunkOffsets(GridOwners(starts, stops, ranks), places))
    assert found == (as_grid(cuts, chunks) if len(chunks) > 1 else WholeChunk(chunks[0].rank, chunks[0].start))


def test_other_boxes_are_listed():
    chunks = [
        Chunk(Region((0, 0), (2, 2)), 0, 0),
        Chunk(Region((0, 2), (2, 1)), 1, 0),
        Chunk(Region((2, 0), (1, 3)), 1, 2),
    ]
    assert encode_boxes((3, 3), *arrays_of(chunks)) == as_boxes((3, 3), chunks)


def test_an_array_that_one_rank_writes_is_one_chunk():
    assert encode_chunks((3,), SingleChunkOffset(2, 40)) == WholeChunk(2, 40)


@pytest.mark.parametrize(("region", "whole"), [(Region((0,), (3,)), True), (Region((1,), (2,)), False)])
def test_one_listed_piece_is_one_chunk_if_it_is_all_of_the_array(region, whole):
    placed = ChunkOffsets(BoxOwners(((2, region),)), np.array([40]))
    assert (encode_chunks((3,), placed) == WholeChunk(2, 40)) is whole
    assert chunks_in(encode_chunks((3,), placed), (3,)) == [Chunk(region, 2, 40)]
