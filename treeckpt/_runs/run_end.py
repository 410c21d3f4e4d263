"""The mark that a manager writes when it is closed: when the run ended, and by what if it was stopped.

It is a small file beside the checkpoint that the manager saved last. It holds only while no save has begun after it,
which `run_state` decides, so that nothing ever has to remove it: it goes with its checkpoint. Where it could not be
written that is logged; training never fails for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from signal import Signals

import msgspec

from .._core.format.decoding import decode_json
from .._core.format.files import ended_name
from .._core.format.index import INDEX_NAME
from .._io.storage.checkpoint import StatCache
from .._io.storage.store import DirectoryEntry, RunStore, Store
from .._saving.session import reset_after_fork
from ..errors import CorruptError, StoreError, TreeckptError, visible
from ..reports import SaveReport

_log = logging.getLogger("treeckpt")
MAX_MARK = 4096
"""Bytes of a mark."""
MAX_REASON = 100
"""Characters of what stopped a run."""


class RunEnd(msgspec.Struct, frozen=True):
    """How a run ended after a checkpoint."""

    ended_ns: int
    """The Unix time at which its manager was closed."""
    stopped_by: str = ""
    """The signal or the type of the error that stopped it; empty where it came to its end."""


class EndMark:
    """Writes the mark of one manager, on its rank 0.

    Args:
        store: the run's.
        rank: of this process; one other than 0 writes nothing.
    """

    def __init__(self, store: RunStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._saved: SaveReport | None = None
        """The save that was committed last, if no mark was written since."""
        self.error: BaseException | None = None
        """The error with which the manager's body was left."""
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Writes no mark in a forked child: the run is the parent's."""
        self._saved = None

    def note_saved(self, report: SaveReport | None) -> None:
        """Takes the report of a save that has ended; None of one that failed."""
        self._saved = (report or self._saved) if self._rank == 0 else None

    def write(self, signum: int, *, stopping: bool) -> None:
        """Writes the mark, if something was saved since the last one: finished, unless a signal or an error came.

        Args:
            signum: the signal that this rank got; 0 without one.
            stopping: whether the last save was made because of a signal, which another rank may have got.
        """
        saved, self._saved = self._saved, None
        if saved is None or isinstance(self.error, StoreError):  # a store that is down would delay the error
            return
        stopped_by = Signals(signum).name if signum else "a signal" if stopping else ""
        if self.error is not None and not stopped_by:
            stopped_by = type(self.error).__name__
        folder = self._store.folder(saved.path.rstrip("/").rpartition("/")[2])
        try:
            if folder.entry(INDEX_NAME) is not None:  # it may have been deleted since
                mark = RunEnd(time.time_ns(), stopped_by[:MAX_REASON])
                folder.publish(ended_name(saved.save_id), msgspec.json.encode(mark), replace=True)
        except Exception as why:
            _log.warning("%s: that the run has ended could not be written: %s", visible(saved.path), why)


def read_end(folder: Store, save_id: str, entry: DirectoryEntry, cache: StatCache) -> RunEnd | None:
    """Returns the mark beside the checkpoint of a save; None if it cannot be read.

    Args:
        entry: its file, as it is now.
    """
    name = ended_name(save_id)
    with contextlib.suppress(TreeckptError, OSError):
        return cache.get_or_read((f"{folder.place}/{name}", "ended"), entry, partial(_read, folder, name))
    return None


def _read(folder: Store, name: str) -> RunEnd:
    try:
        found = decode_json(folder.read(name, limit=MAX_MARK), RunEnd)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{folder.place}/{name}", expected="the end of a run", found=f"{error}") from error
    return RunEnd(found.ended_ns, visible(found.stopped_by[:MAX_REASON]))
