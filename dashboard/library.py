"""Which runs and checkpoints may be asked for, and how to get at what they hold.

Clients know runs and checkpoints by ids made here from what a scan found; no path, and no part of one, ever comes from
a request. Lists are kept up by `watch`, indexes are browsed from tables (`reading`), and nothing is held in memory that
grows with a checkpoint.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec

from treeckpt.core.analysis.outline import Outline
from treeckpt.core.analysis.retention_policy import Policy
from treeckpt.core.analysis.timing_report import TimingReport
from treeckpt.core.format.file_names import step_of
from treeckpt.core.format.index import INDEX_NAME
from treeckpt.core.format.timings import Timings, timings_name
from treeckpt.core.text import visible
from treeckpt.errors import CheckpointNotFound
from treeckpt.io.storage.open import open_run
from treeckpt.io.storage.run_store import DirectoryEntry, Folder, LocalFolder, RunStore
from treeckpt.runs import catalog
from treeckpt.runs.catalog import CheckpointInfo, LruStatCache

from .cache import Cache
from .reading import StillReading, TableReader, is_large
from .watch import Known, Watch

__all__ = ["Library", "Missing", "ReadingInfo", "Run"]

T = TypeVar("T")


class Missing(Exception):
    """Nothing is known under the id, or not the part of it that was asked for."""


class ReadingInfo(CheckpointInfo, frozen=True):
    """A directory whose large index is being read for the first time: what it is, is not known yet."""


class Run(msgspec.Struct, frozen=True, eq=False):
    """A run that the dashboard was given."""

    id: str
    name: str
    path: Path
    """What it is called; a path where it is local."""
    store: RunStore
    place: str
    """By which another process opens it; empty for a local one, whose folders are opened by their paths."""


class _Single:
    """A checkpoint that was given by itself, as a run of one. Links on the way to it are followed."""

    def __init__(self, path: Path) -> None:
        self.url, self._path = str(path), path

    def names(self) -> list[str]:
        return [self._path.name] if self._path.is_dir() else []

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self._path)


def _unread(folder: Folder) -> ReadingInfo:
    text = "its index is being read for the first time"
    return ReadingInfo(folder.name, folder.url, "partial", step_of(folder.name), error=text)


def _id(*parts: str) -> str:
    text = "\0".join(parts).encode("utf-8", "surrogateescape")
    return hashlib.blake2s(text, digest_size=6).hexdigest()


def _run(given: str | Path | RunStore) -> Run:
    if not isinstance(given, (str, Path)) or "://" in str(given):
        store = open_run(given) if not isinstance(given, Path) else open_run(str(given))
        name = store.url.rstrip("/").rpartition("/")[2] or store.url
        return Run(_id(store.url), visible(name), Path(store.url), store, store.url)
    path = Path(given).absolute()
    store = _Single(path) if catalog.is_checkpoint(path) else open_run(path)
    return Run(_id(str(path)), visible(path.name or str(path)), path, store, "")


class Library:
    """Runs by id, checkpoints by id, and what is in them.

    Args:
        paths: of runs, or of checkpoints by themselves; URLs and stores of runs too.
        clock: seconds, never going back.
        cache: what was worked out before; None takes the user's own.
        policies: what the runs are kept by, if that is known.
    """

    def __init__(
        self,
        paths: Sequence[str | Path | RunStore],
        *,
        clock: Callable[[], float] = time.monotonic,
        cache: Cache | None = None,
        policies: Sequence[Policy] = (),
    ) -> None:
        found = [_run(path) for path in paths]
        self.runs = tuple({run.id: run for run in found}.values())
        self.cache = cache or Cache()
        self.policies = tuple(policies)
        self._reader = TableReader(self.cache)
        self._timings = LruStatCache(6)
        self._studies = LruStatCache(6)
        self.watches = {run.id: self._watch(run, clock) for run in self.runs}
        self._known: dict[str, tuple[Run, str]] = {}
        self._lists: dict[str, tuple[list[CheckpointInfo], list[tuple[str, CheckpointInfo]]]] = {}

    def _watch(self, run: Run, clock: Callable[[], float]) -> Watch:
        return Watch(run.store, lambda name: self._look(run, name), clock=clock, settled=self.cache.flush)

    def _look(self, run: Run, name: str) -> Known:
        """What a directory is now; a large index that was not read yet is given to another process."""
        folder = run.store.folder(name)
        self._known[_id(str(run.path), name)] = (run, name)
        modified = folder.modified_ns()
        try:
            info = catalog.read_info_or_corrupt(folder, cache=_Reads(self, run), follow=isinstance(run.store, _Single))
            return Known(info, modified)
        except StillReading:
            return Known(_unread(folder), None)
        except OSError as error:  # of a mounted or remote store, say
            return Known(CheckpointInfo(name, folder.url, "foreign", step_of(name), error=f"{error}"), None)

    def run(self, run_id: str) -> Run:
        """The run of an id.

        Raises:
            Missing: there is none.
        """
        for run in self.runs:
            if run.id == run_id:
                return run
        raise Missing("There is no such run here.")

    def checkpoints(self, run: Run, *, wait: float = 0.0) -> list[tuple[str, CheckpointInfo]]:
        """A run's checkpoints with their ids, newest first: those seen so far, see `Watch.progress`."""
        watch = self.watches[run.id]
        watch.refresh(wait=wait)
        watch.see([info.name for info in watch.infos if isinstance(info, ReadingInfo)])
        infos, kept = watch.infos, self._lists.get(run.id)
        if kept is None or kept[0] is not infos:
            kept = self._lists[run.id] = (infos, [(self.id_of(run, info), info) for info in infos])
        return kept[1]

    @staticmethod
    def id_of(run: Run, info: CheckpointInfo) -> str:
        """The id of a checkpoint of a run."""
        return _id(str(run.path), info.name)

    def checkpoint(self, checkpoint_id: str) -> tuple[Run, CheckpointInfo]:
        """The checkpoint of an id, as it is now.

        Raises:
            Missing: there is none.
            StillReading: its index is being read for the first time.
        """
        if checkpoint_id not in self._known:
            self._find(checkpoint_id)
        if checkpoint_id not in self._known:
            raise Missing("There is no such checkpoint here; it may have been removed.")
        run, name = self._known[checkpoint_id]
        folder = run.store.folder(name)
        if folder.modified_ns() is None:
            raise Missing("This checkpoint is gone.")
        info = catalog.read_info_or_corrupt(folder, cache=_Reads(self, run), follow=isinstance(run.store, _Single))
        listed = next((one for one in self.watches[run.id].infos if one.name == info.name), info)
        if listed.save_id == info.save_id:  # its place among the others is known from the list alone
            info = msgspec.structs.replace(info, sequence=listed.sequence, abandoned=listed.abandoned)
        return run, info

    def _find(self, checkpoint_id: str) -> None:
        """Looks for an id among names that were not looked at yet: an address may be older than this server."""
        for run in self.runs:
            for name in run.store.names():
                found = _id(str(run.path), name)
                if found == checkpoint_id:
                    self._known[found] = (run, name)

    def unread(self, url: str) -> tuple[str, Run, CheckpointInfo]:
        """The checkpoint in a folder whose index is still being read, and what is known of it without that.

        Raises:
            Missing: there is none.
        """
        for checkpoint_id, (run, name) in list(self._known.items()):
            if PurePath(url).name == name and (folder := run.store.folder(name)).url == url:
                return checkpoint_id, run, _unread(folder)
        raise Missing("This checkpoint is gone.")

    def _place(self, info: CheckpointInfo) -> tuple[Run | None, Folder]:
        for run in self.runs:
            if (folder := run.store.folder(info.name)).url == info.path:
                return run, folder
        return None, LocalFolder(info.path)

    def outline(self, info: CheckpointInfo) -> Outline:
        """The tree of a checkpoint.

        Raises:
            StillReading: it is being read for the first time.
            CheckpointError: the index is not to be read.
        """
        run, folder = self._place(info)
        entry = folder.entries().get(INDEX_NAME)
        if entry is None:
            raise CheckpointNotFound(visible(folder.url), expected=f"a checkpoint ({INDEX_NAME})", found="none")
        found: Any = self._reader.outline(run.place if run else "", folder, entry)
        return found

    def timings(self, info: CheckpointInfo) -> Timings:
        """The timings of a checkpoint.

        Raises:
            CheckpointError: there are none, or not to be read.
        """
        _, folder = self._place(info)
        save_id = info.save_id if info.leaves is not None else None
        if save_id is None:
            return catalog.read_timings(folder)
        entry = folder.entries().get(timings_name(save_id), DirectoryEntry(-1, 0))
        return self._timings.get_or_read(
            (folder.url, save_id), entry, lambda: catalog.read_timings(folder, save_id=save_id)
        )

    @staticmethod
    def is_run(run: Run) -> bool:
        """Whether it is a run, not a checkpoint by itself."""
        return not isinstance(run.store, _Single)

    def remembering(self, run: Run) -> catalog.StatCache:
        """What a look at a run's directories remembers by."""
        return _Reads(self, run)

    def close(self) -> None:
        """Ends what is being read, and writes the cache out."""
        self._reader.close()
        self.cache.close()

    def summary(self, run: Run, url: str, entry: DirectoryEntry) -> catalog.Summary:
        """The summary of a large index, from its table.

        Args:
            url: of its folder.

        Raises:
            StillReading: it is being read for the first time.
            CheckpointError: it is not to be read.
        """
        return self._reader.outline(run.place, run.store.folder(PurePath(url).name), entry).summary

    def study(self, info: CheckpointInfo) -> TimingReport:
        """The timings of a checkpoint, with what follows from them.

        Raises:
            CheckpointError: there are none, or not to be read.
        """
        _, folder = self._place(info)
        if info.save_id is None or info.leaves is None:
            return TimingReport(catalog.read_timings(folder))
        entry = folder.entries().get(timings_name(info.save_id), DirectoryEntry(-1, 0))
        return self._studies.get_or_read((folder.url, info.save_id), entry, lambda: TimingReport(self.timings(info)))


class _Reads:
    """What `catalog` remembers by: a large index is never decoded by the server itself."""

    def __init__(self, library: Library, run: Run) -> None:
        self._library, self._run = library, run

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        cache = self._library.cache
        if key[1] != "summary" or not is_large(entry) or not entry.regular:
            return cache.get_or_read(key, entry, read)
        summary: Any = lambda: self._library.summary(self._run, key[0], entry)  # noqa: E731
        return cache.get_or_read(key, entry, summary)
