"""Sends a tree of one rank to the others: as it is (`broadcast`), or as each of them wants it (`distribute`).

First the ranks agree on what is sent: the source sends its tree without data, or the others send which regions they
want. Both sides then compute the same packing. What all ranks want alike is broadcast, the rest is sent to each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from .._arrays.base import ArraySource, ArrayTarget
from .._arrays.describe import DescribedTree, describe_tree
from .._arrays.registry import build_tensor, decode, like_of, new_array, resolve
from .._arrays.stateful import state_tree
from .._core.planning.rank_trees import Inventory
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region
from .._core.tree.flatten import flatten, replace_leaves, unflatten
from .._core.tree.spec import ArraySpec
from .._core.tree.value_codec import Value
from .._io.comm.collective import from_rank, gather_results
from ..errors import LayoutError, MismatchError, RankError, TreeError
from ._gathering import HINT, new_leaf
from ._transport import PackedRegion, Transport, send_regions


def _check_source(source: int, transport: Transport) -> None:
    if not 0 <= source < transport.size:
        raise RankError(
            "src", ranks={}, expected=f"a rank of 0 to {transport.size - 1}", found=f"{source}",
            hint="Ranks are counted within the group",
        )  # fmt: skip


def _describe_whole_tree(tree: Any, transport: Transport, namespace: str) -> DescribedTree:
    """Describes the source's tree.

    Raises:
        LayoutError: a distributed array.
        TreeError: state under `PerRank`.
    """
    tree = state_tree(tree, rank=transport.rank, namespace=namespace)
    described = describe_tree(tree, rank=transport.rank, members=transport.members, namespace=namespace)
    for leaf in described.inventory.leaves:
        if leaf.per_rank is not None:
            raise TreeError(
                leaf.path, expected="a tree that all ranks can have", found="PerRank", hint="Take it out before sending"
            )
        if leaf.layout is not None:
            raise LayoutError(
                leaf.path, expected="whole arrays on the rank that sends", found="a distributed one",
                hint="treeckpt.trees.gather makes it whole",
            )  # fmt: skip
    return described


# broadcast ------------------------------------------------------------------------------------------------------------
class _BroadcastTree(msgspec.Struct, array_like=True):
    """The source's tree without the arrays' data."""

    inventory: Inventory
    values: dict[str, Value]


def broadcast(tree: Any, *, transport: Transport, source: int, device: str | None, limit: int, namespace: str) -> Any:
    """Does `treeckpt.trees.broadcast` over a transport."""
    _check_source(source, transport)
    sources: dict[str, ArraySource] = {}

    def describe() -> _BroadcastTree:
        described = _describe_whole_tree(tree, transport, namespace)
        sources.update(described.sources)
        return _BroadcastTree(described.inventory, described.values)

    plan = from_rank(transport, source, "broadcast", describe, _BroadcastTree, hint=HINT)
    targets: dict[str, ArrayTarget] = {}
    entries: list[PackedRegion] = []
    for leaf in plan.inventory.leaves:
        if leaf.spec is None or leaf.alias_of is not None:
            continue
        entries.append(PackedRegion(leaf.path, Region.whole(leaf.spec.shape), dtype_of(leaf.spec.dtype).itemsize))
        if transport.rank != source:
            targets[leaf.path] = new_array(msgspec.structs.replace(leaf.spec, device=None), leaf.path, device)
    everyone = range(transport.size)
    send_regions(entries, limit, transport, sender=source, receivers=everyone, sources=sources, targets=targets)
    if transport.rank == source:
        return tree
    leaves = (new_leaf(leaf, plan.values, targets) for leaf in plan.inventory.leaves)
    whole = plan.inventory.structure
    return unflatten(whole, leaves, resolve=resolve, build=build_tensor, rank=transport.rank, namespace=namespace)


# distribute -----------------------------------------------------------------------------------------------------------
class _WantedLeaf(msgspec.Struct, frozen=True, array_like=True):
    """An array that a rank wants, or a value (`spec` is None)."""

    path: str
    spec: ArraySpec | None
    regions: tuple[Region, ...] = ()


class _SourceReply(msgspec.Struct, array_like=True):
    """What the source sends before the arrays' data."""

    values: dict[str, Value]
    """Values by path."""
    aliases: dict[str, str]
    """Paths of arrays that are another array of the source's tree, and the path of that one."""


class _Distribute:
    """One distribution from one rank, on one rank."""

    def __init__(self, transport: Transport, source: int, device: str | None, namespace: str) -> None:
        self.transport, self.source, self.device, self.namespace = transport, source, device, namespace
        self.global_rank = transport.rank if transport.members is None else transport.members[transport.rank]
        self.like: Any = None
        self.leaves: list[tuple[str, object]] = []
        self.targets: dict[str, ArrayTarget] = {}
        """The arrays that this rank wants, by path."""
        self.sources: dict[str, ArraySource] = {}
        """On the source, its arrays by path."""

    def want(self, like: Any) -> list[_WantedLeaf]:
        """Creates the arrays that this rank wants, and returns what it needs to fill them."""
        self.like = state_tree(like, rank=self.transport.rank, namespace=self.namespace)
        _, self.leaves = flatten(self.like, rank=self.transport.rank, namespace=self.namespace)
        wanted: list[_WantedLeaf] = []
        for path, leaf in self.leaves:
            if leaf is ...:
                continue
            target = like_of(leaf, path, self.global_rank, self.device)
            if target is None:
                wanted.append(_WantedLeaf(path, None))
            else:
                self.targets[path] = target
                wanted.append(_WantedLeaf(path, target.spec, tuple(piece.region for piece in target.pieces)))
        return wanted

    def reply(self, tree: Any, wanted: Sequence[Sequence[_WantedLeaf]]) -> _SourceReply:
        """Checks that the source has what is wanted; returns what of it is no array."""
        described = _describe_whole_tree(tree, self.transport, self.namespace)
        self.sources = described.sources
        values: dict[str, Value] = {}
        for rank, leaves in enumerate(wanted):
            for leaf in leaves:
                _check_wanted(leaf, described, rank)
                if leaf.path in described.values:
                    values[leaf.path] = described.values[leaf.path]
        specs = described.inventory.leaves
        return _SourceReply(values, {s.path: s.alias_of for s in specs if s.alias_of is not None and s.view is None})

    def send(self, wanted: Sequence[_WantedLeaf], receivers: Sequence[int], limit: int) -> None:
        """Sends arrays of the source to the ranks that want these regions of them."""
        entries = [
            PackedRegion(leaf.path, region, dtype_of(leaf.spec.dtype).itemsize)
            for leaf in wanted
            if leaf.spec is not None
            for region in leaf.regions
        ]
        send_regions(
            entries,
            limit,
            self.transport,
            sender=self.source,
            receivers=receivers,
            sources=self.sources,
            targets=self.targets,
        )

    def result(self, reply: _SourceReply) -> Any:
        """Returns the tree. Leaves that are one object in like, and one array at the source, are one object again."""
        like_leaves = dict(self.leaves)
        built: dict[str, Any] = {path: target.leaf for path, target in self.targets.items()}
        for path, leaf in self.leaves:
            base = reply.aliases.get(path)
            if leaf is ...:
                built[path] = leaf
            elif path in reply.values:
                built[path] = decode(reply.values[path], path, allow_pickle=False)
            elif base is not None and like_leaves.get(base) is leaf:
                built[path] = built[base]
        leaves = (built[path] for path, _ in self.leaves)
        return replace_leaves(self.like, leaves, namespace=self.namespace)


def _check_wanted(wanted: _WantedLeaf, described: DescribedTree, rank: int) -> None:
    """Checks that the source has a leaf that a rank wants.

    Raises:
        MismatchError: it has none, or one of another shape, dtype or kind.
    """
    source = described.sources.get(wanted.path)
    found = "a value" if source is None else f"{source.spec.dtype} of shape {source.spec.shape}"
    if source is None and wanted.path not in described.values:
        found = "no such leaf"
    expected = "a value" if wanted.spec is None else f"{wanted.spec.dtype} of shape {wanted.spec.shape}"
    if found != expected:
        raise MismatchError(
            wanted.path,
            expected=f"{expected}, as rank {rank} wants it",
            found=f"{found} in the tree that is sent",
            hint="Put `...` into like for what is not wanted",
        )


def distribute(
    tree: Any, like: Any, *, transport: Transport, source: int, device: str | None, limit: int, namespace: str
) -> Any:
    """Does `treeckpt.trees.distribute` over a transport, with the tree of one rank."""
    _check_source(source, transport)
    job = _Distribute(transport, source, device, namespace)
    wanted = gather_results(transport, "distribute", partial(job.want, like), list[_WantedLeaf], hint=HINT)
    answer = partial(job.reply, tree, wanted)
    reply = from_rank(transport, source, "distribute", answer, _SourceReply, hint=HINT)
    by_path = [{leaf.path: leaf for leaf in leaves} for leaves in wanted]
    common = {path for path, leaf in by_path[0].items() if all(leaves.get(path) == leaf for leaves in by_path)}
    job.send([leaf for leaf in wanted[0] if leaf.path in common], range(transport.size), limit)
    for rank, leaves in enumerate(wanted):
        job.send([leaf for leaf in leaves if leaf.path not in common], [rank], limit)
    return job.result(reply)
