"""What is saved at scale: the arrays of public models with Adam's state, and how training jobs lay them out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Replicate, Shard, StridedShard
from treeckpt._core.sharding.region import flat_regions
from treeckpt._core.tree.spec import ArraySpec

__all__ = ["MODELS", "Array", "Grid", "Model", "arrays_of", "flat_pieces"]


class Model(msgspec.Struct, frozen=True):
    """A decoder by its published sizes."""

    name: str
    layers: int
    width: int
    feed_forward: int
    keys: int
    """Width of keys, and of values: heads that are shared are counted once."""
    vocabulary: int
    experts: int = 0
    """Of each layer; 0 is dense."""


MODELS = {
    model.name: model
    for model in (
        Model("llama 8B", 32, 4096, 14336, 1024, 128256),
        Model("llama 70B", 80, 8192, 28672, 1024, 128256),
        Model("llama 405B", 126, 16384, 53248, 1024, 128256),
        Model("mixtral 8x22B", 56, 6144, 16384, 1024, 32768, experts=8),
    )
}


class Grid(msgspec.Struct, frozen=True):
    """How many ranks share the data, cut tensors, follow each other in a pipeline, and share the experts."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    """Divides dp."""
    copies: int = 1
    """Replicas among the ranks that share the data, as HSDP has them; divides dp."""

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep, "copies": self.copies}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"


class Array(msgspec.Struct, frozen=True):
    """One array of the state, and the pipeline stage that has it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    cut: str
    """How tensor parallelism takes it: by columns, by rows, not at all, or by experts."""
    stage: int

    @property
    def spec(self) -> ArraySpec:
        return ArraySpec(self.shape, self.dtype)


def _layer(model: Model) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width, wide = model.width, model.feed_forward
    yield "attention_norm.weight", (width,), "whole"
    yield "attention.wq.weight", (width, width), "columns"
    yield "attention.wk.weight", (model.keys, width), "columns"
    yield "attention.wv.weight", (model.keys, width), "columns"
    yield "attention.wo.weight", (width, width), "rows"
    yield "ffn_norm.weight", (width,), "whole"
    if model.experts:
        yield "router.weight", (model.experts, width), "whole"
    several = (model.experts,) if model.experts else ()
    cut = "experts" if model.experts else ""
    yield "feed_forward.w1.weight", (*several, wide, width), cut or "columns"
    yield "feed_forward.w3.weight", (*several, wide, width), cut or "columns"
    yield "feed_forward.w2.weight", (*several, width, wide), cut or "rows"


def arrays_of(model: Model, stages: int) -> list[Array]:
    """Parameters, and three leaves of Adam for each, in the order of the tree."""
    per_stage = -(-model.layers // stages)
    found = [("tok_embeddings.weight", (model.vocabulary, model.width), "columns", 0)]
    for layer in range(model.layers):
        found += [(f"layers.{layer}.{name}", shape, cut, layer // per_stage) for name, shape, cut in _layer(model)]
    found.append(("norm.weight", (model.width,), "whole", stages - 1))
    found.append(("output.weight", (model.vocabulary, model.width), "columns", stages - 1))
    arrays = [Array(("model", name), shape, "bfloat16", cut, stage) for name, shape, cut, stage in found]
    for moment in ("exp_avg", "exp_avg_sq"):
        arrays += [Array(("optimizer", moment, name), shape, "float32", cut, at) for name, shape, cut, at in found]
    return arrays + [Array(("optimizer", "step", name), (), "float32", "whole", at) for name, _, _, at in found]


class Layouts:
    """The layouts of one stage; arrays that are cut alike share the very object, as those of a real tree do."""

    def __init__(self, grid: Grid, stage: int) -> None:
        size = grid.dp * grid.tp
        ranks = encode_runs(range(stage * size, (stage + 1) * size))
        mesh = Mesh((grid.copies, grid.dp // grid.copies, grid.tp), ranks, ("copies", "dp", "tp"))
        copies = Replicate()
        experts = Mesh((grid.dp // grid.ep, grid.ep, grid.tp), ranks, ("edp", "ep", "tp"))
        self._cuts = {
            "scalar": MeshLayout(mesh, (copies, Replicate(), Replicate())),
            "whole": MeshLayout(mesh, (copies, Shard(0), Replicate())),
            "columns": MeshLayout(mesh, (copies, StridedShard(0, grid.tp) if grid.tp > 1 else Shard(0), Shard(0))),
            "rows": MeshLayout(mesh, (copies, Shard(0), Shard(1))),
            "experts": MeshLayout(experts, (Shard(1), Shard(0), Shard(2))),
        }

    def of(self, array: Array) -> MeshLayout:
        return self._cuts[array.cut if array.shape else "scalar"]


def flat_pieces(arrays: list[Array], cuts: list[int]) -> Iterator[list[tuple[int, tuple]]]:
    """For each rank, its range of all arrays laid end to end, as (array number, regions): what ZeRO keeps.

    Args:
        cuts: where the ranges of ranks begin, and the end of the last; in elements, rising.
    """
    sizes = [1 if not array.shape else _size(array.shape) for array in arrays]
    number, first = 0, 0
    for low, high in itertools.pairwise(cuts):
        mine: list[tuple[int, tuple]] = []
        while number < len(arrays) and first < high:
            last = first + sizes[number]
            begin, stop = max(low, first), min(high, last)
            if begin < stop:
                mine.append((number, flat_regions(arrays[number].shape, begin - first, stop - first)))
            if last > high:
                break
            number, first = number + 1, last
        yield mine


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
