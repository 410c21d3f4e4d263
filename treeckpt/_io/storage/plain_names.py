"""The plain names of sidecar files, under which other programs open them in a checkpoint's directory.

What belongs to the checkpoint is `file.<save id>.<name>`; the file `<name>` beside it is a copy. It counts as a copy as
long as it has the same content: it is deleted with the file that it is a copy of, and any other file of that name is
its owner's, and stays. So no index is needed to know whose a file is, and nothing that is read or verified depends on
it: see `_core.format.files` for why it is no second name of the same file.

No copy is beside the index of another save. In a directory without an index copies are written before the index, and
in one whose checkpoint is replaced after it, as the old ones are deleted before (`take_plain_names`). A save that is
killed in between leaves a checkpoint without its copies; a clean-up and the next save make them again
(`restore_plain_names`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from ..._core.format.files import MAX_SIDECAR_NBYTES, parse_stored_name
from ...errors import CheckpointExists, TreeckptError
from .store import DirectoryEntry, Store, for_each


def stored_files(names: Iterable[str], *, save_id: str = "", without: str = "") -> dict[str, str]:
    """Returns the sidecar files among these names, with their plain names: of one save, or of others than `without`."""
    found = ((name, parsed) for name in names if (parsed := parse_stored_name(name)) is not None)
    return {name: of[1] for name, of in found if save_id in ("", of[0]) and of[0] != without}


def is_copy(store: Store, entries: Mapping[str, DirectoryEntry], stored: str, plain: str) -> bool:
    """Whether two files have the same content."""
    first, second = entries.get(stored), entries.get(plain)
    if first is None or second is None or not (first.regular and second.regular) or first.nbytes != second.nbytes:
        return False
    data = _content(store, stored, first.nbytes)
    return data is not None and data == _content(store, plain, second.nbytes)


def _content(store: Store, name: str, nbytes: int) -> bytes | None:
    """Returns the content of a file; None where it cannot be read, or is larger than a sidecar file."""
    if nbytes > MAX_SIDECAR_NBYTES:
        return None
    data = bytearray(nbytes)
    try:
        if data:
            store.read_into(name, 0, memoryview(data))
    except (OSError, TreeckptError):
        return None
    finally:
        store.close()  # a file that is kept open would be read in the place of another one that gets its name
    return bytes(data)


def copies_of(store: Store, stored: Mapping[str, str]) -> list[str]:
    """Returns the names of the copies of these sidecar files, unless they are copies of others there too.

    Args:
        stored: the files, with their plain names.
    """
    entries, copies = store.entries(), list[str]()
    all_stored = stored_files(entries)
    for plain in dict.fromkeys(stored.values()):
        if plain in entries:
            same = [name for name, of in all_stored.items() if of == plain and is_copy(store, entries, name, plain)]
            copies += [plain] if same and stored.keys() >= set(same) else []
    return copies


PlainState = Literal["free", "same", "copy", "other"]
"""What has a plain name: nothing, a file of the same content, a copy of the file of another save, or something else."""


def plain_states(
    store: Store, entries: Mapping[str, DirectoryEntry], contents: Mapping[str, bytes]
) -> dict[str, PlainState]:
    """Returns what has the plain names of sidecar files that are to be saved.

    Args:
        entries: of the directory.
        contents: of the sidecar files, by plain name.
    """
    stored = stored_files(entries)

    def state(plain: str) -> PlainState:
        if (entry := entries.get(plain)) is None:
            return "free"
        if any(of == plain and is_copy(store, entries, name, plain) for name, of in stored.items()):
            return "copy"
        same = entry.regular and entry.nbytes == len(contents[plain])
        return "same" if same and _content(store, plain, entry.nbytes) == contents[plain] else "other"

    return {plain: state(plain) for plain in contents}


def give_plain_names(store: Store, stored: Mapping[str, str]) -> list[str]:
    """Makes the copies of sidecar files that are not there; returns the plain names that files of others have.

    A copy of the file of another save is replaced.
    """
    entries = store.entries()
    others = {name: plain for name, plain in stored_files(entries).items() if name not in stored}

    def give(name: str) -> str:
        plain, entry = stored[name], entries.get(name)
        if entry is None or is_copy(store, entries, name, plain):
            return ""
        if plain in entries:
            if not any(is_copy(store, entries, other, plain) for other, of in others.items() if of == plain):
                return plain
            store.delete(plain)
        data = _content(store, name, entry.nbytes)
        try:
            if data is not None:  # else it is lost, which `verify` says
                store.publish_copy(plain, data, of=name)
        except CheckpointExists:
            return plain
        return ""

    return [plain for plain in for_each(store, give, list(stored)) if plain]


def take_plain_names(store: Store, names: Collection[str], save_id: str) -> bool:
    """Deletes the copies of the sidecar files of other saves, durably, before the index of a save replaces theirs.

    Args:
        names: the files there.

    Returns:
        Whether there are such files.
    """
    stored = stored_files(names, without=save_id)
    for name in copies_of(store, stored) if stored else ():
        store.delete(name)
    if stored:
        store.sync()
    return bool(stored)


def lacks_plain_names(names: Collection[str], save_id: str) -> bool:
    """Whether sidecar files of a save are there without a file of their plain name."""
    return any(plain not in names for plain in stored_files(names, save_id=save_id).values())
