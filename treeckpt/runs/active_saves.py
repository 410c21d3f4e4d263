"""Lists the saves under way in a checkpoint's directory, and their progress, from the records that ranks keep there.

A save that has ended removes its records; one that was killed leaves its last ones. It is reported as killed if its
coordinator's process is known to have ended; otherwise, `STALLED` seconds after the last change, as hanging or killed.
Records that do not decode are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from ..core.format.save_progress import Progress, SavePhase, fraction_of, progress_name
from ..core.text import bytes_text, seconds_text
from ..io.storage.progress_file import is_alive, read_progress
from ..io.storage.run_store import DirectoryEntry, Folder

STALLED = 60.0
"""Seconds without a change of its record after which a rank counts as hanging or gone."""


class SaveUnderWay(msgspec.Struct, frozen=True):
    """A save that has not ended, as the records of its ranks describe it."""

    save_id: str
    step: int | None
    world: int
    ranks: int
    """Ranks that have a record: those that have not ended yet."""
    phase: SavePhase
    """write, as long as any of these ranks writes."""
    written: int
    planned: int
    """Bytes of these ranks."""
    started_ns: int
    updated_ns: int
    """Unix time of the newest record."""
    done: int = 0
    """How many of these ranks' bytes are all durable."""
    alive: bool | None = None
    """Whether it may still be committed: False once its coordinator's process has ended, None if not known."""

    @property
    def fraction(self) -> float:
        """The written part of the bytes of these ranks, 0 to 1."""
        return fraction_of(self.written, self.planned)


def saves_under_way(folder: Folder, files: Mapping[str, DirectoryEntry]) -> tuple[SaveUnderWay, ...]:
    """Returns the saves that have records among these files, in the order of their start."""
    found: dict[str, list[Progress]] = {}
    for record in read_progress(folder.store, files):
        found.setdefault(record.save_id, []).append(record)
    return tuple(sorted((_merge_records(records) for records in found.values()), key=lambda save: save.started_ns))


def _merge_records(records: Iterable[Progress]) -> SaveUnderWay:
    ranks = {record.rank: record for record in records}
    first = next(iter(ranks.values()))
    return SaveUnderWay(
        save_id=first.save_id,
        step=first.step,
        world=first.world,
        ranks=len(ranks),
        phase="write" if any(record.phase == "write" for record in ranks.values()) else "commit",
        written=sum(record.written for record in ranks.values()),
        planned=sum(record.planned for record in ranks.values()),
        started_ns=min(record.started_ns for record in ranks.values()),
        updated_ns=max(record.updated_ns for record in ranks.values()),
        done=sum(record.phase == "commit" for record in ranks.values()),
        alive=is_alive(progress_name(0, first.save_id), ranks[0], time.time_ns()) if 0 in ranks else None,
    )


def under_way_text(save: SaveUnderWay, now_ns: int) -> str:
    """Describes a save under way in a sentence."""
    quiet = (now_ns - save.updated_ns) / 1e9
    what = "being written" if save.phase == "write" else "written, waiting for the commit"
    far = f"{save.fraction:.0%} of {bytes_text(save.planned)} on {save.ranks} of {save.world} ranks"
    if save.alive is False:
        return f"save {save.save_id} was killed: {far}"
    if quiet > STALLED:
        return f"save {save.save_id} hangs or was killed: {far}, nothing new for {seconds_text(quiet)}"
    return f"save {save.save_id} is {what}: {far}, for {seconds_text(max(0, now_ns - save.started_ns) / 1e9)}"
