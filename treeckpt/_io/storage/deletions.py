"""Deletions in a checkpoint's directory: the lock on its index, and the files that dead saves left.

The lock is one between saves on one side, and deletions and repairs on the other.

Of the files in a directory two have a name that several processes share: the index and the pin. All others carry the id
of a save or process, so that to delete one never hits another save's. A process that takes the index away, or replaces
one that it has looked at, must not hit the index of a save that was committed since its look. Each side writes a file
before it looks for the other's, so at least one of two sees the other:

    save      progress record -> shards -> list: waits while a lock stands -> publishes the index -> deletes the record
    deletion  lock `deleting` -> list: gives up if a save is alive, a repair's lock stands, or the index is another
              save's -> takes the index away -> list: puts it back for a pin, or else decides -> deletes the lock ->
              deletes the other files
    repair    lock `repairing` -> list: gives up if a save is alive, or another lock stands -> replaces files, the index
              if it is as it was read -> deletes the lock
    clean-up  lock `deleting` -> list: gives up if a repair's lock stands, or the index is of a save whose files are to
              go -> deletes leftovers -> deletes the lock

Several deletions may hold a lock at the same time: one of them takes the index away. A lock is held for a few requests:
a repair copies a shard before it takes the lock, and looks under it whether the shard is still the one that it has read
(on a file system of fsspec, and in memory, it is written under the lock). A clean-up holds its lock while it deletes,
so for longer where there are many leftovers.

A lock counts until its process has ended, and for `LAPSE` seconds at most: its deletion may fail. A lock or record of a
save that could not be read counts as held or alive; a damaged one does not.

A process that was stopped for longer than `LAPSE` can still take away the index of a save that did not wait for it. So
a local index is taken away by a rename to `deleted.<save id>.<id>.json`, and looked at there: if it is another save's,
it gets its name back by a link, which replaces nothing. The deletion decides by a second rename, to
`deleted.<save id>.json`. If the process is killed before, readers take the index from the first name where it is
another save's or a pin stands, and the next save or clean-up gives it its name back (`restore_index`). It
renames it first too: of a deletion that decides and a process that gives the name back only one succeeds.

A save that was stopped for so long publishes nothing there: a clean-up deletes its temporary index before its shards,
and the save looks for its shards in between. `published_index` says what becomes of it elsewhere.

An object store does not rename. A deletion writes the index there to `deleted.<save id>.<id>.json` before it deletes
`index.json`, on condition that it is the version that was looked at, where the store knows that condition. Who puts the
index back publishes it as `index.json`, and then replaces the content of the other file by `DECIDED`, on condition that
it is the version that was read. So does the deletion that decides, which then looks for `index.json` once more: only
one succeeds, and the other gives up, or deletes what it has published.
A store that knows neither renames nor conditions does the same without them: there only the locks keep two apart.

*Leftovers* are the files that dead saves left. What may be removed is decided by `_inspect.deletion`. A save clears its
path before it writes and, where the store has no conditional write, once more when it has ended: of two saves that end
at the same moment the later one finds both ended, and removes what the index does not name. An index is read only after
the progress records were read, so a save that has been committed meanwhile is never taken for one that was replaced.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

import msgspec

from ..._core.format.files import (
    LockKind,
    Owner,
    deleted_name,
    final_name,
    is_undecided,
    lock_name,
    parse_file_name,
    parse_progress_name,
    prepared_name,
    shared_mark_name,
    writer_tag,
)
from ..._core.format.index import INDEX_NAME, MAX_INDEX, decode_index
from ..._core.format.records import Index
from ..._core.format.shard_header import parse_shard_name
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
from ..os_errors import FULL, shows_damage
from ..process import is_running, names_being_deleted
from .checkpoint import decode_and_check, read_index, read_index_bytes, read_timings, taken_index
from .kept_files import (
    LAPSE,
    LATE_PAUSES,
    LEASE,
    KeptFile,
    encode_claim,
    hold_lease,
    is_alive,
    read_claim,
    read_lease,
    read_record,
)
from .plain_names import copies_of, give_plain_names, stored_files, take_plain_names
from .shared_files import needed_files
from .store import DirectoryEntry, Store, exists_error, for_each

LOCK_WAIT_SECONDS = 60.0
"""Seconds that a save waits for locks."""
FIRST_PAUSE, LAST_PAUSE = 0.01, 1.0
"""Seconds between looks at a lock that is waited for: twice as long each time."""
DECIDED = b"{}"
"""What a file holds in a store that renames no files, once the index that it held is not put back any more."""
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-f]{16})"')


@contextlib.contextmanager
def hold_lock(store: Store, kind: LockKind) -> Iterator[str]:
    """Holds a lock while the body runs; gives its name, "" where a full disk does not take it.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    lock = KeptFile(store, lock_name(kind, secrets.token_hex(8)), encode_claim)

    # a directory that is gone is not made again; where files are left, a clean-up has removed the temporary file alone
    def check_directory() -> None:
        if not store.sizes():
            raise FileNotFoundError(store.url)

    try:
        lock.create(check_directory)
    except BaseException as error:
        lock.end_late()  # an object store may have written it all the same, or an interrupt have come behind it
        if not isinstance(error, OSError) or error.errno not in FULL:
            raise
        # deletions make room: an index that is taken away wrongly is put back
        yield ""
        return
    try:
        yield lock.name
    finally:
        if not lock.end():
            lock.end_late(LATE_PAUSES)


def read_lock(store: Store, name: str) -> tuple[Owner | None, bool]:
    """Returns the process that holds a lock, and whether it may still hold it, as `read_claim`."""
    owner, held = read_claim(store, name, damaged=False)  # a power loss leaves damaged ones: locks are not made durable
    return owner, bool(held)


def held_locks(store: Store, names: Iterable[str]) -> dict[str, Owner | None]:
    """Returns those locks among a directory's files that are held, with their processes, None where not known."""
    locks = [name for name in names if (kind := parse_file_name(name)) and kind.kind in ("deleting", "repairing")]

    def read(name: str) -> tuple[Owner | None, bool]:
        with contextlib.suppress(FileNotFoundError):
            return read_lock(store, name)
        return None, False

    states = for_each(store, read, locks) if locks else ()
    return {name: owner for name, (owner, held) in zip(locks, states, strict=True) if held}


def sizes_and_locks(store: Store, own: str = "") -> tuple[dict[str, int], dict[str, Owner | None]]:
    """Returns the files and their sizes, and the `held_locks` of others than `own`.

    A lock that was listed may have gone when it is read, with files that were listed too. So where none of the listed
    locks is held any more, the files are listed once more.
    """
    sizes = store.sizes()
    others = [name for name in sizes if name != own and name.startswith(("deleting.", "repairing."))]
    held = held_locks(store, others)
    return (store.sizes() if others and not held else sizes), held


def unlocked_sizes(store: Store) -> dict[str, int]:
    """Returns the files and their sizes once no lock is held; for a save whose record can be seen.

    Raises:
        CheckpointError: a lock is held for longer than `LOCK_WAIT_SECONDS`.
    """
    begin, pause = time.monotonic(), FIRST_PAUSE
    while True:
        sizes, held = sizes_and_locks(store)
        if not held:
            return sizes
        if time.monotonic() - begin > LOCK_WAIT_SECONDS:
            name, owner = next(iter(held.items()))
            raise CheckpointError(
                store.url,
                expected="that nothing deletes or repairs the checkpoint at the path of the save",
                found=f"{_who(name, owner)} since {LOCK_WAIT_SECONDS:.0f} s or longer",
                hint=f"Save again when that has ended; if there is no such process, delete {name}",
            )
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


def index_state(store: Store, name: str = INDEX_NAME) -> bytes | int | None:
    """Returns the content of an index, its size where it is no file or on a bad sector, and None if there is none.

    Raises:
        OSError | StoreError: it could not be read this time.
    """
    try:
        return store.read(name, limit=MAX_INDEX)
    except FileNotFoundError:
        return None
    except (TreeckptError, OSError) as error:
        if not shows_damage(error) and not (isinstance(error, OSError) and error.errno == errno.EIO):
            raise
        return store.sizes().get(name)


def legible_save_id(state: bytes | int | None) -> str | None:
    """Returns the save id in an index that may be damaged, None where it has none."""
    match = _SAVE_ID.search(state) if isinstance(state, bytes) else None
    return match[1].decode() if match else None


def mark_shared_files(store: Store, index: Index, held: contextlib.ExitStack) -> None:
    """Marks the saves whose files an index names, before it is published, and checks that these files are there.

    Args:
        held: keeps leases on their directories, until the index is published.

    Raises:
        CheckpointError: a file is gone, or has another size; or as `unlocked_sizes`.
    """
    for home in index.references.homes if index.references is not None else ():
        folder, mark = store.run().folder(home.directory), shared_mark_name(home.save_id)
        if folder.entries():  # they would make a directory that is gone
            held.enter_context(hold_lease(folder))
            if folder.entry(mark) is None:
                folder.publish(mark, b"{}", replace=True)
        sizes = unlocked_sizes(folder)
        for file in index.file_list:
            if file.directory == home.directory and sizes.get(file.name) != file.header + file.nbytes:
                raise CheckpointError(
                    f"{folder.url}/{file.name}",
                    expected=f"{file.header + file.nbytes} bytes, which the save shares with that checkpoint",
                    found="no such file" if file.name not in sizes else f"{sizes[file.name]}",
                    hint="Something else deletes or changes files there; the next save writes everything",
                )


@contextlib.contextmanager
def hold_for_repair(store: Store) -> Iterator[dict[str, int]]:
    """Holds a lock while files of a checkpoint are replaced; gives the files there and their sizes.

    Raises:
        CheckpointError: a save is under way there, or another process deletes or repairs files.
    """
    with hold_lock(store, "repairing") as own:
        names, locks = sizes_and_locks(store, own)
        held = [_who(name, owner) for name, owner in locks.items()]
        # of a node-local save there may be none of rank 0
        saves = {name: parsed[1] for name in names if (parsed := parse_progress_name(name))}
        alive = for_each(store, lambda name: _may_be_saving(store, name), list(saves))
        lives = dict.fromkeys(save for save, under_way in zip(saves.values(), alive, strict=True) if under_way)
        held += [f"save {save} is under way there" for save in lives]
        if held:
            raise CheckpointError(
                store.url,
                expected="that nothing else changes the checkpoint while it is repaired",
                found="; ".join(held),
                hint="Look at the checkpoint again when that has ended",
            )
        yield names


def _may_be_saving(store: Store, name: str) -> bool:
    """Whether the save of a record may still be under way."""
    try:
        record = read_record(store, name)
    except (TreeckptError, OSError):
        return True
    return record is not None and bool(is_alive(name, record, time.time_ns()))


def take_index(store: Store, aside: str, *, holds: Callable[[bytes], bool] | None) -> None:
    """Takes the index away: a store that renames files keeps it as `aside`, any other deletes it.

    Args:
        holds: returns whether a content is that of the index that is meant; None for any, which may be no file. Where
            the store has no conditional deletion, it is not asked.

    Raises:
        FileNotFoundError: there is no index.
        CheckpointExists: it is another one, and stays.
    """
    if store.traits.renames:
        store.rename(INDEX_NAME, aside, replace=True)
        try:
            # another one, where this process was stopped for minutes
            if holds is not None and not (isinstance(content := index_state(store, aside), bytes) and holds(content)):
                raise exists_error(store, INDEX_NAME)
        except BaseException:
            store.rename(aside, INDEX_NAME, replace=False)
            raise
    elif store.traits.conditional and holds is not None:
        present, version = store.read_version(INDEX_NAME, limit=MAX_INDEX)
        if not holds(present):
            raise exists_error(store, INDEX_NAME)
        store.delete(INDEX_NAME, version=version)
    else:
        store.delete(INDEX_NAME)


def _who(name: str, owner: Owner | None) -> str:
    who = f"process {owner.pid} on {owner.host}" if owner is not None else "a process"
    return f"{who} {'deletes' if name.startswith('deleting') else 'repairs'} it"


GRACE = 3600.0
"""Seconds after which files of an unfinished save are removed, where nothing shows whether the save is alive."""


def deletion_times(now_ns: int, grace: float = GRACE) -> CleanupTimes:
    """Returns the current time and the grace periods, as `_inspect.deletion` takes them."""
    return CleanupTimes(now_ns, int(grace * 1e9), int(LEASE * 1e9))


def file_facts(folder: Store, now_ns: int, *, committed: str | None) -> tuple[FileInfo, ...]:
    """Returns the files of a directory, and whether their processes are alive; `committed` is the save of the index."""
    # before the listing: a file whose deletion ends in between would be taken for one that stays
    gone = names_being_deleted()
    listed = folder.entries()
    entries = {name: entry for name, entry in listed.items() if (entry.regular or entry.link) and name not in gone}
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
        # a lock lapses while its process may still run; then temporary files of that process stay
        if owner is not None and alive[name] is False and not is_running(owner):
            ended.add(owner.tag)
    for name in entries:
        # a lock is written again where its temporary file has gone, see `hold_lock`
        if writer_tag(name) in ended or name.startswith((".deleting.", ".repairing.")):
            alive.setdefault(name, False)
    for name in _timings_without_record(entries, committed):
        with contextlib.suppress(TreeckptError, OSError):
            timings = read_timings(folder, name.split(".")[1])
            # a save that has failed leaves timings with its error, so it has ended
            alive[name] = False if timings is not None and timings.error is not None else None
    # where a link is deleted, what it leads to stays
    copies = copies_of(folder, entries, cached=True)
    return tuple(
        FileInfo(name, 0 if e.link else e.nbytes, e.modified_ns or now_ns, alive.get(name), name in copies)
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


def _names_any(folder: Store, files: Mapping[str, str | None]) -> bool:
    """Whether some of these files are of the committed save; copies of shards that its index does not name are not.

    Args:
        files: the save of each file.
    """
    try:
        index = read_index(folder)
    except CheckpointError:
        return False
    of_save = {name for name, save_id in files.items() if save_id == index.save_id}
    return bool(of_save - unnamed_shards(index.save_id, index.file_names, of_save))


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
    # before the index is read: a save that is committed in between must not be taken for one that was replaced
    files = file_facts(folder, now_ns, committed=None)
    status, save_id, problem, unnamed = "complete", None, "", frozenset[str]()
    try:
        index = read_index(folder)
        save_id, names = index.save_id, {file.name for file in files}
        if index.shared_names:
            unnamed = unnamed_shards(save_id, index.file_names, names)
        # then files of another save may be all that is left of a checkpoint
        if not index.disks and (lost := [file.name for file in index.own_files if file.name not in names]):
            status, problem = "damaged", f"{lost[0]} is missing"
    except CheckpointNotFound:
        status = "partial"
    except CheckpointError as error:
        status, problem = "damaged", str(error)
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
        needed=needed_files(folder, [file.name for file in files]),
        unnamed=unnamed,
    )


def unnamed_shards(save_id: str, named: Container[str], names: Iterable[str]) -> frozenset[str]:
    """Returns those of some files that are shards of a save and are not among those that its index names."""
    shards = (name for name in names if (parsed := parse_shard_name(name)) is not None and parsed[0] == save_id)
    return frozenset(name for name in shards if name not in named)


def plan_removal(folder: Store, now_ns: int, grace: float = GRACE) -> Removal | RetainedDirectory | None:
    """Returns the leftovers to remove from a directory, or why they stay; None if there are none."""
    return plan_leftovers(_folder_fact(folder, now_ns), deletion_times(now_ns, grace))


def restore_plain_names(store: Store, names: Collection[str]) -> None:
    """Makes the copies of a checkpoint's sidecar files that a killed save has not made, unless a save is under way.

    Args:
        names: the files there.
    """
    if INDEX_NAME not in names or all(plain in names for plain in stored_files(names).values()):
        return
    with contextlib.suppress(OSError, TreeckptError), hold_for_repair(store):
        give_plain_names(store)


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
    reasons = leftovers_of(fact, deletion_times(now))
    return tuple(Leftover(name, sizes[name], why) for name, why in sorted(reasons.items()))


def remove_leftovers(folder: Store, removal: Removal) -> str:
    """Removes leftovers; returns why not, if something has changed since the removal was planned."""
    kinds = [(name, kind) for name in removal.files if (kind := parse_file_name(name)) is not None]
    saves = {name: kind.save_id for name, kind in kinds if kind.kind in ("shard", "sidecar", "timings")}
    if removal.files:
        with hold_lock(folder, "deleting") as own:
            # a repair replaces files of saves alone
            locks = held_locks(folder, folder.sizes().keys() - {own}) if saves else {}
            if any(name.startswith("repairing") for name in locks):
                return "it is being repaired"
            # first of all, since the shards of an index that is put back are no leftovers
            back = restore_index(folder)
            if saves and _names_any(folder, saves):
                return "its index, which a deletion had taken, is back" if back else "it has been committed meanwhile"
            decided = [] if back else _decide_all(folder, removal.files)
            if decided is None:
                return "another process goes on with its deletion, or undoes it"
            # nobody makes an index again beside these marks, also where this process is stopped for minutes
            marks = [] if folder.entry(INDEX_NAME) else sorted({deleted_name(s) for s in saves.values() if s})
            with contextlib.suppress(OSError, TreeckptError):  # a full disk takes none
                for mark in marks:
                    folder.publish(mark, b"{}", replace=True)
            names = spared(folder, dict.fromkeys([*removal.files, *decided, *marks]))
            if saves and not back and _names_any(folder, saves):
                delete_files(folder, marks)
                return "it has been committed meanwhile"
            delete_files(folder, names)
        folder.sync()
    if removal.directory:
        folder.remove_directory()
    return ""


def spared(folder: Store, names: Iterable[str]) -> list[str]:
    """Returns those of some files that no other checkpoint of the run needs, for a caller that holds the lock.

    Of a save of which one file is needed the marks stay too: those of the deletion, and of the files being shared.
    """
    needed = needed_files(folder, folder.sizes()).names
    kept = {kind.save_id for name in needed if (kind := parse_file_name(name)) is not None}
    kinds = [(name, parse_file_name(name)) for name in names]
    marks = ("deleted", "shared")
    return [n for n, kind in kinds if n not in needed and not (kind and kind.kind in marks and kind.save_id in kept)]


def delete_files(store: Store, names: Iterable[str], *, order: Callable[[str], int] = proof_order) -> None:
    """Deletes files; those that prove that the save of others has ended once all others are gone.

    Copies of sidecar files under their plain names go first, and those of the checkpoint that is there are made again,
    see `plain_names`.

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

    names, groups = list(names), dict[int, list[str]]()
    if stored := stored_files(names):
        groups[-2] = list(copies_of(store, store.entries(), stored))
    for name in names:
        groups.setdefault(order(name), []).append(name)
    for number in sorted(groups):
        if error := next(filter(None, for_each(store, delete, groups[number])), None):
            raise error
    if groups.get(-2):
        give_plain_names(store)


def restore_index(store: Store) -> bool:
    """Gives an index its name back, see `taken_index`; returns whether there was one."""
    if INDEX_NAME in (names := store.sizes()):
        return False
    if (taken := taken_index(store, names)) is not None:
        name, data = taken
        with contextlib.suppress(CheckpointExists, FileNotFoundError):  # it is back, was replaced, or is being deleted
            if store.traits.renames:
                own = deleted_name(name.split(".")[1], secrets.token_hex(8))
                store.rename(name, own, replace=True)
                store.rename(own, INDEX_NAME, replace=False)
                return True
            # published before the decision: a kill in between leaves it in both places, and the deletion looks for it
            store.publish(INDEX_NAME, data, replace=False)
            if not store.traits.conditional or _take_content(store, name) is not None:
                store.delete(name)
                return True
            # where the other file is gone, a clean-up has found the index back, or all shards are gone too
            shards, names = {file.name for file in decode_index(data).own_files}, store.sizes()
            if name not in names and shards <= names.keys():
                return True
            take_index(store, name, holds=lambda found: found == data)
    return False


def decide_deletion(store: Store, aside: str, mark: str) -> bool:
    """Decides that an index that `take_index` has taken away stays away; from then on nobody puts it back.

    Args:
        mark: the name that the file `aside` gets, in a store that renames files.

    Returns:
        False where another process has put it back, or was faster to decide.
    """
    if store.traits.renames:
        try:
            store.rename(aside, mark, replace=True)
        except FileNotFoundError:
            return False
    elif store.traits.conditional:
        if (data := _take_content(store, aside)) is None:
            return store.entry(INDEX_NAME) is None
        with contextlib.suppress(CheckpointExists, FileNotFoundError):  # of a process that was killed putting it back
            take_index(store, aside, holds=lambda found: found == data)
    elif store.entry(INDEX_NAME) is not None:  # it is back
        return False
    else:
        store.publish(aside, DECIDED, replace=True)
    return True


def _take_content(store: Store, name: str) -> bytes | None:
    """Replaces the index in a file of a `conditional` store by `DECIDED`; returns it, None if another process has."""
    with contextlib.suppress(CheckpointExists, FileNotFoundError):
        data, version = store.read_version(name, limit=MAX_INDEX)
        if data != DECIDED:
            store.publish(name, DECIDED, replace=version)
            return data
    return None


def _decide_all(store: Store, names: Iterable[str]) -> list[str] | None:
    """Decides the deletion of each index among these files that was taken away.

    Returns:
        The names that the files have now; None if another process was faster.
    """
    decided: list[str] = []
    taken = list(filter(is_undecided, names))
    if taken and INDEX_NAME in store.sizes():  # it is back, or its deletion was killed before it took it
        return decided
    for name in taken:
        decided.append(deleted_name(name.split(".")[1]))
        if not decide_deletion(store, name, decided[-1]):
            return None
    return decided if store.traits.renames else []


def prepared_saves(names: Iterable[str]) -> list[str]:
    """Returns the ids of the node-local saves whose prepared index is among these files."""
    kinds = [kind for name in names if (kind := parse_file_name(name)) is not None]
    return sorted(kind.save_id for kind in kinds if kind.kind == "prepared" and kind.save_id is not None)


def publish_prepared(store: Store, save_id: str) -> bool:
    """Publishes the prepared index of a save, for a caller that knows that it is committed on another disk.

    Returns:
        False where the index was prepared no more, or is published.

    Raises:
        CheckpointError: as `hold_for_repair`.
    """
    with hold_for_repair(store) as names:
        if (prepared := prepared_name(save_id)) not in names:
            return False
        if (replaced := committed_save_id(store)) == save_id:  # killed before it could delete the other file
            store.delete(prepared)
            return False
        take_plain_names(store, names, save_id)
        store.rename(prepared, INDEX_NAME, replace=True)
        store.sync()
        give_plain_names(store, save_id)
    if replaced is not None:
        discard_save(store, replaced)
    discard_save(store, save_id, kinds=("progress",))
    return True


def discard_save(store: Store, save_id: str, *, kinds: Collection[str] = ()) -> None:
    """Deletes the files of a save, for a caller that knows that it has ended and is not the one of the index.

    Args:
        kinds: only files of these kinds; by default all.
    """
    owned = [(name, kind) for name in store.sizes() if (kind := parse_file_name(name)) is not None]
    delete_files(store, [n for n, kind in owned if kind.save_id == save_id and (not kinds or kind.kind in kinds)])


def discard_prepared(store: Store, names: Collection[str], save_ids: Iterable[str]) -> list[str]:
    """Deletes the files of node-local saves that were not committed, or were replaced; returns whose are deleted.

    One that may be under way stays.

    Args:
        names: the files there.
    """
    done: list[str] = []
    for save_id in save_ids:
        records = [name for name in names if (parsed := parse_progress_name(name)) and parsed[1] == save_id]
        if not any(_may_be_saving(store, name) for name in records):
            discard_save(store, save_id)
            done.append(save_id)
    return done


def clear_leftovers(
    store: Store,
    names: Iterable[str],
    *,
    known: str,
    before: Callable[[Store, Collection[str]], object] | None = None,
) -> None:
    """Removes what dead saves left at the path of a save. Errors are ignored: they must not make the save fail.

    Args:
        names: the files at the path.
        known: the id of the committed save; if there are only files of this save, nothing more is read.
        before: called with the names of files that are about to be removed.
    """
    if not _has_other_saves(names, known):
        return
    with contextlib.suppress(Exception):
        removal = plan_removal(store, time.time_ns())
        if isinstance(removal, Removal):
            if before is not None:
                before(store, removal.files)
            # the directory stays, as a save writes there
            remove_leftovers(store, msgspec.structs.replace(removal, directory=False))
