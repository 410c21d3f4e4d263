"""Whole saves as data: any tree under any layouts, its index and the headers of its shards, without bytes or files."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.helpers.strategies import layouts, shapes, trees
from treeckpt._core.format.index import encode_manifest
from treeckpt._core.format.records import FileTable, Index, build_index, file_table
from treeckpt._core.format.shard_header import ShardEntry, ShardHeader, block_count, encode_header
from treeckpt._core.planning.rank_trees import Inventory, LeafSpec, RankClass, merge_rank_trees
from treeckpt._core.planning.save_plan import (
    BoxOwners,
    array_leaves,
    assign_offsets,
    assign_writers,
    plan_save,
)
from treeckpt._core.sharding.int_runs import decode_runs, encode_runs
from treeckpt._core.sharding.placements import (
    BoxLayout,
    Layout,
    Mesh,
    MeshLayout,
    Shard,
)
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.flatten import flatten
from treeckpt._core.tree.spec import ArraySpec, StridedView
from treeckpt._core.tree.value_codec import encode_value

SAVE_ID = "0123456789abcdef"
DTYPES = ["float32", "bfloat16", "uint8", "bool", "complex64", "complex128", "str3", "bytes5", "datetime64[ns]", "int3"]


SCALARS = st.sampled_from([None, True, 1 << 80, -0.0, float("nan"), "text", b"bytes", {1, 2}, range(3)])


class Array(msgspec.Struct, frozen=True, eq=False):
    """Stands for an array in a tree."""

    spec: ArraySpec
    layout: Layout | None = None
    alias_of: str | None = None
    view: StridedView | None = None


class Saved(msgspec.Struct):
    index: Index
    headers: list[tuple[int, ShardHeader]]
    tree: Any


@st.composite
def arrays(draw, world):
    shape = draw(shapes(max_ndim=3))
    spec = ArraySpec(shape, draw(st.sampled_from(DTYPES)), requires_grad=draw(st.booleans()))
    return Array(spec, draw(st.none() | layouts(shape, world)))


@st.composite
def saves(draw, *, max_leaves=6):
    """A save of any tree on 1 to 4 ranks, with ties and views, arrays and values of each rank's own."""
    world = draw(st.integers(1, 4))
    leaf = st.one_of(arrays(world), arrays(world), SCALARS)
    tree = {"tree": draw(trees(leaf, max_leaves=max_leaves)), "own": PerRank([Array(ArraySpec((3,), "int64")), 5])}
    base = Array(ArraySpec((4, 3), "float32"))
    tree |= {"base": base, "tie": Array(base.spec, alias_of="base")}
    tree["view"] = Array(ArraySpec((2, 2), "float32"), alias_of="base", view=StridedView(1, (6, 1)))
    return save(tree, world, max_shard_bytes=draw(st.sampled_from([1 << 62, 64])))


def save(tree, world, *, max_shard_bytes=1 << 62, metadata=None):
    """The index and the headers that `world` ranks with this tree leave behind."""
    structure, leaves = flatten(tree, namespace="treeckpt-tests")
    specs, found, own = [], {}, {}
    for path, leaf in leaves:
        name = path.replace("~rank0", "~rank*")
        per_rank = () if name != path else None
        if isinstance(leaf, Array):
            layout = leaf.layout if per_rank is None else None
            specs.append(LeafSpec(name, leaf.spec, layout, leaf.alias_of, leaf.view, per_rank))
            continue
        specs.append(LeafSpec(name, None, per_rank=per_rank))
        for rank in range(world):
            own[name, rank] = encode_value((leaf, rank), path)
        found[name] = encode_value(leaf, path)
    plenum = merge_rank_trees([RankClass(encode_runs(range(world)), Inventory(structure, tuple(specs)))], world)
    numbered = array_leaves(plenum)
    planned = [leaf for _, leaf in numbered]
    shares = assign_writers(planned)
    chunks, _ = assign_offsets(planned, shares, world)
    placed = {number: at for (number, _), at in zip(numbered, chunks, strict=True)}

    def built(placed, files):
        return build_index(
            plenum, placed, files, values=found, own_values=own, save_id=SAVE_ID, step=7,
            created_ns=1_800_000_000_000_000_000, metadata=metadata or {"note": 1},
        )  # fmt: skip

    manifest = encode_manifest(built(None, FileTable()))
    headers = []
    for rank in range(world):
        for file in plan_save(planned, shares, rank, max_shard_bytes=max_shard_bytes).files:
            entries = []
            for write in file.writes:
                number, leaf = numbered[write.leaf]
                spec, path = plenum.leaves[number].spec, leaf.path.replace("~rank*", f"~rank{rank}")
                entries.append(ShardEntry(path, spec.dtype, spec.shape, write.region, write.start, write.nbytes))
            header = ShardHeader(
                SAVE_ID, rank, world, file.part, file.stream, tuple(entries),
                tuple(range(block_count(file.nbytes))), manifest=None if rank or file.part else manifest,
            )  # fmt: skip
            headers.append((len(encode_header(header)), header))
    files = file_table((h.rank, h.part, h.stream, h.nbytes, size) for size, h in headers)
    return Saved(built(placed, files), headers, tree)


def small():
    """A save that is quick to take apart byte by byte, with a record of every kind."""
    from treeckpt._core.sharding.region import Region

    grid = MeshLayout(Mesh((2,), encode_runs([0, 1])), (Shard(0),))
    pieces = ((0, Region((0, 0), (2, 2))), (1, Region((0, 2), (2, 1))), (1, Region((2, 0), (1, 3))))
    return save(
        {
            "grid": Array(ArraySpec((5, 2), "float32"), grid),
            "boxes": Array(ArraySpec((3, 3), "complex64"), BoxLayout(pieces)),
            "whole": Array(ArraySpec((2,), "bfloat16")),
            "tie": Array(ArraySpec((2,), "bfloat16"), alias_of="whole"),
            "view": Array(ArraySpec((1,), "bfloat16"), alias_of="whole", view=StridedView(1, (1,))),
            "value": float("nan"),
            "own": PerRank([Array(ArraySpec((), "int64")), b"x"]),
        },
        2,
    )


def ranks_of(leaf):
    return decode_runs(leaf.ranks).tolist() if leaf.ranks is not None else None


def pieces_of(owners):
    """(rank, region) of every piece, from either form."""
    if isinstance(owners, BoxOwners):
        return list(owners.pieces)
    cells = itertools.product(
        *(zip(a.tolist(), b.tolist(), strict=True) for a, b in zip(owners.starts, owners.stops, strict=True))
    )
    regions = [Region(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in cells]
    return list(zip(owners.ranks.tolist(), regions, strict=True))
