"""Lists the saves under way in a checkpoint's directory, and their progress, from the records that ranks keep there.

A save that has ended removes its records; one that was killed leaves its last ones. It is reported as killed if its
coordinator's process is known to have ended; otherwise, `STALLED_SECONDS` after the last change, as stalled: it hangs,
or was killed where that cannot be seen from here. Records that do not decode are skipped. Lists, pages and commands all
take the state and its sentence from here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

import msgspec

from .._core.format.files import Progress, SavePhase, fraction_of, progress_name
from .._core.text import bytes_text, count_text, seconds_text
from .._io.storage.kept_files import is_alive, read_progress
from .._io.storage.store import Store

STALLED_SECONDS = 60.0
"""Seconds without a change of its record after which a rank counts as hanging or gone."""
NAMED_RANKS = 6
"""Ranks that a sentence names."""

SaveState = Literal["in_progress", "stalled", "killed"]


class SaveUnderWay(msgspec.Struct, frozen=True):
    """A save that has not ended, as the records of its ranks describe it."""

    save_id: str
    step: int | None
    world: int
    ranks: int
    """The number of ranks that have a record: those that have not ended yet."""
    phase: SavePhase
    """The phase of the save: write, as long as any rank with a record writes."""
    written: int
    planned: int
    """The bytes that the ranks with a record are to write; `written` is how many of them they have written."""
    started_ns: int
    updated_ns: int
    """Unix time of the newest record."""
    done: int = 0
    """The number of ranks with a record whose bytes are all durable."""
    alive: bool | None = None
    """Whether it may still be committed: False once its coordinator's process has ended, None if not known."""

    state: SaveState = "in_progress"
    """killed: it cannot be committed any more, as far as is known; stalled: no record changed for `STALLED_SECONDS`."""
    heard_ns: int = 0
    """Unix time at which a rank last renewed its record, whether or not it had written anything."""
    writing: tuple[int, ...] = ()
    """The first of the ranks that still write, with the least written share first."""
    silent: tuple[int, ...] = ()
    """The first of the ranks without a record."""

    @property
    def fraction(self) -> float:
        """The written part of the bytes of these ranks, 0 to 1."""
        return fraction_of(self.written, self.planned)

    @property
    def reported(self) -> bool:
        """Whether every rank has a record, so that `planned` is all that will be written."""
        return self.ranks == self.world


def saves_under_way(folder: Store, records: Sequence[str]) -> tuple[SaveUnderWay, ...]:
    """Returns the saves that have these progress records in a folder, in the order of their start."""
    by_save: dict[str, list[Progress]] = {}
    for record in read_progress(folder, records):
        by_save.setdefault(record.save_id, []).append(record)
    return tuple(sorted((_merge_records(records) for records in by_save.values()), key=lambda save: save.started_ns))


def _merge_records(records: Iterable[Progress]) -> SaveUnderWay:
    ranks = {record.rank: record for record in records}
    first = next(iter(ranks.values()))
    now_ns, updated_ns = time.time_ns(), max(record.updated_ns for record in ranks.values())
    # Rank 0 alone could commit the save.
    alive = is_alive(progress_name(0, first.save_id), ranks[0], now_ns) if 0 in ranks else None
    writing = sorted((r for r in ranks.values() if r.phase == "write"), key=lambda r: (r.fraction, r.rank))
    return SaveUnderWay(
        save_id=first.save_id,
        step=first.step,
        world=first.world,
        ranks=len(ranks),
        phase="write" if any(record.phase == "write" for record in ranks.values()) else "commit",
        written=sum(record.written for record in ranks.values()),
        planned=sum(record.planned for record in ranks.values()),
        started_ns=min(record.started_ns for record in ranks.values()),
        updated_ns=updated_ns,
        done=sum(record.phase == "commit" for record in ranks.values()),
        alive=alive,
        state=_state(alive, updated_ns, now_ns),
        heard_ns=max(max(record.alive_ns, record.updated_ns) for record in ranks.values()),
        # One more than a sentence names, by which it knows that there are more.
        writing=tuple(record.rank for record in writing[: NAMED_RANKS + 1]),
        silent=tuple(islice((rank for rank in range(first.world) if rank not in ranks), NAMED_RANKS + 1)),
    )


def _state(alive: bool | None, updated_ns: int, now_ns: int) -> SaveState:
    if alive is False:
        return "killed"
    return "stalled" if now_ns - updated_ns > STALLED_SECONDS * 1e9 else "in_progress"


def waits_for_text(save: SaveUnderWay, now_ns: int) -> str:
    """Describes in a sentence or two what a save waits for, and what of that is not known."""
    what = f"ranks {_few(save.writing)} in writing" if save.writing else "the commit"
    who = f"Rank {save.silent[0]} has" if len(save.silent) == 1 else f"Ranks {_few(save.silent)} have"
    missing = f" {who} not reported, so whether all is being written is not known." if save.silent else ""
    if save.alive is False:
        return "It was killed: the process that was to commit it has ended."
    ranks = count_text(save.world, "rank")
    quiet, unheard = (max(0.0, (now_ns - ns) / 1e9) for ns in (save.updated_ns, save.heard_ns))
    if quiet > STALLED_SECONDS and unheard <= STALLED_SECONDS:
        return (
            f"It hangs: nothing new from {what} for {seconds_text(quiet)}, but a process of it still reports.{missing}"
        )
    if quiet > STALLED_SECONDS:
        text = f"It hangs or was killed: nothing new from {what} for {seconds_text(quiet)}."
        return f"{text} Whether its coordinator still runs cannot be seen from here.{missing}"
    if save.writing and save.done:
        return f"{save.done} of {ranks} wait for {_few(save.writing)}, still writing.{missing}"
    if save.writing:
        still = save.ranks - save.done
        return f"{still} of {ranks} {'is' if still == 1 else 'are'} writing.{missing}"
    if save.silent:
        return f"The bytes of {save.done} of {ranks} are durable.{missing}"
    return "Every rank's bytes are durable; the coordinator is to commit."


def _few(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, sorted(ranks[:NAMED_RANKS])))
    return text if len(ranks) <= NAMED_RANKS else f"{text} and more"


def under_way_text(save: SaveUnderWay, now_ns: int) -> str:
    """Describes a save under way in a sentence."""
    quiet = (now_ns - save.updated_ns) / 1e9
    what = "being written" if save.phase == "write" else "written, waiting for the commit"
    far = f"{save.fraction:.0%} of {bytes_text(save.planned)} on {save.ranks} of {count_text(save.world, 'rank')}"
    if save.alive is False:
        return f"save {save.save_id} was killed: {far}"
    if quiet > STALLED_SECONDS:
        return f"save {save.save_id} hangs or was killed: {far}, nothing new for {seconds_text(quiet)}"
    return f"save {save.save_id} is {what}: {far}, for {seconds_text(max(0, now_ns - save.started_ns) / 1e9)}"
