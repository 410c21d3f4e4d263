"""Keeps and lists the saves of a run that failed or were killed, also once their files are gone.

A failed save leaves timings with its error, a killed one its progress records. A later save or a clean-up deletes them.
So there is one small file for each such save in a hidden directory of the run, which no listing of a run shows: a
manager writes it when its save fails, and whoever deletes what a dead save left writes it before. A file is written
once and never changed; beyond `MAX_KEPT` the oldest are deleted. What could not be written is missing from the list:
a save or a clean-up neither fails nor waits for it.

A list joins these files with what is still in the directories of checkpoints, by save id. A save that was committed is
never in it. Of a failed save that no manager made, and that was to replace a checkpoint, a list knows once it is kept.
On the private disks of several hosts each has what was kept there.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Literal

import msgspec

from .._core.format.decoding import decode_json
from .._core.format.files import MAX_RECORDED_STEP, SavePhase, fraction_of, parse_file_name
from .._core.format.index import INDEX_NAME
from .._core.format.shard_header import MAX_NBYTES, MAX_WORLD, parse_shard_name
from .._core.format.timings import Timings
from .._core.text import bytes_text, count_text, seconds_text
from .._io.process import send_late
from .._io.storage.checkpoint import read_timings
from .._io.storage.deletions import GRACE, committed_save_id
from .._io.storage.store import DirectoryEntry, RunStore, Store, for_each
from ..errors import CheckpointExists, TreeckptError
from .active_saves import SaveUnderWay, saves_under_way
from .catalog import CheckpointInfo

DIRECTORY = ".failures"
"""The name of the directory in the run."""
MAX_KEPT = 200
"""Files in the directory, at most."""
MAX_READ = 2 * MAX_KEPT
"""Files that are read, at most."""
MAX_ERROR = 4000
"""Characters of an error that are kept."""
MAX_FILE = 64 << 10
"""Bytes of a file, at most."""
SHOWN_DAYS = 7.0
"""Days of a list, by default."""
DAY_NS = 86_400 * 10**9
_NAME = re.compile(r"failed\.([0-9a-f]{16})\.json")
_KINDS = ("shard", "sidecar", "timings", "progress")
"""The kinds of files that show that a save has been there."""


class SaveFailure(msgspec.Struct, frozen=True):
    """A save that was not committed."""

    save_id: str
    name: str
    """Name of the checkpoint's directory in the run."""
    step: int | None
    what: Literal["failed", "killed", "unfinished"]
    """failed: with an error; killed: the process that was to commit it ended; unfinished: it hangs, or was killed where
    that could not be seen."""
    began_ns: int | None
    """Unix time at which it began; None if not known."""
    ended_ns: int
    """Unix time at which it failed, or was last heard of."""
    world: int | None = None
    ranks: int = 0
    """The number of ranks of which a progress record was found."""
    phase: SavePhase | None = None
    written: int = 0
    planned: int = 0
    """Bytes that these ranks were to write; `written` is how many of them they had written."""
    error: str = ""
    """The error of a failed save, with rank and path."""

    @property
    def text(self) -> str:
        """What happened, as a sentence without the error."""
        ranks = f" on {count_text(self.world, 'rank')}" if self.world else ""
        took = f" after {seconds_text(max(0, self.ended_ns - self.began_ns) / 1e9)}" if self.began_ns else ""
        if self.what == "failed":
            return f"The save{ranks} failed{took}."
        happened = "was killed" if self.what == "killed" else "was killed, or hangs"
        if self.phase is None:
            return f"The save{ranks} {happened}; how far it had come is not known."
        far = f"{fraction_of(self.written, self.planned):.0%} of {bytes_text(self.planned)} written"
        of = f" by {self.ranks} of {count_text(self.world or self.ranks, 'rank')}, as far as they reported"
        return f"The save {happened}{took}: {far}{of}."


class Failures(msgspec.Struct, frozen=True):
    """The failed and killed saves of a run."""

    rows: tuple[SaveFailure, ...]
    """The last one first."""
    older: int = 0
    """How many are known that ended earlier than was asked for."""
    problem: str = ""
    """What could not be read; empty if nothing is missing for that reason."""

    def of_days(self, days: float, now_ns: int) -> Failures:
        """Returns those that ended in the last so many days."""
        rows = tuple(row for row in self.rows if row.ended_ns >= now_ns - days * DAY_NS)
        return Failures(rows, self.older + len(self.rows) - len(rows), self.problem)

    def none_text(self, days: float) -> str:
        """Says that no save of the last so many days is known."""
        text = f"No failed or killed save is known in the last {days:g} days"
        return f"{text}; {self.older} before." if self.older else f"{text}."


class FailureHistory:
    """The directory of failed and killed saves in a run. No method raises an error."""

    def __init__(self, run: RunStore) -> None:
        self._run = run
        self._unwritten: dict[str, SaveFailure] = {}

    def _folder(self) -> Store | None:
        """Returns the directory; None where a link is in its place."""
        folder = self._run.folder(DIRECTORY)
        return None if folder.is_link else folder

    def read(self, known: MutableMapping[str, SaveFailure] | None = None) -> tuple[list[SaveFailure], str]:
        """Returns what is kept, and what of it could not be read.

        Args:
            known: what was read before, by name of the file; it gets what is read.
        """
        known = {} if known is None else known
        try:
            if (folder := self._folder()) is None:
                return [], f"{DIRECTORY} is a link, which is not followed"
            entries = {name: e for name, e in folder.entries().items() if e.regular and _NAME.fullmatch(name)}
            # others may have put any number of files there
            names = _oldest_first(entries)[-MAX_READ:]
            new = [name for name in names if name not in known]
            for name, found in zip(new, for_each(folder, lambda name: _read(folder, name), new), strict=True):
                if found is not None:
                    known[name] = found
            for name in known.keys() - set(names):
                del known[name]
        except (TreeckptError, OSError) as error:
            return list(known.values()), f"{DIRECTORY} could not be read: {error}"
        unread = len(entries) - len(known)
        return list(known.values()), f"{count_text(unread, 'file')} of {DIRECTORY} could not be read" * (unread > 0)

    def keep(self, failures: Iterable[SaveFailure] = ()) -> None:
        """Writes a file for each of these that has none yet, and deletes the oldest beyond `MAX_KEPT`.

        What cannot be written, as the disk is full, is written by a later call.
        """
        found = {failure.save_id: failure for failure in (*list(self._unwritten.values()), *failures)}
        with contextlib.suppress(Exception):
            if not found or (folder := self._folder()) is None:
                return
            self._unwritten |= dict(list(found.items())[:MAX_KEPT])
            folder.prepare()
            for save_id, failure in found.items():
                with contextlib.suppress(CheckpointExists):  # another process has written it
                    folder.publish(f"failed.{save_id}.json", msgspec.json.encode(failure), replace=False)
                self._unwritten.pop(save_id, None)
            entries, now_ns = folder.entries(), time.time_ns()
            old = _oldest_first({name: entry for name, entry in entries.items() if _NAME.fullmatch(name)})[:-MAX_KEPT]
            # a process that is killed leaves a temporary file
            cut = (name for name in entries if name.startswith(".failed.") and name.endswith(".tmp"))
            for name in (*old, *(name for name in cut if now_ns - entries[name].modified_ns > GRACE * 1e9)):
                folder.delete(name)

    def keep_removed(self, folder: Store, names: Collection[str], *, committed: str = "") -> None:
        """Keeps what is known of dead saves whose files are about to be deleted from a checkpoint's directory.

        Args:
            names: the files to delete.
            committed: the id of a save that is known to have been committed.
        """
        with contextlib.suppress(Exception):
            self.keep(failures_in(folder, names, committed=committed))


def _oldest_first(entries: Mapping[str, DirectoryEntry]) -> list[str]:
    return sorted(entries, key=lambda name: (entries[name].modified_ns, name))


class SaveFailures(msgspec.Struct, frozen=True):
    """What one save of a manager reports its failure to, on rank 0."""

    history: FailureHistory
    folder: Store
    step: int | None

    def failed(self, save_id: str, world: int, began_ns: int, error: BaseException) -> None:
        """Keeps that the save has failed, unless its index is in place all the same."""
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        now_ns = time.time_ns()
        failure = SaveFailure(
            save_id, self.folder.name, self.step, "failed", began_ns=began_ns, ended_ns=now_ns, world=world, error=text
        )

        def keep() -> None:
            with contextlib.suppress(Exception):
                if committed_save_id(self.folder) != save_id:
                    self.history.keep([failure])

        # an object store that cannot be reached may be why it failed: its caller does not wait for it again
        if not self.folder.traits.far or send_late(self.folder.url, keep) is None:
            keep()

    def before_removal(self, folder: Store, names: Collection[str]) -> None:
        """Keeps what is known of dead saves whose files the save is about to delete."""
        self.history.keep_removed(folder, names)


def _read(folder: Store, name: str) -> SaveFailure | None:
    """Reads one file; None where it is gone or damaged."""
    with contextlib.suppress(TreeckptError, OSError, msgspec.MsgspecError, ValueError, RecursionError):
        found = decode_json(folder.read(name, limit=MAX_FILE), SaveFailure)
        numbers = (found.began_ns or 0, found.ended_ns, found.written, found.planned)
        sound = min(numbers) >= 0 and max(numbers) < MAX_NBYTES and abs(found.step or 0) <= MAX_RECORDED_STEP
        sound &= 0 <= found.ranks <= MAX_WORLD and 0 < (found.world or 1) <= MAX_WORLD
        if sound and name == f"failed.{found.save_id}.json":
            return found
    return None


def failures_in(folder: Store, names: Collection[str] | None = None, *, committed: str = "") -> list[SaveFailure]:
    """Finds the saves that have failed, were killed or hang by what they have left in a checkpoint's directory.

    Args:
        names: only saves of these files; by default of all.
        committed: the id of a save that is known to have been committed.

    Raises:
        OSError | StoreError: it could not be read.
    """

    def saves_of(files: Iterable[str], *kinds: str) -> dict[str, list[str]]:
        saves: dict[str, list[str]] = {}
        for name in files:
            if (owned := parse_file_name(name)) is not None and owned.kind in kinds and owned.save_id is not None:
                saves.setdefault(owned.save_id, []).append(name)
        return saves

    asked = saves_of(names, *_KINDS).keys() - {committed} if names is not None else None
    if asked is not None and not asked:
        return []
    entries = folder.entries()
    saves, known = saves_of(entries, *_KINDS), saves_of(entries, "deleted", "prepared").keys() | {committed}
    if INDEX_NAME in entries:
        known |= {committed_save_id(folder) or ""}
    wanted = {save_id: saves[save_id] for save_id in saves if save_id not in known and save_id in (asked or saves)}
    records = [name for found in wanted.values() for name in found]
    under_way = {save.save_id: save for save in saves_under_way(folder, records)}

    def describe(save_id: str) -> SaveFailure | None:
        files = wanted[save_id]
        timings = None
        with contextlib.suppress(TreeckptError, OSError):
            timings = read_timings(folder, save_id) if any(name.startswith("timings.") for name in files) else None
        newest_ns = max(entries[name].modified_ns for name in files)
        return _failure(folder.name, save_id, files, timings=timings, save=under_way.get(save_id), newest_ns=newest_ns)

    return [failure for failure in for_each(folder, describe, list(wanted)) if failure is not None]


def _failure(
    name: str,
    save_id: str,
    files: Sequence[str],
    *,
    timings: Timings | None,
    save: SaveUnderWay | None,
    newest_ns: int,
) -> SaveFailure | None:
    """Describes a save by what it has left; None if it is under way, or was committed and replaced since."""
    if timings is not None and timings.error:
        began_ns = min((span.start_ns for span in timings.spans), default=None)
        ended_ns = max((span.stop_ns for span in timings.spans), default=newest_ns)
        error = timings.error[:MAX_ERROR]
        found = SaveFailure(save_id, name, timings.step, "failed", began_ns, ended_ns)
        return msgspec.structs.replace(found, world=timings.world, error=error)
    if save is not None and save.state == "in_progress":
        return None
    if save is not None:
        return SaveFailure(
            save_id,
            name,
            save.step,
            "killed" if save.state == "killed" else "unfinished",
            began_ns=save.started_ns,
            ended_ns=max(save.heard_ns, save.updated_ns),
            world=save.world,
            ranks=save.ranks,
            phase=save.phase,
            written=save.written,
            planned=save.planned,
        )
    # timings without an error and without a record are those of a save that had ended well
    if any(file.startswith("timings.") for file in files):
        return None
    world = next((parsed[2] for file in files if (parsed := parse_shard_name(file)) is not None), None)
    return SaveFailure(save_id, name, None, "unfinished", None, ended_ns=newest_ns, world=world)


def failures_of(
    run: RunStore,
    infos: Sequence[CheckpointInfo],
    *,
    known: MutableMapping[str, SaveFailure] | None = None,
) -> Failures:
    """Lists the failed and killed saves of a run, the last one first.

    Args:
        infos: the checkpoints of the run.
        known: as for `FailureHistory.read`.
    """
    kept, problem = FailureHistory(run).read(known)
    found: dict[str, SaveFailure] = {}
    for info in infos:
        dead = any(save.state != "in_progress" for save in info.saving)
        if dead or (info.files == "partial" and not info.deleting):
            try:
                found |= {failure.save_id: failure for failure in failures_in(run.folder(info.name))}
            except (TreeckptError, OSError) as error:
                problem = problem or f"{info.name} could not be read: {error}"
    found |= {failure.save_id: failure for failure in kept}
    committed = {info.save_id for info in infos if info.files in ("complete", "damaged")}
    rows = sorted(
        (failure for failure in found.values() if failure.save_id not in committed),
        key=lambda failure: (-failure.ended_ns, failure.save_id),
    )
    return Failures(tuple(rows), problem=problem)
