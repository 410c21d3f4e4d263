"""A run on disk: which checkpoints it has, what is to be cleaned away, who reads, what is pinned. One process's view.

Deleting a checkpoint: (1) a mark `deleted.<save id>.json` is written, (2) if the index still names that save, and
nobody reads or writes there, the index goes and the directory is synced: from now on it is no checkpoint, (3) readers
are looked for once more, (4) the rest goes, the mark last, then the directory. A deletion that is killed at any point
is finished by the next clean-up, which finds the mark.

Readers are told by `io.storage.reader_leases`. Retention is decided by `core.analysis.deletion`; checkpoints are told
apart by `catalog`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from ..core.analysis.deletion import CleanupPlan, Removal, RetainedDirectory, StepDirectory, plan_cleanup
from ..core.analysis.retention_policy import Policy, StepInfo
from ..core.format.file_names import PIN_NAME, check_step, deleted_name, is_step_name, step_name, step_of
from ..core.format.index import INDEX_NAME
from ..core.format.lineage import SavedCheckpoint
from ..errors import CheckpointError, CheckpointNotFound, TreeckptError
from ..io.storage.foreign_formats import describe_foreign
from ..io.storage.leftovers import GRACE, committed_save_id, deletion_times, file_facts, plan_removal, remove_leftovers
from ..io.storage.open import open_folder, open_run
from ..io.storage.reader_leases import has_readers
from ..io.storage.run_store import Folder, RunStore
from .catalog import CheckpointInfo, LruStatCache, StatCache, in_listing_order, read_info, read_infos, read_marks

__all__ = ["GRACE", "CleanReport", "RunDirectory", "clean_checkpoint", "steady_clock", "step_info"]


class CleanReport(msgspec.Struct, frozen=True):
    """What a clean-up did, or would do."""

    run: str
    kept: dict[int, tuple[str, ...]]
    """Steps that stay, with the reasons."""
    removed: tuple[Removal, ...]
    left: tuple[RetainedDirectory, ...]
    """What stays for now, and why."""
    failed: tuple[RetainedDirectory, ...] = ()
    """What could not be removed, and why."""
    warnings: tuple[str, ...] = ()
    """What a person should know of the policies: a metric that no checkpoint has."""
    dry_run: bool = False
    """Whether nothing was removed: then `removed` is what would be."""
    abandoned: tuple[int, ...] = ()
    """Steps, of those that stay, that are on abandoned branches: the newest checkpoint does not descend from them."""

    @property
    def nbytes(self) -> int:
        """Bytes that were removed, or would be."""
        return sum(removal.nbytes for removal in self.removed)

    def why(self, step: int) -> str:
        """Why a step stays, in words."""
        return ", ".join(self.kept[step]) + " (on an abandoned branch)" * (step in self.abandoned)

    def __str__(self) -> str:
        word = "would go" if self.dry_run else "removed"
        steps = "1 step" if len(self.kept) == 1 else f"{len(self.kept)} steps"
        rows = [f"{self.run}: {steps} kept, {len(self.removed)} {word}"]
        rows += [f"  kept      {step_name(step)}: {self.why(step)}" for step in self.kept]
        rows += [f"  {word:<8}  {r.name}, {r.what}: {r.reason}" for r in self.removed]
        rows += [f"  left      {one.name}: {one.why}" for one in self.left]
        rows += [f"  failed    {one.name}: {one.why}" for one in self.failed]
        return "\n".join(rows + [f"  {warning}" for warning in self.warnings])


def steady_clock(
    wall: Callable[[], int] = time.time_ns, monotonic: Callable[[], int] = time.monotonic_ns
) -> Callable[[], int]:
    """A clock in Unix nanoseconds that never runs ahead of the time that has really passed since it was made.

    So a system clock that jumps forward does not make the files of a save under way look old.
    """
    start = wall() - monotonic()
    return lambda: min(wall(), start + monotonic())


def step_info(info: CheckpointInfo) -> StepInfo:
    """What retention needs to know of a checkpoint."""
    step = step_of(info.name)
    assert step is not None, "a checkpoint of a run has the name of a step"
    return StepInfo(step, info.created_ns or 0, info.metrics, info.pinned, info.sequence, info.abandoned)


class RunDirectory:
    """The checkpoints of a run.

    Args:
        run: its directory, or a store of its own kind.
        clock: Unix nanoseconds.
        cache: remembers what was made of files.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunStore,
        *,
        clock: Callable[[], int] | None = None,
        cache: StatCache | None = None,
    ) -> None:
        self.store = open_run(run)
        self.url = self.store.url
        self._cache = cache or LruStatCache()
        self._clock = clock or steady_clock()

    def folder(self, step: int) -> Folder:
        """The directory of a step, whether or not it is there."""
        return self.store.folder(step_name(check_step(step)))

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every directory that is named as a step is, but for links and what holds no files of ours.

        The newest comes first: what was saved last. Abandoned branches come behind the lineage of the newest.
        """
        return [info for _, info in self._survey()]

    def _survey(self) -> list[tuple[Folder, CheckpointInfo]]:
        seen = read_infos(self.store, self._cache)
        folders = {folder.name: folder for folder, _ in seen}
        ours = in_listing_order(
            _checked(info) for _, info in seen if info.status != "foreign" and is_step_name(info.name)
        )
        return [(folders[info.name], info) for info in ours]

    def marks(self) -> list[SavedCheckpoint]:
        """What the lineage of a new checkpoint is decided from."""
        return read_marks(self.store, self._cache)

    def checkpoint(self, step: int) -> CheckpointInfo:
        """The complete checkpoint of a step.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointError: it is corrupt.
        """
        info = _checked(read_info(self.folder(step), cache=self._cache))
        if info.status == "complete":
            return info
        kind = CheckpointError if info.status == "corrupt" else CheckpointNotFound
        found, hint = describe_foreign(info.path) or (info.error or info.status, "")
        raise kind(info.path, expected="a complete checkpoint", found=found, hint=hint)

    # pins ----------------------------------------------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Keeps a step until it is unpinned.

        Raises:
            CheckpointNotFound: there is no complete checkpoint.
        """
        self.checkpoint(step)
        self.put_pin(step)

    def put_pin(self, step: int) -> bool:
        """Pins a step that may not be saved yet; says whether it was not pinned before."""
        folder = self.folder(step)
        with _system_errors(folder.url):
            folder.store.prepare()
            new = PIN_NAME not in folder.entries()
            folder.store.publish(PIN_NAME, msgspec.json.encode({"pinned_ns": self._clock()}), replace=True)
        return new

    def take_pin_back(self, step: int) -> None:
        """Undoes `put_pin` where the save came to nothing."""
        folder = self.folder(step)
        with _system_errors(folder.url):
            folder.store.delete(PIN_NAME)
            folder.remove()

    def unpin(self, step: int) -> None:
        """Lets policies decide about a step again; one that is not pinned is no error.

        Raises:
            CheckpointNotFound: there is no such directory.
        """
        folder = self.folder(step)
        if folder.modified_ns() is None:
            raise CheckpointNotFound(folder.url, expected="a checkpoint", found="no such directory")
        with _system_errors(folder.url):
            folder.store.delete(PIN_NAME)
            folder.sync()

    # cleaning ------------------------------------------------------------------------------------------------

    def clean(
        self,
        policies: Sequence[Policy],
        *,
        grace: float = GRACE,
        busy: Set[str] = frozenset(),
        claim: Callable[[str], AbstractContextManager[bool]] = lambda name: contextlib.nullcontext(True),
        dry_run: bool = False,
    ) -> CleanReport:
        """Deletes what no policy keeps and what crashed saves left behind.

        Args:
            grace: seconds for which files of a save are left alone where nothing shows whether it is alive.
            busy: names of the directories in which this process is saving.
            claim: is entered around each removal; gives whether the directory is still to be had.
            dry_run: only says what would be done.
        """
        cleaning = self._plan(policies, grace, frozenset(busy))
        if dry_run:
            return _report(self.url, cleaning, cleaning.removals, cleaning.left, dry_run=True)
        removed: list[Removal] = []
        left, failed = list(cleaning.left), list[RetainedDirectory]()
        for removal in cleaning.removals:
            try:
                with claim(removal.name) as free:
                    why = self._remove(removal, grace) if free else "it is being saved"
            except FileNotFoundError:  # another process was faster
                continue
            except (OSError, TreeckptError) as error:
                failed.append(RetainedDirectory(removal.name, f"{type(error).__name__}: {error}"))
                continue
            if why:
                left.append(RetainedDirectory(removal.name, why))
            else:
                removed.append(removal)
        return _report(self.url, cleaning, tuple(removed), tuple(left), failed=tuple(failed))

    def _plan(self, policies: Sequence[Policy], grace: float, busy: frozenset[str]) -> CleanupPlan:
        facts = [self._fact(info, folder) for folder, info in self._survey()]
        return plan_cleanup(facts, policies, deletion_times(self._clock(), grace), busy=busy)

    def _fact(self, info: CheckpointInfo, folder: Folder) -> StepDirectory:
        step = step_of(info.name)
        assert step is not None and info.status != "foreign", "look gives only these"
        save_id = info.save_id if info.status != "partial" else None
        return StepDirectory(
            name=info.name,
            step=step,
            status=info.status,
            modified_ns=folder.modified_ns() or 0,
            files=file_facts(folder, self._clock(), committed=save_id),
            save_id=save_id,
            created_ns=info.created_ns or 0,
            metrics=info.metrics,
            problem=info.error or "",
            sequence=info.sequence,
            abandoned=info.abandoned,
        )

    def _remove(self, removal: Removal, grace: float) -> str:
        """Carries a removal out; says why not, if something has changed since it was decided."""
        folder = self.store.folder(removal.name)
        if removal.what == "leftovers":
            return remove_leftovers(folder, removal)
        if why := self._remove_index(folder, removal, grace):
            return why
        for name in removal.files[1:]:
            folder.store.delete(name)
        folder.sync()
        if removal.directory:
            folder.remove()
        return ""

    def _remove_index(self, folder: Folder, removal: Removal, grace: float) -> str:
        assert removal.save_id is not None, "a checkpoint is removed by its save id"
        mark = deleted_name(removal.save_id)
        try:
            folder.store.publish(mark, b"{}", replace=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # a full disk takes no mark: what a crash leaves now looks like a save that never finished
        # what was decided may be old by now: other removals came before this one
        info = _checked(read_info(folder, cache=self._cache))
        now = self._plan_one(info, folder, grace)
        if committed_save_id(folder) != removal.save_id or isinstance(now, RetainedDirectory):
            folder.store.delete(mark)
            return now.why if isinstance(now, RetainedDirectory) else "another save has been committed there meanwhile"
        folder.store.delete(INDEX_NAME)
        folder.sync()
        if has_readers(folder, self._clock()):
            return "its index is gone; the rest goes when its reader is done"
        return ""

    def _plan_one(self, info: CheckpointInfo, folder: Folder, grace: float) -> RetainedDirectory | None:
        """Why a checkpoint must stay after all: it was pinned, or is being read or written."""
        if info.pinned:
            return RetainedDirectory(info.name, "it has been pinned meanwhile")
        if info.status != "complete":
            return RetainedDirectory(info.name, f"it is {info.status} now")
        newer = StepDirectory("newer", 1 << 62, "complete", 0, (), "0" * 16)
        cleaning = plan_cleanup([self._fact(info, folder), newer], [], deletion_times(self._clock(), grace))
        return next(iter(cleaning.left), None)


def _report(
    url: str, cleaning: CleanupPlan, removed: tuple[Removal, ...], left: tuple[RetainedDirectory, ...], **more: Any
) -> CleanReport:
    warnings, abandoned = cleaning.warnings, cleaning.abandoned
    return CleanReport(url, cleaning.kept, removed, left, warnings=warnings, abandoned=abandoned, **more)


def clean_checkpoint(path: str | os.PathLike[str], *, grace: float = GRACE, dry_run: bool = False) -> CleanReport:
    """Removes what dead saves left beside a checkpoint, or where there is none; the checkpoint itself stays.

    Args:
        grace, dry_run: as for `RunDirectory.clean`.
    """
    folder = open_folder(path)
    found = plan_removal(folder, time.time_ns(), grace)
    if found is None or isinstance(found, RetainedDirectory):
        return CleanReport(folder.url, {}, (), (found,) if found is not None else (), dry_run=dry_run)
    if dry_run:
        return CleanReport(folder.url, {}, (found,), (), dry_run=True)
    try:
        why = remove_leftovers(folder, found)
    except (OSError, TreeckptError) as error:
        return CleanReport(folder.url, {}, (), (), (RetainedDirectory(found.name, f"{type(error).__name__}: {error}"),))
    return CleanReport(folder.url, {}, () if why else (found,), (RetainedDirectory(found.name, why),) if why else ())


def _checked(info: CheckpointInfo) -> CheckpointInfo:
    """A checkpoint of another step than its directory's name says is not to be trusted: somebody moved it."""
    if info.status == "complete" and info.step != step_of(info.name):
        found = f"its index says step {info.step}, not what its name says"
        return msgspec.structs.replace(info, status="corrupt", error=found)
    return info


@contextlib.contextmanager
def _system_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            path,
            expected="a directory that can be written",
            found=f"{type(error).__name__}: {error}",
            hint="Look at the permissions",
        ) from error
