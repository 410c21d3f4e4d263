"""Deletes one checkpoint, as a clean-up, `Manager.delete` and `treeckpt.delete` do, or what dead saves left in one.

It takes these steps: (1) a lock on the index is written, see `_io.storage.deletions`; (2) if the index still names that
save, and no process reads or writes there, it is taken away and the directory synced: from now on it is no checkpoint;
(3) readers' leases are checked once more, and a pin, which brings the index back; then the lock goes; (4) the other
files are deleted, the index that was taken away last (in an object store a mark, which is written with the lock), then
the directory. Shards that other checkpoints share stay with that mark until these have gone. The next clean-up finds
these files of a deletion that was killed, and ends it.

`kept_files` finds readers, `_inspect.deletion` decides what is deleted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable

import msgspec

from .._core.format.files import PIN_NAME, deleted_name
from .._core.format.index import INDEX_NAME
from .._inspect.deletion import (
    CleanReport,
    JoinedRun,
    NeededFiles,
    Removal,
    RetainedDirectory,
    StepDirectory,
    foreign_files,
    plan_deletion,
)
from .._io.os_errors import write_errors_wrapped
from .._io.public_calls import takes_no_save
from .._io.storage.checkpoint import LruStatCache, StatCache
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
    restore_plain_names,
    spared,
    take_index,
    unnamed_shards,
)
from .._io.storage.foreign_formats import describe_foreign
from .._io.storage.kept_files import has_readers
from .._io.storage.local_store import is_url
from .._io.storage.open import open_run, open_store
from .._io.storage.plain_names import copies_of
from .._io.storage.shared_files import Sharing, needed_files
from .._io.storage.store import RunStore, Store
from .._io.timing import steady_clock
from ..errors import CheckpointError, CheckpointExists, CheckpointNotFound, StoreError, TreeckptError
from .catalog import CheckpointInfo, id_of, read_info, step_info
from .failures import FailureHistory
from .index_summary import read_summary
from .repair_advice import repair_advice

_REPLACED = "another save has been committed there meanwhile"


class CheckpointRemover:
    """Deletes checkpoints.

    Args:
        clock: returns Unix nanoseconds.
        cache: caches indexes.
        failures: keeps what is known of dead saves whose files go; None keeps nothing.
    """

    def __init__(self, clock: Callable[[], int], cache: StatCache, failures: FailureHistory | None) -> None:
        self._clock, self._cache, self._failures = clock, cache, failures

    def fact(
        self,
        info: CheckpointInfo,
        folder: Store,
        *,
        force: bool = False,
        disks: JoinedRun | None = None,
        sharing: Sharing | None = None,
    ) -> StepDirectory:
        """Returns the data of a directory by which it is decided what is deleted there.

        Args:
            sharing: what the directories of the run share, where it is known.
        """
        assert info.files != "foreign", "it holds no checkpoint"
        save_id = info.save_id if info.files != "partial" else None
        unread, step = info.files == "unread" and not force, step_info(info)
        if disks is not None:
            step = msgspec.structs.replace(step, damaged=step.damaged or info.name in disks.damaged)
        files = () if unread else file_facts(folder, self._clock(), committed=save_id)
        names, unnamed = [file.name for file in files], frozenset[str]()
        if info.shared and save_id and (index := folder.entries().get(INDEX_NAME)) is not None:
            named = dict(read_summary(folder, index, self._cache).sizes)
            unnamed = unnamed_shards(save_id, named, names)
        return StepDirectory(
            **msgspec.structs.asdict(step),
            name=info.name,
            status=info.files,
            modified_ns=0 if unread else folder.modified_ns() or 0,
            files=files,
            save_id=None if unread else save_id,
            problem=info.error or "",
            path=folder.place,
            whole=disks is None or (info.name, info.save_id or "") in disks.whole,
            elsewhere=info.elsewhere if disks is None else "",
            needed=NeededFiles() if unread else needed_files(folder, names, sharing),
            unnamed=unnamed,
        )

    def plan(self, info: CheckpointInfo, folder: Store, grace: float, *, force: bool) -> Removal:
        """Returns what `delete` would remove.

        Raises:
            CheckpointError: it is pinned, being read or being written.
        """
        if force and folder.is_link:
            return Removal(folder.name, "leftovers", "a link, not what it leads to", (), 0, force=True)
        times = deletion_times(self._clock(), grace)
        plan = plan_deletion(self.fact(info, folder, force=force), times, force=force)
        if isinstance(plan, RetainedDirectory):
            raise held_error(folder, plan.why)
        return plan

    def delete(self, folder: Store, removal: Removal, grace: float) -> None:
        """Carries out a deletion that a person asked for, unless another process was faster.

        Raises:
            CheckpointError: it has been pinned meanwhile, or is being read or written.
        """
        why = ""
        expected = "a directory that can be written"
        with write_errors_wrapped(folder.place, expected=expected), contextlib.suppress(FileNotFoundError):
            why = self.remove(folder, removal, grace)
        # Once its index is gone it is no checkpoint any more, and the next clean-up removes the rest.
        if why and (removal.what == "leftovers" or folder.entries().keys() & {INDEX_NAME}):
            raise held_error(folder, why)

    def remove(self, folder: Store, removal: Removal, grace: float) -> str:
        """Carries a removal out; says why not, if something has changed since it was decided."""
        if folder.is_link:  # what it leads to is not this run's
            if removal.what == "leftovers" and removal.files:
                return "it is a link, and what it leads to stays"
            folder.remove_link()
            return ""
        if self._failures is not None:
            self._failures.keep_removed(folder, removal.files, committed=removal.save_id or "")
        if removal.what == "leftovers":
            return remove_leftovers(folder, removal)
        mark = deleted_name(removal.save_id or "", secrets.token_hex(8))
        why = ""
        try:
            with hold_lock(folder, "deleting"):
                marks = (removal.files[-1], mark)
                # under the lock: no save may begin to share files in between
                names = spared(folder, [*removal.files[1:-1], *marks])
                why = self._take_index(folder, removal, grace, mark)
            if not why:
                delete_files(folder, names, order=lambda name: name in marks)
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
            info = checked(read_info(now, cache=self._cache, or_unread=removal.force))
            why = self._reason_to_keep(info, now, grace, force=removal.force)
            known = not why and info.files != "unread"
            index: bytes | int | None = index_of_save(now, removal.save_id) if known else None
            if not why and index is None and removal.force and info.save_id is None:  # no save can be told of it
                index = 0 if info.files == "unread" else index_state(store) or 0
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
        if info.files == "foreign" or (info.files != "complete" and not force):
            return f"it is {info.files} now"
        times = deletion_times(self._clock(), grace)
        plan = plan_deletion(self.fact(info, folder, force=force), times, force=force)
        return plan.why if isinstance(plan, RetainedDirectory) else ""


def held_error(folder: Store, why: str) -> CheckpointError:
    """Returns the error for a checkpoint that cannot be deleted now."""
    held = why.removeprefix("no policy keeps it, but ")
    hint = "Unpin it first" if "pinned" in why else "Delete it when that has ended"
    return CheckpointError(folder.place, expected="a checkpoint that nothing holds", found=held, hint=hint)


def checked(info: CheckpointInfo) -> CheckpointInfo:
    """Marks a checkpoint as damaged if its index records another step than its directory's name: it was moved."""
    if info.files == "complete" and info.named_step not in (None, info.step):
        found = f"its index says step {info.step}, not what its name says"
        return msgspec.structs.replace(info, files="damaged", error=found)
    return info


def incomplete_error(info: CheckpointInfo) -> CheckpointError:
    """Returns the error for a directory that holds no complete checkpoint."""
    foreign = describe_foreign(info.path) if info.files == "foreign" else None
    advice = repair_advice(info)
    found, hint = foreign or (info.error or info.files, advice.text if advice is not None else "")
    kind = CheckpointError if info.files == "damaged" else CheckpointNotFound
    return kind(info.path, expected="a complete checkpoint", found=found, hint=hint)


@takes_no_save
def delete(path: str | os.PathLike[str] | Store, *, force: bool = False, grace: float = GRACE) -> None:
    """Deletes a checkpoint, as `Manager.delete` does; called by one process, not by all ranks.

    >>> report = tc.save("old", {"step": 1})
    >>> tc.delete("old")
    >>> tc.exists("old")
    False

    Files that treeckpt did not write stay, and so does the directory then. A deletion that is killed leaves a directory
    without an index, whose rest a clean-up of its run or another call with `force` deletes. Of a checkpoint on the
    disks of several hosts only what is here is deleted.

    Args:
        force: also deletes one that is damaged or was never finished; of a link, the link alone.
        grace: seconds for which files of a save are kept if nothing shows whether it is alive.

    Raises:
        CheckpointNotFound: there is none; with `force`, nothing of one.
        CheckpointError: it is damaged, pinned, or something reads or writes it; with `force`, one of the last two.
        StoreError: it could not be read or deleted.
    """
    folder, clock = open_store(path).listed(), steady_clock()
    info = checked(read_info(folder, timings=False, or_unread=force))
    if info.files != "complete" and (not force or (info.files == "foreign" and not folder.is_link)):
        error = incomplete_error(info)
        if info.files in ("damaged", "partial"):
            error.add_hint("force=True deletes it all the same")
        raise error
    failures = FailureHistory(run) if id_of(info) is not None and (run := _run_of(folder)) is not None else None
    remover = CheckpointRemover(clock, LruStatCache(0), failures)
    remover.delete(open_store(path), remover.plan(info, folder, grace, force=force), grace)


def clean_checkpoint(path: str | os.PathLike[str], *, grace: float = GRACE, dry_run: bool = False) -> CleanReport:
    """Removes what dead saves left in a checkpoint's directory; the checkpoint itself is kept.

    Args:
        grace, dry_run: same as for `RunDirectory.clean`.
    """
    folder = open_store(path)
    entries = folder.entries()
    copies = copies_of(folder, entries)
    others = foreign_files(name for name, entry in entries.items() if entry.regular and name not in copies)
    foreign = {folder.name: others} if others else {}
    report = CleanReport(folder.place, {}, (), (), dry_run=dry_run, foreign=foreign)
    if not dry_run:
        restore_plain_names(folder, entries)
    planned = plan_removal(folder, time.time_ns(), grace)
    if planned is None:
        return report
    if isinstance(planned, RetainedDirectory):
        return msgspec.structs.replace(report, left=(planned,))
    if not dry_run:
        try:
            why = remove_leftovers(folder, planned)
        except (OSError, TreeckptError) as error:
            failed = RetainedDirectory(planned.name, f"{type(error).__name__}: {error}")
            return msgspec.structs.replace(report, failed=(failed,))
        if why:
            return msgspec.structs.replace(report, left=(RetainedDirectory(planned.name, why),))
    return msgspec.structs.replace(report, removed=(planned,))


def _run_of(folder: Store) -> RunStore | None:
    """Returns the run that a directory is in, None where it cannot be opened by its path or URL."""
    above, _, name = folder.place.rstrip("/").rpartition("/")
    with contextlib.suppress(TreeckptError):
        if (path := folder.traits.local_path) is not None:
            return open_run(path.absolute().parent)
        return open_run(above) if is_url(above) and name == folder.name else None
    return None
