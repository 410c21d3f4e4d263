"""What the next save of a manager follows: the checkpoint that it restored or saved last.

The manager notes what it restores and saves, in the order of the calls. What became of a save, the disk alone says: one
that failed, was skipped or is gone is passed over. Rank 0 decides, when the save before has ended, and outside the
caller's thread where the save is in the background: it reads every index of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..core.format.lineage import Lineage, SavedCheckpoint, next_lineage
from .run import RunDirectory

__all__ = ["SaveHistory"]


class _HistoryEntry:
    """A restored checkpoint, or a save that was called for."""

    def __init__(self, mark: SavedCheckpoint | None = None, *, restored: bool = False) -> None:
        self.mark, self.restored = mark, restored


class SaveHistory:
    """What a manager has restored and saved.

    Args:
        say: logs a warning about a path.
        rank: of this process; rank 0 alone decides.
    """

    def __init__(self, run: RunDirectory, say: Callable[[str, str], None], rank: int) -> None:
        self._run, self._say, self._rank = run, say, rank
        self._notes: tuple[_HistoryEntry, ...] = ()
        self._lock = threading.Lock()

    def restored(self, mark: SavedCheckpoint) -> None:
        """Notes that the next save follows this checkpoint."""
        with self._lock:
            self._notes = (_HistoryEntry(mark, restored=True),)

    def next_save(self, step: int) -> NextSave | None:
        """Notes a save that is called for; returns what gives its lineage, on rank 0."""
        if self._rank:
            return None
        note = _HistoryEntry()
        with self._lock:
            before, self._notes = self._notes, (*self._notes, note)
        return NextSave(self, step, note, before)

    def lineage(self, step: int, note: _HistoryEntry, before: tuple[_HistoryEntry, ...], save_id: str) -> Lineage:
        """Returns the lineage of a save, from the notes before it and the state of the run; raises nothing."""
        try:
            marks = self._run.marks()
        except Exception as error:  # the save matters more than its place
            marks = [known.mark for known in before if known.mark is not None]
            self._say(self._run.url, f"could not be looked at for the lineage of step {step}: {error}")
        there = {mark.save_id for mark in marks}
        sure = [n for n in before if n.mark is not None and (n.restored or n.mark.save_id in there)]
        lineage = next_lineage(marks, sure[-1].mark if sure else None, step)
        note.mark = SavedCheckpoint(step, save_id, lineage)
        old = before[: before.index(sure[-1])] if sure else ()
        with self._lock:
            self._notes = tuple(kept for kept in self._notes if kept not in old)
        return lineage


class NextSave:
    """The `LineageSource` of one save of a manager.

    Args:
        note: of this save.
        before: the notes of earlier calls.
    """

    def __init__(self, history: SaveHistory, step: int, note: _HistoryEntry, before: tuple[_HistoryEntry, ...]) -> None:
        self._history, self._step, self._note, self._before = history, step, note, before

    def lineage(self, save_id: str) -> Lineage:
        """Returns the lineage of the save with this id; raises nothing."""
        return self._history.lineage(self._step, self._note, self._before, save_id)
