"""Gathers a tree of several ranks, and sends a tree of one rank to the others, through collectives of a process group.

`gather` returns what `load` would return after a save by these ranks. They exchange digests of their trees; only where
these differ do they send the trees' specs, which are merged as for a save. From the global tree every rank computes the
same assignment: each element of each array is sent by exactly one of the ranks that hold it. Regions are broadcast
where all ranks receive them, else sent to the receivers. What every receiver holds whole already is only copied.

`broadcast` sends a tree as it is, `distribute` as each rank wants it. First the ranks agree on what is sent: the source
sends its tree without data, or the others send which regions they want. What all ranks want alike is broadcast, the
rest is sent to each rank.

Ranks are counted within the group. Bytes are numpy arrays of uint8; for a group whose backend moves only device memory
(NCCL) they are copied to and from its device. `SoloTransport` stands for a single rank, or no process group. Regions of
many arrays go in few messages (`send_regions`): a thousand leaves take a handful of them. Sender and receivers compute
the same packing from the same list of regions; no headers are sent.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from .._arrays.base import ArraySource, ArrayTarget, HostArray, SourcePiece, TargetPiece, raw_dtype
from .._arrays.describe import (
    DescribedTree,
    box_digests,
    content_digests,
    describe_tree,
    json_digest,
    piece_digests,
)
from .._arrays.registry import build_tensor, decode, library_of, like_of, new_array, resolve, resolve_function
from .._arrays.stateful import state_tree
from .._core.planning.rank_trees import GlobalTree, Inventory, LeafSpec, RankClass, merge_rank_trees
from .._core.planning.save_plan import ArrayLeaf, array_leaves, assign_writers, overlapping_pieces, writes_of
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs, encode_runs
from .._core.sharding.placements import Layout, MeshLayout, Replicate, mesh_ranks
from .._core.sharding.region import Region, strides_in
from .._core.tree.flatten import flatten, replace_leaves, unflatten
from .._core.tree.spec import ArraySpec
from .._core.tree.value_codec import Value
from .._io.comm.collective import ByteGatherer, from_rank, gather_results
from .._io.comm.comm import check_group, launched_rank, unconnected_error
from .._saving.agree import (
    BoxDigests,
    RankTree,
    compare_boxes,
    compare_contents,
    conflicting_ranks,
    digest_groups,
    merge_inventories,
)
from ..errors import LayoutError, MismatchError, RankError, TreeError
from ._moving import distribute_local, fill

Transfer = tuple[int, np.ndarray]
"""The other rank, and the bytes to send or to fill."""


class Transport(ByteGatherer, Protocol):
    """One rank's access to the others. Every method is called by all ranks in the same order."""

    @property
    def members(self) -> tuple[int, ...] | None:
        """The global rank of each rank; None where the numbers are the same."""
        ...

    def broadcast(self, data: np.ndarray, source: int) -> None:
        """Fills `data` with that of rank `source`."""
        ...

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Sends and receives; between two ranks in order."""
        ...


class SoloTransport:
    """The transport of a single rank: it sends nothing."""

    rank, size, members = 0, 1, None

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: np.ndarray, source: int) -> None:
        pass

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        assert not sends and not receives, "there is no other rank"


class TorchTransport:
    """The transport of a process group."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self.members = None if self._ranks == tuple(range(dist.get_world_size())) else self._ranks
        # the device from which the backend of the group sends: that of NCCL is a GPU
        self._device = str(dist.distributed_c10d._get_object_coll_device(group))

    def all_gather(self, data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * self.size
        self._dist.all_gather_object(gathered, data, group=self._group)
        return gathered

    def broadcast(self, data: np.ndarray, source: int) -> None:
        tensor = self._tensor(data)
        self._dist.broadcast(tensor, src=self._ranks[source], group=self._group)
        if source != self.rank:
            self._copy_back(tensor, data)

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        dist = self._dist
        filled = [(self._tensor(data), data) for _, data in receives]
        calls = [
            dist.P2POp(dist.isend, self._tensor(data), self._ranks[other], self._group) for other, data in sends
        ] + [
            dist.P2POp(dist.irecv, tensor, self._ranks[other], self._group)
            for (other, _), (tensor, _) in zip(receives, filled, strict=True)
        ]
        for work in dist.batch_isend_irecv(calls) if calls else []:
            work.wait()
        for tensor, data in filled:
            self._copy_back(tensor, data)

    def _tensor(self, data: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(data).to(self._device)

    def _copy_back(self, tensor: Any, data: np.ndarray) -> None:
        # on the host the tensor has the memory of the array
        if self._device != "cpu":
            data[:] = tensor.cpu().numpy()


def transport_of(group: Any) -> Transport:
    """Returns the transport of a process group.

    Args:
        group: None is the default group, or a solo transport where there is none; "alone" is a solo transport.

    Raises:
        RankError: this rank is not part of the group, or there is none although a launcher has started other ranks.
        TreeckptError: `group` is no process group.
    """
    if isinstance(group, str) and group == "alone":
        return SoloTransport()
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if group is None and (launched := launched_rank()) is not None:
            raise unconnected_error(launched, "group")
        return SoloTransport()
    if group is None:
        group = dist.group.WORLD
    check_group(group, "group")
    return TorchTransport(group)


BUCKET_NBYTES = 64 << 20
"""Size of a message in bytes, at most, unless a single region is larger."""
ALIGN = 16


class PackedRegion(msgspec.Struct, frozen=True):
    """A region of the array at a path."""

    path: str
    region: Region
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.region.size * self.itemsize


class MessageBucket(msgspec.Struct, frozen=True):
    """The regions of one message, each with its first byte in it."""

    entries: tuple[tuple[PackedRegion, int], ...]
    nbytes: int


def pack_regions(entries: Sequence[PackedRegion], limit: int) -> Iterator[MessageBucket]:
    """Yields buckets of at most `limit` bytes, or of one region, in order; omits empty regions."""
    packed: list[tuple[PackedRegion, int]] = []
    offset = 0
    for entry in entries:
        if not entry.nbytes:
            continue
        if packed and offset + entry.nbytes > limit:
            yield MessageBucket(tuple(packed), offset)
            packed, offset = [], 0
        packed.append((entry, offset))
        offset += -(-entry.nbytes // ALIGN) * ALIGN
    if packed:
        yield MessageBucket(tuple(packed), offset)


def _window(data: np.ndarray, entry: PackedRegion, offset: int) -> HostArray:
    raw = data[offset : offset + entry.nbytes].view(raw_dtype(entry.itemsize))
    return HostArray(raw.reshape(entry.region.shape))


def send_regions(
    entries: Sequence[PackedRegion],
    limit: int,
    transport: Transport,
    *,
    sender: int,
    receivers: Collection[int],
    sources: Mapping[str, ArraySource],
    targets: Mapping[str, ArrayTarget],
) -> None:
    """Sends regions of one rank's arrays to others; every rank calls it with the same entries.

    Args:
        receivers: the ranks that get them; the sender too, if it is to fill targets of its own.
        sources: this rank's arrays by path, if it is the sender.
        targets: the arrays to fill, if it is a receiver; regions of others are ignored.
    """
    sends, receives = transport.rank == sender, transport.rank in receivers
    for bucket in pack_regions(entries, limit) if sends or receives else ():
        # the gaps between regions are sent too: zeros, and not what was in memory before
        data = np.zeros(bucket.nbytes, np.uint8) if sends else np.empty(bucket.nbytes, np.uint8)
        places = [(entry, _window(data, entry, offset)) for entry, offset in bucket.entries]
        if sends:
            for entry, place in places:
                fill([TargetPiece(entry.region, place)], sources[entry.path].pieces)
        if len(receivers) == transport.size:
            transport.broadcast(data, sender)
        elif sends:
            transport.exchange([(rank, data) for rank in receivers if rank != sender], [])
        else:
            transport.exchange([], [(sender, data)])
        for entry, place in places if receives else ():
            pieces = targets[entry.path].pieces if entry.path in targets else ()
            # pieces of a target have entries of their own: of many, only the one that is meant is looked at
            exact = [piece for piece in pieces if piece.region == entry.region]
            fill(exact or pieces, [SourcePiece(entry.region, place)])


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
        clash = bool(conflicting_ranks({rank: digest.pieces for rank, digest in enumerate(digests)}))
        self.alike = len({(digest.inventory, digest.contents) for digest in digests}) == 1 and not clash
        if self.alike:
            everyone = encode_runs(range(transport.size))
            merged = merge_rank_trees([RankClass(everyone, self.described.inventory)], transport.size)
        else:
            for group in self.piece_groups if clash else ():
                self.contents.update(group)
            own = RankTree(self.described.inventory, self.contents, self.described.values)
            trees = gather_results(transport, "gather", lambda: own, RankTree, hint=HINT)
            # in reverse: of equal values the one of the lowest rank is kept
            self.values = {path: value for tree in reversed(trees) for path, value in tree.values.items()}
            by_rank = dict(enumerate(trees))
            inventories = {rank: digest.inventory for rank, digest in enumerate(digests)}
            merged = merge_inventories(inventories, by_rank, transport.size)  # shapes before contents
            compare_contents({rank: tree.contents for rank, tree in by_rank.items()})
        boxes = [(path, box) for path, box, _ in overlapping_pieces(merged)]
        if boxes:
            own_boxes = partial(box_digests, self.described, boxes, "sample")
            box_contents = gather_results(transport, "gather", own_boxes, BoxDigests, hint=HINT)
            compare_boxes(boxes, dict(enumerate(box_contents)))
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
        # a tree like all others gives its own containers: no class is looked up by name
        if self.alike:
            return replace_leaves(self.tree, leaves, namespace=self.namespace)
        return unflatten(
            merged.structure,
            leaves,
            resolve=resolve,
            build=build_tensor,
            functions=resolve_function,
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
    base, spec, array = targets[leaf.alias_of].leaf, targets[leaf.alias_of].spec, leaf.spec
    if leaf.view is not None:
        return library_of(array).view(base, array, leaf.view.offset, leaf.view.strides)
    if (spec.kind, spec.requires_grad, spec.shape) == (array.kind, array.requires_grad, array.shape):
        return base
    return library_of(array).view(base, array, 0, strides_in(array.shape, array.order, 1))


def gather(
    tree: Any,
    *,
    ranks: Sequence[int] | None = None,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """Returns the tree with full arrays: what `load` would return, had these ranks saved it.

    Ranks may hold different parts of the tree (pipeline stages): it comes back merged. Replicas must be equal, as
    for `save`; state under `PerRank` stays each rank's own.

    >>> tc.trees.gather({"w": np.ones(3)}, group="alone")
    {'w': array([1., 1., 1.])}

    Args:
        ranks: that receive the arrays, counted within the group; None is all. The others receive an `ArraySpec` in
            place of each array (a target for `load` or `distribute`), and the values.
        device: of the new arrays; by default the host.
        group: a process group of torch.distributed; by default the default one. "alone" is this process only.
        bucket_bytes: size of one message, at most, unless a single region is larger.

    Raises:
        TreeError: a leaf without data (meta), or that cannot be sent.
        LayoutError: pieces that do not cover their array, partial sums.
        MismatchError: ranks contradict each other.
        RankError: some ranks failed before data was sent, or this one is not part of the group.
    """
    job = _Gather(transport_of(group), tree, ranks, device, namespace)
    merged = job.agree()
    job.move(merged, bucket_bytes)
    return job.result(merged)


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


def broadcast(
    tree: Any,
    *,
    src: int = 0,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """Returns the tree of one rank, on every rank: on that rank the same object, on the others new arrays.

    >>> tc.trees.broadcast({"step": 7}, src=0, group="alone")
    {'step': 7}

    Args:
        tree: of rank `src`; that of the others is ignored.
        src: counted within the group.
        device: of new arrays; by default the host.
        bucket_bytes: size of one message, at most: a thousand small leaves are one message.

    Raises:
        LayoutError: a distributed array; `distribute` sends to such arrays.
        TreeError: a leaf without data (meta), or that cannot be sent; `PerRank`.
        RankError: the source failed before data was sent, or this rank is not part of the group.
    """
    transport = transport_of(group)
    _check_source(src, transport)
    sources: dict[str, ArraySource] = {}

    def describe() -> _BroadcastTree:
        described = _describe_whole_tree(tree, transport, namespace)
        sources.update(described.sources)
        return _BroadcastTree(described.inventory, described.values)

    plan = from_rank(transport, src, "broadcast", describe, _BroadcastTree, hint=HINT)
    targets: dict[str, ArrayTarget] = {}
    entries: list[PackedRegion] = []
    for leaf in plan.inventory.leaves:
        if leaf.spec is None or leaf.alias_of is not None:
            continue
        entries.append(PackedRegion(leaf.path, Region.whole(leaf.spec.shape), dtype_of(leaf.spec.dtype).itemsize))
        if transport.rank != src:
            targets[leaf.path] = new_array(msgspec.structs.replace(leaf.spec, device=None), leaf.path, device)
    everyone = range(transport.size)
    send_regions(entries, bucket_bytes, transport, sender=src, receivers=everyone, sources=sources, targets=targets)
    if transport.rank == src:
        return tree
    leaves = (new_leaf(leaf, plan.values, targets) for leaf in plan.inventory.leaves)
    return unflatten(
        plan.inventory.structure,
        leaves,
        resolve=resolve,
        build=build_tensor,
        functions=resolve_function,  # ranks of one job trust each other
        rank=transport.rank,
        namespace=namespace,
    )


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
    tree: Any,
    like: Any,
    *,
    src: int | None = None,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """Returns a tree of new arrays with the data of `tree`, and the shape, dtype, kind, device and layout of `like`.

    >>> like = {"w": tc.Sharded(np.empty((1, 2)), (2, 2), (1, 0))}
    >>> tc.trees.distribute({"w": np.array([[1.0, 2.0], [3.0, 4.0]])}, like)["w"].local
    array([[3., 4.]])

    Args:
        tree: holds the wanted arrays whole; without `src` at least the part that this rank wants. Leaves that are not
            wanted are not sent.
        like: as for `load`: tensors, DTensors, pieces or specs, whose data is ignored and may be on meta; `...`
            stays. Ranks may want different leaves.
        src: the rank that has the tree, counted within the group (the tree of the others is ignored); None where every
            rank has it: then nothing is sent.
        device: of the new arrays; by default that of like's, or the host for those on meta.

    Raises:
        MismatchError: a leaf is missing in the tree, or has another shape or dtype.
        LayoutError: arrays of the source that are not whole.
        TreeError, RankError: as `gather`.
    """
    if src is None:
        return distribute_local(tree, like, device=device, namespace=namespace)
    transport = transport_of(group)
    _check_source(src, transport)
    job = _Distribute(transport, src, device, namespace)
    wanted = gather_results(transport, "distribute", partial(job.want, like), list[_WantedLeaf], hint=HINT)
    answer = partial(job.reply, tree, wanted)
    reply = from_rank(transport, src, "distribute", answer, _SourceReply, hint=HINT)
    by_path = [{leaf.path: leaf for leaf in leaves} for leaves in wanted]
    common = {path for path, leaf in by_path[0].items() if all(leaves.get(path) == leaf for leaves in by_path)}
    job.send([leaf for leaf in wanted[0] if leaf.path in common], range(transport.size), bucket_bytes)
    for rank, leaves in enumerate(wanted):
        job.send([leaf for leaf in leaves if leaf.path not in common], [rank], bucket_bytes)
    return job.result(reply)
