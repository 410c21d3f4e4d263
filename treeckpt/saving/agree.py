"""The agreement of all ranks on what is saved and who writes which part: the first half of a save.

It runs in the caller's thread, in up to three exchanges. In each, every rank sends one message, rank 0 concludes, and
every rank gets its reply, or raises its faults:

1. Proposals: digests of the inventory (what the rank has to save), of the contents that replicas must share, and of
   pieces that other ranks hold too. Equal inventories need no second exchange: every rank computes the same global
   plan. A rank that is still saving in the background says so here, so that all ranks skip or refuse the new save, or
   none does.
2. Otherwise one rank of each kind sends its inventory, the coordinator merges them, and all get the global tree, which
   is kept for the next save.
3. Where listed pieces hold the same elements, ranks send digests of these.

The result is `AgreedSave`: the plan, and a conversation (`Round.branch`) of this save's own, in which it is completed.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from ..arrays.base import ArraySource
from ..arrays.describe import (
    SMALL_LEAF_NBYTES,
    DescribedTree,
    box_digests,
    content_digests,
    describe_tree,
    piece_digests,
    place_table_rows,
)
from ..arrays.stateful import state_tree
from ..core.format.index import INDEX_NAME
from ..core.planning.rank_trees import GlobalTree, digest_of
from ..core.sharding.region import Region
from ..core.tree.structure import check_unicode
from ..core.tree.value_codec import Value, encode_value
from ..errors import CheckpointError, CheckpointExists
from ..io.comm.comm import Comm, members_of
from ..io.comm.failures import CoordinatorReply, Fault, raise_faults, silent_faults, to_fault, wrap_os_error
from ..io.comm.rounds import Round
from ..io.os_errors import hint_for
from ..io.storage.leftovers import clear_leftovers
from ..io.storage.metadata_files import read_index
from ..io.storage.store import Store
from ..io.timing import Recorder
from .commit import IndexContent, SaveInfo
from .future import PreviousSave
from .messages import (
    AgreementReply,
    BoxDigests,
    Decision,
    MergedTree,
    RankProposal,
    RankTree,
    check_arguments,
    check_idle,
    compare_boxes,
    compare_contents,
    conflicting_ranks,
    decode_each,
    digest_groups,
    json_digest,
    merge_inventories,
    plan_key,
    representatives,
)
from .options import LineageSource, SaveOptions
from .plan_cache import GlobalPlan, cached_plan, contested_boxes, get_plan

__all__ = ["AgreedSave", "agree"]


class AgreedSave(msgspec.Struct, frozen=True):
    """A save that all ranks have agreed on."""

    store: Store
    comm: Comm
    recorder: Recorder
    info: SaveInfo
    sources: dict[str, ArraySource]
    """This rank's arrays, by path; emptied once they are copied."""
    plan: GlobalPlan | None
    """None where this rank could not compute it: the others learn that from its report."""
    error: Exception | None
    """Why it could not."""
    round: Round
    """The conversation in which the save is completed."""
    lineage: LineageSource | None = None

    def with_lineage(self) -> AgreedSave:
        """Returns the save with its lineage: rank 0 reads the run after the agreement, so no rank waits for that."""
        if self.lineage is None or self.plan is None or self.info.content is None:
            return self
        content = msgspec.structs.replace(self.info.content, lineage=self.lineage.lineage(self.info.save_id))
        return msgspec.structs.replace(self, info=msgspec.structs.replace(self.info, content=content))


_Reply = TypeVar("_Reply", bound=AgreementReply)
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode
_BoxList = tuple[tuple[str, Region], ...]


def agree(
    store: Store,
    tree: object,
    comm: Comm,
    options: SaveOptions,
    metadata: Mapping[str, object],
    recorder: Recorder,
    previous: PreviousSave,
    lineage: LineageSource | None = None,
) -> AgreedSave | None:
    """Agrees with all ranks on a save; returns None if it is to be skipped.

    Raises:
        TreeckptError: the ranks cannot agree; on every rank.
    """
    agreement = _Agreement(store, comm, options, recorder, previous)
    missed = agreement.round.join()
    if missed is not None:
        raise_faults(_decode(missed, type=CoordinatorReply).faults, store.url, comm)
    with agreement.round.heartbeats():
        return agreement.run(tree, metadata, lineage)


class _Agreement:
    """One rank's part in an agreement. `run` is the procedure; it fills the attributes in the order of the protocol."""

    def __init__(
        self, store: Store, comm: Comm, options: SaveOptions, recorder: Recorder, previous: PreviousSave
    ) -> None:
        self.store, self.comm, self.options = store, comm, options
        self.recorder, self.previous = recorder, previous
        self.round = Round(comm, f"{store.url} step {options.step}")
        self.error: Exception | None = None
        """This rank's own failure."""
        self.metadata: dict[str, Value] = {}
        self.described: DescribedTree | None = None
        self.contents: dict[str, bytes] = {}
        self.pieces: list[dict[str, bytes]] = []
        # on rank 0
        self.proposals: dict[int, RankProposal] = {}
        self.replaced = ""
        """The id of the save that is overwritten."""
        self.values: dict[str, Value] = {}

    def run(self, tree: object, metadata: Mapping[str, object], lineage: LineageSource | None) -> AgreedSave | None:
        # 1. Describe this rank's tree
        with self.recorder.span("flatten"):
            fault = self._describe(tree, metadata)
        with self.recorder.span("agree"):
            # 2. Propose; rank 0 decides
            self.decision = self._exchange(_encode(self._proposal(fault)), self._decide, Decision)
            if self.decision.skipped:
                return None
            # 3. Merge the trees of all ranks, where they differ
            merged = MergedTree((), None, self.decision.boxes)
            if self.decision.representatives:
                merged = self._exchange(self._rank_tree(), self._merge, MergedTree)
            # 4. Compare the contents of listed pieces that overlap
            self.boxes = merged.boxes
            if self.boxes:
                self._exchange(_encode(self._box_digests()), self._compare_boxes, AgreementReply)
        # 5. Compute the plan
        return self._agreed(merged.global_tree, lineage)

    def _fault(self, error: Exception, *, common: bool = False) -> Fault:
        """Keeps this rank's failure, an OSError as one of our errors, and returns it as a message."""
        self.error = wrap_os_error(error, self.store.url)
        return to_fault(self.error, self.comm.rank, common=common)

    def _exchange(
        self, message: bytes, conclude: Callable[[dict[int, bytes]], _Reply], reply_type: type[_Reply]
    ) -> _Reply:
        """Sends this rank's message, and returns what rank 0 concludes from the messages of all ranks.

        Raises:
            TreeckptError: the reply holds faults; on every rank.
        """
        received = self.round.gather(message)
        if received is None:
            reply = _decode(self.round.broadcast(None), type=reply_type)
        else:
            reply = conclude(received)
            failed = bool(reply.faults)
            settle = failed or self.options.plan_only or (isinstance(reply, Decision) and reply.skipped)
            self.round.broadcast(_encode(reply), last=failed or reply.is_last, settle=settle)
        raise_faults(reply.faults, self.store.url, self.comm, cause=self.error)
        return reply

    # exchange 1: proposals --------------------------------------------------------------------------------------------
    def _describe(self, tree: object, metadata: Mapping[str, object]) -> Fault | None:
        if self.previous.error is not None:
            return self._fault(self.previous.error)
        if self.previous.running:
            return None
        try:
            for key in metadata:
                check_unicode(key, "custom_metadata")
            self.metadata = {key: encode_value(value, f"custom_metadata/{key}") for key, value in metadata.items()}
            self.described = describe_tree(
                state_tree(tree, rank=self.comm.rank, namespace=self.options.namespace),
                rank=self.comm.rank,
                members=members_of(self.comm),
                allow_pickle=self.options.allow_pickle,
                namespace=self.options.namespace,
                tables=True,
            )
            self.values = self.described.values
        except Exception as error:
            return self._fault(error)
        return None

    def _proposal(self, fault: Fault | None) -> RankProposal:
        inventory = b""
        if self.described is not None:
            try:
                inventory = digest_of(self.described.inventory)
                every = self.options.verify_replicas
                if self.comm.size > 1:
                    self.contents = content_digests(self.described, every=every)
                    self.pieces = piece_digests(self.described, world=self.comm.size, every=every)
            except Exception as error:
                fault = self._fault(error)
        cached = cached_plan(self.comm)
        return RankProposal(
            fault,
            self.store.url,
            self.options.common,
            inventory,
            json_digest(sorted(self.contents.items())),
            cached.key if cached is not None else "",
            self.described.own_values if self.described is not None else {},
            self.previous.running,
            digest_groups(self.pieces),
            {key: json_digest(value) for key, value in self.metadata.items()},
        )

    def _decide(self, received: dict[int, bytes]) -> Decision:
        """Rank 0's reply to the proposals: refuses, skips, or names the ranks that send more."""
        self.proposals = proposals = decode_each(received, RankProposal)
        faults = [proposal.fault for proposal in proposals.values() if proposal.fault is not None]
        faults += silent_faults(self.round.lost)
        decision = Decision((), secrets.token_hex(8), self.recorder.created_ns, plan_key(proposals))
        if not faults:
            try:
                check_arguments(proposals)
                if self.options.busy == "skip" and any(proposal.running for proposal in proposals.values()):
                    decision.skipped = True
                    return decision
                check_idle(proposals)
                decision.representatives = representatives(proposals)
                if not decision.representatives:
                    decision.boxes = self._boxes_to_compare(decision.key, None)
                decision.plan_is_cached = all(each.cached_plan == decision.key for each in proposals.values())
                decision.conflict = bool(conflicting_ranks({rank: each.pieces for rank, each in proposals.items()}))
                self._prepare_directory()
            except Exception as error:
                faults.append(self._fault(error, common=not isinstance(error, OSError)))
        decision.faults = tuple(faults)
        return decision

    def _boxes_to_compare(self, key: str, merged: GlobalTree | None) -> _BoxList:
        """On rank 0: what listed pieces have in common, small boxes only unless all replicas are to be compared."""
        assert self.described is not None, "faults were raised before"
        boxes = contested_boxes(self.comm, key, merged, self.described.inventory)
        every = self.options.verify_replicas
        return tuple((path, box) for path, box, nbytes in boxes if every or nbytes <= SMALL_LEAF_NBYTES)

    def _prepare_directory(self) -> None:
        """On rank 0: makes the directory, refuses or notes a checkpoint that is there, and removes leftovers."""
        if self.options.plan_only:
            return
        try:
            names = self.store.sizes()
            if INDEX_NAME in names:
                if not self.options.overwrite:
                    raise CheckpointExists(
                        self.store.url,
                        expected="no checkpoint",
                        found="one",
                        hint="Save to another path, or pass overwrite=True",
                    )
                with contextlib.suppress(CheckpointError):
                    # what cannot be read can be overwritten; its shards stay for rebuild-index until then
                    self.replaced = read_index(self.store).save_id
            self.store.prepare()
            clear_leftovers(self.store, names, known=self.replaced)
        except OSError as error:
            raise CheckpointError(
                self.store.url,
                expected="a directory that can be made and written",
                found=f"{type(error).__name__}: {error}",
                hint=hint_for(error),
            ) from error

    # exchange 2: trees ------------------------------------------------------------------------------------------------
    def _rank_tree(self) -> bytes:
        """This rank's tree, if it is a representative; else nothing."""
        if self.comm.rank not in self.decision.representatives:
            return b""
        assert self.described is not None, "faults were raised before"
        contents = dict(self.contents)
        for group in self.pieces if self.decision.conflict else ():
            contents |= group
        inventory = None if self.decision.plan_is_cached else self.described.inventory
        return _encode(RankTree(inventory, contents, self.described.values))

    def _merge(self, received: dict[int, bytes]) -> MergedTree:
        """Rank 0's reply to the trees: merges them, and compares what replicas must share."""
        if self.round.lost:
            return MergedTree(tuple(silent_faults(self.round.lost)), None)
        try:
            trees = {rank: _decode(message, type=RankTree) for rank, message in received.items() if message}
            self.values = {path: value for each in reversed(trees.values()) for path, value in each.values.items()}
            merged = None
            if not self.decision.plan_is_cached:  # shapes are compared before contents
                digests = {rank: proposal.inventory for rank, proposal in self.proposals.items()}
                merged = merge_inventories(digests, trees, self.comm.size)
            compare_contents({rank: each.contents for rank, each in trees.items()})
            return MergedTree((), merged, self._boxes_to_compare(self.decision.key, merged))
        except Exception as error:
            return MergedTree((self._fault(error, common=True),), None)

    # exchange 3: overlapping pieces -----------------------------------------------------------------------------------
    def _box_digests(self) -> BoxDigests:
        assert self.described is not None, "faults were raised before"
        try:
            return BoxDigests(None, box_digests(self.described, self.boxes))
        except Exception as error:
            return BoxDigests(self._fault(error), [])

    def _compare_boxes(self, received: dict[int, bytes]) -> AgreementReply:
        """Rank 0's reply to the digests of boxes."""
        found = decode_each(received, BoxDigests)
        faults = [each.fault for each in found.values() if each.fault is not None]
        faults += silent_faults(self.round.lost)
        if not faults:
            try:
                compare_boxes(self.boxes, found)
            except Exception as error:
                faults = [self._fault(error, common=True)]
        return AgreementReply(tuple(faults))

    # the result -------------------------------------------------------------------------------------------------------
    def _agreed(self, merged: GlobalTree | None, lineage: LineageSource | None) -> AgreedSave:
        assert self.described is not None, "faults were raised before"
        rank, plan = self.comm.rank, None
        try:
            with self.recorder.span("plan"):
                inventory, limit = self.described.inventory, self.options.max_shard_bytes
                plan = get_plan(self.comm, self.decision.key, merged, inventory, limit)
                place_table_rows(self.described, plan.global_tree, rank)
        except Exception as error:
            self._fault(error)
        content = None
        if rank == 0:
            own_values = [(path, r, v) for r, each in self.proposals.items() for path, v in each.own_values.items()]
            content = IndexContent(self.metadata, self.values, tuple(own_values), self.replaced)
        info = SaveInfo(
            rank, self.comm.size, self.decision.save_id, self.decision.created_ns, self.options.common, content
        )
        return AgreedSave(
            self.store,
            self.comm,
            self.recorder,
            info,
            self.described.sources,
            plan,
            self.error,
            self.round.branch(self.decision.save_id),
            lineage if rank == 0 else None,
        )
