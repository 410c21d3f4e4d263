"""The reshard preview: what each rank of another mesh, or of the save, would read, by the loader's own planner.

The form offers the layout of the save, and common others. The dimensions of a mesh are in the
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

from treeckpt._core.format.records import AliasRecord, ArrayRecord, Index, Leaf
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout
from treeckpt._core.text import placement_text
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._loading.reshard_plan import (
    SAVED,
    LoadTarget,
    RankReads,
    ReshardPlan,
    parse_mesh,
    parse_target,
    plan_reshard,
    sampled_leaves,
    wanted_arrays,
)
from treeckpt.errors import TreeckptError

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, OwnTree, filled, next_start
from ..pages.load_code import SnippetPage, WantedLeaf, regions_code

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
MAX_CELLS = 20_000
"""Pairs of a rank and a file that are drawn."""


class Preset(msgspec.Struct, frozen=True):
    """A target mesh that the form offers."""

    text: str
    mesh: str
    names: str
    place: str


AS_SAVED = Preset("as saved", SAVED, "", "*")
"""The layout of the save: of each array the regions that each rank had."""


def presets_of(index: Index) -> list[Preset]:
    """Returns the layout of the save, and common meshes."""
    leaves, world = sampled_leaves(index), max(index.world, 2)
    presets = [
        AS_SAVED,
        Preset("one rank", "1", "", "*: Replicate"),
        Preset(f"FSDP over {2 * world}", f"{2 * world}", "dp", "*: Shard(0)"),
        Preset(f"HSDP, 2 replicas of {world} shards", f"2x{world}", "dp_replicate,dp_shard", "*: Replicate, Shard(0)"),
    ]
    if rules := tensor_parallel_rules(leaves):
        presets.append(Preset("tensor parallel over 2", "2", "tp", rules))
    return presets


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


def _rule(layout: MeshLayout) -> str:
    return "*: " + ", ".join(map(placement_text, layout.placements))


class ReaderRow(msgspec.Struct, frozen=True):
    """One rank of the target mesh."""

    rank: int
    place: str
    """Its coordinates in the mesh, as text; empty for the layout of the save."""
    nbytes: int
    """Bytes that it holds after the load."""
    read: int
    """Bytes that it reads."""
    amplification: float
    """Bytes read for each byte held."""
    share: float
    """Bytes read, as a share of those of the rank that reads the most."""
    reads: int
    """Requests for these bytes."""
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
    listed: int = 0
    tables: int = 0
    files: int
    start: int = 0
    next: int | None = None
    rows: list[ReaderRow] = []
    cells: list[list[int]] = []
    """[position of a planned rank, number of a file, bytes], for as many ranks as can be drawn."""
    ranks: list[int] = []
    """The rank at each position of the cells."""


def target_of(index: Index, mesh: str, names: str, place: str) -> tuple[str, LoadTarget]:
    """Returns the rules of a request, completed, and the target that they describe; see `parse_target`."""
    if mesh.strip() != SAVED and not place.strip():
        place = default_rule(index, parse_mesh(mesh, names))
    place = place if place.strip() else AS_SAVED.place
    return place, parse_target(mesh, names, place)


def reshard_page(tree: OwnTree, mesh: str = SAVED, names: str = "", place: str = "", start: int = 0) -> ReshardPage:
    """What each rank of a layout would read from which file; by default of that of the save.

    The numbers are those of a load into new arrays in host memory, from this store.
    """
    index, mesh = tree.index, mesh if mesh.strip() else SAVED
    presets, files = presets_of(index), len(index.file_list)
    try:
        place, target = target_of(index, mesh, names, place)
        plan = tree.read(lambda store, index: plan_reshard(Checkpoint(store, index), target))
    except TreeckptError as error:
        return ReshardPage(
            checkpoint=tree.row, mesh=mesh, names=names, place=place, problem=f"{error}", presets=presets, files=files
        )
    cells, ranks = _cells(plan)
    return filled(
        ReshardPage,
        plan,
        checkpoint=tree.row,
        mesh=mesh,
        names=names,
        place=place,
        presets=presets,
        planned=len(plan.ranks),
        files=files,
        start=start,
        next=next_start(start, len(plan.ranks)),
        rows=[_row(target.mesh, rank, plan) for rank in plan.ranks[start : start + PAGE_ROWS]],
        cells=cells,
        ranks=ranks,
    )


def reshard_snippet(tree: OwnTree, mesh: str = SAVED, names: str = "", place: str = "", rank: int = 0) -> SnippetPage:
    """The Python code that loads in one process what a rank of a layout holds: regions of arrays, and values.

    Raises:
        NotFound: that rank loads nothing, or too many leaves for one code.
        LayoutError: there is no such layout.
    """
    _, target = target_of(tree.index, mesh, names, place)
    return SnippetPage("", regions_code(tree.checkpoint.info, _leaves_of(tree.index, target, rank), rank=rank))


def _leaves_of(index: Index, target: LoadTarget, rank: int) -> list[WantedLeaf]:
    """Returns what a rank holds, in the tree's order; each name of an array that has several, too."""
    held = {one.leaf.number: one for one in wanted_arrays(index, target).arrays if not one.offsets}
    found: list[WantedLeaf] = []
    for leaf in index.entries:
        record = leaf.record
        one = held.get(record.of if isinstance(record, AliasRecord) else leaf.number)
        if one is not None and one.leaf.spec is not None:
            view = isinstance(record, AliasRecord) and record.view is not None
            regions = one.regions(rank)
            if regions:
                found.append(WantedLeaf(leaf.path, leaf.spec, None if view else regions))
        elif leaf.spec is None and (leaf.ranks is None or rank in decode_runs(leaf.ranks)) and target.names(leaf.path):
            found.append(WantedLeaf(leaf.path, None))
    return found


def _row(mesh: Mesh | None, rank: RankReads, plan: ReshardPlan) -> ReaderRow:
    most = max(other.read for other in plan.ranks)
    return ReaderRow(
        rank.rank,
        "" if mesh is None else _coordinates(mesh, rank.rank),
        nbytes=rank.nbytes,
        read=rank.read,
        amplification=rank.amplification,
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
