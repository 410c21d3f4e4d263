"""One checkpoint as a row of a page, and how a page opens its tree.

Names of checkpoints and runs are escaped here (`visible`); paths, values and metadata stay as stored, and the template
or script that draws them escapes them. In all rows `nbytes` is a number of bytes; durations are in seconds, and points
in time are ISO 8601 texts.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from treeckpt.core.analysis.outline import Outline
from treeckpt.core.text import visible
from treeckpt.runs.checkpoint_info import CheckpointInfo

from ..store.index_reader import ReadProgress
from ..store.library import Library, NotFound, Run, UnreadInfo

PAGE = 100
"""Rows of one page."""
MAX_NAME = 2000
"""Characters of a name or a path that are shown."""


class CheckpointRow(msgspec.Struct, frozen=True):
    """One directory of a run."""

    id: str
    run: str
    run_name: str
    name: str
    status: str
    step: int | None
    save_id: str | None
    world: int | None
    leaves: int | None
    nbytes: int | None
    created: str | None
    seconds: float | None
    rate: float | None
    """Bytes per second."""
    error: str | None
    readable: bool
    """Whether there is an index to browse."""
    pinned: bool = False
    kept: list[str] = []
    """Why retention keeps it; empty if nothing keeps it, or if no policies are known."""
    goes: bool = False
    """Whether the next clean-up deletes it."""
    saved: float | None = None
    """Written share of a save in progress, from 0 to 1."""
    phase: str | None = None
    """Phase of a save in progress."""
    abandoned: bool = False
    """Whether it is on an abandoned branch: the newest checkpoint does not descend from it."""
    follows: str | None = None
    """The save id of the checkpoint from which the training continued; None if it is not recorded."""
    follows_step: int | None = None
    """The step of that checkpoint, if it still exists."""
    branches: bool = False
    """Whether a branch begins here: another checkpoint was saved between that one and this one."""


class LoadingPage(msgspec.Struct, frozen=True):
    """A checkpoint whose index is still being read."""

    checkpoint: CheckpointRow
    progress: ReadProgress


def next_start(start: int, total: int, count: int = PAGE) -> int | None:
    """Returns the first row of the page after the one from `start` on; None if that is the last."""
    return start + count if start + count < total else None


def shorten(text: str) -> str:
    """Returns a stored name, cut after MAX_NAME characters: a hostile one may be as long as the index."""
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}… ({len(text)} characters)"


def status_of(info: CheckpointInfo) -> str:
    """Returns complete, saving, partial, corrupt, foreign, or reading if its large index is read for the first time."""
    if isinstance(info, UnreadInfo):
        return "reading"
    return "saving" if info.status == "partial" and info.under_way else info.status


def checkpoint_row(checkpoint_id: str, run: Run, info: CheckpointInfo) -> CheckpointRow:
    """Returns the row of one directory of a run."""
    under_way = info.under_way
    rate = info.nbytes / info.seconds if info.nbytes and info.seconds and info.status != "partial" else None
    return CheckpointRow(
        id=checkpoint_id,
        run=run.id,
        run_name=run.name,
        name=visible(info.name),
        status=status_of(info),
        step=info.step,
        save_id=info.save_id,
        world=info.world,
        leaves=info.leaves,
        nbytes=info.nbytes,
        created=_iso_time(info.created_ns),
        seconds=info.seconds,
        rate=rate,
        error=visible(info.error) if info.error else None,
        readable=info.leaves is not None,
        pinned=info.pinned,
        saved=under_way[-1].fraction if under_way else None,
        phase=under_way[-1].phase if under_way else None,
        abandoned=info.abandoned,
        follows=info.lineage.follows or None if info.lineage is not None else None,
    )


def _iso_time(ns: int | None) -> str | None:
    """Converts Unix nanoseconds to ISO 8601 in milliseconds; None if no calendar has them."""
    if ns is None:
        return None
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def open_checkpoint(library: Library, checkpoint_id: str) -> tuple[CheckpointRow, Outline]:
    """Returns the row and the tree of a checkpoint.

    Raises:
        NotFound: there is no such checkpoint, or it has no index to browse.
        StillReading: its index is being read for the first time.
    """
    run, info = library.checkpoint(checkpoint_id)
    row = checkpoint_row(checkpoint_id, run, info)
    if not row.readable:
        raise NotFound(f"This checkpoint is {row.status}: {row.error}")
    return row, library.outline(info)


def loading_page(library: Library, url: str, progress: ReadProgress) -> LoadingPage:
    """Returns the page of the checkpoint in the folder `url`, whose index is still being read."""
    checkpoint_id, run, info = library.unread(url)
    return LoadingPage(checkpoint_row(checkpoint_id, run, info), progress)
