"""Lists the checkpoints of a run directory, with the state of each.

`read_info` describes one directory, from its listing, its index and its timings, which a `StatCache` keeps as long as
the files do not change; `scan` does so for every directory of a run, on a disk, in memory or in an object store. What
cannot be read is reported with its state and is not raised: directories of other programs, saves that never finished,
indexes that do not decode. Only a store that cannot be reached or read, or that refuses, raises. Links are not
followed. No shard is opened, but of a save that was killed the first bytes; `verify` reads them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from .._core.format.files import (
    PIN_NAME,
    STEP_PATTERN,
    CheckpointId,
    ended_name,
    parse_file_name,
    parse_progress_name,
    step_name,
    step_of,
    verdict_name,
)
from .._core.format.index import INDEX_NAME, MAX_INDEX, decode_index
from .._core.format.lineage import Lineage, LineageOrder, LineagePosition, SavedCheckpoint
from .._core.format.shard_header import parse_shard_name, saves_of_all_ranks
from .._core.format.timings import Timings
from .._core.text import bytes_text, count_text, json_number
from .._inspect.profile import profile_of
from .._io.os_errors import wrap_read_error
from .._io.storage import checkpoint
from .._io.storage.checkpoint import (
    LruStatCache,
    NewestIndex,
    StatCache,
)
from .._io.storage.open import open_store
from .._io.storage.plain_names import stored_files
from .._io.storage.shard_reader import check_missing
from .._io.storage.store import DirectoryEntry, RunStore, Store
from .._threads import ThreadPool
from ..errors import CheckpointNotFound, CorruptError, StoreError, TreeckptError, visible
from ..policy import StepInfo
from .active_saves import SaveUnderWay, saves_under_way
from .index_summary import Summary, read_summary, summarize_index
from .run_end import RunEnd, read_end
from .step_names import recorded_patterns, superseded
from .verification import Verification, VerificationStore

T = TypeVar("T")
CONCURRENT_READS = 64
"""Folders of an object store that are read at a time, at most."""
READ_MEMORY = 512 << 20
"""Bytes of indexes that are read at a time, at most, unless one is larger."""


class DiskInfo(msgspec.Struct, frozen=True, gc=False):
    """One disk of a node-local checkpoint, as it is seen from one place."""

    host: str
    """Its host, with the ranks that wrote there."""
    shards: int
    """How many were written there."""
    here: int
    """How many of these are here, with their sizes."""
    nbytes: int
    """Bytes of all of them."""

    @property
    def text(self) -> str:
        """The host, and how much of what was written there is not here."""
        return f"{self.shards - self.here} of {self.shards} shards of {self.host} ({bytes_text(self.nbytes)})"


FilesStatus = Literal["complete", "partial", "damaged", "unread", "foreign"]
FilesFault = Literal[
    "", "index_lost", "index_damaged", "files_lost", "files_long", "other_save", "copies_left", "unfinished"
]
Status = Literal["complete", "damaged", "partial", "in_progress", "stalled", "unread", "foreign", "reading"]
STATUS_TEXTS: dict[Status, str] = {"in_progress": "in progress"}
"""How a status is written for people, where that is not its name."""

MAX_METRIC_TEXT = 200
"""Characters that a text has of the name of a metric."""


class CheckpointInfo(msgspec.Struct, frozen=True, gc=False):
    """One directory of a run."""

    name: str
    path: str
    files: FilesStatus
    """What its files are, whatever a verification has found in them: complete: the index is published, and its shards
    are there with the right sizes; partial: shards but no index; damaged: the index does not decode, or shards are
    missing or cut short; unread: it could not be read, so nothing is known; foreign: something else."""
    step: int | None = None
    save_id: str | None = None
    world: int | None = None
    leaves: int | None = None
    nbytes: int | None = None
    """Bytes of the arrays, each byte counted once; without an index that can be read, bytes of the shards found."""
    disk_nbytes: int | None = None
    """Bytes of all its files: with headers, index, timings and sidecar files. None if they were not listed."""
    created_ns: int | None = None
    seconds: float | None = None
    """Duration of the save: from the start of the first rank to the end of the last rank."""
    blocked_seconds: float | None = None
    """Seconds until the call returned on the last rank; equal to `seconds` for a save in the foreground."""
    held_nbytes: int | None = None
    """Bytes of the arrays on all ranks together, with every replica counted."""
    error: str | None = None
    """What is wrong; of a complete checkpoint, whose tree loads, a sidecar file that is lost or of another size."""
    fault: FilesFault = ""
    """What the names and sizes of its files show to be wrong: index_lost: shards of all ranks are there, and no index;
    files_lost: shards or sidecar files are missing or cut short; other_save: so too, and shards of all ranks of another
    save are there; copies_left: sidecar files alone, and the copies of these are there; files_long: shards go on behind
    their end; unfinished: what a save that has ended without an index, or a deletion that was cut short, has left."""
    named_step: int | None = None
    """The step that the name of its directory says, by the patterns of its run; None for any other name."""
    metrics: dict[str, float] = {}
    pinned: bool = False
    saving: tuple[SaveUnderWay, ...] = ()
    """Saves into this directory that have progress records there: those under way, and those that were killed."""
    lineage: Lineage | None = None
    """The lineage that its index records."""
    sequence: int | None = None
    """A number that rises in the order in which the checkpoints of a run were saved; None if it was not computed."""
    abandoned: bool = False
    """Whether it is on an abandoned branch: the newest checkpoint does not descend from it."""
    found_damaged: bool = False
    """Whether a file beside it says that a verification found changed bytes."""
    deleting: bool = False
    """Whether it has no index, and a file says that a deletion has taken it away."""
    ended: RunEnd | None = None
    """How the run ended after it, if a manager has said so beside it; it counts only if no save began since."""
    disks: tuple[DiskInfo, ...] = ()
    """Of a node-local checkpoint, its disks. It is complete where what is not here belongs on other disks."""
    shared: dict[str, str] | None = {}
    """The directory of each of its shards that lies in that of another checkpoint; None where its index is not read."""
    shared_with: dict[str, int] = {}
    """Bytes of these files in each of these directories, which go only when no checkpoint shares them any more."""
    shared_nbytes: int = 0
    """Bytes of the arrays in these files, which its save has not written; they are among `nbytes`."""
    verification: Verification | None = None
    """What a verification found, by that file or on this machine; None without one, or where it was not looked up."""

    @property
    def own_nbytes(self) -> int | None:
        """Bytes of the arrays that its save has written."""
        return None if self.nbytes is None else self.nbytes - self.shared_nbytes

    @property
    def elsewhere(self) -> str:
        """What of a complete checkpoint is on the disks of other hosts, as text; empty if all is here."""
        away = [disk.text for disk in self.disks if disk.here < disk.shards] if self.files == "complete" else []
        return f"elsewhere: {'; '.join(away)}" if away else ""

    @property
    def under_way(self) -> tuple[SaveUnderWay, ...]:
        """The saves into this directory that may still be committed."""
        return tuple(save for save in self.saving if save.alive is not False)

    @property
    def damaged(self) -> bool:
        """Whether a verification found changed bytes."""
        return self.found_damaged if self.verification is None else self.verification.total > 0

    @property
    def status(self) -> Status:
        """What lists, pages, metrics and commands call it, and count it as.

        Same as `files`, but damaged where a verification found changed bytes; and without an index in_progress or
        stalled, as long as a save may still publish one. The dashboard says reading where an index is still being read.
        """
        if self.files == "complete" and self.damaged:
            return "damaged"
        if self.files == "partial" and (saves := self.under_way):
            return "in_progress" if any(save.state == "in_progress" for save in saves) else "stalled"
        return self.files

    @property
    def intact(self) -> bool:
        """Whether it is complete, and its bytes were compared with their checksums since they were written."""
        return self.status == "complete" and self.verification is not None and self.verification.ok

    @property
    def status_text(self) -> str:
        """The status as text; and if its branch is abandoned."""
        return STATUS_TEXTS.get(self.status, self.status) + ", abandoned branch" * self.abandoned

    @property
    def problem(self) -> str | None:
        """What is wrong with it; of several problems that a verification found, the first, and how many there are."""
        verified = self.verification
        if self.error or verified is None or not verified.problems:
            return self.error or ("a verification found it damaged" if self.damaged else self.elsewhere or None)
        more = f" (and {verified.total - 1:,} more)" if verified.total > 1 else ""
        return f"{verified.problems[0].file}: {verified.problems[0].text}{more}"

    @property
    def unhealthy(self) -> str:
        """What is no finite number, as far as known: a metric, or elements of arrays that a verification counted.

        A checkpoint with NaN is intact, for it has the bytes that were saved; but no run goes on from it.
        """
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                return f"{visible(name[:MAX_METRIC_TEXT])} is {json_number(value)}"
        found = self.verification
        if found is None or not found.nan:
            return ""
        return f"{count_text(found.nan, 'element')} of arrays NaN, first in {visible(found.nan_in)}"

    @property
    def status_and_problem(self) -> str:
        """The status, with whether it is intact, what is wrong, and what is no finite number."""
        wrong = "; ".join(filter(None, (self.problem, self.unhealthy and f"not healthy: {self.unhealthy}")))
        status = self.status_text + ", intact" * self.intact
        return f"{status}: {wrong}" if wrong else status


def sum_nbytes(infos: Iterable[CheckpointInfo]) -> int:
    """Adds up the bytes that the files of checkpoints take."""
    return sum(info.disk_nbytes or 0 for info in infos)


def needed_nbytes(sharing: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns how many bytes of each directory others need, by its name: the most that one `shared_with` of them says.

    What they share becomes less from save to save, so that together they share what the one shares.
    """
    needed: dict[str, int] = {}
    for shared_with in sharing:
        for name, nbytes in shared_with.items():
            needed[name] = max(needed.get(name, 0), nbytes)
    return needed


def retained_nbytes(kept: Iterable[CheckpointInfo]) -> int:
    """Returns the bytes that stay for some checkpoints: of all their files, with those that they share with others."""
    by_name = {info.name: info for info in kept}
    needed = needed_nbytes(info.shared_with for info in by_name.values())
    return sum_nbytes(by_name.values()) + sum(nbytes for name, nbytes in needed.items() if name not in by_name)


def id_of(info: CheckpointInfo) -> CheckpointId | None:
    """Returns the step by which a run has a checkpoint, or the text in its place; None for one that is none of the run.

    A directory of another name belongs to the run where its index says that a manager gave it this name; where the
    index cannot be decoded and shards are beside it, as that is not known then; and where a deletion was cut short, of
    which a run has only those of its checkpoints.
    """
    if (step := step_of(info.name) if info.named_step is None else info.named_step) is not None:
        return step
    named = info.lineage is not None and info.lineage.name == info.name
    unknown = info.files == "damaged" and info.save_id is None and bool(info.nbytes)
    return info.name if named or unknown or info.deleting else None


def mark_of(info: CheckpointInfo) -> SavedCheckpoint | None:
    """Returns the data that orders checkpoints by lineage; None without an index, or if moved from another step."""
    step = id_of(info)
    moved = isinstance(step, int) and info.step != step
    if info.files not in ("complete", "damaged") or info.save_id is None or step is None or moved:
        return None
    return SavedCheckpoint(step, info.save_id, info.lineage)


def with_named_step(info: CheckpointInfo, patterns: Collection[str]) -> CheckpointInfo:
    """Returns the same with the step that its name says by patterns of its run, and that which its index records."""
    if info.files == "foreign" or info.named_step is not None:
        return info
    step = step_of(info.name, (*patterns, *recorded_patterns([info.lineage])))
    if step is None:
        return info
    return msgspec.structs.replace(info, named_step=step, step=step if info.step is None else info.step)


def in_listing_order(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sorts the directories of one run for lists: newest first, then abandoned branches, then foreign directories.

    The steps of directories that have no index are known then by the patterns that others record.
    """
    infos = list(infos)
    patterns = recorded_patterns(info.lineage for info in infos)
    marked = [(info, mark_of(info)) for info in (with_named_step(info, patterns) for info in infos)]
    order = LineageOrder(mark for _, mark in marked if mark is not None)
    placed: list[tuple[CheckpointInfo, LineagePosition | None]] = []
    for info, mark in marked:
        position = order.position(mark) if mark is not None else None
        step = info.step if info.named_step is None else info.named_step
        # Without an index that can be read only the step says where it belongs.
        if position is None and step is not None:
            position = order.position_of_step(step)
        if position is not None:
            info = msgspec.structs.replace(info, sequence=position.sequence, abandoned=not position.present)
        placed.append((info, position))
    return [info for info, _ in sorted(placed, key=_sort_key)]


def _sort_key(placed: tuple[CheckpointInfo, LineagePosition | None]) -> tuple[Any, ...]:
    info, (present, sequence, step) = placed[0], placed[1] or (True, 0, 0)
    kind = info.files == "foreign", not present, info.step is None and id_of(info) is None
    return *kind, -sequence, -step, -(info.created_ns or 0), info.name


def with_verification(info: CheckpointInfo, folder: Store, known: VerificationStore) -> CheckpointInfo:
    """Returns the same with what is known of the bytes of a checkpoint in a folder; a damaged one may have an index."""
    if info.files not in ("complete", "damaged") or info.save_id is None:
        return info
    return msgspec.structs.replace(info, verification=known.find(folder, info.save_id, beside=info.found_damaged))


def step_info(info: CheckpointInfo) -> StepInfo:
    """Returns the data of a checkpoint by which policies decide; of one that is none of a run, with its name."""
    step = id_of(info)
    return StepInfo(
        info.name if step is None else step,
        info.created_ns or 0,
        metrics=info.metrics,
        pinned=info.pinned,
        sequence=info.sequence,
        abandoned=info.abandoned,
        damaged=info.damaged,
    )


OnRead = Callable[[int, int], object]
"""Takes how many directories of a run were read, and how many there are."""
Files = dict[str, DirectoryEntry]
"""The regular files of a directory, by name."""


def read_timings(path: str | os.PathLike[str] | Store, *, save_id: str | None = None) -> Timings:
    """Reads the timings of a checkpoint: of the save that its index names, else of the newest save that wrote some.

    Args:
        save_id: the save that the index names, if the caller knows it; the index is not read then.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointError: it is damaged.
        StoreError: it could not be read.
    """
    folder = path if not isinstance(path, (str, os.PathLike)) else open_store(path)
    if save_id is None:
        with contextlib.suppress(TreeckptError):
            save_id = checkpoint.read_index(folder).save_id
    return read_timings_file(folder, _timings_file(folder, regular_files(folder.entries()), save_id))


def _timings_file(folder: Store, files: Files, save_id: str | None) -> str:
    names = [n for n in files if (k := parse_file_name(n)) and k.kind == "timings" and save_id in (None, k.save_id)]
    if not names:
        label, expected = visible(folder.place), "the timings of a save"
        if not any(map(is_checkpoint_file, files)):
            raise CheckpointNotFound(label, expected="a checkpoint", found="none", hint="Check the path")
        if INDEX_NAME not in files:
            hint = "The save is under way, or ended before it wrote them"
            raise CheckpointNotFound(label, expected=expected, found="none, and no index", hint=hint)
        hint = "They are a record beside the checkpoint; without them it is still complete"
        raise CheckpointNotFound(label, expected=expected, found="none", hint=hint)
    return max(names, key=lambda name: (files[name].modified_ns, name))


def read_timings_file(folder: Store, name: str) -> Timings:
    """Reads the timings in a file of a folder.

    Raises:
        CheckpointNotFound, CheckpointError: as for `read_timings`.
    """
    label = visible(f"{folder.place}/{name}")
    try:
        timings = checkpoint.read_timings(folder, name.split(".")[1])
    except OSError as error:
        raise wrap_read_error(error, label, kind=CorruptError) from error
    if timings is None:
        raise CheckpointNotFound(label, expected="the timings of a save", found="no such file any more")
    return timings


def regular_files(entries: Files) -> Files:
    """Returns what is no directory, link or pipe."""
    return {name: entry for name, entry in entries.items() if entry.regular}


def _disk_nbytes(files: Files) -> int:
    return sum(entry.nbytes for entry in files.values())


def is_checkpoint_file(name: str) -> bool:
    """Whether a file has a name that treeckpt gives."""
    return parse_file_name(name) is not None


def checkpoints_without_step(run: RunStore) -> list[str]:
    """Returns the names of the directories of a run that hold a checkpoint, and have no name of a step.

    It is asked of a run without any checkpoint of its own.
    """
    indexed = (folder for folder in run.folders() if folder.entry(INDEX_NAME) is not None)
    infos = (read_info(folder, timings=False, or_unread=True) for folder in indexed)
    return [info.name for info in infos if info.save_id is not None and info.named_step is None]


def read_infos(
    run: RunStore,
    cache: StatCache,
    *,
    or_unread: bool = False,
    timings: bool = True,
    newest: NewestIndex | None = None,
    on_read: OnRead | None = None,
    patterns: Collection[str] = (),
) -> list[tuple[Store, CheckpointInfo]]:
    """Returns every folder of a run with its description.

    Args:
        or_unread, timings, newest, patterns: as for `read_info`.

    Raises:
        StoreError: the run cannot be reached, or refuses.
    """
    describe = partial(read_info, cache=cache, or_unread=or_unread, timings=timings, newest=newest, patterns=patterns)
    read = _for_each_folder(run, run.folders(), describe, on_read)
    known = {*patterns, *recorded_patterns(info.lineage for _, info in read)}
    others = superseded([folder for folder, _ in read], known)

    def in_run(folder: Store, info: CheckpointInfo) -> CheckpointInfo:
        if (counts := others.get(folder.name)) is not None:
            why = f"not taken: step {step_of(folder.name, known)} of this run is {counts}"
            return CheckpointInfo(folder.name, folder.place, "foreign", error=why)
        return with_named_step(info, known)

    return [(folder, in_run(folder, info)) for folder, info in read]


def _for_each_folder(
    run: RunStore, folders: Sequence[Store], describe: Callable[[Store], T], on_read: OnRead | None = None
) -> list[tuple[Store, T]]:
    threads = _threads_for(folders) if run.traits.far else 0
    results: list[tuple[Store, T]] = []
    with ThreadPool(threads, "treeckpt-catalog") if threads else contextlib.nullcontext() as pool:
        for folder, result in zip(folders, (pool.map if pool else map)(describe, folders), strict=True):
            results.append((folder, result))
            if on_read is not None:
                on_read(len(results), len(folders))
    return results


def _threads_for(folders: Sequence[Store]) -> int:
    largest = max((index.nbytes for folder in folders if (index := folder.entry(INDEX_NAME))), default=0)
    return max(1, min(CONCURRENT_READS, READ_MEMORY // max(largest, 1)))


def read_marks(run: RunStore, cache: StatCache, patterns: Collection[str] = ()) -> list[SavedCheckpoint]:
    """Returns the data that orders a run's checkpoints by lineage, from their indexes alone; cached ones are not read.

    Args:
        patterns: as for `read_info`.

    Raises:
        StoreError: the run cannot be reached.
    """
    read = _for_each_folder(run, run.folders(), partial(_summary_of, cache=cache))
    known = {*patterns, *recorded_patterns(summary.lineage for _, summary in read if summary is not None)}
    others = superseded([folder for folder, _ in read], known)
    marks = (_mark(folder.name, s, known) for folder, s in read if s is not None and folder.name not in others)
    return [mark for mark in marks if mark is not None]


def _summary_of(folder: Store, cache: StatCache) -> Summary | None:
    index = folder.entry(INDEX_NAME) if folder.traits.follow_links or not folder.is_link else None
    with contextlib.suppress(TreeckptError):
        return read_summary(folder, index, cache) if index is not None else None
    return None


def _mark(name: str, summary: Summary, patterns: Collection[str]) -> SavedCheckpoint | None:
    step = step_of(name, patterns)
    if step is not None and summary.step in (None, step):
        return SavedCheckpoint(step, summary.save_id, summary.lineage)
    if step is None and summary.lineage is not None and summary.lineage.name == name:
        return SavedCheckpoint(name, summary.save_id, summary.lineage)
    return None


def read_info(
    path: str | os.PathLike[str] | Store,
    *,
    cache: StatCache | None = None,
    follow: bool = False,
    timings: bool = True,
    newest: NewestIndex | None = None,
    or_unread: bool = False,
    patterns: Collection[str] = (),
) -> CheckpointInfo:
    """Describes one directory.

    Args:
        follow: follows a symbolic link: for paths that a person gave, not for entries of a run.
        timings: reads how long a complete checkpoint took to save, which is a request of its own.
        newest: is offered the index, if it is not in the cache.
        or_unread: describes a local directory that could not be read as unread, with the error: for lists that are
            shown to a person, and where the others matter all the same.
        patterns: by which its run names steps, beside `STEP_PATTERN` and that which its index records.

    Raises:
        StoreError: it cannot be reached, or refuses to be read, so that nothing is known about the checkpoint.
    """
    folder = open_store(path) if isinstance(path, (str, os.PathLike)) else path
    if folder.is_link and not (follow or folder.traits.follow_links):
        return CheckpointInfo(folder.name, folder.place, "foreign", error="a symbolic link, which is not followed")
    cache = cache or LruStatCache(0)
    try:
        info = _read_info(folder, cache, newest, patterns, timings=timings)
    except StoreError as error:
        if not or_unread or folder.traits.local_path is None:
            raise
        info = CheckpointInfo(folder.name, folder.place, "unread", error=str(error), shared=None)
    return with_named_step(info, patterns)


def _read_info(
    folder: Store, cache: StatCache, newest: NewestIndex | None, patterns: Collection[str], *, timings: bool
) -> CheckpointInfo:
    name, entries = folder.name, folder.entries()
    files = regular_files(entries)
    if (index := entries.get(INDEX_NAME)) is not None:
        try:
            summary = read_summary(folder, index, cache, newest)
        except StoreError:  # says nothing about the checkpoint
            raise
        except TreeckptError as error:
            nbytes = sum(files[file].nbytes for file in files if parse_shard_name(file) is not None)
            # not of an index of a newer version, which a repair must not replace: its hint says what else to do
            if damaged := isinstance(error, CorruptError) and error.repairable:
                error = TreeckptError(error.path, expected=error.expected, found=error.found)
            return CheckpointInfo(
                name,
                folder.place,
                "damaged",
                nbytes=nbytes,
                disk_nbytes=_disk_nbytes(files),
                error=str(error),
                fault="index_damaged" if damaged else "",
                shared=None,
            )
        if summary.shared:
            files |= regular_files(folder.sharing(summary.shared).entries())
        for file, _ in (*summary.sizes, *summary.sidecars):
            # What is there and no regular file is a link: this raises that it is not followed, which is no damage.
            if file not in files and file in entries:
                check_missing(folder, file)
        info = _with_index(folder, summary, files, cache if timings else None)
        if info.files == "damaged" and (now := folder.listed()).entries().get(INDEX_NAME, index) != index:
            # another save has replaced it since the listing
            return _read_info(now, cache, newest, patterns, timings=timings)
        return info
    exists = folder.modified_ns() is not None
    step = step_of(name, patterns)
    # an empty directory is that of a save if a manager would have given it this name
    given = step is not None and name in (step_name(step, pattern) for pattern in (STEP_PATTERN, *patterns))
    if any(map(is_checkpoint_file, files)) or (given and exists and not entries):
        return _without_index(folder, files, cache)
    absent = "not a directory" if step is None else f"no checkpoint of step {step}"
    error = "no checkpoint: neither an index nor shards" if exists else absent
    return CheckpointInfo(name, folder.place, "foreign", error=error)


class SaveDuration(msgspec.Struct, frozen=True, gc=False):
    """The parts of the timings that a list of checkpoints needs."""

    seconds: float
    blocked_seconds: float
    error: str | None


def _read_duration(folder: Store, name: str) -> SaveDuration:
    timings = read_timings_file(folder, name)
    try:
        profile = profile_of(timings)
        return SaveDuration(profile.seconds, profile.blocked_seconds, timings.error)
    except (ArithmeticError, LookupError) as error:  # the times and parents of spans are not checked before
        raise CorruptError(visible(f"{folder.place}/{name}"), expected="spans of a save", found=f"{error}") from error


def _save_duration(folder: Store, files: Files, save_id: str | None, cache: StatCache) -> SaveDuration:
    name = _timings_file(folder, files, save_id)
    return cache.get_or_read((f"{folder.place}/{name}", "took"), files[name], partial(_read_duration, folder, name))


def _with_index(folder: Store, summary: Summary, files: Files, durations: StatCache | None) -> CheckpointInfo:
    took = None
    with contextlib.suppress(TreeckptError):  # a checkpoint is complete without timings
        if durations is not None:
            took = _save_duration(folder, files, summary.save_id, durations)
    mark = files.get(ended_name(summary.save_id)) if durations is not None else None
    problem = _problem("shard", summary.sizes_here(files), files, summary.shared)
    return CheckpointInfo(
        name=folder.name,
        path=folder.place,
        files="complete" if problem is None else "damaged",
        step=summary.step,
        save_id=summary.save_id,
        world=summary.world,
        leaves=summary.leaves,
        nbytes=summary.nbytes,
        disk_nbytes=_disk_nbytes({name: file for name, file in files.items() if name not in summary.shared}),
        shared=summary.shared,
        shared_with=summary.shared_with,
        shared_nbytes=summary.shared_nbytes,
        created_ns=summary.created_ns,
        seconds=took.seconds if took else None,
        blocked_seconds=took.blocked_seconds if took else None,
        held_nbytes=summary.held_nbytes,
        error=problem or _problem("sidecar file", summary.sidecars, files),
        fault=_fault((*summary.sizes_here(files), *summary.sidecars), files, summary.save_id),
        metrics=summary.metrics,
        pinned=PIN_NAME in files,
        found_damaged=verdict_name(summary.save_id) in files,
        saving=_saving(folder, files, summary.save_id),
        lineage=summary.lineage,
        ended=read_end(folder, summary.save_id, mark, durations)
        if mark is not None and durations is not None
        else None,
        disks=disks_of(summary, files),
    )


def disks_of(summary: Summary, files: Files) -> tuple[DiskInfo, ...]:
    """Returns the disks of a node-local checkpoint, with what is here."""
    sizes = dict(summary.sizes) if summary.disks else {}
    return tuple(
        DiskInfo(
            host,
            len(names),
            sum(name in files and files[name].nbytes == sizes[name] for name in names),
            sum(sizes[name] for name in names),
        )
        for host, names in zip(summary.hosts, summary.disks, strict=True)
    )


def _saving(folder: Store, files: Files, committed: str | None = None) -> tuple[SaveUnderWay, ...]:
    """Returns the saves under way; the record of a save that the index names is about to be removed."""
    records = [name for name in files if (parsed := parse_progress_name(name)) and parsed[1] != committed]
    return saves_under_way(folder, records) if records else ()


def _problem(what: str, sizes: Sequence[tuple[str, int]], files: Files, shared: Mapping[str, str] = {}) -> str | None:
    bad = [(name, size) for name, size in sizes if name not in files or files[name].nbytes != size]
    if not bad:
        return None
    name, size = bad[0]
    now = f"has {files[name].nbytes} bytes instead of {size}" if name in files else "is missing"
    if homes := sorted({shared[name] for name, _ in bad if name in shared}):
        now += f"; it shares shards of {', '.join(homes)}, which must be beside it"
    are = "is" if len(bad) == 1 else "are"
    return f"{len(bad)} of {count_text(len(sizes), what)} {are} not as saved: {name} {now}"


def _fault(sizes: Sequence[tuple[str, int]], files: Files, save_id: str) -> FilesFault:
    if lost := {name: size for name, size in sizes if name not in files or files[name].nbytes < size}:
        copies = {name: files.get(plain) for name, plain in stored_files(lost).items()}
        if all((copy := copies.get(name)) is not None and copy.nbytes == size for name, size in lost.items()):
            return "copies_left"
        return "other_save" if saves_of_all_ranks(files).keys() - {save_id} else "files_lost"
    return "files_long" if any(files[name].nbytes > size for name, size in sizes) else ""


def _without_index(folder: Store, files: Files, cache: StatCache) -> CheckpointInfo:
    shards = {n: parsed for n in files if (parsed := parse_shard_name(n)) is not None}
    newest = max(shards, key=lambda n: files[n].modified_ns, default=None)
    text, seconds, saving = "no index: the save is under way, or never finished", None, _saving(folder, files)
    world = saves_of_all_ranks(shards).get(shards[newest][0]) if newest else None
    ended = all(save.alive is False for save in saving)
    writing = {(save.save_id, rank) for save in saving for rank in save.writing} if ended else ()
    whole = bool(world) and not any(_is_begun(folder, name) for name, of in shards.items() if of[:2] in writing)
    fault: FilesFault = ("index_lost" if whole else "unfinished") if ended else ""
    if fault == "index_lost" and world:
        ranks = f"all {world} ranks" if world > 1 else "its only rank"
        text = f"no index, though shards of {ranks} are there; the next save to it, or gc, removes them"
    with contextlib.suppress(TreeckptError):
        took = _save_duration(folder, files, None, cache)
        seconds = took.seconds
        if took.error:
            text, fault = f"no index: the save failed: {took.error}", "unfinished"
    kinds = {kind.kind: name for name in files if (kind := parse_file_name(name))}
    prepared, deleting = None, "deleted" in kinds
    if "prepared" in kinds:
        text, fault = "no index: whether its save was committed is known on the disks of other hosts", ""
        prepared = prepared_summary(folder, kinds["prepared"])
    if deleting and "shared" in kinds and shards:
        text, fault = "deleted; the shards that other checkpoints share stay as long as these", ""
    elif deleting:
        text, fault = "no index: it is being deleted, or that was cut short and gc will finish it", "unfinished"
    # a record is replaced as long as its save lasts: by its time, two saves would change places in a list
    begun = [save.started_ns for save in saving]
    begun += [entry.modified_ns for name, entry in files.items() if parse_progress_name(name) is None]
    return CheckpointInfo(
        name=folder.name,
        path=folder.place,
        files="partial",
        save_id=prepared.save_id if prepared else shards[newest][0] if newest else None,
        disks=disks_of(prepared, files) if prepared else (),
        world=shards[newest][2] if newest else None,
        nbytes=sum(files[n].nbytes for n in shards),
        disk_nbytes=_disk_nbytes(files),
        created_ns=min(begun, default=None),
        seconds=seconds,
        error=text,
        fault=fault,
        pinned=PIN_NAME in files,
        saving=saving,
        deleting=deleting,
    )


def _is_begun(folder: Store, name: str) -> bool:
    """Whether a shard that was being written has no header yet: that is written last, and the size says nothing."""
    first = bytearray(8)
    with contextlib.suppress(TreeckptError, OSError):
        folder.read_into(name, 0, memoryview(first))
    return not any(first)


def prepared_summary(folder: Store, name: str) -> Summary | None:
    """Returns the summary of the index of a node-local save whose commit is not known here, if it can be read."""
    with contextlib.suppress(TreeckptError, OSError):
        return summarize_index(decode_index(folder.read(name, limit=MAX_INDEX), f"{folder.place}/{name}"))
    return None
