"""Files that dead saves left in a checkpoint's directory: finds, lists and removes them by `core.analysis.deletion`.

A save clears its path before it writes and, where the store cannot refuse to replace an index that is newer than the
one it knows, once more when it has ended: of two that end at the same moment the one that ends last finds both ended,
and what the index does not name is left over. An index is read only after the records were looked for, so a save that
has been committed meanwhile is never taken for one that was replaced.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import msgspec

from ...core.analysis.deletion import (
    CleanupTimes,
    FileInfo,
    Removal,
    RetainedDirectory,
    StepDirectory,
    leftovers_of,
    plan_leftovers,
)
from ...core.format.file_names import final_name, parse_file_name, writer_tag
from ...core.format.save_progress import MAX_PROGRESS, Owner, decode_progress, parse_progress_name
from ...errors import CheckpointError, CheckpointNotFound, TreeckptError
from ...reports import Leftover
from .metadata_files import read_index, read_timings
from .object_store import ObjectFolder, ObjectStore
from .process_owner import is_running
from .progress_file import is_alive
from .reader_leases import LEASE, owner_of
from .run_store import Entry, Folder, LocalFolder
from .store import LocalStore, Store
from .versions import Version

__all__ = [
    "GRACE",
    "clear_leftovers",
    "committed",
    "file_facts",
    "list_leftovers",
    "plan_of",
    "remove_leftovers",
    "times",
]

GRACE = 3600.0
"""Seconds after which files of an unfinished save are cleaned away, where nothing shows whether it is alive."""


def times(now_ns: int, grace: float = GRACE) -> CleanupTimes:
    """When it is, and how long to wait."""
    return CleanupTimes(now_ns, int(grace * 1e9), int(LEASE * 1e9))


def file_facts(folder: Folder, now_ns: int, *, committed: str | None) -> tuple[FileInfo, ...]:
    """The files of a directory, with what is known of those who keep them.

    Args:
        committed: the save that the index names.
    """
    entries = {name: entry for name, entry in folder.entries().items() if entry.regular}
    alive: dict[str, bool | None] = {}
    ended: set[str] = set()
    for name in entries:
        owned = parse_file_name(name)
        if owned is None or not (owned.kind == "lease" or parse_progress_name(final_name(name))):
            continue
        owner, alive[name] = _evidence(folder.store, name, entries[name], now_ns)
        if owner is not None and is_running(owner) is False:
            ended.add(owner.tag)
    for name in entries:
        if writer_tag(name) in ended:
            alive.setdefault(name, False)
    for name in _unexplained(entries, committed):
        with contextlib.suppress(TreeckptError, OSError):
            timings = read_timings(folder.store, name.split(".")[1])
            alive[name] = False if timings is not None and timings.error is not None else None
    return tuple(FileInfo(name, e.nbytes, e.modified_ns, alive.get(name)) for name, e in entries.items())


def _evidence(store: Store, name: str, entry: Entry, now_ns: int) -> tuple[Owner | None, bool | None]:
    """The owner of a record or a lease, and whether that process may still run; None where that is not known."""
    if (parsed := parse_progress_name(final_name(name))) is None:
        owner = owner_of(store, name)
        return owner, is_running(owner) if owner is not None else None
    with contextlib.suppress(TreeckptError, OSError):
        record = decode_progress(store.read(name, limit=MAX_PROGRESS), name)
        if (record.rank, record.save_id) == parsed:
            renewed = msgspec.structs.replace(record, alive_ns=max(record.alive_ns, entry.modified_ns))
            return record.owner, is_alive(final_name(name), renewed, now_ns)
    return None, None


def _unexplained(names: Iterable[str], committed: str | None) -> list[str]:
    """The timings of saves that have shards there, and no record of their coordinator."""
    named = {name: kind for name in names if (kind := parse_file_name(name)) is not None}
    shards = {kind.save_id for kind in named.values() if kind.kind == "shard"}
    recorded = {parsed[1] for name in named if (parsed := parse_progress_name(final_name(name))) and not parsed[0]}
    odd = shards - recorded - {committed}
    return [name for name, kind in named.items() if kind.kind == "timings" and kind.save_id in odd]


def committed(folder: Folder) -> str | None:
    """The save that the index names; None where there is none, or it cannot be read."""
    try:
        return read_index(folder.store).save_id
    except CheckpointError:
        return None


def _fact_of(folder: Folder, now_ns: int) -> StepDirectory:
    """The files and state of a directory that is not part of a run."""
    files = file_facts(folder, now_ns, committed=None)
    status, save_id, problem = "complete", None, ""
    try:
        save_id = read_index(folder.store).save_id
    except CheckpointNotFound:
        status = "partial"
    except CheckpointError as error:
        status, problem = "corrupt", str(error)
    return StepDirectory(folder.name, 0, status, folder.modified_ns() or 0, files, save_id, problem=problem)


def plan_of(folder: Folder, now_ns: int, grace: float = GRACE) -> Removal | RetainedDirectory | None:
    """What of a directory is left over, and why the rest of it stays."""
    return plan_leftovers(_fact_of(folder, now_ns), times(now_ns, grace))


def _has_others(names: Iterable[str], known: str) -> bool:
    """Whether files of other saves than this one are among these names."""
    kinds = [kind for name in names if (kind := parse_file_name(name)) is not None]
    return any(kind.kind not in ("index", "pin", "lease") and (not known or kind.save_id != known) for kind in kinds)


def list_leftovers(store: Store, names: Iterable[str], *, known: str) -> tuple[Leftover, ...]:
    """The files beside a checkpoint that belong neither to it nor to a save that is known to be alive.

    Args:
        names, known: as for `clear_leftovers`.
    """
    if not _has_others(names, known):
        return ()
    now = time.time_ns()
    fact = _fact_of(folder_of(store), now)
    sizes = {file.name: file.nbytes for file in fact.files}
    return tuple(Leftover(name, sizes[name], why) for name, why in sorted(leftovers_of(fact, times(now)).items()))


def remove_leftovers(folder: Folder, removal: Removal) -> str:
    """Carries the removal of leftovers out; says why not, if something has changed since it was decided."""
    saves = {
        kind.save_id for name in removal.files if (kind := parse_file_name(name)) and kind.kind in ("shard", "timings")
    }
    if saves and committed(folder) in saves:
        return "it has been committed meanwhile"
    for name in removal.files:
        folder.store.delete(name)
    if removal.files:
        folder.sync()
    if removal.directory:
        folder.remove()
    return ""


def clear_leftovers(store: Store, names: Iterable[str], *, known: str) -> None:
    """Removes what dead saves left at the path of a save; never a reason for that to fail.

    Args:
        names: what is there.
        known: the save whose files are no reason to look any further.
    """
    if not _has_others(names, known):
        return
    with contextlib.suppress(Exception):
        folder = folder_of(store)
        found = plan_of(folder, time.time_ns())
        if isinstance(found, Removal):
            remove_leftovers(folder, msgspec.structs.replace(found, directory=False))


class _StoreFolder:
    """Any store as a directory of which no times are known: all in it is new."""

    is_link = False

    def __init__(self, store: Store) -> None:
        self.store, self.url = store, store.url
        self.name = store.url.rstrip("/").rpartition("/")[2]

    def modified_ns(self) -> int | None:
        return time.time_ns()

    def entries(self) -> dict[str, Entry]:
        now = time.time_ns()
        return {name: Entry(nbytes, now) for name, nbytes in self.store.sizes().items()}

    def entry(self, name: str) -> Entry | None:
        return self.entries().get(name)

    def sync(self) -> None:
        """It cannot be asked for; what comes back after a power loss is left over again."""

    def remove(self) -> bool:
        return False


def folder_of(store: Store) -> Folder:
    """A checkpoint's store as a directory."""
    store = store.inner if isinstance(store, Version) else store
    if type(store) is LocalStore:
        return LocalFolder(store.directory)
    return ObjectFolder(store) if type(store) is ObjectStore else _StoreFolder(store)
