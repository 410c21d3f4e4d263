"""What the next save of a manager follows: the checkpoint that it restored or saved last.

The manager notes what it restores and saves, in the order of the calls. What became of a save, the disk alone says: one
that failed, was skipped or is gone is passed over. Rank 0 decides, when the save before has ended, and outside the
caller's thread where the save is in the background: it reads every index of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from ..core.format.lineage import Lineage, SavedCheckpoint, next_lineage
from ..saving.options import following
from .run import Run

__all__ = ["History"]


class _Note:
    """A restored checkpoint, or a save that was called for."""

    def __init__(self, mark: SavedCheckpoint | None = None, *, restored: bool = False) -> None:
        self.mark, self.restored = mark, restored


class History:
    """What a manager has restored and saved.

    Args:
        say: logs a warning about a path.
        rank: of this process; rank 0 alone decides.
    """

    def __init__(self, run: Run, say: Callable[[str, str], None], rank: int) -> None:
        self._run, self._say, self._rank = run, say, rank
        self._notes: tuple[_Note, ...] = ()
        self._lock = threading.Lock()

    def restored(self, mark: SavedCheckpoint) -> None:
        """Notes that the next save follows this checkpoint."""
        with self._lock:
            self._notes = (_Note(mark, restored=True),)

    def saving(self, step: int) -> AbstractContextManager[None]:
        """Gives a save that is started in the body its lineage."""
        if self._rank:
            return nullcontext()
        note = _Note()
        with self._lock:
            before, self._notes = self._notes, (*self._notes, note)
        return following(partial(self._lineage, step, note, before))

    def _lineage(self, step: int, note: _Note, before: tuple[_Note, ...], save_id: str) -> Lineage:
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
