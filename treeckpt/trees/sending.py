"""A tree that one rank has, brought to the others: as it is (`broadcast`), or cut as each of them wants it.

First the ranks agree on what is to be sent: the source tells its tree without data, or the others tell which regions
they want. Both sides then compute the same packing. What all ranks want alike is broadcast, the rest is sent to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..arrays.base import Target
from ..arrays.describe import Brought, describe_tree
from ..arrays.registry import decode, like_of, new_array, resolve
from ..arrays.stateful import expanded
from ..core.planning.rank_trees import Inventory
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region
from ..core.tree.flatten import flatten, replace_leaves, unflatten
from ..core.tree.spec import ArraySpec
from ..core.tree.value_codec import Value
from ..errors import LayoutError, MismatchError, RankError, TreeError
from .gathering import tied, together
from .packing import Bucket, Entry, bytes_of, pack, pack_entries, unpack
from .wire import Transfer, Wire

__all__ = ["broadcast", "distribute"]


def _check_source(source: int, wire: Wire) -> None:
    if not 0 <= source < wire.size:
        raise RankError(
            "src", ranks={}, expected=f"a rank of 0 to {wire.size - 1}", found=f"{source}",
            hint="Ranks are counted within the group",
        )  # fmt: skip


def _whole(tree: Any, wire: Wire, namespace: str) -> Brought:
    """The source's tree, described; all of it must be here.

    Raises:
        LayoutError: a distributed array.
        TreeError: state of each rank's own.
    """
    tree = expanded(tree, rank=wire.rank, namespace=namespace)
    brought = describe_tree(tree, rank=wire.rank, members=wire.members, namespace=namespace)
    for leaf in brought.inventory.leaves:
        if leaf.per_rank is not None:
            raise TreeError(
                leaf.path, expected="a tree that all ranks can have", found="PerRank", hint="Take it out before sending"
            )
        if leaf.layout is not None:
            raise LayoutError(
                leaf.path, expected="whole arrays on the rank that sends", found="a distributed one",
                hint="treeckpt.trees.gather makes it whole",
            )  # fmt: skip
    return brought


# as it is -------------------------------------------------------------------------------------------------------------
class _Plan(msgspec.Struct, array_like=True):
    """The source's tree without the arrays' data."""

    inventory: Inventory
    values: dict[str, Value]


def broadcast(tree: Any, *, wire: Wire, source: int, device: str | None, limit: int, namespace: str) -> Any:
    """See `treeckpt.trees.broadcast`."""
    _check_source(source, wire)
    brought: list[Brought] = []

    def tell() -> bytes:
        if wire.rank != source:
            return b""
        brought.append(_whole(tree, wire, namespace))
        return msgspec.msgpack.encode(_Plan(brought[0].inventory, brought[0].values))

    plan = msgspec.msgpack.decode(together(wire, "broadcast", tell)[source], type=_Plan)
    arrays = [leaf for leaf in plan.inventory.leaves if leaf.spec is not None and leaf.alias_of is None]
    targets: dict[str, Target] = {}
    entries: list[Entry] = []
    for number, leaf in enumerate(arrays):
        assert leaf.spec is not None, "arrays only"
        entries.append(Entry(number, Region.whole(leaf.spec.shape), dtype_of(leaf.spec.dtype).itemsize))
        if wire.rank != source:
            targets[leaf.path] = new_array(msgspec.structs.replace(leaf.spec, device=None), leaf.path, device)
    for bucket in pack_entries(entries, limit):
        if wire.rank == source:
            wire.broadcast(pack(bucket, lambda n: brought[0].sources[arrays[n].path].pieces), source)
            continue
        data = bytes_of(bucket)
        wire.broadcast(data, source)
        unpack(data, bucket, lambda entry: targets[arrays[entry.number].path].pieces)
    return tree if wire.rank == source else _built(plan, targets, wire.rank, namespace)


def _built(plan: _Plan, targets: dict[str, Target], rank: int, namespace: str) -> Any:
    made: dict[str, Any] = {path: target.leaf for path, target in targets.items()}
    for leaf in plan.inventory.leaves:
        if leaf.spec is None:
            made[leaf.path] = decode(plan.values[leaf.path], leaf.path, allow_pickle=False)
        elif leaf.alias_of is not None:
            made[leaf.path] = tied(leaf, made[leaf.alias_of], targets[leaf.alias_of].spec)
    leaves = iter([made[leaf.path] for leaf in plan.inventory.leaves])
    return unflatten(plan.inventory.whole, leaves, resolve=resolve, rank=rank, namespace=namespace)


# cut as each rank wants it --------------------------------------------------------------------------------------------
class _Wish(msgspec.Struct, frozen=True, array_like=True):
    """An array that a rank wants, or a value (`spec` is None)."""

    path: str
    spec: ArraySpec | None
    regions: tuple[Region, ...] = ()


class _Reply(msgspec.Struct, array_like=True):
    """What the source has for each path that is no array."""

    values: dict[str, Value]
    ties: dict[str, str]
    """Arrays that are one array in the tree that is sent."""


class _Distribute:
    """One distribution from one rank, on one rank."""

    def __init__(self, wire: Wire, source: int, device: str | None, namespace: str) -> None:
        self.wire, self.source, self.device, self.namespace = wire, source, device, namespace
        self.here = wire.rank if wire.members is None else wire.members[wire.rank]
        self.targets: dict[str, Target] = {}
        self.brought: Brought | None = None
        self.like: Any = None
        self.leaves: list[tuple[str, object]] = []

    def wishes(self, like: Any) -> list[list[_Wish]]:
        """What each rank wants, by rank; makes the arrays that this one wants."""

        def mine() -> bytes:
            self.like = expanded(like, rank=self.wire.rank, namespace=self.namespace)
            _, leaves = flatten(self.like, rank=self.wire.rank, namespace=self.namespace)
            self.leaves = leaves
            found: list[_Wish] = []
            for path, leaf in leaves:
                if leaf is ...:
                    continue
                target = like_of(leaf, path, self.here, self.device)
                if target is None:
                    found.append(_Wish(path, None))
                else:
                    self.targets[path] = target
                    found.append(_Wish(path, target.spec, tuple(piece.region for piece in target.pieces)))
            return msgspec.msgpack.encode(found)

        heard = together(self.wire, "distribute", mine)
        return [msgspec.msgpack.decode(data, type=list[_Wish]) for data in heard]

    def reply(self, tree: Any, wishes: Sequence[Sequence[_Wish]]) -> _Reply:
        """The source looks whether it has what is wanted, and sends what is no array."""

        def answer() -> bytes:
            if self.wire.rank != self.source:
                return b""
            brought = self.brought = _whole(tree, self.wire, self.namespace)
            values: dict[str, Value] = {}
            for rank, wanted in enumerate(wishes):
                for wish in wanted:
                    _check_wish(wish, brought, rank)
                    if wish.path in brought.values:
                        values[wish.path] = brought.values[wish.path]
            leaves = brought.inventory.leaves
            ties = {leaf.path: leaf.alias_of for leaf in leaves if leaf.alias_of is not None and leaf.view is None}
            return msgspec.msgpack.encode(_Reply(values, ties))

        return msgspec.msgpack.decode(together(self.wire, "distribute", answer)[self.source], type=_Reply)

    def move(self, wishes: Sequence[Sequence[_Wish]], limit: int) -> None:
        """Sends what is wanted: to all at once where all want the same, else to each rank."""
        paths = list(dict.fromkeys(wish.path for wanted in wishes for wish in wanted if wish.spec is not None))
        number = {path: n for n, path in enumerate(paths)}
        asked = [{wish.path: wish for wish in wanted} for wanted in wishes]
        common = {path for path in paths if all(wanted.get(path) == asked[0].get(path) for wanted in asked)}

        def entries(rank: int, chosen: Callable[[str], bool]) -> list[Entry]:
            return [
                Entry(number[wish.path], region, dtype_of(wish.spec.dtype).itemsize)
                for wish in wishes[rank]
                if wish.spec is not None and chosen(wish.path)
                for region in wish.regions
            ]

        for bucket in pack_entries(entries(0, lambda path: path in common), limit):
            data = self._pack(bucket, paths)
            self.wire.broadcast(data, self.source)
            self._unpack(data, bucket, paths)
        for rank in range(self.wire.size):
            for bucket in pack_entries(entries(rank, lambda path: path not in common), limit):
                self._send(rank, bucket, paths)

    def _send(self, rank: int, bucket: Bucket, paths: Sequence[str]) -> None:
        if self.wire.rank not in (rank, self.source):
            return
        data = self._pack(bucket, paths)
        if rank != self.source:
            sends: list[Transfer] = [(rank, data)] if self.wire.rank == self.source else []
            self.wire.exchange(sends, [] if sends else [(self.source, data)])
        if self.wire.rank == rank:
            self._unpack(data, bucket, paths)

    def _pack(self, bucket: Bucket, paths: Sequence[str]) -> Any:
        brought = self.brought
        if brought is None:
            return bytes_of(bucket)
        return pack(bucket, lambda n: brought.sources[paths[n]].pieces)

    def _unpack(self, data: Any, bucket: Bucket, paths: Sequence[str]) -> None:
        def piece(entry: Entry) -> Any:
            return [p for p in self.targets[paths[entry.number]].pieces if p.region == entry.region]

        unpack(data, bucket, piece)

    def result(self, reply: _Reply) -> Any:
        """The tree; leaves that are one object in like, and one array at the source, are one object again."""
        asked = dict(self.leaves)
        made: dict[str, Any] = {path: target.leaf for path, target in self.targets.items()}
        for path, leaf in self.leaves:
            base = reply.ties.get(path)
            if leaf is ...:
                made[path] = leaf
            elif path in reply.values:
                made[path] = decode(reply.values[path], path, allow_pickle=False)
            elif base is not None and asked.get(base) is leaf:
                made[path] = made[base]
        leaves = iter([made[path] for path, _ in self.leaves])
        return replace_leaves(self.like, leaves, namespace=self.namespace)


def _check_wish(wish: _Wish, brought: Brought, rank: int) -> None:
    """Raises:
    MismatchError: the source has no such leaf, or one of another shape, dtype or kind."""
    source = brought.sources.get(wish.path)
    found = "a value" if source is None else f"{source.spec.dtype} of shape {source.spec.shape}"
    if source is None and wish.path not in brought.values:
        found = "no such leaf"
    wanted = "a value" if wish.spec is None else f"{wish.spec.dtype} of shape {wish.spec.shape}"
    if found != wanted:
        raise MismatchError(
            wish.path,
            expected=f"{wanted}, as rank {rank} wants it",
            found=f"{found} in the tree that is sent",
            hint="Put `...` into like for what is not wanted",
        )


def distribute(tree: Any, like: Any, *, wire: Wire, source: int, device: str | None, limit: int, namespace: str) -> Any:
    """See `treeckpt.trees.distribute`."""
    _check_source(source, wire)
    job = _Distribute(wire, source, device, namespace)
    wishes = job.wishes(like)
    reply = job.reply(tree, wishes)
    job.move(wishes, limit)
    return job.result(reply)
