"""The page of the numbers in a checkpoint: the statistics of its arrays, the most unusual first.

A verification computes them from the bytes that it compares, and ranks them; nothing is read here but the cache.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from treeckpt._core.format.records import Index
from treeckpt._core.text import shape_text
from treeckpt._inspect.outline import Outline
from treeckpt._inspect.ranking import reason_of
from treeckpt._runs.nan_scan import known_statistics
from treeckpt._runs.statistics_store import LeafStatistics

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, filled, next_start, open_checkpoint, shorten
from ..store.library import Library
from .leaf_numbers import ContentsSummary, LeafNumbers, leaf_numbers, summarize
from .verify import VerifyJobs

ContentsOrder = Literal["unusual", "norm", "deviation", "largest", "tree"]


class ContentsRow(LeafNumbers, frozen=True, kw_only=True):
    """The statistics of one array of a list."""

    leaf: int
    path: str
    dtype: str
    shape: str
    unusual: str
    """Why it is unusual, in a few words; empty if it is not."""


class ContentsPage(msgspec.Struct, frozen=True):
    """The statistics of a checkpoint's arrays."""

    checkpoint: CheckpointRow
    running: bool
    """Whether a verification waits or runs, which computes them: ask again."""
    share: float
    """How much of it is done, from 0 to 1."""
    error: str | None
    """Why the last one failed."""
    summary: ContentsSummary | None
    """None if no statistics are known."""
    sort: ContentsOrder
    q: str
    start: int
    next: int | None
    rows: list[ContentsRow]


def contents_page(
    library: Library,
    jobs: VerifyJobs,
    checkpoint_id: str,
    sort: ContentsOrder = "unusual",
    q: str = "",
    start: int = 0,
) -> ContentsPage:
    """The statistics of all arrays, the most unusual first; a verification computes them."""
    job, tree = jobs.shown(checkpoint_id), open_checkpoint(library, checkpoint_id)
    outline = tree.outline
    statistics = _fitting(known_statistics(tree.checkpoint.info, library.cache.statistics), outline)
    order = _order(statistics, sort) if statistics is not None else np.empty(0, np.int64)
    if statistics is not None and q.strip():
        order = order[np.isin(statistics.columns["leaf"][order], np.fromiter(outline.matches(q), np.int64))]
    numbers = order[start : start + PAGE_ROWS].tolist()
    return ContentsPage(
        checkpoint=tree.row,
        running=job is not None and job.open,
        share=job.share if job is not None else 0.0,
        error=job.error if job is not None else None,
        summary=summarize(statistics) if statistics is not None else None,
        sort=sort,
        q=q,
        start=start,
        next=next_start(start, len(order)),
        rows=[_row(outline.index, statistics, row) for row in numbers] if statistics is not None else [],
    )


def _fitting(found: LeafStatistics | None, outline: Outline) -> LeafStatistics | None:
    """Returns the statistics of a checkpoint; None if none are known, or if a file of the cache is damaged."""
    if found is None or not found.head.rows:
        return found
    leaves, order, entries = found.columns["leaf"], found.columns["order"], len(outline.index.entries)
    fits = 0 <= leaves.min() <= leaves.max() < entries and 0 <= order.min() <= order.max() < len(order)
    return found if fits else None


def _row(index: Index, found: LeafStatistics, row: int) -> ContentsRow:
    leaf, moments = index.entries[int(found.columns["leaf"][row])], found.row(row)
    spec = leaf.spec
    dtype, shape = (spec.dtype, shape_text(spec.shape)) if spec is not None else ("", "")
    reason = reason_of(found.ranking, row, moments.nan, moments.infinite)
    own = {"leaf": leaf.number, "path": shorten(leaf.path), "dtype": dtype, "shape": shape, "unusual": reason}
    return filled(ContentsRow, leaf_numbers(moments), **own)


def _order(found: LeafStatistics, sort: ContentsOrder) -> np.ndarray:
    """Returns the numbers of the rows in an order."""
    columns = found.columns
    if sort in ("unusual", "tree"):
        return columns["order"] if sort == "unusual" else np.arange(found.head.rows)
    finite = columns["count"] - columns["nan"] - columns["infinite"]
    values = {
        "norm": columns["norm"],
        "largest": np.maximum(np.abs(columns["low"]), np.abs(columns["high"])),
        "deviation": columns["spread"] / np.sqrt(np.maximum(finite, 1)),
    }[sort]
    return np.argsort(-np.where(finite > 0, values, -1.0), kind="stable")
