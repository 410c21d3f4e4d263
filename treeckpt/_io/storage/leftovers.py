"""Finds, lists and removes the files that dead saves left in a checkpoint's directory.

What may be removed is decided by `_inspect.deletion`. A save clears its path before it writes and, where the store
has no conditional write, once more when it has ended: of two saves that end at the same moment the later one finds both
ended, and removes what the index does not name. An index is read only after the progress records were read, so a save
that has been committed meanwhile is never taken for one that was replaced.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable

import msgspec

from ..._core.format.file_names import deleted_name, final_name, is_undecided, parse_file_name, writer_tag
from ..._core.format.index import INDEX_NAME
from ..._core.format.save_progress import Owner, parse_progress_name
from ..._inspect.deletion import (
    CleanupTimes,
    FileInfo,
    Removal,
    RetainedDirectory,
    StepDirectory,
    leftovers_of,
    plan_leftovers,
    proof_order,
)
from ...errors import CheckpointError, CheckpointExists, CheckpointNotFound, TreeckptError
from ...reports import Leftover
from .index_lock import held_locks, hold_lock, read_lock
from .kept_file import LAPSE
from .late_requests import names_being_deleted
from .many_files import for_each
from .metadata_files import decode_and_check, read_index, read_index_bytes, read_timings, taken_index
from .process_owner import is_running
from .progress_file import is_alive, read_record
from .reader_leases import LEASE, read_lease
from .store import DirectoryEntry, Store

GRACE = 3600.0
"""Seconds after which files of an unfinished save are removed, where nothing shows whether the save is alive."""


def deletion_times(now_ns: int, grace: float = GRACE) -> CleanupTimes:
    """Returns the current time and the grace periods, as `_inspect.deletion` takes them."""
    return CleanupTimes(now_ns, int(grace * 1e9), int(LEASE * 1e9))


def file_facts(folder: Store, now_ns: int, *, committed: str | None) -> tuple[FileInfo, ...]:
    """Returns the files of a directory, and whether their processes are alive; `committed` is the save of the index."""
    gone = names_being_deleted()
    found = folder.entries()
    entries = {name: one for name, one in found.items() if (one.regular or one.link) and name not in gone}
    alive: dict[str, bool | None] = {}
    ended: set[str] = set()
    owned = [
        name
        for name in entries
        if (kind := parse_file_name(name))
        and (kind.kind in ("lease", "deleting", "repairing") or parse_progress_name(final_name(name)))
    ]
    states = for_each(folder, lambda name: _owner_state(folder, name, entries[name], now_ns), owned)
    for name, state in zip(owned, states, strict=True):
        if state is None:
            del entries[name]
            continue
        owner, alive[name] = state
        if owner is not None and alive[name] is False and not is_running(owner):
            ended.add(owner.tag)
    for name in entries:
        # a lock is written again where its temporary file has gone, see `hold_lock`
        if writer_tag(name) in ended or name.startswith((".deleting.", ".repairing.")):
            alive.setdefault(name, False)
    for name in _timings_without_record(entries, committed):
        with contextlib.suppress(TreeckptError, OSError):
            timings = read_timings(folder, name.split(".")[1])
            alive[name] = False if timings is not None and timings.error is not None else None
    # where a link is deleted, what it leads to stays
    return tuple(
        FileInfo(name, 0 if e.link else e.nbytes, e.modified_ns or now_ns, alive.get(name))
        for name, e in entries.items()
    )


def _owner_state(
    store: Store, name: str, entry: DirectoryEntry, now_ns: int
) -> tuple[Owner | None, bool | None] | None:
    """Returns the owner of a progress record, lease or lock, and whether that process may still run; None if not known.

    The whole is None for a lease or lock that was deleted since it was listed.
    """
    if parse_progress_name(final_name(name)) is None:
        try:
            return read_lease(store, name) if name.startswith("lease") else read_lock(store, name)
        except FileNotFoundError:
            return None
    try:
        record = read_record(store, name)
    except (TreeckptError, OSError):  # a live save renews its record
        return None, True if now_ns - (entry.modified_ns or now_ns) < LAPSE * 1e9 else None
    if record is None:
        # a record is renewed soon if its process lives, so that an empty temporary file is never needed
        return None, False if not entry.nbytes and final_name(name) != name else None
    renewed = msgspec.structs.replace(record, alive_ns=max(record.alive_ns, entry.modified_ns))
    return record.owner, is_alive(final_name(name), renewed, now_ns)


def _timings_without_record(names: Iterable[str], committed: str | None) -> list[str]:
    """Returns the timings files of saves that have shards there, and no progress record of their coordinator."""
    kinds = {name: kind for name in names if (kind := parse_file_name(name)) is not None}
    shards = {kind.save_id for kind in kinds.values() if kind.kind == "shard"}
    recorded = {parsed[1] for name in kinds if (parsed := parse_progress_name(final_name(name))) and not parsed[0]}
    unrecorded = shards - recorded - {committed}
    return [name for name, kind in kinds.items() if kind.kind == "timings" and kind.save_id in unrecorded]


def committed_save_id(folder: Store) -> str | None:
    """Returns the id of the save that the index names; None if there is no index or it cannot be read."""
    try:
        return read_index(folder).save_id
    except CheckpointError:
        return None


def index_of_save(folder: Store, save_id: str) -> bytes | None:
    """Returns the content of the index if it names this save; None if not, or if it cannot be read."""
    with contextlib.suppress(CheckpointError):
        data = read_index_bytes(folder)
        return data if decode_and_check(folder, data).save_id == save_id else None
    return None


def _folder_fact(folder: Store, now_ns: int) -> StepDirectory:
    """Returns the files and state of a directory that is not part of a run."""
    files = file_facts(folder, now_ns, committed=None)
    status, save_id, problem = "complete", None, ""
    try:
        save_id = read_index(folder).save_id
    except CheckpointNotFound:
        status = "partial"
    except CheckpointError as error:
        status, problem = "corrupt", str(error)
    return StepDirectory(
        step=0,
        created_ns=0,
        name=folder.name,
        status=status,
        modified_ns=folder.modified_ns() or 0,
        files=files,
        save_id=save_id,
        problem=problem,
        path=folder.place,
    )


def plan_removal(folder: Store, now_ns: int, grace: float = GRACE) -> Removal | RetainedDirectory | None:
    """Returns the leftovers to remove from a directory, or why they stay; None if there are none."""
    return plan_leftovers(_folder_fact(folder, now_ns), deletion_times(now_ns, grace))


def _has_other_saves(names: Iterable[str], known: str) -> bool:
    """Whether files of other saves than `known` are among these names."""
    kinds = [kind for name in names if (kind := parse_file_name(name)) is not None]
    shared = ("index", "pin", "lease", "deleting", "repairing")
    return any(kind.kind not in shared and (not known or kind.save_id != known) for kind in kinds)


def list_leftovers(store: Store, names: Iterable[str], *, known: str) -> tuple[Leftover, ...]:
    """Lists the files beside a checkpoint of neither it nor a live save; arguments as for `clear_leftovers`."""
    if not _has_other_saves(names, known):
        return ()
    now = time.time_ns()
    fact = _folder_fact(store, now)
    sizes = {file.name: file.nbytes for file in fact.files}
    found = leftovers_of(fact, deletion_times(now))
    return tuple(Leftover(name, sizes[name], why) for name, why in sorted(found.items()))


def remove_leftovers(folder: Store, removal: Removal) -> str:
    """Removes leftovers; returns why not, if something has changed since the removal was planned."""
    kinds = [kind for name in removal.files if (kind := parse_file_name(name)) is not None]
    saves = {kind.save_id for kind in kinds if kind.kind in ("shard", "sidecar", "timings")}
    if removal.files:
        with hold_lock(folder, "deleting") as own:
            locks = held_locks(folder, folder.sizes().keys() - {own}) if saves else {}
            if any(name.startswith("repairing") for name in locks):
                return "it is being repaired"
            back = restore_index(folder)
            if saves and committed_save_id(folder) in saves:
                return "its index, which a deletion had taken, is back" if back else "it has been committed meanwhile"
            decided = [] if back else _decide(folder, removal.files)
            if decided is None:
                return "another process goes on with its deletion, or undoes it"
            delete_files(folder, [*removal.files, *decided])
        folder.sync()
    if removal.directory:
        folder.remove_directory()
    return ""


def delete_files(store: Store, names: Iterable[str], *, order: Callable[[str], int] = proof_order) -> None:
    """Deletes files; those that prove that the save of others has ended once all others are gone.

    Args:
        order: files with a higher number are deleted after all with a lower one, if these are gone.

    Raises:
        OSError | StoreError: that of the first file that could not be deleted; all that can be are deleted.
    """

    def delete(name: str) -> Exception | None:
        try:
            store.delete(name)
        except (OSError, TreeckptError) as error:
            return error
        return None

    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(order(name), []).append(name)
    for number in sorted(groups):
        if error := next(filter(None, for_each(store, delete, groups[number])), None):
            raise error


def restore_index(store: Store) -> bool:
    """Gives an index its name back, see `taken_index`; returns whether there was one."""
    if not store.traits.renames or INDEX_NAME in (names := store.sizes()):
        return False
    if (found := taken_index(store, names)) is not None:
        with contextlib.suppress(CheckpointExists, FileNotFoundError):  # it is back, was replaced, or is being deleted
            own = deleted_name(found[0].split(".")[1], secrets.token_hex(8))
            store.rename(found[0], own, replace=True)
            store.rename(own, INDEX_NAME, replace=False)
            return True
    return False


def _decide(store: Store, names: Iterable[str]) -> list[str] | None:
    """Renames each index among these files that was taken away, so that nobody puts it back.

    Returns:
        The new names; None if another process was faster to rename one.
    """
    decided: list[str] = []
    if not store.traits.renames:
        return decided
    try:
        for name in filter(is_undecided, names):
            decided.append(deleted_name(name.split(".")[1]))
            store.rename(name, decided[-1], replace=True)
    except FileNotFoundError:
        return None
    return decided


def clear_leftovers(store: Store, names: Iterable[str], *, known: str) -> None:
    """Removes what dead saves left at the path of a save. Errors are ignored: they must not make the save fail.

    Args:
        names: the files at the path.
        known: the id of the committed save; if there are only files of this save, nothing more is read.
    """
    if not _has_other_saves(names, known):
        return
    with contextlib.suppress(Exception):
        found = plan_removal(store, time.time_ns())
        if isinstance(found, Removal):
            remove_leftovers(store, msgspec.structs.replace(found, directory=False))
