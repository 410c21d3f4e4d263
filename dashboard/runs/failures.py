"""Saves of a run that failed or were killed, also once their files are gone, as `treeckpt ls --failures` lists them.

A thread reads them, so that no page waits for a slow store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

import msgspec

from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.failures import SHOWN_DAYS, Failures, SaveFailure, failures_of
from treeckpt.errors import visible

from ..pages.checkpoints import PAGE_ROWS, filled, iso_time, next_start
from ..store.background_results import BackgroundResults
from ..store.library import Library, Run
from ..store.watch import RunWatcher

WAIT = 0.2
"""Seconds for which a page waits for a list; then it says that it is being read."""
FRESH, FAR_FRESH = 1.0, 30.0
"""Seconds after which a list is read again, though no checkpoint has changed."""
MAX_LISTS = 4096
"""Runs whose lists are kept."""
FIRST = 3
"""Failures on the page of a run."""


class FailureRow(msgspec.Struct, frozen=True):
    """A save that was not committed."""

    save_id: str
    name: str
    """Name of the checkpoint's directory in the run."""
    step: int | None
    what: Literal["failed", "killed", "unfinished"]
    """failed: with an error; killed: the process that was to commit it ended; unfinished: it hangs, or was killed where
    that could not be seen."""
    began: str | None
    ended: str
    """When it failed, or was last heard of."""
    world: int | None
    ranks: int
    """The number of ranks of which a progress record was found."""
    phase: str | None
    written: int
    planned: int
    """Bytes that these ranks were to write."""
    error: str
    """The error of a failed save, with rank and path."""
    text: str
    """What happened, as a sentence without the error."""
    checkpoint: str | None
    """The id of its directory, if there is one."""


class FailuresPage(msgspec.Struct, frozen=True):
    """Saves of a run that failed or were killed, the last one first."""

    run: str
    name: str
    days: float
    """Only those that ended in the last so many days."""
    known: bool
    """Whether they have been read; until then there are no rows."""
    problem: str
    """What could not be read."""
    total: int
    older: int
    """How many ended before these days."""
    none: str
    """Says that there are none."""
    start: int
    next: int | None
    rows: list[FailureRow]


class FailureLists(BackgroundResults[str, Failures]):
    """Lists of failed and killed saves, by run. A file of a failed save never changes: it is read once."""

    def __init__(self, library: Library) -> None:
        super().__init__("treeckpt-failures", most=MAX_LISTS)
        self._library = library
        self._known = WeakKeyDictionary[RunWatcher, dict[str, SaveFailure]]()
        """By what watches the run: they go with it."""

    def list_of(self, run: Run, infos: Sequence[CheckpointInfo]) -> Failures | None:
        """Returns the last list; starts to read it again unless it is fresh; None while there is none."""
        watch = self._library.watch(run)
        if not watch.progress.complete:
            return None
        known = self._known.setdefault(watch, {})
        read = partial(failures_of, run.store, infos, known=known)
        fresh = FAR_FRESH if run.store.traits.far else FRESH
        return self.of(run.id, watch.version, read, fresh=fresh, seconds=WAIT)


def failures_page(
    library: Library,
    lists: FailureLists,
    run_id: str,
    days: float = SHOWN_DAYS,
    start: int = 0,
    *,
    count: int = PAGE_ROWS,
    now_ns: int | None = None,
) -> FailuresPage:
    """Returns the saves of a run that failed or were killed.

    Raises:
        NotFound: there is no such run.
    """
    run = library.run(run_id)
    listed = library.checkpoints(run)
    ids = {info.name: checkpoint_id for checkpoint_id, info in listed}
    known = lists.list_of(run, [info for _, info in listed])
    found = (known or Failures(())).of_days(days, time.time_ns() if now_ns is None else now_ns)
    return FailuresPage(
        run=run.id,
        name=run.name,
        days=days,
        known=known is not None,
        problem=visible(found.problem),
        total=len(found.rows),
        older=found.older,
        none=found.none_text(days),
        start=start,
        next=next_start(start, len(found.rows), count),
        rows=[_row(row, ids.get(row.name)) for row in found.rows[start : start + count]],
    )


def _row(failure: SaveFailure, checkpoint_id: str | None) -> FailureRow:
    return filled(
        FailureRow,
        failure,
        name=visible(failure.name),
        error=visible(failure.error),
        began=iso_time(failure.began_ns),
        ended=iso_time(failure.ended_ns) or "",
        checkpoint=checkpoint_id,
    )


def failures_tag(page: FailuresPage) -> str:
    """Returns a text that changes whenever the page does, but for the time that has gone by."""
    saves = [f"{row.save_id}{row.what}" for row in page.rows]
    return f"{page.known} {page.problem} {page.total} {page.older} {saves}"
