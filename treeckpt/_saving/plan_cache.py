"""The save plan that follows from all ranks' inventories; it is kept for the next save of the same tree."""

from __future__ import annotations

import msgspec

from .._core.planning.rank_trees import (
    GlobalTree,
    Inventory,
    LeafSpec,
    RankClass,
    array_leaves,
    merge_rank_trees,
    overlapping_pieces,
)
from .._core.planning.save_plan import ChunkOffsets, SavePlan, SingleChunkOffset, assign_offsets, plan_save
from .._core.sharding.int_runs import encode_runs
from .._core.sharding.placements import BoxLayout
from .._core.sharding.region import Region
from .._core.sharding.write_assignment import ArrayLeaf, Assignment, assign_writers
from .._io.comm.comm import Comm

Placement = tuple[dict[int, ChunkOffsets | SingleChunkOffset], list[int]]
"""(the chunks of each array by its leaf's number, bytes that each rank writes)"""


class GlobalPlan(msgspec.Struct):
    """What every rank writes: computed from the global tree alone, equal on all ranks but for `own`."""

    key: str
    """Digest of all ranks' inventories."""
    max_shard_bytes: int
    global_tree: GlobalTree
    arrays: list[tuple[int, ArrayLeaf]]
    """The arrays to be written, each with its leaf's number."""
    shares: list[Assignment]
    """For each array, which rank writes which part."""
    own: SavePlan
    """The files of this rank."""
    _placement: Placement | None = None

    def placement(self) -> Placement:
        """Returns where each chunk of all ranks starts, and how many bytes each rank writes; computed once."""
        if self._placement is None:
            placed, totals = assign_offsets([leaf for _, leaf in self.arrays], self.shares, self.global_tree.world)
            numbers = (number for number, _ in self.arrays)
            self._placement = dict(zip(numbers, placed, strict=True)), totals.tolist()
        return self._placement

    def leaf(self, number: int) -> LeafSpec:
        """Returns the leaf of an array, by the array's number."""
        return self.global_tree.leaves[self.arrays[number][0]]


class _ContestedBoxes(msgspec.Struct, frozen=True):
    """What several listed pieces of an array hold, for inventories with one key."""

    key: str
    boxes: list[tuple[str, Region, int]]


def cached_plan(comm: Comm) -> GlobalPlan | None:
    """Returns the plan of the previous save on this comm."""
    return comm.state.get(GlobalPlan)


def get_plan(comm: Comm, key: str, merged: GlobalTree | None, inventory: Inventory, max_shard_bytes: int) -> GlobalPlan:
    """Returns the plan of inventories with this key, from the cache or computed.

    Args:
        merged: the global tree as the coordinator sent it; None if this rank has kept it, or all inventories are equal.
        inventory: this rank's.

    Raises:
        LayoutError: pieces that do not make up their array.
    """
    cached = cached_plan(comm)
    if cached is not None and cached.key == key:
        if cached.max_shard_bytes == max_shard_bytes:
            return cached
        merged = merged or cached.global_tree
    plan = compute_plan(key, merged or _replicated_tree(comm, inventory), comm.rank, max_shard_bytes)
    comm.state.put(plan)
    return plan


def contested_boxes(
    comm: Comm, key: str, merged: GlobalTree | None, inventory: Inventory
) -> list[tuple[str, Region, int]]:
    """Returns what several listed pieces of an array hold, as (path, box, bytes); arguments as for `get_plan`."""
    cached_boxes = comm.state.get(_ContestedBoxes)
    if cached_boxes is not None and cached_boxes.key == key:
        return cached_boxes.boxes
    cached = cached_plan(comm)
    if merged is None and cached is not None and cached.key == key:
        merged = cached.global_tree
    if merged is None and any(isinstance(leaf.layout, BoxLayout) for leaf in inventory.leaves):
        merged = _replicated_tree(comm, inventory)
    boxes = overlapping_pieces(merged) if merged is not None else []
    comm.state.put(_ContestedBoxes(key, boxes))
    return boxes


def _replicated_tree(comm: Comm, inventory: Inventory) -> GlobalTree:
    """Returns the global tree of ranks that all have this inventory."""
    return merge_rank_trees([RankClass(encode_runs(range(comm.size)), inventory)], comm.size)


def compute_plan(key: str, global_tree: GlobalTree, rank: int, max_shard_bytes: int) -> GlobalPlan:
    """Computes the plan of a global tree, the same in every process; raises LayoutError as `get_plan`."""
    arrays = array_leaves(global_tree)
    leaves = [leaf for _, leaf in arrays]
    shares = assign_writers(leaves)
    own = plan_save(leaves, shares, rank, max_shard_bytes=max_shard_bytes)
    return GlobalPlan(key, max_shard_bytes, global_tree, arrays, shares, own)
