"""Gathers the whole tree on all ranks, or on some: what `load` would return after a save by these ranks.

The ranks exchange digests of their trees. Only where these differ do they send the trees' specs, which are merged as
for a save. From the global tree every rank computes the same assignment: each element of each array is sent by exactly
one of the ranks that hold it. Regions travel packed: broadcast where all ranks receive them, else sent to the
receivers. What every receiver holds whole already is only copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from .._arrays.base import ArrayTarget
from .._arrays.describe import (
    DescribedTree,
    box_digests,
    content_digests,
    describe_tree,
    json_digest,
    piece_digests,
)
from .._arrays.registry import build_tensor, decode, library_of, new_array, resolve
from .._arrays.stateful import state_tree
from .._core.planning.rank_trees import GlobalTree, LeafSpec, RankClass, merge_rank_trees
from .._core.planning.save_plan import ArrayLeaf, array_leaves, assign_writers, overlapping_pieces, writes_of
from .._core.sharding.int_runs import decode_runs, encode_runs
from .._core.sharding.placements import Layout, MeshLayout, Replicate, mesh_ranks
from .._core.sharding.region import strides_in
from .._core.tree.flatten import replace_leaves, unflatten
from .._core.tree.value_codec import Value
from .._io.comm.collective import gather_results
from .._saving.agree import (
    BoxDigests,
    RankTree,
    compare_boxes,
    compare_contents,
    conflicting_ranks,
    digest_groups,
    merge_inventories,
)
from ..errors import RankError, TreeError
from ._moving import fill
from ._transport import PackedRegion, Transport, send_regions

HINT = "Nothing was sent"


class _RankDigests(msgspec.Struct, array_like=True):
    """Digests of what a rank holds."""

    inventory: bytes
    contents: bytes
    pieces: dict[bytes, bytes]


class _Gather:
    """One gather on one rank."""

    def __init__(
        self, transport: Transport, tree: Any, ranks: Sequence[int] | None, device: str | None, namespace: str
    ) -> None:
        self.transport, self.tree, self.device, self.namespace = transport, tree, device, namespace
        if isinstance(ranks, int):
            raise TreeError("ranks", expected="a list of ranks", found=f"{ranks}", hint=f"Pass ranks=[{ranks}]")
        self.receivers = sorted(set(range(transport.size) if ranks is None else ranks))
        if not all(0 <= rank < transport.size for rank in self.receivers):
            raise RankError(
                "ranks", ranks={}, expected=f"ranks of 0 to {transport.size - 1}", found=f"{list(self.receivers)}",
                hint="Ranks are counted within the group",
            )  # fmt: skip
        self.receives = transport.rank in self.receivers
        self.alike = False
        self.described: DescribedTree
        self.contents: dict[str, bytes] = {}
        self.piece_groups: list[dict[str, bytes]] = []
        self.values: dict[str, Value] = {}
        self.targets: dict[str, ArrayTarget] = {}

    def agree(self) -> GlobalTree:
        """Merges the trees of all ranks, and compares what replicas hold.

        Raises:
            MismatchError: ranks contradict each other.
        """
        transport = self.transport
        digests = gather_results(transport, "gather", self._describe, _RankDigests, hint=HINT)
        self.values = self.described.values
        clash = bool(conflicting_ranks({rank: one.pieces for rank, one in enumerate(digests)}))
        self.alike = len({(one.inventory, one.contents) for one in digests}) == 1 and not clash
        if self.alike:
            everyone = encode_runs(range(transport.size))
            merged = merge_rank_trees([RankClass(everyone, self.described.inventory)], transport.size)
        else:
            for group in self.piece_groups if clash else ():
                self.contents.update(group)
            own = RankTree(self.described.inventory, self.contents, self.described.values)
            trees = gather_results(transport, "gather", lambda: own, RankTree, hint=HINT)
            self.values = {path: value for tree in reversed(trees) for path, value in tree.values.items()}
            by_rank, inventories = dict(enumerate(trees)), {rank: one.inventory for rank, one in enumerate(digests)}
            merged = merge_inventories(inventories, by_rank, transport.size)  # shapes before contents
            compare_contents({rank: tree.contents for rank, tree in by_rank.items()})
        boxes = [(path, box) for path, box, _ in overlapping_pieces(merged)]
        if boxes:
            own_boxes = partial(box_digests, self.described, boxes, "sample")
            found = gather_results(transport, "gather", own_boxes, BoxDigests, hint=HINT)
            compare_boxes(boxes, dict(enumerate(found)))
        return merged

    def _describe(self) -> _RankDigests:
        transport = self.transport
        self.tree = state_tree(self.tree, rank=transport.rank, namespace=self.namespace)
        self.described = describe_tree(
            self.tree, rank=transport.rank, members=transport.members, namespace=self.namespace
        )
        self.contents = content_digests(self.described, "sample")
        self.piece_groups = piece_digests(self.described, "sample", world=transport.size)
        contents = json_digest(sorted(self.contents.items()))
        return _RankDigests(json_digest(self.described.inventory), contents, digest_groups(self.piece_groups))

    def move(self, merged: GlobalTree, limit: int) -> None:
        """Creates the arrays on the receivers and copies every element there."""
        arrays = [(merged.leaves[number], leaf) for number, leaf in array_leaves(merged)]
        shares = assign_writers([leaf for _, leaf in arrays])
        moving: list[tuple[ArrayLeaf, Any]] = []
        for (spec, leaf), share in zip(arrays, shares, strict=True):
            own = spec.per_rank is not None
            if own and self.transport.rank not in decode_runs(spec.per_rank or ()):
                continue
            if self.receives or own:
                assert spec.spec is not None, "only arrays have memory"
                new = msgspec.structs.replace(spec.spec, device=None)
                self.targets[spec.path] = new_array(new, spec.path, self.device)
            if own or self._is_everywhere(leaf.layout):
                if spec.path in self.targets:
                    fill(self.targets[spec.path].pieces, self.described.sources[spec.path].pieces)
            else:
                moving.append((leaf, share))
        for sender in range(self.transport.size):
            entries = [
                PackedRegion(leaf.path, region, leaf.itemsize)
                for leaf, share in moving
                for region in writes_of(leaf, share, sender)
            ]
            send_regions(
                entries,
                limit,
                self.transport,
                sender=sender,
                receivers=self.receivers,
                sources=self.described.sources,
                targets=self.targets,
            )

    def _is_everywhere(self, layout: Layout) -> bool:
        """Returns whether each receiver holds all of an array already."""
        if not isinstance(layout, MeshLayout) or not all(isinstance(p, Replicate) for p in layout.placements):
            return False
        return set(self.receivers) <= set(mesh_ranks(layout.mesh).tolist())

    def result(self, merged: GlobalTree) -> Any:
        """Returns the tree: with arrays where this rank receives, with their specs elsewhere."""
        leaves = (
            new_leaf(leaf, self.values if leaf.per_rank is None else self.described.own_values, self.targets)
            for leaf in merged.leaves
            if leaf.per_rank is None or self.transport.rank in decode_runs(leaf.per_rank)
        )
        if self.alike:
            return replace_leaves(self.tree, leaves, namespace=self.namespace)
        return unflatten(
            merged.structure,
            leaves,
            resolve=resolve,
            build=build_tensor,
            rank=self.transport.rank,
            namespace=self.namespace,
        )


def new_leaf(leaf: LeafSpec, values: Mapping[str, Value], targets: Mapping[str, ArrayTarget]) -> Any:
    """Returns a leaf of the tree that a rank received: a value, an array, or the spec of one that has no target here.

    A leaf that shares memory is the array that has it, or a view of that.
    """
    if leaf.spec is None:
        return decode(values[leaf.path], leaf.path, allow_pickle=False)
    if leaf.alias_of is None and leaf.path in targets:
        return targets[leaf.path].leaf
    if leaf.alias_of is None or leaf.alias_of not in targets:
        return msgspec.structs.replace(leaf.spec, device=None, regions=None)
    base, found, array = targets[leaf.alias_of].leaf, targets[leaf.alias_of].spec, leaf.spec
    if leaf.view is not None:
        return library_of(array).view(base, array, leaf.view.offset, leaf.view.strides)
    if (found.kind, found.requires_grad, found.shape) == (array.kind, array.requires_grad, array.shape):
        return base
    return library_of(array).view(base, array, 0, strides_in(array.shape, array.order, 1))


def gather(
    tree: Any, *, transport: Transport, ranks: Sequence[int] | None, device: str | None, limit: int, namespace: str
) -> Any:
    """Does `treeckpt.trees.gather` over a transport."""
    job = _Gather(transport, tree, ranks, device, namespace)
    merged = job.agree()
    job.move(merged, limit)
    return job.result(merged)
