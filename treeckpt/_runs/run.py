"""Lists, pins and deletes the checkpoints of a run, in one process.

A checkpoint is deleted in these steps: (1) a lock on the index is written, see `_io.storage.deletions`; (2) if the
index still names that save, and no process reads or writes there, it is taken away and the directory synced: from now
on it is no checkpoint; (3) readers' leases are checked once more, and a pin, which brings the index back; then the lock
goes; (4) the other files are deleted, the index that was taken away last (in an object store a mark, which is written
with the lock), then the directory. The next clean-up finds these files of a deletion that was killed, and ends it.

`kept_files` finds readers, `_inspect.deletion` decides what is deleted, `catalog` describes the checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial

import msgspec

from .._core.format.files import PIN_NAME, check_step, deleted_name, is_step_name, step_name, step_of
from .._core.format.index import INDEX_NAME
from .._core.format.lineage import SavedCheckpoint
from .._inspect.deletion import (
    Removal,
    RetainedDirectory,
    StepDirectory,
    foreign_files,
    plan_cleanup,
    plan_deletion,
)
from .._io.os_errors import write_errors_wrapped
from .._io.storage.checkpoint import NewestIndex
from .._io.storage.deletions import (
    DECIDED,
    GRACE,
    decide_deletion,
    delete_files,
    deletion_times,
    file_facts,
    hold_lock,
    index_of_save,
    index_state,
    plan_removal,
    remove_leftovers,
    take_index,
)
from .._io.storage.foreign_formats import describe_foreign, refuse_file
from .._io.storage.kept_files import has_readers
from .._io.storage.open import open_run, open_store
from .._io.storage.store import RunStore, Store
from .._io.timing import steady_clock
from ..errors import CheckpointError, CheckpointExists, CheckpointNotFound, StoreError, TreeckptError, visible
from ..policy import Policy
from .catalog import OnRead, read_info, read_info_or_unread, read_infos, read_marks
from .checkpoint_info import CheckpointInfo, in_listing_order, loadable_text, with_verification
from .stat_cache import LruStatCache, StatCache
from .verification import VerificationStore, cache_directory

_REPLACED = "another save has been committed there meanwhile"
_write_errors = partial(write_errors_wrapped, expected="a directory that can be written")


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
        foreign: files in steps' directories that treeckpt did not write, by the name of the directory; they stay.
    """

    run: str
    kept: dict[int, tuple[str, ...]]
    removed: tuple[Removal, ...]
    left: tuple[RetainedDirectory, ...]
    failed: tuple[RetainedDirectory, ...] = ()
    warnings: tuple[str, ...] = ()
    dry_run: bool = False
    abandoned: tuple[int, ...] = ()
    foreign: dict[str, tuple[str, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that were removed, or with `dry_run` would be."""
        return sum(removal.nbytes for removal in self.removed)

    def why(self, step: int) -> str:
        """Returns the reasons for keeping a step as text."""
        return ", ".join(self.kept[step]) + " (on an abandoned branch)" * (step in self.abandoned)

    def __str__(self) -> str:
        word = "would go" if self.dry_run else "removed"
        steps = "1 step" if len(self.kept) == 1 else f"{len(self.kept)} steps"
        rows = [f"{self.run}: {steps} kept, {len(self.removed)} {word}"]
        rows += [f"  kept      {step_name(step)}: {self.why(step)}" for step in self.kept]
        rows += [f"  {word:<8}  {r.name}, {r.what}: {r.reason}" for r in self.removed]
        rows += [f"  left      {one.name}: {one.why}" for one in self.left]
        rows += [f"  failed    {one.name}: {one.why}" for one in self.failed]
        rows += [f"  foreign   {name}: {', '.join(files)}" for name, files in self.foreign.items()]
        return "\n".join(map(visible, rows + [f"  {warning}" for warning in self.warnings]))


class RunDirectory:
    """The checkpoints of a run.

    Args:
        run: its directory or URL, or a `RunStore`.
        clock: returns Unix nanoseconds.
        cache: caches indexes and timings.
        verifications: what is known of checkpoints' bytes, by default what `treeckpt verify` of this user found.
        follow_links: reads links out of a local run: of files, and in place of a step's directory. None of the methods
            changes or deletes what a link leads to.

    Raises:
        CheckpointNotFound: the path is that of a file.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunStore,
        *,
        clock: Callable[[], int] | None = None,
        cache: StatCache | None = None,
        verifications: VerificationStore | None = None,
        follow_links: bool = False,
    ) -> None:
        self.store = open_run(run, follow_links=follow_links or None)
        self.url = self.store.url
        if self.store.traits.local_path is not None:
            refuse_file(self.url)
        self._cache, self._clock = cache or LruStatCache(), clock or steady_clock()
        self._verifications = verifications

    def folder(self, step: int) -> Store:
        """Returns the directory of a step, whether or not it exists."""
        return self.store.folder(step_name(check_step(step)))

    def checkpoints(self, *, newest: NewestIndex | None = None, report_errors: bool = False) -> list[CheckpointInfo]:
        """Lists every directory with the name of a step, except links and directories without files of a checkpoint.

        The newest, which was saved last, comes first. Abandoned branches follow after the lineage of the newest.

        Args:
            newest: is offered the indexes that are not in the cache.
            report_errors: lists local directories that could not be read too, as unread.

        Raises:
            StoreError: the run could not be read, or one of its checkpoints.
        """
        return [info for _, info in self._read_infos(newest, report_errors=report_errors)]

    def _read_infos(
        self, newest: NewestIndex | None = None, *, report_errors: bool
    ) -> list[tuple[Store, CheckpointInfo]]:
        seen = read_infos(self.store, self._cache, report_errors=report_errors, timings=False, newest=newest)
        folders = {folder.name: folder for folder, _ in seen}
        ours = in_listing_order(
            _checked(info) for _, info in seen if info.status != "foreign" and is_step_name(info.name)
        )
        return [(folders[info.name], info) for info in ours]

    def marks(self) -> list[SavedCheckpoint]:
        """Returns the data that orders the checkpoints by lineage."""
        return read_marks(self.store, self._cache)

    def checkpoint(self, step: int, *, newest: NewestIndex | None = None) -> CheckpointInfo:
        """Returns the complete checkpoint of a step; `newest` is offered its index, if that is not in the cache.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointError: it is corrupt.
        """
        info = _checked(read_info(self.folder(step), cache=self._cache, timings=False, newest=newest))
        if info.status == "complete":
            return info
        foreign = describe_foreign(info.path) if info.status == "foreign" else None
        found, hint = foreign or (info.error or info.status, "")
        if info.status == "corrupt":
            raise CheckpointError(info.path, expected="a complete checkpoint", found=found, hint=hint)
        raise self._not_found(step, found, hint)

    def _not_found(self, step: int, found: str, hint: str = "") -> CheckpointNotFound:
        error = CheckpointNotFound(self.folder(step).place, expected="a complete checkpoint", found=found, hint=hint)
        error.add_hint(loadable_text(self.checkpoints(), step))
        return error

    # pins ----------------------------------------------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Keeps a step until it is unpinned.

        Raises:
            CheckpointNotFound: there is no complete checkpoint.
        """
        self.checkpoint(step)
        new = self.put_pin(step)
        if new and self.folder(step).entry(INDEX_NAME) is None:  # a clean-up was under way that had not seen the pin
            self.take_pin_back(step)
            raise self._not_found(step, "it was being deleted")

    def put_pin(self, step: int) -> bool:
        """Pins a step that may not be saved yet; returns whether the pin is new."""
        folder = self.folder(step)
        with _write_errors(folder.place):
            folder.prepare()
            new = PIN_NAME not in folder.entries()
            folder.publish(PIN_NAME, msgspec.json.encode({"pinned_ns": self._clock()}), replace=True)
        return new

    def take_pin_back(self, step: int) -> None:
        """Undoes `put_pin` after the save has failed."""
        folder = self.folder(step)
        with _write_errors(folder.place):
            folder.delete(PIN_NAME)
            folder.remove_directory()

    def unpin(self, step: int) -> None:
        """Removes the pin of a step, if there is one.

        Raises:
            CheckpointNotFound: there is no such directory.
        """
        folder = self.folder(step)
        if folder.modified_ns() is None:
            raise self._not_found(step, "no such directory")
        with _write_errors(folder.place):
            folder.delete(PIN_NAME)
            folder.sync()

    # cleaning ------------------------------------------------------------------------------------------------

    def clean(
        self,
        policies: Sequence[Policy],
        *,
        grace: float = GRACE,
        busy: Set[str] = frozenset(),
        claim: Callable[[str], AbstractContextManager[bool]] | None = None,
        dry_run: bool = False,
        on_removal: OnRead = lambda done, total: None,
    ) -> CleanReport:
        """Deletes checkpoints that no policy keeps and files that crashed saves left.

        Args:
            grace: seconds for which the files of a save are kept if nothing shows whether it is alive.
            busy: names of the directories in which this process is saving.
            claim: entered around each removal with the directory's name; gives False if a save has started there.
            dry_run: only reports what would be done.
            on_removal: takes before each removal how many are done, and how many are planned.
        """
        known = self._verifications or VerificationStore(cache_directory())
        found = self._read_infos(report_errors=True)
        facts = [self._fact(with_verification(info, folder, known), folder) for folder, info in found]
        plan = plan_cleanup(facts, policies, deletion_times(self._clock(), grace), busy=frozenset(busy))
        planned = CleanReport(
            self.url,
            plan.kept,
            removed=plan.removals,
            left=plan.left,
            failed=(),
            warnings=plan.warnings,
            dry_run=dry_run,
            abandoned=plan.abandoned,
            foreign=plan.foreign,
        )
        if dry_run:
            return planned
        removed, left, failed = list[Removal](), list(plan.left), list[RetainedDirectory]()
        for number, removal in enumerate(plan.removals):
            on_removal(number, len(plan.removals))
            try:
                with claim(removal.name) if claim is not None else contextlib.nullcontext(True) as free:
                    why = self.remove_directory(removal, grace) if free else "it is being saved"
            except FileNotFoundError:  # another process was faster
                continue
            except (OSError, TreeckptError) as error:
                failed.append(RetainedDirectory(removal.name, f"{type(error).__name__}: {error}"))
                continue
            if why:
                left.append(RetainedDirectory(removal.name, why))
            else:
                removed.append(removal)
        return msgspec.structs.replace(planned, removed=tuple(removed), left=tuple(left), failed=tuple(failed))

    def delete(
        self,
        step: int,
        *,
        force: bool = False,
        grace: float = GRACE,
        claim: Callable[[str], AbstractContextManager[bool]] = lambda _: contextlib.nullcontext(True),
    ) -> None:
        """Deletes a checkpoint as a clean-up does, if no other process has; the next one finishes what is killed.

        Args:
            force: also deletes one that is corrupt, or was never finished. A link in place of a step's directory goes
                with `force` alone; what it leads to stays.
            grace, claim: same as for `clean`.

        Raises:
            CheckpointNotFound: there is no complete checkpoint; with `force`, nothing of one.
            CheckpointError: it is corrupt, pinned, being read or being written; with `force`, one of the last three.
        """
        _, removal = self.plan_deletion(step, force=force, grace=grace)
        folder, why = self.folder(step), ""
        with (
            claim(folder.name) as free,
            _write_errors(folder.place),
            contextlib.suppress(FileNotFoundError),
        ):
            why = self.remove_directory(removal, grace) if free else "it is being saved"
        if why and (removal.what == "leftovers" or self.folder(step).entries().keys() & {INDEX_NAME}):
            raise _held(folder, why)

    def plan_deletion(self, step: int, *, force: bool = False, grace: float = GRACE) -> tuple[CheckpointInfo, Removal]:
        """Returns what `delete` would remove, and of what; arguments and errors as there."""
        folder = self.folder(step)
        read = read_info_or_unread if force else read_info
        info = _checked(read(folder, cache=self._cache, timings=False))
        if not force and info.status != "complete":
            try:
                info = self.checkpoint(step)
            except CheckpointError as error:
                if info.status in ("corrupt", "partial"):
                    error.add_hint("force=True deletes it all the same")
                raise
        if force and folder.is_link:
            return info, Removal(folder.name, "leftovers", "a link, not what it leads to", (), 0, force=True)
        if info.status == "foreign":
            raise self._not_found(step, info.error or info.status)
        plan = plan_deletion(self._fact(info, folder, force=force), deletion_times(self._clock(), grace), force=force)
        if isinstance(plan, RetainedDirectory):
            raise _held(folder, plan.why)
        return info, plan

    def _fact(self, info: CheckpointInfo, folder: Store, *, force: bool = False) -> StepDirectory:
        step = step_of(info.name)
        assert step is not None and info.status != "foreign", "_read_infos returns only these"
        save_id = info.save_id if info.status != "partial" else None
        if info.status == "unread" and not force:
            return StepDirectory(info.name, step, "unread", 0, (), problem=info.error or "", path=folder.place)
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
            damaged=info.damaged,
            path=folder.place,
        )

    def remove_directory(self, removal: Removal, grace: float) -> str:
        """Carries a removal out; says why not, if something has changed since it was decided."""
        folder = self.store.folder(removal.name)
        if folder.is_link:  # what it leads to is not this run's
            if removal.what == "leftovers" and removal.files:
                return "it is a link, and what it leads to stays"
            folder.remove_link()
            return ""
        if removal.what == "leftovers":
            return remove_leftovers(folder, removal)
        mark = deleted_name(removal.save_id or "", secrets.token_hex(8))
        why = ""
        try:
            with hold_lock(folder, "deleting"):
                why = self._take_index(folder, removal, grace, mark)
            if not why:
                marks = (removal.files[-1], mark)
                delete_files(folder, [*removal.files[1:-1], *marks], order=lambda name: name in marks)
                folder.sync()
        finally:
            # of several clean-ups at once, the one that is the last to delete its last file finds no other
            if removal.directory and not why:
                with contextlib.suppress(OSError, StoreError):
                    folder.remove_directory()
        return why

    def _take_index(self, folder: Store, removal: Removal, grace: float, mark: str) -> str:
        """Takes the index of a checkpoint away, under a lock; says why not, if that may not be.

        Raises:
            FileNotFoundError: another process has deleted it.
        """
        store, taken, marked = folder, False, False
        assert removal.save_id is not None, "a checkpoint is removed by its save id"
        try:
            # the plan may be outdated: other removals took place before this one
            now = folder.listed()
            read = read_info_or_unread if removal.force else read_info
            info = _checked(read(now, cache=self._cache))
            why = self._reason_to_keep(info, now, grace, force=removal.force)
            known = not why and info.status != "unread"
            index: bytes | int | None = index_of_save(now, removal.save_id) if known else None
            if not why and index is None and removal.force and info.save_id is None:  # no save can be told of it
                index = 0 if info.status == "unread" else index_state(store) or 0
            if index is None:
                if folder.entry(INDEX_NAME) is None:
                    raise FileNotFoundError(f"{folder.place}/{INDEX_NAME}")
                return why or _REPLACED
            if not store.traits.renames:
                marked = True
                store.publish(mark, index if isinstance(index, bytes) else DECIDED, replace=True)
            taken = True  # it may be, also where an interrupt comes or an answer is lost
            try:
                take_index(store, mark, holds=(lambda found: found == index) if isinstance(index, bytes) else None)
            except (CheckpointExists, FileNotFoundError):
                taken = False
                raise
            folder.sync()
            now = folder.listed()
            if PIN_NAME in now.entries():  # `pin` looks for the index after it has written the pin
                taken = False
                if store.traits.renames:
                    with contextlib.suppress(FileNotFoundError):  # a save or clean-up has put it back
                        store.rename(mark, INDEX_NAME, replace=False)
                elif isinstance(index, bytes):
                    with contextlib.suppress(CheckpointExists):
                        store.publish(INDEX_NAME, index, replace=False)
                return "it has been pinned meanwhile"
            if not decide_deletion(store, mark, removal.files[-1]):
                if index_of_save(folder, removal.save_id) is None:
                    raise FileNotFoundError(f"{folder.place}/{mark}")
                return "it has been pinned meanwhile"
            return "its index is gone; the rest goes when its reader is done" if has_readers(now, self._clock()) else ""
        except CheckpointExists:
            return _REPLACED
        finally:
            if marked and not taken:
                store.delete(mark)

    def _reason_to_keep(self, info: CheckpointInfo, folder: Store, grace: float, *, force: bool) -> str:
        """Returns why a checkpoint must be kept after all: it was pinned, or is being read or written; else ""."""
        if info.pinned:
            return "it has been pinned meanwhile"
        if info.status == "foreign" or (info.status != "complete" and not force):
            return f"it is {info.status} now"
        plan = plan_deletion(self._fact(info, folder, force=force), deletion_times(self._clock(), grace), force=force)
        return plan.why if isinstance(plan, RetainedDirectory) else ""


def clean_checkpoint(path: str | os.PathLike[str], *, grace: float = GRACE, dry_run: bool = False) -> CleanReport:
    """Removes what dead saves left in a checkpoint's directory; the checkpoint itself is kept.

    Args:
        grace, dry_run: same as for `RunDirectory.clean`.
    """
    folder = open_store(path)
    others = foreign_files(name for name, entry in folder.entries().items() if entry.regular)
    foreign = {folder.name: others} if others else {}
    report = CleanReport(folder.place, {}, (), (), dry_run=dry_run, foreign=foreign)
    found = plan_removal(folder, time.time_ns(), grace)
    if found is None:
        return report
    if isinstance(found, RetainedDirectory):
        return msgspec.structs.replace(report, left=(found,))
    if not dry_run:
        try:
            why = remove_leftovers(folder, found)
        except (OSError, TreeckptError) as error:
            failed = RetainedDirectory(found.name, f"{type(error).__name__}: {error}")
            return msgspec.structs.replace(report, failed=(failed,))
        if why:
            return msgspec.structs.replace(report, left=(RetainedDirectory(found.name, why),))
    return msgspec.structs.replace(report, removed=(found,))


def _held(folder: Store, why: str) -> CheckpointError:
    held = why.removeprefix("no policy keeps it, but ")
    hint = "Unpin it first" if "pinned" in why else "Delete it when that has ended"
    return CheckpointError(folder.place, expected="a checkpoint that nothing holds", found=held, hint=hint)


def _checked(info: CheckpointInfo) -> CheckpointInfo:
    """Marks a checkpoint as corrupt if its index records another step than its directory's name: it was moved."""
    if info.status == "complete" and info.step != step_of(info.name):
        found = f"its index says step {info.step}, not what its name says"
        return msgspec.structs.replace(info, status="corrupt", error=found)
    return info
