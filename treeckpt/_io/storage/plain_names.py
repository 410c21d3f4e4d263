"""The plain names of sidecar files, under which other programs open them in a checkpoint's directory.

What belongs to the checkpoint is `file.<save id>.<name>`; the file `<name>` beside it is a copy. It counts as a copy as
long as it has the same content (size and checksum): it is deleted with the file that it is a copy of, and any other
file of that name is its owner's, and stays. So no index is needed to know whose a file is, and nothing that is read or
verified depends on it: see `_core.format.files` for why it is no second name of the same file.

No copy is beside the index of another save. In a directory without an index copies are written before the index; where
a checkpoint is replaced, the old ones are deleted before the new index is published (`take_plain_names`), and the new
ones come after it, as they do on the other disks of a node-local save. A save that is killed in between leaves a
checkpoint without its copies, which a clean-up makes again (`deletions.restore_plain_names`). Of several saves to one
path at the same time each makes its copies after its commit, unless another one has replaced its checkpoint. A copy is
deleted by its name, so whoever deletes one behind a commit may hit that of the save behind, and makes it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping

from ..._core.format.files import MAX_SIDECAR_NBYTES, checksum, parse_stored_name
from ...errors import CheckpointExists, CheckpointNotFound, TreeckptError
from .checkpoint import LruStatCache, read_index
from .store import DirectoryEntry, Store, for_each

_log = logging.getLogger("treeckpt")
NAME_WAITS = (0.01, 0.05, 0.2, 0.5)
"""Seconds between the looks at a plain name that another file has, which may be a copy that another save deletes."""
_read = LruStatCache(16384)
"""The checksums of files that were read for a report: a clean-up of a run looks at all its steps."""


def stored_files(names: Iterable[str], *, save_id: str = "", without: str = "") -> dict[str, str]:
    """Returns the sidecar files among these names, with their plain names: of one save, or of others than `without`."""
    found = ((name, parsed) for name in names if (parsed := parse_stored_name(name)) is not None)
    return {name: of[1] for name, of in found if save_id in ("", of[0]) and of[0] != without}


def file_checksum(store: Store, name: str, entry: DirectoryEntry, *, cached: bool = False) -> str | None:
    """Returns the checksum of a file; None where it cannot be read, or is none that a sidecar file can be.

    Args:
        cached: whether it is read once alone as long as its entry stays the same.
    """
    if not entry.regular or entry.nbytes > MAX_SIDECAR_NBYTES:
        return None

    def read() -> str:
        data = bytearray(entry.nbytes)
        try:
            if data:
                store.read_into(name, 0, memoryview(data))
        finally:
            store.close()  # a file that is kept open would be read in the place of another one that gets its name
        return checksum(data)

    try:
        return _read.get_or_read((store.url, name), entry, read) if cached else read()
    except (OSError, TreeckptError):
        return None


def is_copy(
    store: Store, entries: Mapping[str, DirectoryEntry], stored: str, plain: str, *, cached: bool = False
) -> bool:
    """Whether two files have the same content; `cached` as for `file_checksum`."""
    first, second = entries.get(stored), entries.get(plain)
    if first is None or second is None or first.nbytes != second.nbytes:
        return False
    found = file_checksum(store, plain, second, cached=cached)
    return found is not None and found == file_checksum(store, stored, first, cached=cached)


def copies_of(
    store: Store, entries: Mapping[str, DirectoryEntry], stored: Collection[str] | None = None, *, cached: bool = False
) -> frozenset[str]:
    """Returns the names of the copies of sidecar files.

    Args:
        entries: of the directory.
        stored: only copies of these files, and of none that stays beside them; by default of any.
        cached: as for `file_checksum`.
    """
    by_plain: dict[str, list[str]] = {}
    for name, plain in stored_files(entries).items():
        if plain in entries:
            by_plain.setdefault(plain, []).append(name)
    wanted = [plain for plain, names in by_plain.items() if stored is None or not set(names).isdisjoint(stored)]

    def is_gone_with(plain: str) -> bool:
        same = [name for name in by_plain[plain] if is_copy(store, entries, name, plain, cached=cached)]
        return bool(same) and (stored is None or set(stored) >= set(same))

    found = for_each(store, is_gone_with, wanted)
    return frozenset(plain for plain, gone in zip(wanted, found, strict=True) if gone)


def free_names(store: Store, entries: Mapping[str, DirectoryEntry], contents: Mapping[str, bytes]) -> set[str]:
    """Returns which plain names of sidecar files that are to be saved nothing has.

    The others are those of files of the same content, or of copies of the files of other saves.

    Args:
        entries: of the directory.
        contents: of the sidecar files, by plain name.

    Raises:
        CheckpointExists: something else has one of these names.
    """

    def is_of_others(plain: str, copies: Collection[str]) -> bool:
        if (entry := entries.get(plain)) is None or plain in copies:
            return False
        same = entry.nbytes == len(contents[plain])
        return not same or file_checksum(store, plain, entry) != checksum(contents[plain])

    waits = iter(NAME_WAITS)
    while True:
        copies = copies_of(store, entries, [name for name, plain in stored_files(entries).items() if plain in contents])
        if not (others := [plain for plain in contents if is_of_others(plain, copies)]):
            return contents.keys() - entries.keys()
        if (seconds := next(waits, None)) is None:
            break
        time.sleep(seconds)  # another save may delete it at this moment, with the file that it is a copy of
        entries = store.entries()
    raise CheckpointExists(
        f"{store.url}/{others[0]}",
        expected="no file, or that of an earlier save, where a file of the save is to be",
        found=f"another file{f', and {len(others) - 1} more' if len(others) > 1 else ''}",
        hint="Move it away, or leave it out of files=",
    )


def give_plain_names(store: Store, save_id: str = "") -> None:
    """Makes the copies of a checkpoint's sidecar files that are not there; raises nothing.

    A copy of the file of another save is replaced; the log has a warning about a name that a file of others has.

    Args:
        save_id: does nothing where the index is of another save; by default it may be of any.
    """
    try:
        committed = read_index(store).save_id
        if save_id not in ("", committed):
            return
        entries, given = store.entries(), list[str]()
        stored = stored_files(entries, save_id=committed)

        def give(name: str) -> None:
            plain, data = stored[name], bytearray(entries[name].nbytes)
            if is_copy(store, entries, name, plain):
                return
            try:
                if data:
                    store.read_into(name, 0, memoryview(data))
            finally:
                store.close()
            if _publish_copy(store, plain, bytes(data), name, committed):
                given.append(name)

        def try_to_give(name: str) -> Exception | None:
            try:
                give(name)
            except (OSError, TreeckptError) as error:
                return error
            return None

        errors = for_each(store, try_to_give, list(stored))
        there = store.entries() if given else {}
        # the checkpoint was replaced or deleted meanwhile; the save that has replaced it may have met these copies
        if late := [stored[name] for name in given if name not in there]:
            for_each(store, store.delete, late)
            give_plain_names(store)
        if any(errors) and read_index(store).save_id != committed:
            return
    except CheckpointNotFound:
        return
    except (OSError, TreeckptError) as error:
        errors = [error]
    for error in filter(None, errors):
        _log.warning("%s: a sidecar file lacks its plain name; read it with treeckpt.read_file: %s", store.url, error)


def _publish_copy(store: Store, plain: str, data: bytes, stored: str, save_id: str) -> bool:
    """Publishes the copy of a sidecar file; returns whether it was written: not where it is there, or no longer wanted.

    A save that was replaced may have written its copy meanwhile: it is deleted here, or by that save, which then sees
    that its files are gone.

    Raises:
        CheckpointExists: another file keeps the name.
    """
    waits = iter(NAME_WAITS)
    while True:
        try:
            store.publish_copy(plain, data, of=stored)
            return True
        except CheckpointExists:
            entries = store.entries()
            if read_index(store).save_id != save_id or is_copy(store, entries, stored, plain):
                return False
            if (seconds := next(waits, None)) is None:
                raise
            if plain in copies_of(store, entries, stored_files(entries, without=save_id)):
                store.delete(plain)
            else:
                time.sleep(seconds)


def take_plain_names(store: Store, names: Collection[str], save_id: str) -> bool:
    """Deletes the copies of the sidecar files of other saves, durably, before the index of a save replaces theirs.

    Args:
        names: the files there.

    Returns:
        Whether there are such files.
    """
    stored = stored_files(names, without=save_id)
    if stored:
        for_each(store, store.delete, list(copies_of(store, store.entries(), stored)))
        store.sync()
    return bool(stored)
