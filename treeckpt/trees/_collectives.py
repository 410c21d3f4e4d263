"""Gathers a tree of several ranks, and sends a tree of one rank to the others, through collectives of a process group.

`gather` returns what `load` would return after a save by these ranks. They exchange digests of their trees; only where
these differ do they send the trees' specs, which are merged as for a save. From the global tree every rank computes the
same assignment: each element of each array is sent by exactly one of the ranks that hold it. Regions are broadcast
where all ranks receive them, else sent to the receivers. What every receiver holds whole already is only copied.

`broadcast` sends a tree as it is, `distribute` as each rank wants it. First the ranks agree on what is sent: the source
sends its tree without data, or the others send which regions they want. What all ranks want alike is broadcast, the
rest is sent to each rank.

Arrays of partial sums are reduced by torch before all else, which takes one round of messages more.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec

from .._arrays.base import ArraySource, ArrayTarget
from .._arrays.describe import (
    DescribedTree,
    box_digests,
    content_digests,
    describe_tree,
    json_digest,
    piece_digests,
)
from .._arrays.registry import (
    build_tensor,
    decode,
    holds_partial_sums,
    is_unknown,
    library_of,
    like_of,
    new_array,
    resolve,
    resolve_function,
    torch_adapter,
)
from .._arrays.stateful import state_tree
from .._core.planning.rank_trees import GlobalTree, Inventory, LeafSpec, RankClass, merge_rank_trees
from .._core.planning.save_plan import ArrayLeaf, array_leaves, assign_writers, overlapping_pieces, writes_of
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs, encode_runs
from .._core.sharding.placements import Layout, MeshLayout, Replicate, mesh_ranks
from .._core.sharding.region import Region, strides_in
from .._core.tree.flatten import flatten, replace_leaves, unflatten
from .._core.tree.leaf_differences import some_of
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import index_path
from .._core.tree.value_codec import Value, type_name
from .._io.comm.collective import from_rank, gather_results
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
from ._moving import (
    TYPE_CHECK_ADVICE,
    ValueCopies,
    chosen_ranks,
    distribute_local,
    fill,
    lacking_leaves,
    log_kept_leaves,
)
from ._transport import BUCKET_NBYTES, PackedRegion, Transport, send_regions, transport_of

_log = logging.getLogger("treeckpt")

HINT = "Nothing was sent"


class _RankDigests(msgspec.Struct, array_like=True):
    """Digests of what a rank holds."""

    inventory: bytes
    contents: bytes
    pieces: dict[bytes, bytes]
    partial: dict[str, list[int]] = {}
    """The global ranks of the mesh of each array of partial sums, which is still to be reduced, by path."""


_STAND_IN = "treeckpt.trees: an object of "
"""The text in the place of a value of an unknown kind while ranks compare their trees; its class follows."""


class _Gather:
    """One gather on one rank."""

    def __init__(
        self,
        transport: Transport,
        tree: Any,
        ranks: Sequence[int] | None,
        *,
        device: str | None,
        type_check: bool,
        namespace: str,
    ) -> None:
        self.transport, self.tree, self.device, self.namespace = transport, tree, device, namespace
        self.receivers = chosen_ranks(ranks, transport.size)
        self.receives = transport.rank in self.receivers
        self.own_values = ranks is not None
        """Whether each rank keeps its own values where these differ."""
        self.copied = ValueCopies(type_check)
        self.objects: dict[str, object] = {}
        """Values of unknown kinds, by path."""
        self.partial: dict[str, Any] = {}
        """DTensors of partial sums that are still to be reduced, by path."""
        self.same_inventory = False
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
        if any(digest.partial for digest in digests):
            self._reduce([digest.partial for digest in digests])
            digests = gather_results(transport, "gather", self._describe, _RankDigests, hint=HINT)
        self.values = self.described.values
        self.same_inventory = len({digest.inventory for digest in digests}) == 1
        clash = bool(conflicting_ranks({rank: digest.pieces for rank, digest in enumerate(digests)}))
        if self.same_inventory and len({digest.contents for digest in digests}) == 1 and not clash:
            everyone = encode_runs(range(transport.size))
            merged = merge_rank_trees([RankClass(everyone, self.described.inventory)], transport.size)
        else:
            for group in self.piece_groups if clash else ():
                self.contents.update(group)
            own = RankTree(self.described.inventory, self.contents, self.described.values)
            trees = gather_results(transport, "gather", lambda: own, RankTree, hint=HINT)
            by_rank = dict(enumerate(trees))
            inventories = {rank: digest.inventory for rank, digest in enumerate(digests)}
            merged = merge_inventories(inventories, by_rank, transport.size)  # shapes before contents
            self._merge_values(trees)
            compare_contents({rank: tree.contents for rank, tree in by_rank.items()})
        boxes = [(path, box) for path, box, _ in overlapping_pieces(merged)]
        if boxes:
            own_boxes = partial(box_digests, self.described, boxes, "sample")
            box_contents = gather_results(transport, "gather", own_boxes, BoxDigests, hint=HINT)
            compare_boxes(boxes, dict(enumerate(box_contents)))
        return merged

    def _merge_values(self, trees: Sequence[RankTree]) -> None:
        """Takes the values of all ranks, and out of their contents what is not to be compared.

        Raises:
            TreeError: a rank lacks an object of another one, which cannot be sent.
        """
        # in reverse: of equal values the one of the lowest rank is kept
        self.values = {path: value for tree in reversed(trees) for path, value in tree.values.items()}
        for path, value in self.values.items():
            if isinstance(value, str) and value.startswith(_STAND_IN):
                for rank, tree in enumerate(trees):
                    if path not in tree.values:
                        raise TreeError(
                            path,
                            expected="a value of an unknown kind on every rank, which keeps a copy of its own",
                            found=f"{value.removeprefix(_STAND_IN)}, which rank {rank} lacks",
                            hint="Convert it to arrays, containers or plain values, which are sent",
                        )
        if not self.own_values:
            return
        digests = {path: {tree.contents.pop(path) for tree in trees if path in tree.values} for path in self.values}
        differing = [path for path, found in digests.items() if len(found) > 1]
        self.values |= self.described.values
        if differing:
            _log.warning("treeckpt.trees.gather: each rank keeps its own values, %s", some_of("differing", differing))

    def _describe(self) -> _RankDigests:
        transport = self.transport
        self.tree = state_tree(self.tree, rank=transport.rank, namespace=self.namespace)
        self._take_out()
        if self.partial:
            return _RankDigests(
                b"", b"", {}, {path: leaf.device_mesh.mesh.flatten().tolist() for path, leaf in self.partial.items()}
            )
        self.described = describe_tree(
            self.tree,
            rank=transport.rank,
            members=transport.members,
            advice=TYPE_CHECK_ADVICE,
            namespace=self.namespace,
        )
        self.contents = content_digests(self.described, "sample")
        self.piece_groups = piece_digests(self.described, "sample", world=transport.size)
        contents = json_digest(sorted(self.contents.items()))
        return _RankDigests(json_digest(self.described.inventory), contents, digest_groups(self.piece_groups))

    def _take_out(self) -> None:
        """Finds arrays of partial sums, and puts a text into the tree for each value of an unknown kind."""
        distributed = "torch.distributed.tensor" in sys.modules
        if self.copied.type_check and not distributed:
            return
        rank, given = self.transport.rank, self.tree
        leaves: list[object] = []
        self.partial = {}
        for path, leaf in flatten(given, rank=rank, namespace=self.namespace)[1]:
            if distributed and holds_partial_sums(leaf):
                self.partial[index_path(path, rank)] = leaf
            elif not self.copied.type_check and is_unknown(leaf):
                self.objects[index_path(path, rank)] = leaf
                leaf = _STAND_IN + type_name(type(leaf))
            leaves.append(leaf)
        if self.objects:
            self.tree = replace_leaves(given, iter(leaves), namespace=self.namespace)

    def _reduce(self, partial: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Has torch reduce partial sums over their meshes.

        Args:
            partial: of each rank, the ranks of the mesh of each array of partial sums, by path.

        Raises:
            LayoutError: a rank of a mesh is not part of the gather, or lacks the array.
        """
        members = self.transport.members or range(self.transport.size)
        having = [{path: set(ranks) for path, ranks in one.items()} for one in partial]
        for path in sorted({path for one in having for path in one}):
            for rank in sorted(set().union(*(one[path] for one in having if path in one))):
                if rank not in members or path not in having[members.index(rank)]:
                    raise LayoutError(
                        path,
                        expected="partial sums on all ranks of their mesh, which are reduced together",
                        found=f"none on rank {rank}",
                        hint="Gather within the group of the mesh, on all of its ranks",
                    )
        made: dict[int, object] = {}
        for _, leaf in sorted(self.partial.items(), key=itemgetter(0)):
            if id(leaf) not in made:
                made[id(leaf)] = torch_adapter().reduced(leaf)
        leaves = flatten(self.tree, rank=self.transport.rank, namespace=self.namespace)[1]
        replaced = (made.get(id(leaf), leaf) for _, leaf in leaves)
        self.tree = replace_leaves(self.tree, replaced, namespace=self.namespace)
        _log.info("treeckpt.trees.gather: partial sums, %s", some_of("reduced", list(self.partial)))

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
            self.copied(self.objects[leaf.path], leaf.path)
            if leaf.path in self.objects
            else new_leaf(leaf, self.values if leaf.per_rank is None else self.described.own_values, self.targets)
            for leaf in merged.leaves
            if leaf.per_rank is None or self.transport.rank in decode_runs(leaf.per_rank)
        )
        # a tree like all others gives its own containers: no class is looked up by name
        if self.same_inventory:
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


def new_leaf(
    leaf: LeafSpec, values: Mapping[str, Value], targets: Mapping[str, ArrayTarget], *, type_check: bool = True
) -> Any:
    """Returns a leaf of the tree that a rank received: a value, an array, or the spec of one that has no target here.

    A leaf that shares memory is the array that has it, or a view of that.
    """
    if leaf.spec is None:
        return decode(values[leaf.path], leaf.path, allow_pickle=not type_check)
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
    type_check: bool = True,
    namespace: str = "",
) -> Any:
    """Returns the tree with full arrays: what `load` would return, had these ranks saved it.

    Ranks may hold different parts of the tree (pipeline stages): it comes back merged. Replicas must be equal, as
    for `save`; state under `PerRank` stays each rank's own. Partial sums of a DTensor are reduced over its mesh first;
    the log names them (INFO).

    >>> tc.trees.gather({"w": np.ones(3)}, group="alone")
    {'w': array([1., 1., 1.])}

    Args:
        ranks: that receive the arrays, counted within the group; None is all. The others receive an `ArraySpec` in
            place of each array (a target for `load` or `distribute`), and the values. With `ranks` Python values may
            differ: each rank keeps its own, and the log names them. Without, all have to get the same tree.
        device: of the new arrays; by default the host.
        group: a process group of torch.distributed; by default the default one. "alone" is this process only.
        bucket_bytes: size of one message, at most, unless a single region is larger.
        type_check: False takes values of unknown kinds: each rank gets a deep copy of its own, and they are not
            compared.

    Raises:
        TreeError: a leaf without data (meta), or that cannot be sent.
        LayoutError: pieces that do not cover their array; partial sums of which a rank is missing.
        MismatchError: ranks contradict each other.
        RankError: some ranks failed before data was sent, or this one is not part of the group.
    """
    job = _Gather(transport_of(group), tree, ranks, device=device, type_check=type_check, namespace=namespace)
    merged = job.agree()
    job.move(merged, bucket_bytes)
    return job.result(merged)


def _check_source(source: int, transport: Transport) -> None:
    if not 0 <= source < transport.size:
        raise RankError(
            "src", ranks={}, expected=f"a rank of 0 to {transport.size - 1}", found=f"{source}",
            hint="Ranks are counted within the group",
        )  # fmt: skip


def _describe_whole_tree(tree: Any, transport: Transport, *, type_check: bool, namespace: str) -> DescribedTree:
    """Describes the source's tree; without `type_check` with values of unknown kinds as pickles.

    Raises:
        LayoutError: a distributed array.
        TreeError: state under `PerRank`.
    """
    tree = state_tree(tree, rank=transport.rank, namespace=namespace)
    described = describe_tree(
        tree,
        rank=transport.rank,
        members=transport.members,
        allow_pickle=not type_check,
        advice=TYPE_CHECK_ADVICE if type_check else "",
        namespace=namespace,
    )
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
    type_check: bool = True,
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
        type_check: False sends values of unknown kinds as pickles.

    Raises:
        LayoutError: a distributed array; `distribute` sends to such arrays.
        TreeError: a leaf without data (meta), or that cannot be sent; `PerRank`.
        RankError: the source failed before data was sent, or this rank is not part of the group.
    """
    transport = transport_of(group)
    _check_source(src, transport)
    sources: dict[str, ArraySource] = {}

    def describe() -> _BroadcastTree:
        described = _describe_whole_tree(tree, transport, type_check=type_check, namespace=namespace)
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
    leaves = (new_leaf(leaf, plan.values, targets, type_check=type_check) for leaf in plan.inventory.leaves)
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


class _WantedTree(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants of the source's tree."""

    leaves: tuple[_WantedLeaf, ...]
    strict: bool
    """Whether the source has to have all of it."""


class _SourceReply(msgspec.Struct, array_like=True):
    """What the source sends before the arrays' data."""

    values: dict[str, Value]
    """Values by path."""
    aliases: dict[str, str]
    """Paths of arrays that are another array of the source's tree, and the path of that one."""
    lacking: frozenset[str]
    """Paths that a rank wants, and the source lacks."""


class _Distribute:
    """One distribution from one rank, on one rank."""

    def __init__(
        self, transport: Transport, source: int, *, strict: bool, device: str | None, type_check: bool, namespace: str
    ) -> None:
        self.transport, self.source, self.device, self.namespace = transport, source, device, namespace
        self.strict, self.type_check = strict, type_check
        self.global_rank = transport.rank if transport.members is None else transport.members[transport.rank]
        self.like: Any = None
        self.leaves: list[tuple[str, object]] = []
        self.targets: dict[str, ArrayTarget] = {}
        """The arrays that this rank wants, by path."""
        self.sources: dict[str, ArraySource] = {}
        """On the source, its arrays by path."""

    def want(self, like: Any) -> _WantedTree:
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
        return _WantedTree(tuple(wanted), self.strict)

    def reply(self, tree: Any, wanted: Sequence[_WantedTree]) -> _SourceReply:
        """Checks that the source has what is wanted; returns what of it is no array."""
        described = _describe_whole_tree(tree, self.transport, type_check=self.type_check, namespace=self.namespace)
        self.sources = described.sources
        there = described.sources.keys() | described.values.keys()
        values: dict[str, Value] = {}
        lacking: set[str] = set()
        for rank, one in enumerate(wanted):
            lacking |= lacking_leaves([leaf.path for leaf in one.leaves], there, one.strict)
            for leaf in one.leaves:
                if leaf.path in lacking:
                    continue
                _check_wanted(leaf, described, rank)
                if leaf.path in described.values:
                    values[leaf.path] = described.values[leaf.path]
        aliases = {s.path: s.alias_of for s in described.inventory.leaves if s.alias_of is not None and s.view is None}
        return _SourceReply(values, aliases, frozenset(lacking))

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
        log_kept_leaves(like_leaves.keys() & reply.lacking)
        built: dict[str, Any] = {path: target.leaf for path, target in self.targets.items()}
        for path, leaf in self.leaves:
            base = reply.aliases.get(path)
            if leaf is ... or path in reply.lacking:
                built[path] = leaf
            elif path in reply.values:
                built[path] = decode(reply.values[path], path, allow_pickle=not self.type_check)
            elif base is not None and like_leaves.get(base) is leaf:
                built[path] = built[base]
        leaves = (built[path] for path, _ in self.leaves)
        return replace_leaves(self.like, leaves, namespace=self.namespace)


def _check_wanted(wanted: _WantedLeaf, described: DescribedTree, rank: int) -> None:
    """Checks a leaf of the source that a rank wants.

    Raises:
        MismatchError: it is of another shape, dtype or kind.
    """
    source = described.sources.get(wanted.path)
    found = "a value" if source is None else f"{source.spec.dtype} of shape {source.spec.shape}"
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
    strict: bool = True,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    type_check: bool = True,
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
        strict: the tree has every leaf of like. False: like's own leaves stay where it has none, one at least is in
            both, and the log names them.
        device: of the new arrays; by default that of like's, or the host for those on meta.
        type_check: False takes values of unknown kinds: as deep copies, or with `src` as pickles.

    Raises:
        MismatchError: a leaf is missing in the tree, or has another shape or dtype.
        LayoutError: arrays of the source that are not whole.
        TreeError, RankError: as `gather`.
    """
    if src is None:
        return distribute_local(tree, like, strict=strict, device=device, type_check=type_check, namespace=namespace)
    transport = transport_of(group)
    _check_source(src, transport)
    job = _Distribute(transport, src, strict=strict, device=device, type_check=type_check, namespace=namespace)
    wanted = gather_results(transport, "distribute", partial(job.want, like), _WantedTree, hint=HINT)
    answer = partial(job.reply, tree, wanted)
    reply = from_rank(transport, src, "distribute", answer, _SourceReply, hint=HINT)
    by_path = [{leaf.path: leaf for leaf in one.leaves if leaf.path not in reply.lacking} for one in wanted]
    common = {path for path, leaf in by_path[0].items() if all(leaves.get(path) == leaf for leaves in by_path)}
    job.send([by_path[0][path] for path in by_path[0] if path in common], range(transport.size), bucket_bytes)
    for rank, leaves in enumerate(by_path):
        job.send([leaf for path, leaf in leaves.items() if path not in common], [rank], bucket_bytes)
    return job.result(reply)
