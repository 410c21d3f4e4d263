"""Incremental saves: which files of a rank's plan are as another checkpoint of the run has them, and are not written.

1. Rank 0 holds a lease on the checkpoint that the save follows, reads its index, and sends what `format.references`
   has of it to all ranks, which plan the groups of arrays by it.
2. Each rank computes the checksums of its files that hold a group, from the tree's own memory, and compares them with
   those of the checkpoint before. The files whose checksums are equal, block for block, are neither staged nor written;
   of those that lie on one CUDA device only the checksums are copied to the host, and less than a block at the end.
   Checksums come from the memory of this process, or from the headers of the shards behind a restart.
3. Behind the write each rank compares the checksums of what it has written with those before, and tells rank 0 which
   arrays have changed: what has stayed is put into a group by the next saves.
4. Before rank 0 publishes the index it marks each save whose files the index names, and looks that they are there: see
   `_io.storage.shared_files`.

Where the trees are others than before, another number of ranks saves, or the checkpoint before cannot be read,
everything is written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import xxhash

from .._arrays.base import ArraySource
from .._core.format.files import checksum, verdict_name
from .._core.format.records import Index
from .._core.format.references import Home, References, SharedFile, kept_groups, with_new_groups
from .._core.format.shard_header import BLOCK, ShardEntry, parse_shard_name, shard_name
from .._core.planning.save_plan import ArrayLeaf, FilePlan, GlobalPlan
from .._core.sharding.int_runs import Runs, encode_runs
from .._io.comm.comm import Comm
from .._io.storage.checkpoint import read_index, with_shared_files
from .._io.storage.deletions import committed_save_id, index_state
from .._io.storage.kept_files import hold_lease
from .._io.storage.shard_reader import read_header
from .._io.storage.store import Store, for_each
from .._threads import ThreadPool
from ..errors import CheckpointError, TreeckptError
from .options import GivenBase, IncrementalOptions
from .shard_files import WRITE_THREADS, has_checksums
from .shard_writer import CommitResult, TreeShardSource, WriteReport, shard_entries
from .table_deltas import KnownRuns, TableDeltas

_log = logging.getLogger("treeckpt")
_DAMAGED = "has files, or shares some, in which a verification has found damage"


class BaseCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoint that an incremental save follows, as rank 0 sends it to all."""

    directory: str
    save_id: str
    references: References
    full: bool = False
    """Whether the save takes nothing from it; it still says which arrays have stayed the same."""

    @property
    def shared_id(self) -> str:
        """The save whose files may be shared; "" for none."""
        return "" if self.full else self.save_id

    def of_trees(self, key: str) -> References | None:
        """Returns what it says about the arrays of trees with a digest; None if it is of other trees."""
        return self.references if self.references.key == key else None


class KnownFile(msgspec.Struct, frozen=True):
    """A file of a rank in the checkpoint that was saved or read last."""

    home: Home
    name: str
    header: int
    """Bytes before its data area."""
    nbytes: int
    entries: bytes
    """The digest of what it holds, see `entries_digest`."""
    hashes: np.ndarray
    """The checksums of its blocks: uint64[n]."""


class KnownFiles(msgspec.Struct, frozen=True):
    """The files of this rank in the checkpoint that it saved last, which the comm keeps for the next save."""

    save_id: str
    files: tuple[KnownFile, ...]
    references: References | None = None
    """Those of the checkpoint, where it was saved here."""
    index: str = ""
    """The checksum of its index then."""


class FileEntries(msgspec.Struct, frozen=True):
    """What a file holds by a plan."""

    digest: bytes
    """Its `entries_digest`."""
    arrays: np.ndarray
    """The number of the array of each entry: int64[n]."""
    starts: np.ndarray
    """Where each entry starts in the data area, and the end of the last one: int64[n + 1]."""


class KnownEntries(msgspec.Struct, frozen=True):
    """What the files of a rank hold by a plan, which the comm keeps as long as the plan."""

    plan: GlobalPlan
    files: dict[int, FileEntries]
    """Each file by its part."""


def read_base(
    options: IncrementalOptions, store: Store, kept: KnownFiles | None, opened: contextlib.ExitStack
) -> BaseCheckpoint | None:
    """Returns on rank 0 the checkpoint that the save follows, None where it is no help.

    Args:
        kept: what the comm has kept of this rank's last save.
        opened: keeps a lease on that checkpoint, until the save has ended.

    Raises:
        StoreError: the store has no directories beside each other.
        CheckpointError: the checkpoint was asked for, and cannot be read or is not beside that of the save.
    """
    store.run()
    for folder, save_id in options.source.bases() if options.source is not None else ():
        try:
            with contextlib.ExitStack() as held:
                _check_beside(folder, store)
                held.enter_context(hold_lease(folder))
                base = _read_base(folder, save_id, store, kept)
                if base is not None and _was_found_damaged(folder, base):
                    _log.warning("%s: all is written: %s %s", store.url, folder.url, _DAMAGED)
                    return None  # what came before it may have the same files
                if base is not None:
                    opened.push(held.pop_all())
                    due = options.full_every is not None and base.references.since_full + 1 >= options.full_every
                    # what this save replaces goes with it, though the checkpoint before shares files of it
                    over = any(home.directory == store.name for home in base.references.homes)
                    return msgspec.structs.replace(base, full=due or over)
        except (TreeckptError, OSError) as error:
            if isinstance(options.source, GivenBase):
                raise
            _log.warning("%s: nothing is shared with %s, which cannot be read: %s", store.url, folder.url, error)
    return None


def _check_beside(folder: Store, store: Store) -> None:
    """Raises CheckpointError for a checkpoint that is not in a directory beside that of a save."""
    run = store.run()
    if folder.run().url != run.url and committed_save_id(run.folder(folder.name)) != read_index(folder).save_id:
        raise CheckpointError(
            folder.url,
            expected=f"a checkpoint beside {store.url}",
            found="one in another directory",
            hint="Checkpoints share files with those beside them alone: leave base= out for the first save of a run",
        )


def _was_found_damaged(folder: Store, base: BaseCheckpoint) -> bool:
    """Whether a verification has found damage in a checkpoint, or in one whose files it names."""
    run, saves = folder.run(), [Home(folder.name, base.save_id), *base.references.homes]
    places = [(run.folder(save.directory), verdict_name(save.save_id)) for save in saves]
    return any(found is not None for found in for_each(folder, lambda place: place[0].entry(place[1]), places))


def _read_base(folder: Store, save_id: str, store: Store, kept: KnownFiles | None) -> BaseCheckpoint | None:
    if folder.name == store.name:
        return None
    if kept is not None and kept.references is not None and save_id in ("", kept.save_id) and _is_kept(folder, kept):
        return BaseCheckpoint(folder.name, kept.save_id, kept.references)
    index = read_index(folder)
    if index.references is None or index.disks or save_id not in ("", index.save_id):
        return None
    sizes = with_shared_files(folder, index).sizes()
    if any(sizes.get(file.name) != file.header + file.nbytes for file in index.file_list):
        _log.warning("%s: nothing is shared with %s, which has lost files", store.url, folder.url)
        return None
    return BaseCheckpoint(folder.name, index.save_id, index.references)


def _is_kept(folder: Store, kept: KnownFiles) -> bool:
    """Whether a directory has the checkpoint that was saved last, with the files of this rank that it shares.

    To decode the index of a large tree takes a hundred times as long.
    """
    data = index_state(folder)
    if not isinstance(data, bytes) or checksum(data) != kept.index:
        return False
    shared = [file for file in kept.files if file.home.save_id != kept.save_id]
    there = {directory: folder.run().folder(directory).sizes() for directory in {f.home.directory for f in shared}}
    return all(there[file.home.directory].get(file.name) == file.header + file.nbytes for file in shared)


def plan_groups(
    key: str, arrays: Sequence[tuple[int, ArrayLeaf]], world: int, base: BaseCheckpoint | None
) -> tuple[int, ...]:
    """Returns the groups of the arrays of a plan.

    Args:
        key: the digest of the trees.
        arrays: those of the trees of all ranks, `world` in number.
        base: the checkpoint before.
    """
    leaves = [array for _, array in arrays]
    frozen = [number for number, array in enumerate(leaves) if array.frozen]
    tables = {number: array.table for number, array in enumerate(leaves) if array.table}
    before = base.of_trees(key) if base is not None else None
    groups, new = kept_groups(len(leaves), frozen, before, [*tables])
    return with_new_groups(groups, {array: leaves[array].nbytes for array in new}, world, tables)


def entries_digest(entries: Sequence[ShardEntry]) -> bytes:
    """Returns the digest of what a shard holds: names, dtypes, shapes, regions and their places."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(entries))


def _file_entries(plan: GlobalPlan, file: FilePlan) -> FileEntries:
    starts = [*(write.start for write in file.writes), file.nbytes]  # one entry follows the other without holes
    arrays = np.array([write.leaf for write in file.writes], np.int64)
    return FileEntries(entries_digest(shard_entries(plan, file)), arrays, np.array(starts, np.int64))


def _read_files(folder: Store, base: BaseCheckpoint, comm: Comm) -> KnownFiles:
    index, rank = read_index(folder), comm.rank
    if index.save_id != base.save_id:
        raise CheckpointError(folder.url, expected=f"save {base.save_id}", found=f"save {index.save_id}")
    if index.world != comm.size:  # an index names files of its own world alone
        return KnownFiles(index.save_id, ())
    return KnownFiles(index.save_id, tuple(_read_known(with_shared_files(folder, index), index, folder.name, rank)))


def _read_known(store: Store, index: Index, directory: str, rank: int) -> list[KnownFile]:
    found: list[KnownFile] = []
    sizes = store.sizes()
    for file in index.files_of(rank):
        named = parse_shard_name(file.name)
        assert named is not None, "an index names its shards so"
        header, content = read_header(store, file.name, file_size=sizes.get(file.name))
        if content.block == BLOCK:
            home = Home(file.directory or directory, named[0])
            hashes = np.array(content.hashes, np.uint64)
            found.append(KnownFile(home, file.name, header, file.nbytes, entries_digest(content.entries), hashes))
    return found


def compare_written(
    count: int,
    entries: Mapping[int, FileEntries],
    written: Mapping[int, np.ndarray],
    before: Mapping[bytes, KnownFile],
) -> tuple[Runs, Runs]:
    """Returns the numbers of the arrays of which this rank has written other bytes than the checkpoint before has.

    Args:
        count: of the arrays.
        entries: of each file by its part.
        written: the checksums of each file by its part, uint64[n].
        before: the files of the checkpoint before.

    Returns:
        (those that have changed, those of files that the checkpoint before does not have so). By the blocks that an
        array fills, or else those in which it lies: what is said to have stayed is compared as a whole in its group.
    """
    changed, unknown = list[np.ndarray](), list[np.ndarray]()
    for part, hashes in written.items():
        file = entries[part]
        known = before.get(file.digest)
        if known is None or len(known.hashes) != len(hashes):
            unknown.append(file.arrays)
            continue
        before_block = np.concatenate([[0], np.cumsum(known.hashes != hashes)])
        down, up = file.starts // BLOCK, -(-file.starts // BLOCK)
        fills = up[:-1] < down[1:]  # a block at least
        first, last = np.where(fills, up[:-1], down[:-1]), np.where(fills, down[1:], up[1:])
        changed.append(file.arrays[before_block[last] > before_block[first]])
    return _encode_numbers(changed, count), _encode_numbers(unknown, count)


def _encode_numbers(found: Iterable[np.ndarray], count: int) -> Runs:
    """Encodes the numbers of some of `count` arrays, in order and each once."""
    marked = np.zeros(count, np.bool_)
    for numbers in found:
        marked[numbers] = True
    return encode_runs(np.flatnonzero(marked))


class IncrementalSave:
    """One rank's part in an incremental save.

    Args:
        base: the checkpoint that the save follows; None where everything is written.
        tables: those of this rank.
    """

    def __init__(self, store: Store, comm: Comm, base: BaseCheckpoint | None, tables: TableDeltas | None) -> None:
        self._store, self._comm, self._base, self._tables = store, comm, base, tables

    @cached_property
    def _before(self) -> dict[bytes, KnownFile]:
        """The files of this rank in the checkpoint before, by `KnownFile.entries`; none where they cannot be read."""
        base, kept = self._base, self._comm.state.get(KnownFiles)
        if base is None:
            return {}
        homes = {Home(base.directory, base.save_id), *base.references.homes}
        # it may have been flattened since
        if kept is None or kept.save_id != base.save_id or not {file.home for file in kept.files} <= homes:
            try:
                kept = _read_files(self._store.run().folder(base.directory), base, self._comm)
            except (TreeckptError, OSError) as error:
                _log.warning("%s: all is written, as %s cannot be read: %s", self._store.url, base.directory, error)
                return {}
        return {file.entries: file for file in kept.files}

    def _entries(self, plan: GlobalPlan) -> dict[int, FileEntries]:
        """Returns what each file of the plan holds, by its part."""
        known = self._comm.state.get(KnownEntries)
        if known is None or known.plan is not plan:
            known = KnownEntries(plan, {file.part: _file_entries(plan, file) for file in plan.own.files})
            self._comm.state.put(known)
        return known.files

    def find_shared(self, plan: GlobalPlan, sources: Mapping[str, ArraySource]) -> tuple[SharedFile, ...]:
        """Returns the files of this rank that need not be written."""
        found, entries = list[SharedFile](), self._entries(plan)
        grouped = [file for file in plan.own.files if file.group]
        candidates = [(file, known) for file in grouped if (known := self._before.get(entries[file.part].digest))]
        stored = {file.part for file in grouped if sources[plan.leaf(file.writes[0].leaf).path].is_stored}
        if not stored <= {file.part for file, _ in candidates}:
            self._comm.state.remove(KnownRuns)
            raise CheckpointError(
                self._store.url,
                expected="the rows of tables in the files of the checkpoint before",
                found="others there",
                hint="Save again: the next save writes all rows",
            )
        if not candidates or (self._base is not None and self._base.full):
            return ()
        source = TreeShardSource(plan, sources)
        with ThreadPool(WRITE_THREADS, "treeckpt-compare") as pool:
            for file, known in candidates:
                if file.part in stored or has_checksums(file, source, known.hashes.tolist(), pool):
                    named = parse_shard_name(known.name)
                    assert named is not None, "it is the name of a shard"
                    found.append(SharedFile(known.home, named[3], file.part, file.stream, file.nbytes, known.header))
        return tuple(found)

    def compare(self, plan: GlobalPlan, report: WriteReport) -> WriteReport:
        """Returns what this rank has written, with what of it has changed since the checkpoint before."""
        written = {part: np.frombuffer(data, np.uint64) for part, data in report.hashes.items()}
        changed, unknown = compare_written(len(plan.arrays), self._entries(plan), written, self._before)
        return msgspec.structs.replace(report, changed=changed, unknown=unknown)

    def keep(self, plan: GlobalPlan, save_id: str, report: WriteReport, ended: CommitResult) -> None:
        """Keeps the checksums of this rank's files for the next save; nothing where this one has failed."""
        if ended.faults or ended.disks:
            self._comm.state.remove(KnownFiles)
            return
        if self._tables is not None:
            self._tables.keep(save_id)
        entries = self._entries(plan)
        home, headers = Home(self._store.name, save_id), {part: header for _, part, _, _, header in report.files}
        shared = {file.part for file in report.shared}
        known = [self._before[entries[part].digest] for part in shared]
        for file in plan.own.files:
            if file.part not in shared:
                hashes = np.frombuffer(report.hashes[file.part], np.uint64)
                name = shard_name(save_id, plan.own.rank, plan.global_tree.world, file.part)
                known.append(KnownFile(home, name, headers[file.part], file.nbytes, entries[file.part].digest, hashes))
        self._comm.state.put(KnownFiles(save_id, tuple(known), ended.references, ended.index))
