"""Lists, selects, pins and deletes the checkpoints of a run, in one process.

By default a checkpoint is complete if its index decodes and every shard that it names has its size; only the index is
read for that. On request everything is read and compared with its checksums.

`removal` deletes a checkpoint, `_inspect.deletion` decides which, `catalog` describes them.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from .._core.format.files import (
    PIN_NAME,
    STEP_PATTERN,
    CheckpointId,
    check_id,
    check_pattern,
    id_order,
    id_text,
    numbers_in,
    step_of,
)
from .._core.format.index import INDEX_NAME
from .._core.format.lineage import SavedCheckpoint
from .._core.text import count_text
from .._inspect.deletion import (
    CleanReport,
    JoinedRun,
    Removal,
    RetainedDirectory,
    plan_cleanup,
)
from .._io.os_errors import write_errors_wrapped
from .._io.storage.checkpoint import KnownIndex, LruStatCache, NewestIndex, StatCache
from .._io.storage.deletions import (
    GRACE,
    deletion_times,
    restore_plain_names,
)
from .._io.storage.foreign_formats import describe_foreign, names_text, refuse_file
from .._io.storage.local_store import is_url
from .._io.storage.open import open_run
from .._io.storage.shared_files import read_shared
from .._io.storage.store import RunStore, Store
from .._io.timing import steady_clock
from ..errors import CheckpointError, CheckpointExists, CheckpointNotFound, StoreError, TreeckptError, TreeError
from ..policy import Best, Policy, best_of, unmeasured_text
from .catalog import (
    CheckpointInfo,
    OnRead,
    checkpoints_without_step,
    id_of,
    in_listing_order,
    read_info,
    read_infos,
    read_marks,
    step_info,
    with_verification,
)
from .failures import FailureHistory
from .removal import CheckpointRemover, checked, held_error, incomplete_error
from .repair_advice import repair_advice
from .step_names import links_and_other_names, recorded_patterns, step_folder
from .verification import (
    DamagedPart,
    VerificationStore,
    cache_directory,
    fingerprint_of,
    found_part,
    this_user,
    verify_folder,
)

_REPLACED = "another save has been committed there meanwhile"
_write_errors = partial(write_errors_wrapped, expected="a directory that can be written")
_log = logging.getLogger("treeckpt")


class RunDirectory:
    """The checkpoints of a run.

    Args:
        run: its directory or URL, or a `RunStore`.
        clock: returns Unix nanoseconds.
        cache: caches indexes and timings.
        verifications: what is known of checkpoints' bytes, by default what `treeckpt verify` of this user found.
        follow_links: reads links out of a local run: of files, and in place of a step's directory. None of the methods
            changes or deletes what a link leads to.
        pattern: of the names of steps that are saved; others are known by what their indexes record.

    Raises:
        CheckpointNotFound: the path is that of a file.
        TreeError: steps cannot be named by the pattern.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunStore,
        *,
        clock: Callable[[], int] | None = None,
        cache: StatCache | None = None,
        verifications: VerificationStore | None = None,
        follow_links: bool = False,
        pattern: str = STEP_PATTERN,
    ) -> None:
        self.store = open_run(run, follow_links=follow_links or None)
        self.url = self.store.url
        if self.store.traits.local_path is not None:
            refuse_file(self.url)
        self._cache, self._clock = cache or LruStatCache(), clock or steady_clock()
        self._verifications = verifications
        self.pattern = check_pattern(pattern)
        self.failures = FailureHistory(self.store)
        self.remover = CheckpointRemover(self._clock, self._cache, self.failures)

    def folder(self, step: CheckpointId) -> Store:
        """Returns the directory of a step, whether or not it exists, and whatever the width of its number is."""
        return step_folder(self.store, check_id(step), self.pattern, self._cache)

    def check_free(self, name: str) -> None:
        """Refuses to save a checkpoint by a text where something else has the directory of this name.

        Raises:
            CheckpointExists: naming it.
            TreeError: it is the name of a step.
        """
        if step_of(name, (self.pattern,)) is not None:
            raise TreeError("step", expected="an integer, or a text that no step has as its name", found=f"{name!r}")
        folder = self.store.folder(name)
        if folder.is_link:
            expected, found = "a directory, or nothing", "a link, through which no save goes"
            hint = "Save under another name, or remove the link; what it leads to stays as it is"
            raise CheckpointExists(folder.place, expected=expected, found=found, hint=hint)
        info = read_info(folder, cache=self._cache, timings=False, patterns=(self.pattern,))
        if info.files in ("complete", "damaged") and (info.lineage is None or info.lineage.name != name):
            raise CheckpointExists(
                info.path,
                expected="a name that is free, or that of a checkpoint which a manager saved by it",
                found=f"a checkpoint that was saved otherwise ({info.files})",
                hint="Save under another name, or move it away; Manager.delete with force=True removes a damaged one",
            )

    def checkpoints(self, *, newest: NewestIndex | None = None, or_unread: bool = False) -> list[CheckpointInfo]:
        """Lists every checkpoint with the name of a step, or the one that a manager gave it; no links.

        The newest, which was saved last, comes first. Abandoned branches follow after the lineage of the newest.

        Args:
            newest: is offered the indexes that are not in the cache.
            or_unread: lists local directories that could not be read too, as unread.

        Raises:
            StoreError: the run could not be read, or one of its checkpoints.
        """
        return [info for _, info in self._read_infos(newest, or_unread=or_unread)]

    def _read_infos(self, newest: NewestIndex | None = None, *, or_unread: bool) -> list[tuple[Store, CheckpointInfo]]:
        seen = self._seen_whole(newest, or_unread=or_unread)
        folders = {folder.name: folder for folder, _ in seen}
        ours = in_listing_order(
            checked(info) for _, info in seen if info.files != "foreign" and id_of(info) is not None
        )
        return [(folders[info.name], info) for info in ours]

    def _seen_whole(self, newest: NewestIndex | None, *, or_unread: bool) -> list[tuple[Store, CheckpointInfo]]:
        """Returns every folder; reads again where none is complete, and the run has changed since it was listed.

        Else a run would seem empty while others save the next checkpoint and delete the one that was listed.
        """
        looked: dict[str, bool] | None = None
        while True:
            seen = read_infos(
                self.store, self._cache, or_unread=or_unread, timings=False, newest=newest, patterns=(self.pattern,)
            )
            if not seen or any(info.files == "complete" for _, info in seen):
                return seen
            if looked is None:
                looked = {folder.name: info.files in ("damaged", "unread") for folder, info in seen}
            before, looked = looked, {folder.name: _has_index(folder) for folder in self.store.folders()}
            if looked == before:
                return seen

    def marks(self) -> list[SavedCheckpoint]:
        """Returns the data that orders the checkpoints by lineage."""
        return read_marks(self.store, self._cache, (self.pattern,))

    def links_and_other_names(self) -> dict[int, str]:
        """Returns the names of the directories of those steps that are links, or have another name than it gives."""
        patterns = {self.pattern}
        if any(numbers_in(name) and step_of(name, patterns) is None for name in self.store.names()):
            patterns |= recorded_patterns(mark.lineage for mark in self.marks())
        return links_and_other_names(self.store, self.pattern, patterns)

    def checkpoint(
        self,
        step: CheckpointId,
        *,
        newest: NewestIndex | None = None,
        joined: Sequence[CheckpointInfo] | None = None,
    ) -> CheckpointInfo:
        """Returns the complete checkpoint of a step; `newest` is offered its index, if that is not in the cache.

        Args:
            joined: the checkpoints over the disks of several hosts, in place of what is here.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointError: it is damaged.
        """
        folder = self.folder(step)
        if joined is None:
            info = checked(read_info(folder, cache=self._cache, timings=False, patterns=(self.pattern,), newest=newest))
        else:
            none = CheckpointInfo(folder.name, folder.place, "foreign", error=f"no checkpoint of {id_text(step)}")
            info = next((each for each in joined if each.name == folder.name), none)
        if info.files == "complete" and id_of(info) is None:
            raise self._not_found(step, "one that no manager saved by this name", "Load it with tc.load", joined)
        if info.files == "complete":
            return info
        error = incomplete_error(info)
        if info.files != "damaged":
            error.add_hint(loadable_text(self.checkpoints() if joined is None else joined, step))
        raise error

    def _not_found(
        self, step: CheckpointId, found: str, hint: str = "", joined: Sequence[CheckpointInfo] | None = None
    ) -> CheckpointNotFound:
        error = CheckpointNotFound(self.folder(step).place, expected="a complete checkpoint", found=found, hint=hint)
        error.add_hint(loadable_text(self.checkpoints() if joined is None else joined, step))
        return error

    # pins ----------------------------------------------------------------------------------------------------

    def pin(self, step: CheckpointId) -> None:
        """Keeps a step until it is unpinned.

        Raises:
            CheckpointNotFound: there is no complete checkpoint.
        """
        self.checkpoint(step)
        folder = self.folder(step)
        new = self.put_pin(folder)
        if new and folder.entry(INDEX_NAME) is None:  # a clean-up was under way that had not seen the pin
            self.take_pin_back(folder)
            raise self._not_found(step, "it was being deleted")

    def put_pin(self, folder: Store) -> bool:
        """Pins the directory of a step that may not be saved yet; returns whether the pin is new."""
        with _write_errors(folder.place):
            folder.prepare()
            new = PIN_NAME not in folder.entries()
            folder.publish(PIN_NAME, msgspec.json.encode({"pinned_ns": self._clock()}), replace=True)
        return new

    def take_pin_back(self, folder: Store) -> None:
        """Undoes `put_pin` after the save has failed."""
        with _write_errors(folder.place):
            folder.delete(PIN_NAME)
            folder.remove_directory()

    def unpin(self, step: CheckpointId) -> None:
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
        disks: JoinedRun | None = None,
    ) -> CleanReport:
        """Deletes checkpoints that no policy keeps and files that crashed saves left.

        Args:
            grace: seconds for which the files of a save are kept if nothing shows whether it is alive.
            busy: names of the directories in which this process is saving.
            claim: entered around each removal with the directory's name; gives False if a save has started there.
            dry_run: only reports what would be done.
            on_removal: takes before each removal how many are done, and how many are planned.
            disks: what other disks have of a run that lies on several. Without it node-local checkpoints stay.
        """
        known = self._verifications or VerificationStore(cache_directory())
        infos = self._read_infos(or_unread=True)
        sharing = {info.name: read_shared(f) if info.files == "partial" else info.shared for f, info in infos}
        facts = [self.remover.fact(with_verification(i, f, known), f, disks=disks, sharing=sharing) for f, i in infos]
        times = deletion_times(self._clock(), grace)
        planned = plan_cleanup(facts, policies, times, run=self.url, busy=busy)
        if dry_run:
            return planned
        removed, left, failed = list[Removal](), list(planned.left), list[RetainedDirectory]()
        for number, removal in enumerate(planned.removed):
            on_removal(number, len(planned.removed))
            try:
                with claim(removal.name) if claim is not None else contextlib.nullcontext(True) as free:
                    folder = self.store.folder(removal.name)
                    why = self.remover.remove(folder, removal, grace) if free else "it is being saved"
            except FileNotFoundError:  # another process was faster
                continue
            except (OSError, TreeckptError) as error:
                failed.append(RetainedDirectory(removal.name, f"{type(error).__name__}: {error}"))
                continue
            if why:
                left.append(RetainedDirectory(removal.name, why))
            else:
                removed.append(removal)
        gone = {removal.name for removal in removed if removal.what == "checkpoint"}
        for (folder, info), fact in zip(infos, facts, strict=True):
            if info.files == "complete" and info.name not in gone | busy and not folder.is_link:
                restore_plain_names(folder, [file.name for file in fact.files])
        self.failures.keep()  # what a full disk did not take before
        done = {"removed": tuple(removed), "left": tuple(left), "failed": tuple(failed), "dry_run": False}
        return msgspec.structs.replace(planned, **done)

    def delete(
        self,
        step: CheckpointId,
        *,
        force: bool = False,
        grace: float = GRACE,
        claim: Callable[[str], AbstractContextManager[bool]] = lambda _: contextlib.nullcontext(True),
    ) -> None:
        """Deletes a checkpoint as a clean-up does, if no other process has; the next one finishes what is killed.

        Args:
            force: also deletes one that is damaged, or was never finished. A link in place of a step's directory goes
                with `force` alone; what it leads to stays.
            grace, claim: same as for `clean`.

        Raises:
            CheckpointNotFound: there is no complete checkpoint; with `force`, nothing of one.
            CheckpointError: it is damaged, pinned, being read or being written; with `force`, one of the last three.
        """
        _, removal = self.plan_deletion(step, force=force, grace=grace)
        folder = self.folder(step)
        with claim(folder.name) as free:
            if not free:
                raise held_error(folder, "it is being saved")
            self.remover.delete(folder, removal, grace)

    def plan_deletion(
        self, step: CheckpointId, *, force: bool = False, grace: float = GRACE
    ) -> tuple[CheckpointInfo, Removal]:
        """Returns what `delete` would remove, and of what; arguments and errors as there."""
        folder = self.folder(step)
        info = checked(read_info(folder, cache=self._cache, timings=False, patterns=(self.pattern,), or_unread=force))
        if not force and info.files != "complete":
            try:
                info = self.checkpoint(step)
            except CheckpointError as error:
                if info.files in ("damaged", "partial"):
                    error.add_hint("force=True deletes it all the same")
                raise
        is_link = force and folder.is_link
        if not is_link and (info.files == "foreign" or id_of(info) is None):
            raise self._not_found(step, info.error or "nothing that a manager saved by this name")
        return info, self.remover.plan(info, folder, grace, force=force)


def _has_index(folder: Store) -> bool:
    with contextlib.suppress(TreeckptError, OSError):
        return folder.entry(INDEX_NAME) is not None
    return False


def refuse_link(store: Store) -> None:
    """Refuses to save through a link in place of the directory of a step.

    Raises:
        CheckpointExists: there is one.
    """
    if store.is_link:
        expected, found = "a directory, or nothing", "a link, through which no save goes"
        hint = "Remove the link; what it leads to stays as it is"
        raise CheckpointExists(store.place, expected=expected, found=found, hint=hint)


class OtherDisks(Exception):
    """What is seen here may be one disk of several, or none of them."""


class CheckpointSelector:
    """Selects checkpoints of a run. Each warning is logged once, to the logger `treeckpt`."""

    def __init__(self, run: RunDirectory) -> None:
        self.directory = run
        self._logged: set[tuple[str, str]] = set()
        self._read = NewestIndex()
        """Is offered every index that is read, a local one only by `choose`; what the cache has was offered before."""
        self.joined: list[CheckpointInfo] | None = None
        """The checkpoints over the disks of all ranks, where these are what it selects from."""
        self._one_disk = False

    @contextlib.contextmanager
    def seeing(self, infos: list[CheckpointInfo]) -> Iterator[None]:
        """Selects from these checkpoints while the body runs."""
        self.joined = infos
        try:
            yield
        finally:
            self.joined = None

    @contextlib.contextmanager
    def seeing_one_disk(self) -> Iterator[None]:
        """Has the body raise `OtherDisks` where what it selects from may be on the disks of other hosts too."""
        self._one_disk = True
        try:
            yield
        finally:
            self._one_disk = False

    def warn_once(self, path: str, what: str) -> None:
        """Logs a warning about a path, unless it was logged before."""
        if (path, what) not in self._logged:
            self._logged.add((path, what))
            _log.warning("%s: %s", path, what)

    def complete(self) -> list[CheckpointInfo]:
        """Returns the complete checkpoints, newest first.

        Raises:
            CheckpointNotFound: the directory is one checkpoint.
        """
        return [info for info in self._listed() if info.files == "complete"]

    def _listed(self, *, or_unread: bool = False) -> list[CheckpointInfo]:
        """Returns the checkpoints of the run; refuses the path of one checkpoint, which has none below it."""
        if self.joined is not None:
            return self.joined
        infos = self.directory.checkpoints(newest=self._read, or_unread=or_unread)
        run, url = self.directory.store, self.directory.url
        is_local = self._one_disk and run.traits.local_path is not None
        if is_local and (any(info.disks for info in infos) or all(info.files != "complete" for info in infos)):
            raise OtherDisks
        if infos:
            return infos
        if run.holds(INDEX_NAME):
            above = url.rpartition("/")[0] if is_url(url) else Path(url).parent
            raise CheckpointNotFound(
                url,
                expected="a run, the directory that holds the checkpoints",
                found="one checkpoint",
                hint=f"Give the directory above it, {above}, or load it with tc.load or tc.training.restore",
            )
        return infos

    def newest(
        self,
        *,
        verify: bool = False,
        without: Container[str | None] = (),
        busy: Container[str] = (),
        passed_over: list[str] | None = None,
    ) -> CheckpointInfo | None:
        """Returns the newest complete checkpoint, None if there is none.

        Args:
            verify: reads everything and compares checksums.
            without: the ids of saves to leave out.
            busy: directories in which a save is known to be under way: no warning is logged for them.
            passed_over: gets the path of each damaged checkpoint and link that is newer, or may be, with what is wrong.

        Raises:
            CheckpointNotFound: the directory is one checkpoint.
            StoreError: a checkpoint that may be newer could not be read, or with `verify` not compared: it may be good.
        """
        infos, newest = self._listed(or_unread=True), None
        for info in infos:
            if info.files == "unread":
                expected, hint = (
                    "the newest checkpoint, or to know that it is not",
                    "No older one is taken in its place",
                )
                raise StoreError(info.path, expected=expected, found=info.error or "", hint=hint)
            if info.save_id in without:
                continue
            why = info.error or info.files if info.files != "complete" else ""
            if not why and verify:
                why = self._problem(info)
            if not why:
                newest = info
                break
            if info.name not in busy:
                advice = repair_advice(info)
                more = f". {advice.text}" if advice is not None else ""
                self.warn_once(info.path, f"passed over, {info.files}: {why}{more}")
            if passed_over is not None and info.files != "partial":
                passed_over.append(f"{info.path}: {why}")
        if not infos and (others := checkpoints_without_step(self.directory.store)):
            text = f"checkpoints of this run are passed over, as their names are no steps: {names_text(others)}. "
            hint = "Rename them to step_NUMBER, or give Manager(name=...) their pattern, to have them taken"
            self.warn_once(self.directory.url, text + hint)
        for path, why in self._perhaps_newer(infos, newest):
            self.warn_once(path, f"passed over, {why}")
            if passed_over is not None:
                passed_over.append(f"{path}: {why}")
        return newest

    def _perhaps_newer(
        self, infos: Sequence[CheckpointInfo], newest: CheckpointInfo | None
    ) -> Iterator[tuple[str, str]]:
        """Yields the path of each step that may have been saved after the one that was found, and why it is not known.

        These are steps whose index, which has the lineage, cannot be read, and links with a higher step.
        """
        step = step_info(newest).step if newest is not None else -1
        number, _ = id_order(step)
        for info in infos[infos.index(newest) + 1 :] if newest is not None else ():
            if info.files in ("damaged", "unread") and info.save_id is None:
                yield info.path, f"{info.files}, and perhaps saved after {id_text(step)}: {info.error}"
        for name in self.directory.store.linked_names():
            folder = self.directory.store.folder(name)
            followed = folder.traits.follow_links and folder.modified_ns() is not None
            linked = step_of(name, (self.directory.pattern,))
            if linked is not None and linked > number and not followed:
                yield folder.place, "a symbolic link, which is not followed"

    def _problem(self, info: CheckpointInfo) -> str:
        """Returns what is wrong with a checkpoint, as all of it shows; keeps damage beside it, for clean-ups to know.

        It is not read again where damage is known, and no file was written since.
        """
        folder, known = self.directory.store.folder(info.name), VerificationStore(cache_directory())
        if self.joined is not None:
            here = "what rank 0 has of it alone" if folder.entry(INDEX_NAME) is not None else "nothing of it"
            self.warn_once(info.path, f"on the disks of several hosts: {here} is compared with its checksums")
            if here == "nothing of it":
                return ""
        before = with_verification(info, folder, known).verification
        if before is not None and before.beside and not before.changed:
            return f"a verification has found {count_text(before.total, 'problem')}, first {before.problems[0].text}"
        try:
            report, verification = verify_folder(folder, this_user("Manager.latest"))
        except StoreError:
            raise
        except TreeckptError as error:
            return str(error)
        for text in known.record(folder, verification, beside=True):
            self.warn_once(info.path, text)
        if report.problems:
            return f"{count_text(len(report.problems), 'problem')}, first {report.problems[0].text}"
        if report.unread:
            found, hint = f"{report.state}, first {report.unread[0].text}", ". ".join(report.notes)
            raise StoreError(info.path, expected="bytes to compare with their checksums", found=found, hint=hint)
        return ""

    def keep_damage(self, info: CheckpointInfo, found: str) -> None:
        """Keeps that a load has found a checkpoint damaged: else a clean-up might keep it, and delete a good one."""
        try:
            folder, by = self.directory.store.folder(info.name), this_user("Manager.restore")
            fingerprint = fingerprint_of(folder.entries(), info.save_id or "")
            verification = found_part(info.save_id or "", fingerprint, [DamagedPart(info.name, found)], by=by)
            failed = VerificationStore(cache_directory()).record(folder, verification, beside=True)
        except Exception as error:  # the restore goes on with the step before, for which the other ranks wait
            failed = [f"that it is damaged could not be kept: {type(error).__name__}: {error}"]
        for text in failed:
            self.warn_once(info.path, text)

    def best(self, policy: Best) -> CheckpointId | None:
        """Returns the step that is best by a policy's metric; None, and logs the metrics there are, if none has it.

        Steps of abandoned branches are not rated. One that a verification has found damaged, or that is not healthy, is
        passed over, and logged.
        """
        complete = [info for info in self.complete() if not info.abandoned]
        steps = [step_info(info) for info in complete]
        infos = {one.step: info for one, info in zip(steps, complete, strict=True)}
        rated, known = best_of(steps, policy), VerificationStore(cache_directory())
        if steps and not rated:
            self.warn_once(self.directory.url, unmeasured_text(policy.metric, steps))
        for step in (one.step for one in rated):
            info = infos[step]
            info = with_verification(info, self.directory.store.folder(info.name), known)
            if not info.damaged and not info.unhealthy:
                return step
            why = "a verification has found it damaged" if info.damaged else info.unhealthy
            self.warn_once(info.path, f"passed over as the best, since {why}")
        return None

    def choose(
        self, step: CheckpointId | None, failed: Collection[str | None], passed_over: list[str]
    ) -> CheckpointInfo | None:
        """Returns the checkpoint to restore: that of `step`, or the newest that has not failed; None without any.

        Args:
            failed: the ids of saves that could not be loaded.
            passed_over: as for `newest`.

        Raises:
            CheckpointNotFound: there is none of that step, only such as cannot be loaded, or something else.
            CheckpointError: the step is damaged.
        """
        self._read.local = True
        if step is not None:
            try:
                info = self.directory.checkpoint(step, newest=self._read, joined=self.joined)
            except CheckpointError:
                self._listed()  # raises the error for the path of one checkpoint in place of this one
                raise
            if self._one_disk and info.disks:
                raise OtherDisks
            return info
        newest = self.newest(without=failed, passed_over=passed_over)
        if newest is None and (foreign := describe_foreign(self.directory.url)) is not None:
            expected = "a run of checkpoints of treeckpt"
            raise CheckpointNotFound(self.directory.url, expected=expected, found=foreign[0], hint=foreign[1])
        if newest is None and (failed or passed_over):
            raise CheckpointNotFound(
                self.directory.url,
                expected="a checkpoint to restore",
                found=f"only such as cannot be loaded{', as ' + passed_over[0] if passed_over else ''}",
                hint="See what treeckpt verify says of each",
            )
        return newest

    def take_index(self, info: CheckpointInfo) -> KnownIndex | None:
        """Returns the index of a checkpoint if it was the newest of those read; forgets it."""
        index, self._read = self._read.found, NewestIndex()
        return index if index and (index.url, index.index.save_id) == (info.path, info.save_id) else None


def loadable_text(infos: Iterable[CheckpointInfo], step: CheckpointId) -> str:
    """Returns which steps of a run can be loaded, at most the 10 highest, and which is nearest to `step`."""
    steps = sorted((step_info(info).step for info in infos if info.files == "complete"), key=id_order)
    others = [other for other in steps if type(other) is type(step)]

    def distance(other: CheckpointId) -> float:
        if isinstance(other, str) or isinstance(step, str):
            return -difflib.SequenceMatcher(a=f"{other}", b=f"{step}").ratio()
        return abs(other - step)

    near = f"; the nearest is {min(others, key=distance)}" if others else ""
    return f"Steps that can be loaded: {', '.join(map(str, steps[-10:])) or 'none'}{near}"
