"""Which runs and checkpoints clients may request, and access to what they hold.

Clients know runs and checkpoints by ids that are computed here from what a scan found: neither a path nor a part of one
ever comes from a request. `watch` keeps the lists up to date, trees are read from files (`index_reader`), and nothing
in memory grows with the size of a checkpoint.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar, cast

import msgspec

from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.timings import timings_name
from treeckpt._inspect.outline import Outline
from treeckpt._inspect.timing_report import TimingReport
from treeckpt._io.storage.checkpoint import LruStatCache, StatCache
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.open import open_run
from treeckpt._io.storage.store import DirectoryEntry, RunStore, Store
from treeckpt._runs import catalog, discovery
from treeckpt._runs.catalog import CheckpointInfo, Status, with_named_step, with_verification
from treeckpt._runs.reduced_timings import ReducedTimings, read_reduced
from treeckpt._threads import call_in_thread
from treeckpt.errors import CheckpointNotFound, StoreError, TreeckptError, visible
from treeckpt.policy import Policy

from .cache import Cache
from .foreign_trees import (
    ForeignFile,
    ForeignInfo,
    RunWithFiles,
    foreign_store,
    foreign_version,
    is_foreign,
    look_at_foreign,
)
from .index_reader import IndexReader, StillReading, is_large
from .watch import FRESH_MULTIPLE, DirectoryState, RunWatcher

S = TypeVar("S")
K = TypeVar("K")
T = TypeVar("T")
LOOK_SECONDS = 2.0
"""Seconds after which the folders of runs are looked at again, at least."""
Listed = Sequence[tuple[str, CheckpointInfo]]
"""Checkpoints with their ids."""


class LastResult(Generic[S, T]):
    """The last result of a function of a list; it is valid until another list replaces this one."""

    def __init__(self) -> None:
        self._pair: tuple[S, T] | None = None

    def of(self, listed: S, compute: Callable[[S], T]) -> T:
        """Returns the result for a list; computes it for another list than that of the last call."""
        pair = self._pair
        if pair is None or pair[0] is not listed:
            pair = self._pair = (listed, compute(listed))
        return pair[1]


class LastResults(Generic[S, K, T]):
    """The last results of a function of a list and of what is asked of it; another list replaces all of them.

    Args:
        most: results that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._last = most, LastResult[S, dict[K, T]]()

    def of(self, listed: S, asked: K, compute: Callable[[], T]) -> T:
        """Returns a result for a list; computes it unless it is kept."""
        results = self._last.of(listed, lambda _: {})
        if asked not in results:
            if len(results) >= self._most:
                results.clear()
            results[asked] = result = compute()
            return result
        return results[asked]


class NotFound(Exception):
    """Nothing is known under an id, or not the part of it that was requested."""


class UnreadInfo(CheckpointInfo, frozen=True):
    """A directory whose large index is being read for the first time."""

    @property
    def status(self) -> Status:
        """Nothing else is known yet."""
        return "reading"


def _names_of_unread(infos: list[CheckpointInfo]) -> list[str]:
    return [info.name for info in infos if isinstance(info, UnreadInfo)]


class Run(msgspec.Struct, frozen=True, eq=False):
    """A run that the dashboard was given."""

    id: str
    name: str
    path: Path
    """The directory, or the URL of a remote run as a path."""
    store: RunStore
    url: str
    """The URL with which another process opens it; empty for a local run, whose folders are opened by path."""
    single: bool = False
    """Whether it is one checkpoint that was given by itself."""


class OpenCheckpoint(msgspec.Struct, frozen=True, eq=False):
    """A checkpoint as one look at its directory found it: a request looks once, and hands this down."""

    id: str
    run: Run
    folder: Store
    info: CheckpointInfo


class _SingleCheckpoint(RunStore):
    """A checkpoint that was given by itself, as a run of one. Symbolic links to it are followed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def url(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        return [self._path.name] if self._path.exists() else []

    def folder(self, name: str) -> LocalStore:
        return ForeignFile(self._path) if self._path.is_file() else LocalStore(self._path)


def _unread(folder: Store) -> UnreadInfo:
    text = "its index is being read for the first time"
    return cast(UnreadInfo, with_named_step(UnreadInfo(folder.name, folder.place, "partial", error=text), ()))


def _id(*parts: str) -> str:
    text = "\0".join(parts).encode("utf-8", "surrogateescape")
    return hashlib.blake2s(text, digest_size=6).hexdigest()


def _run(given: str | Path | RunStore, *, has_steps: bool = False) -> Run:
    """Returns the run of a path, a URL or a store.

    Args:
        has_steps: whether steps were found in it: then its index alone makes it one checkpoint, and it is not listed.
    """
    if not isinstance(given, (str, Path)) or "://" in str(given):
        store = open_run(given) if not isinstance(given, Path) else open_run(str(given))
        name = store.url.rstrip("/").rpartition("/")[2] or store.url
        return Run(_id(store.url), visible(name), Path(store.url), store, store.url)
    path = Path(given).absolute()
    single = (path / INDEX_NAME).exists() if has_steps else discovery.is_checkpoint(path) or is_foreign(path)
    store = _SingleCheckpoint(path) if single else RunWithFiles(path)
    return Run(_id(str(path)), visible(path.name or str(path)), path, store, "", single)


def _with_own_names(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Returns the runs with names of which no two are equal: with as many of their parent directories as that takes."""
    parts = {run.id: [part for part in PurePath(str(run.path)).parts if part != "/"] for run in runs}
    names = {run.id: run.name for run in runs}
    for count in range(2, max(map(len, parts.values()), default=0) + 1):
        shared = {name for name, times in Counter(names.values()).items() if times > 1}
        if not shared:
            break
        names = {
            run_id: visible("/".join(parts[run_id][-count:])) if name in shared else name
            for run_id, name in names.items()
        }
    return tuple(msgspec.structs.replace(run, name=names[run.id]) for run in runs)


class Library:
    """Runs by id, checkpoints by id, and what they hold.

    Args:
        paths: directories of runs, of folders of runs or of single checkpoints, URLs of runs or of folders of runs, or
            stores of runs. A folder of runs is one whose folders have steps, while it has none itself.
        clock: a monotonic clock in seconds.
        cache: results of earlier reads; None takes the user's own cache directory.
        policies: the retention policies of the runs, if they are known.
    """

    def __init__(
        self,
        paths: Sequence[str | Path | RunStore],
        *,
        clock: Callable[[], float] = time.monotonic,
        cache: Cache | None = None,
        policies: Sequence[Policy] = (),
    ) -> None:
        self.cache = cache or Cache()
        self.policies = tuple(policies)
        self._clock = clock
        self._reader = IndexReader(self.cache)
        self._studies = LruStatCache(6)
        self._indexes = LruStatCache(1000)
        """Of runs in folders of runs, what shows how they name steps."""
        self.watches: dict[str, RunWatcher] = {}
        self._given = [(_run(path), isinstance(path, (str, Path))) for path in paths]
        """What was given, and whether it may be a folder of runs."""
        self._inside: dict[str, list[Run]] = {}
        """The runs of each folder of runs that was given."""
        self._looking = threading.Lock()
        self._next_look = clock() + LOOK_SECONDS * all(not run.store.traits.far for run, _ in self._given)
        self._reduced: dict[str, dict[str, ReducedTimings]] = defaultdict(dict)
        self._unread = defaultdict[str, LastResult[list[CheckpointInfo], list[str]]](LastResult)
        self._lists = defaultdict[str, LastResult[list[CheckpointInfo], Listed]](LastResult)
        self._by_run: tuple[dict[str, Any], ...] = (self.watches, self._reduced, self._unread, self._lists)
        """What is kept of each run, by its id."""
        self._runs: tuple[Run, ...] = ()
        self._ids: frozenset[str] = frozenset()
        self._look_for_runs([run for run, _ in self._given if not run.store.traits.far])
        self._directories: dict[str, tuple[Run, str]] = {}
        self._verified = -1
        """The version of the cache's verifications that the lists show."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs that were given, and those in folders of runs that were given, which another thread looks for."""
        if self._clock() >= self._next_look and self._looking.acquire(blocking=False):
            call_in_thread(self._look_again, "treeckpt-folders")
        return self._runs

    @property
    def has_folders(self) -> bool:
        """Whether a folder of runs was given, in which others may appear."""
        return any(self._inside.values())

    def _look_again(self) -> None:
        began = time.monotonic()
        try:
            self._look_for_runs([run for run, _ in self._given])
        finally:
            took = time.monotonic() - began
            self._next_look = self._clock() + max(LOOK_SECONDS, FRESH_MULTIPLE * took)
            self._looking.release()

    def _look_for_runs(self, given: Sequence[Run]) -> None:
        """Finds out which of these are folders of runs, by the rule of `treeckpt ls`, and takes the runs in them."""
        folders = {run.id for run, may_be in self._given if may_be and not run.single}
        for run in given:
            watch = self.watches.get(run.id)
            if run.id not in folders or (watch and any(info.files != "foreign" for info in watch.infos)):
                continue
            try:
                inside = discovery.run_places(open_run(run.url or str(run.path)), self._indexes)
            except (OSError, TreeckptError):  # the page of the run says why; what was found before stays
                continue
            known = {one.store.url: one for one in self._inside.get(run.id, ())}
            self._inside[run.id] = [known.get(place) or _run(place, has_steps=True) for place in sorted(inside)]
        runs = [one for run, _ in self._given for one in self._inside.get(run.id) or [run]]
        self._ids = frozenset(run.id for run in runs)
        for run in runs:
            self.watch(run)
        for run_id in set[str]().union(*self._by_run) - self._ids:
            self._forget_run(run_id)
        self._runs = _with_own_names(tuple({run.id: run for run in runs}.values()))

    def _forget_run(self, run_id: str) -> None:
        """Keeps nothing of a run that is gone: it is no longer in `_ids`."""
        for kept in self._by_run:
            kept.pop(run_id, None)

    def watch(self, run: Run) -> RunWatcher:
        """Returns what keeps the list of a run up to date."""
        if (found := self.watches.get(run.id)) is None:
            inspect = partial(self.inspect_directory, run)
            made = RunWatcher(run.store, inspect, clock=self._clock, on_scanned=self.cache.flush)
            # a request that goes on with a run that is gone has one for itself
            found = self.watches.setdefault(run.id, made) if run.id in self._ids else made
        return found

    def inspect_directory(self, run: Run, folder: Store) -> DirectoryState:
        """Returns what a directory is; a large index that was not read before is given to another process."""
        name = folder.name
        self._directories[_id(str(run.path), name)] = (run, name)
        try:
            modified = folder.modified_ns()
            return DirectoryState(info := self._look(run, folder), None if info.status == "unread" else modified)
        except StillReading:
            return DirectoryState(_unread(folder), None, folder)
        except (OSError, StoreError) as error:  # of a mounted or remote store
            problem = f"it could not be read: {error}"
            info = with_named_step(CheckpointInfo(name, folder.place, "unread", error=problem), ())
            return DirectoryState(info, None)

    def _look(self, run: Run, folder: Store) -> CheckpointInfo:
        cache, follow = self.summary_cache(run), not self.is_run(run)
        info = catalog.read_info(folder, cache=cache, follow=follow, or_unread=True)
        if info.status == "foreign" and (not folder.is_link or not self.is_run(run)):
            return look_at_foreign(folder, info, run.path if self.is_run(run) else None)
        return with_verification(info, folder, self.cache.verifications)

    def run(self, run_id: str) -> Run:
        """Returns the run of an id.

        Raises:
            NotFound: there is none.
        """
        for run in self.runs:
            if run.id == run_id:
                return run
        raise NotFound("There is no such run here.")

    def start_scans(self, runs: Sequence[Run]) -> None:
        """Scans all these runs at the same time, before a page asks for the checkpoints of one after the other."""
        for run in runs:
            self.watch(run).start()

    def checkpoints(self, run: Run, *, wait: float = 0.0) -> Listed:
        """Returns the checkpoints of a run found so far with their ids, newest first; see `RunWatcher.progress`."""
        watch = self.watch(run)
        self._take_verifications()
        watch.refresh(wait=wait)
        # Their indexes may be read by now.
        watch.inspect(self._unread[run.id].of(watch.infos, _names_of_unread))
        listed = self._lists[run.id].of(watch.infos, partial(self._with_ids, run))
        if run.id not in self._ids:  # this request goes on with a run that is gone
            self._forget_run(run.id)
        return listed

    def _with_ids(self, run: Run, infos: list[CheckpointInfo]) -> Listed:
        self._forget_directories()
        if len(reduced := self._reduced[run.id]) > 2 * len(infos) + 1000:  # most are of checkpoints that are gone
            reduced.clear()
        return [(_id(str(run.path), info.name), info) for info in infos]

    def _forget_directories(self) -> None:
        """Forgets the ids of directories that are gone, once these are most of them."""
        watches = self.watches.copy()
        if len(self._directories) > 2 * sum(len(watch.names) for watch in watches.values()) + 1000:
            there = {run_id: set(watch.names) for run_id, watch in watches.items()}
            self._directories = {
                checkpoint_id: (run, name)
                for checkpoint_id, (run, name) in self._directories.copy().items()
                if name in there.get(run.id, ())
            }

    def _take_verifications(self) -> None:
        """Inspects the checkpoints that were verified since the last call, by this program or by another one."""
        verifications = self.cache.verifications
        if (version := verifications.version) == self._verified:
            return
        self._verified = version
        for run in self.runs:
            infos = [info for info in self.watch(run).infos if info.files == "complete"]
            changed = [
                info.name
                for info in infos
                if with_verification(info, run.store.folder(info.name), verifications) != info
            ]
            self.watch(run).inspect(changed)

    def checkpoint(self, checkpoint_id: str) -> OpenCheckpoint:
        """Looks at the directory of a checkpoint.

        Raises:
            NotFound: there is none.
            StillReading: its index is being read for the first time.
        """
        if checkpoint_id not in self._directories:  # a link may be older than this server
            names = ((run, name) for run in self.runs for name in run.store.names())
            self._directories.update({_id(str(run.path), name): (run, name) for run, name in names})
        if checkpoint_id not in self._directories:
            raise NotFound("There is no such checkpoint here; it may have been removed.")
        run, name = self._directories[checkpoint_id]
        folder = run.store.folder(name).listed()
        if folder.modified_ns() is None:
            raise NotFound("This checkpoint is gone.")
        info = self._look(run, folder)
        listed = next((one for one in self.watch(run).infos if one.name == info.name), info)
        if listed.save_id == info.save_id:  # its place among the others is known from the list only
            info = msgspec.structs.replace(info, sequence=listed.sequence, abandoned=listed.abandoned)
        return OpenCheckpoint(checkpoint_id, run, folder, info)

    def listed(self, checkpoint_id: str, run: Run, info: CheckpointInfo) -> OpenCheckpoint:
        """Returns a checkpoint of a list as the list has it."""
        return OpenCheckpoint(checkpoint_id, run, run.store.folder(info.name), info)

    def unread(self, url: str) -> tuple[str, Run, CheckpointInfo]:
        """Returns the checkpoint in a folder whose index is still being read, with what is known without the index.

        Raises:
            NotFound: there is none.
        """
        for checkpoint_id, (run, name) in list(self._directories.items()):
            if PurePath(url).name == name and (folder := run.store.folder(name)).place == url:
                return checkpoint_id, run, _unread(folder)
        raise NotFound("This checkpoint is gone.")

    def outline(self, checkpoint: OpenCheckpoint) -> Outline:
        """Returns the tree of a checkpoint.

        Raises:
            StillReading: its index, or the files of another program, are being read for the first time.
            CheckpointError: the index, or the files of another program, cannot be read.
        """
        info, folder = checkpoint.info, checkpoint.folder
        if isinstance(info, ForeignInfo):
            return self._reader.foreign_outline(info.path, foreign_version(info))
        entry = folder.entries().get(INDEX_NAME)
        if entry is None:
            raise CheckpointNotFound(visible(folder.place), expected=f"a checkpoint ({INDEX_NAME})", found="none")
        return self._reader.outline(checkpoint.run.url, folder, entry)

    def store(self, checkpoint: OpenCheckpoint) -> Store:
        """Returns the store of the files of a checkpoint.

        Raises:
            CheckpointError: another program wrote it, and it is gone.
        """
        info = checkpoint.info
        return foreign_store(info) if isinstance(info, ForeignInfo) else checkpoint.folder

    def study(self, checkpoint: OpenCheckpoint) -> TimingReport:
        """Returns the timings of a checkpoint, with what is computed from them.

        Raises:
            CheckpointError: there are none, or they cannot be read.
        """
        info, folder = checkpoint.info, checkpoint.folder
        if info.save_id is None or info.leaves is None:
            return TimingReport(catalog.read_timings(folder))
        entry = folder.entries().get(timings_name(info.save_id), DirectoryEntry(-1, 0))
        key = (folder.place, info.save_id)
        return self._studies.get_or_read(
            key, entry, lambda: TimingReport(catalog.read_timings(folder, save_id=info.save_id))
        )

    @staticmethod
    def is_run(run: Run) -> bool:
        """Whether it is a run, and not a checkpoint that was given by itself."""
        return not run.single

    def summary_cache(self, run: Run) -> StatCache:
        """Returns the cache with which `catalog` inspects directories of a run."""
        return _SummaryCache(self.cache, self._reader, run, self._reduced[run.id])

    def reduced_timings(self, run: Run, info: CheckpointInfo) -> ReducedTimings | None:
        """Returns the reduced timings of a listed checkpoint; None if it has none that can be read."""
        if info.save_id is None or info.seconds is None:
            return None
        reduced = self._reduced[run.id]
        if info.save_id not in reduced:  # it was dropped: the cache still has it
            self._look(run, run.store.folder(info.name).listed())
        return reduced.get(info.save_id)

    def close(self) -> None:
        """Ends the processes that read indexes, and writes the cache."""
        self._reader.close()
        self.cache.close()


class _SummaryCache:
    """The cache that `catalog` uses. A large index is never decoded in the server: its summary is in its file.

    Timings are not only read for the duration of the save: they are reduced, and put into `reduced` by save id.
    """

    def __init__(self, cache: Cache, reader: IndexReader, run: Run, reduced: dict[str, ReducedTimings]) -> None:
        self._cache, self._reader, self._run, self._reduced = cache, reader, run, reduced

    def get_or_read(self, key: tuple[str, str], entry: DirectoryEntry, read: Callable[[], T]) -> T:
        if key[1] == "took":
            url, _, name = key[0].rpartition("/")
            from_file: Any = partial(read_reduced, self._run.store.folder(PurePath(url).name), name)
            timings: Any = self._cache.get_or_read(key, entry, from_file)
            self._reduced[name.split(".")[1]] = timings
            return timings
        if key[1] != "summary" or not is_large(entry) or not entry.regular:
            return self._cache.get_or_read(key, entry, read)
        from_outline: Any = partial(self._read_summary, key[0], entry)
        return self._cache.get_or_read(key, entry, from_outline)

    def _read_summary(self, url: str, entry: DirectoryEntry) -> catalog.Summary:
        folder = self._run.store.folder(PurePath(url).name)
        return self._reader.outline(self._run.url, folder, entry).summary
