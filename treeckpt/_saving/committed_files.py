"""Looks at the files of a save around its commit: whether they are there, whether its index is, and what may go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from .._core.format.files import parse_file_name, stored_name
from .._core.format.records import Index
from .._core.format.shard_header import parse_shard_name
from .._core.format.timings import timings_name
from .._io.storage.checkpoint import read_index
from .._io.storage.deletions import delete_files, hold_lock
from .._io.storage.shared_files import needed_files
from .._io.storage.store import Store
from ..errors import CheckpointError, CheckpointNotFound, StoreError

PUBLISHED_HINT = "The new index is in place, but may not survive a power loss; save again"
"""The hint of an error where publishing failed after its effect."""
UNANSWERED_HINT = "The new index may be in place all the same: look at the checkpoint, or save again"
"""The hint where an object store has not said whether it has published, or will."""


def check_files_exist(store: Store, index: Index, sizes: Mapping[str, int], rank: int) -> None:
    """Checks that no other program has deleted shards or sidecar files, before the index is published.

    An object store is not checked: it has acknowledged each file, and was listed before that.

    Args:
        rank: this one, a leader where there are several disks: it checks the shards on its own.

    Raises:
        CheckpointError: naming the file.
    """
    if store.traits.conditional:
        return
    files = index.leader_files(rank)
    for file in files:
        if store.traits.in_process and file.name not in sizes:
            raise CheckpointError(
                store.url,
                expected="the shards of all ranks in the memory of one process",
                found=f"no {file.name} in that of rank 0",
                hint='Ranks in processes of their own save to a directory or URL, or each alone with comm="alone"',
            )
    written = [(file.name, file.header + file.nbytes) for file in files]
    if rank == 0:  # other leaders write the sidecar files later
        written += [(stored_name(index.save_id, sidecar.name), sidecar.nbytes) for sidecar in index.sidecars]
    for name, nbytes in written:
        if sizes.get(name) != nbytes:
            raise CheckpointError(
                f"{store.url}/{name}",
                expected=f"{nbytes} bytes, as written a moment ago",
                found="no such file" if name not in sizes else f"{sizes[name]}",
                hint="Something else deletes or changes files there; find out what, and save again",
            )


def index_may_be_published(store: Store, save_id: str, error: BaseException | None = None) -> bool:
    """Whether the index is there, or may be, after publishing failed with an error.

    It can fail after the rename, at the sync. A store can carry a request out after the client has given it up.
    """
    if isinstance(error, StoreError) and error.unanswered:
        return True
    try:
        return read_index(store).save_id == save_id
    except CheckpointNotFound:
        return False
    except Exception:
        # an index that cannot be read may be that of this save, whose files then have to stay
        return True


def with_published_hint(error: Exception) -> Exception:
    """Returns the same error with the hint that the index is in place all the same, or in an object store may be."""
    if isinstance(error, StoreError):
        error.add_hint(UNANSWERED_HINT)
    if type(error) is not CheckpointError:
        return error
    hinted = CheckpointError(error.path, expected=error.expected, found=error.found, hint=PUBLISHED_HINT)
    hinted.__cause__ = error.__cause__
    return hinted


def remove_files(store: Store, names: Iterable[str]) -> None:
    """Deletes files, as `delete_files`; errors are ignored."""
    with contextlib.suppress(Exception):
        delete_files(store, names)


def remove_replaced(store: Store, save_id: str) -> None:
    """Deletes the files of a save that was overwritten."""
    present = store.sizes()
    found = [(name, owned) for name in present if (owned := parse_file_name(name)) is not None]
    kinds = ("shard", "sidecar", "progress", "prepared", "verdict", "ended")
    names = [name for name, owned in found if owned.save_id == save_id and owned.kind in kinds]
    # of a rank's first shard others share nothing
    several = any((parsed := parse_shard_name(name)) is not None and parsed[3] for name in names)
    with hold_lock(store, "deleting") if several else contextlib.nullcontext():
        # of files that other checkpoints share the next clean-up asks again
        needed = needed_files(store, store.sizes()).names if several else ()
        remove_files(store, [*(name for name in names if name not in needed), timings_name(save_id)])
