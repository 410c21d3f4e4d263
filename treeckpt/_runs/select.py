"""Selects a checkpoint of a run: the newest complete one, or the best by a metric; logs what is skipped, and why.

By default a checkpoint is complete if its index decodes and every shard that it names has its size; only the index is
read for that. On request everything is read and compared with its checksums.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path

from .._core.format.files import is_step_name, step_of
from .._core.format.index import INDEX_NAME
from .._core.text import count_text
from .._io.storage.checkpoint import KnownIndex, NewestIndex
from .._io.storage.foreign_formats import describe_foreign
from .._io.storage.local_store import is_url
from ..errors import CheckpointNotFound, StoreError, TreeckptError
from ..policy import Best, best_of, unmeasured_text
from .checkpoint_info import CheckpointInfo, step_info, with_verification
from .run import RunDirectory
from .verification import (
    DamagedPart,
    VerificationStore,
    cache_directory,
    fingerprint_of,
    found_part,
    this_user,
    verify_folder,
)

_log = logging.getLogger("treeckpt")


class CheckpointSelector:
    """Selects checkpoints of a run. Each warning is logged once, to the logger `treeckpt`."""

    def __init__(self, run: RunDirectory) -> None:
        self.directory = run
        self._logged: set[tuple[str, str]] = set()
        self._read = NewestIndex()
        """Is offered every index that is read, a local one only by `choose`; what the cache has was offered before."""

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
        return [info for info in self._listed() if info.status == "complete"]

    def _listed(self, *, report_errors: bool = False) -> list[CheckpointInfo]:
        """Returns the checkpoints of the run; refuses the path of one checkpoint, which has none below it."""
        infos = self.directory.checkpoints(newest=self._read, report_errors=report_errors)
        run, url = self.directory.store, self.directory.url
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
        without: Container[int] = (),
        busy: Container[str] = (),
        passed_over: list[str] | None = None,
    ) -> CheckpointInfo | None:
        """Returns the newest complete checkpoint, None if there is none.

        Args:
            verify: reads everything and compares checksums.
            without: steps to leave out.
            busy: directories in which a save is known to be under way: no warning is logged for them.
            passed_over: gets the path of each corrupt checkpoint and link that is newer, or may be, with what is wrong.

        Raises:
            CheckpointNotFound: the directory is one checkpoint.
            StoreError: a checkpoint that may be newer could not be read, or with `verify` not compared: it may be good.
        """
        infos, found = self._listed(report_errors=True), None
        for info in infos:
            if info.status == "unread":
                expected, hint = (
                    "the newest checkpoint, or to know that it is not",
                    "No older one is taken in its place",
                )
                raise StoreError(info.path, expected=expected, found=info.error or "", hint=hint)
            if step_info(info).step in without:
                continue
            why = info.error or info.status if info.status != "complete" else ""
            if not why and verify:
                why = self._problem(info)
            if not why:
                found = info
                break
            if info.name not in busy:
                self.warn_once(info.path, f"passed over, {info.status}: {why}")
            if passed_over is not None and info.status != "partial":
                passed_over.append(f"{info.path}: {why}")
        for path, why in self._perhaps_newer(infos, found):
            self.warn_once(path, f"passed over, {why}")
            if passed_over is not None:
                passed_over.append(f"{path}: {why}")
        return found

    def _perhaps_newer(
        self, infos: Sequence[CheckpointInfo], found: CheckpointInfo | None
    ) -> Iterator[tuple[str, str]]:
        """Yields the path of each step that may have been saved after the one that was found, and why it is not known.

        These are steps whose index, which has the lineage, cannot be read, and links with a higher step.
        """
        step = step_info(found).step if found is not None else -1
        for info in infos[infos.index(found) + 1 :] if found is not None else ():
            if info.status in ("corrupt", "unread") and info.save_id is None:
                yield info.path, f"{info.status}, and perhaps saved after step {step}: {info.error}"
        for name in self.directory.store.linked_names():
            folder = self.directory.store.folder(name)
            followed = folder.traits.follow_links and folder.modified_ns() is not None
            if is_step_name(name) and (step_of(name) or 0) > step and not followed:
                yield folder.place, "a symbolic link, which is not followed"

    def _problem(self, info: CheckpointInfo) -> str:
        """Returns what is wrong with a checkpoint, as all of it shows; keeps damage beside it, for clean-ups to know.

        It is not read again where damage is known, and no file was written since.
        """
        folder, known = self.directory.store.folder(info.name), VerificationStore(cache_directory())
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

    def best(self, policy: Best) -> int | None:
        """Returns the step that is best by a policy's metric; None, and logs the metrics there are, if none has it.

        A step that a verification has found damaged counts for no policy; it is passed over, and logged.
        """
        complete = self.complete()
        steps = [step_info(info) for info in complete]
        infos = {one.step: info for one, info in zip(steps, complete, strict=True)}
        found, known = best_of(steps, policy), VerificationStore(cache_directory())
        if steps and not found:
            self.warn_once(self.directory.url, unmeasured_text(policy.metric, steps))
        for step in (one.step for one in found):
            info = infos[step]
            if not with_verification(info, self.directory.store.folder(info.name), known).damaged:
                return step
            self.warn_once(info.path, "passed over as the best, since a verification has found it damaged")
        return None

    def choose(self, step: int | None, tried: Collection[int], passed_over: list[str]) -> CheckpointInfo | None:
        """Returns the checkpoint to restore: that of `step`, or the newest that was not tried yet; None without any.

        Args:
            passed_over: as for `newest`.

        Raises:
            CheckpointNotFound: there is none of that step, only such as cannot be loaded, or something else.
            CheckpointError: the step is corrupt.
        """
        self._read.local = True
        if step is not None:
            try:
                return self.directory.checkpoint(step, newest=self._read)
            except CheckpointNotFound:
                self._listed()  # raises the error for the path of one checkpoint in place of this one
                raise
        found = self.newest(without=tried, passed_over=passed_over)
        if found is None and (foreign := describe_foreign(self.directory.url)) is not None:
            expected = "a run of checkpoints of treeckpt"
            raise CheckpointNotFound(self.directory.url, expected=expected, found=foreign[0], hint=foreign[1])
        if found is None and (tried or passed_over):
            raise CheckpointNotFound(
                self.directory.url,
                expected="a checkpoint to restore",
                found="only such as cannot be loaded",
                hint="See what treeckpt verify says of each",
            )
        return found

    def take_index(self, info: CheckpointInfo) -> KnownIndex | None:
        """Returns the index of a checkpoint if it was the newest of those read; forgets it."""
        found, self._read = self._read.found, NewestIndex()
        return found if found and (found.url, found.index.save_id) == (info.path, info.save_id) else None
