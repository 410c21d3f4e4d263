"""How long planning takes, and how large an index is, for 16,384 simulated ranks and 1,000 regularly sharded arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from treeckpt.core.assign import ArrayLeaf, assign
from treeckpt.core.build import build_index
from treeckpt.core.index import decode_index, encode_index, encode_manifest
from treeckpt.core.inventory import Inventory, LeafSpec, RankClass, array_leaves, unify
from treeckpt.core.layout import Mesh, MeshLayout, Replicate, Shard, StridedShard
from treeckpt.core.plan import place, plan_save
from treeckpt.core.records import FileTable, Index, file_table
from treeckpt.core.runs import encode_runs
from treeckpt.core.spec import ArraySpec
from treeckpt.core.tree import flatten

T = TypeVar("T")
PLAN_BAR, INDEX_BAR = 1.0, 2 << 20
"""Seconds for one rank's own plan; bytes of the index."""


class Figures(msgspec.Struct):
    """What was measured, in seconds and bytes."""

    unify: float = 0.0
    plan: float = 0.0
    place: float = 0.0
    build: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    index_nbytes: int = 0


def gpt_shapes(leaves: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a large decoder, as many as asked for."""
    width = 16384
    block = {
        "norm.weight": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.proj.weight": (width, width),
        "mlp.up.weight": (4 * width, width),
        "mlp.down.weight": (width, 4 * width),
        "mlp.norm.weight": (width,),
    }
    names = [(f"layers.{n}.{name}", shape) for n in range(-(-leaves // len(block))) for name, shape in block.items()]
    return dict(names[:leaves])


def layout_of(path: str, mesh: Mesh) -> MeshLayout:
    """FSDP over the first mesh dimension, tensor parallelism over the second, as a training job places them."""
    if "norm" in path:
        return MeshLayout(mesh, (Shard(0), Replicate()))
    if "qkv" in path or "up" in path:
        return MeshLayout(mesh, (StridedShard(0, mesh.shape[1]), Shard(0)))
    return MeshLayout(mesh, (Shard(0), Shard(1)))


def measured(figures: Figures, name: str, verb: Callable[[], T]) -> T:
    started = time.perf_counter()
    result = verb()
    setattr(figures, name, time.perf_counter() - started)
    return result


def measure(side: int = 128, leaves: int = 1000) -> Figures:
    """Plans a save of `leaves` arrays on a mesh of `side` x `side` ranks."""
    figures, world = Figures(), side * side
    mesh = Mesh((side, side), encode_runs(range(world)), ("dp", "tp"))
    shapes = gpt_shapes(leaves)
    structure, found = flatten({"model": dict.fromkeys(shapes)})
    specs = tuple(
        LeafSpec(path, ArraySpec(shape, "float32"), layout_of(path, mesh))
        for (path, _), shape in zip(found, shapes.values(), strict=True)
    )
    classes = [RankClass(encode_runs(range(world)), Inventory(structure, specs))]
    plenum = measured(figures, "unify", lambda: unify(classes, world))
    numbered = array_leaves(plenum)
    arrays: list[ArrayLeaf] = [leaf for _, leaf in numbered]
    plan = measured(figures, "plan", lambda: plan_save(arrays, assign(arrays), world // 3))
    assert sum(len(file.writes) for file in plan.files) > leaves // 2
    shares = assign(arrays)
    chunks, nbytes = measured(figures, "place", lambda: place(arrays, shares, world))
    assert nbytes[world // 3] == plan.nbytes
    placed = {number: at for (number, _), at in zip(numbered, chunks, strict=True)}
    files = file_table((rank, 0, 0, int(n), 8192) for rank, n in enumerate(nbytes.tolist()))

    def build(files: FileTable) -> Index:
        return build_index(
            plenum, placed, files, values={}, own_values={}, save_id="0" * 16, step=1, created_ns=0, metadata={}
        )

    index = measured(figures, "build", lambda: build(files))
    data = measured(figures, "encode", lambda: encode_index(index))
    assert measured(figures, "decode", lambda: decode_index(data)) == index
    assert encode_manifest(index)
    figures.index_nbytes = len(data)
    return figures


def main() -> None:
    """Prints the figures and whether they meet their bars."""
    found = measure()
    print("planning: 16,384 ranks, 1,000 leaves, regular 2-D sharding")
    rows = [
        ("one rank's own plan", f"{found.plan:.3f} s", f"bar {PLAN_BAR:.0f} s", found.plan <= PLAN_BAR),
        ("unify", f"{found.unify:.3f} s", "", True),
        ("place, all ranks", f"{found.place:.3f} s", "", True),
        ("build index", f"{found.build:.3f} s", "", True),
        ("encode index", f"{found.encode:.3f} s", "", True),
        ("decode and check index", f"{found.decode:.3f} s", "", True),
        ("index", f"{found.index_nbytes:,} bytes", f"bar {INDEX_BAR:,}", found.index_nbytes <= INDEX_BAR),
    ]
    for name, figure, bar, met in rows:
        print(f"  {name:<24}{figure:>18}  {bar:<16}{'' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
