"""What is to be saved, and who writes which part of it: the first half of a save, in the caller's thread.

Every rank says hello with digests: of its inventory (what it brings), of the contents that replicas must share, and of
pieces that other ranks hold too. Equal inventories need no further talk: every rank computes the same global plan.
Otherwise one rank of each kind sends its inventory, the coordinator joins them, and all get the result, which is kept
for the next save. Where listed pieces hold the same elements, ranks then exchange digests of these. A rank that is
still saving in the background says so too, so that all ranks skip or refuse the new save, or none does.

What comes of it is `Agreed`: facts, plans and the name of a conversation of this save's own, in which it is completed.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from ..arrays.base import Source
from ..arrays.describe import SMALL, Brought, box_digests, content_digests, describe_tree, piece_digests, place_tables
from ..arrays.stateful import expand
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
from .commit import SaveInfo
from .messages import (
    Arguments,
    BoxDigests,
    Decision,
    MergedTree,
    RankProposal,
    RankTree,
    check_hellos,
    check_idle,
    clashing_of,
    compare,
    compare_boxes,
    decode_each,
    digest,
    digests_of,
    is_known,
    join,
    key_of,
    tellers_of,
)
from .options import Follow, SaveOptions, follow_of
from .plan_cache import Plans, boxes_of, kept_plans, make_plans

__all__ = ["Agreed", "PreviousSave", "agree"]


class PreviousSave(msgspec.Struct, frozen=True):
    """How it stands with this rank's saves before."""

    lost: Exception | None = None
    """The error of one that nobody has heard of yet: it ends the next."""
    running: str = ""
    """Where one is still going to."""


class Agreed(msgspec.Struct, frozen=True):
    """A save that all ranks have agreed to."""

    facts: SaveInfo
    sources: dict[str, Source]
    """What this rank brings, by path; to be emptied once it is copied."""
    plans: Plans | None
    """None where this rank could not make them: the others have to be told."""
    error: Exception | None
    """Why it could not."""
    talk: Round
    """Where the save is completed."""
    follow: Follow | None = None
    """On rank 0: gives the lineage."""

    def with_lineage(self) -> Agreed:
        """The same with its lineage: rank 0 reads the run after the agreement, so that no rank waits for that."""
        if self.follow is None or self.plans is None:
            return self
        facts = msgspec.structs.replace(self.facts, lineage=self.follow(self.facts.save_id))
        return msgspec.structs.replace(self, facts=facts)


_Word = TypeVar("_Word", bound=CoordinatorReply)
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode
_Boxes = tuple[tuple[str, Region], ...]


def agree(
    store: Store,
    tree: object,
    comm: Comm,
    options: SaveOptions,
    metadata: Mapping[str, object],
    recorder: Recorder,
    standing: PreviousSave,
) -> Agreed | None:
    """Agrees with all ranks on a save; None if it is to be skipped.

    Raises:
        TreeckptError: there is nothing to agree on; on every rank.
    """
    return _Agreement(store, comm, options, recorder, standing).reach(tree, metadata)


class _Agreement:
    """One rank's way to an agreement. The attributes are filled in the order of the protocol."""

    def __init__(self, store: Store, comm: Comm, options: SaveOptions, recorder: Recorder, standing: PreviousSave):
        self.store, self.comm, self.options = store, comm, options
        self.recorder, self.standing = recorder, standing
        self.round = Round(comm, f"{store.url} step {options.step}")
        self.metadata: dict[str, Value] = {}
        self.brought: Brought | None = None
        self.contents: dict[str, bytes] = {}
        self.pieces: list[dict[str, bytes]] = []
        self.error: Exception | None = None
        self.previous = ""
        self.own_values: list[tuple[str, int, Value]] = []
        self.values: dict[str, Value] = {}

    def reach(self, tree: object, metadata: Mapping[str, object]) -> Agreed | None:
        missed = self.round.join()
        if missed is not None:
            raise_faults(_decode(missed, type=CoordinatorReply).faults, self.store.url, self.comm)
        with self.round.heartbeats():
            return self._reach(tree, metadata)

    def _reach(self, tree: object, metadata: Mapping[str, object]) -> Agreed | None:
        with self.recorder.span("flatten"):
            fault = self._bring(tree, metadata)
        with self.recorder.span("agree"):
            heard = self.round.gather(_encode(self._hello(fault)))
            terms = self._terms(decode_each(heard, RankProposal)) if heard is not None else None
            ends = self.options.rehearsal or (terms is not None and terms.skipped)
            last = terms is not None and not terms.tellers and not terms.boxes
            self.terms = self._share(terms, Decision, last=last, ends=ends)
            raise_faults(self.terms.faults, self.store.url, self.comm, cause=self.error)
            if self.terms.skipped:
                return None
            joined = self._tell() if self.terms.tellers else MergedTree((), None, self.terms.boxes)
            if joined.boxes:
                self._compare(joined.boxes)
        return self._agreed(joined.plenum)

    def _fault(self, error: Exception, *, common: bool = False) -> Fault:
        """This rank's failure; those of the system become errors of ours."""
        self.error = wrap_os_error(error, self.store.url)
        return to_fault(self.error, self.comm.rank, common=common)

    def _share(self, message: _Word | None, kind: type[_Word], *, last: bool, ends: bool) -> _Word:
        """The coordinator's word, on every rank.

        Args:
            last: of the agreement.
            ends: with it, all has been said; so it has in any case where there are faults.
        """
        data = _encode(message) if message is not None else None
        failed = message is not None and bool(message.faults)
        return _decode(self.round.share(data, last=last or failed, settle=ends or failed), type=kind)

    def _bring(self, tree: object, metadata: Mapping[str, object]) -> Fault | None:
        if self.standing.lost is not None:
            return self._fault(self.standing.lost)
        if self.standing.running:
            return None
        try:
            for key in metadata:
                check_unicode(key, "custom_metadata")
            self.metadata = {key: encode_value(value, f"custom_metadata/{key}") for key, value in metadata.items()}
            expanded = expand(tree, rank=self.comm.rank, namespace=self.options.namespace)
            self.brought = describe_tree(
                tree if expanded is None else expanded.tree,
                rank=self.comm.rank,
                members=members_of(self.comm),
                allow_pickle=self.options.allow_pickle,
                namespace=self.options.namespace,
                tables=True,
            )
            self.values = self.brought.values
        except Exception as error:
            return self._fault(error)
        return None

    def _hello(self, fault: Fault | None) -> RankProposal:
        inventory = b""
        if self.brought is not None:
            try:
                inventory = digest_of(self.brought.inventory)
                every = self.options.verify_replicas
                if self.comm.size > 1:
                    self.contents = content_digests(self.brought, every=every)
                    self.pieces = piece_digests(self.brought, world=self.comm.size, every=every)
            except Exception as error:
                fault = self._fault(error)
        kept, options = kept_plans(self.comm), self.options
        arguments = Arguments(
            self.store.url,
            options.step,
            options.overwrite,
            options.verify_replicas,
            options.max_shard_bytes,
            options.busy,
            options.rehearsal,
        )
        return RankProposal(
            fault,
            arguments,
            inventory,
            digest(sorted(self.contents.items())),
            kept.key if kept is not None else "",
            self.brought.own_values if self.brought is not None else {},
            self.standing.running,
            digests_of(self.pieces),
            {key: digest(value) for key, value in self.metadata.items()},
        )

    def _terms(self, hellos: dict[int, RankProposal]) -> Decision:
        self.hellos = hellos
        faults = [hello.fault for hello in hellos.values() if hello.fault is not None]
        faults += silent_faults(self.round.lost)
        key = key_of(hellos)
        skipped, tellers, boxes = False, (), ()
        if not faults:
            try:
                check_hellos(hellos)
                skipped = self.options.busy == "skip" and any(hello.running for hello in hellos.values())
                if not skipped:
                    check_idle(hellos)
                    tellers = tellers_of(hellos)
                    boxes = self._boxes(None) if not tellers else ()
                    self._prepare()
            except OSError as error:
                faults.append(self._fault(error))
            except Exception as error:
                faults.append(self._fault(error, common=True))
        self.own_values = [(path, r, v) for r, hello in hellos.items() for path, v in hello.own_values.items()]
        return Decision(
            tuple(faults),
            save_id=secrets.token_hex(8),
            created_ns=self.recorder.created_ns,
            key=key,
            tellers=tellers,
            known=is_known(hellos, key),
            skipped=skipped,
            clash=bool(tellers) and bool(clashing_of({rank: hello.pieces for rank, hello in hellos.items()})),
            boxes=boxes,
        )

    def _boxes(self, joined: GlobalTree | None) -> _Boxes:
        """On rank 0: what listed pieces hold in common, as far as it is to be compared."""
        assert self.brought is not None, "faults were raised before"
        found = boxes_of(self.comm, key_of(self.hellos), joined, self.brought.inventory)
        every = self.options.verify_replicas
        return tuple((path, box) for path, box, nbytes in found if every or nbytes <= SMALL)

    def _compare(self, boxes: _Boxes) -> None:
        """Compares what listed pieces have in common, by digests from every rank."""
        assert self.brought is not None, "faults were raised before"
        own = BoxDigests(None, [])
        try:
            own.digests = box_digests(self.brought, boxes)
        except Exception as error:
            own.fault = self._fault(error)
        messages = self.round.gather(_encode(own))
        result = self._compared(boxes, messages) if messages is not None else None
        result = self._share(result, CoordinatorReply, last=True, ends=self.options.rehearsal)
        raise_faults(result.faults, self.store.url, self.comm, cause=self.error)

    def _compared(self, boxes: _Boxes, messages: dict[int, bytes]) -> CoordinatorReply:
        found = decode_each(messages, BoxDigests)
        faults = [one.fault for one in found.values() if one.fault is not None] + silent_faults(self.round.lost)
        if not faults:
            try:
                compare_boxes(boxes, found)
            except Exception as error:
                faults = [self._fault(error, common=True)]
        return CoordinatorReply(tuple(faults))

    def _prepare(self) -> None:
        """The coordinator makes the directory, and looks for what stands there."""
        if self.options.rehearsal:
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
                    self.previous = read_index(self.store).save_id
            self.store.prepare()
            clear_leftovers(self.store, names, known=self.previous)
        except OSError as error:
            raise CheckpointError(
                self.store.url,
                expected="a directory that can be made and written",
                found=f"{type(error).__name__}: {error}",
                hint=hint_for(error),
            ) from error

    def _tell(self) -> MergedTree:
        message = b""
        if self.comm.rank in self.terms.tellers:
            assert self.brought is not None, "faults were raised before"
            inventory = None if self.terms.known else self.brought.inventory
            pieces = (
                {key: content for group in self.pieces for key, content in group.items()} if self.terms.clash else {}
            )
            message = _encode(RankTree(inventory, self.contents | pieces, self.brought.values))
        heard = self.round.gather(message)
        joined = self._join(heard) if heard is not None else None
        last = joined is not None and not joined.boxes
        joined = self._share(joined, MergedTree, last=last, ends=self.options.rehearsal)
        raise_faults(joined.faults, self.store.url, self.comm, cause=self.error)
        return joined

    def _join(self, heard: dict[int, bytes]) -> MergedTree:
        if self.round.lost:
            return MergedTree(tuple(silent_faults(self.round.lost)), None)
        try:
            told = {rank: _decode(message, type=RankTree) for rank, message in heard.items() if message}
            self.values = {path: value for tale in reversed(told.values()) for path, value in tale.values.items()}
            joined = None if self.terms.known else join(self.hellos, told, self.comm.size)  # shapes before contents
            compare({rank: tale.contents for rank, tale in told.items()})
            return MergedTree((), joined, self._boxes(joined))
        except Exception as error:
            return MergedTree((self._fault(error, common=True),), None)

    def _agreed(self, joined: GlobalTree | None) -> Agreed:
        assert self.brought is not None, "faults were raised before"
        options, terms, first = self.options, self.terms, self.comm.rank == 0
        plans: Plans | None = None
        try:
            with self.recorder.span("plan"):
                plans = make_plans(
                    self.comm, terms.key, joined, self.brought.inventory, max_shard_bytes=options.max_shard_bytes
                )
                place_tables(self.brought, plans.plenum, self.comm.rank)
        except Exception as error:
            self._fault(error)
        facts = SaveInfo(
            self.comm.rank,
            self.comm.size,
            terms.save_id,
            terms.created_ns,
            options.step,
            options.overwrite,
            terms.key,
            options.max_shard_bytes,
            self.previous,
            self.metadata if first else {},
            self.values if first else {},
            tuple(self.own_values) if first else (),
        )
        talk, follow = self.round.branch(terms.save_id), follow_of() if first else None
        return Agreed(facts, self.brought.sources, plans, self.error, talk, follow)
