"""The lock on a checkpoint's index between saves on one side, and deletions and repairs on the other.

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
another save's or a pin stands, and the next save or clean-up gives it its name back (`leftovers.restore_index`). It
renames it first too: of a deletion that decides and a process that gives the name back only one succeeds.

In an object store the index is deleted on condition that it is the version that was looked at, where the store knows
that condition. A save that was stopped for so long publishes nothing: a clean-up deletes its temporary index before its
shards, and the save looks for its shards in between.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from ..._core.format.files import (
    LockKind,
    Owner,
    damaged_name,
    deleted_name,
    lock_name,
    parse_file_name,
    parse_progress_name,
)
from ..._core.format.index import INDEX_NAME, MAX_INDEX, encode_index
from ..._core.format.records import Index
from ...errors import CheckpointError, CheckpointExists, TreeckptError
from ..os_errors import FULL, shows_damage
from .kept_file import LATE_PAUSES, KeptFile, encode_claim, read_claim
from .many_files import for_each
from .metadata_files import replaced_meanwhile
from .progress_file import is_alive, read_record
from .store import Store, exists_error

LOCK_WAIT_SECONDS = 60.0
"""Seconds that a save waits for locks."""
FIRST_PAUSE, LAST_PAUSE = 0.01, 1.0
"""Seconds between looks at a lock that is waited for: twice as long each time."""
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-f]{16})"')


@contextlib.contextmanager
def hold_lock(store: Store, kind: LockKind) -> Iterator[str]:
    """Holds a lock while the body runs; gives its name, "" where a full disk does not take it.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    lock = KeptFile(store, lock_name(kind, secrets.token_hex(8)), encode_claim)

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

    found = for_each(store, read, locks)
    return {name: owner for name, (owner, held) in zip(locks, found, strict=True) if held}


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
    found = _SAVE_ID.search(state) if isinstance(state, bytes) else None
    return found[1].decode() if found else None


@contextlib.contextmanager
def hold_for_repair(store: Store) -> Iterator[dict[str, int]]:
    """Holds a lock while files of a checkpoint are replaced; gives the files there and their sizes.

    Raises:
        CheckpointError: a save is under way there, or another process deletes or repairs files.
    """
    with hold_lock(store, "repairing") as own:
        names, locks = sizes_and_locks(store, own)
        held = [_who(name, owner) for name, owner in locks.items()]
        saves = {name: parsed[1] for name in names if (parsed := parse_progress_name(name)) and not parsed[0]}
        alive = for_each(store, lambda name: _may_be_saving(store, name), list(saves))
        held += [f"save {save} is under way there" for save, lives in zip(saves.values(), alive, strict=True) if lives]
        if held:
            raise CheckpointError(
                store.url,
                expected="that nothing else changes the checkpoint while it is repaired",
                found="; ".join(held),
                hint="Look at the checkpoint again when that has ended",
            )
        yield names


def _may_be_saving(store: Store, name: str) -> bool:
    """Whether the save of a record of rank 0 may still be under way."""
    try:
        record = read_record(store, name)
    except (TreeckptError, OSError):
        return True
    return record is not None and bool(is_alive(name, record, time.time_ns()))


def replace_index(store: Store, before: bytes | int | None, index: Index) -> str:
    """Publishes an index that was made again, under a lock, if there still is the one that was found, and its shards.

    Args:
        before: the `index_state` from before it was made.

    Returns:
        The name under which the one before is kept, "" if there was none.

    Raises:
        CheckpointExists: there is one now, and was none.
        CheckpointError: the checkpoint has been replaced or deleted, or as `hold_for_repair`.
    """
    data = encode_index(index)
    with hold_for_repair(store) as names:
        deleted = (name for name in names if (kind := parse_file_name(name)) and kind.kind == "deleted")
        gone = before is None and next(deleted, None) is not None
        if gone or (before is not None and index_state(store) != before):
            raise replaced_meanwhile(store)
        if before is None and not {file.name for file in index.file_list} <= names.keys():
            raise replaced_meanwhile(store)
        if before is None:
            store.publish(INDEX_NAME, data, replace=False)
            return ""
        aside = damaged_name(INDEX_NAME, secrets.token_hex(8))
        if not store.traits.renames:
            if isinstance(before, bytes):
                store.publish(aside, before, replace=True)
            if isinstance(before, bytes) and store.traits.conditional:
                store.compare_and_swap(INDEX_NAME, data, holds=lambda found: found == before, limit=MAX_INDEX)
            else:
                store.publish(INDEX_NAME, data, replace=True)
            return aside if isinstance(before, bytes) else ""
        # clean-ups leave a directory alone in which a repair was killed here
        store.rename(INDEX_NAME, aside, replace=True)
        try:
            if index_state(store, aside) != before:  # this process was stopped for minutes
                raise replaced_meanwhile(store)
            store.publish(INDEX_NAME, data, replace=False)
        except BaseException:
            store.rename(aside, INDEX_NAME, replace=False)
            raise
        return aside


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
            if holds is not None and not (isinstance(found := index_state(store, aside), bytes) and holds(found)):
                raise exists_error(store, INDEX_NAME)
        except BaseException:
            store.rename(aside, INDEX_NAME, replace=False)
            raise
    elif store.traits.conditional and holds is not None:
        store.delete_if(INDEX_NAME, holds=holds, limit=MAX_INDEX)
    else:
        store.delete(INDEX_NAME)


def take_back_index(store: Store, save_id: str) -> None:
    """Takes back the index of a save that has published it, unless another save has replaced it."""

    def holds(found: bytes) -> bool:
        return legible_save_id(found) == save_id

    with contextlib.suppress(FileNotFoundError, CheckpointExists):
        aside = deleted_name(save_id, secrets.token_hex(8))
        take_index(store, aside, holds=holds)
        if store.traits.renames:
            store.delete(aside)


def _who(name: str, owner: Owner | None) -> str:
    who = f"process {owner.pid} on {owner.host}" if owner is not None else "a process"
    return f"{who} {'deletes' if name.startswith('deleting') else 'repairs'} it"
