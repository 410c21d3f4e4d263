"""The save protocol: agree, write, report, commit.

1. All ranks agree on one plan (`agree`). Rank 0 writes the progress record of the save, which stands before any rank
   creates a shard, and then looks at the path.
2. Every rank writes its shards, durably, under names that hold the save id; then rank 0 writes the sidecar files so.
3. Every rank reports. If all have written, the coordinator waits until nothing is about to take the index away or to
   replace it (`_io.storage.deletions`), and publishes the index, which is the commit, and the
   timings: before it on a file system, at the same time in an object store.
   A save of one rank to an object store looks at the path while its upload begins; no byte is sent before the answer.
4. Every rank receives the result. Any failure makes every rank raise an error that names rank, path and cause; what the
   failed save wrote is deleted, and an earlier index stays valid. A rank that does not receive the result deletes
   nothing. A rank that is interrupted deletes what it wrote, if that cannot be committed any more. A coordinator that
   is interrupted, or cannot reach the other ranks, leaves timings that name the failure: so the files of the others
   count as left over.
   Where ranks do not see each other's files, each disk is made ready before rank 0 publishes the index, and gets it
   then: see `node_local`.
5. The progress record is removed, and the timings get the time of the commit. Where `save_tree` saves to an object
   store, threads do so after it has returned, for which the end of the process waits.

`save_tree` does all of it in the caller's thread; `background` does steps 2 to 4 beside the training, with the same
functions.
"""

from __future__ import annotations

import contextlib
import logging
import socket

import msgspec

from .._core.format.decoding import decode_msgpack
from .._core.format.files import stored_name
from .._core.format.index import INDEX_NAME
from .._io.comm.collective import raise_faults, silent_faults, to_fault
from .._io.comm.comm import Comm
from .._io.os_errors import wrap_write_error
from .._io.public_calls import gc_paused
from .._io.storage.plain_names import free_names
from .._io.storage.store import Store
from .._io.timing import Recorder
from .._threads import ThreadPool
from ..errors import CheckpointExists, RankError
from ..reports import SaveReport
from .agree import AgreedSave, agree
from .committed_files import PUBLISHED_HINT, UNANSWERED_HINT, remove_files
from .node_local import commit_on_disks
from .options import SaveOptions
from .session import PreviousSave, Session
from .shard_writer import (
    CommitResult,
    InlineWriter,
    ShardWriter,
    TreeShardSource,
    WriteReport,
    shard_names,
    written_names,
)

_log = logging.getLogger("treeckpt")
UNPUBLISHED_HINT = (
    "The checkpoint is committed, on the disks of the other ranks; the next save, resume or clean-up of all ranks there"
    " publishes the index on those of the ranks named"
)
"""The hint of an error where a disk of several lacks the index of a committed save."""
SIDECAR_WRITERS = 8
"""The number of sidecar files that are written at a time: to an object store each takes a request."""


def save_tree(store: Store, tree: object, comm: Comm, options: SaveOptions) -> SaveReport:
    """Saves a tree; see `treeckpt.save`."""
    session = comm.state.get(Session)
    previous = PreviousSave() if session is None else session.previous("wait", None)
    recorder = Recorder(comm.rank)
    with gc_paused(), recorder.span("save"):
        agreed = agree(store, tree, comm, options, recorder, previous)
        assert agreed is not None, "only a save in the background is skipped"
        with agreed.given_up_on_error():
            if agreed.plan is None:  # the error is noted at the path, unless that is refused
                agreed = agreed.looked()
            agreed = agreed.with_lineage().with_shared()
            plan = agreed.plan
            source = TreeShardSource(plan, agreed.sources, agreed.info.shared) if plan is not None else None
            writer = InlineWriter(
                store,
                agreed.info,
                plan,
                recorder,
                source,
                error=agreed.error,
                waits=False,
                look=agreed.look,
                record=agreed.record,
            )
        try:
            with agreed.heartbeats():
                ended = complete(agreed, writer, writer.write(on_interrupt=agreed.abandon))
        except BaseException as error:
            agreed.abandon(error)  # before the files are removed, so that the others wait no longer
            if not isinstance(error, Exception):  # Ctrl-C
                writer.withdraw(error)
            agreed.report_failure(error)
            raise
    return save_report(agreed, ended)


def complete(agreed: AgreedSave, writer: ShardWriter, report: WriteReport) -> CommitResult:
    """Reports what this rank has written, as `ShardWriter.write` returned it, and completes the save on all ranks.

    Raises:
        TreeckptError: the save failed; on every rank.
    """
    store, recorder = agreed.store, agreed.recorder
    # after the removal: as long as a record stands, nobody takes the files for those of a save that has ended
    with contextlib.ExitStack() as opened:
        opened.callback(writer.end)
        if agreed.incremental is not None and agreed.plan is not None and report.fault is None:
            report = agreed.incremental.compare(agreed.plan, report)
        report = _write_sidecars(agreed, writer, report)
        told = msgspec.structs.replace(report, timings=tuple(recorder.spans), host=socket.gethostname(), hashes={})
        ended = _commit(agreed, writer, told, opened)
        if ended.faults and not ended.in_place:
            remove_files(store, written_names(agreed.info, agreed.plan))
    if agreed.incremental is not None and agreed.plan is not None:
        agreed.incremental.keep(agreed.plan, agreed.info.save_id, report, ended)
    if ended.faults:
        in_place = UNANSWERED_HINT if store.traits.far else UNPUBLISHED_HINT if ended.disks else PUBLISHED_HINT
        hint = {"hint": in_place} if ended.in_place else {}
        raise_faults(ended.faults, store.url, agreed.comm.size, cause=writer.error, **hint)
    return ended


def _commit(agreed: AgreedSave, writer: ShardWriter, report: WriteReport, opened: contextlib.ExitStack) -> CommitResult:
    """Has rank 0 commit the save when all ranks have reported; returns the result, on every rank."""
    talk = agreed.round
    try:
        with agreed.recorder.span("gather"):
            messages = talk.gather(msgspec.msgpack.encode(report)) if talk is not None else None
    except RankError as error:
        if agreed.comm.rank == 0:  # it alone could commit: what all ranks have written is left over
            report = msgspec.structs.replace(report, fault=to_fault(error, 0))
            writer.commit({0: report})
            remove_files(agreed.store, written_names(agreed.info, agreed.plan))
        raise
    if talk is None:
        return writer.commit({0: report})
    reports = result = None
    if messages is not None:
        reports = {rank: decode_msgpack(message, WriteReport) for rank, message in messages.items()}
        result = writer.commit(reports, silent_faults(talk.lost))
    last = result is None or not result.apart
    encoded = msgspec.msgpack.encode(result) if result is not None else None
    ended = decode_msgpack(talk.broadcast(encoded, last=last), CommitResult)
    return commit_on_disks(agreed, writer, reports, opened) if ended.apart else ended


def _write_sidecars(agreed: AgreedSave, writer: ShardWriter, report: WriteReport) -> WriteReport:
    """Writes the sidecar files durably, on rank 0; returns the report, with the fault if that fails."""
    if not agreed.files or report.fault is not None:
        return report

    store, files = agreed.store, agreed.files

    def write(name: str) -> None:
        stored = stored_name(agreed.info.save_id, name)  # which no other save uses
        store.publish(stored, files[name], replace=True)
        if name in free:
            with contextlib.suppress(CheckpointExists):  # that of another save at this moment: see `give_plain_names`
                store.publish_copy(name, files[name], of=stored)

    try:
        entries = store.entries()
        free = free_names(store, entries, files)
        if INDEX_NAME in entries:  # the copies come after the index that replaces this one
            free.clear()
        nbytes = sum(map(len, files.values()))
        with agreed.recorder.span("write files", nbytes), ThreadPool(SIDECAR_WRITERS, "treeckpt-files") as pool:
            list(pool.map(write, files))
    except Exception as failed:
        writer.error = wrap_write_error(failed, agreed.store.url)
        return msgspec.structs.replace(report, fault=to_fault(writer.error, agreed.info.rank))
    agreed.files.clear()
    return report


def save_report(agreed: AgreedSave, ended: CommitResult) -> SaveReport:
    """Returns the report of a save that has succeeded, which the log has too."""
    info, plan = agreed.info, agreed.plan
    assert plan is not None, "a rank without a plan fails its save"
    shared = sum(file.nbytes for file in info.shared)
    report = SaveReport(
        agreed.store.url,
        info.save_id,
        step=info.options.step,
        world=info.world,
        nbytes=plan.own.nbytes - shared,
        shared_nbytes=shared,
        files=tuple(shard_names(info, plan)),
        seconds=agreed.recorder.seconds,
        spans=tuple(agreed.recorder.spans),
        disks=ended.disks,
    )
    _log.debug("%s", report)
    return report
