"""The whole tree on all ranks, or on some: what `load` would give after a save by these ranks, without the save.

The ranks tell each other digests of what they bring; only where these differ do they send inventories, and the core
joins them as it does for a save. From the global tree every rank computes the same shares, each element of each array
given by exactly one of its holders, and the shares travel packed: broadcast where all ranks want them, else sent to
those that do. What every receiver holds whole already stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from ..arrays.base import Target
from ..arrays.describe import SMALL, Brought, box_digests, content_digests, describe_tree, piece_digests
from ..arrays.registry import decode, library_of, new_array, resolve
from ..arrays.stateful import expanded
from ..core.planning.rank_trees import (
    GlobalTree,
    LeafSpec,
    RankClass,
    array_leaves,
    digest_of,
    merge_rank_trees,
    overlapping_pieces,
)
from ..core.sharding.int_runs import decode_runs, encode_runs
from ..core.sharding.placements import Layout, MeshLayout, Replicate, mesh_ranks
from ..core.sharding.region import c_strides
from ..core.sharding.write_assignment import ArrayLeaf, assign_writers, writes_of
from ..core.tree.flatten import replace_leaves, unflatten
from ..core.tree.spec import ArraySpec
from ..core.tree.value_codec import Value
from ..errors import RankError, TreeError
from ..io.comm.failures import Fault, raise_faults, to_fault
from ..saving.messages import (
    BoxDigests,
    RankTree,
    compare_boxes,
    compare_contents,
    conflicting_ranks,
    digest_groups,
    json_digest,
    merge_inventories,
)
from .moving import fill
from .packing import Bucket, Entry, bytes_of, pack, pack_entries, unpack
from .wire import Wire

__all__ = ["gather", "tied", "together"]


class _Word(msgspec.Struct, array_like=True):
    """A rank's message, or why it has none."""

    fault: Fault | None
    data: bytes


def together(wire: Wire, what: str, act: Callable[[], bytes]) -> list[bytes]:
    """Every rank's message; where one of them fails to make its own, all raise."""
    cause: Exception | None = None
    try:
        word = _Word(None, act())
    except Exception as error:
        cause, word = error, _Word(to_fault(error, wire.rank), b"")
    heard = [msgspec.msgpack.decode(data, type=_Word) for data in wire.tell(msgspec.msgpack.encode(word))]
    faults = [other.fault for other in heard if other.fault is not None]
    raise_faults(faults, what, cast(Any, wire), cause=cause, hint="Nothing was sent")
    return [other.data for other in heard]


class _Brings(msgspec.Struct, array_like=True):
    """What a rank brings, as digests."""

    inventory: bytes
    contents: bytes
    pieces: dict[bytes, bytes]


class _Gather:
    """One gather on one rank."""

    def __init__(self, wire: Wire, tree: Any, ranks: Sequence[int] | None, device: str | None, namespace: str) -> None:
        self.wire, self.tree, self.device, self.namespace = wire, tree, device, namespace
        if isinstance(ranks, int):
            raise TreeError("ranks", expected="a list of ranks", found=f"{ranks}", hint=f"Pass ranks=[{ranks}]")
        self.receivers = sorted(set(range(wire.size) if ranks is None else ranks))
        if not all(0 <= rank < wire.size for rank in self.receivers):
            raise RankError(
                "ranks", ranks={}, expected=f"ranks of 0 to {wire.size - 1}", found=f"{list(self.receivers)}",
                hint="Ranks are counted within the group",
            )  # fmt: skip
        self.receives = wire.rank in self.receivers
        self.brought: Brought
        self.targets: dict[str, Target] = {}

    def agree(self) -> GlobalTree:
        """What all ranks bring together."""
        contents: dict[str, bytes] = {}
        groups: list[dict[str, bytes]] = []

        def brings() -> bytes:
            wire = self.wire
            self.tree = expanded(self.tree, rank=wire.rank, namespace=self.namespace)
            self.brought = describe_tree(self.tree, rank=wire.rank, members=wire.members, namespace=self.namespace)
            contents.update(content_digests(self.brought, every=False))
            groups.extend(piece_digests(self.brought, world=wire.size, every=False))
            told = _Brings(
                digest_of(self.brought.inventory), json_digest(sorted(contents.items())), digest_groups(groups)
            )
            return msgspec.msgpack.encode(told)

        heard = [msgspec.msgpack.decode(data, type=_Brings) for data in together(self.wire, "gather", brings)]
        self.values: dict[str, Value] = self.brought.values
        clash = bool(conflicting_ranks({rank: one.pieces for rank, one in enumerate(heard)}))
        self.alike = len({(one.inventory, one.contents) for one in heard}) == 1 and not clash
        if self.alike:
            everyone = encode_runs(range(self.wire.size))
            plenum = merge_rank_trees([RankClass(everyone, self.brought.inventory)], self.wire.size)
        else:
            for group in groups if clash else ():
                contents.update(group)
            told = RankTree(self.brought.inventory, contents, self.brought.values)
            words = together(self.wire, "gather", lambda: msgspec.msgpack.encode(told))
            plenum = self._join([one.inventory for one in heard], words)
        boxes = [(path, box) for path, box, nbytes in overlapping_pieces(plenum) if nbytes <= SMALL]
        if boxes:
            messages = together(
                self.wire, "gather", lambda: msgspec.msgpack.encode(BoxDigests(None, box_digests(self.brought, boxes)))
            )
            digests = [msgspec.msgpack.decode(data, type=BoxDigests) for data in messages]
            compare_boxes(boxes, dict(enumerate(digests)))
        return plenum

    def _join(self, digests: Sequence[bytes], heard: Sequence[bytes]) -> GlobalTree:
        told = [msgspec.msgpack.decode(data, type=RankTree) for data in heard]
        self.values = {path: value for tale in reversed(told) for path, value in tale.values.items()}
        trees = dict(enumerate(told))
        plenum = merge_inventories(dict(enumerate(digests)), trees, self.wire.size)  # shapes before contents
        compare_contents({rank: tree.contents for rank, tree in trees.items()})
        return plenum

    def move(self, plenum: GlobalTree, limit: int) -> None:
        """Makes the arrays on the receivers and brings every element there."""
        arrays = [(plenum.leaves[number], leaf) for number, leaf in array_leaves(plenum)]
        shares = assign_writers([leaf for _, leaf in arrays])
        moving: list[tuple[ArrayLeaf, Any]] = []
        for (spec, leaf), share in zip(arrays, shares, strict=True):
            own = spec.per_rank is not None
            if own and self.wire.rank not in decode_runs(spec.per_rank or ()):
                continue
            if self.receives or own:
                self._make(spec)
            if own or self._is_everywhere(leaf.layout):
                if spec.path in self.targets:
                    fill(self.targets[spec.path].pieces, self.brought.sources[spec.path].pieces)
            else:
                moving.append((leaf, share))
        leaves = [leaf for leaf, _ in moving]
        for giver in range(self.wire.size):
            entries = [
                Entry(number, region, leaf.itemsize)
                for number, (leaf, share) in enumerate(moving)
                for region in writes_of(leaf, share, giver)
            ]
            for bucket in pack_entries(entries, limit):
                self._pass(giver, bucket, leaves)

    def _make(self, leaf: LeafSpec) -> None:
        assert leaf.spec is not None, "arrays only have memory"
        spec = msgspec.structs.replace(leaf.spec, device=None)
        self.targets[leaf.path] = new_array(spec, leaf.path, self.device)

    def _is_everywhere(self, layout: Layout) -> bool:
        """Whether each receiver holds all of an array already."""
        if not isinstance(layout, MeshLayout) or not all(isinstance(p, Replicate) for p in layout.placements):
            return False
        return set(self.receivers) <= set(mesh_ranks(layout.mesh).tolist())

    def _pass(self, giver: int, bucket: Bucket, leaves: Sequence[ArrayLeaf]) -> None:
        """One message from the rank that gives it to those that receive."""
        wire, mine = self.wire, giver == self.wire.rank
        others = [rank for rank in self.receivers if rank != giver]
        if not (mine or self.receives) and len(self.receivers) < wire.size:
            return
        data = pack(bucket, lambda n: self.brought.sources[leaves[n].path].pieces) if mine else bytes_of(bucket)
        if len(self.receivers) == wire.size:
            wire.broadcast(data, giver)
        elif mine:
            wire.exchange([(rank, data) for rank in others], [])
        else:
            wire.exchange([], [(giver, data)])
        if self.receives:
            unpack(data, bucket, lambda entry: self.targets[leaves[entry.number].path].pieces)

    def result(self, plenum: GlobalTree) -> Any:
        """The tree, of arrays where this rank receives and of their specs elsewhere."""
        made: dict[str, Any] = {}
        for leaf in plenum.leaves:
            if leaf.per_rank is None or self.wire.rank in decode_runs(leaf.per_rank):
                made[leaf.path] = self._leaf(leaf, made)
        leaves = iter(made.values())
        if self.alike:
            return replace_leaves(self.tree, leaves, namespace=self.namespace)
        return unflatten(plenum.whole, leaves, resolve=resolve, rank=self.wire.rank, namespace=self.namespace)

    def _leaf(self, leaf: LeafSpec, made: dict[str, Any]) -> Any:
        if leaf.spec is None:
            values = self.values if leaf.per_rank is None else self.brought.own_values
            return decode(values[leaf.path], leaf.path, allow_pickle=False)
        if leaf.alias_of is None and leaf.path in self.targets:
            return self.targets[leaf.path].leaf
        if leaf.alias_of is not None and leaf.alias_of in self.targets:
            return tied(leaf, made[leaf.alias_of], self.targets[leaf.alias_of].spec)
        return msgspec.structs.replace(leaf.spec, device=None, regions=None)


def tied(leaf: LeafSpec, base: Any, spec: ArraySpec) -> Any:
    """A leaf that shares the memory of another one."""
    assert leaf.spec is not None, "arrays only are tied"
    same = (spec.kind, spec.requires_grad, spec.shape) == (leaf.spec.kind, leaf.spec.requires_grad, leaf.spec.shape)
    if leaf.view is None and same:
        return base
    offset, strides = (0, c_strides(leaf.spec.shape, 1)) if leaf.view is None else (leaf.view.offset, leaf.view.strides)
    return library_of(leaf.spec).view(base, leaf.spec, offset, strides)


def gather(
    tree: Any, *, wire: Wire, ranks: Sequence[int] | None, device: str | None, limit: int, namespace: str
) -> Any:
    """See `treeckpt.trees.gather`."""
    job = _Gather(wire, tree, ranks, device, namespace)
    plenum = job.agree()
    job.move(plenum, limit)
    return job.result(plenum)
