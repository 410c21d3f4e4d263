"""Joining what classes of ranks bring: meshes side by side, pieces, ties that not every rank sees, contradictions."""

from __future__ import annotations

import pytest

from treeckpt.core.planning.rank_trees import (
    GlobalTree,
    Inventory,
    LeafSpec,
    RankClass,
    array_leaves,
    digest_of,
    merge_rank_trees,
)
from treeckpt.core.sharding.int_runs import decode_runs, encode_runs
from treeckpt.core.sharding.placements import BoxLayout, Layout, Mesh, MeshLayout, Replicate, Shard, replicated_layout
from treeckpt.core.sharding.region import Region
from treeckpt.core.tree.nesting import split_structure
from treeckpt.core.tree.spec import ArraySpec, StridedView
from treeckpt.core.tree.structure import DictNode
from treeckpt.errors import LayoutError, MismatchError

SPEC = ArraySpec((4, 2), "float32")
WHOLE = Region((0, 0), (4, 2))


def on(*ranks: int, shape: tuple[int, ...] | None = None) -> Mesh:
    return Mesh(shape or (len(ranks),), encode_runs(ranks), ("tp",) if shape is None else ())


def joined(*classes: tuple[tuple[int, ...], dict[str, LeafSpec]], world: int = 4) -> GlobalTree:
    """The global tree of classes of ranks, each a flat dict of leaves."""
    return merge_rank_trees(
        [
            RankClass(
                encode_runs(ranks),
                Inventory(split_structure(DictNode(tuple(leaves), (None,) * len(leaves))), tuple(leaves.values())),
            )
            for ranks, leaves in classes
        ],
        world,
    )


def array(path: str, layout: Layout | None = None, **more: object) -> LeafSpec:
    return LeafSpec(path, SPEC, layout, **more)  # type: ignore[arg-type]


def test_one_class_resolves_plain_arrays_to_replicas() -> None:
    plenum = joined(((0, 1, 2, 3), {"w": array("w")}))
    assert plenum.leaves[0].layout == replicated_layout(encode_runs([0, 1, 2, 3]))


def test_ranks_that_lack_a_key_hold_no_replica() -> None:
    plenum = joined(((0, 2), {"a": array("a"), "w": array("w")}), ((1,), {"w": array("w")}), ((3,), {"b": array("b")}))
    held = {leaf.path: list(decode_runs(leaf.layout.mesh.ranks)) for leaf in plenum.leaves}  # type: ignore[union-attr]
    assert held == {"a": [0, 2], "w": [0, 1, 2], "b": [3]}


def test_equal_placements_on_disjoint_meshes_are_replicas() -> None:
    shard = (Shard(0),)
    plenum = joined(
        ((0, 1), {"w": array("w", MeshLayout(on(0, 1), shard))}),
        ((2, 3), {"w": array("w", MeshLayout(on(3, 2), shard))}),
    )
    assert plenum.leaves[0].layout == MeshLayout(
        Mesh((2, 2), encode_runs([0, 1, 3, 2]), ("replicas", "tp")), (Replicate(), Shard(0))
    )


@pytest.mark.parametrize(
    "other",
    [
        MeshLayout(on(2, 3), (Shard(1),)),
        MeshLayout(on(1, 2), (Shard(0),)),
        MeshLayout(on(2), (Shard(0),)),
        BoxLayout(((2, WHOLE),)),
        None,
    ],
    ids=["other dimension", "a rank in both", "other size", "pieces", "plain"],
)
def test_layouts_that_contradict_each_other_are_refused(other: Layout | None) -> None:
    with pytest.raises(MismatchError) as caught:
        joined(((0, 1), {"w": array("w", MeshLayout(on(0, 1), (Shard(0),)))}), ((2, 3), {"w": array("w", other)}))
    assert caught.value.path == "w"
    assert "rank 0" in str(caught.value)
    assert "rank 2" in str(caught.value)


def test_pieces_of_all_ranks_come_together() -> None:
    top, low = Region((0, 0), (1, 2)), Region((1, 0), (3, 2))
    plenum = joined(
        ((0,), {"w": array("w", BoxLayout(((0, top),)))}), ((1,), {"w": array("w", BoxLayout(((1, low),)))})
    )
    assert plenum.leaves[0].layout == BoxLayout(((0, top), (1, low)))


def test_ranks_without_an_element_cannot_undo_a_tie() -> None:
    """Four rows on five ranks: the last one sees no memory that its two leaves could share."""
    layout = MeshLayout(on(0, 1, 2, 3, 4), (Shard(0),))
    tied = {"a": array("a", layout), "b": array("b", alias_of="a")}
    apart = {"a": array("a", layout), "b": array("b", layout)}
    for classes in ((((0, 1, 2, 3), tied), ((4,), apart)), (((4,), apart), ((0, 1, 2, 3), tied))):
        plenum = joined(*classes, world=5)
        assert [leaf.alias_of for leaf in plenum.leaves] == [None, "a"]
        assert [leaf.path for _, leaf in array_leaves(plenum)] == ["a"]


def test_a_rank_that_holds_an_array_apart_undoes_a_tie() -> None:
    plenum = joined(
        ((0,), {"a": array("a"), "b": array("b", alias_of="a")}), ((1,), {"a": array("a"), "b": array("b")}), world=2
    )
    assert [leaf.alias_of for leaf in plenum.leaves] == [None, None]
    assert plenum.leaves[1].layout == replicated_layout(encode_runs([1]))


def test_other_views_of_one_base_contradict_each_other() -> None:
    def tree(offset: int) -> dict[str, LeafSpec]:
        return {"a": array("a"), "v": array("v", alias_of="a", view=StridedView(offset, (2, 1)))}

    assert joined(((0,), tree(0)), ((1,), {**tree(0), "x": array("x")})).leaves[1].view == StridedView(0, (2, 1))
    with pytest.raises(MismatchError, match="v: expected the same view of a"):
        joined(((0,), tree(0)), ((1,), tree(2)))


def test_a_mesh_outside_of_the_world_is_refused() -> None:
    with pytest.raises(LayoutError, match="one that holds rank 7"):
        joined(((0, 1), {"w": array("w", MeshLayout(on(0, 7), (Shard(0),)))}))


def test_digests_tell_inventories_apart_by_all_but_values() -> None:
    def digest(leaf: LeafSpec) -> bytes:
        return digest_of(Inventory(split_structure(DictNode(("w",), (None,))), (leaf,)))

    leaves = [
        array("w"),
        array("w", MeshLayout(on(0, 1), (Shard(0),))),
        LeafSpec("w", ArraySpec((4, 2), "float32", requires_grad=True)),
        LeafSpec("w", None),
        array("w", alias_of="v"),
        array("w", per_rank=()),
    ]
    assert len({digest(leaf) for leaf in leaves}) == len(leaves)
    assert digest(array("w")) == digest(array("w"))
