"""The commit of a save whose ranks see different directories at its path, as on the private disks of several hosts.

Rank 0 finds this out when all have written, at its look at the path, where shards of other ranks are not there: a save
to one disk takes no message and no request for it. The ranks go on in the conversation of the save:

1. *View*. Every rank writes its progress record, and then lists the directory. Of two ranks on one disk at least one
   sees the other: each has written a file before it looks, and a rank that has just written there gets no older listing
   from the cache of a network file system. Ranks that see each other, directly or by others, are on one disk. If all
   are, files are missing indeed, and the save fails. The lowest rank of each disk is its leader.
2. *Prepare*. Rank 0 makes the index, with the disks, writes it durably as `prepared.<save id>.json`, and sends it with
   the timings and the sidecar files. Every other leader waits for locks on its disk, looks at what is there, as rank 0
   did at the beginning, checks the shards of its ranks, and writes all this durably too.
3. *Commit*. If all are ready, rank 0 publishes the index on its disk. This is the commit of the save on all disks.
4. *Publish*. Every other leader renames its prepared index to `index.json`.

A save that dies before the commit leaves no index of it on any disk, one that dies behind it leaves one on the first
disk, and on the others the shards with a prepared index. What that is, one disk alone does not say: such files stay,
whoever cleans up there, on the first disk too, so that it can be asked. A call of all ranks that sees several disks
says it: it publishes the prepared index of a save of which another disk has the index, and removes the files of any
other (`_runs.disk_cleanup`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence

import msgspec

from .._core.format.decoding import decode_msgpack
from .._core.format.files import MAX_SIDECAR_NBYTES, parse_progress_name, prepared_name, stored_name
from .._core.format.index import INDEX_NAME, decode_index
from .._core.format.records import Disk
from .._core.format.shard_header import parse_shard_name
from .._core.format.timings import timings_name
from .._core.sharding.int_runs import Runs, decode_runs, encode_runs
from .._core.text import ranks_text
from .._io.comm.collective import Fault, silent_faults, to_fault
from .._io.os_errors import wrap_write_error
from .._io.storage.deletions import clear_leftovers, discard_prepared, prepared_saves, unlocked_sizes
from .._io.storage.kept_files import ProgressRecorder
from .._io.storage.plain_names import free_names, give_plain_names, take_plain_names
from ..errors import CheckpointError, CheckpointExists, RankError
from .agree import AgreedSave
from .committed_files import check_files_exist, remove_files, remove_replaced
from .shard_writer import CommitResult, InlineWriter, PathLook, ShardWriter, WriteReport, first_progress, written_names

_log = logging.getLogger("treeckpt")


class _ReportedDisks(msgspec.Struct, frozen=True):
    """The disks that the log has named, of the saves of a comm."""

    disks: tuple[Disk, ...]


class DiskView(msgspec.Struct, array_like=True):
    """What one rank sees at the path."""

    fault: Fault | None
    ranks: Runs = ()
    """The ranks of the save of which it sees files."""


class DiskOrder(msgspec.Struct, array_like=True):
    """What rank 0 has all leaders do: prepare, where there is an index; else publish what they have prepared."""

    ended: CommitResult | None = None
    """The result of the save, which ends it: then nothing is to be done."""
    disks: tuple[Disk, ...] = ()
    index: bytes = b""
    timings: bytes = b""
    sidecars: dict[str, bytes] = {}


def commit_on_disks(
    agreed: AgreedSave, writer: ShardWriter, reports: Mapping[int, WriteReport] | None, opened: contextlib.ExitStack
) -> CommitResult:
    """Commits a save of which rank 0 does not see the files of all ranks; on every rank.

    Args:
        reports: of all ranks, on rank 0.
        opened: ends the record of this rank when the save has ended.
    """
    side = _RankSide(agreed, opened)
    if reports is None:
        return side.follow()
    return _Coordinator(side, reports).lead(writer)


class _RankSide:
    """What each rank does on its disk."""

    def __init__(self, agreed: AgreedSave, opened: contextlib.ExitStack) -> None:
        assert agreed.round is not None, "a rank alone sees all its files"
        self.agreed, self.round = agreed, agreed.round
        info = agreed.info
        first = first_progress(info.save_id, info.rank, info.world, info.options.step, time.time_ns())
        self.record = ProgressRecorder(agreed.store, first, at_once=True)
        opened.callback(self.record.end)
        self._order = DiskOrder()
        self._replaced = ""

    def view(self) -> DiskView:
        """Writes the record, and looks whose files are there."""
        agreed = self.agreed
        try:
            agreed.store.prepare()
            self.record.begin()
            names = agreed.store.sizes()
        except Exception as error:
            return DiskView(to_fault(wrap_write_error(error, agreed.store.url), agreed.info.rank))
        ranks = set[int]()
        for name in names:
            if (shard := parse_shard_name(name)) is not None and shard[0] == agreed.info.save_id:
                ranks.add(shard[1])
            elif (progress := parse_progress_name(name)) is not None and progress[1] == agreed.info.save_id:
                ranks.add(progress[0])
        return DiskView(None, encode_runs(sorted(ranks)))

    def follow(self) -> CommitResult:
        """Does what rank 0 says, on a rank other than 0, until the save has ended."""
        reply: DiskView | None = self.view()
        while True:
            self.round.gather(msgspec.msgpack.encode(reply))
            order = decode_msgpack(self.round.broadcast(None), DiskOrder)
            if order.ended is not None:
                if order.ended.faults and not order.ended.in_place:
                    self._undo()
                return order.ended
            reply = DiskView(self._carry_out(order))

    def _carry_out(self, order: DiskOrder) -> Fault | None:
        """Prepares or publishes, on a leader; returns its fault."""
        rank = self.agreed.info.rank
        try:
            if order.index:
                self._order = order
            if any(disk.leader == rank for disk in self._order.disks):
                self._prepare(order) if order.index else self._publish()
        except Exception as caught:
            error = wrap_write_error(caught, self.agreed.store.url)
            return to_fault(error, rank, common=isinstance(error, CheckpointExists))
        return None

    def _prepare(self, order: DiskOrder) -> None:
        """Makes all durable that the checkpoint has on this disk."""
        store, info = self.agreed.store, self.agreed.info
        index = decode_index(order.index)
        look = PathLook(store, self.record, overwrite=info.options.overwrite)
        # deletions and repairs that have not seen this rank's record have ended
        names = look.checked(unlocked_sizes(store))
        if prepared_name(info.save_id) in names:
            raise CheckpointError(
                store.url,
                expected=f"one of the {len(order.disks)} disks on which the ranks see different files",
                found="what a rank of another one has just written",
                hint="The file system shows what other hosts write too late to save there",
            )
        self._replaced = look.clear(names)
        check_files_exist(store, index, store.sizes(), info.rank)
        free_names(store, store.entries(), order.sidecars)
        for name, data in order.sidecars.items():
            store.publish(stored_name(info.save_id, name), data, replace=True)
        store.publish(timings_name(info.save_id), order.timings, replace=True)
        store.publish(prepared_name(info.save_id), order.index, replace=True)

    def _publish(self) -> None:
        store, info = self.agreed.store, self.agreed.info
        take_plain_names(store, store.sizes(), info.save_id)
        store.rename(prepared_name(info.save_id), INDEX_NAME, replace=info.options.overwrite)
        store.sync()
        give_plain_names(store, info.save_id)
        with contextlib.suppress(Exception):  # it is committed: the rest may fail without harm
            if self._replaced:
                remove_replaced(store, self._replaced)
        self.clear()

    def clear(self) -> None:
        """Removes what earlier saves have left on the disk, once this one is committed; what fails is left."""
        store = self.agreed.store
        with contextlib.suppress(Exception):  # the rest may fail without harm
            names = store.sizes().keys() - {self.record.name}
            save_id = self.agreed.info.save_id
            discard_prepared(store, names, [other for other in prepared_saves(names) if other != save_id])
            clear_leftovers(store, names, known=save_id)

    def _undo(self) -> None:
        """Removes what was prepared for a save that has failed; the shards of each rank are removed by its caller."""
        info, order = self.agreed.info, self._order
        if any(disk.leader == info.rank for disk in order.disks):
            names = [stored_name(info.save_id, name) for name in order.sidecars]
            remove_files(self.agreed.store, [*names, timings_name(info.save_id), prepared_name(info.save_id)])


class _Coordinator:
    """What rank 0 does for all disks; it is the `DisksToPrepare` of the writer that publishes the index.

    Args:
        reports: of all ranks.
    """

    def __init__(self, side: _RankSide, reports: Mapping[int, WriteReport]) -> None:
        self._side, self._round, self._reports = side, side.round, reports
        self.disks: tuple[Disk, ...] = ()

    def lead(self, writer: ShardWriter) -> CommitResult:
        agreed = self._side.agreed
        views, faults = self._gather(self._side.view())
        if not faults:
            disks = find_disks({rank: view.ranks for rank, view in views.items()}, self._reports)
            self.disks = disks if len(disks) > 1 else ()
        # here, not in the writer process: the other disks are prepared in between
        inline = InlineWriter(
            agreed.store, agreed.info, agreed.plan, agreed.recorder, record=self._side.record, others=self
        )
        ended = inline.commit(self._reports, faults)
        writer.error = inline.error
        if self.disks and not (ended.faults and ended.in_place):
            remove_files(agreed.store, [prepared_name(agreed.info.save_id)])
        if self.disks and not ended.faults:
            ended = CommitResult(tuple(self._order(DiskOrder())), True, disks=self.disks)
            self._log_disks()
            self._side.clear()
        try:
            self._round.broadcast(msgspec.msgpack.encode(DiskOrder(ended)), last=True)
        except RankError:
            if ended.faults and not ended.in_place:
                remove_files(agreed.store, written_names(agreed.info, agreed.plan))
            raise
        return ended

    def _log_disks(self) -> None:
        """Logs on which disks the checkpoint lies, once, and again where they change."""
        state, reported = self._side.agreed.comm.state, _ReportedDisks(self.disks)
        if state.get(_ReportedDisks) != reported:
            state.put(reported)
            _log.warning(
                "%s: the ranks see %d different directories there, and each has the shards of its ranks alone: %s. If "
                "one that all hosts share was meant, it is not mounted on all of them%s",
                self._side.agreed.store.url,
                len(self.disks),
                "; ".join(f"host {disk.host}, {ranks_text(disk.ranks)}" for disk in self.disks),
                ". Incremental saves share no files there: each writes all"
                * (self._side.agreed.incremental is not None),
            )

    def prepare(self, index: bytes, timings: bytes) -> Sequence[Fault]:
        """Has the other disks prepared; returns the faults of those that are not ready."""
        if not self.disks:
            return ()
        store, info = self._side.agreed.store, self._side.agreed.info
        names = [sidecar.name for sidecar in info.content.sidecars] if info.content is not None else []
        sidecars = {name: store.read(stored_name(info.save_id, name), limit=MAX_SIDECAR_NBYTES) for name in names}
        store.publish(prepared_name(info.save_id), index, replace=True)
        return self._order(DiskOrder(None, self.disks, index, timings, sidecars))

    def _order(self, order: DiskOrder) -> list[Fault]:
        """Sends an order to all ranks; returns the faults of those that could not carry it out."""
        self._round.broadcast(msgspec.msgpack.encode(order))
        return self._gather(DiskView(None))[1]

    def _gather(self, own: DiskView) -> tuple[dict[int, DiskView], list[Fault]]:
        """Returns the replies of all ranks, and the faults of those that have failed or are silent."""
        try:
            messages = self._round.gather(msgspec.msgpack.encode(own))
        except RankError as error:
            return {}, [to_fault(error, 0)]
        assert messages is not None, "this is rank 0"
        replies = {rank: decode_msgpack(message, DiskView) for rank, message in messages.items()}
        faults = [reply.fault for reply in replies.values() if reply.fault is not None]
        return replies, [*faults, *silent_faults(self._round.lost)]


def find_disks(seen: Mapping[int, Runs], reports: Mapping[int, WriteReport]) -> tuple[Disk, ...]:
    """Returns the disks of all ranks, from what each has seen: ranks are on one disk if either has seen the other."""
    lowest = {rank: rank for rank in seen}

    def first_of(rank: int) -> int:
        while lowest[rank] != rank:
            lowest[rank] = rank = lowest[lowest[rank]]
        return rank

    for rank, ranks in seen.items():
        for other in decode_runs(ranks).tolist():
            low, high = sorted((first_of(rank), first_of(other)))
            lowest[high] = low
    members: dict[int, list[int]] = {}
    for rank in sorted(seen):
        members.setdefault(first_of(rank), []).append(rank)
    return tuple(Disk(reports[leader].host, encode_runs(ranks)) for leader, ranks in members.items())
