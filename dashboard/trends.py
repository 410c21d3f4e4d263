"""The query of how saves of a run changed from step to step."""

from __future__ import annotations

from .library import Library
from .pages_time import TrendsPage
from .queries import PAGE

__all__ = ["trends_page"]


def trends_page(library: Library, run_id: str, start: int) -> TrendsPage:
    """The complete checkpoints of a run that have a step, by step; the page of rows from number `start` on.

    Raises:
        Missing: there is no such run.
    """
    run = library.run(run_id)
    found = [(i, c) for i, c in library.checkpoints(run) if c.status == "complete" and c.step is not None]
    found.sort(key=lambda pair: (pair[1].step or 0, pair[1].created_ns or 0))
    infos = [info for _, info in found]
    return TrendsPage(
        run=run.id,
        name=run.name,
        ids=[checkpoint_id for checkpoint_id, _ in found],
        step=[info.step or 0 for info in infos],
        seconds=[info.seconds for info in infos],
        blocked=[info.blocked_seconds for info in infos],
        nbytes=[info.nbytes or 0 for info in infos],
        rate=[info.nbytes / info.seconds if info.nbytes and info.seconds else None for info in infos],
        dedupe=[info.nbytes / info.held_nbytes if info.nbytes and info.held_nbytes else None for info in infos],
        world=[info.world or 0 for info in infos],
        start=start,
        next=start + PAGE if start + PAGE < len(found) else None,
    )
