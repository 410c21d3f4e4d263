"""Writes and commits the files of one save: `ShardWriter`, and `InlineWriter`, which does so in this process.

`SaveInfo` and the plan describe a save completely but for the bytes of its arrays: header, manifest and index follow
from them, so a process that has no tree and no torch can write the shards and publish the index
(`writer_process.ProcessWriter`).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Event
from typing import Protocol

import msgspec

from .._arrays.base import ArraySource, SourcePiece
from .._core.format.files import Progress, Sidecar, checksum, stored_name
from .._core.format.index import INDEX_NAME, MAX_INDEX, decode_index, encode_index, encode_manifest
from .._core.format.lineage import Lineage
from .._core.format.records import Disk, FileTable, Index, build_index, file_table
from .._core.format.references import References, SharedFile, count_stayed, encode_shared, with_homes
from .._core.format.shard_header import ShardEntry, ShardHeader, block_count, encode_header, shard_name
from .._core.format.timings import Host, Span, Timings, encode_timings, timings_name
from .._core.planning.save_plan import FilePlan, GlobalPlan, files_without
from .._core.sharding.int_runs import Runs, decode_runs, encode_runs
from .._core.tree.value_codec import Value
from .._io.comm.collective import Fault, to_fault
from .._io.os_errors import FULL, wrap_write_error
from .._io.process import send_late
from .._io.storage.checkpoint import read_index
from .._io.storage.deletions import (
    clear_leftovers,
    index_state,
    mark_shared_files,
    restore_index,
    unlocked_sizes,
)
from .._io.storage.kept_files import ProgressRecorder
from .._io.storage.plain_names import give_plain_names, take_plain_names
from .._io.storage.published_index import check_still_there, error_of_gone_files
from .._io.storage.store import Store
from .._io.timing import Recorder
from .._threads import call_in_thread
from ..errors import CheckpointError, CheckpointExists
from .committed_files import (
    check_files_exist,
    index_may_be_published,
    remove_files,
    remove_replaced,
    with_published_hint,
)
from .options import CommonOptions, FailureSink
from .shard_files import ShardFile, ShardSource, ShardWriting, write_files

FileRow = tuple[int, int, int, int, int]
"""A shard as (rank, part, stream, nbytes, header)."""


class IndexContent(msgspec.Struct, frozen=True, array_like=True):
    """What the index holds beside the plan; gathered on rank 0."""

    metadata: dict[str, Value] = {}
    values: dict[str, Value] = {}
    """The values of the leaves that ranks share."""
    own_values: tuple[tuple[str, int, Value], ...] = ()
    """The values of the leaves under `PerRank`, as (path, rank, value)."""
    replaced: str = ""
    """The id of the save that is overwritten."""
    lineage: Lineage | None = None
    """The place of a manager's checkpoint in its run."""
    sidecars: tuple[Sidecar, ...] = ()
    references: References | None = None
    """What an incremental save records before its files are written."""
    before: References | None = None
    """That of the checkpoint that it follows."""


class SaveInfo(msgspec.Struct, frozen=True, array_like=True):
    """One save as the ranks agreed on it; with the plan, everything but the bytes of arrays."""

    rank: int
    world: int
    save_id: str
    created_ns: int
    options: CommonOptions
    content: IndexContent | None = None
    """What the index holds; None on ranks other than 0."""
    shared: tuple[SharedFile, ...] = ()
    """The files of this rank's plan that are not written, as another checkpoint of the run has them."""

    @property
    def replaces(self) -> bool:
        """Whether a checkpoint is overwritten, as far as rank 0 knows."""
        return self.content is not None and self.content.replaced != ""

    def to_write(self, plan: GlobalPlan) -> list[FilePlan]:
        """Returns the files of this rank that it writes."""
        return files_without(plan.own.files, {file.part for file in self.shared})

    def replacing(self, save_id: str) -> SaveInfo:
        """Returns the info of a save that overwrites another one; "" for none. On rank 0."""
        assert self.content is not None, "rank 0 has it"
        return msgspec.structs.replace(self, content=msgspec.structs.replace(self.content, replaced=save_id))


class WriteReport(msgspec.Struct, array_like=True):
    """The result of a rank's writing, for the coordinator."""

    fault: Fault | None
    files: tuple[FileRow, ...] = ()
    timings: tuple[Span, ...] = ()
    host: str = ""
    """The name of the rank's machine."""
    shared: tuple[SharedFile, ...] = ()
    """Those of the files that were not written."""
    changed: Runs = ()
    """Of an incremental save: the numbers of the arrays that have changed since the checkpoint before."""
    unknown: Runs = ()
    """The numbers of those that were not compared."""
    hashes: dict[int, bytes] = {}
    """Of an incremental save: the checksums of each shard by its part, for this rank alone; see `ShardWriting`."""


class CommitResult(msgspec.Struct, array_like=True):
    """The result of a save, for every rank."""

    faults: tuple[Fault, ...]
    in_place: bool
    """Whether the index may have been published in spite of the faults: then the files must stay."""
    apart: bool = False
    """Whether nothing was published, as files of other ranks are not there: they may lie on other disks."""
    disks: tuple[Disk, ...] = ()
    """The disks of a save that is committed on several."""
    references: References | None = None
    """Those of the index of an incremental save."""
    index: str = ""
    """The checksum of that index."""


class DisksToPrepare(Protocol):
    """The disks of a save on which the coordinator does not publish the index itself; see `node_local`."""

    @property
    def disks(self) -> tuple[Disk, ...]:
        """All disks, the coordinator's first; none where there is one disk."""
        ...

    def prepare(self, index: bytes, timings: bytes) -> Sequence[Fault]:
        """Has the others made ready for the commit; returns the faults of those that are not."""
        ...


class ShardWriter(Protocol):
    """Writes the shards of one save on one rank; on rank 0 it also publishes the index."""

    error: Exception | None
    """The failure of this rank, where there is one."""
    trace: str
    """The traceback of a failure in another process."""

    def write(self) -> WriteReport:
        """Writes this rank's shards; returns the result without timings. A failure is returned, not raised."""
        ...

    def commit(self, reports: Mapping[int, WriteReport], silent: Sequence[Fault] = ()) -> CommitResult:
        """On rank 0: commits the save if all ranks have written.

        Args:
            reports: of each rank.
            silent: the faults of ranks that sent none.
        """
        ...

    def end(self) -> None:
        """Releases what is kept for this save."""
        ...


class TreeShardSource(msgspec.Struct, frozen=True):
    """Shards straight out of the tree's arrays."""

    plan: GlobalPlan
    sources: Mapping[str, ArraySource]
    """The rank's arrays by path."""
    shared: tuple[SharedFile, ...] = ()
    """The files that are not written."""

    @property
    def private(self) -> bool:
        return False

    @property
    def files(self) -> Sequence[FilePlan]:
        return files_without(self.plan.own.files, {file.part for file in self.shared})

    def pieces(self, leaf: int) -> Sequence[SourcePiece]:
        return self.sources[self.plan.leaf(leaf).path].pieces


def first_progress(save_id: str, rank: int, world: int, step: int | None, now: int) -> Progress:
    """Returns what the progress record of a rank says as its save begins; `now` in nanoseconds since 1970."""
    return Progress(
        save_id, rank, world=world, step=step, phase="write", written=0, planned=0, started_ns=now, updated_ns=now
    )


class PathLook:
    """Rank 0's look at the path of a save, which writes the save's progress record first.

    An object store is asked for its files and for the record at once, and answers meanwhile.

    Args:
        record: it is to be ended with the save, however that ends.
        overwrite: whether a checkpoint may be replaced.
        failures: is told of leftovers before they are removed.
    """

    def __init__(
        self, store: Store, record: ProgressRecorder, *, overwrite: bool, failures: FailureSink | None = None
    ) -> None:
        self._store, self.record, self._overwrite, self._listing = store, record, overwrite, None
        self._before_removal = failures.before_removal if failures is not None else None
        if store.traits.conditional:
            store.prepare()
            self._listing = call_in_thread(store.sizes, "treeckpt-listing")
            self._recorded = call_in_thread(self.record.begin, "treeckpt-record")

    def result(self) -> str:
        """Makes the directory and removes leftovers; returns the id of the save that is to be replaced, "" for none.

        Raises:
            CheckpointExists: a checkpoint is there and must not be replaced.
            CheckpointError: the directory cannot be made, listed or written.
        """
        try:
            return self._result()
        except BaseException as error:
            self.record.end()
            if isinstance(error, OSError):
                expected = "a directory that can be made and written"
                raise wrap_write_error(error, self._store.url, expected=expected) from error
            raise

    def _result(self) -> str:
        store = self._store
        if self._listing is None:
            store.prepare()
            try:
                self.record.begin()
            except OSError as error:
                # a checkpoint that forbids the save is reported before the full disk
                names = self.checked(store.sizes())
                if error.errno not in FULL:
                    raise
                self.clear(names)  # what fills the disk may be what dead saves left here
                self.record.begin()
            names = self.checked(store.sizes())
        else:
            names = self.checked(self._listing.result())
            self._recorded.result()
        return self.clear(names)

    def checked(self, names: dict[str, int]) -> dict[str, int]:
        """Returns the files in a directory to which the save may go; raises CheckpointExists if it may not."""
        # a deletion that was killed has left the index under such a name
        if any(name.startswith("deleted.") for name in names) and restore_index(self._store):
            names = self._store.sizes()
        if INDEX_NAME in names and not self._overwrite:
            raise CheckpointExists(
                self._store.url,
                expected="no checkpoint",
                found="one",
                hint="Save to another path, or pass overwrite=True",
            )
        return names

    def clear(self, names: dict[str, int]) -> str:
        """Removes leftovers; returns the id of the save that is to be replaced, "" for none."""
        replaced = ""
        if INDEX_NAME in names:
            with contextlib.suppress(CheckpointError):
                # what cannot be read can be overwritten; its shards stay for rebuild-index until then
                replaced = read_index(self._store).save_id
        others = names.keys() - {self.record.name}
        clear_leftovers(self._store, others, known=replaced, before=self._before_removal)
        return replaced


class InlineWriter:
    """Writes in this process.

    Args:
        plan, source: None if this rank has none; `error` says why.
        on_progress: called with the bytes written so far, now and then.
        waits: whether `end` waits for an object store after a commit. Unless it does, threads complete the timings and
            remove the progress record, and the end of the process waits for them.
        look: must have a result before anything is written.
        record: the progress record of the save, which is ended with it; None where another process keeps it until this
            one has written its own, and on ranks other than 0.
        others: the other disks, where it is known that ranks do not see each other's files.
    """

    trace = ""

    def __init__(
        self,
        store: Store,
        info: SaveInfo,
        plan: GlobalPlan | None,
        recorder: Recorder,
        source: ShardSource | None = None,
        *,
        error: Exception | None = None,
        on_progress: Callable[[int], None] | None = None,
        waits: bool = True,
        look: PathLook | None = None,
        record: ProgressRecorder | None = None,
        others: DisksToPrepare | None = None,
    ) -> None:
        self.error, self.recorder, self._others = error, recorder, others
        self._waits = waits or not store.traits.conditional
        self._store, self._info, self._plan, self._source = store, info, plan, source
        self._on_progress, self._look = on_progress or (lambda written: None), look
        self._on_interrupt: Callable[[BaseException], None] = lambda error: None
        self._refusal: Exception | None = None
        """Why the look at the path forbids the save."""
        self._record, self._has_begun = record, record is not None
        self._index: Index | None = None
        self._replaces = False
        """Whether there was a checkpoint, or files of other saves, when the index was about to be published."""
        """What of the index is known before all ranks have written, kept by `write` on rank 0."""
        self._begun: Future[None] | None = None
        """The call of `_begin`, where that waits for an object store."""
        self._recorded: Future[None] | None = None
        """The first write of this process's own record, where that waits for an object store."""
        self._unlocked: Future[dict[str, int]] | None = None
        """The look for locks on the index of an object store: its listing goes beside the shards."""
        self._timings_over: Event | None = None
        """It is set when the thread has ended that writes timings to an object store, beside the index and after it."""
        self._decided, self._is_committed = Event(), False
        """Whether it is known how the save ends, and whether it is committed."""
        self._is_apart = False
        """Whether files of other ranks are missing, and it was not looked for several disks yet."""
        self._written = False
        """Whether all shards are written, which the others may know already."""

    def write(self, *, on_interrupt: Callable[[BaseException], None] = lambda error: None) -> WriteReport:
        """Does what `ShardWriter.write` says.

        Args:
            on_interrupt: called at an interrupt, before the requests in flight have ended.
        """
        self._on_interrupt = on_interrupt
        info, plan, source = self._info, self._plan, self._source
        try:
            if self.error is not None:
                raise self.error
            assert plan is not None and source is not None, "a rank without them has an error"
            planned = info.to_write(plan)
            self._begin_record(sum(file.nbytes for file in planned))
            assert self._record is not None, "it was just set"
            manifest = None
            if info.rank == 0:  # its first shard keeps what of the index is known, to rebuild a lost one
                self._index = index_before_files(info, plan)
                manifest = encode_manifest(self._index)
            files = [
                ShardFile(entries, name, encode_header(shard_header(info, plan, file, manifest)))
                for entries, name, file in zip(source.files, shard_names(info, plan), planned, strict=True)
            ]
            writing = ShardWriting(
                self._store,
                source,
                self.recorder,
                record=self._record,
                begun=self._begun,
                recorded=self._recorded,
                on_interrupt=on_interrupt,
            )
            write_files(writing, files)
            writing.before_commit()  # a rank without shards has not waited yet
            self._record.commit()
            self._written = True
            rows = [(info.rank, file.plan.part, file.plan.stream, file.plan.nbytes, len(file.header)) for file in files]
            rows += [(info.rank, file.part, file.stream, file.nbytes, file.header) for file in info.shared]
            report = WriteReport(None, tuple(rows), shared=info.shared)
            if info.options.incremental:
                report.hashes = {part: hashes.tobytes() for part, hashes in writing.hashes.items()}
            return report
        except Exception as error:
            # only then it is known whether the look at the path refuses the save, which is the error that is raised
            wait([future for future in (self._begun, self._recorded) if future is not None])
            if self._refusal is not None:
                raise self._refusal from None
            self.error = wrap_write_error(error, self._store.url)
            return WriteReport(to_fault(self.error, info.rank))

    def _begin_record(self, planned: int) -> None:
        """Begins or continues the progress record; in an object store threads do what waits for an answer."""
        store, info, record = self._store, self._info, self._record
        if record is None:
            first = first_progress(info.save_id, info.rank, info.world, info.options.step, time.time_ns())
            record = self._record = ProgressRecorder(store, first, on_progress=self._on_progress)
        record.expect(planned)
        if not store.traits.conditional:
            if not self._has_begun:
                record.begin()
            return
        begun = self._begun = call_in_thread(partial(self._begin, record), "treeckpt-begin")
        if not self._has_begun:
            self._recorded = call_in_thread(record.begin, "treeckpt-record")
        if info.rank == 0:

            def look_for_locks() -> dict[str, int]:
                begun.result()  # the record can be seen
                return unlocked_sizes(store)

            self._unlocked = call_in_thread(look_for_locks, "treeckpt-locks")

    def _begin(self, record: ProgressRecorder) -> None:
        """Waits for the look at the path, and asks the store for the conditional writes of the commit."""
        if self._look is not None:
            try:
                self._info = self._info.replacing(self._look.result())
            except Exception as error:
                self._refusal = error
                raise
        record.check_condition(replaces=self._info.replaces)

    def commit(self, reports: Mapping[int, WriteReport], silent: Sequence[Fault] = ()) -> CommitResult:
        store, info, plan, recorder = self._store, self._info, self._plan, self.recorder
        faults = [*(report.fault for report in reports.values() if report.fault is not None), *silent]
        publishing = in_place = False
        index, data = None, b""
        if not faults:
            try:
                assert plan is not None, "a rank without a plan reports a fault"
                with recorder.span("publish"), contextlib.ExitStack() as held:
                    disks = self._others.disks if self._others is not None else ()
                    bare, before = self._index or index_before_files(info, plan), info.content and info.content.before
                    index = with_files(bare, plan, reports, disks, before)
                    mark_shared_files(store, index, held)
                    data = encode_index(index)
                    # before the index, in an object store beside it: should this save die after it, later ones know by
                    # them that it had ended
                    if not self._start_timings(reports):
                        write_timings(store, info, reports, None, recorder)
                    # deletions and repairs that have not seen this save's record have ended at the look for locks
                    sizes = self._unlocked.result() if self._unlocked is not None else None
                    if self._others is not None:
                        faults += self._others.prepare(data, encoded_timings(info, reports, None, recorder))
                    if not faults:
                        publishing = True
                        replaced = self._publish(data, partial(self._check_files, index, sizes))
                        if self._has_lapsed:
                            check_still_there(store, data, replaced)
            except Exception as caught:
                if self._is_apart:
                    return CommitResult((), False, apart=True)
                error = wrap_write_error(caught, store.url)
                if in_place := publishing and index_may_be_published(store, info.save_id, error):
                    error = with_published_hint(error)
                faults.append(to_fault(error, 0, common=isinstance(error, CheckpointExists)))
                self.error = self.error or error
        self._is_committed = not faults
        self._decided.set()
        if not faults:
            # it is committed: the rest may fail without harm
            if self._timings_over is None:
                self._write_timings(reports, again=True)
            if info.content is not None and info.content.sidecars and self._replaces:
                give_plain_names(store, info.save_id)
            if info.content is not None and info.replaces:
                with contextlib.suppress(Exception):
                    remove_replaced(store, info.content.replaced)
            if index is not None and index.references is not None:
                return CommitResult((), True, references=index.references, index=checksum(data))
            return CommitResult((), True)
        if self._replaces and not in_place:
            give_plain_names(store)
        self._wait_timings()
        with contextlib.suppress(Exception):  # the error that is being reported matters more
            text = "; ".join(f"rank {fault.rank}: {fault.text}" for fault in faults)[:4000]
            write_timings(store, info, reports, text, recorder)
        return CommitResult(tuple(faults), in_place)

    def _check_files(self, index: Index, sizes: dict[str, int] | None) -> None:
        """Checks what is there before the index is published, and deletes the copies of sidecar files of other saves.

        Nobody makes the copies again meanwhile: locks of those that have not seen this save's record have ended.
        """
        sizes = unlocked_sizes(self._store) if sizes is None else sizes
        try:
            check_files_exist(self._store, index, sizes, self._info.rank)
        except CheckpointError:
            # somebody deletes them, or the path leads to several disks
            missing = any(file.rank and file.name not in sizes for file in index.own_files)
            self._is_apart = missing and self._others is None and self._store.traits.local_path is not None
            raise
        if self._has_lapsed and (error := error_of_gone_files(self._store, index)) is not None:
            raise error
        self._replaces = INDEX_NAME in sizes
        self._replaces |= take_plain_names(self._store, sizes, self._info.save_id)

    @property
    def _has_lapsed(self) -> bool:
        return self._record is not None and self._record.has_lapsed

    def _publish(self, data: bytes, check: Callable[[], object]) -> bytes | None:
        """Publishes the index, as `publish_index`.

        An interrupt is told at once, and raised when it is known what became of the request.
        """
        publish = partial(publish_index, self._store, data, self._info, check)
        if not self._store.traits.far:
            return publish()
        request = call_in_thread(publish, "treeckpt-publish")
        try:
            return request.result()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._on_interrupt(error)
            while not request.done():
                with contextlib.suppress(KeyboardInterrupt):  # else files of a published index could be deleted
                    wait([request])
            raise

    def _start_timings(self, reports: Mapping[int, WriteReport]) -> bool:
        """Begins to write the timings to an object store; False elsewhere, or where no thread can be started."""

        def write() -> None:
            self._write_timings(reports)
            self._decided.wait()
            if self._is_committed:  # with the time of the commit
                self._write_timings(reports, again=True)

        if self._store.traits.far:
            self._timings_over = send_late(self._store.url, write)
        return self._timings_over is not None

    def _write_timings(self, reports: Mapping[int, WriteReport], *, again: bool = False) -> None:
        with contextlib.suppress(Exception):
            write_timings(self._store, self._info, reports, None, self.recorder, again=again)

    def _wait_timings(self) -> None:
        self._decided.set()
        if self._timings_over is not None:
            self._timings_over.wait()  # unlike the join of a thread, it can be interrupted

    def end(self) -> None:
        # rank 0 alone learns here whether the save is committed
        late = not self._waits and (self._is_committed if self._info.rank == 0 else self.error is None)
        if self._record is not None:
            self._record.end(wait=not late)
        if not late:
            self._wait_timings()
        if self._record is None:
            return
        # of two saves that end at once the later one finds both ended, and removes what the index does not name
        if self._info.rank == 0 and not self._store.traits.conditional:
            with contextlib.suppress(Exception):  # the save has ended, with or without an error
                clear_leftovers(self._store, self._store.sizes(), known=self._info.save_id)

    def withdraw(self, error: BaseException) -> None:
        """Removes what was written, unless the save is committed, or others may still commit it.

        The coordinator writes `error` to the timings, so the files of other ranks count as left over.
        """
        info, plan = self._info, self._plan
        self._waits = True
        self._wait_timings()
        try:
            if plan is None or (info.rank and self._written) or index_may_be_published(self._store, info.save_id):
                return
            timings = [] if info.rank else [timings_name(info.save_id)]
            remove_files(self._store, [*written_names(info, plan), *timings])
            if info.world > 1 and not info.rank:
                report = WriteReport(to_fault(error, info.rank), host=socket.gethostname())
                self.commit({0: report})
        finally:
            self.end()  # as long as the record stands, nobody takes the files for those of a save that has ended


# what the files hold ------------------------------------------------------------------------------------------------


def shard_names(info: SaveInfo, plan: GlobalPlan | None) -> list[str]:
    """Returns the names of the files that this rank writes; a rank without a plan writes none."""
    files = info.to_write(plan) if plan is not None else ()
    return [shard_name(info.save_id, info.rank, info.world, file.part) for file in files]


def written_names(info: SaveInfo, plan: GlobalPlan | None) -> list[str]:
    """Returns the names of all files that this rank writes before the commit: shards, and on rank 0 sidecar files."""
    sidecars = info.content.sidecars if info.content is not None else ()
    return [*shard_names(info, plan), *(stored_name(info.save_id, sidecar.name) for sidecar in sidecars)]


def shard_header(info: SaveInfo, plan: GlobalPlan, file: FilePlan, manifest: str | None) -> ShardHeader:
    """Returns the header of a shard, with zeros in the place of the checksums, and the manifest in the first one."""
    return ShardHeader(
        info.save_id,
        info.rank,
        world=info.world,
        part=file.part,
        stream=file.stream,
        entries=shard_entries(plan, file),
        hashes=(0,) * block_count(file.nbytes),
        manifest=manifest if file.part == 0 else None,
        shared=encode_shared(info.shared) if info.shared and file.part == 0 else "",
    )


def shard_entries(plan: GlobalPlan, file: FilePlan) -> tuple[ShardEntry, ...]:
    """Returns the entries of a shard of this rank."""
    entries: list[ShardEntry] = []
    for write in file.writes:
        leaf = plan.leaf(write.leaf)
        assert leaf.spec is not None, "arrays only are written"
        # the plan has one path for all ranks; a shard names its own, as it has to explain itself
        path = leaf.path.replace("~rank*", f"~rank{plan.own.rank}")
        entries.append(ShardEntry(path, leaf.spec.dtype, leaf.spec.shape, write.region, write.start, write.nbytes))
    return tuple(entries)


def index_before_files(info: SaveInfo, plan: GlobalPlan) -> Index:
    """Returns the index of a save but for its files: those are known when all ranks have written."""
    content, (placed, _) = info.content or IndexContent(), plan.placement
    index = build_index(
        plan.global_tree,
        placed,
        FileTable(),
        values=content.values,
        own_values={(path, rank): value for path, rank, value in content.own_values},
        save_id=info.save_id,
        step=info.options.step,
        created_ns=info.created_ns,
        metadata=content.metadata,
        lineage=content.lineage,
    )
    return msgspec.structs.replace(index, sidecars=content.sidecars, references=content.references)


def with_files(
    index: Index,
    plan: GlobalPlan,
    reports: Mapping[int, WriteReport],
    disks: tuple[Disk, ...] = (),
    before: References | None = None,
) -> Index:
    """Returns the index of a save that all ranks have written, on several disks if these are given.

    Args:
        before: the references of the checkpoint that an incremental save follows.
    """
    _, totals = plan.placement
    for rank, report in reports.items():
        written = sum(row[3] for row in report.files)
        if written != totals[rank]:
            raise AssertionError(f"rank {rank} wrote {written} bytes, the plan says {totals[rank]}")
    rows = [row for report in reports.values() for row in report.files]
    references = index.references
    if references is not None:
        changed, unknown = (
            [decode_runs(getattr(r, name)) for r in reports.values()] for name in ("changed", "unknown")
        )
        stayed = count_stayed(len(plan.arrays), before, changed, unknown)
        shared = {rank: report.shared for rank, report in reports.items()}
        references = with_homes(references, sorted((row[0], row[1]) for row in rows), shared)
        references = msgspec.structs.replace(references, stayed=stayed)
    return msgspec.structs.replace(index, files=file_table(rows), disks=disks, references=references)


# publishing ----------------------------------------------------------------------------------------------------------


def publish_index(store: Store, data: bytes, info: SaveInfo, check: Callable[[], object]) -> bytes | None:
    """Publishes the index, which is the commit; where the store can, only over what was there before the save.

    Returns the one that it has replaced, None where there was none or it cannot be read.

    Args:
        check: raises if files of the save are gone; see `Store.publish`.

    Raises:
        CheckpointExists: there is another checkpoint.
    """
    before: bytes | int | None = None
    if info.options.overwrite and store.traits.conditional:
        check()
        replaced = info.content.replaced if info.content is not None else ""

        def is_replaced(found: bytes) -> bool:
            nonlocal before
            before = found
            try:
                return decode_index(found, store.url).save_id == replaced
            except CheckpointError:  # nor could it be read before the save
                return not replaced

        store.compare_and_swap(INDEX_NAME, data, holds=is_replaced, limit=MAX_INDEX)
        return before
    if info.replaces:
        before = index_state(store)
    try:
        store.publish(INDEX_NAME, data, replace=info.options.overwrite, check=check)
    except FileNotFoundError as error:
        if not store.traits.renames:
            raise
        raise CheckpointError(
            f"{store.url}/{INDEX_NAME}",
            expected="the temporary file that is to be renamed so",
            found="none: a clean-up took this process for an ended one",
            hint="It was stopped for minutes, or something else deletes files there; save again",
        ) from error
    return before if isinstance(before, bytes) else None


def encoded_timings(info: SaveInfo, reports: Mapping[int, WriteReport], error: str | None, recorder: Recorder) -> bytes:
    """Returns the timings file: the spans of all ranks, and the error of a save that failed."""
    # those of rank 0 are in its recorder, with what came after its report
    reported = (span for rank, report in reports.items() if rank for span in report.timings)
    names = sorted({report.host for report in reports.values()} - {""})
    hosts = tuple(Host(name, encode_runs(sorted(r for r, d in reports.items() if d.host == name))) for name in names)
    spans = (*recorder.spans, *reported)
    return encode_timings(Timings(info.save_id, info.options.step, info.world, spans, error, hosts))


def write_timings(
    store: Store,
    info: SaveInfo,
    reports: Mapping[int, WriteReport],
    error: str | None,
    recorder: Recorder,
    *,
    again: bool = False,
) -> None:
    """Writes the timings, as `encoded_timings`; replaces earlier ones of this save.

    Args:
        again: they were written before. In a store that is far, where the caller of the save may go on meanwhile and
            delete the checkpoint, they are then not created anew.
    """
    name, data = timings_name(info.save_id), encoded_timings(info, reports, error, recorder)
    present = store.read_version(name, limit=len(data))[1] if again and store.traits.conditional else True
    store.publish(name, data, replace=present)
