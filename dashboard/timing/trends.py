"""The page of trends: how saves of a run changed from step to step."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from ..pages.checkpoints import next_start
from ..store.library import Library

MAX_METRICS = 8
"""Metrics that have a chart."""


class TrendsPage(msgspec.Struct, frozen=True):
    """The saves of a run by step, oldest first, in columns; the rows from `start` to `next` are also a table."""

    run: str
    name: str
    ids: list[str]
    step: list[int]
    seconds: list[float | None]
    blocked: list[float | None]
    nbytes: list[int]
    rate: list[float | None]
    dedupe: list[float | None]
    """Bytes written, as a share of the bytes that all ranks held together."""
    world: list[int]
    metrics: dict[str, list[float | None]]
    """The metrics that most checkpoints have, by name."""
    start: int
    next: int | None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def trends_page(library: Library, run_id: str, start: int) -> TrendsPage:
    """Returns the complete checkpoints of a run that have a step, sorted by step.

    Args:
        start: the first row of the page's table.

    Raises:
        NotFound: there is no such run.
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
        metrics={
            name: [_finite(info.metrics.get(name)) for info in infos]
            for name, _ in Counter(name for info in infos for name in info.metrics).most_common(MAX_METRICS)
        },
        start=start,
        next=next_start(start, len(found)),
    )
