"""What is at the path of a save before it: a checkpoint, which is refused or replaced, and files of dead saves."""

from __future__ import annotations

import contextlib

from .._core.format.files import Progress
from .._core.format.index import INDEX_NAME
from .._io.os_errors import FULL, write_errors_wrapped
from .._io.storage.checkpoint import read_index
from .._io.storage.deletions import clear_leftovers, restore_index
from .._io.storage.kept_files import ProgressRecorder
from .._io.storage.store import Store
from .._threads import call_in_thread
from ..errors import CheckpointError, CheckpointExists


class PathLook:
    """Rank 0's look at the path of a save, which writes the save's progress record first.

    An object store is asked for its files and for the record at once, and answers meanwhile.

    Args:
        first: the record.
        overwrite: whether a checkpoint may be replaced.
    """

    def __init__(self, store: Store, first: Progress, *, overwrite: bool) -> None:
        self._store, self._overwrite, self._listing = store, overwrite, None
        self.record = ProgressRecorder(store, first)
        """It is to be ended with the save, however that ends."""
        if store.traits.conditional:
            store.prepare()
            self._listing = call_in_thread(store.sizes, "treeckpt-listing")
            self._recorded = call_in_thread(self.record.begin, "treeckpt-record")

    def result(self) -> str:
        """Makes the directory and removes leftovers; returns the id of the save that is to be replaced, "" for none.

        Raises:
            CheckpointExists: a checkpoint is there and must not be replaced.
            CheckpointError: the directory cannot be made, listed or written.
        """
        try:
            with write_errors_wrapped(self._store.url, expected="a directory that can be made and written"):
                return self._result()
        except BaseException:
            self.record.end()
            raise

    def _result(self) -> str:
        store = self._store
        if self._listing is None:
            store.prepare()
            try:
                self.record.begin()
            except OSError as error:
                names = self._checked(store.sizes())
                if error.errno not in FULL:
                    raise
                self._clear(names)  # what fills the disk may be what dead saves left here
                self.record.begin()
            names = self._checked(store.sizes())
        else:
            names = self._checked(self._listing.result())
            self._recorded.result()
        return self._clear(names)

    def _checked(self, names: dict[str, int]) -> dict[str, int]:
        """Returns the files in a directory to which the save may go; raises CheckpointExists if it may not."""
        if any(name.startswith("deleted.") for name in names) and restore_index(self._store):
            names = self._store.sizes()
        if INDEX_NAME in names and not self._overwrite:
            raise CheckpointExists(
                self._store.url,
                expected="no checkpoint",
                found="one",
                hint="Save to another path, or pass overwrite=True",
            )
        return names

    def _clear(self, names: dict[str, int]) -> str:
        """Removes leftovers; returns the id of the save that is to be replaced, "" for none."""
        replaced = ""
        if INDEX_NAME in names:
            with contextlib.suppress(CheckpointError):
                # what cannot be read can be overwritten; its shards stay for rebuild-index until then
                replaced = read_index(self._store).save_id
        clear_leftovers(self._store, names.keys() - {self.record.name}, known=replaced)
        return replaced
