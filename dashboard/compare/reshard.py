"""The reshard preview: what each rank of another mesh would read, computed by the loader's own planner.

The form offers the mesh that the checkpoint was saved from, and common others. The dimensions of a mesh are in the
order that PyTorch has them: HSDP replicates over the first and shards over the last. Tensor parallelism is rules by the
names of parameters, for weights stored as (out, in): of a layer that is cut by columns dimension 0 is sharded, of one
that is cut by rows dimension 1; all else is replicated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from treeckpt._core.format.records import ArrayRecord, Index, Leaf
from treeckpt._core.sharding.placements import Mesh, MeshLayout
from treeckpt._core.text import placement_text
from treeckpt._inspect.outline import Outline
from treeckpt.errors import TreeckptError

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, next_start
from .reshard_plan import RankReads, ReshardPlan, parse_mesh, parse_rules, plan_reshard, sampled_leaves

BY_ROWS = (
    "o_proj", "out_proj", "down_proj", "fc2", "c_proj", "w2", "dense_4h_to_h", "attention.dense", "attention.proj",
    "mlp.proj",
)  # fmt: skip
"""Parts of names of weights whose inputs are divided over ranks."""
BY_COLUMNS = (
    "q_proj", "k_proj", "v_proj", "qkv", "query_key_value", "c_attn", "gate_proj", "up_proj", "gate_up_proj", "fc1",
    "c_fc", "mlp.fc", "w1", "w3", "dense_h_to_4h", "wte", "embed_tokens", "lm_head",
)  # fmt: skip
"""Parts of names of weights whose outputs are divided over ranks."""


class Preset(msgspec.Struct, frozen=True):
    """A target mesh that the form offers."""

    text: str
    mesh: str
    names: str
    place: str


def presets_of(index: Index) -> list[Preset]:
    """Returns the mesh of the save, and common other meshes."""
    leaves, world = sampled_leaves(index), max(index.world, 2)
    saved = saved_layout(index, leaves)
    if saved is not None:
        own = Preset("the mesh of the save", _sizes(saved.mesh), ",".join(saved.mesh.names), _rule(saved))
    else:
        own = Preset("the ranks of the save", f"{index.world}", "", "*: Shard(0)")
    found = [
        own,
        Preset("one rank", "1", "", "*: Replicate"),
        Preset(f"FSDP over {2 * world}", f"{2 * world}", "dp", "*: Shard(0)"),
        Preset(f"HSDP, 2 replicas of {world} shards", f"2x{world}", "dp_replicate,dp_shard", "*: Replicate, Shard(0)"),
    ]
    if rules := tensor_parallel_rules(leaves):
        found.append(Preset("tensor parallel over 2", "2", "tp", rules))
    return found


def saved_layout(index: Index, leaves: Sequence[Leaf]) -> MeshLayout | None:
    """Returns the layout of several ranks with the most bytes among these leaves, None if there is none."""
    nbytes = Counter[MeshLayout]()
    for leaf in leaves:
        if isinstance(leaf.record, ArrayRecord) and leaf.record.layout >= 0:
            layout = index.layouts[leaf.record.layout]
            if isinstance(layout, MeshLayout) and math.prod(layout.mesh.shape) > 1:
                nbytes[layout] += leaf.nbytes
    return max(nbytes, key=lambda layout: nbytes[layout], default=None)


def tensor_parallel_rules(leaves: Sequence[Leaf]) -> str:
    """Returns rules for these leaves on a mesh of one dimension; empty if no name of them is known."""
    rules = [
        f"*{name}*: Shard({dim})"
        for names, dim in ((BY_ROWS, 1), (BY_COLUMNS, 0))
        for name in names
        if any(name in leaf.path for leaf in leaves)
    ]
    return "\n".join([*rules, "*: Replicate"]) if rules else ""


def default_rule(index: Index, mesh: Mesh) -> str:
    """Returns the rule for a mesh that came without one: as it was saved, else sharded over the last dimension."""
    saved = saved_layout(index, sampled_leaves(index))
    if saved is not None and len(saved.mesh.shape) == len(mesh.shape) and mesh.names in ((), saved.mesh.names):
        return _rule(saved)
    return "*: " + ", ".join([*["Replicate"] * (len(mesh.shape) - 1), "Shard(0)"])


def _sizes(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))


def _rule(layout: MeshLayout) -> str:
    return "*: " + ", ".join(map(placement_text, layout.placements))


MAX_CELLS = 20_000
"""Pairs of a rank and a file that are drawn."""


class ReaderRow(msgspec.Struct, frozen=True):
    """One rank of the target mesh."""

    rank: int
    place: str
    """Its coordinates in the mesh, as text."""
    nbytes: int
    """Bytes that it holds after the load."""
    read: int
    """Bytes that it reads."""
    amplification: float
    """Bytes read for each byte held."""
    share: float
    """Bytes read, as a share of those of the rank that reads the most."""
    reads: int
    files: list[list[int]]
    """[number of a file, bytes read of it]."""


class ReshardPage(msgspec.Struct, frozen=True, kw_only=True):
    """The preview of a load into another mesh; without a plan, the numbers are those of an empty one."""

    checkpoint: CheckpointRow
    mesh: str
    names: str
    place: str
    problem: str | None = None
    """Why there is no preview."""
    presets: list[Preset]
    world: int = 0
    planned: int = 0
    """Ranks that were planned: all of them, or as many as one request may take."""
    arrays: int = 0
    nbytes: int = 0
    held: int = 0
    read: int = 0
    amplification: float = 1.0
    imbalance: float = 1.0
    whole: int = 0
    unmatched: int = 0
    left_out: int = 0
    files: int
    start: int = 0
    next: int | None = None
    rows: list[ReaderRow] = []
    cells: list[list[int]] = []
    """[position of a planned rank, number of a file, bytes], for as many ranks as can be drawn."""
    ranks: list[int] = []
    """The rank at each position of the cells."""


def reshard_page(
    checkpoint: CheckpointRow, outline: Outline, mesh: str, names: str, place: str, start: int
) -> ReshardPage:
    """Returns the preview of a target mesh; by default of the mesh and the placements of the save."""
    index = outline.index
    presets, files = presets_of(index), len(index.file_list)
    if not mesh.strip():
        mesh, names, place = presets[0].mesh, presets[0].names, place if place.strip() else presets[0].place
    try:
        target = parse_mesh(mesh, names)
        place = place if place.strip() else default_rule(index, target)
        plan = plan_reshard(index, target, parse_rules(place, target))
    except TreeckptError as error:
        return ReshardPage(
            checkpoint=checkpoint,
            mesh=mesh,
            names=names,
            place=place,
            problem=str(error),
            presets=presets,
            files=files,
        )
    cells, ranks = _cells(plan)
    return ReshardPage(
        checkpoint=checkpoint,
        mesh=mesh,
        names=names,
        place=place,
        presets=presets,
        world=plan.world,
        planned=len(plan.ranks),
        arrays=plan.arrays,
        nbytes=plan.nbytes,
        held=plan.held,
        read=plan.read,
        amplification=plan.amplification,
        imbalance=plan.imbalance,
        whole=plan.whole,
        unmatched=plan.unmatched,
        left_out=plan.left_out,
        files=files,
        start=start,
        next=next_start(start, len(plan.ranks)),
        rows=[_row(target, rank, plan) for rank in plan.ranks[start : start + PAGE_ROWS]],
        cells=cells,
        ranks=ranks,
    )


def _row(mesh: Mesh, rank: RankReads, plan: ReshardPlan) -> ReaderRow:
    most = max(other.read for other in plan.ranks)
    return ReaderRow(
        rank.rank,
        _coordinates(mesh, rank.rank),
        nbytes=rank.nbytes,
        read=rank.read,
        amplification=rank.read / rank.nbytes if rank.nbytes else 1.0,
        share=rank.read / most if most else 0.0,
        reads=rank.reads,
        files=[list(pair) for pair in rank.files],
    )


def _coordinates(mesh: Mesh, rank: int) -> str:
    names = mesh.names or map(str, range(len(mesh.shape)))
    position = np.unravel_index(rank, mesh.shape)
    return ", ".join(f"{name} {at}" for name, at in zip(names, position, strict=True))


def _cells(plan: ReshardPlan) -> tuple[list[list[int]], list[int]]:
    cells: list[list[int]] = []
    ranks: list[int] = []
    for position, rank in enumerate(plan.ranks):
        if len(cells) + len(rank.files) > MAX_CELLS:
            break
        ranks.append(rank.rank)
        cells += [[position, number, nbytes] for number, nbytes in rank.files]
    return cells, ranks
