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
import secrets
from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import msgspec

from .._arrays.base import ArraySource
from .._arrays.describe import (
    DescribedTree,
    box_digests,
    content_digests,
    describe_tree,
    piece_digests,
    place_table_rows,
)
from .._arrays.expanded_tree import in_parts_if_needed, state_tree
from .._arrays.samples import SMALL_LEAF_NBYTES
from .._core.format.decoding import decode_msgpack
from .._core.format.save_progress import Progress
from .._core.format.sidecars import Sidecar
from .._core.planning.rank_trees import GlobalTree, digest_of
from .._core.tree.value_codec import Value, encode_value
from .._io.comm.collective import Conclusion, Exchange, decode_each
from .._io.comm.comm import Comm, members_of
from .._io.comm.failures import NOT_COMMITTED
from .._io.comm.rounds import Round
from .._io.os_errors import wrap_write_error, write_errors_wrapped
from .._io.storage.progress_file import ProgressRecorder
from .._io.storage.store import Store
from .._io.timing import Recorder
from .future import PreviousSave
from .messages import (
    BoxDigests,
    Boxes,
    CommonPaths,
    Decision,
    MergedTree,
    RankProposal,
    RankTree,
    check_arguments,
    check_idle,
    common_paths,
    compare_boxes,
    compare_contents,
    conflicting_ranks,
    digest_groups,
    json_digest,
    merge_inventories,
    plan_key,
    representatives,
)
from .options import LineageSource, SaveOptions, check_metadata
from .path_look import PathLook
from .plan_cache import GlobalPlan, cached_plan, contested_boxes, get_plan
from .shard_writer import IndexContent, SaveInfo
from .sidecar_files import check_files, read_sidecars, sidecar_digests


class AgreedSave(msgspec.Struct, frozen=True):
    """A save that is planned, and that all ranks have agreed on."""

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
    files: dict[str, bytes]
    """On rank 0 the contents of the sidecar files; emptied once they are written."""
    round: Round | None = None
    """The conversation in which several ranks complete the save."""
    lineage: LineageSource | None = None
    look: PathLook | None = None
    """Of a save of one rank to an object store: its result is not waited for in the agreement, but must be before
    anything is sent."""
    record: ProgressRecorder | None = None
    """The progress record of the save, on rank 0; it must be ended with the save."""

    def abandon(self, error: BaseException) -> None:
        """Tells the other ranks that this one leaves the save because of an error."""
        if self.round is not None:
            self.round.abandon(error)

    def heartbeats(self) -> contextlib.AbstractContextManager[None]:
        """Tells the other ranks, while the body runs, that this one is alive."""
        return self.round.heartbeats() if self.round is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Abandons the save, and ends its progress record, if the body raises: no writer does so yet."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            if self.record is not None:
                self.record.end()
            raise

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
        finally:
            if agreed is None and agreement.record is not None:
                agreement.record.end()


@dataclasses.dataclass
class _Agreement:
    """One rank's part in an agreement. `run` is the procedure; it sets the other fields in the order of the steps."""

    store: Store
    comm: Comm
    options: SaveOptions
    recorder: Recorder
    previous: PreviousSave
    exchange: Exchange | None
    """Of several ranks."""
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

    def run(self, tree: object) -> AgreedSave | None:
        # 1. Look at the path, and describe this rank's tree
        error = self.previous.error
        if error is None and not self.previous.running:
            try:
                with self.recorder.span("flatten"):
                    if self.comm.rank == 0 and not self.options.plan_only:
                        self._begin_look()
                    self._describe(tree)
            except Exception as failed:
                error = wrap_write_error(failed, self.store.url)
        with self.recorder.span("agree"):
            if self.exchange is not None:
                merged = self._agree(self.exchange, error)
            else:
                self._decide_alone(error)
                merged = None
        return None if self.decision.skipped else self._agreed(merged)

    def _decide_alone(self, error: Exception | None) -> None:
        """Decides for one rank; raises the error of the steps before."""
        if error is not None:
            raise error
        self.decision = Decision(self.save_id, self.recorder.created_ns, "")
        if running := self.previous.running:
            self.decision.skipped = self.options.background.busy == "skip"
            if not self.decision.skipped:
                check_idle(self.store.url, {0: running})
            return
        self.decision.key = digest_of(self.described.inventory).hex()
        self._finish_look()
        self.boxes = self._boxes_to_compare(self.decision.key, None)
        if self.boxes:
            compare_boxes(self.boxes, {0: self._own_box_digests()})

    def _agree(self, exchange: Exchange, error: Exception | None) -> GlobalTree | None:
        """Agrees with the other ranks; returns the trees of all as one, unless every rank has kept it."""
        # 2. Propose; rank 0 decides
        self.decision = exchange.step(partial(self._proposal, error), self._decide, Decision)
        if self.decision.skipped:
            return None
        # 3. Merge the trees of all ranks, where they differ
        merged = MergedTree(None, self.decision.boxes)
        if self.decision.representatives:
            merged = exchange.step(self._rank_tree, self._merge, MergedTree)
            if merged.global_tree is not None:
                self.comm.state.put(CommonPaths(self.decision.key, frozenset(merged.common)))
        # 4. Compare the contents of listed pieces that overlap
        self.boxes = merged.boxes
        if self.boxes:
            exchange.step(lambda: _encode(self._own_box_digests()), self._compare_boxes, type(None))
        return merged.global_tree

    def _begin_look(self) -> None:
        """Begins rank 0's look at the path, which keeps the record of the save."""
        now, step = self.recorder.created_ns, self.options.step
        first = Progress(
            self.save_id,
            0,
            world=self.comm.size,
            step=step,
            phase="write",
            written=0,
            planned=0,
            started_ns=now,
            updated_ns=now,
        )
        self.look = PathLook(self.store, first, overwrite=self.options.overwrite)
        self.record = self.look.record

    def _finish_look(self) -> None:
        """Waits for rank 0's look; of one rank not for that of an object store, which goes on beside the next steps."""
        if self.record is not None:
            plan = cached_plan(self.comm)
            known = plan is not None and plan.key == self.decision.key
            self.record.expect(plan.own.nbytes if known and plan is not None else self.described.nbytes)
        if self.look is not None and not (self.exchange is None and self.store.traits.conditional):
            self.replaced, self.look = self.look.result(), None

    # step 1: proposals ------------------------------------------------------------------------------------------------

    def _describe(self, tree: object) -> None:
        metadata = check_metadata(self.options.custom_metadata)
        self.metadata = {key: encode_value(value, f"custom_metadata/{key}") for key, value in metadata.items()}
        if (files := self.options.files) is not None:
            if self.comm.rank:
                check_files(files)
            else:
                self.files = read_sidecars(files)
            self.file_digests = sidecar_digests(files, self.files)
        rank, namespace = self.comm.rank, self.options.namespace
        self.described = in_parts_if_needed(
            lambda layouts: describe_tree(
                state_tree(tree, rank=rank, namespace=namespace, world=self.comm.size, layouts=layouts),
                rank=rank,
                members=members_of(self.comm),
                allow_pickle=self.options.allow_pickle,
                namespace=namespace,
                tables=True,
                blobs=True,
            )
        )
        self.values = self.described.values

    def _proposal(self, error: Exception | None) -> bytes:
        """This rank's call of save; raises the error of the steps before."""
        if error is not None:
            raise error
        cached = cached_plan(self.comm)
        proposal = RankProposal(
            self.store.url,
            self.options.common,
            cached_plan=cached.key if cached is not None else "",
            running=self.previous.running,
            metadata={key: json_digest(value) for key, value in self.metadata.items()},
            files=self.file_digests,
        )
        if not self.previous.running:
            compare = self.options.verify_replicas
            proposal.inventory = digest_of(self.described.inventory)
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
        decision = Decision(self.save_id, self.recorder.created_ns, plan_key(proposals))
        if self.options.background.busy == "skip" and any(proposal.running for proposal in proposals.values()):
            decision.skipped = True
            return Conclusion(decision)
        check_idle(self.store.url, {rank: each.running for rank, each in proposals.items()})
        decision.representatives = representatives(proposals)
        inventories = {proposals[rank].inventory for rank in decision.representatives}
        decision.contents_differ = len(inventories) < len(decision.representatives)
        if not decision.representatives:
            decision.boxes = self._boxes_to_compare(decision.key, None)
        decision.plan_is_cached = all(each.cached_plan == decision.key for each in proposals.values())
        decision.conflict = bool(conflicting_ranks({rank: each.pieces for rank, each in proposals.items()}))
        self.decision = decision
        self._finish_look()
        return self._conclusion(decision, last=not decision.representatives and not decision.boxes)

    def _conclusion(self, result: T, *, last: bool) -> Conclusion[T]:
        """Rank 0's reply; more messages follow the last one in a branch, unless only the plan is wanted."""
        return Conclusion(result, last, settle=self.options.plan_only)

    def _boxes_to_compare(self, key: str, merged: GlobalTree | None) -> Boxes:
        """On rank 0: what listed pieces have in common, small boxes only where large replicas are not compared."""
        boxes = contested_boxes(self.comm, key, merged, self.described.inventory)
        large = self.options.verify_replicas is not False
        return tuple((path, box) for path, box, nbytes in boxes if large or nbytes <= SMALL_LEAF_NBYTES)

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
        self.values = {path: value for each in reversed(trees.values()) for path, value in each.values.items()}
        merged = None
        if not self.decision.plan_is_cached:  # shapes are compared before contents
            digests = {rank: proposal.inventory for rank, proposal in self.proposals.items()}
            merged = merge_inventories(digests, trees, self.comm.size)
        compare_contents({rank: each.contents for rank, each in trees.items()})
        boxes = self._boxes_to_compare(self.decision.key, merged)
        common = common_paths(trees.values()) if merged is not None else ()
        return self._conclusion(MergedTree(merged, boxes, common), last=not boxes)

    # step 3: overlapping pieces ---------------------------------------------------------------------------------------
    def _own_box_digests(self) -> BoxDigests:
        with write_errors_wrapped(self.store.url):
            return box_digests(self.described, self.boxes, self.options.verify_replicas)

    def _compare_boxes(self, received: dict[int, bytes]) -> Conclusion[None]:
        compare_boxes(self.boxes, decode_each(received, BoxDigests))
        return self._conclusion(None, last=True)

    # the result -------------------------------------------------------------------------------------------------------
    def _agreed(self, merged: GlobalTree | None) -> AgreedSave:
        rank, plan, error = self.comm.rank, None, None
        try:
            with self.recorder.span("plan"):
                inventory, limit = self.described.inventory, self.options.max_shard_bytes
                plan = get_plan(self.comm, self.decision.key, merged, inventory, limit)
                place_table_rows(self.described, plan.global_tree, rank)
        except Exception as failed:
            error = wrap_write_error(failed, self.store.url)
        content = None
        if rank == 0:
            own_values = {0: self.described.own_values} | {r: each.own_values for r, each in self.proposals.items()}
            listed = tuple(Sidecar(name, len(data), self.file_digests[name]) for name, data in self.files.items())
            content = IndexContent(
                self.metadata,
                self.values,
                tuple((path, r, value) for r, own in own_values.items() for path, value in own.items()),
                self.replaced,
                sidecars=listed,
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
        )
