"""A preview of a load is what the loader does, and it is bounded."""

import math

import numpy as np
import pytest

from tests.helpers.samples import write_checkpoint
from treeckpt._arrays.base import ArrayTarget, HostArray, TargetPiece, raw_dtype
from treeckpt._core.sharding.dtypes import dtype_of
from treeckpt._core.sharding.placements import MeshLayout, Replicate, Shard, StridedShard, held_by, local_shape
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.timing import Recorder
from treeckpt._loading.read_batch import BatchOptions, ReadBatch
from treeckpt.errors import LayoutError
from treeckpt_dashboard.compare.reshard_plan import bit_reversed_order, parse_mesh, parse_rules, plan_reshard


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("reshard") / "step_00000001"
    return path, write_checkpoint(path, step=1)


def plan(index, mesh, rules, **options):
    target = parse_mesh(mesh)
    return plan_reshard(index, target, parse_rules(rules, target), **options)


def read_by_a_load(path, index, layout, rank, glob):
    """Bytes that the loader reads for one rank, verified, of the arrays whose path ends so."""
    batch = ReadBatch(Checkpoint(LocalStore(path), index), 0, Recorder(0))
    for leaf in index.entries:
        if leaf.spec is None or not leaf.path.endswith(glob):
            continue
        for held in held_by(layout, leaf.spec.shape, rank):
            memory = np.empty(held.region.shape, raw_dtype(dtype_of(leaf.spec.dtype).itemsize))
            spec = ArraySpec(leaf.spec.shape, leaf.spec.dtype)
            batch.add_target(leaf.path, leaf, ArrayTarget(spec, memory, [TargetPiece(held.region, HostArray(memory))]))
    batch.run(BatchOptions(memory=64 << 20))
    return batch.read_nbytes


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [("3", (Shard(0),)), ("2x2", (StridedShard(0, 2), Shard(0))), ("2x3", (Replicate(), Shard(1))), ("5", (Shard(1),))],
)
def test_a_preview_counts_what_the_loader_reads(saved, mesh, placements):
    path, index = saved
    names = {Replicate: "Replicate", Shard: "Shard({0.dim})", StridedShard: "StridedShard({0.dim}, {0.factor})"}
    text = ", ".join(names[type(p)].format(p) for p in placements)
    found = plan(index, mesh, f"*proj.weight: {text}")
    layout = MeshLayout(parse_mesh(mesh), placements)
    for rank in found.ranks:
        assert (
            rank.read == sum(n for _, n in rank.files) == read_by_a_load(path, index, layout, rank.rank, "proj.weight")
        )
        shapes = [leaf.spec.shape for leaf in index.entries if leaf.spec and leaf.path.endswith("proj.weight")]
        assert rank.nbytes == sum(4 * math.prod(local_shape(layout, shape, rank.rank)) for shape in shapes)


def test_the_first_rule_that_matches_holds_and_others_are_not_read(saved):
    _, index = saved
    found = plan(index, "2", "model/*.bias: Replicate\nmodel/*: Shard(0)")
    model = [leaf for leaf in index.entries if leaf.spec and leaf.path.startswith("model/")]
    arrays = [leaf for leaf in index.entries if leaf.spec and "rank" not in leaf.path]
    assert found.arrays == len(model) and found.unmatched == len(arrays) - len(model) and found.left_out == 1
    bias = sum(4 * math.prod(leaf.spec.shape) for leaf in model if leaf.path.endswith("bias"))
    assert found.held == found.nbytes + bias


def test_arrays_that_lack_a_dimension_stay_whole(saved):
    found = plan(saved[1], "2", "*.bias: Shard(1)")
    assert found.whole == found.arrays > 0 and found.held == 2 * found.nbytes


def test_one_rank_reads_each_byte_about_once(saved):
    found = plan(saved[1], "1", "*: Replicate")
    assert found.imbalance == 1 and 1 <= found.amplification < 1.1 and found.held == found.nbytes


def test_work_is_bounded_and_ranks_left_out_are_spread(saved):
    _, index = saved
    found = plan(index, "16", "model/*: Shard(0)", chunks=1200)
    whole = plan(index, "16", "model/*: Shard(0)")
    assert 2 <= len(found.ranks) < 16 == len(whole.ranks) == found.world
    assert {r.rank for r in found.ranks} >= {0, 8} and set(found.ranks) <= set(whole.ranks)
    with pytest.raises(LayoutError, match="Narrow the rules"):
        plan(index, "16", "model/*: Shard(0)", chunks=50)


def test_rows_that_lie_apart_count_as_many_reads():
    """A column of a large array costs a read a row: that is refused before it is planned."""
    from treeckpt._core.format.records import ArrayRecord, FileTable, Index, WholeChunk
    from treeckpt._core.tree.structure import DictNode

    spec = ArraySpec((1 << 20, 1 << 18), "uint8")
    structure = DictNode(("a",), (None,))
    index = Index("0" * 16, 1, 0, 1, structure, (spec,), (), (ArrayRecord(0, -1, WholeChunk(0, 0)),), FileTable(), {})
    with pytest.raises(LayoutError):
        plan(index, "2", "*: Shard(1)")


def test_rows_that_lie_close_count_as_one_read(tmp_path):
    """Half of the columns of an array of 100 kB: a few reads, not one for each of its 1000 rows."""
    index = write_checkpoint(tmp_path, {"a": np.zeros((1000, 100), np.uint8)}, world=1, layouts=lambda *_: None)
    found = plan(index, "2", "*: Shard(1)", chunks=6)
    assert [(rank.nbytes, rank.read) for rank in found.ranks] == [(50_000, 100_000)] * 2


def test_spread_numbers_are_all_numbers():
    for count in (1, 2, 3, 7, 8, 100):
        assert sorted(bit_reversed_order(count)) == list(range(count))
    assert list(bit_reversed_order(8))[:4] == [0, 4, 2, 6]


def test_meshes_and_placements_read_as_torch_writes_them():
    mesh = parse_mesh(" 2 x 4 ", "dp, tp")
    assert (mesh.shape, mesh.names) == ((2, 4), ("dp", "tp"))
    [rule] = parse_rules("a:b: _StridedShard(dim=1, split_factor=2), R", mesh)
    assert rule.glob == "a:b" and rule.placements == (StridedShard(1, 2), Replicate())
    assert parse_rules(": Replicate(), S(3);", mesh)[0].glob == "*"


@pytest.mark.parametrize("mesh", ["", "0", "2x", "-1", "a", "2x2x2x2x2x2x2x2x2", "99999999", "300x300", "²", "1e3"])
def test_no_mesh(mesh):
    with pytest.raises(LayoutError):
        parse_mesh(mesh)


@pytest.mark.parametrize(
    "rules",
    [
        "",
        ";",
        "*",
        "*: ",
        "*: Shard(0), Shard(0)",
        "*: Shard(-1)",
        "*: Partial()",
        "*: Shard(0) x",
        "x" * 5000,
        "*:R;" * 200,
    ],
)
def test_no_rules(rules):
    with pytest.raises(LayoutError):
        parse_rules(rules, parse_mesh("4"))


def test_names_must_be_as_many_as_sizes():
    with pytest.raises(LayoutError):
        parse_mesh("2x4", "dp")
