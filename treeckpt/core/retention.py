"""What of a run is to be deleted, and in which order? Decided from what was seen of its directories, and a time.

1. Of the complete checkpoints, the policies choose which stay (`core.policy`). One that does not goes as a whole,
   unless somebody is reading it or writing into its directory.
2. Files of saves that never finished go once the newest file of that save is older than the grace period, wherever they
   lie: in a directory without an index, or beside a committed one. What is younger may belong to a save under way.
3. A deletion that was cut short has left its mark, and is finished at once.

Never touched: directories whose names are not those of steps, files that are not ours, checkpoints that are corrupt (a
person may still want to save what is in them), and pinned ones. A file with a time in the future counts as new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from .files import Owned, deleted_name, kind_of
from .policy import Policy, StepInfo, kept, unmeasured

__all__ = ["Cleaning", "FileFact", "FolderFact", "Left", "Removal", "Times", "plan_cleaning"]

INDEX = "index.json"


class FileFact(msgspec.Struct, frozen=True):
    """One file of a directory."""

    name: str
    nbytes: int
    modified_ns: int


class FolderFact(msgspec.Struct, frozen=True):
    """One directory of a run that has the name of a step."""

    name: str
    step: int
    status: Literal["complete", "partial", "corrupt"]
    modified_ns: int
    files: tuple[FileFact, ...]
    save_id: str | None = None
    """That the index names; None where there is none, or it cannot be read."""
    created_ns: int = 0
    metrics: dict[str, float] = {}
    problem: str = ""
    sequence: int | None = None
    """As of `StepInfo`."""
    abandoned: bool = False


class Times(msgspec.Struct, frozen=True):
    """When it is, and how long to wait."""

    now_ns: int
    grace_ns: int
    """Files of an unfinished save that were not touched for so long are left over."""
    lease_ns: int
    """A reader's lease counts for so long after it was renewed."""


class Removal(msgspec.Struct, frozen=True):
    """Something to delete in one directory."""

    name: str
    """Of the directory."""
    what: Literal["checkpoint", "leftovers"]
    reason: str
    files: tuple[str, ...]
    """In the order in which they go; of a checkpoint, the index first."""
    nbytes: int
    save_id: str | None = None
    """Of a checkpoint: the save that its index must still name."""
    directory: bool = False
    """Whether the directory goes too, if it is empty then."""


class Left(msgspec.Struct, frozen=True):
    """Something that stays though no policy asks for it."""

    name: str
    why: str


class Cleaning(msgspec.Struct, frozen=True):
    """What to do about a run."""

    kept: dict[int, tuple[str, ...]]
    """Steps that stay, with the reasons."""
    removals: tuple[Removal, ...]
    left: tuple[Left, ...]
    warnings: tuple[str, ...] = ()
    """What a person should know of the policies."""
    abandoned: tuple[int, ...] = ()
    """Of the steps that stay, those on abandoned branches."""


def plan_cleaning(
    folders: Iterable[FolderFact], policies: Sequence[Policy], times: Times, *, busy: frozenset[str] = frozenset()
) -> Cleaning:
    """Decides about every directory of a run.

    Args:
        folders: those that are named as steps, each step once.
        busy: names of directories in which the caller itself is saving.
    """
    seen = [_Seen(folder, times) for folder in sorted(folders, key=lambda f: f.step)]
    infos = [one.info for one in seen if one.folder.status == "complete"]
    stays = kept(infos, policies)
    removals: list[Removal] = []
    left: list[Left] = []
    for one in seen:
        if one.folder.name in busy:
            found: Removal | Left | None = Left(one.folder.name, "it is being saved")
        elif one.folder.status == "corrupt":
            found = Left(one.folder.name, f"corrupt: {one.folder.problem}")
        elif one.folder.status == "partial":
            found = one.without_index()
        elif one.folder.step in stays:
            found = one.beside_index()
        else:
            found = one.unwanted()
        if isinstance(found, Removal):
            removals.append(found)
        elif found is not None:
            left.append(found)
    abandoned = tuple(info.step for info in infos if info.abandoned and info.step in stays)
    return Cleaning(stays, tuple(removals), tuple(left), _warnings(infos, policies), abandoned)


def _warnings(infos: Sequence[StepInfo], policies: Sequence[Policy]) -> tuple[str, ...]:
    there = ", ".join(sorted({name for info in infos for name in info.metrics})) or "none"
    return tuple(
        f"no checkpoint has the metric {metric!r} as a number (metrics there are: {there}): all are kept until one has"
        for metric in unmeasured(infos, policies)
    )


class _Seen:
    """One directory, with its files told apart."""

    def __init__(self, folder: FolderFact, times: Times) -> None:
        self.folder, self.times = folder, times
        self.ours: list[tuple[FileFact, Owned]] = []
        for file in folder.files:
            if (owned := kind_of(file.name)) is not None:
                self.ours.append((file, owned))
        self.pinned = any(owned.kind == "pin" for _, owned in self.ours)
        self.deleted = {owned.save_id for _, owned in self.ours if owned.kind == "deleted"}
        newest: dict[str | None, int] = {}
        for file, owned in self.ours:
            if owned.kind not in ("lease", "pin", "index"):
                newest[owned.save_id] = max(newest.get(owned.save_id, file.modified_ns), file.modified_ns)
        self.fresh = {save_id for save_id, at in newest.items() if times.now_ns - at < times.grace_ns}
        self.readers = [f for f, o in self.ours if o.kind == "lease" and times.now_ns - f.modified_ns < times.lease_ns]

    @property
    def info(self) -> StepInfo:
        folder = self.folder
        sequence, abandoned = folder.sequence, folder.abandoned
        return StepInfo(folder.step, folder.created_ns, folder.metrics, self.pinned, sequence, abandoned)

    @property
    def writers(self) -> set[str | None]:
        """Saves that may be under way: those with files younger than the grace period, but for the committed one."""
        return self.fresh - self.deleted - {None, self.folder.save_id}

    def _stale(self) -> list[FileFact]:
        """Files that no save and no reader needs any more, apart from those of the committed save."""
        found: list[FileFact] = []
        for file, owned in self.ours:
            committed = owned.save_id is not None and owned.save_id == self.folder.save_id
            if owned.kind == "lease":
                gone = file not in self.readers
            elif (
                owned.kind in ("pin", "index")
                or (committed and owned.kind in ("shard", "timings", "damaged"))
                or (owned.kind == "damaged" and owned.save_id is None and self.folder.save_id is not None)
            ):
                gone = False
            elif owned.save_id in self.deleted and not committed:
                gone = not self.readers
            else:
                gone = owned.save_id not in self.fresh
            if gone:
                found.append(file)
        # the mark goes last: as long as it is there, the next clean-up knows what the rest is
        return sorted(found, key=lambda f: (f.name.startswith("deleted."), f.name))

    def beside_index(self) -> Removal | None:
        """Leftovers beside a checkpoint that stays."""
        return self._leftovers(self._stale(), directory=False)

    def without_index(self) -> Removal | Left | None:
        """Leftovers of a directory that holds no checkpoint."""
        stale, name = self._stale(), self.folder.name
        if self.pinned:
            return Left(name, "pinned, though it has no index: rebuild the index, or unpin it to have it removed")
        # an empty directory may be that of a save that has just begun
        rest = len(self.folder.files) - len(stale)
        young = self.times.now_ns - self.folder.modified_ns < self.times.grace_ns
        if stale:
            return self._leftovers(stale, directory=not rest and (not young or bool(self.deleted)))
        if rest:
            return Left(name, "no index, and being read" if self.readers else "no index yet: a save may be under way")
        if young:
            return Left(name, "empty, and new: a save may be about to begin")
        return Removal(name, "leftovers", "an empty directory", (), 0, directory=True)

    def _leftovers(self, files: Sequence[FileFact], *, directory: bool) -> Removal | None:
        if not files:
            return None
        finishing = any(owned.save_id in self.deleted for file, owned in self.ours if file in files)
        age = min(self.times.now_ns - file.modified_ns for file in files) / 1e9
        reason = "a deletion was cut short" if finishing else f"left over, and not touched for {age:.0f} s"
        names = tuple(file.name for file in files)
        return Removal(self.folder.name, "leftovers", reason, names, sum(f.nbytes for f in files), directory=directory)

    def unwanted(self) -> Removal | Left:
        """A checkpoint that no policy keeps."""
        folder = self.folder
        if self.readers:
            return Left(folder.name, "no policy keeps it, but it is being read")
        if self.writers:
            return Left(folder.name, "no policy keeps it, but another save may be writing there")
        assert folder.save_id is not None, "a complete checkpoint has an index"
        mark = deleted_name(folder.save_id)
        rest = sorted(
            (f for f, o in self.ours if o.kind not in ("index", "pin")), key=lambda f: (f.name == mark, f.name)
        )
        names = (INDEX, *(file.name for file in rest if file.name != mark), mark)
        nbytes = sum(file.nbytes for file, _ in self.ours)
        reason = "no policy keeps it" + ", on an abandoned branch" * folder.abandoned
        return Removal(folder.name, "checkpoint", reason, names, nbytes, folder.save_id, directory=True)
