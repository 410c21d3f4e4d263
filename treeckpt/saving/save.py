"""The save protocol: agree, write, report, commit.

1. Every rank says what it brings, and all agree on one plan (`agreeing`).
2. Every rank writes its shards, durably, under names that hold the save id.
3. Every rank reports. If all did well the coordinator publishes timings and then the index, which is the commit
   (`committing`).
4. Everybody learns how it ended. Any failure makes every rank raise an error that names rank, path and cause; what the
   failed save wrote is deleted, and an earlier index stays valid. A rank that does not learn the end deletes nothing. A
   rank that is interrupted deletes what it wrote, if that cannot be committed any more. A coordinator that is
   interrupted, or can hear nobody, leaves timings that name the failure: so the files of the others are left over.

`save_tree` does all of it in the caller's thread; `background` does steps 2 to 4 beside the training, with the same
functions.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgspec

from ..errors import RankError
from ..io.comm.comm import Comm
from ..io.comm.failures import raise_faults, to_fault
from ..io.storage.store import Store
from ..io.timing import Recorder
from ..reports import SaveReport
from .agree import Agreed, PreviousSave, agree
from .commit import IN_PLACE, Stream, remove, shard_names
from .messages import CommitResult, WriteReport
from .options import SaveOptions
from .plan_cache import Plans
from .shard_writer import InlineWriter, ShardWriter, WriteResult

__all__ = ["complete", "report_of", "save_tree"]


def complete(
    agreed: Agreed, store: Store, comm: Comm, recorder: Recorder, scribe: ShardWriter, wrote: WriteResult
) -> None:
    """Reports what this rank has written, and sees the save to its end.

    Raises:
        TreeckptError: it failed; on every rank.
    """
    talk, plans = agreed.talk, agreed.plans
    try:
        done = WriteReport(wrote.fault, wrote.files, tuple(recorder.spans), socket.gethostname())
        try:
            with recorder.span("gather"):
                heard = talk.gather(msgspec.msgpack.encode(done))
        except RankError as error:
            if comm.rank == 0:  # it alone could commit: what all ranks have written is left over
                failed = msgspec.structs.replace(done, fault=to_fault(error, 0))
                scribe.judge({0: msgspec.msgpack.encode(failed)}, {})
                remove(store, shard_names(agreed.facts, plans) if plans is not None else [])
            raise
        verdict = scribe.judge(heard, talk.lost) if heard is not None else None
        ended = msgspec.msgpack.decode(talk.broadcast(verdict, last=True), type=CommitResult)
        if ended.faults and not ended.in_place and plans is not None:
            remove(store, shard_names(agreed.facts, plans))
    finally:
        scribe.end()
    hints = {"hint": IN_PLACE} if ended.in_place else {}
    raise_faults(ended.faults, store.url, comm, cause=scribe.error, **hints)


def save_tree(
    store: Store,
    tree: object,
    comm: Comm,
    options: SaveOptions,
    metadata: Mapping[str, object],
    standing: PreviousSave | None = None,
) -> SaveReport:
    """Saves a tree; see `treeckpt.save`."""
    recorder = Recorder(comm.rank)
    with recorder.span("save"):
        agreed = agree(store, tree, comm, options, metadata, recorder, standing or PreviousSave())
        assert agreed is not None, "only a save in the background is skipped"
        agreed = agreed.with_lineage()
        here = InlineWriter(store, agreed.facts, agreed.plans, recorder, error=agreed.error)
        try:
            with agreed.talk.heartbeats():
                complete(agreed, store, comm, recorder, here, here.write(lambda plans: source_stream(agreed, plans)))
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                here.withdraw(error)
            raise
    return report_of(agreed, store, recorder)


def source_stream(agreed: Agreed, plans: Plans) -> Stream:
    """The files of a plan straight out of the tree."""
    sources = agreed.sources
    return plans.own.files, lambda number: sources[plans.leaf(number).path].pieces


def report_of(agreed: Agreed, store: Store, recorder: Recorder) -> SaveReport:
    """What a save that went well has written."""
    facts, plans = agreed.facts, agreed.plans
    assert plans is not None, "a rank without plans fails its save"
    return SaveReport(
        store.url,
        facts.save_id,
        facts.step,
        facts.world,
        plans.own.nbytes,
        tuple(shard_names(facts, plans)),
        recorder.seconds,
        tuple(recorder.spans),
    )
