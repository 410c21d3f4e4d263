"""Determines the lineage of a manager's next save: the checkpoint that it restored or saved last.

The manager records what it restores and saves, in the order of the calls. Whether a save was committed is read from the
disk: one that failed, was skipped or was deleted is skipped here. Rank 0 decides, after the previous save has ended,
and outside the caller's thread for a save in the background, because it reads every index of the run.

A manager that restored nothing, but saves a step that the run has already or that lies below one of it, is mostly that
of a training that forgot to resume: it replaces the old steps, or its clean-ups delete them. So it warns, once.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence

from .._core.format.files import PIN_NAME
from .._core.format.lineage import Lineage, SavedCheckpoint, next_lineage
from ..errors import visible
from .run import RunDirectory


class _HistoryEntry:
    """A restored checkpoint, or a save that was started; `mark` is None until its lineage is known."""

    def __init__(self, mark: SavedCheckpoint | None = None, *, restored: bool = False) -> None:
        self.mark, self.restored = mark, restored


class SaveHistory:
    """The checkpoints that a manager has restored and saved.

    Args:
        warn: logs a warning about a path.
        rank: the rank of this process; rank 0 alone decides.
        replaces: whether the caller said that steps of other trainings are to be replaced: then nothing warns of it.
    """

    def __init__(
        self, run: RunDirectory, warn: Callable[[str, str], None], rank: int, *, replaces: bool = False
    ) -> None:
        self.directory, self._warn, self._rank = run, warn, rank
        self._notes: tuple[_HistoryEntry, ...] = ()
        self._lock = threading.RLock()
        self._warned = replaces
        self._saved: set[str] = set()
        """The ids of the saves of this manager, until it has restored something or warned."""

    def restored(self, mark: SavedCheckpoint) -> None:
        """Records that the next save follows this checkpoint."""
        with self._lock:
            self._notes, self._warned = (_HistoryEntry(mark, restored=True),), True

    def next_save(self, step: int, *, pin: bool = False) -> NextSave | None:
        """Records a save that is started, and whether it is pinned; returns what determines its lineage, on rank 0."""
        if self._rank:
            return None
        note = _HistoryEntry()
        with self._lock:
            before, self._notes = self._notes, (*self._notes, note)
        return NextSave(self, step, note, before, pin=pin)

    def _warn_of_pinned(self, step: int) -> None:
        """Warns where a save is about to replace a pinned checkpoint; raises nothing."""
        with contextlib.suppress(Exception):
            folder = self.directory.folder(step)
            if PIN_NAME in folder.entries():
                text = "is pinned, and this save replaces it: a pin keeps a checkpoint from clean-ups only"
                self._warn(folder.place, f"{text}. overwrite=False of the Manager refuses to replace steps")

    def lineage(
        self, step: int, note: _HistoryEntry, before: tuple[_HistoryEntry, ...], save_id: str, *, pin: bool
    ) -> Lineage:
        """Returns the lineage of a save, from the notes before it and the state of the run; raises nothing."""
        try:
            marks = self.directory.marks()
        except Exception as error:  # a save without the right lineage is better than none
            marks = [known.mark for known in before if known.mark is not None]
            self._warn(self.directory.url, f"could not be looked at for the lineage of step {step}: {error}")
        if not pin and any(mark.step == step for mark in marks):
            self._warn_of_pinned(step)
        if not self._warned:
            self._warn_of_forgotten_resume(marks, step)
            self._saved.add(save_id)
        there = {mark.save_id for mark in marks}
        sure = [n for n in before if n.mark is not None and (n.restored or n.mark.save_id in there)]
        lineage = next_lineage(marks, sure[-1].mark if sure else None, step)
        note.mark = SavedCheckpoint(step, save_id, lineage)
        old = before[: before.index(sure[-1])] if sure else ()
        with self._lock:
            self._notes = tuple(kept for kept in self._notes if kept not in old)
        return lineage

    def _warn_of_forgotten_resume(self, marks: Sequence[SavedCheckpoint], step: int) -> None:
        """Warns where a step is saved at or below one that this manager neither saved nor restored."""
        others = [mark.step for mark in marks if mark.save_id not in self._saved and mark.step >= step]
        if not others:
            return
        self._warned, path = True, self.directory.folder(step).place
        what = "replaces a checkpoint" if step in others else f"is saved below step {max(others)}"
        text = (
            f"step {step} {what} that this manager neither saved nor restored. To continue the run, call resume or "
            "restore before the first save; to start anew, take another directory; overwrite=True of the Manager "
            "replaces such steps without a warning, overwrite=False refuses to"
        )
        try:
            warnings.warn(visible(f"{path}: {text}"), stacklevel=2)
        except UserWarning:  # a filter makes it an error, but the ranks have agreed on this save
            self._warn(path, text)


class NextSave:
    """The `LineageSource` of one save of a manager.

    Args:
        note: of this save.
        before: the notes of earlier calls.
        pin: whether the save itself is pinned: then it may replace a pinned checkpoint.
    """

    def __init__(
        self, history: SaveHistory, step: int, note: _HistoryEntry, before: tuple[_HistoryEntry, ...], *, pin: bool
    ) -> None:
        self._history, self._step, self._note, self._before, self._pin = history, step, note, before, pin

    def lineage(self, save_id: str) -> Lineage:
        """Returns the lineage of the save with this id; raises nothing."""
        return self._history.lineage(self._step, self._note, self._before, save_id, pin=self._pin)
