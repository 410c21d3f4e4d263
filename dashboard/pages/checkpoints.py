"""One checkpoint as a row of a page, and how a page opens its tree.

Names of checkpoints and runs are escaped here (`visible`); paths, values and metadata stay as stored, and the template
or script that draws them escapes them. In all rows `nbytes` is a number of bytes; durations are in seconds, and points
in time are ISO 8601 texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from treeckpt._core.format.lineage import SequenceRanges
from treeckpt._core.format.records import Index
from treeckpt._core.format.timings import MAX_TIME
from treeckpt._core.text import json_number
from treeckpt._inspect.outline import Outline
from treeckpt._io.storage.checkpoint import with_shared_files
from treeckpt._io.storage.store import Store
from treeckpt._runs.active_saves import SaveUnderWay, waits_for_text
from treeckpt._runs.catalog import CheckpointInfo, Status
from treeckpt._runs.repair_advice import RepairAdvice, repair_advice
from treeckpt._runs.verification import DamagedPart, Verification, VerificationResult
from treeckpt.errors import CheckpointError, visible

from ..store.foreign_trees import ForeignInfo
from ..store.index_reader import ReadProgress
from ..store.library import Library, NotFound, OpenCheckpoint, Run
from .damage import NO_DAMAGE, Damage, damage_of

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
_SHARED_FIELDS: dict[tuple[Any, ...], tuple[str, ...]] = {}
"""What `filled` takes from a source, looked for once for a call: a page may have hundreds of rows."""
TRIES = 5
"""Versions of a checkpoint that are read, if saves replace it while it is read."""
PAGE_ROWS = 100
"""Rows of one page."""
MAX_METRICS = 32
"""Metrics of one checkpoint that are shown."""
MAX_NAME = 2000
"""Characters of a name or a path that are shown."""


class VerificationRow(VerificationResult, frozen=True, kw_only=True):
    """What a verification of a checkpoint found; of the problems the first PAGE_ROWS, the page `verify` has all."""

    ok: bool
    """Whether every byte was compared, and is intact."""
    ended: str | None


class CheckpointRow(msgspec.Struct, frozen=True):
    """One directory of a run."""

    id: str
    run: str
    run_name: str
    name: str
    status: Status
    """complete: its index is published, and its files are there with the right sizes; damaged: something is missing,
    cut short or differs; partial: no index, and no save that may still publish one; in_progress and stalled: a save
    that may; unread: it could not be read, so that nothing is known; foreign: no checkpoint; reading: its index is
    being read."""
    intact: bool
    """Whether it is complete, and its bytes were compared with their checksums since they were written."""
    step: int | None
    save_id: str | None
    world: int | None
    leaves: int | None
    nbytes: int | None
    """Bytes of the arrays."""
    disk_nbytes: int | None
    """Bytes of all its own files."""
    created: str | None
    seconds: float | None
    rate: float | None
    """Bytes that were written per second."""
    error: str | None
    readable: bool
    """Whether there is an index to browse."""
    metrics: dict[str, float | str] = {}
    """What was saved with it, the first MAX_METRICS of it; "NaN", "Infinity" or "-Infinity" of no finite one."""
    best: dict[str, str] = {}
    """What its value is among those of the run, by metric: "best" by a policy; without one, "lowest" or "highest"."""
    pinned: bool = False
    kept: list[str] = []
    """Why retention keeps it; empty if nothing keeps it, or if no policies are known."""
    goes: bool = False
    """Whether the next clean-up deletes it."""
    format: str | None = None
    """What a checkpoint of another program is: its tree and values can be browsed, and nothing else."""
    verification: VerificationRow | None = None
    """The last verification of its bytes, as far as it still holds."""
    saved: float | None = None
    """Written share of a save in progress or stalled, from 0 to 1: of the ranks that have reported."""
    phase: str | None = None
    """Phase of that save."""
    stalled: bool = False
    """Whether that save has stalled: it hangs, or was killed."""
    reported: int | None = None
    """How many ranks of that save have reported."""
    saving: int | None = None
    """How many ranks that save has."""
    progressed: str | None = None
    """When that save last wrote something."""
    waits_for: str | None = None
    """What that save waits for, as a sentence; of a save that was killed, that it was."""
    repair: RepairAdvice | None = None
    """The command that puts it right, and what it does; None where nothing is wrong, or nothing can be done."""
    unhealthy: str = ""
    """What is no finite number in it, as far as known."""
    abandoned: bool = False
    """Whether it is on an abandoned branch: the newest checkpoint does not descend from it."""
    follows: str | None = None
    """The save id of the checkpoint from which the training continued; None if it is not recorded."""
    follows_step: int | None = None
    """The step of that checkpoint, if it still exists."""
    shared_nbytes: int = 0
    """Bytes of the arrays, among `nbytes`, that its save has not written: other checkpoints of the run have them."""
    shared_with: dict[str, int] = {}
    """Bytes of its files in the directory of each of these."""
    branches: bool = False
    """Whether a branch begins here: another checkpoint was saved between that one and this one."""


class LoadingPage(msgspec.Struct, frozen=True):
    """A checkpoint whose index is still being read."""

    checkpoint: CheckpointRow
    progress: ReadProgress


def filled(kind: type[S], source: object, **own: Any) -> S:
    """Returns a struct with these fields, and with the others that the source has under the same name."""
    key = (kind, type(source), *own)
    if (names := _SHARED_FIELDS.get(key)) is None:
        names = tuple(name for name in kind.__struct_fields__ if name not in own and hasattr(source, name))
        _SHARED_FIELDS[key] = names
    return kind(**own, **{name: getattr(source, name) for name in names})


def next_start(start: int, total: int, count: int = PAGE_ROWS) -> int | None:
    """Returns the first row of the page after the one from `start` on; None if that is the last."""
    return start + count if start + count < total else None


def shorten(text: str) -> str:
    """Returns a stored name, cut after MAX_NAME characters: a hostile one may be as long as the index."""
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}… ({len(text)} characters)"


def checkpoint_row(checkpoint_id: str, run: Run, info: CheckpointInfo) -> CheckpointRow:
    """Returns the row of one directory of a run."""
    save = _shown_save(info)
    open_save = save if save is not None and save.state != "killed" else None
    waits_for = waits_for_text(save, time.time_ns()) if save is not None else None
    error = info.problem if waits_for is None or info.files != "partial" else waits_for
    verification = info.verification
    rate = info.own_nbytes / info.seconds if info.own_nbytes and info.seconds and info.files != "partial" else None
    return CheckpointRow(
        id=checkpoint_id,
        run=run.id,
        run_name=run.name,
        name=visible(info.name),
        status=info.status,
        intact=info.intact,
        step=info.step,
        save_id=info.save_id,
        world=info.world,
        leaves=info.leaves,
        nbytes=info.nbytes,
        disk_nbytes=info.disk_nbytes,
        shared_nbytes=info.shared_nbytes,
        shared_with=info.shared_with,
        created=iso_time(info.created_ns),
        seconds=info.seconds,
        rate=rate,
        error=visible(error) if error else None,
        repair=repair_advice(info),
        unhealthy=info.unhealthy,
        readable=info.leaves is not None,
        pinned=info.pinned,
        abandoned=info.abandoned,
        metrics={shorten(name): json_number(value) for name, value in list(info.metrics.items())[:MAX_METRICS]},
        format=info.format if isinstance(info, ForeignInfo) else None,
        verification=_verification_row(verification) if verification is not None else None,
        saved=open_save.fraction if open_save else None,
        phase=open_save.phase if open_save else None,
        stalled=open_save is not None and open_save.state == "stalled",
        reported=open_save.ranks if open_save else None,
        saving=open_save.world if open_save else None,
        progressed=iso_time(open_save.updated_ns) if open_save else None,
        waits_for=waits_for,
        follows=info.lineage.follows or None if info.lineage is not None else None,
    )


def _shown_save(info: CheckpointInfo) -> SaveUnderWay | None:
    """Returns the save that a row is about: one in progress, else a stalled one, else one that was killed."""
    order = ("killed", "stalled", "in_progress")
    return max(info.saving, key=lambda save: (order.index(save.state), save.started_ns), default=None)


def _verification_row(found: Verification) -> VerificationRow:
    problems, unread = (
        [DamagedPart(visible(part.file), visible(part.text), part.start, part.stop) for part in parts[:PAGE_ROWS]]
        for parts in (found.problems, found.unread)
    )
    ended = iso_time(found.ended_ns)
    return filled(VerificationRow, found, by=visible(found.by), problems=problems, unread=unread, ended=ended)


def iso_time(ns: int | None) -> str | None:
    """Converts Unix nanoseconds to ISO 8601 in milliseconds; None if no calendar has them."""
    if ns is None:
        return None
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def unix_time(created_ns: int | None) -> float | None:
    """Returns a Unix time in seconds, None for one that is not known, or beyond what a chart can draw."""
    return created_ns / 1e9 if created_ns is not None and abs(created_ns) < MAX_TIME else None


class OpenTree(msgspec.Struct, frozen=True, eq=False):
    """A checkpoint that a request has opened, also one that another program wrote."""

    library: Library
    checkpoint: OpenCheckpoint
    row: CheckpointRow
    outline: Outline

    @property
    def index(self) -> Index:
        """The index of the checkpoint."""
        return self.outline.index

    @property
    def damage(self) -> Damage:
        """What is known to be damaged."""
        if self.row.format is not None:
            return NO_DAMAGE
        return damage_of(self.outline, self.checkpoint.info.verification, self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The files and their sizes in bytes, with the shards in the directories of other checkpoints."""
        return with_shared_files(self.checkpoint.folder, self.index).sizes()

    def read(self, read: Callable[[Store, Index], T], *, problem_of: Callable[[T], object] = lambda _: None) -> T:
        """Returns the result of `read`; reads again after a problem if a save has replaced the checkpoint meanwhile."""
        opened = self
        for tries_left in reversed(range(TRIES)):
            with closing(self.library.store(opened.checkpoint)) as store:
                try:
                    result = read(with_shared_files(store, opened.index), opened.index)
                except (CheckpointError, OSError):
                    newer = open_tree(self.library, self.checkpoint.id) if tries_left else opened
                    if newer.index.save_id == opened.index.save_id:
                        raise
                else:
                    newer = open_tree(self.library, self.checkpoint.id) if tries_left and problem_of(result) else opened
                    if newer.index.save_id == opened.index.save_id:
                        return result
            opened = newer
        raise AssertionError("the last try returns or raises")


class OwnTree(OpenTree, frozen=True, eq=False):
    """A checkpoint of ours that a request has opened."""


def open_tree(library: Library, checkpoint_id: str) -> OpenTree:
    """Opens a checkpoint, also one that another program wrote.

    Raises:
        NotFound: there is no such checkpoint, or it has no index to browse.
        StillReading: its index is being read for the first time.
    """
    checkpoint = library.checkpoint(checkpoint_id)
    row = checkpoint_row(checkpoint_id, checkpoint.run, checkpoint.info)
    if not row.readable and row.format is None:
        raise NotFound(f"This checkpoint is {row.status}: {row.error}")
    return OpenTree(library, checkpoint, row, library.outline(checkpoint))


def open_checkpoint(library: Library, checkpoint_id: str) -> OwnTree:
    """Same as `open_tree`, but raises NotFound if another program wrote the checkpoint."""
    tree = open_tree(library, checkpoint_id)
    if tree.row.format is not None:
        hint = "only its tree and values are shown. treeckpt convert makes a checkpoint of it."
        raise NotFound(f"This is {tree.row.format}: {hint}")
    return OwnTree(library, tree.checkpoint, tree.row, tree.outline)


def loading_page(library: Library, url: str, progress: ReadProgress) -> LoadingPage:
    """Returns the page of the checkpoint in the folder `url`, whose index is still being read."""
    checkpoint_id, run, info = library.unread(url)
    return LoadingPage(checkpoint_row(checkpoint_id, run, info), progress)


def per_rank_keyword(info: CheckpointInfo) -> str:
    """Returns the argument with which Python code loads what several ranks saved; empty for a checkpoint of one rank.

    With it, a single process gets the state of rank 0 where each rank had its own; without it, that is an error.
    """
    return ", fallback=tc.Fallback(per_rank='take')" if (info.world or 1) > 1 else ""


def lineage_branches(infos: Sequence[CheckpointInfo]) -> list[list[CheckpointInfo]]:
    """Returns the branches of a run, the oldest first: one begins where a save abandons the one before it."""
    recorded = sorted((i for i in infos if i.lineage is not None), key=lambda i: (i.sequence or 0, i.step or 0))
    groups: list[list[CheckpointInfo]] = []
    for info in recorded:
        before = groups[-1][-1].sequence if groups else None
        if before is None or (info.lineage and _holds(info.lineage.abandoned, before)):
            groups.append([])
        groups[-1].append(info)
    return groups


def branch_numbers(infos: Sequence[CheckpointInfo]) -> list[int]:
    """Returns the number of the branch of each checkpoint: 0 for the present one, then the newest abandoned one.

    The last one has the abandoned checkpoints of which no lineage is recorded.
    """
    branches = lineage_branches(infos)
    abandoned = [branch for branch in reversed(branches) if branch[-1].abandoned]
    numbers = {info.name: n for n, branch in enumerate(abandoned, 1) for info in branch if info.abandoned}
    return [numbers.get(info.name, len(abandoned) + 1) if info.abandoned else 0 for info in infos]


def _holds(ranges: SequenceRanges, number: int) -> bool:
    return any(first <= number <= last for first, last in ranges)
