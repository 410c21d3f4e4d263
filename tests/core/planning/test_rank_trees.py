"""Joining what classes of ranks bring: meshes side by side, pieces, ties that not every rank sees, contradictions."""

from __future__ import annotations

import pytest

from treeckpt._arrays.describe import json_digest
from treeckpt._core.planning.rank_trees import (
    GlobalTree,
    Inventory,
    LeafSpec,
    RankClass,
    check_disjoint,
    merge_rank_trees,
    piece_key,
)
from treeckpt._core.planning.save_plan import array_leaves, overlapping_pieces
from treeckpt._core.sharding.int_runs import decode_runs, encode_runs
from treeckpt._core.sharding.placements import BoxLayout, Layout, Mesh, MeshLayout, Replicate, Shard, replicated_layout
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec, StridedView
from treeckpt._core.tree.structure import DictNode, OrderedDictNode, PerRankNode
from treeckpt.errors import LayoutError, MismatchError, TreeError

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
                Inventory(DictNode(tuple(leaves), (None,) * len(leaves)), tuple(leaves.values())),
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
        return json_digest(Inventory(DictNode(("w",), (None,)), (leaf,)))

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


def test_equal_specs_and_kinds_are_asked_of_all_ranks() -> None:
    for other, says in (
        (LeafSpec("w", ArraySpec((4, 3), "float32")), "the same shape .*rank 0 has float32 of shape \\(4, 2\\)"),
        (LeafSpec("w", ArraySpec((4, 2), "int8")), "the same dtype .*rank 2 has int8 of shape \\(4, 2\\)"),
        (LeafSpec("w", None), "the same kind .*rank 2 has a value"),
    ):
        with pytest.raises(MismatchError, match=says):
            joined(((0, 1), {"w": array("w")}), ((2,), {"w": other}))
    value = LeafSpec("w", None)
    assert joined(((0,), {"w": value}), ((1,), {"w": value, "x": array("x")})).leaves[0] == value


def test_a_contradiction_shows_the_layouts() -> None:
    with pytest.raises(MismatchError, match=r"under \(Shard\(dim=0\),\) on mesh \(2,\).*tc\.PerRank"):
        joined(((0, 1), {"w": array("w", MeshLayout(on(0, 1), (Shard(0),)))}), ((2,), {"w": array("w", BoxLayout(()))}))


def test_one_mesh_on_all_ranks_stays_as_it_is() -> None:
    layout = MeshLayout(on(0, 1, shape=(1, 2)), (Replicate(), Shard(0)))
    tree = joined(((0,), {"w": array("w", layout)}), ((1,), {"w": array("w", layout), "x": array("x")}), world=2)
    assert tree.leaves[0].layout == layout
    nameless = [MeshLayout(on(*ranks, shape=(2,)), (Shard(0),)) for ranks in ((0, 1), (2, 3))]
    tree = joined(((0, 1), {"w": array("w", nameless[0])}), ((2, 3), {"w": array("w", nameless[1])}))
    assert tree.leaves[0].layout == MeshLayout(Mesh((2, 2), encode_runs(range(4))), (Replicate(), Shard(0)))


def test_the_highest_rank_of_a_mesh_is_below_the_world() -> None:
    tree = {"w": array("w", MeshLayout(on(0, 3), (Shard(0),)))}
    assert joined(((0, 3), tree), world=4).world == 4
    with pytest.raises(LayoutError, match="a mesh of the 3 ranks that save, found one that holds rank 3"):
        joined(((0, 3), tree), world=3)


def test_ranks_whose_own_leaves_are_equal_share_a_record() -> None:
    def tree(rank: int, shape: tuple[int, ...], **shared: LeafSpec) -> RankClass:
        node = PerRankNode((encode_runs([rank]),), (DictNode(("r", "v"), (None, None)),))
        structure = DictNode(("own", *shared), (node, *(None for _ in shared)))
        own = (
            LeafSpec("own/~rank*/r", ArraySpec(shape, "uint8"), per_rank=()),
            LeafSpec("own/~rank*/v", None, per_rank=()),
        )
        return RankClass(encode_runs([rank]), Inventory(structure, (*own, *shared.values())))

    merged = merge_rank_trees([tree(2, (3,), x=array("x")), tree(1, (5,)), tree(0, (3,))], 3)
    assert [(leaf.path, leaf.spec and leaf.spec.shape, leaf.per_rank) for leaf in merged.leaves] == [
        ("own/~rank*/r", (3,), encode_runs([0, 2])),
        ("own/~rank*/v", None, encode_runs([0, 2])),
        ("own/~rank*/r", (5,), encode_runs([1])),
        ("own/~rank*/v", None, encode_runs([1])),
        ("x", (4, 2), None),
    ]
    alone = merge_rank_trees([tree(1, (5,))], 2)
    assert [leaf.per_rank for leaf in alone.leaves] == [encode_runs([1])] * 2


def test_ranks_whose_own_containers_differ_share_no_record() -> None:
    def tree(rank: int, kind: type[DictNode | OrderedDictNode], keys: tuple[str, ...]) -> RankClass:
        facts = (None,) if kind is OrderedDictNode else ()
        node = PerRankNode((encode_runs([rank]),), (kind(*facts, keys, (None,) * len(keys)),))
        own = tuple(LeafSpec(f"own/~rank*/{key}", None, per_rank=()) for key in keys)
        return RankClass(encode_runs([rank]), Inventory(DictNode(("own",), (node,)), own))

    for keys in (("v",), ()):
        classes = [tree(0, DictNode, keys), tree(1, OrderedDictNode, keys), tree(2, DictNode, keys)]
        merged = merge_rank_trees(classes, 3)
        whole = merged.structure
        assert isinstance(whole, DictNode)
        assert whole.children[0] == PerRankNode(
            (encode_runs([0, 2]), encode_runs([1])),
            (DictNode(keys, (None,) * len(keys)), OrderedDictNode(None, keys, (None,) * len(keys))),
        )
        assert [leaf.per_rank for leaf in merged.leaves] == [encode_runs([0, 2]), encode_runs([1])] * len(keys)


def test_arrays_of_a_table_are_sharded_by_row() -> None:
    def part(rank: int, low: int, high: int, rows: int) -> dict[str, LeafSpec]:
        region = Region((low, 0), (high - low, 2))
        return {"t": LeafSpec("t", ArraySpec((4, 2), "int64"), BoxLayout(((rank, region),)), rows=rows)}

    tree = joined(((1,), part(1, 0, 1, 7)), ((0,), part(0, 1, 4, 5)), world=2)
    assert tree.leaves == (
        LeafSpec(
            "t", ArraySpec((12, 2), "int64"), BoxLayout(((1, Region((0, 0), (7, 2))), (0, Region((7, 0), (5, 2)))))
        ),
    )


# arrays that are written ----------------------------------------------------------------------------------------------
def test_arrays_are_numbered_among_all_leaves_and_aligned_to_their_numbers() -> None:
    specs = {
        "v": LeafSpec("v", None),
        "a": array("a"),
        "b": array("b", alias_of="a"),
        "c": LeafSpec("c", ArraySpec((2,), "complex128")),
        "t": LeafSpec("t", ArraySpec((2,), "str3")),
    }
    found = array_leaves(joined(((0, 1), specs)))
    assert [(n, leaf.path, leaf.itemsize, leaf.align) for n, leaf in found] == [
        (1, "a", 4, 4), (3, "c", 16, 8), (4, "t", 12, 4),
    ]  # fmt: skip
    assert {leaf.layout for _, leaf in found} == {replicated_layout(encode_runs([0, 1]))}


def test_arrays_have_at_most_64_dimensions() -> None:
    def tree(ndim: int) -> GlobalTree:
        return joined(((0,), {"w": LeafSpec("w", ArraySpec((1,) * ndim, "int8"))}))

    assert len(array_leaves(tree(64))) == 1
    with pytest.raises(TreeError, match="w: expected arrays of at most 64 dimensions, found 65"):
        array_leaves(tree(65))


def test_boxes_that_several_pieces_hold_are_listed_with_their_bytes() -> None:
    top, all_but_first = Region((0, 0), (3, 2)), Region((1, 0), (3, 2))
    pieces = BoxLayout(((0, top), (1, all_but_first)))
    tree = joined(
        ((0, 1), {"v": LeafSpec("v", None), "w": array("w", pieces), "x": array("x"), "y": array("y", alias_of="w")})
    )
    assert overlapping_pieces(tree) == [("w", Region((1, 0), (2, 2)), 16)]


def test_pieces_that_overlap_in_part_cannot_be_compared() -> None:
    keys = [(0, piece_key("w", Region((0, 0), (2, 2)))), (1, piece_key("w", Region((2, 0), (2, 2)))), (2, "w")]
    keys += [(3, keys[0][1]), (1, piece_key("w", Region((1, 0), (0, 2)))), (2, piece_key("v", Region((1, 0), (2, 2))))]
    keys += [(5, piece_key("scalar", Region((), ()))), (6, piece_key("scalar", Region((), ())))]
    check_disjoint(keys)
    with pytest.raises(LayoutError) as caught:
        check_disjoint([*keys, (4, piece_key("w", Region((1, 1), (2, 1))))])
    assert caught.value.path == "w"
    assert caught.value.found == "offset (0, 0), shape (2, 2) on rank 0 and offset (1, 1), shape (2, 1) on rank 4"


def test_ranks_that_hold_no_piece_do_not_say_the_dtype() -> None:
    half = ArraySpec((4, 2), "bfloat16", order=(1, 0))
    nothing, pieces = array("w", BoxLayout(())), LeafSpec("w", half, BoxLayout(((1, WHOLE),)))
    for classes in ([((0,), {"w": nothing}), ((1,), {"w": pieces})], [((1,), {"w": pieces}), ((0,), {"w": nothing})]):
        [leaf] = joined(*classes, world=2).leaves
        assert leaf == pieces
    with pytest.raises(MismatchError, match="shape"):
        joined(((0,), {"w": LeafSpec("w", ArraySpec((4,), "float32"), BoxLayout(()))}), ((1,), {"w": pieces}))
