"""What is at the path of a save before it: a checkpoint, which is refused or replaced, and files of dead saves."""

from __future__ import annotations

import contextlib

from ..core.format.index import INDEX_NAME
from ..errors import CheckpointError, CheckpointExists
from ..io.os_errors import hint_for
from ..io.storage.leftovers import clear_leftovers
from ..io.storage.metadata_files import read_index
from ..io.storage.object_store import ObjectStore
from ..io.storage.store import Store
from ..threads import call_in_thread


class PathLook:
    """Rank 0's look at the path of a save. An object store is asked for its files at once, and answers meanwhile.

    Args:
        overwrite: whether a checkpoint may be replaced.
    """

    def __init__(self, store: Store, *, overwrite: bool) -> None:
        self._store, self._overwrite, self._listing = store, overwrite, None
        if isinstance(store, ObjectStore):
            store.prepare()
            self._listing = call_in_thread(store.sizes, "treeckpt-listing")

    def result(self) -> str:
        """Makes the directory and removes leftovers; returns the id of the save that is to be replaced, "" for none.

        Raises:
            CheckpointExists: a checkpoint is there and must not be replaced.
            CheckpointError: the directory cannot be made or listed.
        """
        store, replaced = self._store, ""
        try:
            if self._listing is None:
                store.prepare()
                names = store.sizes()
            else:
                names = self._listing.result()
            if INDEX_NAME in names:
                if not self._overwrite:
                    raise CheckpointExists(
                        store.url,
                        expected="no checkpoint",
                        found="one",
                        hint="Save to another path, or pass overwrite=True",
                    )
                with contextlib.suppress(CheckpointError):
                    # what cannot be read can be overwritten; its shards stay for rebuild-index until then
                    replaced = read_index(store).save_id
            clear_leftovers(store, names, known=replaced)
        except OSError as error:
            raise CheckpointError(
                store.url,
                expected="a directory that can be made and written",
                found=f"{type(error).__name__}: {error}",
                hint=hint_for(error),
            ) from error
        return replaced
