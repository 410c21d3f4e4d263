"""A preview of a load is what the loader does, and it is bounded."""

import contextlib
import math

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.layout_cases import on_ranks
from tests.helpers.samples import write_checkpoint
from treeckpt._arrays.base import ArrayTarget, HostArray, TargetPiece, raw_dtype
from treeckpt._core.sharding.dtypes import dtype_of
from treeckpt._core.sharding.placements import MeshLayout, Replicate, Shard, StridedShard, held_by, local_shape
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import StoreTraits
from treeckpt._io.timing import Recorder
from treeckpt._loading.read_batch import BatchOptions, ReadBatch
from treeckpt._loading.reshard_plan import bit_reversed_order, parse_mesh, parse_rules, parse_target, plan_reshard
from treeckpt.errors import LayoutError
from treeckpt.testing import thread_comms


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("reshard") / "step_00000001"
    return path, write_checkpoint(path, step=1)


def plan(index, mesh, rules="", **options):
    return plan_reshard(Checkpoint(tc.MemoryStore(), index), parse_target(mesh, place=rules), **options)


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


class Counting(LocalStore):
    """Notes each range of data that is asked for, once: what is not in the page cache is asked for another way."""

    def __init__(self, path):
        super().__init__(path)
        self.asked = set()

    def read_into(self, name, offset, out, **options):
        self.asked.add((name, offset, len(out)))
        return super().read_into(name, offset, out, **options)

    def read_parts(self, name, offset, parts, **options):
        self.asked.add((name, offset, sum(map(len, parts))))
        return super().read_parts(name, offset, parts, **options)

    @contextlib.contextmanager
    def mapped(self, name, offset, nbytes, **options):
        with super().mapped(name, offset, nbytes, **options) as memory:
            self.asked.add((name, offset, nbytes))
            yield memory

    def data(self, index):
        headers = {file.name: file.header for file in index.file_list}
        return {asked for asked in self.asked if asked[1] >= headers.get(asked[0], 1 << 62)}


class FarStore(Counting):
    """The same files, as far away as a bucket."""

    @property
    def traits(self):
        return StoreTraits(far=True, request_nbytes=1 << 20)

    def fetch(self, ranges, consume, *, memory, first=0, shared=False):
        for number, (name, offset, nbytes) in enumerate(ranges):
            out = memoryview(bytearray(nbytes))
            self.read_into(name, offset, out)
            consume(number, 0, out, None)


def tree_of(kind, rank, world):
    """What a rank of a job holds: pipeline stages, ranges of ZeRO, parts of a table, or shards beside replicas."""
    seed = torch.Generator().manual_seed(rank if kind == "stages" else 0)
    whole = torch.rand(700_001, 8, generator=seed)  # 22 MB, more than one request takes
    own = {"rng": tc.PerRank(np.full(9, rank)), "notes": "x" * 70_000, "step": 3, "tied": whole}
    if kind == "stages":
        return {"model": {f"{2 * rank + n}": whole[n::2].clone() for n in range(2)}, "step": 3}
    if kind == "zero":
        flat, share = whole.flatten(), -(-whole.numel() // world)
        part = flat[rank * share : (rank + 1) * share].clone()
        return {"exp_avg": tc.Sharded(part, tuple(whole.shape), rank * share), **own}
    if kind == "tables":
        ids = np.arange(60_000, dtype=np.int64) * 7 - 9000
        owned = tc.KeyedTable.share(rank, world)
        buckets = tc.KeyedTable.buckets_of(ids)
        mine = torch.from_numpy(ids[(buckets >= owned[0]) & (buckets < owned[1])])
        return {
            "emb": tc.KeyedTable(mine, {"w": torch.ones(len(mine), 16)}, owned=owned),
            "b": torch.ones(7),
            "step": 3,
        }
    rows = len(whole) // world
    return {"w": tc.Sharded(whole[rank * rows : (rank + 1) * rows].clone(), (rows * world, 8), (rank * rows, 0)), **own}


@pytest.mark.parametrize("kind", ["stages", "zero", "tables", "rows"])
@pytest.mark.parametrize("store_of", [Counting, FarStore])
def test_the_layout_of_the_save_is_that_of_the_ranks_that_saved(tmp_path_factory, kind, store_of):
    """Each rank loads what it saved: bytes and requests are those that the preview has for it."""
    world, path = 3, tmp_path_factory.getbasetemp() / f"as_saved_{kind}"
    trees = [tree_of(kind, rank, world) for rank in range(world)]
    if not path.exists():
        on_ranks(world, lambda comm: tc.save(path, trees[comm.rank], comm=comm))
    index = tc.inspect(path)
    found = plan_reshard(Checkpoint(store_of(path), index), parse_target("saved"))
    assert found.world == world and [rank.rank for rank in found.ranks] == list(range(world))
    for rank in found.ranks:
        store, reports = store_of(path), []
        comm = thread_comms(world)[rank.rank]
        tc.load(store, tc.abstract(trees[rank.rank], comm=comm), comm=comm, strict="missing", on_report=reports.append)
        assert (rank.nbytes, rank.read) == (reports[0].nbytes, reports[0].read_nbytes)
        assert rank.reads == len(store.data(index)) > 1
        assert sum(nbytes for _, nbytes in rank.files) == rank.read
    # of what a rank wrote alone it reads each byte once; a table's buckets, and small arrays, share blocks of checksums
    most = {"stages": 1, "tables": 1.4}.get(kind, 1.1)
    assert found.amplification <= most
    assert (found.listed > 0) == (kind != "stages") and found.tables == found.left_out == found.unmatched == 0


def test_of_the_layout_of_the_save_a_part_can_be_chosen(saved):
    _, index = saved
    found = plan(index, "saved", "model/*")
    assert found.arrays == sum(leaf.path.startswith("model/") for leaf in index.entries) and found.unmatched


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


def test_one_rank_reads_what_a_load_without_like_reads(saved):
    path, index = saved
    store, reports = Counting(path), []
    tc.load(store, select=["model", "optimizer"], strict=False, comm="alone", on_report=reports.append)
    found = plan(index, "1", "model*: Replicate\noptimizer*: Replicate")
    assert (found.held, found.read) == (reports[0].nbytes, reports[0].read_nbytes) and found.imbalance == 1
    assert found.ranks[0].reads == len(store.data(index))


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
    from treeckpt._core.format.records import ArrayRecord, Index, WholeChunk, file_table
    from treeckpt._core.tree.structure import DictNode

    spec = ArraySpec((1 << 20, 1 << 18), "uint8")
    structure = DictNode(("a",), (None,))
    index = Index(
        "0" * 16,
        1,
        0,
        1,
        structure,
        (spec,),
        (),
        (ArrayRecord(0, -1, WholeChunk(0, 0)),),
        file_table([(0, 0, 0, 1 << 38, 4096)]),
        {},
    )
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
