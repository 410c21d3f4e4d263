"""Which checkpoints are in a run directory, and in what state is each of them?

`look` reads one directory's index and timings, and compares the shards' sizes with what the index says; `scan` looks at
every directory of a run. What cannot be read is reported as what it is, never raised: other programs' directories,
saves that never finished, indexes that do not decode. Links are not followed. No shard is opened; that is `verify`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from .core.errors import CheckpointNotFound, CorruptError, TreeckptError
from .core.events import Timings
from .core.index import INDEX_NAME
from .core.profile import profile_of
from .core.progress import parse_progress_name
from .core.records import Index
from .core.shard import parse_shard_name
from .core.wording import visible
from .io import codec
from .io.store import LocalStore

__all__ = [
    "CheckpointInfo",
    "FileCache",
    "Status",
    "is_checkpoint",
    "look",
    "read_index",
    "read_timings",
    "scan",
    "step_of",
]

Status = Literal["complete", "partial", "corrupt", "foreign"]

_STEP = re.compile(r"step_(\d{1,18})")
_TIMINGS = re.compile(r"timings\.([0-9a-f]{16})\.json")
T = TypeVar("T")
Files = dict[str, os.stat_result]
"""The regular files of a directory."""


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One directory of a run."""

    name: str
    path: str
    status: Status
    """complete; partial: shards but no index; corrupt: the index does not decode, or shards are missing or cut short;
    foreign: something else."""
    step: int | None = None
    save_id: str | None = None
    world: int | None = None
    leaves: int | None = None
    nbytes: int | None = None
    """Of the arrays, each byte once; of the shards found, for a partial one."""
    created_ns: int | None = None
    seconds: float | None = None
    """From the first rank's start of the save to the end of the last one's."""
    error: str | None = None


class _Summary(msgspec.Struct, frozen=True):
    """What a list of checkpoints needs of an index."""

    save_id: str
    step: int | None
    world: int
    leaves: int
    nbytes: int
    created_ns: int
    sizes: tuple[tuple[str, int], ...]
    """Every shard and its size as a file."""


class FileCache:
    """What was last made of files, for as long as their identity, time and size stay the same.

    Args:
        entries: the least recently used is dropped beyond this number.
    """

    def __init__(self, entries: int = 4096) -> None:
        self._entries = entries
        self._found: OrderedDict[tuple[str, str], tuple[tuple[int, ...], Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, read: Callable[[Path], T]) -> T:
        """`read(path)`, or its result or error from before."""
        try:
            found = path.stat(follow_symlinks=False)
        except OSError:
            return read(path)
        key, stamp = (str(path), read.__qualname__), (found.st_mtime_ns, found.st_size, found.st_ino)
        with self._lock:
            kept = self._found.get(key)
            if kept is not None and kept[0] == stamp:
                self._found.move_to_end(key)
                return _result(kept[1])
        try:
            result: T | TreeckptError = read(path)
        except TreeckptError as error:
            result = error
        with self._lock:
            self._found[key] = (stamp, result)
            while len(self._found) > self._entries:
                self._found.popitem(last=False)
        return _result(result)


def _result(kept: Any) -> Any:
    if isinstance(kept, TreeckptError):
        raise kept.with_traceback(None)
    return kept


def read_index(path: str | os.PathLike[str]) -> Index:
    """The index of a checkpoint's directory.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointError: it cannot be read, or is no index.
    """
    return codec.read_index(LocalStore(path))


def read_timings(path: str | os.PathLike[str]) -> Timings:
    """The timing record of a checkpoint: of the save that its index names, else of the newest save that left one.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointError: it cannot be read.
    """
    directory = Path(path)
    save_id = None
    with contextlib.suppress(TreeckptError):
        save_id = read_index(directory).save_id
    return _read_timings(_timings_file(directory, _files(directory), save_id))


def _timings_file(directory: Path, files: Files, save_id: str | None) -> Path:
    names = [name for name in files if (m := _TIMINGS.fullmatch(name)) and save_id in (None, m[1])]
    if not names:
        raise CheckpointNotFound(
            visible(str(directory)),
            expected="the timings of a save",
            found="none",
            hint="They are a record beside the checkpoint; without them it is still complete",
        )
    return directory / max(names, key=lambda name: (files[name].st_mtime_ns, name))


def _read_timings(path: Path) -> Timings:
    try:
        timings = codec.read_timings(LocalStore(path.parent), path.name.split(".")[1])
    except OSError as error:
        raise CorruptError(visible(str(path)), expected="timings", found=f"{error.strerror or error}") from error
    if timings is None:
        raise CheckpointNotFound(visible(str(path)), expected="the timings of a save", found="no such file any more")
    return timings


def _files(directory: Path) -> Files:
    """Empty where the directory cannot be listed."""
    found: Files = {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def step_of(name: str) -> int | None:
    """The step that a directory's name gives, None if it gives none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory itself holds files of a checkpoint, complete or not."""
    return any(map(_is_ours, _files(Path(path)))) or os.path.lexists(Path(path) / INDEX_NAME)


def _is_ours(name: str) -> bool:
    known = parse_shard_name(name) or parse_progress_name(name) or _TIMINGS.fullmatch(name)
    return name == INDEX_NAME or known is not None


def scan(run: str | os.PathLike[str], *, cache: FileCache | None = None) -> list[CheckpointInfo]:
    """Every checkpoint of a run, newest first, then what is none; a checkpoint's own path gives that one.

    Names that start with a dot, and what is no directory, are left out. A run that cannot be listed is empty.
    """
    cache = cache or FileCache(0)
    directory = Path(run)
    if is_checkpoint(directory):
        return [look(directory, cache=cache, follow=True)]
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
    except OSError:
        return []
    return sorted((look(directory / name, cache=cache) for name in names), key=_newest_first)


def _newest_first(info: CheckpointInfo) -> tuple[bool, bool, int, int, str]:
    return info.status == "foreign", info.step is None, -(info.step or 0), -(info.created_ns or 0), info.name


def look(path: str | os.PathLike[str], *, cache: FileCache | None = None, follow: bool = False) -> CheckpointInfo:
    """What one directory is.

    Args:
        follow: looks behind a symbolic link: for paths that a person gave, not for what stands in a run.
    """
    cache = cache or FileCache(0)
    directory = Path(path)
    name = directory.name or str(directory)
    if directory.is_symlink() and not follow:
        return CheckpointInfo(name, str(directory), "foreign", error="a symbolic link, which is not followed")
    files = _files(directory)
    if os.path.lexists(directory / INDEX_NAME):
        try:
            summary = cache.get(directory / INDEX_NAME, _summarize)
        except TreeckptError as error:
            return CheckpointInfo(name, str(directory), "corrupt", step_of(name), error=str(error))
        return _with_index(directory, name, summary, files, cache)
    if any(map(_is_ours, files)) or (step_of(name) is not None and _is_empty(directory)):
        return _without_index(directory, name, files, cache)
    error = "no checkpoint: neither an index nor shards" if directory.is_dir() else "not a directory"
    return CheckpointInfo(name, str(directory), "foreign", error=error)


def _is_empty(directory: Path) -> bool:
    try:
        return not any(directory.iterdir())
    except OSError:
        return False


def _summarize(path: Path) -> _Summary:
    index = read_index(path.parent)
    sizes = tuple((file.name, file.header + file.nbytes) for file in index.file_list)
    return _Summary(index.save_id, index.step, index.world, len(index.leaves), index.nbytes, index.created_ns, sizes)


def _took(path: Path) -> tuple[float, str | None]:
    """Seconds that a save took, and its error."""
    timings = _read_timings(path)
    return profile_of(timings).seconds, timings.error


def _with_index(directory: Path, name: str, summary: _Summary, files: Files, cache: FileCache) -> CheckpointInfo:
    seconds = None
    with contextlib.suppress(TreeckptError):  # timings are a record beside the checkpoint, not part of its state
        seconds, _ = cache.get(_timings_file(directory, files, summary.save_id), _took)
    problem = _shards_problem(summary, files)
    return CheckpointInfo(
        name=name,
        path=str(directory),
        status="complete" if problem is None else "corrupt",
        step=summary.step if summary.step is not None else step_of(name),
        save_id=summary.save_id,
        world=summary.world,
        leaves=summary.leaves,
        nbytes=summary.nbytes,
        created_ns=summary.created_ns,
        seconds=seconds,
        error=problem,
    )


def _shards_problem(summary: _Summary, files: Files) -> str | None:
    bad: list[str] = []
    for shard, size in summary.sizes:
        if shard not in files:
            bad.append(f"{shard} is missing")
        elif files[shard].st_size != size:
            bad.append(f"{shard} has {files[shard].st_size} bytes instead of {size}")
    return f"{len(bad)} of {len(summary.sizes)} shards are not as saved: {bad[0]}" if bad else None


def _without_index(directory: Path, name: str, files: Files, cache: FileCache) -> CheckpointInfo:
    shards = {n: parsed for n in files if (parsed := parse_shard_name(n)) is not None}
    newest = max(shards, key=lambda n: files[n].st_mtime_ns, default=None)
    text, seconds = "no index: the save is under way, or never finished", None
    with contextlib.suppress(TreeckptError):
        seconds, error = cache.get(_timings_file(directory, files, None), _took)
        text = f"no index: the save failed: {error}" if error else text
    return CheckpointInfo(
        name=name,
        path=str(directory),
        status="partial",
        step=step_of(name),
        save_id=shards[newest][0] if newest else None,
        world=shards[newest][2] if newest else None,
        nbytes=sum(files[n].st_size for n in shards),
        created_ns=min((s.st_mtime_ns for s in files.values()), default=None),
        seconds=seconds,
        error=text,
    )
