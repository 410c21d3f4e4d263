"""The page of saves in progress: their rate, the time left, and which ranks they wait for."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, deque

import msgspec

from treeckpt._core.format.files import Progress
from treeckpt._io.storage.kept_files import FAR_PROGRESS_PAUSE, read_progress
from treeckpt._runs.active_saves import SaveState, SaveUnderWay, waits_for_text
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt.errors import TreeckptError, visible

from ..pages.checkpoints import PAGE_ROWS, filled, iso_time, next_start
from ..store.library import Library, Run

SHOWN_RANKS = 12
_ORDER: tuple[SaveState, ...] = ("in_progress", "stalled", "killed")
SPELL = 5.0
"""Seconds for which what is said of a save that changes nothing holds."""
WINDOW = 15.0
"""Seconds over which the rate of a save in progress is measured."""
MAX_SAVES = 256
"""Saves whose progress stays in memory."""


class SavingRank(msgspec.Struct, frozen=True):
    """One rank of a save in progress."""

    rank: int
    phase: str
    written: int
    planned: int
    share: float
    quiet: float
    """Seconds since its progress record was last written."""


class SaveRow(msgspec.Struct, frozen=True):
    """A save in progress."""

    run: str
    run_name: str
    checkpoint: str
    name: str
    save_id: str
    step: int | None
    world: int
    ranks: int
    """Ranks that have a progress record."""
    done: int
    """Ranks with a progress record whose bytes are all durable."""
    phase: str
    stuck: str
    """What the save waits for, as a sentence."""
    state: SaveState
    stalled: bool
    """Whether it is not in progress: it hangs, or was killed."""
    written: int
    planned: int
    share: float
    seconds: float
    quiet: float
    """Seconds since the last progress record of any rank was written."""
    updated: str | None
    """When that was."""
    rate: float | None
    """Bytes per second over the last seconds."""
    eta: float | None
    """Seconds until all bytes are written; None while a rank has not reported, for its bytes are not known."""
    slowest: list[SavingRank]
    """The ranks with the most bytes left to write."""


class LivePage(msgspec.Struct, frozen=True):
    """Saves in progress of every run."""

    saves: list[SaveRow]
    saving: int
    """Saves in progress, on all pages: neither stalled nor killed."""
    changed: str | None
    """When anything of the runs last changed, as far as this server has seen."""
    start: int
    next: int | None


class SaveRates:
    """Rates of saves in progress over the last seconds, from what they had written at earlier requests."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, deque[tuple[int, int]]] = OrderedDict()

    def rate(self, save: SaveUnderWay, now_ns: int) -> float | None:
        """Returns bytes per second, since the save began if it was requested only once; None if no time has passed.

        A rank may renew its record every FAR_PROGRESS_PAUSE seconds only. Time without news beyond that
        lowers the rate.
        """
        seen = self._seen.setdefault(save.save_id, deque(maxlen=64))
        self._seen.move_to_end(save.save_id)
        while len(self._seen) > MAX_SAVES:
            self._seen.popitem(last=False)
        if not seen or seen[-1][0] < save.updated_ns:
            seen.append((save.updated_ns, save.written))
        while len(seen) > 2 and seen[0][0] < save.updated_ns - WINDOW * 1e9:
            seen.popleft()
        first_ns, first = seen[0] if len(seen) > 1 else (save.started_ns, 0)
        seconds = (max(save.updated_ns, now_ns - int(FAR_PROGRESS_PAUSE * 1e9)) - first_ns) / 1e9
        return max(0, save.written - first) / seconds if seconds > 0 else None


def live_page(library: Library, rates: SaveRates, start: int = 0, *, now_ns: int | None = None) -> LivePage:
    """Saves of every run that have not ended: those in progress, then the stalled ones, then those that were killed.

    Of each of these, the last started comes first.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    library.start_scans(library.runs)
    saves = [
        (run, checkpoint_id, info, save)
        for run in library.runs
        for checkpoint_id, info in library.checkpoints(run, wait=1.0)
        for save in info.saving
    ]
    saves.sort(key=lambda one: (_ORDER.index(one[3].state), -one[3].started_ns))
    rows = [_save_row(*one, rates, now_ns) for one in saves[start : start + PAGE_ROWS]]
    saving = sum(save.state == "in_progress" for *_, save in saves)
    changed = max((library.watch(run).changed_ns for run in library.runs), default=None)
    return LivePage(rows, saving, iso_time(changed), start, next_start(start, len(saves)))


def _save_row(
    run: Run, checkpoint_id: str, info: CheckpointInfo, save: SaveUnderWay, rates: SaveRates, now_ns: int
) -> SaveRow:
    quiet = _seconds_since(save.updated_ns, now_ns)
    rate = rates.rate(save, now_ns)
    left = max(0, save.planned - save.written)
    ranks = _ranks(run, info, save)
    behind = sorted(ranks, key=lambda one: (one.phase == "commit", one.written - one.planned, one.rank))
    return filled(
        SaveRow,
        save,
        run=run.id,
        run_name=run.name,
        checkpoint=checkpoint_id,
        name=visible(info.name),
        stuck=waits_for_text(save, now_ns),
        stalled=save.state != "in_progress",
        share=save.fraction,
        seconds=_seconds_since(save.started_ns, now_ns),
        quiet=quiet,
        updated=iso_time(save.updated_ns),
        rate=rate,
        eta=left / rate if rate and save.phase == "write" and save.reported and save.state == "in_progress" else None,
        slowest=[
            filled(SavingRank, one, share=one.fraction, quiet=_seconds_since(one.updated_ns, now_ns))
            for one in behind[:SHOWN_RANKS]
        ],
    )


def _ranks(run: Run, info: CheckpointInfo, save: SaveUnderWay) -> list[Progress]:
    folder = run.store.folder(info.name)
    with contextlib.suppress(TreeckptError, OSError):
        return [one for one in read_progress(folder, folder.entries()) if one.save_id == save.save_id]
    return []


def _seconds_since(ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - ns) / 1e9)
