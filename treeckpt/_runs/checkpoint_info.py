"""Describes one directory of a run, as `catalog` finds it, and defines the order in which directories are listed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from .._core.format.files import is_step_name, step_of
from .._core.format.lineage import Lineage, LineageOrder, LineagePosition, SavedCheckpoint
from .._core.text import visible
from .._io.storage.store import Store
from ..policy import StepInfo
from .active_saves import SaveUnderWay
from .verification import Verification, VerificationStore

Status = Literal["complete", "partial", "corrupt", "unread", "foreign"]


class CheckpointInfo(msgspec.Struct, frozen=True, gc=False):
    """One directory of a run."""

    name: str
    path: str
    status: Status
    """complete; partial: shards but no index; corrupt: the index does not decode, or shards are missing or cut short;
    unread: it could not be read, so nothing is known; foreign: something else."""
    step: int | None = None
    save_id: str | None = None
    world: int | None = None
    leaves: int | None = None
    nbytes: int | None = None
    """Bytes of the arrays, each byte counted once; without an index that can be read, bytes of the shards found."""
    disk_nbytes: int | None = None
    """Bytes of all its files: with headers, index, timings and sidecar files. None if they were not listed."""
    created_ns: int | None = None
    seconds: float | None = None
    """Duration of the save: from the start of the first rank to the end of the last rank."""
    blocked_seconds: float | None = None
    """Until the call returned on the last rank; equal to `seconds` for a save that was not in the background."""
    held_nbytes: int | None = None
    """Bytes of the arrays on all ranks together, with every replica counted."""
    error: str | None = None
    """What is wrong; of a complete checkpoint, whose tree loads, a sidecar file that is lost or of another size."""
    metrics: dict[str, float] = {}
    pinned: bool = False
    saving: tuple[SaveUnderWay, ...] = ()
    """Saves into this directory that have progress records there: those under way, and those that were killed."""
    lineage: Lineage | None = None
    """The lineage that its index records."""
    sequence: int | None = None
    """Rises in the order in which the checkpoints of the run were saved; None if that was not computed."""
    abandoned: bool = False
    """Whether it is on an abandoned branch: the newest checkpoint does not descend from it."""
    found_damaged: bool = False
    """Whether a file beside it says that a verification found changed bytes."""
    verification: Verification | None = None
    """What a verification found, by that file or on this machine; None without one, or where it was not looked up."""

    @property
    def under_way(self) -> tuple[SaveUnderWay, ...]:
        """The saves into this directory that may still be committed."""
        return tuple(save for save in self.saving if save.alive is not False)

    @property
    def damaged(self) -> bool:
        """Whether a verification found changed bytes."""
        return self.found_damaged if self.verification is None else self.verification.total > 0

    @property
    def status_text(self) -> str:
        """The status as text, "damaged" where a verification found changed bytes; and if its branch is abandoned."""
        return ("damaged" if self.damaged else self.status) + ", abandoned branch" * self.abandoned

    @property
    def state(self) -> str:
        """The status as text, with "verified" where a verification found all intact."""
        if self.verification is None or not self.verification.ok:
            return self.status_text
        return f"{self.status}, verified" + ", abandoned branch" * self.abandoned

    @property
    def problem(self) -> str | None:
        """What is wrong with it; of several problems that a verification found, the first, and how many there are."""
        found = self.verification
        if self.error or found is None or not found.problems:
            return self.error or ("a verification found it damaged" if self.damaged else None)
        more = f" (and {found.total - 1:,} more)" if found.total > 1 else ""
        return f"{found.problems[0].file}: {found.problems[0].text}{more}"

    @property
    def state_and_problem(self) -> str:
        """The state, with what is wrong."""
        return f"{self.state}: {self.problem}" if self.problem else self.state


def mark_of(info: CheckpointInfo) -> SavedCheckpoint | None:
    """Returns the data that orders checkpoints by lineage; None without an index, or if moved from another step."""
    step = step_of(info.name)
    if info.status not in ("complete", "corrupt") or info.save_id is None or step is None or info.step != step:
        return None
    return SavedCheckpoint(step, info.save_id, info.lineage) if is_step_name(info.name) else None


def in_listing_order(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sorts the directories of one run for lists: newest first, then abandoned branches, then foreign directories."""
    found = [(info, mark_of(info)) for info in infos]
    order = LineageOrder(mark for _, mark in found if mark is not None)
    placed: list[tuple[CheckpointInfo, LineagePosition | None]] = []
    for info, mark in found:
        position = order.position(mark) if mark is not None else None
        step = step_of(info.name) if is_step_name(info.name) else info.step
        if position is None and step is not None:
            position = order.position_of_step(step)
        if position is not None:
            info = msgspec.structs.replace(info, sequence=position.sequence, abandoned=not position.present)
        placed.append((info, position))
    return [info for info, _ in sorted(placed, key=_sort_key)]


def _sort_key(placed: tuple[CheckpointInfo, LineagePosition | None]) -> tuple[Any, ...]:
    info, (present, sequence, step) = placed[0], placed[1] or (True, 0, 0)
    kind = info.status == "foreign", not present, info.step is None
    return *kind, -sequence, -step, -(info.created_ns or 0), info.name


def with_verification(info: CheckpointInfo, folder: Store, known: VerificationStore) -> CheckpointInfo:
    """Returns the same with what is known of the bytes of a complete checkpoint in a folder."""
    if info.status != "complete":
        return info
    return msgspec.structs.replace(info, verification=known.find(folder, info.save_id, beside=info.found_damaged))


def step_info(info: CheckpointInfo) -> StepInfo:
    """Returns the data of a checkpoint by which policies decide."""
    step = step_of(info.name)
    assert step is not None, "a checkpoint of a run has the name of a step"
    return StepInfo(
        step,
        info.created_ns or 0,
        metrics=info.metrics,
        pinned=info.pinned,
        sequence=info.sequence,
        abandoned=info.abandoned,
        damaged=info.damaged,
    )


def lost_index_text(path: str, world: int) -> str:
    """Returns what is wrong with a checkpoint at a path that has the shards of all ranks, and lacks only the index."""
    ranks = f"all {world} ranks" if world > 1 else "its only rank"
    repair = f"treeckpt verify {visible(path)} --repair makes it again if they are whole"
    return f"no index, though shards of {ranks} are there: {repair}; the next save to it, or gc, removes them"


def loadable_text(infos: Iterable[CheckpointInfo], step: int) -> str:
    """Returns which steps of a run can be loaded, at most the 10 highest, and which is nearest to `step`."""
    steps = sorted(step_info(info).step for info in infos if info.status == "complete")
    near = f"; the nearest is {min(steps, key=lambda other: abs(other - step))}" if steps else ""
    return f"Steps that can be loaded: {', '.join(map(str, steps[-10:])) or 'none'}{near}"
