"""Layouts against torch's own placements, and one rank's view against everybody's."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import box_layouts, flat_layouts, mesh_layouts, shapes
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import (
    BoxLayout,
    Mesh,
    MeshLayout,
    Replicate,
    Shard,
    StridedShard,
    cells_of,
    check_layout,
    held_by,
    layout_of_group,
    local_shape,
    mesh_ranks,
    mesh_strides,
    position_of,
    replica_offsets,
    replicas_of,
    replicated_layout,
)
from treeckpt._core.sharding.region import Region
from treeckpt.errors import LayoutError


@st.composite
def laid_out(draw):
    shape = draw(shapes(max_ndim=3, max_size=9))
    return shape, draw(mesh_layouts(len(shape)))


def local_array(layout, shape, rank):
    """What the rank's pieces say its local array is, as the numbers of the elements."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    local = np.full(local_shape(layout, shape, rank), -1)
    for held in held_by(layout, shape, rank):
        local[Region(held.local, held.region.shape).slices()] = numbers[held.region.slices()]
    return local


@given(laid_out())
def test_local_arrays_are_what_torch_makes_of_the_placements(case):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("torch.distributed.tensor.placement_types")
    shape, layout = case
    mesh = layout.mesh
    for rank, coordinate in zip(mesh_ranks(mesh).tolist(), np.ndindex(mesh.shape), strict=True):
        tensor = torch.arange(math.prod(shape)).reshape(shape)
        for placement, count, index in zip(layout.placements, mesh.shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                torch_placement = theirs.Shard(placement.dim)
            elif isinstance(placement, StridedShard):
                torch_placement = theirs._StridedShard(placement.dim, split_factor=placement.factor)
            else:
                continue
            tensor = torch_placement._split_tensor(tensor, count, with_padding=False, contiguous=True)[0][index]
        found = local_array(layout, shape, rank)
        assert found.shape == tuple(tensor.shape)
        assert (found == tensor.numpy()).all()


@given(laid_out())
def test_pieces_of_a_rank_fill_its_local_array(case):
    shape, layout = case
    for rank in mesh_ranks(layout.mesh).tolist():
        assert (local_array(layout, shape, rank) >= 0).all()


@given(laid_out())
def test_all_ranks_together_hold_every_element_once_per_replica(case):
    shape, layout = case
    counts = np.zeros(shape, int)
    for rank in mesh_ranks(layout.mesh).tolist():
        for held in held_by(layout, shape, rank):
            counts[held.region.slices()] += 1
    assert (counts == len(replica_offsets(layout))).all()


@given(laid_out())
def test_cells_cut_each_dimension_in_order_and_name_a_holder_of_each(case):
    shape, layout = case
    ranks = mesh_ranks(layout.mesh)
    dims = [cells_of(layout, shape, dim) for dim in range(len(shape))]
    for cells, size in zip(dims, shape, strict=True):
        bounds = [*cells.starts.tolist(), size] if size else [0]
        assert bounds == ([0, *cells.stops.tolist()] if size else [0])
    if 0 in shape:
        return
    held = {rank: {h.region for h in held_by(layout, shape, rank)} for rank in ranks.tolist()}
    for index in itertools.product(*(range(len(cells.starts)) for cells in dims)):
        low = tuple(int(cells.starts[i]) for cells, i in zip(dims, index, strict=True))
        high = tuple(int(cells.stops[i]) for cells, i in zip(dims, index, strict=True))
        position = sum(int(cells.holders[i]) for cells, i in zip(dims, index, strict=True))
        region = Region(low, tuple(b - a for a, b in zip(low, high, strict=True)))
        for replica in replica_offsets(layout).tolist():
            assert region in held[int(ranks[position + replica])]


@given(laid_out())
def test_coordinates_are_positions_in_the_mesh(case):
    _, layout = case
    mesh = layout.mesh
    for position, (rank, coordinate) in enumerate(zip(mesh_ranks(mesh).tolist(), np.ndindex(mesh.shape), strict=True)):
        assert position_of(mesh, rank) == position
        assert sum(c * s for c, s in zip(coordinate, mesh_strides(mesh), strict=True)) == position


def test_a_rank_outside_of_the_mesh_holds_nothing():
    layout = replicated_layout(encode_runs([3, 5]))
    assert held_by(layout, (4,), 4) == ()
    assert position_of(layout.mesh, 4) is None
    assert local_shape(layout, (4,), 4) is None
    assert [h.region for h in held_by(layout, (4,), 5)] == [Region.whole((4,))]


def test_one_rank_holds_all_of_a_single_layout():
    assert [h.region for h in held_by(replicated_layout(encode_runs([7])), (2, 3), 7)] == [Region.whole((2, 3))]
    assert held_by(replicated_layout(encode_runs([7])), (2, 3), 0) == ()


@given(st.data(), st.integers(1, 5))
def test_listed_pieces_are_held_as_listed(data, world):
    shape = data.draw(shapes(max_ndim=3))
    layout = data.draw(st.one_of(box_layouts(shape, world), flat_layouts(shape, world)))
    found = [(rank, held.region) for rank in range(world) for held in held_by(layout, shape, rank)]
    assert sorted(found) == sorted(layout.pieces)


def test_equal_layouts_hash_alike_whatever_made_them():
    a = MeshLayout(Mesh((2, 2), encode_runs([0, 1, 2, 3])), (Shard(0), Replicate()))
    b = MeshLayout(Mesh((2, 2), ((0, 1, 4),)), (Shard(0), Replicate()))
    assert a == b and hash(a) == hash(b)
    assert a != MeshLayout(a.mesh, (StridedShard(0, 1), Replicate()))


FOUR = Mesh((2, 2), encode_runs(range(4)))


@pytest.mark.parametrize(
    "layout",
    [
        MeshLayout(FOUR, (Shard(0),)),
        MeshLayout(FOUR, (Shard(2), Replicate())),
        MeshLayout(FOUR, (Shard(-1), Replicate())),
        MeshLayout(FOUR, (StridedShard(0, 0), Replicate())),
        MeshLayout(FOUR, (StridedShard(0, -2), Replicate())),
        MeshLayout(Mesh((3,), encode_runs(range(4))), (Replicate(),)),
        MeshLayout(Mesh((3,), encode_runs([0, 1, 0])), (Replicate(),)),
    ],
    ids=["too few", "no such dim", "negative dim", "factor 0", "factor negative", "wrong ranks", "a rank twice"],
)
def test_placements_that_do_not_fit_are_refused(layout):
    with pytest.raises(LayoutError, match=r"model/w"):
        check_layout(layout, (4, 4), "model/w")


def test_zero_sized_dimensions_leave_ranks_with_empty_pieces_only():
    layout = MeshLayout(Mesh((2,), encode_runs([0, 1])), (Shard(0),))
    assert all(not h.region.size for rank in (0, 1) for h in held_by(layout, (0, 3), rank))
    assert local_shape(layout, (0, 3), 1) == (0, 3)
    assert held_by(BoxLayout(()), (3,), 0) == ()


# groups of ranks ------------------------------------------------------------------------------------------------------
def test_a_mesh_inside_of_a_group_is_a_mesh_in_the_groups_numbers():
    layout = MeshLayout(Mesh((2,), encode_runs([6, 3]), ("tp",)), (Shard(0),))
    found = layout_of_group(layout, (4,), (3, 5, 6))
    assert found == MeshLayout(Mesh((2,), encode_runs([2, 0]), ("tp",)), (Shard(0),))


def test_of_a_mesh_that_is_larger_than_a_group_the_members_regions_are_listed():
    layout = MeshLayout(Mesh((3,), encode_runs([6, 3, 4])), (Shard(0),))
    found = layout_of_group(layout, (6,), (9, 4, 6))
    assert found == BoxLayout(((2, Region((0,), (2,))), (1, Region((4,), (2,)))))


def test_listed_pieces_of_a_group_are_those_of_its_members():
    first, last = Region((0,), (2,)), Region((2,), (2,))
    layout = BoxLayout(((6, first), (3, last), (6, last)))
    assert layout_of_group(layout, (4,), (5, 6)) == BoxLayout(((1, first), (1, last)))


def test_replicas_are_reached_by_steps_from_any_position():
    layout = MeshLayout(Mesh((2, 3, 2), encode_runs(range(12))), (Replicate(), Shard(0), Replicate()))
    assert mesh_strides(layout.mesh) == (6, 2, 1) and replica_offsets(layout).tolist() == [0, 1, 6, 7]
    assert [position_of(layout.mesh, rank) for rank in (0, 11, 12)] == [0, 11, None]


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2]])
def test_a_mesh_of_another_number_of_ranks_than_its_shape_is_refused(ranks):
    with pytest.raises(LayoutError, match="2 ranks"):
        mesh_ranks(Mesh((2,), encode_runs(ranks)))


@pytest.mark.parametrize(
    ("mesh", "found"),
    [
        (Mesh((), ((0,),)), "for 1 ranks"), (Mesh((0,), ()), "for 0 ranks"), (Mesh((2,), ((0,),)), "for 1 ranks"),
        (Mesh((2,), ((3, 0, 2),)), "a rank twice"),
    ],
)  # fmt: skip
def test_a_mesh_holds_each_of_its_ranks_once(mesh, found):
    with pytest.raises(LayoutError, match=found) as caught:
        check_layout(MeshLayout(mesh, (Replicate(),) * len(mesh.shape)), (4,), "a/b")
    assert caught.value.path == "a/b"


def test_placements_fit_at_their_limits():
    mesh = Mesh((2,), encode_runs([4, 7]))
    for placement, fits in ((Shard(0), True), (Shard(1), True), (Shard(2), False), (Shard(-1), False),
                            (StridedShard(1, 1), True), (StridedShard(1, 0), False), (Replicate(), True)):  # fmt: skip
        try:
            check_layout(MeshLayout(mesh, (placement,)), (4, 4), "w")
            assert fits
        except LayoutError:
            assert not fits
    for placements in ((), (Replicate(), Replicate())):
        with pytest.raises(LayoutError, match="1 placements"):
            check_layout(MeshLayout(mesh, placements), (4, 4), "w")


@given(data=st.data())
def test_replicas_are_the_ranks_that_hold_the_same_and_each_sees_the_same_ones(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_ndim=3, min_size=1))
    layout = data.draw(mesh_layouts(len(shape)))
    ranks = mesh_ranks(layout.mesh).tolist()
    groups = {rank: replicas_of(layout, rank) for rank in ranks}
    for rank, group in groups.items():
        assert rank in group and all(groups[other] == group for other in group)
        assert all(held_by(layout, shape, other) == held_by(layout, shape, rank) for other in group)
        assert len(group) == len(replica_offsets(layout))
    assert replicas_of(layout, max(ranks) + 1) == frozenset()
