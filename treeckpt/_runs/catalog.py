"""Lists the checkpoints of a run directory, with the state of each.

`read_info` reads the index and timings of one directory and compares the sizes of the shards with those in the index;
`scan` does so for every directory of a run, on a disk, in memory or in an object store. What cannot be read is reported
with its state and is not raised: directories of other programs, saves that never finished, indexes that do not decode.
Only a store that cannot be reached or read, or that refuses, raises. Links are not followed. No shard is opened;
`verify` does that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from .._core.format.files import PIN_NAME, is_step_name, parse_file_name, parse_progress_name, step_of, verdict_name
from .._core.format.index import INDEX_NAME
from .._core.format.lineage import SavedCheckpoint
from .._core.format.shard_header import parse_shard_name, saves_of_all_ranks
from .._core.format.timings import Timings
from .._core.text import visible
from .._inspect.profile import profile_of
from .._io.os_errors import shows_damage, wrap_read_error
from .._io.storage import checkpoint
from .._io.storage.checkpoint import NewestIndex
from .._io.storage.local_store import is_url, local_path
from .._io.storage.open import open_run, open_store
from .._io.storage.shard_reader import check_missing
from .._io.storage.store import DirectoryEntry, RunStore, Store
from .._threads import ThreadPool
from ..errors import CheckpointNotFound, CorruptError, StoreError, TreeckptError
from .active_saves import saves_under_way
from .checkpoint_info import CheckpointInfo, in_listing_order, lost_index_text
from .index_summary import Summary, read_summary
from .stat_cache import LruStatCache, StatCache

CONCURRENT_READS = 64
"""Folders of an object store that are read at a time, at most."""
READ_MEMORY = 512 << 20
"""Bytes of indexes that are read at a time, at most, unless one is larger."""
T = TypeVar("T")
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
    return read_timings_file(folder, _timings_file(folder, _regular(folder.entries()), save_id))


def _timings_file(folder: Store, files: Files, save_id: str | None) -> str:
    names = [n for n in files if (k := parse_file_name(n)) and k.kind == "timings" and save_id in (None, k.save_id)]
    if not names:
        label, expected = visible(folder.place), "the timings of a save"
        if not any(map(_is_checkpoint_file, files)):
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


def _regular(entries: Files) -> Files:
    return {name: entry for name, entry in entries.items() if entry.regular}


def _disk_nbytes(files: Files) -> int:
    return sum(entry.nbytes for entry in files.values())


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory itself contains files of a checkpoint, complete or not.

    Raises:
        StoreError: it could not be read.
    """
    if is_url(text := os.fspath(path)):
        entries = open_store(text).entries()
        return any(map(_is_checkpoint_file, _regular(entries))) or INDEX_NAME in entries
    try:
        with os.scandir(local_path(text)) as found:  # a run may have thousands of directories: none is opened
            return any(
                e.name == INDEX_NAME or (_is_checkpoint_file(e.name) and (e.is_symlink() or e.is_file())) for e in found
            )
    except OSError as error:
        if not shows_damage(error):
            raise wrap_read_error(error, text) from error
        return False


def run_exists(run: str) -> bool:
    """Whether a path or URL exists and may be a run or a checkpoint.

    Raises:
        StoreError: an object store cannot be reached, or refuses.
    """
    if is_url(run):
        return bool(open_run(run).names() or open_store(run).entries())
    return Path(local_path(run)).is_dir()


def _is_checkpoint_file(name: str) -> bool:
    return parse_file_name(name) is not None


def scan(
    run: str | os.PathLike[str] | RunStore,
    *,
    cache: StatCache | None = None,
    newest: NewestIndex | None = None,
    on_read: OnRead | None = None,
) -> list[CheckpointInfo]:
    """Lists every checkpoint of a run, newest first, then foreign directories; or the one checkpoint at the path.

    Where steps of a run are below a checkpoint at the path, all are listed. The newest is the one saved last. Abandoned
    branches follow after the lineage of the newest. Names that start with a dot and entries that are no directories are
    left out. A local directory that could not be read is listed as unread.

    Args:
        newest: as for `read_info`.

    Raises:
        StoreError: the run cannot be reached, or refuses.
    """
    cache = cache or LruStatCache(0)
    if isinstance(run, (str, os.PathLike)) and is_checkpoint(run):
        folder = open_store(run).listed()
        one = read_info_or_unread(folder, cache=cache, follow=True, newest=newest)
        if not has_steps(folder):
            return [one]
        found = read_infos(open_run(run), cache, report_errors=True, newest=newest, on_read=on_read)
        return in_listing_order([one, *(info for _, info in found if info.status != "foreign")])
    found = read_infos(open_run(run), cache, report_errors=True, newest=newest, on_read=on_read)
    return in_listing_order(info for _, info in found)


def has_steps(folder: Store) -> bool:
    """Whether directories named as steps are below a directory; False where that could not be read."""
    with contextlib.suppress(StoreError):
        return any(is_step_name(name) and not entry.regular for name, entry in folder.entries().items())
    return False


def runs_below(run: RunStore) -> list[str]:
    """Returns the paths of the directories of a run that are runs themselves."""
    return [folder.place for folder in run.folders() if has_steps(folder)]


def read_infos(
    run: RunStore,
    cache: StatCache,
    *,
    report_errors: bool = False,
    timings: bool = True,
    newest: NewestIndex | None = None,
    on_read: OnRead | None = None,
) -> list[tuple[Store, CheckpointInfo]]:
    """Returns every folder of a run with its description.

    Args:
        report_errors: reads with `read_info_or_unread`.
        timings, newest: as for `read_info`.

    Raises:
        StoreError: the run cannot be reached, or refuses.
    """
    reader = read_info_or_unread if report_errors else read_info
    one = partial(reader, cache=cache, timings=timings, newest=newest)
    return _for_each_folder(run, one, on_read)


def _for_each_folder(run: RunStore, one: Callable[[Store], T], on_read: OnRead | None = None) -> list[tuple[Store, T]]:
    folders = run.folders()
    threads = _threads_for(folders) if run.traits.far else 0
    found: list[tuple[Store, T]] = []
    with ThreadPool(threads, "treeckpt-catalog") if threads else contextlib.nullcontext() as pool:
        for folder, result in zip(folders, (pool.map if pool else map)(one, folders), strict=True):
            found.append((folder, result))
            if on_read is not None:
                on_read(len(found), len(folders))
    return found


def _threads_for(folders: Sequence[Store]) -> int:
    largest = max((index.nbytes for folder in folders if (index := folder.entry(INDEX_NAME))), default=0)
    return max(1, min(CONCURRENT_READS, READ_MEMORY // max(largest, 1)))


def read_marks(run: RunStore, cache: StatCache) -> list[SavedCheckpoint]:
    """Returns the data that orders a run's checkpoints by lineage, from their indexes alone; cached ones are not read.

    Raises:
        StoreError: the run cannot be reached.
    """
    return [mark for _, mark in _for_each_folder(run, partial(_read_mark, cache=cache)) if mark is not None]


def _read_mark(folder: Store, cache: StatCache) -> SavedCheckpoint | None:
    shown = is_step_name(folder.name) and (folder.traits.follow_links or not folder.is_link)
    index = folder.entry(INDEX_NAME) if shown else None
    with contextlib.suppress(TreeckptError):
        summary = read_summary(folder, index, cache) if index is not None else None
        if summary is not None and summary.step in (None, step_of(folder.name)):
            return SavedCheckpoint(step_of(folder.name) or 0, summary.save_id, summary.lineage)
    return None


def read_info_or_unread(
    folder: Store,
    *,
    cache: StatCache | None = None,
    follow: bool = False,
    timings: bool = True,
    newest: NewestIndex | None = None,
) -> CheckpointInfo:
    """Same as `read_info`, but a local directory that could not be read is described as unread, with the error.

    For lists that are shown to a person, and where the others matter all the same.
    """
    try:
        return read_info(folder, cache=cache, follow=follow, timings=timings, newest=newest)
    except StoreError as error:
        if folder.traits.local_path is None:
            raise
        return CheckpointInfo(folder.name, folder.place, "unread", step_of(folder.name), error=str(error))


def read_info(
    path: str | os.PathLike[str] | Store,
    *,
    cache: StatCache | None = None,
    follow: bool = False,
    timings: bool = True,
    newest: NewestIndex | None = None,
) -> CheckpointInfo:
    """Describes one directory.

    Args:
        follow: follows a symbolic link: for paths that a person gave, not for entries of a run.
        timings: reads how long a complete checkpoint took to save, which is a request of its own.
        newest: is offered the index, if it is not in the cache.

    Raises:
        StoreError: it cannot be reached, or refuses to be read, so that nothing is known about the checkpoint.
    """
    cache = cache or LruStatCache(0)
    folder = open_store(path) if isinstance(path, (str, os.PathLike)) else path
    name = folder.name
    if folder.is_link and not (follow or folder.traits.follow_links):
        return CheckpointInfo(name, folder.place, "foreign", error="a symbolic link, which is not followed")
    entries = folder.entries()
    files = _regular(entries)
    if (index := entries.get(INDEX_NAME)) is not None:
        try:
            summary = read_summary(folder, index, cache, newest)
        except StoreError:  # says nothing about the checkpoint
            raise
        except TreeckptError as error:
            nbytes = sum(files[one].nbytes for one in files if parse_shard_name(one) is not None)
            return CheckpointInfo(
                name,
                folder.place,
                "corrupt",
                step_of(name),
                nbytes=nbytes,
                disk_nbytes=_disk_nbytes(files),
                error=str(error),
            )
        for one, _ in (*summary.sizes, *summary.sidecars):
            if one not in files and one in entries:
                check_missing(folder, one)
        info = _with_index(folder, summary, files, cache if timings else None)
        if info.status == "corrupt" and (now := folder.listed()).entries().get(INDEX_NAME, index) != index:
            # another save has replaced it since the listing
            return read_info(now, cache=cache, follow=follow, timings=timings, newest=newest)
        return info
    exists = folder.modified_ns() is not None
    if any(map(_is_checkpoint_file, files)) or (step_of(name) is not None and exists and not entries):
        return _without_index(folder, files, cache)
    absent = "not a directory" if step_of(name) is None else f"no checkpoint of step {step_of(name)}"
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
    problem = _problem("shards", summary.sizes, files)
    return CheckpointInfo(
        name=folder.name,
        path=folder.place,
        status="complete" if problem is None else "corrupt",
        step=summary.step if summary.step is not None else step_of(folder.name),
        save_id=summary.save_id,
        world=summary.world,
        leaves=summary.leaves,
        nbytes=summary.nbytes,
        disk_nbytes=_disk_nbytes(files),
        created_ns=summary.created_ns,
        seconds=took.seconds if took else None,
        blocked_seconds=took.blocked_seconds if took else None,
        held_nbytes=summary.held_nbytes,
        error=problem or _problem("sidecar files", summary.sidecars, files),
        metrics=summary.metrics,
        pinned=PIN_NAME in files,
        found_damaged=verdict_name(summary.save_id) in files,
        saving=saves_under_way(folder, files, committed=summary.save_id),
        lineage=summary.lineage,
    )


def _problem(what: str, sizes: Sequence[tuple[str, int]], files: Files) -> str | None:
    bad = [(name, size) for name, size in sizes if name not in files or files[name].nbytes != size]
    if not bad:
        return None
    name, size = bad[0]
    now = f"has {files[name].nbytes} bytes instead of {size}" if name in files else "is missing"
    return f"{len(bad)} of {len(sizes)} {what} are not as saved: {name} {now}"


def _without_index(folder: Store, files: Files, cache: StatCache) -> CheckpointInfo:
    shards = {n: parsed for n in files if (parsed := parse_shard_name(n)) is not None}
    newest = max(shards, key=lambda n: files[n].modified_ns, default=None)
    text, seconds, saving = "no index: the save is under way, or never finished", None, saves_under_way(folder, files)
    world = saves_of_all_ranks(shards).get(shards[newest][0]) if newest else None
    if world and all(save.alive is False for save in saving):
        text = lost_index_text(folder.place, world)
    with contextlib.suppress(TreeckptError):
        took = _save_duration(folder, files, None, cache)
        seconds = took.seconds
        text = f"no index: the save failed: {took.error}" if took.error else text
    if any((kind := parse_file_name(name)) and kind.kind == "deleted" for name in files):
        text = "no index: it is being deleted, or that was cut short and the next clean-up will finish it"
    # a record is replaced as long as its save lasts: by its time, two saves would change places in a list
    begun = [save.started_ns for save in saving]
    begun += [entry.modified_ns for name, entry in files.items() if parse_progress_name(name) is None]
    return CheckpointInfo(
        name=folder.name,
        path=folder.place,
        status="partial",
        step=step_of(folder.name),
        save_id=shards[newest][0] if newest else None,
        world=shards[newest][2] if newest else None,
        nbytes=sum(files[n].nbytes for n in shards),
        disk_nbytes=_disk_nbytes(files),
        created_ns=min(begun, default=None),
        seconds=seconds,
        error=text,
        pinned=PIN_NAME in files,
        saving=saving,
    )
