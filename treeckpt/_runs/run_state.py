"""Says what state a run is in, from the list of its checkpoints: of its files, and whether it still trains.

Lists, pages and commands all take both from here. `signs_of_run` reads off the list what does not depend on the time;
`activity_at` decides by it whether the run is finished, alive or late. That is known for sure where a mark says how the
run ended (`run_end`), where a save is in progress, and where the process of a save was killed. Otherwise the usual
interval between saves decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from statistics import median, median_low
from typing import Literal

import msgspec

from .._core.format.files import id_text
from .._core.text import seconds_text, time_text
from ..errors import visible
from .catalog import CheckpointInfo, Status, id_of
from .run_end import RunEnd

INTERVALS = 50
"""The newest intervals between saves of which the median is the usual one."""
LATE = 3.0
"""Usual intervals since the last save was begun after which a run is late."""
SOONEST = 60.0
"""Seconds within which none is."""
ENDED = 3600.0
"""Seconds without a new checkpoint after which a run is taken for ended, unless ENDED_INTERVALS take longer."""
ENDED_INTERVALS = 20
_WEIGHTS: dict[Status, int] = {"complete": 3, "damaged": 3, "unread": 2, "reading": 2, "partial": 1}
"""How much a status says about a run; one that is not here says least."""


def status_of_run(infos: Sequence[CheckpointInfo]) -> Status | None:
    """Returns the status that a list of runs shows for a run; None if it has no directory.

    It is that of a save in progress, else of a stalled one; else complete or damaged, whichever the newest checkpoint
    with an index is. Without any of these it is what the newest directory is that may be a checkpoint.

    Args:
        infos: of the run, newest first.
    """
    saves = {save.state for info in infos for save in info.saving}
    if "in_progress" in saves:
        return "in_progress"
    if "stalled" in saves:
        return "stalled"
    return max((info.status for info in infos), key=lambda status: _WEIGHTS.get(status, 0), default=None)


# how it saves ---------------------------------------------------------------------------------------------------------


class SavePattern(msgspec.Struct, frozen=True):
    """How a run saves, by its newest saves."""

    seconds: float
    """From one save to the next, the median."""
    steps: int
    """Steps of the training between them, the median."""
    nbytes: int
    """Bytes of all files of one, the median."""


def save_pattern(infos: Iterable[CheckpointInfo]) -> SavePattern | None:
    """Returns how a run saves; None with fewer than two intervals between saves.

    An interval is between a checkpoint and the one that it follows: where others between them were deleted since,
    there is none. Checkpoints without a record of that follow the one that was begun before them.

    Args:
        infos: of the run, newest first.
    """
    saves = [info for info in infos if info.files == "complete" and not info.abandoned and info.created_ns]
    pairs = list(islice((pair for pair in pairwise(saves) if _follows(*pair)), INTERVALS))
    if len(pairs) < 2:
        return None
    return SavePattern(
        median(_seconds_between(*pair) for pair in pairs),
        median_low([max(1, (newer.step or 0) - (older.step or 0)) for newer, older in pairs]),
        median_low([newer.disk_nbytes or 0 for newer, _ in pairs]),
    )


def _seconds_between(newer: CheckpointInfo, older: CheckpointInfo) -> float:
    return ((newer.created_ns or 0) - (older.created_ns or 0)) / 1e9


def _follows(newer: CheckpointInfo, older: CheckpointInfo) -> bool:
    known = newer.lineage is None or newer.lineage.follows == older.save_id
    return known and _seconds_between(newer, older) > 0


# whether it trains ----------------------------------------------------------------------------------------------------

ActivityState = Literal["finished", "stopped", "alive", "late", "ended", "unknown"]


class RunSigns(msgspec.Struct, frozen=True):
    """What the list of a run's checkpoints says of whether it still trains, whatever the time is."""

    pattern: SavePattern | None
    last_ns: int | None
    """When the save of the newest complete checkpoint was begun."""
    step: int | str | None
    """Of that checkpoint: its step, or the text in its place."""
    saving: bool
    """Whether a save is in progress."""
    hanging: bool
    """Whether the save that was begun last hangs, or was killed where that cannot be seen."""
    end: RunEnd | None
    """How the run ended; None if a save began after that, or no mark says so."""


class RunActivity(msgspec.Struct, frozen=True):
    """Whether a run still trains. Times are Unix times in seconds."""

    state: ActivityState
    """finished: it came to its end; stopped: by an error, a signal or a kill; alive: a save is in progress, or not due
    for long; late: LATE intervals have passed since the last; ended: taken for ended, as no save came for much longer,
    though nothing says so and a run that stands still looks the same; unknown: its usual interval is not known."""
    text: str
    """That as a sentence."""
    step: int | str | None
    """Of the newest complete checkpoint: its step, or the text in its place."""
    since: float | None = None
    """When it finished or was stopped."""
    last: float | None = None
    """When its last complete save was begun."""
    due: float | None = None
    """When the next save is expected; None of a run that has finished or was stopped, and where that is not known."""
    interval: float | None = None
    """Usual seconds from one save to the next."""

    @property
    def live(self) -> bool:
        """Whether it may save again, as far as is known."""
        return self.state in ("alive", "late") or (self.state == "unknown" and self.last is not None)


def signs_of_run(infos: Sequence[CheckpointInfo]) -> RunSigns:
    """Returns what a list says of whether a run still trains.

    Args:
        infos: of the run, newest first.
    """
    infos = [info for info in infos if info.files != "foreign"]
    complete = [info for info in infos if info.files == "complete"]
    last = max(complete, key=lambda info: info.created_ns or 0, default=None)
    end = max((info.ended for info in infos if info.ended is not None), key=lambda one: one.ended_ns, default=None)
    save = max((save for info in infos for save in info.saving), key=lambda save: save.started_ns, default=None)
    last_ns = last.created_ns if last is not None else None
    if save is not None and save.started_ns < (last_ns or 0):
        save = None
    if end is not None and end.ended_ns < max((info.created_ns or 0 for info in infos), default=0):
        end = None
    if save is not None and (end is None or end.ended_ns < save.started_ns):
        end = RunEnd(save.updated_ns, "a kill during a save") if save.state == "killed" else None
    return RunSigns(
        pattern=save_pattern(infos),
        last_ns=last_ns,
        step=id_of(last) if last is not None else None,
        saving=any(save.state == "in_progress" for info in infos for save in info.saving),
        hanging=save is not None and save.state == "stalled",
        end=end,
    )


def activity_at(signs: RunSigns, now_ns: int) -> RunActivity:
    """Decides whether a run is finished, alive or late at a time."""
    last = signs.last_ns / 1e9 if signs.last_ns is not None else None
    interval = signs.pattern.seconds if signs.pattern is not None else None
    facts = {"step": signs.step, "last": last, "interval": interval}
    of = f" of {visible(id_text(signs.step))}" if signs.step is not None else ""
    usually = f"usually every {seconds_text(interval)}" if interval is not None else ""
    if signs.saving:
        return RunActivity("alive", "alive: a save is in progress" + f", {usually}" * bool(usually), **facts)
    if (end := signs.end) is not None:
        state, by = ("stopped", f" by {end.stopped_by}") if end.stopped_by else ("finished", "")
        text = f"{state}{by} at {time_text(end.ended_ns)}, after the save{of}"
        return RunActivity(state, text, since=end.ended_ns / 1e9, **facts)
    if last is None:
        return RunActivity("unknown", "not known whether it trains: no checkpoint is complete", **facts)
    age, hangs = max(0.0, now_ns / 1e9 - last), "; a save since then hangs or was killed" * signs.hanging
    begun = f"the last save{of} was begun at {time_text(signs.last_ns)}"
    if age >= max(ENDED, ENDED_INTERVALS * (interval or 0.0)):
        text = f"ended, or stands still: {begun}" + f", before that {usually}" * bool(usually)
        return RunActivity("ended", f"{text}; nothing says how it ended{hangs}", **facts)
    if interval is None:
        text = f"not known whether it trains: {begun}; too few saves follow each other to know how often it saves"
        return RunActivity("unknown", text + hangs, **facts)
    due = last + interval
    if age > max(SOONEST, LATE * interval):
        return RunActivity(
            "late", f"late by {seconds_text(age - interval)}: {begun}, {usually}{hangs}", due=due, **facts
        )
    text = f"alive: the next save is expected about {time_text(int(due * 1e9))}, {usually}{hangs}"
    return RunActivity("alive", text, due=due, **facts)
