"""The plan of a save: what is saved and who writes which part. It is made in the caller's thread.

Rank 0 looks at the path, each rank describes its tree, and each computes the plan of all. One rank plans at once.
Several ranks agree before, in up to three steps of one `Exchange`:

1. Proposals: digests of the inventory (what the rank has to save), of the contents that replicas must share, and of
   pieces that other ranks hold too. Equal inventories need no second step: every rank computes the same global plan. A
   rank that is still saving in the background says so here, so that all ranks skip or refuse the new save, or none
   does.
2. Otherwise one rank of each kind sends its inventory, the coordinator merges them, and all get the global tree, which
   is kept for the next save.
3. Where listed pieces hold the same elements, ranks send digests of these.

The result is `AgreedSave`: the plan, and for several ranks a conversation (`Round.branch`) of this save's own, in which
it is completed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import xxhash

from .._arrays.base import ArraySource
from .._arrays.describe import (
    DescribedTree,
    box_digests,
    content_digests,
    describe_tree,
    json_digest,
    piece_digests,
    place_table_rows,
)
from .._arrays.digests import SMALL_LEAF_NBYTES
from .._arrays.registry import PICKLE_ADVICE, in_parts_if_needed
from .._arrays.stateful import state_tree
from .._core.format.decoding import decode_msgpack
from .._core.format.files import Sidecar
from .._core.format.references import References
from .._core.planning.rank_trees import (
    SPLIT_ADVICE,
    GlobalTree,
    Inventory,
    RankClass,
    check_disjoint,
    merge_rank_trees,
    piece_key,
    readable_key,
)
from .._core.planning.save_plan import GlobalPlan, array_leaves, compute_plan, overlapping_pieces
from .._core.sharding.int_runs import encode_runs
from .._core.sharding.placements import BoxLayout
from .._core.sharding.region import Region
from .._core.tree.value_codec import Value, encode_value
from .._io.comm.collective import NOT_COMMITTED, Conclusion, Exchange, decode_each
from .._io.comm.comm import Comm, members_of
from .._io.comm.rounds import Round
from .._io.os_errors import wrap_write_error, write_errors_wrapped
from .._io.storage.kept_files import ProgressRecorder
from .._io.storage.store import Store
from .._io.timing import Recorder
from ..errors import CheckpointError, MismatchError
from .incremental import BaseCheckpoint, IncrementalSave, KnownFiles, plan_groups, read_base
from .options import (
    CommonOptions,
    FailureSink,
    LineageSource,
    SaveOptions,
    check_files,
    check_metadata,
    read_sidecars,
    sidecar_digests,
)
from .session import PreviousSave
from .shard_writer import IndexContent, PathLook, SaveInfo, first_progress
from .table_deltas import TableDeltas, TableProposal, count_rows_of_ranks, must_be_whole

# what the ranks say ---------------------------------------------------------------------------------------------------

Boxes = tuple[tuple[str, Region], ...]
"""The boxes that several listed pieces of an array hold, as (path, box)."""
BoxDigests = list[tuple[int, bytes]]
"""The digests of boxes, as (number of the box, digest), for each piece of a rank that holds one."""


class RankProposal(msgspec.Struct, array_like=True):
    """A rank's call of save: its arguments, and its tree as digests."""

    path: str
    options: CommonOptions
    inventory: bytes = b""
    """The digest of the rank's inventory."""
    contents: bytes = b""
    """The digest of the contents that replicas must share."""
    cached_plan: str = ""
    """The key of the plan that the rank has kept from the save before."""
    own_values: dict[str, Value] = {}
    running: str = ""
    """The path of a background save that has not ended on this rank; then there is no tree."""
    pieces: dict[bytes, bytes] = {}
    """The digest of the keys, and that of the contents, for each group of pieces that other ranks hold too."""
    metadata: dict[str, bytes] = {}
    """The digests of the values of `custom_metadata`."""
    files: dict[str, str] = {}
    """The checksums of the sidecar files that the rank is given; "" for a path, which rank 0 alone reads."""
    tables: TableProposal = TableProposal()


class Decision(msgspec.Struct, array_like=True):
    """The coordinator's reply to the proposals."""

    save_id: str
    created_ns: int
    key: str
    """The key of the global plan that follows from all inventories."""
    representatives: tuple[int, ...] = ()
    """The ranks that send their contents and their inventory; none where all are equal."""
    plan_is_cached: bool = False
    """Whether every rank has kept that plan: then inventories are not sent."""
    skipped: bool = False
    """Whether nothing is saved, as a rank is still busy with an earlier save and the options say so."""
    conflict: bool = False
    """Whether ranks have different contents in the same pieces: representatives send the digest of each piece then."""
    boxes: Boxes = ()
    """The boxes that ranks compare in one more step; without representatives alone, see `MergedTree`."""
    contents_differ: bool = False
    """Whether ranks with equal inventories have different contents: representatives send all digests then."""
    base: BaseCheckpoint | None = None
    """The checkpoint that an incremental save follows."""
    whole_tables: bool = False
    """Whether all ranks are to describe their trees again, with all tables whole, and to propose these."""


class RankTree(msgspec.Struct, array_like=True):
    """A representative's inventory, unless every rank has its plan, and digests of its contents by path."""

    inventory: Inventory | None
    contents: dict[str, bytes]
    values: dict[str, Value]


class MergedTree(msgspec.Struct, array_like=True):
    """All inventories as one global tree; None where every rank has kept it."""

    global_tree: GlobalTree | None
    boxes: Boxes = ()
    """The boxes that ranks compare in one more step."""
    common: tuple[str, ...] = ()
    """The paths that are in several inventories; none without a global tree."""


class ContestedBoxes(msgspec.Struct, frozen=True):
    """What several listed pieces of an array hold, as (path, box, bytes), for inventories with one key."""

    key: str
    boxes: list[tuple[str, Region, int]]


class CommonPaths(msgspec.Struct, frozen=True):
    """The paths that are in several of the inventories with one key: the others hold the ranks of one inventory."""

    key: str
    paths: frozenset[str]

    def of(self, contents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Returns the digests that ranks with other inventories have too; keys are paths or `piece_key`s."""
        return {key: digest for key, digest in contents.items() if key.partition("\0")[0] in self.paths}


# the agreement --------------------------------------------------------------------------------------------------------


class AgreedSave(msgspec.Struct, frozen=True):
    """A save that is planned, and that all ranks have agreed on."""

    store: Store
    comm: Comm
    recorder: Recorder
    info: SaveInfo
    sources: dict[str, ArraySource]
    """The rank's arrays by path; it is emptied once they are copied."""
    plan: GlobalPlan | None
    """The plan of all ranks; None where this rank could not compute it, which the others learn from its report."""
    error: Exception | None
    """Why the rank could not compute the plan."""
    files: dict[str, bytes]
    """The contents of the sidecar files, on rank 0; it is emptied once they are written."""
    round: Round | None = None
    """The conversation in which several ranks complete the save; None for one rank."""
    lineage: LineageSource | None = None
    look: PathLook | None = None
    """The look at the path of an object store, for one rank: its result is not waited for in the agreement, but must be
    known before anything is sent."""
    record: ProgressRecorder | None = None
    """The progress record of the save, on rank 0; it is to be ended with the save."""
    failures: FailureSink | None = None
    incremental: IncrementalSave | None = None
    held: contextlib.ExitStack | None = None
    """What ends with the save: the lease on that checkpoint."""

    def abandon(self, error: BaseException) -> None:
        """Tells the other ranks that this one leaves the save because of an error."""
        if self.round is not None:
            self.round.abandon(error)

    def report_failure(self, error: BaseException) -> None:
        """Keeps in the run of a manager that the save has ended with an error."""
        if self.failures is not None:
            self.failures.failed(self.info.save_id, self.info.world, self.info.created_ns, error)

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Tells the other ranks, while the body runs, that this one is alive."""
        with self.held or contextlib.nullcontext(), self.round.heartbeats() if self.round else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Abandons the save, and ends its progress record, if the body raises: no writer does so yet."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            if self.record is not None:
                self.record.end()
            if self.held is not None:
                self.held.close()
            self.report_failure(error)
            raise

    def with_shared(self) -> AgreedSave:
        """Returns the save with the files that it shares with the checkpoint before; the tree must not change yet."""
        if self.plan is None or self.incremental is None:
            return self
        with self.recorder.span("compare"):
            shared = self.incremental.find_shared(self.plan, self.sources)
        return msgspec.structs.replace(self, info=msgspec.structs.replace(self.info, shared=shared))

    def looked(self) -> AgreedSave:
        """Returns the save once its look has a result.

        Raises:
            CheckpointError: what is at the path forbids the save.
        """
        if self.look is None:
            return self
        return msgspec.structs.replace(self, info=self.info.replacing(self.look.result()), look=None)

    def with_lineage(self) -> AgreedSave:
        """Returns the save with its lineage: rank 0 reads the run after the agreement, so no rank waits for that."""
        if self.lineage is None or self.plan is None or self.info.content is None:
            return self
        content = msgspec.structs.replace(self.info.content, lineage=self.lineage.lineage(self.info.save_id))
        return msgspec.structs.replace(self, info=msgspec.structs.replace(self.info, content=content))


T = TypeVar("T")
_log = logging.getLogger("treeckpt")
_encode = msgspec.msgpack.encode


def agree(
    store: Store,
    tree: object,
    comm: Comm,
    options: SaveOptions,
    recorder: Recorder,
    previous: PreviousSave,
) -> AgreedSave | None:
    """Plans a save, on which all ranks agree; returns None if it is to be skipped.

    Raises:
        TreeckptError: it cannot be planned, or the ranks cannot agree; on every rank.
    """
    _log.debug("saving to %s, rank %d of %d", store.url, comm.rank, comm.size)
    agreed = None
    with contextlib.ExitStack() as opened:
        exchange = None
        if comm.size > 1:
            topic = f"{store.url} step {options.step}"
            exchange = opened.enter_context(Exchange(comm, topic, path=store.url, hint=NOT_COMMITTED))
        agreement = _Agreement(store, comm, options, recorder, previous, exchange)
        try:
            agreed = agreement.run(tree)
            return agreed
        except BaseException as error:
            if options.failures is not None and previous.error is None:  # else it is that of the save before
                options.failures.failed(agreement.save_id, comm.size, recorder.created_ns, error)
            raise
        finally:
            # of a save that is skipped or fails here no writer ends the record
            if agreed is None and agreement.record is not None:
                agreement.record.end()
            if agreed is None:
                agreement.held.close()


@dataclasses.dataclass
class _Agreement:
    """One rank's part in an agreement. `run` is the procedure; it sets the other fields in the order of the steps."""

    store: Store
    comm: Comm
    options: SaveOptions
    recorder: Recorder
    previous: PreviousSave
    exchange: Exchange | None
    """How several ranks exchange messages; None for one rank."""
    described: DescribedTree = dataclasses.field(init=False)
    metadata: dict[str, Value] = dataclasses.field(default_factory=dict[str, Value])
    files: dict[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])
    file_digests: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    contents: dict[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])
    pieces: list[dict[str, bytes]] = dataclasses.field(default_factory=list[dict[str, bytes]])
    decision: Decision = dataclasses.field(init=False)
    boxes: Boxes = ()
    # on rank 0
    proposals: dict[int, RankProposal] = dataclasses.field(default_factory=dict[int, RankProposal])
    save_id: str = dataclasses.field(default_factory=partial(secrets.token_hex, 8))
    look: PathLook | None = None
    record: ProgressRecorder | None = None
    replaced: str = ""
    """The id of the save that is overwritten, once the look has a result."""
    values: dict[str, Value] = dataclasses.field(init=False)
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    base: BaseCheckpoint | None = None
    deltas: TableDeltas | None = None

    def run(self, tree: object) -> AgreedSave | None:
        # 1. Look at the path, and describe this rank's tree
        error = self.previous.error
        if error is None and not self.previous.running:
            error = self._flatten(tree)
        with self.recorder.span("agree"):
            if self.exchange is not None:
                merged = self._agree(self.exchange, error, tree)
            else:
                self._decide_alone(error, tree)
                merged = None
        return None if self.decision.skipped else self._agreed(merged)

    def _flatten(self, tree: object, *, again: bool = False) -> Exception | None:
        """Looks at the path, on rank 0, and describes this rank's call; returns the error, of which all ranks learn.

        Args:
            again: describes the tree alone, with all tables whole.
        """
        try:
            with self.recorder.span("flatten"):
                # before the tree is described: an object store answers meanwhile
                if self.comm.rank == 0 and not self.options.plan_only and not again:
                    self._begin_look()
                    if self.options.incremental is not None:
                        kept = self.comm.state.get(KnownFiles)
                        self.base = read_base(self.options.incremental, self.store, kept, self.held)
                self._describe(tree, again=again)
        except Exception as failed:
            return wrap_write_error(failed, self.store.url)
        return None

    def _decide_alone(self, error: Exception | None, tree: object) -> None:
        """Decides for one rank; raises the error of the steps before."""
        if error is None and self.deltas is not None and must_be_whole([self.deltas.proposal], self.base):
            error = self._flatten(tree, again=True)
        if error is not None:
            raise error
        self.decision = Decision(self.save_id, self.recorder.created_ns, "", base=self.base)
        if running := self.previous.running:
            self.decision.skipped = self.options.background.busy == "skip"
            if not self.decision.skipped:
                check_idle(self.store.url, {0: running})
            return
        self.decision.key = json_digest(self.described.inventory).hex()
        self._finish_look()
        self.boxes = self._boxes_to_compare(None)
        if self.boxes:
            compare_boxes(self.boxes, {0: self._own_box_digests()})

    def _agree(self, exchange: Exchange, error: Exception | None, tree: object) -> GlobalTree | None:
        """Agrees with the other ranks; returns the trees of all as one, unless every rank has kept it."""
        # 2. Propose; rank 0 decides
        self.decision = exchange.step(partial(self._proposal, error), self._decide, Decision)
        if self.decision.whole_tables:
            error = self._flatten(tree, again=True)
            self.decision = exchange.step(partial(self._proposal, error), self._decide, Decision)
        if self.decision.skipped:
            return None
        # 3. Merge the trees of all ranks, where they differ
        merged = MergedTree(None, self.decision.boxes)
        if self.decision.representatives:
            merged = exchange.step(self._rank_tree, self._merge, MergedTree)
            if merged.global_tree is not None:
                # later saves with this plan send no inventories: these paths say which digests others have too
                self.comm.state.put(CommonPaths(self.decision.key, frozenset(merged.common)))
        # 4. Compare the contents of listed pieces that overlap
        self.boxes = merged.boxes
        if self.boxes:
            exchange.step(lambda: _encode(self._own_box_digests()), self._compare_boxes, type(None))
        return merged.global_tree

    def _begin_look(self) -> None:
        """Begins rank 0's look at the path, which keeps the record of the save."""
        first = first_progress(self.save_id, 0, self.comm.size, self.options.step, self.recorder.created_ns)
        self.record = ProgressRecorder(self.store, first)
        self.look = PathLook(self.store, self.record, overwrite=self.options.overwrite, failures=self.options.failures)

    def _finish_look(self) -> None:
        """Waits for rank 0's look; of one rank not for that of an object store, which goes on beside the next steps."""
        if self.record is not None:
            # the plan of a new tree is not computed yet: this rank writes at most the bytes that it holds
            plan = self._kept_plan()
            self.record.expect(plan.own.nbytes if plan is not None else self.described.nbytes)
        if self.look is not None and not (self.exchange is None and self.store.traits.conditional):
            self.replaced, self.look = self.look.result(), None

    # step 1: proposals ------------------------------------------------------------------------------------------------

    def _read_arguments(self) -> None:
        metadata = check_metadata(self.options.custom_metadata)
        self.metadata = {key: encode_value(value, f"custom_metadata/{key}") for key, value in metadata.items()}
        if (files := self.options.files) is not None:
            if self.comm.rank:
                check_files(files)
            else:
                self.files = read_sidecars(files)
            self.file_digests = sidecar_digests(files, self.files)

    def _describe(self, tree: object, *, again: bool) -> None:
        if not again:
            self._read_arguments()
        rank, namespace, limit = self.comm.rank, self.options.namespace, self.options.max_shard_bytes
        if self.options.incremental is not None:
            self.deltas = TableDeltas(self.comm, self.store.run().url, limit, namespace, whole=again)
        self.described = in_parts_if_needed(
            lambda layouts: describe_tree(
                state_tree(tree, rank=rank, namespace=namespace, world=self.comm.size, layouts=layouts),
                rank=rank,
                members=members_of(self.comm),
                allow_pickle=self.options.allow_pickle,
                advice=PICKLE_ADVICE,
                namespace=namespace,
                tables=True,
                blobs=True,
                deltas=self.deltas,
            )
        )
        self.values = self.described.values

    def _proposal(self, error: Exception | None) -> bytes:
        """This rank's call of save; raises the error of the steps before."""
        if error is not None:
            raise error
        cached = self.comm.state.get(GlobalPlan)
        proposal = RankProposal(
            self.store.url,
            self.options.common,
            cached_plan=cached.key if cached is not None else "",
            running=self.previous.running,
            metadata={key: json_digest(value) for key, value in self.metadata.items()},
            files=self.file_digests,
            tables=self.deltas.proposal if self.deltas is not None else TableProposal(),
        )
        if not self.previous.running:
            compare = self.options.verify_replicas
            proposal.inventory = json_digest(self.described.inventory)
            proposal.own_values = self.described.own_values
            with write_errors_wrapped(self.store.url):
                self.contents = content_digests(self.described, compare)
                self.pieces = piece_digests(self.described, compare, world=self.comm.size)
            proposal.contents = json_digest(sorted(self.contents.items()))
            proposal.pieces = digest_groups(self.pieces)
        return _encode(proposal)

    def _decide(self, received: dict[int, bytes]) -> Conclusion[Decision]:
        """Rank 0's reply to the proposals: refuses, skips, or names the ranks that send more."""
        self.proposals = proposals = decode_each(received, RankProposal)
        check_arguments(proposals)
        decision = Decision(self.save_id, self.recorder.created_ns, plan_key(proposals), base=self.base)
        self.decision = decision
        if self.options.background.busy == "skip" and any(proposal.running for proposal in proposals.values()):
            decision.skipped = True
            return Conclusion(decision)
        check_idle(self.store.url, {rank: each.running for rank, each in proposals.items()})
        if self.options.incremental is not None and must_be_whole((p.tables for p in proposals.values()), self.base):
            decision.whole_tables = True
            return self._conclusion(decision, last=False)
        decision.representatives = representatives(proposals)
        inventories = {proposals[rank].inventory for rank in decision.representatives}
        decision.contents_differ = len(inventories) < len(decision.representatives)
        if not decision.representatives:
            decision.boxes = self._boxes_to_compare(None)
        decision.plan_is_cached = all(each.cached_plan == decision.key for each in proposals.values())
        decision.conflict = bool(conflicting_ranks({rank: each.pieces for rank, each in proposals.items()}))
        self._finish_look()
        return self._conclusion(decision, last=not decision.representatives and not decision.boxes)

    def _conclusion(self, result: T, *, last: bool) -> Conclusion[T]:
        """Rank 0's reply; more messages follow the last one in a branch, unless only the plan is wanted."""
        return Conclusion(result, last, settle=self.options.plan_only)

    def _boxes_to_compare(self, merged: GlobalTree | None) -> Boxes:
        """On rank 0: what listed pieces have in common, small boxes only where large replicas are not compared.

        Args:
            merged: the global tree; None if this rank has kept it, or all inventories are equal.
        """
        contested = self.comm.state.get(ContestedBoxes)
        # the boxes follow from the inventories alone: they are found once for a key
        if contested is None or contested.key != self.decision.key:
            if merged is None and (kept := self._kept_plan()) is not None:
                merged = kept.global_tree
            # only listed pieces can overlap: without them the global tree need not be made here
            if merged is None and any(isinstance(leaf.layout, BoxLayout) for leaf in self.described.inventory.leaves):
                merged = self._replicated_tree()
            contested = ContestedBoxes(self.decision.key, overlapping_pieces(merged) if merged is not None else [])
            self.comm.state.put(contested)
        large = self.options.verify_replicas is not False
        return tuple((path, box) for path, box, nbytes in contested.boxes if large or nbytes <= SMALL_LEAF_NBYTES)

    # step 2: trees ----------------------------------------------------------------------------------------------------
    def _rank_tree(self) -> bytes:
        """This rank's tree, if it is a representative; else nothing."""
        if self.comm.rank not in self.decision.representatives:
            return b""
        contents, common = dict(self.contents), self.comm.state.get(CommonPaths)
        known = self.decision.plan_is_cached and common is not None and common.key == self.decision.key
        if known and common is not None and not self.decision.contents_differ:
            contents = common.of(contents)
        for group in self.pieces if self.decision.conflict else ():
            contents |= group
        inventory = None if self.decision.plan_is_cached else self.described.inventory
        return _encode(RankTree(inventory, contents, self.described.values))

    def _merge(self, received: dict[int, bytes]) -> Conclusion[MergedTree]:
        """Rank 0's reply to the trees: merges them, and compares what replicas must share."""
        trees = {rank: decode_msgpack(message, RankTree) for rank, message in received.items() if message}
        # in reverse, so that the value of the first rank is kept where several have the path
        self.values = {path: value for each in reversed(trees.values()) for path, value in each.values.items()}
        merged = None
        if not self.decision.plan_is_cached:  # shapes are compared before contents
            digests = {rank: proposal.inventory for rank, proposal in self.proposals.items()}
            merged = merge_inventories(digests, trees, self.comm.size)
        compare_contents({rank: each.contents for rank, each in trees.items()})
        boxes = self._boxes_to_compare(merged)
        common = common_paths(trees.values()) if merged is not None else ()
        return self._conclusion(MergedTree(merged, boxes, common), last=not boxes)

    # step 3: overlapping pieces ---------------------------------------------------------------------------------------
    def _own_box_digests(self) -> BoxDigests:
        with write_errors_wrapped(self.store.url):
            return box_digests(self.described, self.boxes, self.options.verify_replicas)

    def _compare_boxes(self, received: dict[int, bytes]) -> Conclusion[None]:
        compare_boxes(self.boxes, decode_each(received, BoxDigests))
        return self._conclusion(None, last=True)

    # the plan, which the comm keeps for the next save of the same tree ------------------------------------------------
    def _kept_plan(self) -> GlobalPlan | None:
        """Returns the plan of the save before, if the inventories have the same key."""
        plan = self.comm.state.get(GlobalPlan)
        return plan if plan is not None and plan.key == self.decision.key else None

    def _replicated_tree(self) -> GlobalTree:
        """Returns the global tree of ranks that all have this one's inventory."""
        ranks = encode_runs(range(self.comm.size))
        return merge_rank_trees([RankClass(ranks, self.described.inventory)], self.comm.size)

    def _plan(self, merged: GlobalTree | None) -> GlobalPlan:
        """Returns the plan, kept or computed; raises LayoutError for pieces that do not make up their array.

        Args:
            merged: as for `_boxes_to_compare`.
        """
        limit, kept, key = self.options.max_shard_bytes, self._kept_plan(), self.decision.key
        # ranks that have all kept the plan have sent no inventories
        tree = merged or (kept.global_tree if kept is not None else self._replicated_tree())
        groups = ()
        if self.options.incremental is not None:
            arrays = kept.arrays if kept is not None else array_leaves(tree)
            groups = plan_groups(key, arrays, tree.world, self.decision.base)
        # the key covers the inventories, and neither the limit nor the groups
        if kept is not None and (kept.max_shard_bytes, kept.groups) == (limit, groups):
            return kept
        plan = compute_plan(key, tree, self.comm.rank, limit, groups)
        self.comm.state.put(plan)
        return plan

    # the result -------------------------------------------------------------------------------------------------------
    def _agreed(self, merged: GlobalTree | None) -> AgreedSave:
        rank, plan, error = self.comm.rank, None, None
        try:
            with self.recorder.span("plan"):
                plan = self._plan(merged)
                place_table_rows(self.described, plan.global_tree, rank)
        except Exception as failed:
            error = wrap_write_error(failed, self.store.url)
        content = None
        if rank == 0:
            # a rank alone makes no proposals
            own_values = {0: self.described.own_values} | {r: each.own_values for r, each in self.proposals.items()}
            listed = tuple(Sidecar(name, len(data), self.file_digests[name]) for name, data in self.files.items())
            content = IndexContent(
                self.metadata,
                self.values,
                tuple((path, r, value) for r, own in own_values.items() for path, value in own.items()),
                self.replaced,
                sidecars=listed,
                references=self._references(plan),
                before=self.base.of_trees(self.decision.key) if self.base is not None else None,
            )
        info = SaveInfo(
            rank, self.comm.size, self.decision.save_id, self.decision.created_ns, self.options.common, content
        )
        return AgreedSave(
            self.store,
            self.comm,
            recorder=self.recorder,
            info=info,
            sources=self.described.sources,
            plan=plan,
            error=error,
            files=self.files,
            round=self.exchange.round.branch(info.save_id) if self.exchange is not None else None,
            lineage=self.options.lineage if rank == 0 else None,
            look=self.look,
            record=self.record,
            failures=self.options.failures,
            incremental=IncrementalSave(self.store, self.comm, self.decision.base, self.deltas)
            if self.options.incremental
            else None,
            held=self.held,
        )

    def _references(self, plan: GlobalPlan | None) -> References | None:
        """Returns what an incremental save records before its files are written; None for any other save."""
        if plan is None or self.deltas is None:
            return None
        since_full = 0 if self.base is None or self.base.full else self.base.references.since_full + 1
        rows = count_rows_of_ranks([self.deltas.proposal, *(each.tables for each in self.proposals.values())])
        return References(plan.key, group=plan.group_runs, since_full=since_full, rows=rows)


# what the coordinator concludes: nothing here waits -------------------------------------------------------------------


def check_arguments(proposals: Mapping[int, RankProposal]) -> None:
    """Raises MismatchError, naming the argument and the rank, for calls of save that contradict each other."""
    first = proposals[0]
    expected = {"path": first.path, **msgspec.structs.asdict(first.options)}
    for rank, proposal in proposals.items():
        if proposal.path == first.path and proposal.options == first.options:
            continue
        found = {"path": proposal.path, **msgspec.structs.asdict(proposal.options)}
        name = next(name for name, value in expected.items() if found[name] != value)
        raise MismatchError(
            first.path,
            expected=f"the same {name} on every rank, as {expected[name]!r} on rank 0",
            found=f"{found[name]!r} on rank {rank}",
            hint="Call save with the same arguments on every rank",
        )
    for rank, proposal in proposals.items():
        for key, content in proposal.metadata.items():
            if first.metadata.get(key) != content:
                raise MismatchError(
                    f"custom_metadata/{key}",
                    expected="on every rank what rank 0 gives, which is kept, or nothing",
                    found=f"another value on rank {rank}" if key in first.metadata else f"it on rank {rank} alone",
                    hint="Give the same on every rank, or on rank 0 alone; what each rank has of its own belongs into "
                    "the tree, in tc.PerRank",
                )
        for name, content in proposal.files.items():
            if name not in first.files or content not in ("", first.files[name]):
                raise MismatchError(
                    f"files/{name}",
                    expected="on every rank what rank 0 gives, which is kept, or nothing",
                    found=f"another content on rank {rank}" if name in first.files else f"it on rank {rank} alone",
                    hint="Give files on rank 0 alone, or the same on every rank",
                )


def check_idle(path: str, running: Mapping[int, str]) -> None:
    """Checks that no rank is still busy with an earlier save.

    Args:
        running: of each rank the path of that save, empty for none.

    Raises:
        CheckpointError: one is; it names the save and the rank.
    """
    for rank, busy in running.items():
        if busy:
            raise CheckpointError(
                path,
                expected="no save under way",
                found=f"that of {busy}, on rank {rank}",
                hint='Save less often, or pass BackgroundOptions(busy="wait") or busy="skip"',
            )


def plan_key(proposals: Mapping[int, RankProposal]) -> str:
    """Returns the key of the plan that follows from all ranks' inventories."""
    return xxhash.xxh3_128_hexdigest(b"".join(proposals[rank].inventory for rank in sorted(proposals)))


def representatives(proposals: Mapping[int, RankProposal]) -> tuple[int, ...]:
    """Returns one rank for each kind of tree, and for each content of shared pieces; none if all ranks are equal."""
    kinds: dict[tuple[bytes, bytes], int] = {}
    for rank, proposal in sorted(proposals.items()):
        kinds.setdefault((proposal.inventory, proposal.contents), rank)
    conflicting = conflicting_ranks({rank: proposal.pieces for rank, proposal in proposals.items()})
    return tuple(sorted({*kinds.values(), *conflicting})) if len(kinds) > 1 or conflicting else ()


def common_paths(trees: Iterable[RankTree]) -> tuple[str, ...]:
    """Returns the paths that are in several of the inventories that representatives have sent."""
    distinct = {json_digest(inventory): inventory for tree in trees if (inventory := tree.inventory) is not None}
    counts = Counter(leaf.path for inventory in distinct.values() for leaf in inventory.leaves)
    return tuple(path for path, count in counts.items() if count > 1)


def digest_groups(groups: Iterable[Mapping[str, bytes]]) -> dict[bytes, bytes]:
    """Returns for each group of pieces, given by key and digest, one digest of the keys and one of the contents."""
    return {json_digest(list(group)): json_digest(list(group.values())) for group in groups}


def conflicting_ranks(pieces: Mapping[int, Mapping[bytes, bytes]]) -> set[int]:
    """Returns ranks that hold the same pieces with different contents by `digest_groups`, one for each content."""
    holders: dict[bytes, dict[bytes, int]] = {}
    for rank, groups in sorted(pieces.items()):
        for keys, contents in groups.items():
            holders.setdefault(keys, {}).setdefault(contents, rank)
    return {rank for contents in holders.values() if len(contents) > 1 for rank in contents.values()}


def compare_contents(contents: Mapping[int, Mapping[str, bytes]]) -> None:
    """Compares digests of what replicas must have in common.

    Raises:
        MismatchError: naming the leaf and the ranks.
        LayoutError: pieces that overlap in part.
    """
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, digests in contents.items():
        for path, content in digests.items():
            first, expected = seen.setdefault(path, (rank, content))
            if content != expected:
                raise MismatchError(
                    readable_key(path),
                    expected=f"the same content on every rank that holds it, as on rank {first}",
                    found=f"another on rank {rank}",
                    hint="Wrap what each rank has of its own in tc.PerRank, and that of which rank 0's counts in "
                    f"tc.FromRank; if they should be equal, find out why not. {SPLIT_ADVICE}",
                )
    check_disjoint([(first, path) for path, (first, _) in seen.items()])


def compare_boxes(boxes: Sequence[tuple[str, Region]], found: Mapping[int, BoxDigests]) -> None:
    """Compares what pieces have in common; raises MismatchError, naming the box and the ranks, where it differs."""
    seen: dict[int, tuple[int, bytes]] = {}
    for rank, own in sorted(found.items()):
        for number, content in own:
            first, expected = seen.setdefault(number, (rank, content))
            if content != expected:
                path, box = boxes[number]
                raise MismatchError(
                    readable_key(piece_key(path, box)),
                    expected=f"the same content in every piece that holds it, as on rank {first}",
                    found=f"another on rank {rank}" if rank != first else "another in a second piece there",
                    hint="Check the offsets and the global shape given to tc.Sharded; if ranks should agree, find out "
                    "why they do not. What each rank has of its own belongs into tc.PerRank",
                )


def merge_inventories(digests: Mapping[int, bytes], trees: Mapping[int, RankTree], world: int) -> GlobalTree:
    """Merges all inventories into one global tree.

    Args:
        digests: of every rank's inventory.
        trees: of at least the lowest rank of each digest.

    Raises:
        MismatchError, LayoutError: ranks contradict each other.
    """
    groups: dict[bytes, list[int]] = {}
    for rank, inventory_digest in sorted(digests.items()):
        groups.setdefault(inventory_digest, []).append(rank)
    classes: list[RankClass] = []
    for ranks in groups.values():
        inventory = trees[ranks[0]].inventory
        assert inventory is not None, "the first rank of each kind sends it"
        classes.append(RankClass(encode_runs(ranks), inventory))
    return merge_rank_trees(classes, world)
