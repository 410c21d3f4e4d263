"""The index of a save repeats no spec and no layout, and names for each leaf what the save placed."""

from tests.helpers.saves import Array, save
from treeckpt._core.format.records import (
    AliasRecord,
    ArrayRecord,
    FileTable,
    GridChunks,
    NoChunks,
    PerRankArrays,
    PerRankValues,
    ValueRecord,
    WholeChunk,
    build_index,
)
from treeckpt._core.planning.rank_trees import Inventory, LeafSpec, RankClass, merge_rank_trees
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Replicate, Shard
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.flatten import flatten
from treeckpt._core.tree.spec import ArraySpec, StridedView

MESH = Mesh((2,), encode_runs([0, 1]))
ROWS, COLUMNS = MeshLayout(MESH, (Shard(0),)), MeshLayout(MESH, (Shard(1),))


def square():
    return ArraySpec((4, 4), "float32")


def test_equal_specs_and_layouts_are_listed_once_in_the_order_of_the_leaves():
    tree = {
        "a": Array(square(), ROWS), "b": Array(square(), MeshLayout(MESH, (Shard(0),))), "c": Array(square(), COLUMNS),
        "d": Array(ArraySpec((2,), "int64"), MeshLayout(MESH, (Replicate(),))), "e": Array(square(), ROWS),
    }  # fmt: skip
    index = save(tree, 2).index
    assert index.specs == (square(), ArraySpec((2,), "int64"))
    assert index.layouts == (ROWS, COLUMNS, MeshLayout(MESH, (Replicate(),)))
    assert [(r.spec, r.layout) for r in index.leaves] == [(0, 0), (0, 0), (0, 1), (1, 2), (0, 0)]
    assert [type(r.chunks) for r in index.leaves[:3]] == [GridChunks] * 3


def test_the_fields_of_the_save_stand_in_the_index():
    index = save({"a": 5}, 3, metadata={"note": "x"}).index
    assert (index.world, index.step, index.metadata, index.lineage) == (3, 7, {"note": "x"}, None)
    assert index.leaves == (ValueRecord(5),)


def test_values_of_each_rank_are_listed_by_rank():
    index = save({"own": PerRank(5)}, 2).index
    [record] = index.leaves
    assert isinstance(record, PerRankValues) and [value.items[1] for value in record.values] == [0, 1]


def test_ties_name_the_leaf_they_share_storage_with():
    view = StridedView(1, (1,))
    tree = {
        "x": 1, "a": Array(square()), "tie": Array(square(), alias_of="a"),
        "view": Array(ArraySpec((2,), "float32"), alias_of="a", view=view),
    }  # fmt: skip
    assert save(tree, 1).index.leaves[2:] == (AliasRecord(0, 1), AliasRecord(1, 1, view))


def manifest_of(*trees):
    """The index before placement of ranks with trees of their own."""
    classes = []
    for rank, tree in enumerate(trees):
        structure, leaves = flatten(tree)
        specs = tuple(
            LeafSpec(path.replace("~rank0", "~rank*"), leaf.spec, leaf.layout, leaf.alias_of, leaf.view, ())
            for path, leaf in leaves
        )
        classes.append(RankClass(encode_runs([rank]), Inventory(structure, specs)))
    return build_index(
        merge_rank_trees(classes, len(trees)), None, FileTable(), values={}, own_values={}, save_id="0" * 16, step=None,
        created_ns=5, metadata={},
    )  # fmt: skip


def test_an_index_before_placement_has_no_chunks():
    structure, _ = flatten({"a": None, "b": None})
    leaves = (LeafSpec("a", square(), ROWS), LeafSpec("b", square()))
    tree = merge_rank_trees([RankClass(encode_runs([0, 1]), Inventory(structure, leaves))], 2)
    index = build_index(
        tree, None, FileTable(), values={}, own_values={}, save_id="0" * 16, step=None, created_ns=5, metadata={}
    )
    assert [record.chunks for record in index.leaves] == [NoChunks(), NoChunks()]
    assert (index.step, index.created_ns) == (None, 5)


def test_a_tie_under_per_rank_is_to_the_array_of_the_same_ranks():
    tie = Array(square(), alias_of="~rank*/a")
    index = manifest_of(
        PerRank({"a": Array(square()), "b": tie}),
        PerRank({"b": tie, "x": Array(ArraySpec((), "int8")), "a": Array(square())}),
    )
    assert [type(record) for record in index.leaves] == [
        PerRankArrays, AliasRecord, AliasRecord, PerRankArrays, PerRankArrays,
    ]  # fmt: skip
    assert [record.of for record in index.leaves if isinstance(record, AliasRecord)] == [0, 4]
    assert index.leaves[0] == PerRankArrays(0, ()) and index.specs == (square(), ArraySpec((), "int8"))


def test_an_array_of_one_rank_is_one_chunk():
    index = save({"a": Array(ArraySpec((3,), "uint8"))}, 1).index
    assert index.leaves == (ArrayRecord(0, 0, WholeChunk(0, 0)),)
