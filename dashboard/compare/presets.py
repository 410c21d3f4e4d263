"""Targets that the form of the reshard preview offers: the mesh that the checkpoint was saved from, and common others.

The dimensions of a mesh are in the order that PyTorch has them: HSDP replicates over the first and shards over the
last. Tensor parallelism is rules by the names of parameters, for weights stored as (out, in): of a layer that is cut by
columns dimension 0 is sharded, of one that is cut by rows dimension 1; all else is replicated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from treeckpt._core.format.records import ArrayRecord, Index, Leaf
from treeckpt._core.sharding.placements import Mesh, MeshLayout
from treeckpt._core.text import placement_text

from .reshard_plan import sampled_leaves

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
