"""Indexes that replace others, or are made again, and what becomes of them where their files have gone meanwhile.

A process that was stopped for longer than `LAPSE` behind its look at its files publishes an index all the same, where
nothing hinders it: in an object store always, elsewhere where files lie in other directories. So it looks for the files
once more when the index is there: from then on deletions see it, and those that have not seen it hold locks, for which
the look waits. If files are gone, the index that was there before gets its place again, where its own files are there.
"""

from __future__ import annotations

import contextlib
import secrets

from ..._core.format.files import damaged_name, deleted_name, parse_file_name
from ..._core.format.index import INDEX_NAME, MAX_INDEX, decode_index, encode_index
from ..._core.format.records import Index
from ...errors import CheckpointError, CheckpointExists
from .checkpoint import replaced_meanwhile
from .deletions import hold_for_repair, index_state, mark_shared_files, take_index, unlocked_sizes
from .store import Store, exists_error


def error_of_gone_files(store: Store, index: Index) -> CheckpointError | None:
    """Returns the error for files of an index that are gone; None if all are there.

    It waits until nobody deletes any more who may not have seen the index, if that is published.
    """

    def look(folder: Store) -> dict[str, int]:
        try:
            return unlocked_sizes(folder)
        except CheckpointError:  # the lock of a deletion that was killed on another host, or is stopped too
            return folder.sizes()

    files = index.file_list if index.shared_names else index.leader_files(0)
    sizes = look(store)
    for directory in sorted({file.directory for file in files} - {""}):
        sizes |= look(store.run().folder(directory))
    gone = [file.name for file in files if sizes.get(file.name) != file.header + file.nbytes]
    if not gone:
        return None
    return CheckpointError(
        f"{store.url}/{gone[0]}",
        expected="a file of the checkpoint",
        found=f"{len(gone)} of {len(index.file_list)} are gone: a clean-up took this process for an ended one, or the "
        "checkpoint was replaced",
        hint="This process was stopped for minutes, could not reach the store, or is not the only one there; try again",
    )


def check_still_there(store: Store, data: bytes, replaced: bytes | None = None) -> None:
    """Checks that nobody has taken the files of an index that was published for those of an ended process.

    Args:
        data: the index.
        replaced: the one that it has replaced.

    Raises:
        CheckpointError: files are gone; the index is taken back, and the one before put back unless files of that are
            gone too.
    """
    if (error := error_of_gone_files(store, decode_index(data, store.url))) is None:
        return
    with contextlib.suppress(FileNotFoundError, CheckpointExists):
        _put_back(store, data, replaced)
        if replaced is not None:
            with contextlib.suppress(CheckpointError):  # a damaged one stays as it was found
                check_still_there(store, replaced)
    raise error


def _put_back(store: Store, data: bytes, replaced: bytes | None) -> None:
    """Puts an index in the place of the one that was published, or none.

    Raises:
        FileNotFoundError | CheckpointExists: another process has taken that away, or replaced it.
    """
    if replaced is None:
        aside = deleted_name(decode_index(data).save_id, secrets.token_hex(8))
        take_index(store, aside, holds=lambda found: found == data)
        if store.traits.renames:
            store.delete(aside)
        return

    def check() -> None:
        if index_state(store) != data:
            raise exists_error(store, INDEX_NAME)

    version = store.read_version(INDEX_NAME, limit=MAX_INDEX)[1] if store.traits.conditional else True
    store.publish(INDEX_NAME, replaced, replace=version, check=check)


def replace_index(store: Store, before: bytes | int | None, index: Index) -> str:
    """Publishes an index that was made again, under a lock, if there still is the one that was found, and its shards.

    Args:
        before: the `index_state` from before it was made.

    Returns:
        The name under which the one before is kept, "" if there was none.

    Raises:
        CheckpointExists: there is one now, and was none.
        CheckpointError: the checkpoint has been replaced or deleted, or as `hold_for_repair`, `mark_shared_files` and
            `check_still_there`.
    """
    data = encode_index(index)
    if before is None:
        with contextlib.ExitStack() as held:
            mark_shared_files(store, index, held)  # deletions could not see which files it shares
            _publish_again(store, index, data)
            check_still_there(store, data)
        return ""
    with hold_for_repair(store):
        if index_state(store) != before:
            raise replaced_meanwhile(store)
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


def _publish_again(store: Store, index: Index, data: bytes) -> None:
    """Publishes an index that is missing, under a lock, if its shards are there.

    Raises:
        CheckpointExists: there is one.
        CheckpointError: the checkpoint has been deleted, or as `hold_for_repair`.
    """
    with hold_for_repair(store) as names:
        # an index that is missing because its checkpoint is being deleted is not made again
        deleted = any(kind is not None and kind.kind == "deleted" for kind in map(parse_file_name, names))
        if deleted or not {file.name for file in index.own_files} <= names.keys():
            raise replaced_meanwhile(store)
        store.publish(INDEX_NAME, data, replace=False)
