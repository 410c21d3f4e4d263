"""Decides what of a run is deleted, and in which order, from a listing of its directories and the current time.

1. The policies choose which complete checkpoints stay (`policy`). Any other is deleted as a
   whole, unless a process is reading it or writing into its directory.
2. Files of dead saves are deleted at once, both in a directory without an index and beside a committed checkpoint.
   Files of live saves stay. Where it is not known whether a save is alive, its files are deleted once the newest of
   them is older than the grace period.
3. An interrupted deletion is recognized by its `deleted.<save id>.json`, and is finished at once.

A save is alive while a process runs that keeps a progress record of it (`_core.format.files`). It is dead in
three cases: the process of its coordinator, which alone could commit it, has ended; or the coordinator has removed its
record and the timings record a failure; or the coordinator has removed its record and an index was published after all
shards of the save, so that another save has replaced it. Timings alone keep nothing from being deleted; those that
record a failure stay for the grace period, or until a later save is committed. A reader is alive while its process runs
and renews its lease.

Never deleted: directories that no manager names, files that treeckpt did not write, those that could not be read,
and pinned ones; unless forced, files of a node-local save whose commit another disk decides, damaged checkpoints and
those in which a verification found damage (a person may still want to rescue what is in them). A file with a time in
the future counts as new.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from .._core.format.files import (
    CheckpointFile,
    deleted_name,
    final_name,
    id_order,
    id_text,
    is_undecided,
    parse_file_name,
    parse_progress_name,
    parse_stored_name,
)
from .._core.format.index import INDEX_NAME
from .._core.format.shard_header import saves_of_all_ranks
from .._core.text import bytes_text, count_text
from ..errors import visible
from ..policy import Policy, StepInfo, kept, unmeasured, unmeasured_text

_NO_SAVE = "0" * 16
"""The save id in the mark of an index that no save can be told of."""
_APART = "it lies on the disks of several hosts: a clean-up by all ranks deletes it, a deletion only what is here"
_LOCKS = frozenset({"deleting", "repairing"})
_PROOFS = {"temporary": -1, "progress": 1, "timings": 2, "deleted": 3, "prepared": 4}


class FileInfo(msgspec.Struct, frozen=True):
    """One file of a directory, as listed."""

    name: str
    nbytes: int
    modified_ns: int
    alive: bool | None = None
    """For a progress record, a lease, a lock or a temporary file: whether its process may still be running, None where
    that is not known. For timings: False where they record a failure of the save."""
    copy: bool = False
    """Whether it is a copy of a sidecar file there under its plain name, and is deleted with that."""


class NeededFiles(msgspec.Struct, frozen=True):
    """The files of a directory that other checkpoints of the run share."""

    names: frozenset[str] = frozenset()
    by: tuple[str, ...] = ()
    """The names of the directories of these checkpoints, sorted."""
    unread: tuple[str, ...] = ()
    """Those whose index could not be read: they may need any of the files."""
    held: bool = False
    """Whether there is a lease on the directory: a save that is not committed yet may need any of them."""

    @property
    def text(self) -> str:
        """Why files stay."""
        shown = [*self.by[:3], *([f"{len(self.by) - 3} more"] if len(self.by) > 3 else ())]
        others = " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))
        why = [f"{others} {'share' if len(shown) > 1 else 'shares'} them"] if shown else []
        if self.unread:
            why.append(f"{', '.join(self.unread[:3])}, whose index cannot be read, may need them")
        if self.held:
            why.append("it is being read, or a save is about to share them")
        return "; ".join(why)


class StepDirectory(StepInfo, frozen=True, kw_only=True):
    """One directory of a run that is named as a step, as listed; whether it is pinned is read from its files."""

    name: str
    status: Literal["complete", "partial", "damaged", "unread"]
    """The state of its checkpoint. Of an unread one, which could not be read, nothing is known, and it stays."""
    modified_ns: int
    files: tuple[FileInfo, ...]
    save_id: str | None = None
    """The save id in the index; None where there is no index, or it cannot be read."""
    problem: str = ""
    path: str = ""
    """The path or URL of the directory; empty where none is to be named."""
    whole: bool = True
    """Whether its checkpoint is complete over all disks of the run, where it lies on several."""
    elsewhere: str = ""
    """Parts of the checkpoint on disks of other hosts, which the caller has not asked; empty without any."""
    needed: NeededFiles = NeededFiles()
    """Its files that other checkpoints of the run share."""
    unnamed: frozenset[str] = frozenset()
    """Shards of its save that its index does not name: copies of shared ones, whose index was not published."""


class JoinedRun(msgspec.Struct, frozen=True):
    """What all disks of a run have together, which lies on the private disks of several hosts."""

    whole: frozenset[tuple[str, str]]
    """The checkpoints that are complete over all disks, as (name of the directory, save id)."""
    pinned: frozenset[str]
    """Names of directories that are pinned on one disk at least."""
    damaged: frozenset[str]
    """Names of directories in which a verification found damage on one disk at least."""


class CleanupTimes(msgspec.Struct, frozen=True):
    """The current time, and the periods to wait, in nanoseconds."""

    now_ns: int
    grace_ns: int
    """Files of an unfinished save that were not modified for this long are left over."""
    lease_ns: int
    """A reader's lease is valid for this long after it was renewed."""


class Removal(msgspec.Struct, frozen=True):
    """Files to delete in one directory."""

    name: str
    """Name of the directory."""
    what: Literal["checkpoint", "leftovers"]
    reason: str
    files: tuple[str, ...]
    """The names, in the order of their deletion. The index of a checkpoint is first; what proves that the save of other
    files has ended comes behind these, see `proof_order`. Copies of the sidecar files among them go too. Files that
    other checkpoints share are among them, and stay until these have gone."""
    nbytes: int
    """Bytes of the files that go, and of copies of sidecar files among them."""
    save_id: str | None = None
    """For a checkpoint: the save id that its index must still have when it is deleted."""
    directory: bool = False
    """Whether the directory is removed too if it is empty then."""
    force: bool = False
    """Whether a checkpoint goes that is damaged, or has no index that can be read."""
    shared: tuple[str, ...] = ()
    """Those of the files that stay, as other checkpoints share them."""


class RetainedDirectory(msgspec.Struct, frozen=True):
    """A directory that stays though no policy keeps it."""

    name: str
    why: str


class CleanReport(msgspec.Struct, frozen=True):
    """The result of a clean-up, or with `dry_run` its plan.

    Attributes:
        run: its path or URL.
        kept: the steps that are kept, with the reasons.
        removed: what was removed, and why.
        left: what is kept for now, and why.
        failed: what could not be removed, and why.
        warnings: problems of the policies: a metric that no checkpoint has.
        dry_run: whether nothing was removed: then `removed` lists what would be.
        abandoned: kept steps that are on abandoned branches: the newest checkpoint does not descend from them.
        completed: what was done about saves to the disks of several hosts that had died before all of these knew of
            their commit: each directory, and whether its save is complete now or was never committed.
        foreign: files in steps' directories that treeckpt did not write, by the name of the directory; they stay.
    """

    run: str
    kept: dict[int | str, tuple[str, ...]]
    removed: tuple[Removal, ...]
    left: tuple[RetainedDirectory, ...]
    failed: tuple[RetainedDirectory, ...] = ()
    warnings: tuple[str, ...] = ()
    dry_run: bool = False
    abandoned: tuple[int | str, ...] = ()
    completed: tuple[str, ...] = ()
    foreign: dict[str, tuple[str, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that were removed, or with `dry_run` would be."""
        return sum(removal.nbytes for removal in self.removed)

    def why(self, step: int | str) -> str:
        """Returns the reasons for keeping a step as text."""
        return ", ".join(self.kept[step]) + " (on an abandoned branch)" * (step in self.abandoned)

    def __str__(self) -> str:
        word = "would go" if self.dry_run else "removed"
        steps = "1 step" if len(self.kept) == 1 else f"{len(self.kept)} steps"
        rows = [f"{self.run}: {steps} kept, {len(self.removed)} {word}"]
        rows += [f"  kept      {id_text(step)}: {self.why(step)}" for step in self.kept]
        rows += [f"  {word:<8}  {r.name}, {r.what}: {r.reason}" for r in self.removed]
        rows += [f"  left      {directory.name}: {directory.why}" for directory in self.left]
        rows += [f"  ended     {text}" for text in self.completed]
        rows += [f"  failed    {directory.name}: {directory.why}" for directory in self.failed]
        rows += [f"  foreign   {name}: {', '.join(files)}" for name, files in self.foreign.items()]
        return "\n".join(map(visible, rows + [f"  {warning}" for warning in self.warnings]))


def plan_cleanup(
    folders: Iterable[StepDirectory],
    policies: Sequence[Policy],
    times: CleanupTimes,
    *,
    run: str = "",
    busy: Collection[str] = (),
) -> CleanReport:
    """Decides about every directory of a run; returns the report of a dry run.

    Args:
        folders: the directories that are named as steps, each step once, and those that a manager named.
        run: its path or URL.
        busy: names of directories in which the caller itself is saving.
    """
    seen = [_DirectoryState(folder, times) for folder in sorted(folders, key=lambda f: id_order(f.step))]
    infos = [state.folder for state in seen if state.folder.status == "complete"]
    whole = [info for info in infos if info.whole]
    stays = kept(whole, policies)
    if len(whole) < len(infos):  # of a lost disk what is left stays as long as it would if it were whole
        stays |= {step: why for step, why in kept(infos, policies).items() if step not in {i.step for i in whole}}
    removals: list[Removal] = []
    left: list[RetainedDirectory] = []
    for state in seen:
        if state.folder.name in busy:
            decision: Removal | RetainedDirectory | None = RetainedDirectory(state.folder.name, "it is being saved")
        elif state.folder.status == "complete" and state.folder.step not in stays:
            decision = state.unwanted()
            if state.folder.elsewhere and isinstance(decision, Removal):
                decision = RetainedDirectory(state.folder.name, f"no policy keeps it, but {_APART}")
        else:
            decision = state.leftovers()
        if isinstance(decision, Removal):
            removals.append(decision)
        elif decision is not None:
            left.append(decision)
    abandoned = tuple(info.step for info in infos if info.abandoned and info.step in stays)
    warnings = tuple(
        f"{unmeasured_text(metric, infos)}: all are kept until one has" for metric in unmeasured(infos, policies)
    )
    foreign = {
        state.folder.name: names
        for state in seen
        if (names := foreign_files(file.name for file in state.folder.files if not file.copy))
    }
    return CleanReport(
        run,
        stays,
        removed=tuple(removals),
        left=tuple(left),
        warnings=warnings,
        dry_run=True,
        abandoned=abandoned,
        foreign=foreign,
    )


def foreign_files(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of files that treeckpt did not write."""
    return tuple(sorted(name for name in names if parse_file_name(name) is None))


def proof_order(name: str) -> int:
    """Returns 0 for most files, and a number that rises for those by which a clean-up knows that their save has ended.

    Files are deleted in this order: where one cannot be deleted, the next clean-up knows it for what it is. Temporary
    files are first: one may be the index of a save that was stopped for minutes, and goes on when its shards are gone.
    """
    owned = parse_file_name(name)
    return 0 if owned is None else _PROOFS.get(owned.kind, 0)


def plan_deletion(folder: StepDirectory, times: CleanupTimes, *, force: bool = False) -> Removal | RetainedDirectory:
    """Decides about one directory that is to be deleted whatever the policies say.

    Args:
        force: also deletes what is no complete checkpoint; nothing of a save that may be alive, and nothing pinned.
    """
    state = _DirectoryState(folder, times)
    if state.folder.pinned:
        return RetainedDirectory(folder.name, "it is pinned")
    if not force and folder.status != "complete":
        return RetainedDirectory(folder.name, f"it is {folder.status}")
    return state.unwanted(force=force)


def plan_leftovers(folder: StepDirectory, times: CleanupTimes) -> Removal | RetainedDirectory | None:
    """Decides about the files of one directory that are no part of its checkpoint; the checkpoint stays."""
    return _DirectoryState(folder, times).leftovers()


def leftovers_of(folder: StepDirectory, times: CleanupTimes) -> dict[str, str]:
    """Finds the files of a directory that belong neither to its checkpoint nor to a save that is known to be alive.

    Returns:
        The reason for each file, by name.
    """
    seen, reasons = _DirectoryState(folder, times), dict[str, str]()
    stale = {file.name for file in seen.stale()}
    alive = {owned.save_id for file, owned in seen.ours if owned.kind == "progress" and file.alive}
    for file, owned in seen.ours:
        if why := seen.dead.get(owned.save_id):
            why = f"left over by a save that {why}"
        if owned.save_id in seen.prepared:
            reasons[file.name] = "of a save that the disk of another host may have committed"
        elif file.name in stale:
            reasons[file.name] = why or "left over"
        elif owned.kind in ("shard", "sidecar", "timings", "progress", "temporary") and owned.save_id not in {
            *alive,
            folder.save_id,
        }:
            reasons[file.name] = why or "left over, unless its save is under way"
    return reasons


class _DirectoryState:
    """One directory with its files classified by save: dead, live, deleted, or read."""

    def __init__(self, folder: StepDirectory, times: CleanupTimes) -> None:
        self.times = times
        self.ours: list[tuple[FileInfo, CheckpointFile]] = []
        for file in folder.files:
            if (owned := parse_file_name(file.name)) is not None:
                self.ours.append((file, owned))
        self.folder = msgspec.structs.replace(folder, pinned=any(owned.kind == "pin" for _, owned in self.ours))
        self.deleted = {owned.save_id for _, owned in self.ours if owned.kind == "deleted"}
        self.shared = {owned.save_id for _, owned in self.ours if owned.kind == "shared"}
        self.needed_saves = {owned.save_id for file, owned in self.ours if file.name in folder.needed.names}
        """The saves of files that other checkpoints share."""
        # A lock of which it is not known whether its process runs counts as held.
        locks = {owned.kind for file, owned in self.ours if owned.kind in _LOCKS and file.alive is not False}
        self.taking, self.repairing = "deleting" in locks, "repairing" in locks
        """Whether a process is about to take the index away, and may put it back, or to replace it."""
        prepared = {owned.save_id for _, owned in self.ours if owned.kind == "prepared"}
        self.prepared = prepared - self.deleted - {self.folder.save_id}
        """Saves of which another disk may have an index: then they are committed."""
        self.index_ns = max((file.modified_ns for file, owned in self.ours if owned.kind == "index"), default=None)
        groups: dict[str | None, list[tuple[FileInfo, CheckpointFile]]] = {}
        for file, owned in self.ours:
            if owned.kind not in ("lease", "pin", "index", "verdict", "ended", "shared", *_LOCKS):
                groups.setdefault(owned.save_id, []).append((file, owned))
        self.dead = {save_id: why for save_id, files in groups.items() if (why := self._death(save_id, files))}
        self.fresh: set[str | None] = set()
        self.writing: set[str | None] = set()
        """Those saves of `fresh` that have more than timings."""
        for save_id, files in groups.items():
            alive = any(file.alive for file, owned in files if owned.kind == "progress")
            # a dead process's temporary file, as of a deletion's mark, does not make the shards of a save young
            own = [file for file, owned in files if owned.kind != "temporary" or file.alive is not False]
            young = save_id not in self.dead and any(map(self._is_young, own))
            if alive or young or save_id in self.prepared:
                self.fresh.add(save_id)
                if any(owned.kind in ("shard", "sidecar", "progress", "prepared", "temporary") for _, owned in files):
                    self.writing.add(save_id)
        leases = (file for file, owned in self.ours if owned.kind == "lease" and file.alive is not False)
        self.readers = [file for file in leases if times.now_ns - file.modified_ns < times.lease_ns]

    def _is_young(self, file: FileInfo) -> bool:
        return self.times.now_ns - file.modified_ns < self.times.grace_ns

    def _death(self, save_id: str | None, files: Sequence[tuple[FileInfo, CheckpointFile]]) -> str:
        """Returns how a dead save ended; empty where the save is alive, or may be."""
        named = ((parse_progress_name(final_name(file.name)), file) for file, _ in files)
        records = [(parsed[0], file.alive) for parsed, file in named if parsed is not None]
        if any(alive for _, alive in records) or save_id in self.prepared:
            return ""
        if save_id in self.shared and save_id != self.folder.save_id:  # it was committed once
            return "was replaced"
        if any(rank == 0 and alive is False for rank, alive in records):
            return "was killed"
        timings = [file for file, owned in files if owned.kind == "timings"]
        if not timings or save_id == self.folder.save_id or any(rank == 0 for rank, _ in records):
            return ""
        if self._is_replaced([file for file, owned in files if owned.kind == "shard"] or timings):
            return "was replaced"
        return "failed" if any(file.alive is False for file in timings) else ""

    def _is_replaced(self, files: Iterable[FileInfo]) -> bool:
        """Returns whether a save was committed in the directory after all of these files were written."""
        since = self.index_ns if self.folder.status == "complete" else None
        return since is not None and all(file.modified_ns <= since for file in files)

    def stale(self) -> list[FileInfo]:
        """Returns files that no save and no reader needs any more, without those of the committed save."""
        stale: list[FileInfo] = []
        for file, owned in self.ours:
            committed = owned.save_id is not None and owned.save_id == self.folder.save_id
            if file.name in self.folder.needed.names or self._is_mark_of_needed(owned):
                gone = False
            elif owned.kind == "lease":
                gone = file not in self.readers
            elif owned.kind in _LOCKS:
                gone = file.alive is False
            elif owned.kind == "temporary" and file.alive is False:
                gone = True
            elif committed and (owned.kind == "temporary" or file.name in self.folder.unnamed):
                gone = not self.readers and owned.save_id not in self.fresh  # they may be making copies
            elif (
                owned.kind in ("pin", "index")
                or (
                    committed and owned.kind in ("shard", "sidecar", "timings", "damaged", "verdict", "ended", "shared")
                )
                or (owned.kind == "damaged" and owned.save_id is None and self.folder.save_id is not None)
            ):
                gone = False
            elif owned.save_id in self.deleted and not committed:
                gone = not self.readers and not self.taking
            elif owned.kind == "timings" and self.dead.get(owned.save_id) == "failed":
                gone = self._is_replaced([file]) or not self._is_young(file)
            elif owned.kind in ("progress", "prepared") and committed:
                gone = True
            else:
                gone = owned.save_id not in self.fresh
            if gone:
                stale.append(file)
        return sorted(stale, key=lambda f: (proof_order(f.name), f.name))

    def _is_mark_of_needed(self, owned: CheckpointFile) -> bool:
        """Whether it says of a save whose files are needed that it is deleted, or that they are shared."""
        return owned.kind in ("deleted", "shared") and owned.save_id in self.needed_saves

    def leftovers(self) -> Removal | RetainedDirectory | None:
        """Decides about the files that are no part of the checkpoint."""
        if self.folder.status in ("damaged", "unread"):
            what = "damaged" if self.folder.status == "damaged" else "it could not be read"
            return RetainedDirectory(self.folder.name, f"{what}: {self.folder.problem}")
        if self.folder.status == "partial":
            return self._without_index()
        removal = self._leftovers(self.stale(), directory=False)
        return RetainedDirectory(self.folder.name, self._prepared_text) if not removal and self.prepared else removal

    @property
    def _prepared_text(self) -> str:
        """Why files of node-local saves stay."""
        saves = ", ".join(sorted(str(save_id) for save_id in self.prepared))
        return (
            f"the disk of another host may have the index of save {saves}: a save, resume or clean-up by all ranks"
            " finds out, and a deletion with force deletes it here"
        )

    def _without_index(self) -> Removal | RetainedDirectory | None:
        """Decides about a directory that holds no checkpoint."""
        stale, name = self.stale(), self.folder.name
        if self.folder.pinned:
            if not self.taking and any(is_undecided(file.name) for file in self.folder.files):
                files = [f for f, o in self.ours if is_undecided(f.name) or (o.kind in _LOCKS and f.alive is False)]
                return self._leftovers(files, directory=False)
            return RetainedDirectory(
                name,
                "pinned, though it has no index: treeckpt verify --repair makes it again; unpinned, it is removed",
            )
        if not self.deleted and any(o.kind == "damaged" and o.save_id is None for _, o in self.ours):
            return RetainedDirectory(name, "no index: its repair was cut short; repair it again")
        # an empty directory may be that of a save that has just begun
        rest = sum(not file.copy for file in self.folder.files) - len(stale)
        young = self.times.now_ns - self.folder.modified_ns < self.times.grace_ns and not self.dead
        if stale:
            ended = self.deleted or {owned.kind for _, owned in self.ours} & _LOCKS
            return self._leftovers(stale, directory=not rest and (not young or bool(ended)))
        if rest and self.fresh and not self.writing and not self.readers:
            return RetainedDirectory(name, "no index: the timings of a save that failed stay for the grace period")
        if self.prepared:
            return RetainedDirectory(name, f"no index, but {self._prepared_text}")
        if self.folder.needed.names:
            return RetainedDirectory(name, f"no checkpoint any more, but {self.folder.needed.text}")
        if rest and self.taking and self.deleted:
            return RetainedDirectory(name, "it is being deleted")
        if rest:
            return RetainedDirectory(
                name, "no index, and being read" if self.readers else "no index yet: a save may be under way"
            )
        if young:
            return RetainedDirectory(name, "empty, and new: a save may be about to begin")
        return Removal(name, "leftovers", "an empty directory", (), 0, directory=True)

    def _leftovers(self, files: Sequence[FileInfo], *, directory: bool) -> Removal | None:
        if not files:
            return None
        going = [owned for file, owned in self.ours if file in files]
        age = min(self.times.now_ns - file.modified_ns for file in files) / 1e9
        ends = sorted({self.dead[owned.save_id] for owned in going if owned.save_id in self.dead})
        reason = f"left over, and not touched for {age:.0f} s"
        if any(owned.save_id in self.deleted for owned in going):
            shared = {owned.kind for owned in going} <= {"shard", "shared", "deleted", "lease"} and bool(self.shared)
            reason = "a deletion was cut short" if not shared else "no checkpoint shares the files of a deleted one now"
        elif ends:
            reason = f"left over by a save that {' or '.join(ends)}"
        names = tuple(file.name for file in files)
        if self.folder.status == "partial" and saves_of_all_ranks(names).keys() - self.deleted - self.dead.keys():
            path = visible(self.folder.path or self.folder.name)
            reason += f", without an index, which treeckpt verify {path} --repair makes again if the shards are whole"
        nbytes = sum(file.nbytes for file in files) + self._copied(names)
        return Removal(self.folder.name, "leftovers", reason, names, nbytes, directory=directory)

    def unwanted(self, *, force: bool = False) -> Removal | RetainedDirectory:
        """Decides about a checkpoint that no policy keeps; with `force` also about one that is not complete."""
        folder = self.folder
        if self.readers:
            return RetainedDirectory(folder.name, "no policy keeps it, but it is being read")
        writing = self.writing - self.deleted - {None, folder.save_id}
        if force:  # a save that is under way has a record
            records = [owned for file, owned in self.ours if owned.kind == "progress" and file.alive is not False]
            writing &= {owned.save_id for owned in records}
        if writing & self.prepared and not force:
            return RetainedDirectory(folder.name, f"no policy keeps it, but {self._prepared_text}")
        if writing:
            return RetainedDirectory(folder.name, "no policy keeps it, but another save may be writing there")
        if self.repairing:
            return RetainedDirectory(folder.name, "no policy keeps it, but its index is being repaired")
        save_ids = [owned.save_id for _, owned in self.ours if owned.kind == "shard" and owned.save_id is not None]
        save_id = folder.save_id or max(save_ids, default=_NO_SAVE)
        mark = deleted_name(save_id)
        held = {f.name for f, o in self.ours if o.kind in _LOCKS and f.alive is not False}
        rest = sorted(f.name for f, o in self.ours if o.kind not in ("index", "pin") and f.name not in {mark, *held})
        shared = tuple(name for name in rest if name in folder.needed.names)
        nbytes = sum(f.nbytes for f, _ in self.ours if f.name not in shared) + self._copied(rest)
        if folder.status == "partial":
            names = tuple(sorted(rest, key=proof_order))
            return Removal(folder.name, "leftovers", "it has no index", names, nbytes, directory=True, force=True)
        reason = "no policy keeps it" + ", on an abandoned branch" * folder.abandoned
        if shared:
            reason += (
                f"; {count_text(len(shared), 'shard')} of {bytes_text(self._nbytes(shared))} stay: {folder.needed.text}"
            )
        names = (INDEX_NAME, *rest, mark)
        more = {"directory": True, "force": force, "shared": shared}
        return Removal(folder.name, "checkpoint", reason, names, nbytes, save_id, **more)

    def _copied(self, names: Collection[str]) -> int:
        """Returns the bytes of copies of sidecar files that go with these files, none of one that stays."""
        stored = {file.name: of[1] for file, _ in self.ours if (of := parse_stored_name(file.name)) is not None}
        stays = {plain for name, plain in stored.items() if name not in names}
        gone = {plain for name, plain in stored.items() if name in names} - stays
        return sum(file.nbytes for file in self.folder.files if file.copy and file.name in gone)

    def _nbytes(self, names: Collection[str]) -> int:
        return sum(file.nbytes for file in self.folder.files if file.name in names)
