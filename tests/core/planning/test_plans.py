"""Plans against an oracle: which rank writes what, and the chunks and boxes of it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt._core.planning.save_plan as assign_module
from tests.helpers.saves import pieces_of
from tests.helpers.strategies import array_leaves, box_layouts, flat_layouts, regions, shapes
from treeckpt._core.format.records import chunks_in, encode_chunks
from treeckpt._core.planning.load_plan import Chunk, bounded_span_boxes
from treeckpt._core.planning.save_plan import ArrayLeaf, SingleChunkOffset, assign_offsets, assign_writers, plan_save
from treeckpt._core.sharding.int_runs import decode_runs, encode_runs
from treeckpt._core.sharding.placements import replicated_layout
from treeckpt._core.sharding.region import Region, byte_runs


@pytest.fixture(autouse=True, scope="module")
def tiny_quotas():
    """So that small arrays are cut as large ones are."""
    patch = pytest.MonkeyPatch()
    patch.setattr(assign_module, "UNCUT_NBYTES", 8)
    patch.setattr(assign_module, "MIN_QUOTA", 16)
    yield
    patch.undo()


SAVES = st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), array_leaves(world)))
LIMITS = st.sampled_from([1 << 62, 1, 100, 1000])


@given(SAVES, LIMITS)
def test_files_have_no_holes_and_respect_the_limit(case, limit):
    world, leaves = case
    shares = assign_writers(leaves)
    for rank in range(world):
        plan = plan_save(leaves, shares, rank, max_shard_bytes=limit)
        stream = 0
        for number, file in enumerate(plan.files):
            assert (file.part, file.stream) == (number, stream)
            at = 0
            for write in file.writes:
                assert write.start == at
                assert write.nbytes == write.region.size * leaves[write.leaf].itemsize
                at += write.nbytes
            assert file.nbytes == at
            assert at <= limit or sum(bool(w.nbytes) for w in file.writes) == 1
            stream += at
        assert plan.nbytes == stream
        assert plan.files, "a rank without data writes an empty shard"


def owned(leaf, at):
    return [(at.rank, Region.whole(leaf.shape))] if isinstance(at, SingleChunkOffset) else pieces_of(at.owners)


def starts_of(at):
    return [at.start] if isinstance(at, SingleChunkOffset) else at.starts.tolist()


@given(SAVES, LIMITS)
def test_the_coordinator_places_every_chunk_where_its_rank_does(case, limit):
    world, leaves = case
    shares = assign_writers(leaves)
    mine = {}
    nbytes = []
    for rank in range(world):
        plan = plan_save(leaves, shares, rank, max_shard_bytes=limit)
        nbytes.append(plan.nbytes)
        for file in plan.files:
            for write in file.writes:
                assert (write.leaf, rank, write.region) not in mine
                mine[write.leaf, rank, write.region] = file.stream + write.start
    placed, totals = assign_offsets(leaves, shares, world)
    assert totals.tolist() == nbytes
    theirs = {}
    for number, (leaf, at) in enumerate(zip(leaves, placed, strict=True)):
        if leaf.per_rank is not None:
            owners = [(rank, Region.whole(leaf.shape)) for rank in decode_runs(leaf.per_rank).tolist()]
        else:
            owners = owned(leaf, at)
        for (rank, region), start in zip(owners, starts_of(at), strict=True):
            theirs[number, rank, region] = start
    assert theirs == mine


@given(SAVES)
def test_every_entry_is_aligned_to_its_elements(case):
    world, leaves = case
    shares = assign_writers(leaves)
    for rank in range(world):
        for file in plan_save(leaves, shares, rank).files:
            for write in file.writes:
                leaf = leaves[write.leaf]
                align = leaf.align or leaf.itemsize
                assert write.start % min(align & -align, 16) == 0


def test_whole_pages_come_first_and_stay_on_pages():
    layout = layouts_of_one()
    sizes = [3, 4096, 64, 8192, 5, 128]
    leaves = [ArrayLeaf(f"l{i}", (n,), 1, layout) for i, n in enumerate(sizes)]
    [file] = plan_save(leaves, assign_writers(leaves), 0).files
    assert [w.nbytes for w in file.writes] == [4096, 8192, 64, 128, 3, 5]


def layouts_of_one():
    return replicated_layout(encode_runs([0]))


@given(st.data(), st.sampled_from([1, 4]), st.integers(1, 200), st.integers(0, 20))
def test_tiles_make_up_their_box_and_are_short_and_dense(data, itemsize, limit, gap):
    shape = data.draw(shapes(min_size=1, max_size=6))
    outer = Region.whole(shape)
    box = data.draw(regions(shape, empty=False))
    marks = np.zeros(shape, int)
    for tile in bounded_span_boxes(box, outer, itemsize, limit=limit, gap=gap):
        marks[tile.slices()] += 1
        runs = byte_runs(tile, outer, itemsize)
        first, last = runs.span
        assert last - first <= max(limit, itemsize)
        assert (np.diff(runs.starts()) - runs.length <= gap).all()
    expected = np.zeros(shape, int)
    expected[box.slices()] = 1
    assert (marks == expected).all()


def test_the_gap_between_the_last_run_of_a_plane_and_the_next_plane_counts_whole():
    box, outer = Region((0, 0, 0), (2, 3, 3)), Region.whole((5, 5, 5))
    assert len(list(bounded_span_boxes(box, outer, 1, limit=1000, gap=12))) == 1
    assert len(list(bounded_span_boxes(box, outer, 1, limit=1000, gap=11))) == 2


# chunks: what an index holds of a placement ---------------------------------------------------------------------------
@given(SAVES, st.data())
def test_chunks_of_the_index_are_the_placed_ones_and_a_region_finds_its_own(case, data):
    world, leaves = case
    shares = assign_writers(leaves)
    placed, _ = assign_offsets(leaves, shares, world)
    for leaf, at in zip(leaves, placed, strict=True):
        if leaf.per_rank is not None:
            continue
        encoded = encode_chunks(leaf.shape, at)
        pieces = zip(owned(leaf, at), starts_of(at), strict=True)
        every = [Chunk(region, rank, start) for (rank, region), start in pieces]
        assert chunks_in(encoded, leaf.shape) == every
        region = data.draw(regions(leaf.shape))
        wanted = np.zeros(leaf.shape, bool)
        wanted[region.slices()] = True
        needed = [chunk for chunk in every if wanted[chunk.region.slices()].any()]
        found = chunks_in(encoded, leaf.shape, region)
        assert set(needed) <= set(found) <= set(every)


@given(st.data())
def test_any_order_of_listed_pieces_gives_the_same_chunks(data):
    shape = data.draw(shapes(max_ndim=3))
    layout = data.draw(st.one_of(box_layouts(shape, 3), flat_layouts(shape, 3)))
    again = type(layout)(tuple(data.draw(st.permutations(layout.pieces))))
    if not math.prod(shape):
        return
    found = [
        [region for _, region in assign_writers([ArrayLeaf("w", shape, 4, one)])[0].pieces] for one in (layout, again)
    ]
    assert found[0] == found[1]
