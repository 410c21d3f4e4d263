"""What follows from all ranks' inventories alone: who writes what. Kept for the next save of the same tree."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.planning.rank_trees import (
    GlobalTree,
    Inventory,
    LeafSpec,
    RankClass,
    array_leaves,
    merge_rank_trees,
    overlapping_pieces,
)
from ..core.planning.save_plan import SavePlan, plan_save
from ..core.sharding.int_runs import encode_runs
from ..core.sharding.placements import BoxLayout
from ..core.sharding.region import Region
from ..core.sharding.write_assignment import ArrayLeaf, assign_writers
from ..io.comm.comm import Comm

__all__ = ["Plans", "boxes_of", "kept_plans", "make_plans", "plans_of"]

_MEMORY, _BOXES = "plans", "boxes"


class Plans(msgspec.Struct, frozen=True):
    """The global plan, and this rank's part of it."""

    key: str
    """Of the inventories."""
    max_shard_bytes: int
    plenum: GlobalTree
    arrays: list[tuple[int, ArrayLeaf]]
    """The arrays to be written, each with its leaf's number."""
    shares: list[Any]
    own: SavePlan

    def leaf(self, number: int) -> LeafSpec:
        """The leaf of array number i."""
        return self.plenum.leaves[self.arrays[number][0]]


def kept_plans(comm: Comm) -> Plans | None:
    """What the comm has kept from the save before."""
    return comm.memory.get(_MEMORY)


def make_plans(comm: Comm, key: str, joined: GlobalTree | None, inventory: Inventory, *, max_shard_bytes: int) -> Plans:
    """The plans of inventories with this key, made anew or as they were kept.

    Args:
        joined: the global tree, as the coordinator told it; None if it is known: from before, or because all
            ranks bring the same.
        inventory: this rank's.

    Raises:
        LayoutError: pieces that do not make up their array.
    """
    kept = kept_plans(comm)
    if kept is not None and kept.key == key:
        if kept.max_shard_bytes == max_shard_bytes:
            return kept
        joined = joined or kept.plenum
    if joined is None:
        joined = merge_rank_trees([RankClass(encode_runs(range(comm.size)), inventory)], comm.size)
    plans = plans_of(key, joined, comm.rank, max_shard_bytes=max_shard_bytes)
    comm.memory[_MEMORY] = plans
    return plans


def boxes_of(comm: Comm, key: str, joined: GlobalTree | None, inventory: Inventory) -> list[tuple[str, Region, int]]:
    """What listed pieces of inventories with this key hold in common, as `overlapping_pieces` says; kept as plans are.

    Args:
        joined: the global tree, where it was just joined; None if it is kept, or all ranks bring the same.
        inventory: this rank's.
    """
    kept_key, found = comm.memory.get(_BOXES, ("", []))
    if kept_key == key:
        return found
    kept = kept_plans(comm)
    if joined is None and kept is not None and kept.key == key:
        joined = kept.plenum
    if joined is None and any(isinstance(leaf.layout, BoxLayout) for leaf in inventory.leaves):
        joined = merge_rank_trees([RankClass(encode_runs(range(comm.size)), inventory)], comm.size)
    found = overlapping_pieces(joined) if joined is not None else []
    comm.memory[_BOXES] = key, found
    return found


def plans_of(key: str, plenum: GlobalTree, rank: int, *, max_shard_bytes: int) -> Plans:
    """What follows from a global tree: the same on every rank, and in every process.

    Raises:
        LayoutError: pieces that do not make up their array.
    """
    arrays = array_leaves(plenum)
    leaves = [leaf for _, leaf in arrays]
    shares = assign_writers(leaves)
    own = plan_save(leaves, shares, rank, max_shard_bytes=max_shard_bytes)
    return Plans(key, max_shard_bytes, plenum, arrays, shares, own)
