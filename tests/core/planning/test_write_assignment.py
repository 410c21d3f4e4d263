"""Who writes what: everything exactly once, all ranks of one mind, replicas sharing the work."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt._core.planning.save_plan as assign_module
from tests.helpers.saves import pieces_of
from tests.helpers.strategies import array_leaves
from treeckpt._core.planning.save_plan import (
    ArrayLeaf,
    BoxOwners,
    ReplicaSplit,
    assign_writers,
    overlapping_boxes,
    owners_of,
    single_writer,
    writes_of,
)
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import (
    BoxLayout,
    Mesh,
    MeshLayout,
    Replicate,
    Shard,
    StridedShard,
    held_by,
    replicated_layout,
)
from treeckpt._core.sharding.region import Region
from treeckpt.errors import LayoutError

QUOTAS = pytest.mark.parametrize("bounds", [(8, 16), (64 << 10, 1 << 20)], ids=["tiny quotas", "real quotas"])


def assigned(leaves, bounds):
    """Small arrays are cut too where the bounds are small, so that tests of small arrays meet the cutting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign_module, "UNCUT_NBYTES", bounds[0])
        patch.setattr(assign_module, "MIN_QUOTA", bounds[1])
        return assign_writers(leaves)


@QUOTAS
@given(case=st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), array_leaves(world))))
def test_every_element_is_written_once_by_a_rank_that_holds_it(bounds, case):
    world, leaves = case
    shares = assigned(leaves, bounds)
    for leaf, share in zip(leaves, shares, strict=True):
        counts = np.zeros(leaf.shape, int)
        writers = 0
        for rank in range(world):
            held = held_by(leaf.layout, leaf.shape, rank)
            written = writes_of(leaf, share, rank)
            writers += bool(written)
            if leaf.per_rank is not None:
                assert written in ([], [Region.whole(leaf.shape)])
                continue
            assert written == sorted(written)
            for region in written:
                assert not region.size or any(region.within(h.region) for h in held)
                counts[region.slices()] += 1
        assert writers, "an array without elements has a writer too"
        assert leaf.per_rank is not None or (counts == 1).all()


@QUOTAS
@given(case=st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), array_leaves(world))))
def test_each_rank_finds_for_itself_what_the_coordinator_finds_for_all(bounds, case):
    world, leaves = case
    for leaf, share in zip(leaves, assigned(leaves, bounds), strict=True):
        if leaf.per_rank is not None:
            continue
        alone = sorted((rank, region) for rank in range(world) for region in writes_of(leaf, share, rank))
        together = pieces_of(owners_of(leaf, share))
        assert sorted(together) == alone
        assert [r for _, r in together] == sorted(r for _, r in together), "in the order of the regions"


@given(st.data())
def test_assignment_does_not_depend_on_the_rank_that_asks(data):
    leaves = data.draw(array_leaves(4))
    assert assign_writers(leaves) == assign_writers(list(leaves))


def loads(leaves, world):
    shares = assign_writers(leaves)
    return np.array(
        [
            sum(
                region.size * leaf.itemsize
                for leaf, share in zip(leaves, shares, strict=True)
                for region in writes_of(leaf, share, rank)
            )
            for rank in range(world)
        ]
    )


SIZES = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 600)), min_size=3, max_size=40)


@given(SIZES, st.sampled_from([2, 3, 4, 8]))
def test_replicas_share_the_bytes_evenly(sizes, world):
    layout = replicated_layout(encode_runs(range(world)))
    leaves = [ArrayLeaf(f"l{i}", shape, 4, layout) for i, shape in enumerate(sizes)]
    found = loads(leaves, world)
    total = sum(leaf.nbytes for leaf in leaves)
    assert found.sum() == total
    quota = total / max(1, min(world, total >> 20))
    # at each end of a quota a small array, or a row of at most a sixteenth of it, may fall to the neighbour
    slack = 2 * max(64 << 10, quota / 16)
    assert found.max() <= quota + slack
    if total >> 20 >= world:
        assert found.min() >= quota - slack


@pytest.mark.parametrize(
    ("placements", "shape"),
    [
        ((Replicate(), Shard(0)), (4096, 512)),
        ((Shard(1), Replicate()), (4096, 512)),
        ((Replicate(), StridedShard(0, 8)), (4096, 512)),
        ((Replicate(), StridedShard(1, 4)), (64, 1 << 15)),
        ((Replicate(), Replicate()), (1, 1 << 22)),
        ((Replicate(), Replicate()), (3, 1 << 21)),
    ],
)
def test_replicas_of_shards_strided_ones_too_share_one_big_array_evenly(placements, shape):
    layout = MeshLayout(Mesh((4, 2), encode_runs(range(8))), placements)
    found = loads([ArrayLeaf("w", shape, 8, layout)], 8)
    assert found.sum() == math.prod(shape) * 8
    assert found.max() <= 1.1 * found.mean()


def test_an_array_of_fewer_rows_than_replicas_is_cut_at_the_rows_nearest_to_the_quotas():
    leaf = ArrayLeaf("w", (3,), 64, replicated_layout(encode_runs(range(8))))
    assert assigned([leaf], (8, 16)) == [ReplicaSplit(0, (1, 2), (1, 3, 6))]
    leaf = ArrayLeaf("w", (2, 3), 64, replicated_layout(encode_runs(range(4))))
    assert assigned([leaf], (8, 16)) == [ReplicaSplit(1, (1, 2), (0, 1, 3))]


def test_small_arrays_are_never_cut_and_still_spread():
    layout = replicated_layout(encode_runs(range(4)))
    leaves = [ArrayLeaf(f"l{i}", (8192,), 4, layout) for i in range(1000)]
    shares = assign_writers(leaves)
    assert all(not share.cuts for share in shares)
    found = loads(leaves, 4)
    assert found.max() - found.min() <= 2 * 8192 * 4


def test_little_data_is_written_by_one_rank():
    layout = replicated_layout(encode_runs(range(4)))
    leaves = [ArrayLeaf(f"l{i}", (16,), 4, layout) for i in range(10)]
    assert sorted(loads(leaves, 4).tolist()) == [0, 0, 0, 640]


def test_equal_pieces_go_to_the_least_loaded_of_their_holders():
    pieces = tuple((rank, Region((4 * i,), (4,))) for i in range(8) for rank in range(4))
    found = loads([ArrayLeaf("w", (32,), 4, BoxLayout(pieces))], 4)
    assert found.tolist() == [32] * 4


def test_a_thousand_listed_columns_take_no_quadratic_time():
    world = 4096
    layout = BoxLayout(tuple((rank, Region((0, 2 * rank), (64, 2))) for rank in range(world)))
    leaf = ArrayLeaf("w", (64, 2 * world), 4, layout)
    [share] = assign_writers([leaf])
    assert isinstance(share, BoxOwners) and len(share.pieces) == world


def test_a_lone_writer_is_known_only_of_uncut_replicated_arrays():
    assert single_writer(replicated_layout(encode_runs([2, 5])), 1) == 5
    assert single_writer(MeshLayout(Mesh((2,), encode_runs([0, 1])), (Shard(0),)), 0) is None
    assert single_writer(BoxLayout(((0, Region((0,), (1,))),)), 0) is None


@pytest.mark.parametrize(
    ("shape", "pieces", "says"),
    [
        ((4,), [(0, Region((0,), (2,))), (1, Region((3,), (1,)))], r"offset \(2,\), shape \(1,\)"),
        ((4, 4), [(0, Region((0, 0), (4, 2))), (1, Region((1, 2), (3, 2)))], r"offset \(0, 2\), shape \(1, 2\)"),
        ((4,), [(0, Region((0,), (5,)))], "rank 0"),
        ((4,), [(0, Region((-1,), (5,)))], "rank 0"),
        ((4,), [(0, Region((0, 0), (4, 1)))], "rank 0"),
        ((4,), [(1, Region((5,), (-1,))), (0, Region((0,), (4,)))], "rank 1"),
        ((4,), [], "offset"),
        ((0,), [], "no rank"),
        ((), [], "no rank"),
    ],
)
def test_gaps_and_pieces_outside_of_their_array_are_refused(shape, pieces, says):
    with pytest.raises(LayoutError, match=says) as caught:
        assign_writers([ArrayLeaf("model/w", shape, 4, BoxLayout(tuple(pieces)))])
    assert caught.value.path == "model/w"


def test_placements_that_do_not_fit_name_the_leaf():
    layout = MeshLayout(Mesh((2,), encode_runs([0, 1])), (Shard(3),))
    with pytest.raises(LayoutError, match="model/w"):
        assign_writers([ArrayLeaf("model/w", (4,), 4, layout)])


@given(st.data())
def test_every_element_that_pieces_share_is_compared(data):
    shape = (4, 5)
    sides = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 4), st.integers(1, 5))
    boxes = [Region((r, c), (min(h, 4 - r), min(w, 5 - c))) for r, h, c, w in data.draw(st.lists(sides, max_size=6))]
    boxes.append(Region.whole(shape))  # so that there is no gap
    found = overlapping_boxes(shape, BoxLayout(tuple(enumerate(boxes))))
    seen, written = np.zeros(shape, int), np.zeros(shape, int)
    for box in found:
        assert sum(box.within(region) for region in boxes) >= 2
        seen[box.slices()] += 1
    for region in boxes:
        written[region.slices()] += 1
    assert ((written > 1) == (seen > 0)).all()
