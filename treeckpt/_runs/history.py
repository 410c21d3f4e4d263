"""The checkpoints that a manager has restored and saved, from which the lineage of its next save is computed.

It warns of a training that forgot to resume, and of a save that replaces a pinned checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._core.format.files import PIN_NAME, CheckpointId, id_order, id_text
from .._core.format.lineage import Lineage, SavedCheckpoint, next_lineage
from ..errors import visible
from .run import RunDirectory


# Entries are told apart by identity: those of saves whose lineage is not known yet have equal fields.
@dataclass(eq=False)
class _HistoryEntry:
    """A restored checkpoint, or a save that was started."""

    mark: SavedCheckpoint | None = None
    """The checkpoint; None until the lineage of its save is known."""
    restored: bool = False


@dataclass(frozen=True, eq=False)
class NextSave:
    """The `LineageSource` of one save of a manager."""

    history: SaveHistory
    step: CheckpointId
    pin: bool
    """Whether the save itself is pinned: then it may replace a pinned checkpoint."""
    before: tuple[_HistoryEntry, ...]
    """What was restored and saved before."""
    entry: _HistoryEntry
    """The entry of this save."""

    def lineage(self, save_id: str) -> Lineage:
        """Returns the lineage of the save with this id; raises nothing."""
        return self.history.lineage(self, save_id)


class SaveHistory:
    """The checkpoints that a manager has restored and saved, in the order of the calls.

    The lineage of its next save follows the last of them. Whether a save was committed is read from the disk: one that
    failed, was skipped or was deleted is skipped here. Rank 0 decides, after the previous save has ended, and outside
    the caller's thread for a save in the background, because it reads every index of the run.

    A manager that restored nothing, but saves a step that the run has already or that lies below one of it, is mostly
    that of a training that forgot to resume: it replaces the old steps, or its clean-ups delete them. It warns, once.

    Args:
        warn: logs a warning about a path.
        rank: the rank of this process; rank 0 alone decides.
        replaces: whether the caller said that steps of other trainings are to be replaced: then nothing warns of it.
    """

    def __init__(
        self, run: RunDirectory, warn: Callable[[str, str], None], rank: int, *, replaces: bool = False
    ) -> None:
        self.directory, self._warn, self._rank = run, warn, rank
        self._entries: tuple[_HistoryEntry, ...] = ()
        self._lock = threading.RLock()
        self._warned = replaces
        self._saved: set[str] = set()
        """The ids of the saves of this manager, until it has restored something or warned."""

    def restored(self, mark: SavedCheckpoint) -> None:
        """Records that the next save follows this checkpoint."""
        with self._lock:
            self._entries, self._warned = (_HistoryEntry(mark, restored=True),), True

    def next_save(self, step: CheckpointId, *, pin: bool = False) -> NextSave | None:
        """Records a save that is started, and whether it is pinned; returns what determines its lineage, on rank 0."""
        if self._rank:
            return None
        entry = _HistoryEntry()
        with self._lock:
            before, self._entries = self._entries, (*self._entries, entry)
        return NextSave(self, step, pin, before, entry)

    def _warn_of_pinned(self, step: CheckpointId) -> None:
        """Warns where a save is about to replace a pinned checkpoint; raises nothing."""
        with contextlib.suppress(Exception):
            folder = self.directory.new_folder(step)
            if PIN_NAME in folder.entries():
                text = "is pinned, and this save replaces it: a pin keeps a checkpoint from clean-ups only"
                self._warn(folder.place, f"{text}. overwrite=False of the Manager refuses to replace steps")

    def lineage(self, save: NextSave, save_id: str) -> Lineage:
        """Returns the lineage of a save, from the entries before it and the state of the run; raises nothing."""
        step, before = save.step, save.before
        try:
            marks = self.directory.marks()
        except Exception as error:  # a save without the right lineage is better than none
            marks = [known.mark for known in before if known.mark is not None]
            self._warn(self.directory.url, f"could not be looked at for the lineage of {id_text(step)}: {error}")
        if not save.pin and any(mark.step == step for mark in marks):
            self._warn_of_pinned(step)
        if not self._warned:
            self._warn_of_forgotten_resume(marks, step)
            self._saved.add(save_id)
        there = {mark.save_id for mark in marks}
        sure = [e for e in before if e.mark is not None and (e.restored or e.mark.save_id in there)]
        lineage = next_lineage(marks, sure[-1].mark if sure else None, step)
        save.entry.mark = SavedCheckpoint(step, save_id, lineage)
        old = before[: before.index(sure[-1])] if sure else ()
        with self._lock:
            self._entries = tuple(kept for kept in self._entries if kept not in old)
        return lineage

    def _warn_of_forgotten_resume(self, marks: Sequence[SavedCheckpoint], step: CheckpointId) -> None:
        """Warns where a step is saved at or below one that this manager neither saved nor restored.

        A text replaces the checkpoint of the same text alone.
        """
        unknown = [mark.step for mark in marks if mark.save_id not in self._saved]
        if isinstance(step, str):
            others: list[CheckpointId] = [other for other in unknown if other == step]
        else:
            others = [other for other in unknown if isinstance(other, int) and other >= step]
        if not others:
            return
        self._warned, path = True, self.directory.new_folder(step).place
        what = "replaces a checkpoint" if step in others else f"is saved below step {max(others, key=id_order)}"
        text = (
            f"{id_text(step)} {what} that this manager neither saved nor restored. To continue the run, call resume or "
            "restore before the first save; to start anew, take another directory; overwrite=True of the Manager "
            "replaces such steps without a warning, overwrite=False refuses to"
        )
        try:
            warnings.warn(visible(f"{path}: {text}"), stacklevel=2)
        except UserWarning:  # a filter makes it an error, but the ranks have agreed on this save
            self._warn(path, text)
